//! Connections between two processes are cut while each reaches everybody else.
#![cfg(feature = "live")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![allow(
    clippy::disallowed_methods,
    reason = "tests of real processes measure real time"
)]

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use hither_e2e::load::under_load;
use hither_e2e::{Cluster, Ends, Role, Setup, Store, drop_caches, eventually, pattern, servers_of};

fn cut_between(cluster: &Cluster, one: &str, other: &str) {
    cluster.network().cut(&[
        Ends {
            from_group: GROUP_ONE,
            to: cluster.address_of(other),
        },
        Ends {
            from_group: GROUP_OTHER,
            to: cluster.address_of(one),
        },
    ]);
}

/// Two members of every chain cannot reach each other. Where a third can stand between them no
/// member is given up; where there is none, one leaves and comes back.
fn members_are_cut_off_from_each_other(zones: &str) {
    let mut cluster = Setup::new(zones, 1).own_network().up();
    cluster.regroup("cs-a1", GROUP_ONE);
    cluster.regroup("cs-b1", GROUP_OTHER);
    cluster.wait_whole();
    let mounts: Vec<PathBuf> = ["a", "b"]
        .iter()
        .map(|zone| cluster.mount(zone, &format!("preflabels=zone={zone}")))
        .collect();
    under_load(&mounts, |more| {
        cut_between(&cluster, "cs-a1", "cs-b1");
        more(60);
        if zones.matches(',').count() > 1 {
            let groups = &cluster.admin(&["status"])["groups"];
            assert_eq!(
                groups["whole"], groups["total"],
                "a chain goes round the cut"
            );
        }
        cluster.network().heal();
        more(40);
    });
    cluster.wait_whole();
}

#[test]
fn the_two_members_of_a_chain_are_cut_off_from_each_other() {
    members_are_cut_off_from_each_other("a,b");
}

#[test]
fn two_of_three_members_are_cut_off_from_each_other() {
    members_are_cut_off_from_each_other("a,b,c");
}

/// The preferred server is there for everybody but one mount: that one reads and writes by
/// another within a second and without an error, and comes back when it can.
#[test]
fn the_preferred_server_is_cut_off_from_the_mount_only() {
    let mut cluster = Setup::new("a,b", 1).own_network().up();
    let options = "preflabels=zone=a,kernelReadAhead=0,readAhead=0,allow_other";
    let at = cluster.mount_as("m", options, Some(GROUP_ONE));
    let other = cluster.mount("other", "preflabels=zone=a");
    fs::write(at.join("f"), pattern(7, 0, 8_000_000)).unwrap();
    rustix::fs::sync();
    drop_caches();
    let file = fs::File::open(at.join("f")).unwrap();
    let mut buffer = vec![0; 100_000];
    for n in 0..80u64 {
        if n == 20 {
            cluster.network().cut(&[Ends {
                from_group: GROUP_ONE,
                to: cluster.address_of("cs-a1"),
            }]);
        }
        let begun = Instant::now();
        file.read_exact_at(&mut buffer, n * 100_000).unwrap();
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(1), "block {n}: {took:?}");
        assert!(buffer == pattern(7, n * 100_000, 100_000));
    }
    // Writes find another way too, and the server stays a member of everything.
    for n in 0..5u64 {
        let mut written = fs::File::create(at.join(format!("w{n}"))).unwrap();
        written.write_all(&pattern(n, 0, 300_000)).unwrap();
        written.sync_all().unwrap();
        assert!(fs::read(other.join(format!("w{n}"))).unwrap() == pattern(n, 0, 300_000));
    }
    let status = cluster.admin(&["status"]);
    assert_eq!(
        status["groups"]["whole"], status["groups"]["total"],
        "{status}"
    );
    assert_eq!(
        servers_of(&other.join("f"))[0]["suspect"],
        false,
        "only that mount minds"
    );
    assert_eq!(servers_of(&at.join("f"))[0]["zone"], "b");
    cluster.network().heal();
    eventually(
        Duration::from_secs(30),
        "the preferred server is first again",
        || {
            let servers = servers_of(&at.join("f"));
            servers[0]["zone"] == "a" && servers[0]["suspect"] == false
        },
    );
}

/// The metadata server cannot reach a chunkserver that everybody else reaches, and a writer is
/// evicted: what it wrote was locked until the connection was mended.
#[test]
fn a_chunkserver_is_cut_off_from_the_metadata_server_only() {
    let mut cluster = Setup::new("a,b", 1).store(Store::Etcd).own_network().up();
    for name in ["mds", "mds-2"] {
        cluster.regroup(name, GROUP_ONE);
    }
    assert!(cluster.name_of(Role::Mds).starts_with("mds"));
    cluster.wait_whole();
    let writer = cluster.mount("writer", "");
    let reader = cluster.mount("reader", "");
    let mut file = fs::File::create(writer.join("f")).unwrap();
    file.write_all(&pattern(3, 0, 300_000)).unwrap();
    file.sync_all().unwrap();
    file.write_all(&pattern(3, 300_000, 4_000_000)).unwrap();
    cluster.network().cut(&[Ends {
        from_group: GROUP_ONE,
        to: cluster.address_of("cs-b1"),
    }]);
    let sessions = cluster.admin(&["session", "ls"]);
    let of_writer = |s: &&serde_json::Value| s["mountPoint"] == writer.display().to_string();
    let session = sessions.as_array().unwrap().iter().find(of_writer).unwrap();
    let _ = cluster.admin(&["session", "evict", &session["session"].to_string()]);
    eventually(Duration::from_secs(120), "others get the file", || {
        let read = fs::read(reader.join("f"));
        read.is_ok_and(|bytes| bytes.starts_with(&pattern(3, 0, 300_000)))
    });
    let groups = &cluster.admin(&["status"])["groups"];
    assert_ne!(groups["whole"], groups["total"], "some went on without it");
    cluster.network().heal();
    cluster.wait_whole();
}

/// Group ids that tell the two ends from everybody else.
const GROUP_ONE: u32 = 47_001;
const GROUP_OTHER: u32 = 47_002;
