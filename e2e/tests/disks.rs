//! Disks that are full, decay or are slow: right data or a plain error, and repair.
#![cfg(feature = "live")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![allow(
    clippy::disallowed_methods,
    reason = "tests of real processes measure real time"
)]

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hither_e2e::load::under_load;
use hither_e2e::{Cluster, Setup, drop_caches, eventually, locality, pattern, servers_of};
use serde_json::Value;

fn write_synced(path: &Path, data: &[u8]) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(data)?;
    file.sync_all()
}

/// A disk runs full in the middle of writing: new files go to other servers and nobody gets an
/// error. When nothing at all fits any more old files stay readable, and what cannot be stored
/// says so and is nowhere; when there is space again all goes on.
#[test]
fn a_full_disk_loses_nothing_and_new_files_go_elsewhere() {
    let mut cluster = Setup::new("a,b", 2)
        .small_disk("cs-a1", DISK_BYTES)
        .small_disk("cs-a2", DISK_BYTES)
        .up();
    let at = cluster.mount("m", "preflabels=zone=a");
    let size = |n: u64| 50_000 + usize::try_from(n).unwrap() * 10_000;
    for n in 0..20u64 {
        write_synced(&at.join(format!("old{n}")), &pattern(n, 0, size(n))).unwrap();
    }
    let full = cluster.address_of("cs-a1");
    let used = |path: &Path| {
        servers_of(path)
            .iter()
            .any(|s| s["address"] == full.as_str())
    };
    assert!(
        (0..20).any(|n| used(&at.join(format!("old{n}")))),
        "it is used at first"
    );
    under_load(std::slice::from_ref(&at), |more| {
        cluster.disk("cs-a1").fill_up_to(FLOOR_BYTES * 3 / 4);
        eventually(Duration::from_secs(20), "new files go elsewhere", || {
            more(5);
            (0..5u64).all(|n| {
                let path = at.join(format!("probe{n}"));
                let _ = fs::remove_file(&path);
                write_synced(&path, &pattern(n, 0, 1000)).unwrap();
                !used(&path)
            })
        });
        more(40);
    });
    cluster.disk("cs-a1").fill();
    let grown: Vec<bool> = (0..20u64).map(|n| grows(&at, n, size(n))).collect();
    assert!(grown.contains(&false), "the disk was full");
    assert!(grown.contains(&true), "and only that one");
    cluster.disk("cs-a1").empty();
    eventually(Duration::from_secs(60), "the disk is used again", || {
        let path = at.join("again");
        let _ = fs::remove_file(&path);
        write_synced(&path, &pattern(1, 0, 1000)).unwrap();
        used(&path)
    });
    cluster.wait_whole();
    // What failed to be written is on no copy: where the file grows again there are zeros.
    let other = cluster.mount("other", "preflabels=zone=b");
    for (n, grown) in (0..20u64).zip(grown) {
        let name = format!("old{n}");
        let length = size(n) + if grown { GROWTH } else { 0 };
        let file = fs::OpenOptions::new()
            .write(true)
            .open(at.join(&name))
            .unwrap();
        if !grown {
            file.set_len(length as u64).unwrap();
        }
        file.set_len((size(n) + GROWTH) as u64).unwrap();
        file.sync_all().unwrap();
        let mut expected = pattern(n, 0, length);
        expected.resize(size(n) + GROWTH, 0);
        drop_caches();
        for mount in [&at, &other] {
            let seen = fs::read(mount.join(&name)).unwrap();
            let wrong = seen.iter().zip(&expected).position(|(a, b)| a != b);
            assert_eq!(
                (seen.len(), wrong),
                (expected.len(), None),
                "{name} in {}",
                mount.display()
            );
        }
    }
}

/// Appends to a file; false: there is no space, and that was the reason given.
fn grows(mount: &Path, n: u64, size: usize) -> bool {
    let path = mount.join(format!("old{n}"));
    let file = fs::OpenOptions::new().append(true).open(path).unwrap();
    let more = pattern(n, size as u64, GROWTH);
    match (&file).write_all(&more).and_then(|()| file.sync_all()) {
        Ok(()) => true,
        Err(error) => {
            let no_space = Some(rustix::io::Errno::NOSPC.raw_os_error());
            assert_eq!(error.raw_os_error(), no_space, "old{n}: {error}");
            false
        }
    }
}

/// No server has space: writers are told so in time, and go on when there is space again.
#[test]
fn when_all_is_full_writers_get_enospc_and_readers_read() {
    let mut cluster = Setup::new("a,b", 1).small_disk("cs-a1", DISK_BYTES).up();
    let at = cluster.mount("m", "preflabels=zone=a");
    write_synced(&at.join("old"), &pattern(1, 0, 500_000)).unwrap();
    cluster.disk("cs-a1").fill();
    let begun = Instant::now();
    let mut n = 0;
    eventually(Duration::from_secs(60), "a writer is told", || {
        n += 1;
        let data = pattern(n, 0, 1_000_000);
        match write_synced(&at.join(format!("try{n}")), &data) {
            Ok(()) => false,
            Err(error) => {
                let no_space = Some(rustix::io::Errno::NOSPC.raw_os_error());
                assert_eq!(error.raw_os_error(), no_space, "{error}");
                true
            }
        }
    });
    println!("told after {:?} and {n} files", begun.elapsed());
    // Once the metadata server knows it says so itself, and as soon.
    let full = cluster.address_of("cs-a1");
    eventually(Duration::from_secs(20), "the map shows it", || {
        let all = cluster.admin(&["cs", "ls"]);
        let all = all.as_array().unwrap();
        all.iter()
            .any(|s| s["address"] == full.as_str() && s["freeBytes"] == 0)
    });
    for n in 0..5u64 {
        let begun = Instant::now();
        let refused = write_synced(&at.join(format!("more{n}")), &pattern(n, 0, 1000));
        let no_space = Some(rustix::io::Errno::NOSPC.raw_os_error());
        assert_eq!(refused.unwrap_err().raw_os_error(), no_space);
        assert!(begun.elapsed() < Duration::from_secs(10));
    }
    drop_caches();
    assert!(fs::read(at.join("old")).unwrap() == pattern(1, 0, 500_000));
    cluster.disk("cs-a1").empty();
    eventually(Duration::from_secs(60), "writing goes on", || {
        write_synced(&at.join("new"), &pattern(2, 0, 1_000_000)).is_ok()
    });
    cluster.wait_whole();
    drop_caches();
    assert!(fs::read(at.join("new")).unwrap() == pattern(2, 0, 1_000_000));
    assert!(fs::read(at.join("old")).unwrap() == pattern(1, 0, 500_000));
}

/// File of a chunk's copy on a chunkserver's disk.
fn copy_of(cluster: &Cluster, server: &str, path: &Path) -> PathBuf {
    let text = hither_e2e::hither(&["where", &path.display().to_string(), "--json"]);
    let places: Value = serde_json::from_str(&text).unwrap();
    let chunk = places[0]["chunk"].as_u64().unwrap();
    let name = format!("{:02x}/{chunk:016x}", chunk & 0xff);
    cluster.disk_dir(server).join("chunks").join(name)
}

/// Overwrites bytes of a copy behind its server's back.
fn corrupt(copy: &Path, at: u64, length: usize) {
    let file = fs::OpenOptions::new().write(true).open(copy).unwrap();
    file.write_all_at(&vec![0x5a; length], DATA_AT + at)
        .unwrap();
    file.sync_all().unwrap();
}

fn repaired(cluster: &Cluster, server: &str) -> u64 {
    let address = cluster.address_of(server);
    let all = cluster.admin(&["cs", "stat"]);
    let all = all.as_array().unwrap();
    let found = all
        .iter()
        .find(|s| s["address"] == address.as_str())
        .unwrap();
    found["repairedBlocks"].as_u64().unwrap()
}

/// Bytes of a copy go bad, of a server that runs and of one that was stopped: the reader gets
/// right data, the copy is repaired from the other member, and the counters show it.
#[test]
fn bad_blocks_are_repaired_and_never_read() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let at = cluster.mount("m", "preflabels=zone=a,kernelReadAhead=0,readAhead=0");
    let size = 2_000_000;
    write_synced(&at.join("f"), &pattern(4, 0, size)).unwrap();
    let copy = copy_of(&cluster, "cs-a1", &at.join("f"));
    // What was written last may still be on its way to its place.
    let in_place = |copy: &Path| {
        let mut seen = vec![0; size];
        let file = File::open(copy).unwrap();
        file.read_exact_at(&mut seen, DATA_AT).is_ok() && seen == pattern(4, 0, size)
    };
    eventually(Duration::from_secs(30), "data is in place", || {
        in_place(&copy)
    });
    for stopped in [false, true] {
        if stopped {
            cluster.playground("kill", "cs-a1");
        }
        let before = if stopped {
            0
        } else {
            repaired(&cluster, "cs-a1")
        };
        corrupt(&copy, 300_000, 10);
        corrupt(&copy, 1_000_000, 70_000);
        if stopped {
            cluster.playground("start", "cs-a1");
            cluster.wait_whole();
        }
        cluster.unmount(&at);
        let name = if stopped { "n" } else { "m" };
        let again = cluster.mount(name, "preflabels=zone=a,kernelReadAhead=0,readAhead=0");
        eventually(Duration::from_secs(30), "the copy is repaired", || {
            drop_caches();
            let seen = fs::read(again.join("f")).unwrap();
            assert!(seen == pattern(4, 0, size), "right data every time");
            in_place(&copy)
        });
        // A restarted server may find damage by itself, as it does what a crash has torn.
        eventually(Duration::from_secs(10), "and counted", || {
            stopped || repaired(&cluster, "cs-a1") > before
        });
        if again != at {
            cluster.unmount(&again);
            cluster.mount("m", "preflabels=zone=a");
        }
    }
}

/// A server that answers in fits and starts, as one with a slow disk does: readers are not held
/// up by it, writers wait for it, nobody gets an error.
#[test]
fn a_slow_server_is_overtaken_by_readers() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let at = cluster.mount("m", "preflabels=zone=a,kernelReadAhead=0,readAhead=0");
    write_synced(&at.join("f"), &pattern(7, 0, 8_000_000)).unwrap();
    drop_caches();
    let slow = cluster.processes();
    let slow = slow.iter().find(|p| p["name"] == "cs-a1").unwrap()["pid"]
        .as_i64()
        .unwrap();
    let slow = rustix::process::Pid::from_raw(i32::try_from(slow).unwrap()).unwrap();
    let stop = AtomicBool::new(false);
    let mut longest = Duration::ZERO;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let signal = |signal| rustix::process::kill_process(slow, signal).unwrap();
            while !stop.load(Ordering::Relaxed) {
                signal(rustix::process::Signal::STOP);
                std::thread::sleep(Duration::from_millis(300));
                signal(rustix::process::Signal::CONT);
                std::thread::sleep(Duration::from_millis(30));
            }
        });
        let file = File::open(at.join("f")).unwrap();
        let mut buffer = vec![0; 100_000];
        for n in 0..80u64 {
            let begun = Instant::now();
            file.read_exact_at(&mut buffer, n * 100_000).unwrap();
            longest = longest.max(begun.elapsed());
            assert!(buffer == pattern(7, n * 100_000, 100_000));
        }
        for n in 0..10u64 {
            write_synced(&at.join(format!("w{n}")), &pattern(n, 0, 200_000)).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(longest < Duration::from_secs(1), "a read took {longest:?}");
    let report = locality(&at);
    let overtaken = ["hedges", "failovers", "spills"].map(|what| report[what].as_u64().unwrap());
    assert!(overtaken.iter().sum::<u64>() > 0, "{report}");
    cluster.wait_whole();
    drop_caches();
    for n in 0..10u64 {
        assert!(fs::read(at.join(format!("w{n}"))).unwrap() == pattern(n, 0, 200_000));
    }
}

/// Bytes by which files grow on a full disk.
const GROWTH: usize = 3_000_000;
/// Free bytes below which a chunkserver says that a disk is full.
const FLOOR_BYTES: u64 = 1 << 30;
/// Large enough for a chunkserver's floor and log; sparse.
const DISK_BYTES: u64 = 3 << 30;
/// Where the data begins in the file of a copy (docs/formats/chunk.md).
const DATA_AT: u64 = 131_072;
