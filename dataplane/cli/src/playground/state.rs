//! What a playground consists of, kept in its directory.

use std::net::TcpListener;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::args::PlaygroundUp;

/// A playground.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct State {
    /// Addresses of the managers.
    pub(super) cluster: String,
    pub(super) zones: Vec<String>,
    pub(super) processes: Vec<Process>,
}

/// One of its processes.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Process {
    pub(super) name: String,
    pub(super) zone: Option<String>,
    pub(super) address: String,
    /// Program to run; empty: this one.
    #[serde(default)]
    pub(super) program: String,
    /// Its arguments.
    pub(super) args: Vec<String>,
    /// 0: never started.
    pub(super) pid: u32,
    /// Start time of the process in clock ticks since boot: tells it from a later one of that id.
    pub(super) started: u64,
}

impl State {
    /// A new playground with addresses of its own.
    pub(super) fn new(up: &PlaygroundUp) -> anyhow::Result<Self> {
        let dir = absolute(&up.at.dir)?;
        let per_zone = up.chunkservers_per_zone as usize;
        let mut free = free_addresses(&up.address, 8 + up.zones.len() * per_zone)?.into_iter();
        let mut next = || free.next().context("no free port");
        let cluster = next()?;
        let class = up.class.clone().unwrap_or_else(|| {
            let terms: Vec<String> = up
                .zones
                .iter()
                .take(9)
                .map(|z| format!("zone={z}"))
                .collect();
            terms.join(",")
        });
        let mut processes = if up.store == "etcd" {
            with_etcd(&dir, &cluster, &class, &mut next)?
        } else {
            embedded(&dir, &cluster, &class, &mut next)?
        };
        let text = |path: PathBuf| path.display().to_string();
        let managers: Vec<&str> = processes
            .iter()
            .filter(|process| process.name.starts_with("manager"))
            .map(|process| process.address.as_str())
            .collect();
        let managers = managers.join(",");
        for zone in &up.zones {
            for n in 1..=up.chunkservers_per_zone {
                let name = format!("cs-{zone}{n}");
                let address = next()?;
                let args = [
                    "chunkserver",
                    "--disk",
                    &text(dir.join(&name)),
                    "--listen",
                    &address,
                    "--managers",
                    &managers,
                    "--zone",
                    zone,
                    "--node",
                    &name,
                ];
                processes.push(Process::new(&name, Some(zone), &address, &args));
            }
        }
        Ok(Self {
            cluster: managers,
            zones: up.zones.clone(),
            processes,
        })
    }

    /// Reads the playground of a directory, if there is one.
    pub(super) fn load(dir: &Path) -> anyhow::Result<Option<Self>> {
        match std::fs::read_to_string(dir.join(FILE)) {
            Ok(text) => {
                let state = serde_json::from_str(&text);
                Ok(Some(state.with_context(|| {
                    format!("read {}", dir.join(FILE).display())
                })?))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Keeps it.
    pub(super) fn save(&self, dir: &Path) -> anyhow::Result<()> {
        std::fs::create_dir_all(dir)?;
        let partial = dir.join(format!("{FILE}.new"));
        std::fs::write(&partial, serde_json::to_string_pretty(self)?)?;
        std::fs::rename(partial, dir.join(FILE))?;
        Ok(())
    }
}

impl Process {
    fn new(name: &str, zone: Option<&String>, address: &str, args: &[&str]) -> Self {
        Self {
            name: name.to_owned(),
            zone: zone.cloned(),
            address: address.to_owned(),
            program: String::new(),
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            pid: 0,
            started: 0,
        }
    }
}

impl Process {
    /// Whether it is the store that others keep their state in.
    pub(super) fn is_store(&self) -> bool {
        self.name == STORE
    }
}

type NextAddress<'a> = dyn FnMut() -> anyhow::Result<String> + 'a;

/// One process carries the store, the manager and the metadata rank.
fn embedded(
    dir: &Path,
    cluster: &str,
    class: &str,
    next: &mut NextAddress<'_>,
) -> anyhow::Result<Vec<Process>> {
    let store = dir.join("meta").display().to_string();
    let mds = next()?;
    let args = [
        "manager",
        "--dir",
        &store,
        "--listen",
        cluster,
        "--mds-listen",
        &mds,
        "--default-class",
        class,
    ];
    Ok(vec![Process::new("manager", None, cluster, &args)])
}

/// etcd, two managers of which one leads and two metadata servers of which one serves the rank,
/// each a process of its own.
fn with_etcd(
    dir: &Path,
    cluster: &str,
    class: &str,
    next: &mut NextAddress<'_>,
) -> anyhow::Result<Vec<Process>> {
    let (client, peer) = (next()?, next()?);
    let (client_url, peer_url) = (format!("http://{client}"), format!("http://{peer}"));
    let store = dir.join("etcd").display().to_string();
    let initial = format!("playground={peer_url}");
    let etcd = Process {
        program: "etcd".into(),
        ..Process::new(
            STORE,
            None,
            &client,
            &[
                "--name",
                "playground",
                "--data-dir",
                &store,
                "--listen-client-urls",
                &client_url,
                "--advertise-client-urls",
                &client_url,
                "--listen-peer-urls",
                &peer_url,
                "--initial-advertise-peer-urls",
                &peer_url,
                "--initial-cluster",
                &initial,
                "--initial-cluster-state",
                "new",
                "--auto-compaction-mode",
                "revision",
                "--auto-compaction-retention",
                "100000",
            ],
        )
    };
    let mut processes = vec![etcd];
    let standby = next()?;
    for (name, listen) in [("manager", cluster), ("manager-2", &standby)] {
        let args = [
            "manager",
            "--etcd",
            &client_url,
            "--listen",
            listen,
            "--default-class",
            class,
        ];
        processes.push(Process::new(name, None, listen, &args));
    }
    let managers = format!("{cluster},{standby}");
    for name in ["mds", "mds-2"] {
        let listen = next()?;
        let args = [
            "mds",
            "--etcd",
            &client_url,
            "--listen",
            &listen,
            "--managers",
            &managers,
        ];
        processes.push(Process::new(name, None, &listen, &args));
    }
    Ok(processes)
}

/// Where a process writes its log.
pub(super) fn log_path(dir: &Path, name: &str) -> PathBuf {
    dir.join("log").join(format!("{name}.log"))
}

fn absolute(dir: &Path) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    Ok(std::fs::canonicalize(dir)?)
}

/// Addresses nobody listens at now; all held until all are known.
fn free_addresses(host: &str, count: usize) -> anyhow::Result<Vec<String>> {
    let held: Vec<TcpListener> = (0..count)
        .map(|_| TcpListener::bind((host, 0)))
        .collect::<Result<_, _>>()
        .with_context(|| format!("listen at {host}"))?;
    held.iter()
        .map(|socket| Ok(socket.local_addr()?.to_string()))
        .collect()
}

const FILE: &str = "playground.json";
/// Name of the store's process, where it has one.
const STORE: &str = "etcd";
