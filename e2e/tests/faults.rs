//! Processes die and hang under a checksum-verified load: nobody gets an error, nothing is lost.
#![cfg(feature = "live")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![allow(
    clippy::disallowed_methods,
    reason = "tests of real processes measure real time"
)]

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use hither_e2e::{Cluster, eventually, pattern};

/// Writes files, fsyncs and reads them back until told to stop; each is verified.
fn load(mount: &Path, worker: u64, stop: &AtomicBool, done: &AtomicU64) {
    let base = mount.join(format!("w{worker}"));
    fs::create_dir_all(&base).unwrap();
    let mut n = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let path = base.join(format!("f{}", n % 40));
        let size = 500 + usize::try_from(n * 7919 % 200_000).unwrap();
        let id = worker << 32 | n;
        let mut file = fs::File::create(&path).unwrap();
        file.write_all(&pattern(id, 0, size)).unwrap();
        file.sync_all().unwrap();
        drop(file);
        assert!(
            fs::read(&path).unwrap() == pattern(id, 0, size),
            "{} differs",
            path.display()
        );
        n += 1;
        done.fetch_add(1, Ordering::Relaxed);
    }
}

/// Runs the load on all mounts while `fault` happens; checks that it goes on afterwards.
fn under_load(mounts: &[PathBuf], fault: impl FnOnce(&dyn Fn(u64))) {
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let workers: Vec<_> = mounts
            .iter()
            .zip(1u64..)
            .map(|(mount, n)| {
                let (stop, done) = (&stop, &done);
                scope.spawn(move || load(mount, n, stop, done))
            })
            .collect();
        let more = |count: u64| {
            let from = done.load(Ordering::Relaxed);
            eventually(Duration::from_secs(60), "the load goes on", || {
                done.load(Ordering::Relaxed) >= from + count
                    || workers
                        .iter()
                        .any(std::thread::ScopedJoinHandle::is_finished)
            });
        };
        more(20);
        fault(&more);
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.join().unwrap();
        }
    });
}

#[test]
fn a_chunkserver_is_killed_and_comes_back() {
    let mut cluster = Cluster::up("a,b,c", 1, &[]);
    let mounts: Vec<PathBuf> = ["a", "b", "c"]
        .iter()
        .map(|zone| cluster.mount(zone, &format!("preflabels=zone={zone}")))
        .collect();
    under_load(&mounts, |more| {
        cluster.playground("kill", "cs-b1");
        more(60);
        cluster.playground("start", "cs-b1");
        cluster.wait_whole();
        more(60);
    });
}

#[test]
fn a_chunkserver_hangs_and_goes_on() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let mounts: Vec<PathBuf> = ["a", "b"]
        .iter()
        .map(|zone| cluster.mount(zone, &format!("preflabels=zone={zone}")))
        .collect();
    under_load(&mounts, |more| {
        cluster.playground("pause", "cs-a1");
        more(40);
        cluster.playground("resume", "cs-a1");
        cluster.wait_whole();
        more(40);
    });
}

/// The process that carries the store, the manager and the metadata rank dies: mounts go on, and
/// changes that were answered early are kept.
#[test]
fn the_manager_is_killed_and_comes_back() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let mounts: Vec<PathBuf> = ["a", "b"]
        .iter()
        .map(|zone| cluster.mount(zone, &format!("preflabels=zone={zone}")))
        .collect();
    under_load(&mounts, |more| {
        for n in 0..3 {
            // Answered early, and not yet in the store when the process dies.
            for k in 0..50 {
                fs::write(mounts[0].join(format!("early-{n}-{k}")), pattern(k, 0, 100)).unwrap();
            }
            cluster.playground("kill", "manager");
            cluster.playground("start", "manager");
            more(30);
            for k in 0..50 {
                let seen = fs::read(mounts[1].join(format!("early-{n}-{k}"))).unwrap();
                assert!(seen == pattern(k, 0, 100));
            }
        }
    });
}

/// Everything is killed at once; what fsync answered is there afterwards.
#[test]
fn what_fsync_answered_survives_the_death_of_every_process() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let at = cluster.mount("m", "preflabels=zone=a,timeout=60s");
    for n in 0..50u64 {
        let mut file = fs::File::create(at.join(format!("f{n}"))).unwrap();
        file.write_all(&pattern(n, 0, 10_000 + usize::try_from(n).unwrap() * 3000))
            .unwrap();
        file.sync_all().unwrap();
    }
    for name in ["cs-a1", "cs-b1", "manager"] {
        cluster.playground("kill", name);
    }
    for name in ["manager", "cs-a1", "cs-b1"] {
        cluster.playground("start", name);
    }
    let other = cluster.mount("other", "preflabels=zone=b,timeout=60s");
    for n in 0..50u64 {
        let expected = pattern(n, 0, 10_000 + usize::try_from(n).unwrap() * 3000);
        assert!(
            fs::read(other.join(format!("f{n}"))).unwrap() == expected,
            "file {n}"
        );
    }
}

/// A cluster that is gone: operations fail after the configured time, and the mount can always be
/// taken away; a cluster that comes back is used again.
#[test]
fn a_dead_cluster_gives_errors_in_time_and_can_be_unmounted() {
    let mut cluster = Cluster::up("a", 1, &[]);
    let at = cluster.mount("m", "timeout=2s");
    // Not synced: its mount still has it when the servers have lost it.
    fs::write(at.join("f"), pattern(1, 0, 1000)).unwrap();
    for name in ["manager", "cs-a1"] {
        cluster.playground("kill", name);
    }
    let error = fs::create_dir(at.join("d")).unwrap_err();
    assert_eq!(
        error.raw_os_error(),
        Some(rustix::io::Errno::TIMEDOUT.raw_os_error())
    );
    for name in ["manager", "cs-a1"] {
        cluster.playground("start", name);
    }
    eventually(Duration::from_secs(30), "the mount works again", || {
        fs::create_dir(at.join("d2")).is_ok()
    });
    assert!(fs::read(at.join("f")).unwrap() == pattern(1, 0, 1000));
    for name in ["manager", "cs-a1"] {
        cluster.playground("kill", name);
    }
    cluster.unmount(&at);
}
