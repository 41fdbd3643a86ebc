//! A volume's life through the CSI driver, on a real cluster with real mounts.
#![cfg(feature = "live")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![allow(
    clippy::disallowed_methods,
    reason = "tests of real processes measure real time"
)]

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use hither_csi::rpc::csi::NodeStageVolumeRequest;
use hither_csi::rpc::csi::volume_capability::AccessType;
use hither_csi::rpc::csi::volume_capability::access_mode::Mode;
use hither_e2e::csi::{Driver, Part, capability, code, insist};
use hither_e2e::{Cluster, eventually, pattern, write_stable};
use tonic::Code;

const SIZE: i64 = 64 << 20;
const RWX: Mode = Mode::MultiNodeMultiWriter;

/// Made, expanded, staged, published to two pods, used up to its quota, and gone without a trace.
#[test]
fn a_life() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let driver = Driver::start(&cluster, &[]);
    let volume = driver.create("pvc-1", SIZE).unwrap();
    assert_eq!(volume.capacity_bytes, SIZE);
    assert!(volume.volume_context.is_empty(), "nothing that can change");
    assert_eq!(driver.create("pvc-1", SIZE).unwrap(), volume);
    assert_eq!(code(driver.create("pvc-1", 2 * SIZE)), Code::AlreadyExists);
    let handle = volume.volume_id.as_str();

    driver.stage(handle, RWX).unwrap();
    driver.stage(handle, RWX).unwrap();
    assert_eq!(
        code(driver.stage(handle, Mode::SingleNodeWriter)),
        Code::AlreadyExists
    );
    let a = driver.publish(handle, "a", RWX, false).unwrap();
    driver.publish(handle, "a", RWX, false).unwrap();
    assert_eq!(
        code(driver.publish(handle, "a", RWX, true)),
        Code::AlreadyExists
    );
    let b = driver.publish(handle, "b", RWX, true).unwrap();
    assert_eq!(driver.mounts().len(), 3, "one superblock and two binds");

    write_stable(&a.join("f"), &pattern(1, 0, 3_000_000));
    assert!(fs::read(b.join("f")).unwrap() == pattern(1, 0, 3_000_000));
    assert!(fs::write(b.join("g"), "x").is_err(), "a read-only target");
    let (total, used) = driver.stats(handle, &a).unwrap();
    assert_eq!((total, used), (SIZE, 3_000_000));
    assert_eq!(
        code(driver.stats(handle, &driver.kubelet(""))),
        Code::NotFound
    );
    assert_eq!(driver.expand(handle, 2 * SIZE).unwrap(), 2 * SIZE);
    assert_eq!(driver.expand(handle, SIZE).unwrap(), 2 * SIZE);
    eventually(
        Duration::from_secs(5),
        "the mount shows the new size",
        || driver.stats(handle, &a).unwrap().0 == 2 * SIZE,
    );
    let standing = &driver.served()[0];
    assert_eq!(standing.preferred, "node=n1;zone=a", "{standing:?}");

    driver.unpublish(handle, "b").unwrap();
    driver.unpublish(handle, "a").unwrap();
    driver.unpublish(handle, "a").unwrap();
    driver.unstage(handle).unwrap();
    driver.unstage(handle).unwrap();
    driver.assert_nothing_left();
    assert_eq!(
        code(driver.publish(handle, "a", RWX, false)),
        Code::FailedPrecondition
    );
    driver.delete(handle).unwrap();
    driver.delete(handle).unwrap();
    assert_eq!(code(driver.stage(handle, RWX)), Code::NotFound);
    driver.assert_nothing_left();
    let root = cluster.mount("root", "");
    eventually(Duration::from_secs(10), "the trash is emptied", || {
        fs::read_dir(root.join("volumes/.trash"))
            .unwrap()
            .next()
            .is_none()
    });
    cluster.unmount(&root);
}

/// The plugin makes itself known to the kubelet.
#[test]
fn the_plugin_registers_itself() {
    let cluster = Cluster::up("a", 1, &["--class", "A"]);
    let driver = Driver::start(&cluster, &[]);
    let known = driver.registered().unwrap();
    assert_eq!(
        (known.r#type.as_str(), known.name.as_str()),
        ("CSIPlugin", "csi.hither.dev")
    );
    let socket = driver.socket(Part::Node).display().to_string();
    assert_eq!(known.endpoint, socket);
}

/// A template that is changed reaches the mount that stands.
#[test]
fn preferred_labels_change_without_a_remount() {
    let cluster = Cluster::up("a,b", 1, &[]);
    let driver = Driver::start(&cluster, &[]);
    let handle = driver.create("template", SIZE).unwrap().volume_id;
    driver.stage(&handle, RWX).unwrap();
    let at = driver.publish(&handle, "a", RWX, false).unwrap();
    let open = fs::File::create(at.join("open")).unwrap();
    driver
        .modify(&handle, "preferredLabels", "zone=b; zone={zone}")
        .unwrap();
    eventually(Duration::from_secs(60), "the mount prefers others", || {
        driver.served()[0].preferred == "zone=b;zone=a"
    });
    open.sync_all().unwrap();
    drop(open);
    insist(|| driver.unpublish(&handle, "a")).unwrap();
    insist(|| driver.unstage(&handle)).unwrap();
    driver.assert_nothing_left();
}

/// A pod's group is given to the volume's root once, and a directory of the administrator's is
/// mounted and never removed.
#[test]
fn groups_and_directories_that_are_there() {
    let mut cluster = Cluster::up("a", 1, &["--class", "A"]);
    let driver = Driver::start(&cluster, &[]);
    let handle = driver.create("group", SIZE).unwrap().volume_id;
    let stage = |handle: &str, group: &str, directory: &str| {
        let mut capability = capability(RWX);
        if let Some(AccessType::Mount(mount)) = &mut capability.access_type {
            mount.volume_mount_group = group.into();
        }
        let directory =
            (!directory.is_empty()).then(|| ("subdirectory".to_owned(), directory.to_owned()));
        driver.stage_as(NodeStageVolumeRequest {
            volume_id: handle.into(),
            volume_capability: Some(capability),
            volume_context: directory.into_iter().collect(),
            ..Default::default()
        })
    };
    for group in ["2000", "3000"] {
        stage(&handle, group, "").unwrap();
        let root = fs::metadata(driver.staging(&handle)).unwrap();
        assert_eq!((root.gid(), root.mode() & 0o7777), (2000, 0o2777));
        driver.unstage(&handle).unwrap();
    }
    let root = cluster.mount("root", "");
    fs::create_dir_all(root.join("mine/below")).unwrap();
    write_stable(&root.join("mine/f"), &pattern(1, 0, 1000));
    let (id, _) = handle.split_once('.').unwrap();
    let given = format!("{id}.by-hand");
    assert_eq!(code(stage(&given, "", "/none")), Code::NotFound);
    stage(&given, "", "/mine").unwrap();
    let at = driver.publish(&given, "a", RWX, false).unwrap();
    assert!(fs::read(at.join("f")).unwrap() == pattern(1, 0, 1000));
    driver.unpublish(&given, "a").unwrap();
    driver.unstage(&given).unwrap();
    driver.delete(&given).unwrap();
    assert!(root.join("mine/f").exists(), "it is the administrator's");
    fs::create_dir(root.join("volumes/theirs")).unwrap();
    assert_eq!(
        code(driver.delete(&format!("{id}.theirs"))),
        Code::FailedPrecondition
    );
    cluster.unmount(&root);
    driver.assert_nothing_left();
}

/// A cluster that does not answer: no request hangs, and a pod can always end.
#[test]
fn a_silent_cluster_keeps_nobody() {
    let cluster = Cluster::up("a", 1, &["--class", "A"]);
    let driver = Driver::start(&cluster, &[]);
    let handle = driver.create("silent", SIZE).unwrap().volume_id;
    let other = driver.create("other", SIZE).unwrap().volume_id;
    driver.stage(&handle, RWX).unwrap();
    let at = driver.publish(&handle, "a", RWX, false).unwrap();
    for name in ["manager", "cs-a1"] {
        cluster.playground("pause", name);
    }
    let begun = Instant::now();
    let answer = driver.stats(&handle, &at);
    assert!(answer.is_ok() || code(answer) == Code::DeadlineExceeded);
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
    insist(|| driver.unpublish(&handle, "a")).unwrap();
    insist(|| driver.unstage(&handle)).unwrap();
    assert!(
        driver.stage(&other, RWX).is_err(),
        "nobody says what to mount"
    );
    assert!(
        begun.elapsed() < Duration::from_secs(120),
        "{:?}",
        begun.elapsed()
    );
    for name in ["manager", "cs-a1"] {
        cluster.playground("resume", name);
    }
    insist(|| driver.unstage(&other)).unwrap();
    driver.assert_nothing_left();
}

/// The mount daemon was replaced while the cluster is away: repair is at it all the time, and still
/// a pod can end at once.
#[test]
fn a_pod_ends_while_its_mount_cannot_be_repaired() {
    let cluster = Cluster::up("a", 1, &["--class", "A"]);
    let mut driver = Driver::start(&cluster, &[]);
    let handle = driver.create("silent", SIZE).unwrap().volume_id;
    driver.stage(&handle, RWX).unwrap();
    driver.publish(&handle, "a", RWX, false).unwrap();
    cluster.playground("pause", "manager");
    driver.kill(Part::Mounter);
    driver.run(Part::Mounter, None);
    eventually(Duration::from_secs(30), "repair is at it", || {
        driver.log(Part::Node).contains("mounting anew")
    });
    let begun = Instant::now();
    driver.unpublish(&handle, "a").unwrap();
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
    insist(|| driver.unstage(&handle)).unwrap();
    cluster.playground("resume", "manager");
    driver.assert_nothing_left();
}

/// The limit of a volume holds, for bytes and for files.
#[test]
fn quotas_hold() {
    let cluster = Cluster::up("a", 1, &["--class", "A"]);
    let driver = Driver::start(&cluster, &[]);
    let volume = driver.create("small", 1 << 20).unwrap();
    let handle = volume.volume_id.as_str();
    driver.modify(handle, "inodeQuota", "3").unwrap();
    assert_eq!(
        code(driver.modify(handle, "class", "none-such")),
        Code::InvalidArgument
    );
    assert_eq!(
        code(driver.modify(handle, "size", "1")),
        Code::InvalidArgument
    );
    driver.stage(handle, RWX).unwrap();
    let at = driver.publish(handle, "a", RWX, false).unwrap();
    for n in 0..3 {
        fs::write(at.join(format!("f{n}")), "").unwrap();
    }
    assert!(fs::write(at.join("f3"), "").is_err(), "a fourth file");
    let large = pattern(1, 0, 3 << 20);
    let written =
        fs::write(at.join("f0"), &large).and_then(|()| fs::File::open(at.join("f0"))?.sync_all());
    assert!(written.is_err(), "three times the volume's size");
    driver.unpublish(handle, "a").unwrap();
    driver.unstage(handle).unwrap();
    driver.delete(handle).unwrap();
    driver.assert_nothing_left();
}

/// One pod only, and the second is refused.
#[test]
fn a_volume_of_one_pod() {
    let cluster = Cluster::up("a", 1, &["--class", "A"]);
    let driver = Driver::start(&cluster, &[]);
    let handle = driver.create("rwop", SIZE).unwrap().volume_id;
    let rwop = Mode::SingleNodeSingleWriter;
    driver.stage(&handle, rwop).unwrap();
    driver.publish(&handle, "a", rwop, false).unwrap();
    driver.publish(&handle, "a", rwop, false).unwrap();
    assert_eq!(
        code(driver.publish(&handle, "b", rwop, false)),
        Code::FailedPrecondition
    );
    driver.unpublish(&handle, "b").unwrap();
    driver.unpublish(&handle, "a").unwrap();
    driver.publish(&handle, "b", rwop, false).unwrap();
    driver.unpublish(&handle, "b").unwrap();
    driver.unstage(&handle).unwrap();
    driver.assert_nothing_left();
}

/// A volume of one node is on one node: another is refused while the first one renews its session,
/// gets it once that was not heard of for its lease, and the first one then writes nothing more.
#[test]
fn a_volume_of_one_node_is_fenced() {
    let cluster = Cluster::up("a,b", 1, &[]);
    let mut first = Driver::start(&cluster, &[]);
    let second = Driver::start_on("n2", &cluster, &[]);
    let rwo = Mode::SingleNodeWriter;
    let handle = first.create("rwo", SIZE).unwrap().volume_id;
    first.stage(&handle, rwo).unwrap();
    let at = first.publish(&handle, "a", rwo, false).unwrap();
    write_stable(&at.join("f"), &pattern(1, 0, 100_000));
    let refused = second.stage(&handle, rwo).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("on n1"), "{refused}");
    assert!(second.mounts().is_empty() && second.records().is_empty());

    // The node goes silent, without anybody knowing whether it still writes.
    let open = fs::File::options().append(true).open(at.join("f")).unwrap();
    first.pause(Part::Mounter, true);
    assert_eq!(code(second.stage(&handle, rwo)), Code::FailedPrecondition);
    eventually(Duration::from_secs(60), "the lease ends", || {
        second.stage(&handle, rwo).is_ok()
    });
    let there = second.publish(&handle, "b", rwo, false).unwrap();
    assert!(fs::read(there.join("f")).unwrap() == pattern(1, 0, 100_000));
    write_stable(&there.join("f"), &pattern(2, 0, 50_000));

    // It comes back, and finds that it has nothing any more. The pod's own mount stays dead.
    first.pause(Part::Mounter, false);
    let late =
        std::os::unix::fs::FileExt::write_at(&open, b"late", 0).and_then(|_| open.sync_all());
    assert!(late.is_err(), "written beside the new owner");
    drop(open);
    assert!(fs::write(at.join("g"), "late").is_err());
    let found = fs::read(there.join("f")).unwrap();
    assert!(found[..50_000] == pattern(2, 0, 50_000) && !there.join("g").exists());

    // Given back, it may be anywhere again.
    insist(|| second.unpublish(&handle, "b")).unwrap();
    insist(|| second.unstage(&handle)).unwrap();
    insist(|| first.unpublish(&handle, "a")).unwrap();
    insist(|| first.unstage(&handle)).unwrap();
    first.stage(&handle, rwo).unwrap();
    let at = first.publish(&handle, "a", rwo, false).unwrap();
    // Its own daemon dies: what nobody serves is no reason to wait.
    first.kill(Part::Mounter);
    first.run(Part::Mounter, None);
    let begun = Instant::now();
    eventually(Duration::from_secs(30), "the mount is made anew", || {
        fs::read(at.join("f")).is_ok()
    });
    assert!(
        begun.elapsed() < Duration::from_secs(14),
        "it waited for its own lease"
    );
    insist(|| first.unpublish(&handle, "a")).unwrap();
    insist(|| first.unstage(&handle)).unwrap();
    first.assert_nothing_left();
    second.assert_nothing_left();
}

/// The plugin is killed and started anew while a pod writes: the pod notices nothing.
#[test]
fn killing_the_plugin_is_invisible() {
    let cluster = Cluster::up("a,b", 1, &[]);
    let mut driver = Driver::start(&cluster, &[]);
    let handle = driver.create("busy", SIZE).unwrap().volume_id;
    driver.stage(&handle, RWX).unwrap();
    let at = driver.publish(&handle, "a", RWX, false).unwrap();
    let file = fs::File::create(at.join("open")).unwrap();
    for n in 0..3u64 {
        driver.kill(Part::Node);
        write_stable(&at.join(format!("f{n}")), &pattern(n, 0, 1_000_000));
        driver.run(Part::Node, None);
        insist(|| driver.stage(&handle, RWX)).unwrap();
        insist(|| driver.publish(&handle, "a", RWX, false)).unwrap();
        assert_eq!(driver.mounts().len(), 2, "nothing is stacked");
        assert!(fs::read(at.join(format!("f{n}"))).unwrap() == pattern(n, 0, 1_000_000));
    }
    file.sync_all().unwrap();
    // The kubelet takes a volume away when its pods are gone; until then the daemon serves it.
    drop(file);
    driver.unpublish(&handle, "a").unwrap();
    driver.unstage(&handle).unwrap();
    driver.assert_nothing_left();
}

/// The mount daemon dies: repair makes the mounts anew by itself, and unpublish works at any time.
#[test]
fn dead_mounts_are_repaired_and_can_be_taken_away() {
    let cluster = Cluster::up("a,b", 1, &[]);
    let mut driver = Driver::start(&cluster, &[]);
    let handle = driver.create("repaired", SIZE).unwrap().volume_id;
    driver.stage(&handle, RWX).unwrap();
    let at = driver.publish(&handle, "a", RWX, false).unwrap();
    write_stable(&at.join("f"), &pattern(5, 0, 100_000));
    driver.kill(Part::Mounter);
    assert!(fs::read(at.join("f")).is_err(), "nobody serves");
    driver.run(Part::Mounter, None);
    eventually(
        Duration::from_secs(30),
        "the pod's mount is made anew",
        || fs::read(at.join("f")).is_ok_and(|bytes| bytes == pattern(5, 0, 100_000)),
    );
    assert_eq!(driver.mounts().len(), 2, "nothing is stacked");
    // Dead again, and nobody there to repair it.
    driver.kill(Part::Mounter);
    insist(|| driver.unpublish(&handle, "a")).unwrap();
    insist(|| driver.unstage(&handle)).unwrap();
    driver.run(Part::Mounter, None);
    driver.assert_nothing_left();
    insist(|| driver.delete(&handle)).unwrap();
}
