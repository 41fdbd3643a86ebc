//! The rules of preferred labels, on real mounts.
#![cfg(feature = "live")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![allow(
    clippy::disallowed_methods,
    reason = "tests of real processes measure real time"
)]

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use hither_e2e::{
    Cluster, drop_caches, eventually, locality, pattern, read_bytes, servers_of, write_stable,
};

/// Two mounts of the same files prefer different servers and do not affect each other.
#[test]
fn opposite_preferences_at_the_same_time() {
    let mut cluster = Cluster::up("a,b", 2, &[]);
    let a = cluster.mount("a", "preflabels=zone=a,clientZone=a,clientNode=pod");
    let b = cluster.mount("b", "preflabels=zone=b,clientZone=b,clientNode=pod");
    for n in 0..20u64 {
        write_stable(&a.join(format!("f{n}")), &pattern(n, 0, 300_000));
    }
    drop_caches();
    std::thread::scope(|scope| {
        for mount in [&a, &b] {
            scope.spawn(move || {
                for n in 0..20u64 {
                    let seen = fs::read(mount.join(format!("f{n}"))).unwrap();
                    assert!(seen == pattern(n, 0, 300_000));
                }
            });
        }
    });
    for mount in [&a, &b] {
        let own = read_bytes(mount, &["node", "zone"]);
        assert!(
            own > 0,
            "bytes were read from the own zone: {}",
            locality(mount)
        );
        assert_eq!(
            read_bytes(mount, &["region", "remote"]),
            0,
            "and none from elsewhere"
        );
    }
    // The ranking reorders the list and never shortens it.
    let servers = servers_of(&a.join("f0"));
    assert_eq!(servers.len(), 2);
    assert_eq!(
        (&servers[0]["zone"], &servers[1]["zone"]),
        (&"a".into(), &"b".into())
    );
    let servers = servers_of(&b.join("f0"));
    assert_eq!(
        (&servers[0]["zone"], &servers[1]["zone"]),
        (&"b".into(), &"a".into())
    );
}

/// The write chain begins at the best-ranked server: the mount itself talks to no other.
#[test]
fn writes_go_to_the_best_ranked_server_first() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    for (name, zone) in [("x", "b"), ("y", "a")] {
        let options = format!("preflabels=zone={zone},clientZone={zone},clientNode=pod");
        let at = cluster.mount(name, &options);
        write_stable(&at.join(name), &pattern(1, 0, 2_000_000));
        let report = locality(&at);
        let written = |locality: &str| {
            report["byLocality"][locality]["writeBytes"]
                .as_u64()
                .unwrap_or(0)
        };
        assert!(written("zone") >= 2_000_000, "{report}");
        assert_eq!(written("remote"), 0, "{report}");
    }
}

/// A label change takes effect without a restart, on mounts that are reading.
#[test]
fn labels_change_under_load() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let at = cluster.mount("m", "preflabels=X,clientNode=pod");
    write_stable(&at.join("f"), &pattern(3, 0, 1_000_000));
    let first = |at: &std::path::Path| servers_of(&at.join("f"))[0]["server"].as_u64().unwrap();
    let ids: Vec<u64> = cluster
        .admin(&["cs", "ls"])
        .as_array()
        .unwrap()
        .iter()
        .map(|server| server["id"].as_u64().unwrap())
        .collect();
    for id in [ids[0], ids[1], ids[0]] {
        for other in &ids {
            let change = if *other == id { "+X" } else { "-X" };
            let _ = cluster.admin(&["cs", "label", &other.to_string(), change]);
        }
        let changed = Instant::now();
        eventually(
            Duration::from_secs(1),
            "the labelled server comes first",
            || first(&at) == id,
        );
        assert!(changed.elapsed() < Duration::from_secs(1));
        drop_caches();
        assert!(fs::read(at.join("f")).unwrap() == pattern(3, 0, 1_000_000));
    }
}

/// Without any preference everything works the same.
#[test]
fn no_preference_and_one_nothing_matches() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    for (name, options) in [("plain", "ro"), ("odd", "preflabels=Z;zone=nowhere")] {
        let writer = cluster.mount(&format!("w-{name}"), "");
        fs::write(writer.join(name), pattern(5, 0, 100_000)).unwrap();
        let at = cluster.mount(name, options);
        assert!(fs::read(at.join(name)).unwrap() == pattern(5, 0, 100_000));
        assert_eq!(servers_of(&at.join(name)).len(), 2);
        if options == "ro" {
            assert!(fs::write(at.join("no"), b"x").is_err());
        }
    }
}

/// The preferred server hangs: the next bytes come within a second, without an error.
#[test]
fn a_paused_preferred_server_is_overtaken() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let at = cluster.mount("m", "preflabels=zone=a,kernelReadAhead=0,readAhead=0");
    write_stable(&at.join("f"), &pattern(7, 0, 8_000_000));
    drop_caches();
    let file = fs::File::open(at.join("f")).unwrap();
    let mut buffer = vec![0; 100_000];
    for n in 0..80u64 {
        if n == 20 {
            cluster.playground("pause", "cs-a1");
        }
        let begun = Instant::now();
        file.read_exact_at(&mut buffer, n * 100_000).unwrap();
        assert!(
            begun.elapsed() < Duration::from_secs(1),
            "block {n}: {:?}",
            begun.elapsed()
        );
        assert!(buffer == pattern(7, n * 100_000, 100_000));
    }
    cluster.playground("resume", "cs-a1");
    let report = locality(&at);
    assert!(report["hedges"].as_u64().unwrap() + report["failovers"].as_u64().unwrap() > 0);
    eventually(
        Duration::from_secs(30),
        "the preferred server wins its reader back",
        || {
            let servers = servers_of(&at.join("f"));
            servers[0]["zone"] == "a" && servers[0]["suspect"] == false
        },
    );
}
