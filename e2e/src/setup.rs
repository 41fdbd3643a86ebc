//! What a cluster is to be before it is started.

use std::path::Path;

use serde_json::Value;

use crate::disk::SmallDisk;
use crate::network::Network;
use crate::{Cluster, Store};

/// A cluster that is not started yet.
#[derive(Debug)]
pub struct Setup {
    zones: String,
    per_zone: u32,
    more: Vec<String>,
    disks: Vec<(String, u64)>,
    own_network: bool,
}

impl Setup {
    /// These zones, separated by commas, with so many chunkservers each.
    #[must_use]
    pub fn new(zones: &str, per_zone: u32) -> Self {
        Self {
            zones: zones.to_owned(),
            per_zone,
            more: Vec::new(),
            disks: Vec::new(),
            own_network: false,
        }
    }

    /// With further arguments of `hither playground up`.
    #[must_use]
    pub fn with(mut self, more: &[&str]) -> Self {
        self.more.extend(more.iter().map(|arg| (*arg).to_owned()));
        self
    }

    /// On a store.
    #[must_use]
    pub fn store(self, store: Store) -> Self {
        match store {
            Store::Embedded => self.with(&["--store", "embedded"]),
            Store::Etcd => self.with(&["--store", "etcd"]),
        }
    }

    /// With a file system of its own, of so many bytes, for a chunkserver.
    #[must_use]
    pub fn small_disk(mut self, name: &str, bytes: u64) -> Self {
        self.disks.push((name.to_owned(), bytes));
        self
    }

    /// In a network of its own, in which connections can be cut.
    #[must_use]
    pub fn own_network(mut self) -> Self {
        self.own_network = true;
        self
    }

    /// Starts it.
    ///
    /// # Panics
    /// When it does not start: that is the test's failure.
    #[must_use]
    pub fn up(self) -> Cluster {
        let dir = tempfile::Builder::new()
            .prefix("hither-e2e-")
            .tempdir()
            .expect("a directory");
        let mut cluster = Cluster {
            network: self.own_network.then(Network::new),
            dir,
            address: String::new(),
            mounts: Vec::new(),
            disks: Vec::new(),
        };
        for (name, bytes) in &self.disks {
            let at = cluster.disk_dir(name);
            let disk = SmallDisk::new(&cluster.dir().join(format!("{name}.img")), &at, *bytes);
            cluster.disks.push((name.clone(), disk));
        }
        let play = cluster.play();
        let per_zone = self.per_zone.to_string();
        let mut args = vec!["playground", "up", "--dir", &play, "--zones", &self.zones];
        args.extend(["--chunkservers-per-zone", &per_zone]);
        args.extend(self.more.iter().map(String::as_str));
        cluster.hither(&args);
        let text = std::fs::read_to_string(Path::new(&play).join("playground.json"));
        let state: Value = serde_json::from_str(&text.expect("a state file")).expect("JSON");
        cluster.address = state["cluster"].as_str().expect("an address").to_owned();
        cluster
    }
}
