//! What one mount does, another sees.
#![cfg(feature = "live")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![allow(
    clippy::disallowed_methods,
    reason = "tests of real processes measure real time"
)]

use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hither_e2e::{Cluster, drop_caches, hither, pattern, try_hither, write_stable};

#[test]
fn two_mounts_see_each_others_changes_at_once() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let a = cluster.mount("a", "preflabels=zone=a");
    let b = cluster.mount("b", "preflabels=zone=b");
    assert_eq!(
        cluster.admin(&["session", "ls"]).as_array().unwrap().len(),
        2,
        "one each"
    );

    // Names, negative ones included.
    assert!(!b.join("new").exists());
    fs::write(a.join("new"), pattern(1, 0, 10_000)).unwrap();
    assert_eq!(fs::read(b.join("new")).unwrap(), pattern(1, 0, 10_000));
    fs::rename(b.join("new"), b.join("old")).unwrap();
    assert!(!a.join("new").exists());
    assert_eq!(fs::metadata(a.join("old")).unwrap().len(), 10_000);

    // Size and contents of a file that is being written.
    let mut writer = fs::File::create(a.join("log")).unwrap();
    for n in 1..=20u64 {
        writer.write_all(&pattern(n, 0, 1000)).unwrap();
        assert_eq!(
            fs::metadata(b.join("log")).unwrap().len(),
            n * 1000,
            "stat asks the writer"
        );
    }
    let seen = fs::read(b.join("log")).unwrap();
    assert_eq!(seen[19_000..], pattern(20, 0, 1000)[..]);

    // Attributes.
    fs::set_permissions(a.join("log"), fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(fs::metadata(b.join("log")).unwrap().mode() & 0o777, 0o600);

    // Overwriting what the other has in its page cache.
    let reader = fs::File::open(b.join("old")).unwrap();
    let mut buffer = [0; 100];
    reader.read_exact_at(&mut buffer, 0).unwrap();
    fs::OpenOptions::new()
        .write(true)
        .open(a.join("old"))
        .unwrap()
        .write_all_at(&pattern(9, 0, 100), 0)
        .unwrap();
    reader.read_exact_at(&mut buffer, 0).unwrap();
    assert_eq!(buffer[..], pattern(9, 0, 100)[..]);

    // Unlinked and open elsewhere.
    fs::remove_file(a.join("old")).unwrap();
    assert!(!b.join("old").exists());
    reader.read_exact_at(&mut buffer, 5000).unwrap();
    assert_eq!(
        buffer[..],
        pattern(1, 5000, 100)[..],
        "an open file outlives its name"
    );
}

/// Two mounts map one file and write to it: each waits for pages that the other's kernel writes back.
#[test]
fn two_mounts_write_to_one_mapped_file() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let (a, b) = (cluster.mount("a", ""), cluster.mount("b", ""));
    write_stable(&a.join("f"), &vec![0; 128 << 10]);
    let begun = Instant::now();
    let write = |at: &Path, offset: &str| {
        let mut fio = Command::new("fio");
        fio.current_dir(at.parent().unwrap());
        fio.args([
            "--name=mapped",
            "--ioengine=mmap",
            "--rw=randwrite",
            "--bs=4k",
        ]);
        fio.args(["--size=64k", "--loops=5", "--fsync=2", "--thread"]);
        fio.arg(format!("--filename={}", at.join("f").display()));
        fio.arg(format!("--offset={offset}"));
        fio.stdout(Stdio::null()).spawn().unwrap()
    };
    let mut writers = [write(&a, "0"), write(&b, "64k")];
    let all_done = |writers: &mut [Child; 2]| {
        let ended = writers
            .each_mut()
            .map(|writer| writer.wait().unwrap().success());
        ended == [true, true]
    };
    assert!(all_done(&mut writers));
    assert!(
        begun.elapsed() < Duration::from_secs(25),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn the_kernel_reads_ahead_as_far_as_the_option_says() {
    let mut cluster = Cluster::up("a", 1, &[]);
    for (options, kib) in [("", 1024), ("kernelReadAhead=3MiB", 3072)] {
        let at = cluster.mount(&format!("m{kib}"), options);
        let device = fs::metadata(&at).unwrap().dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let set = fs::read_to_string(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"));
        assert_eq!(set.unwrap().trim(), kib.to_string(), "{options:?}");
    }
}

#[test]
fn files_of_all_sizes_come_back_after_the_caches_are_gone() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let at = cluster.mount("m", "preflabels=zone=a");
    let sizes = [0, 1, 4095, 4096, 4097, 65_536, 1_000_003, 70_000_001];
    for (n, size) in sizes.into_iter().enumerate() {
        fs::write(at.join(n.to_string()), pattern(n as u64, 0, size)).unwrap();
    }
    cluster.unmount(&at);
    let at = cluster.mount("again", "preflabels=zone=b");
    drop_caches();
    for (n, size) in sizes.into_iter().enumerate() {
        let path = at.join(n.to_string());
        assert_eq!(fs::metadata(&path).unwrap().len(), size as u64);
        assert!(
            fs::read(&path).unwrap() == pattern(n as u64, 0, size),
            "file of {size} bytes"
        );
    }
}

#[test]
fn cuts_holes_and_appends() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let a = cluster.mount("a", "preflabels=zone=a");
    let b = cluster.mount("b", "preflabels=zone=b");
    let path = a.join("f");
    fs::write(&path, pattern(1, 0, 100_000)).unwrap();
    let file = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    file.set_len(5000).unwrap();
    file.set_len(9000).unwrap();
    let mut expected = pattern(1, 0, 5000);
    expected.resize(9000, 0);
    assert!(
        fs::read(b.join("f")).unwrap() == expected,
        "old bytes never come back"
    );
    file.write_all_at(&pattern(2, 0, 10), 200_000_000).unwrap();
    let mut tail = [1; 20];
    let other = fs::File::open(b.join("f")).unwrap();
    other.read_exact_at(&mut tail[..10], 150_000_000).unwrap();
    assert_eq!(tail[..10], [0; 10], "a hole of whole chunks");
    other.read_exact_at(&mut tail[..10], 200_000_000).unwrap();
    assert_eq!(tail[..10], pattern(2, 0, 10)[..]);
    for n in 0..10u64 {
        for mount in [&a, &b] {
            let mut log = fs::OpenOptions::new()
                .append(true)
                .create(true)
                .open(mount.join("log"))
                .unwrap();
            log.write_all(&pattern(n, 0, 100)).unwrap();
        }
    }
    let mut all = Vec::new();
    let mut log = fs::File::open(a.join("log")).unwrap();
    log.seek(SeekFrom::Start(0)).unwrap();
    log.read_to_end(&mut all).unwrap();
    assert_eq!(all.len(), 2000, "appends of two mounts follow each other");
}

#[test]
fn a_preference_that_does_not_parse_mounts_nothing() {
    let dir = std::env::temp_dir().join(format!("hither-e2e-bad-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let target = dir.display().to_string();
    let done = try_hither(&["mount", "127.0.0.1:1", &target, "-o", "preflabels=A&"]);
    assert!(!done.status.success());
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(said.contains('^'), "a caret shows where: {said}");
    let options = "timeout=500ms";
    let done = try_hither(&["mount", "127.0.0.1:1", &target, "-o", options]);
    assert!(!done.status.success());
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(said.contains("no manager answers"), "{said}");
    fs::remove_dir(&dir).unwrap();
}

#[test]
fn quotas_are_shown_with_what_is_used() {
    let mut cluster = Cluster::up("a", 1, &[]);
    let at = cluster.mount("m", "");
    let dir = at.join("limited");
    fs::create_dir(&dir).unwrap();
    let path = dir.display().to_string();
    hither(&["quota", &path, "--bytes", "1MiB", "--inodes", "10"]);
    let mut file = fs::File::create(dir.join("f")).unwrap();
    file.write_all(&pattern(1, 0, 300_000)).unwrap();
    file.sync_all().unwrap();
    let shown: serde_json::Value =
        serde_json::from_str(&hither(&["--json", "quota", &path])).unwrap();
    assert_eq!(shown["bytes"], 1 << 20);
    assert_eq!(shown["inodes"], 10);
    assert_eq!(shown["usedBytes"], 300_000);
    assert_eq!(shown["usedInodes"], 1);

    // A sparse file may be larger than the cluster; one under a quota not larger than that.
    let far = 1 << 45;
    let sparse = fs::File::create(at.join("sparse")).unwrap();
    sparse.write_all_at(b"far", far).unwrap();
    sparse.sync_all().unwrap();
    assert_eq!(sparse.metadata().unwrap().len(), far + 3);
    let beyond = file.write_all_at(b"far", far).unwrap_err();
    assert_eq!(beyond.kind(), std::io::ErrorKind::QuotaExceeded);
    let refused = try_hither(&["quota", &dir.join("f").display().to_string()]);
    assert!(!refused.status.success());
}
