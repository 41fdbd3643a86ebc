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

pub mod csi;
mod disk;
pub mod load;
mod network;
mod setup;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

pub use disk::SmallDisk;
use network::as_group;
pub use network::{Ends, Network};
pub use setup::Setup;

/// Where a cluster keeps its metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// In the one process that is manager and metadata server too.
    Embedded,
    /// In etcd; two managers and two metadata servers are processes of their own.
    Etcd,
}

/// What a process of a cluster does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A chunkserver.
    Chunkserver,
    /// The manager that leads.
    Manager,
    /// The metadata server that has the rank.
    Mds,
    /// The metadata store, where it is a process of its own.
    Store,
}

/// A playground with its mounts.
#[derive(Debug)]
pub struct Cluster {
    dir: tempfile::TempDir,
    /// Address of the manager.
    pub address: String,
    mounts: Vec<PathBuf>,
    /// Small disks of chunkservers, by name.
    disks: Vec<(String, SmallDisk)>,
    /// The network of the cluster and its mounts, if it is not everybody's.
    network: Option<Network>,
}

impl Cluster {
    /// Starts a cluster of these zones.
    ///
    /// # Panics
    /// When it does not start: that is the test's failure.
    #[must_use]
    pub fn up(zones: &str, per_zone: u32, more: &[&str]) -> Self {
        Setup::new(zones, per_zone).with(more).up()
    }

    /// Starts a cluster of these zones on a store.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn on(store: Store, zones: &str, per_zone: u32) -> Self {
        Setup::new(zones, per_zone).store(store).up()
    }

    /// Name of the process that has a role now.
    ///
    /// # Panics
    /// When nobody has it within a while.
    #[must_use]
    pub fn name_of(&self, role: Role) -> String {
        let of_status = |field: &dyn Fn(&Value) -> Option<String>| {
            let mut found = None;
            eventually(Duration::from_secs(30), "the role is taken", || {
                let address = self.try_admin(&["status"]).and_then(|s| field(&s));
                found = address.filter(|a| self.processes().iter().any(|p| p["address"] == *a));
                found.is_some()
            });
            self.name_at(&found.unwrap_or_default())
        };
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let embedded = self.processes().iter().all(|p| p["name"] != "etcd");
        match role {
            Role::Chunkserver => "cs-a1".into(),
            Role::Store | Role::Mds | Role::Manager if embedded => "manager".into(),
            Role::Store => "etcd".into(),
            Role::Manager => of_status(&|s| text(&s["leader"])),
            Role::Mds => of_status(&|s| text(&s["ranks"][0]["address"])),
        }
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
        self.mount_as(name, options, None)
    }

    /// The same, by a process with a group id of its own, which [`Network::cut`] can tell from
    /// others.
    ///
    /// # Panics
    /// When it cannot be mounted.
    pub fn mount_as(&mut self, name: &str, options: &str, group: Option<u32>) -> PathBuf {
        let at = self.dir.path().join(name);
        std::fs::create_dir_all(&at).expect("a mount point");
        let log = self.dir.path().join(format!("{name}.log"));
        let (log, target) = (log.display().to_string(), at.display().to_string());
        let mut command = self.command(group);
        command.args([
            "mount",
            &self.address,
            &target,
            "--log",
            &log,
            "-o",
            options,
        ]);
        run(&mut command);
        self.mounts.push(at.clone());
        at
    }

    /// The binary under test in the cluster's network.
    fn command(&self, group: Option<u32>) -> Command {
        let mut words: Vec<String> = Vec::new();
        words.extend(self.network.iter().flat_map(Network::enter));
        if let Some(group) = group {
            words.extend(as_group(group));
        }
        words.push(binary());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command
    }

    fn hither(&self, args: &[&str]) -> String {
        run(self.command(None).args(args))
    }

    /// The cluster's own network.
    ///
    /// # Panics
    /// When it has none.
    #[must_use]
    pub fn network(&self) -> &Network {
        self.network.as_ref().expect("a network of its own")
    }

    /// The small disk of a chunkserver.
    ///
    /// # Panics
    /// When it has none.
    #[must_use]
    pub fn disk(&self, name: &str) -> &SmallDisk {
        let found = self.disks.iter().find(|(of, _)| of == name);
        &found.expect("a small disk").1
    }

    /// Directory in which a chunkserver keeps its copies.
    #[must_use]
    pub fn disk_dir(&self, name: &str) -> PathBuf {
        Path::new(&self.play()).join(name)
    }

    /// Starts a process anew with a group id of its own.
    ///
    /// # Panics
    /// When it does not end or start.
    pub fn regroup(&self, name: &str, group: u32) {
        self.restart(name, |process| {
            let mut words = as_group(group);
            words.push(binary());
            process["program"] = words.remove(0).into();
            let args = process["args"].as_array().cloned().unwrap_or_default();
            let all = words.into_iter().map(Value::from).chain(args);
            process["args"] = all.collect();
        });
    }

    /// Starts a process anew with a configuration file of this content.
    ///
    /// # Panics
    /// When it does not end or start.
    pub fn reconfigure(&self, name: &str, config: &str) {
        let file = self.dir.path().join(format!("{name}.yaml"));
        std::fs::write(&file, config).expect("a configuration");
        let more = ["--config".to_owned(), file.display().to_string()];
        self.restart(name, |process| {
            let args = process["args"].as_array().cloned().unwrap_or_default();
            process["args"] = args.into_iter().chain(more.map(Value::from)).collect();
        });
    }

    fn restart(&self, name: &str, change: impl FnOnce(&mut Value)) {
        self.playground("kill", name);
        let file = Path::new(&self.play()).join("playground.json");
        let text = std::fs::read_to_string(&file).expect("a state file");
        let mut state: Value = serde_json::from_str(&text).expect("JSON");
        let processes = state["processes"].as_array_mut().expect("processes");
        if let Some(process) = processes.iter_mut().find(|p| p["name"] == name) {
            change(process);
        }
        std::fs::write(&file, state.to_string()).expect("the state file is written");
        self.playground("start", name);
    }

    /// Address of a process of the playground.
    ///
    /// # Panics
    /// When there is none of that name.
    #[must_use]
    pub fn address_of(&self, name: &str) -> String {
        let all = self.processes();
        let found = all.iter().find(|p| p["name"] == name);
        let address = found.and_then(|p| p["address"].as_str());
        address.expect("a process of that name").to_owned()
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
        self.hither(&["playground", verb, name, "--dir", &self.play()]);
    }

    /// An administrative command with JSON output.
    #[must_use]
    pub fn admin(&self, args: &[&str]) -> Value {
        let mut all = vec!["--json", "--cluster", self.address.as_str()];
        all.extend_from_slice(args);
        serde_json::from_str(&self.hither(&all)).expect("JSON")
    }

    /// The same, if the cluster answers now.
    #[must_use]
    pub fn try_admin(&self, args: &[&str]) -> Option<Value> {
        let mut all = vec!["--json", "--cluster", self.address.as_str()];
        all.extend_from_slice(args);
        let output = self.command(None).args(&all).output().ok()?;
        let text = output.status.success().then_some(output.stdout)?;
        serde_json::from_slice(&text).ok()
    }

    /// What an administrative command says when it fails; empty when it does not.
    ///
    /// # Panics
    /// When it cannot be run.
    #[must_use]
    pub fn complaint(&self, args: &[&str]) -> String {
        let mut command = self.command(None);
        command.args(["--cluster", &self.address]).args(args);
        let output = command.output().expect("the binary runs");
        if output.status.success() {
            return String::new();
        }
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Asks a process of the playground to end and waits until it has.
    ///
    /// # Panics
    /// When it does not end.
    pub fn end(&self, name: &str) {
        let all = self.processes();
        let found = all.iter().find(|p| p["name"] == name);
        let pid = found.and_then(|p| p["pid"].as_u64()).unwrap_or_default();
        run(Command::new("kill").args(["-TERM", &pid.to_string()]));
        eventually(GONE_IN, "the process ends by itself", || {
            self.state_of(name) == "ended"
        });
    }

    /// Whether a process of the playground runs (or is paused), `ended` or not.
    #[must_use]
    pub fn state_of(&self, name: &str) -> String {
        let all = self.processes();
        let found = all.iter().find(|p| p["name"] == name);
        let state = found.and_then(|p| p["state"].as_str());
        state.unwrap_or("unknown").to_owned()
    }

    /// Processes of the playground.
    #[must_use]
    pub fn processes(&self) -> Vec<Value> {
        let text = self.hither(&["playground", "status", "--dir", &self.play(), "--json"]);
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
            let status = self.try_admin(&["status"]).unwrap_or_default();
            let groups = &status["groups"];
            groups["whole"].is_number() && groups["whole"] == groups["total"]
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
        // Mounts store what they have while their cluster is there.
        wait_gone(self.dir.path(), |line| line.contains("hither mount "));
        let done = try_hither(&["playground", "down", "--dir", &self.play()]);
        self.disks.clear();
        let left = wait_gone(self.dir.path(), |_| true);
        for pid in left.iter().filter_map(|(pid, _)| *pid) {
            // It names the test's own directory: nobody else's.
            let _ = Command::new("kill").args(["-9", &pid.to_string()]).output();
        }
        if !failing {
            let said = String::from_utf8_lossy(&done.stderr);
            assert!(done.status.success(), "the playground does not end: {said}");
            assert!(
                !said.contains("killing"),
                "not all ended by themselves: {said}"
            );
            assert!(left.is_empty(), "left behind: {left:?}");
        }
    }
}

/// Waits until no process or mount of the kind names the directory; what is left after a while.
fn wait_gone(dir: &Path, kind: impl Fn(&str) -> bool) -> Vec<(Option<u32>, String)> {
    let limit = Instant::now() + GONE_IN;
    loop {
        let mut left = left_behind(&dir.display().to_string());
        left.retain(|(_, line)| kind(line));
        if left.is_empty() || Instant::now() >= limit {
            return left;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Processes (with their ids) and mounts that name a directory.
fn left_behind(dir: &str) -> Vec<(Option<u32>, String)> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mut left: Vec<(Option<u32>, String)> = mounts
        .lines()
        .filter(|line| line.contains(dir))
        .map(|line| (None, line.to_owned()))
        .collect();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for entry in processes {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else {
            continue;
        };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if pid != std::process::id() && line.contains(dir) {
            left.push((Some(pid), line));
        }
    }
    left
}

/// Time for what was told to end.
const GONE_IN: Duration = Duration::from_secs(15);

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
    Command::new(binary())
        .args(args)
        .output()
        .expect("the binary runs")
}

fn binary() -> String {
    std::env::var("HITHER_BIN")
        .expect("HITHER_BIN names the binary under test: run these tests with e2e/run.sh")
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
            report["byLocality"][*name]["readBytes"]
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
