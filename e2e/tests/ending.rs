//! Ends of mounts: by signal, by unmounting, with and without a cluster.
#![cfg(feature = "live")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![allow(
    clippy::disallowed_methods,
    reason = "tests of real processes measure real time"
)]

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use hither_e2e::{Cluster, eventually, pattern, run, try_hither};
use rustix::process::{Pid, Signal};

/// A mount whose process the test can signal and wait for.
struct Foreground {
    process: Child,
    at: PathBuf,
}

impl Foreground {
    fn start(cluster: &Cluster, name: &str, more: &[&str]) -> Self {
        let at = cluster.dir().join(name);
        fs::create_dir_all(&at).unwrap();
        let mut process = Command::new(std::env::var("HITHER_BIN").unwrap())
            .arg("mount")
            .arg(&cluster.address)
            .arg(&at)
            .arg("--foreground")
            .args(more)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut said = BufReader::new(process.stdout.take().unwrap());
        said.read_line(&mut line).unwrap();
        assert!(line.starts_with("mounted at"), "said {line:?}");
        Self { process, at }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.process);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    fn ends(&mut self, at_most: Duration) -> ExitStatus {
        let mut status = None;
        eventually(at_most, "the mount's process ends", || {
            status = self.process.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }
}

impl Drop for Foreground {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.at).output();
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn is_mounted(at: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.contains(&format!(" {} ", at.display()))
}

fn write_unsynced(at: &Path, files: u64) {
    for n in 0..files {
        fs::write(at.join(format!("f{n}")), pattern(n, 0, 3000)).unwrap();
    }
}

/// Whoever started the mount was killed meanwhile: nobody reads that it is ready. It ended there, and
/// the mount point was dead.
#[test]
fn a_mount_whose_starter_is_gone_serves() {
    let cluster = Cluster::up("a", 1, &[]);
    for (name, stays) in [("background", true), ("foreground", false)] {
        let at = cluster.dir().join(name);
        fs::create_dir_all(&at).unwrap();
        let mut command = Command::new(std::env::var("HITHER_BIN").unwrap());
        command.arg("mount").arg(&cluster.address).arg(&at);
        if stays {
            command.env("HITHER_MOUNT_STAYS", "1");
        } else {
            command.arg("--foreground");
        }
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let process = command.stdout(writer).spawn().unwrap();
        let mut mount = Foreground { process, at };
        eventually(Duration::from_secs(10), "the mount stands", || {
            is_mounted(&mount.at)
        });
        write_unsynced(&mount.at, 3);
        mount.signal(Signal::TERM);
        assert!(mount.ends(Duration::from_secs(30)).success(), "{name}");
        assert!(!is_mounted(&mount.at));
    }
}

#[test]
fn sigterm_stores_everything_and_unmounts() {
    let mut cluster = Cluster::up("a", 1, &[]);
    let mut mount = Foreground::start(&cluster, "m", &[]);
    write_unsynced(&mount.at, 300);
    mount.signal(Signal::TERM);
    assert!(mount.ends(Duration::from_secs(20)).success());
    assert!(!is_mounted(&mount.at));
    let other = cluster.mount("other", "");
    for n in 0..300 {
        let seen = fs::read(other.join(format!("f{n}"))).unwrap();
        assert!(seen == pattern(n, 0, 3000), "file {n}");
    }
}

/// Many files wait to be stored, and nobody takes them: the mount says so after its timeout, not
/// after one timeout for each file.
#[test]
fn sigterm_ends_a_mount_whose_cluster_is_gone() {
    let cluster = Cluster::up("a", 1, &[]);
    let mut mount = Foreground::start(&cluster, "m", &["-o", "timeout=3s"]);
    write_unsynced(&mount.at, 1000);
    for name in ["manager", "cs-a1"] {
        cluster.playground("kill", name);
    }
    mount.signal(Signal::TERM);
    let status = mount.ends(Duration::from_secs(15));
    assert!(!status.success(), "lost data is no success: {status}");
    assert!(!is_mounted(&mount.at));
}

#[test]
fn a_second_signal_ends_at_once() {
    let cluster = Cluster::up("a", 1, &[]);
    let mut mount = Foreground::start(&cluster, "m", &["-o", "timeout=10m"]);
    write_unsynced(&mount.at, 10);
    for name in ["manager", "cs-a1"] {
        cluster.playground("kill", name);
    }
    mount.signal(Signal::TERM);
    eventually(Duration::from_secs(10), "unmounted", || {
        !is_mounted(&mount.at)
    });
    assert!(mount.process.try_wait().unwrap().is_none(), "it waits");
    mount.signal(Signal::TERM);
    assert!(!mount.ends(Duration::from_secs(5)).success());
}

#[test]
fn a_mount_that_stays_outlives_sigterm() {
    let cluster = Cluster::up("a", 1, &[]);
    let mut mount = Foreground::start(&cluster, "m", &["--stay-mounted"]);
    for _ in 0..3 {
        mount.signal(Signal::TERM);
        write_unsynced(&mount.at, 5);
    }
    run(Command::new("umount").arg(&mount.at));
    assert!(mount.ends(Duration::from_secs(20)).success());
}

/// Somebody stands in the mounted directory: the mount point is free all the same.
#[test]
fn a_mount_in_use_is_detached() {
    let cluster = Cluster::up("a", 1, &[]);
    let mut mount = Foreground::start(&cluster, "m", &[]);
    write_unsynced(&mount.at, 1);
    let held = fs::File::open(mount.at.join("f0")).unwrap();
    mount.signal(Signal::TERM);
    assert!(mount.ends(Duration::from_secs(20)).success());
    assert!(!is_mounted(&mount.at));
    assert_eq!(fs::read_dir(&mount.at).unwrap().count(), 0);
    drop(held);
}

/// What was mounted at the directory before is there again, and nothing else is taken away.
#[test]
fn unmounting_leaves_what_is_mounted_underneath() {
    let cluster = Cluster::up("a", 1, &[]);
    let at = cluster.dir().join("m");
    fs::create_dir_all(&at).unwrap();
    run(Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&at));
    fs::write(at.join("beneath"), b"x").unwrap();
    for by_signal in [false, true] {
        let mut mount = Foreground::start(&cluster, "m", &[]);
        assert!(!at.join("beneath").exists());
        if by_signal {
            mount.signal(Signal::TERM);
        } else {
            run(Command::new("umount").arg(&at));
        }
        assert!(mount.ends(Duration::from_secs(20)).success());
        assert_eq!(fs::read(at.join("beneath")).unwrap(), b"x");
        // Nothing is left to be taken away by the test itself.
        std::mem::forget(mount);
    }
    run(Command::new("umount").arg(&at));
}

#[test]
fn a_file_is_nothing_to_mount() {
    let cluster = Cluster::up("a", 1, &[]);
    let mut mount = Foreground::start(&cluster, "m", &[]);
    write_unsynced(&mount.at, 1);
    let at = cluster.dir().join("other");
    fs::create_dir_all(&at).unwrap();
    let source = format!("{}:/f0", cluster.address);
    let refused = try_hither(&["mount", &source, &at.display().to_string()]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && said.contains("no directory"),
        "{said}"
    );
    mount.signal(Signal::TERM);
    assert!(mount.ends(Duration::from_secs(20)).success());
}
