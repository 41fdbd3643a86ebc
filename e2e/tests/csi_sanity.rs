//! The CSI suite of Kubernetes, on a real cluster with real mounts.
#![cfg(feature = "live")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs;
use std::process::Command;

use hither_e2e::Cluster;
use hither_e2e::csi::{Driver, Part};

/// What the driver does not claim: the suite skips exactly these.
const NOT_CLAIMED: [&str; 10] = [
    "Snapshot",
    "GroupController",
    "source snapshot",
    "source volume",
    // No attachment: `attachRequired` is false. The life cycle here is that with one.
    "ControllerPublishVolume",
    "ControllerUnpublishVolume",
    "[Controller Server] volume lifecycle",
    "NodeExpandVolume",
    "NodeGetStorageHealth",
    // Of the controller; the node's is claimed.
    "VolumeHealth [Controller Server]",
];

/// `HITHER_CSI_SANITY` names the suite's program; `e2e/run.sh` finds or builds it.
#[test]
fn the_suite_passes() {
    let cluster = Cluster::up("a,b", 1, &[]);
    let driver = Driver::start(&cluster, &[]);
    let dir = cluster.dir();
    let file = |name: &str, text: &str| {
        let path = dir.join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let pairs = driver.secrets().into_iter();
    let pairs: Vec<String> = pairs.map(|(k, v)| format!("  {k}: \"{v}\"\n")).collect();
    let of_requests = [
        "CreateVolume",
        "DeleteVolume",
        "ControllerValidateVolumeCapabilities",
        "ControllerExpandVolume",
        "ControllerModifyVolume",
        "NodeStageVolume",
        "NodePublishVolume",
    ];
    let secrets = of_requests.map(|of| format!("{of}Secret:\n{}", pairs.concat()));
    let report = dir.join("report.xml");
    let at = |name: &str| driver.kubelet(name).display().to_string();
    let socket = |part| format!("unix://{}", driver.socket(part).display());
    let mut suite = Command::new(std::env::var("HITHER_CSI_SANITY").unwrap());
    suite.args(["--csi.endpoint", &socket(Part::Node)]);
    suite.args(["--csi.controllerendpoint", &socket(Part::Controller)]);
    suite.args([
        "--csi.mountdir",
        &at("target"),
        "--csi.stagingdir",
        &at("staging"),
    ]);
    suite.args(["--csi.secrets", &file("secrets.yaml", &secrets.concat())]);
    let parameters = file("parameters.yaml", "cluster: demo\n");
    suite.args(["--csi.testvolumeparameters", &parameters]);
    let mutable = file("mutable.yaml", "inodeQuota: \"1000\"\n");
    suite.args(["--csi.testvolumemutableparameters", &mutable]);
    suite.args(["--csi.testvolumesize", "1073741824"]);
    suite.args(["--csi.testvolumeexpandsize", "2147483648"]);
    suite
        .args(["--ginkgo.no-color", "--ginkgo.junit-report"])
        .arg(&report);
    let done = suite.output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{said}");
    let report = fs::read_to_string(report).unwrap();
    for case in report.split("<testcase ").skip(1) {
        let name = case.split('"').nth(1).unwrap_or_default();
        let skipped = case.contains("status=\"skipped\"");
        let known = NOT_CLAIMED.iter().any(|word| name.contains(word));
        assert!(!skipped || known, "skipped although it is claimed: {name}");
    }
    driver.assert_nothing_left();
}
