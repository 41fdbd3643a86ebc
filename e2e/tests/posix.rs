//! The suites others wrote, on a real mount.
#![cfg(feature = "live")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::path::Path;
use std::process::Command;

use hither_e2e::{Cluster, run};

#[test]
fn pjdfstest_passes() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let at = cluster.mount("m", "preflabels=zone=a,allow_other");
    let binary = std::env::var("PJDFSTEST_BIN").expect("e2e/run.sh installs pjdfstest");
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("pjdfstest.toml");
    let done = Command::new(binary)
        .arg("-c")
        .arg(config)
        .arg("-p")
        .arg(&at)
        .current_dir(&at)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    let failed: Vec<&str> = text
        .lines()
        .filter(|line| line.ends_with("FAILED"))
        .collect();
    let summary = text
        .lines()
        .find(|line| line.starts_with("Summary"))
        .unwrap_or("no summary");
    println!("{summary}");
    assert!(failed.is_empty(), "{summary}\n{}", failed.join("\n"));
    assert!(done.status.success(), "{text}");
}

#[test]
fn fio_verifies_what_it_wrote() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let at = cluster.mount("m", "preflabels=zone=a");
    for (name, rw, bs, direct) in [
        ("sequential", "write", "1M", "0"),
        ("random", "randwrite", "4k", "0"),
        ("direct", "randwrite", "64k", "1"),
        ("mixed", "randrw", "16k", "0"),
    ] {
        // fio leaves its state where it runs.
        run(Command::new("fio").current_dir(cluster.dir()).args([
            &format!("--name={name}"),
            &format!("--directory={}", at.display()),
            &format!("--rw={rw}"),
            &format!("--bs={bs}"),
            &format!("--direct={direct}"),
            "--size=24M",
            "--numjobs=2",
            "--ioengine=psync",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--fsync=200",
            "--end_fsync=1",
            "--minimal",
        ]));
    }
}
