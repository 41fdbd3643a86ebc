//! Whole clusters of real processes with real mounts, for tests.
//!
//! A [`Cluster`] is a playground in a directory of its own; dropping it unmounts everything, ends
//! every process and fails the test if something stays. The binary under test is named by
//! `HITHER_BIN` (`e2e/run.sh` builds it and sets it).
#![forbid(unsafe_code)]
#![allow(
    clippy::disallowed_methods,
    reason = "tests of real processes measure real time"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A playground with its mounts.
#[derive(Debug)]
pub struct Cluster {
    dir: tempfile::TempDir,
    /// Address of the manager.
    pub address: String,
    mounts: Vec<PathBuf>,
}

impl Cluster {
    /// Starts a cluster of these zones.
    ///
    /// # Panics
    /// When it does not start: that is the test's failure.
    #[must_use]
    pub fn up(zones: &str, per_zone: u32, more: &[&str]) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("hither-e2e-")
            .tempdir()
            .expect("a directory");
        let mut cluster = Self {
            dir,
            address: String::new(),
            mounts: Vec::new(),
        };
        let play = cluster.play();
        let per_zone = per_zone.to_string();
        let mut args = vec![
            "playground",
            "up",
            "--dir",
            &play,
            "--zones",
            zones,
            "--chunkservers-per-zone",
            &per_zone,
        ];
        args.extend_from_slice(more);
        hither(&args);
        let text = std::fs::read_to_string(Path::new(&play).join("playground.json"));
        let state: Value = serde_json::from_str(&text.expect("a state file")).expect("JSON");
        cluster.address = state["cluster"].as_str().expect("an address").to_owned();
        cluster
    }

    fn play(&self) -> String {
        self.dir.path().join("play").display().to_string()
    }

    /// A directory of the test's own, next to the cluster's.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Mounts under a name; returns where.
    ///
    /// # Panics
    /// When it cannot be mounted.
    pub fn mount(&mut self, name: &str, options: &str) -> PathBuf {
        let at = self.dir.path().join(name);
        std::fs::create_dir_all(&at).expect("a mount point");
        let log = self.dir.path().join(format!("{name}.log"));
        let (log, target) = (log.display().to_string(), at.display().to_string());
        hither(&[
            "mount",
            &self.address,
            &target,
            "--log",
            &log,
            "-o",
            options,
        ]);
        self.mounts.push(at.clone());
        at
    }

    /// Unmounts.
    ///
    /// # Panics
    /// When the kernel refuses.
    pub fn unmount(&mut self, at: &Path) {
        run(Command::new("umount").arg(at));
        self.mounts.retain(|mount| mount != at);
    }

    /// A verb of the playground on a process or zone: kill, pause, resume, start.
    pub fn playground(&self, verb: &str, name: &str) {
        hither(&["playground", verb, name, "--dir", &self.play()]);
    }

    /// An administrative command with JSON output.
    #[must_use]
    pub fn admin(&self, args: &[&str]) -> Value {
        let mut all = vec!["--json", "--cluster", self.address.as_str()];
        all.extend_from_slice(args);
        serde_json::from_str(&hither(&all)).expect("JSON")
    }

    /// Processes of the playground.
    #[must_use]
    pub fn processes(&self) -> Vec<Value> {
        let text = hither(&["playground", "status", "--dir", &self.play(), "--json"]);
        serde_json::from_str(&text).expect("JSON")
    }

    /// Name of the process that listens at an address.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn name_at(&self, address: &str) -> String {
        let all = self.processes();
        let found = all
            .iter()
            .find(|p| p["address"] == address)
            .expect("a process there");
        found["name"].as_str().expect("a name").to_owned()
    }

    /// Waits until every placement group is whole.
    ///
    /// # Panics
    /// When they do not become whole in time.
    pub fn wait_whole(&self) {
        eventually(Duration::from_secs(90), "all groups are whole", || {
            let groups = &self.admin(&["status"])["groups"];
            groups["whole"] == groups["total"]
        });
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for at in &self.mounts {
            let _ = Command::new("umount").arg("-l").arg(at).output();
        }
        let failing = std::thread::panicking();
        if failing {
            // What the processes said is part of the failure.
            for log in logs(self.dir.path()) {
                let text = std::fs::read_to_string(&log).unwrap_or_default();
                let tail: Vec<&str> = text.lines().rev().take(40).collect();
                eprintln!("--- {}", log.display());
                for line in tail.iter().rev() {
                    eprintln!("{line}");
                }
            }
        }
        let done = try_hither(&["playground", "down", "--dir", &self.play()]);
        assert!(
            failing || done.status.success(),
            "the playground does not end"
        );
    }
}

fn logs(dir: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for dir in [dir.to_owned(), dir.join("play/log")] {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        all.extend(
            entries
                .map(|e| e.path())
                .filter(|p| p.extension().is_some_and(|x| x == "log")),
        );
    }
    all
}

/// Runs the binary under test and gives its standard output.
///
/// # Panics
/// When it fails.
pub fn hither(args: &[&str]) -> String {
    let output = try_hither(args);
    assert!(
        output.status.success(),
        "hither {args:?} failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs the binary under test.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn try_hither(args: &[&str]) -> Output {
    let binary = std::env::var("HITHER_BIN")
        .expect("HITHER_BIN names the binary under test: run these tests with e2e/run.sh");
    Command::new(binary)
        .args(args)
        .output()
        .expect("the binary runs")
}

/// Runs a command to its end.
///
/// # Panics
/// When it fails.
pub fn run(command: &mut Command) -> String {
    let output = command.output().expect("the command runs");
    assert!(
        output.status.success(),
        "{command:?} failed: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Waits until a condition holds.
///
/// # Panics
/// When it does not hold in time.
pub fn eventually(at_most: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let limit = Instant::now() + at_most;
    while !holds() {
        assert!(Instant::now() < limit, "not within {at_most:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Patterned bytes by (file, offset): never zeros, never the same twice.
#[must_use]
pub fn pattern(file: u64, offset: u64, length: usize) -> Vec<u8> {
    (offset..offset + length as u64)
        .map(|at| {
            let mixed = ((at / 8) ^ file.rotate_left(17)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed.to_le_bytes()[usize::try_from(at % 8).unwrap_or(0)] | 1
        })
        .collect()
}

/// Writes a file and makes it stable: from then on its mount reads it from the servers too.
///
/// # Panics
/// When it cannot be written.
pub fn write_stable(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).expect("the file can be written");
    let file = std::fs::File::open(path).expect("the file can be opened");
    file.sync_all().expect("the file becomes stable");
}

/// What a mount counted, as JSON.
#[must_use]
pub fn locality(mount: &Path) -> Value {
    let text = hither(&["locality", &mount.display().to_string(), "--json"]);
    serde_json::from_str(&text).expect("JSON")
}

/// Bytes a mount read from each locality.
#[must_use]
pub fn read_bytes(mount: &Path, localities: &[&str]) -> u64 {
    let report = locality(mount);
    localities
        .iter()
        .map(|name| {
            report["by_locality"][*name]["read_bytes"]
                .as_u64()
                .unwrap_or(0)
        })
        .sum()
}

/// Where a file's first piece is: addresses in the order its mount would read.
///
/// # Panics
/// When the file has no piece.
#[must_use]
pub fn servers_of(path: &Path) -> Vec<Value> {
    let text = hither(&["where", &path.display().to_string(), "--json"]);
    let places: Value = serde_json::from_str(&text).expect("JSON");
    places[0]["servers"].as_array().expect("servers").clone()
}

/// Makes the kernel forget all pages, so that reads reach the file system.
///
/// # Panics
/// When it is not allowed.
pub fn drop_caches() {
    std::fs::write("/proc/sys/vm/drop_caches", "1").expect("page caches can be dropped");
}
