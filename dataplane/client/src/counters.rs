//! Who served what, from where.

use std::collections::BTreeMap;

use hither_clustermap::Server;
use parking_lot::Mutex;
use serde::Serialize;

use crate::config::Standpoint;
use crate::detour::Detour;

/// How near a server is to this client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Locality {
    /// The same node.
    Node,
    /// Another node of the same zone.
    Zone,
    /// Another zone of the same region.
    Region,
    /// Anywhere else.
    Remote,
}

/// Operations and bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Traffic {
    /// Read requests answered.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Write requests acknowledged.
    pub writes: u64,
    /// Bytes written to the head of the chain.
    pub write_bytes: u64,
}

/// Counters of one mount.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LocalityReport {
    /// Traffic by nearness of the server that served it.
    pub by_locality: BTreeMap<Locality, Traffic>,
    /// Traffic by server id.
    pub by_server: BTreeMap<u64, Traffic>,
    /// Traffic of reads that went farther than the nearest copy, by the reason.
    pub detours: BTreeMap<Detour, Traffic>,
    /// Reads that were answered by a later server of the list after an earlier one had failed.
    pub failovers: u64,
    /// Reads that were also sent to a second server because the first was slow.
    pub hedges: u64,
    /// Hedges the second server won.
    pub hedge_wins: u64,
    /// Reads sent elsewhere because the near server was overloaded.
    pub spills: u64,
    /// Times a server became a suspect.
    pub suspicions: u64,
    /// Reads answered from memory (written or read ahead).
    pub memory_read_bytes: u64,
    /// Reads that waited until another mount had written back and given its lease up.
    pub write_back_waits: u64,
    /// How long they waited together, microseconds.
    pub write_back_wait_us: u64,
}

/// Counters, shared.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    report: Mutex<LocalityReport>,
}

impl Counters {
    pub(crate) fn report(&self) -> LocalityReport {
        self.report.lock().clone()
    }

    pub(crate) fn add(&self, change: impl FnOnce(&mut LocalityReport)) {
        change(&mut self.report.lock());
    }

    pub(crate) fn read(&self, locality: Locality, server: u64, bytes: u64) {
        self.add(|report| {
            for traffic in [
                report.by_locality.entry(locality).or_default(),
                report.by_server.entry(server).or_default(),
            ] {
                traffic.reads += 1;
                traffic.read_bytes += bytes;
            }
        });
    }

    pub(crate) fn detour(&self, why: Detour, bytes: u64) {
        self.add(|report| {
            let traffic = report.detours.entry(why).or_default();
            traffic.reads += 1;
            traffic.read_bytes += bytes;
        });
    }

    pub(crate) fn write(&self, locality: Locality, server: u64, bytes: u64) {
        self.add(|report| {
            for traffic in [
                report.by_locality.entry(locality).or_default(),
                report.by_server.entry(server).or_default(),
            ] {
                traffic.writes += 1;
                traffic.write_bytes += bytes;
            }
        });
    }
}

/// How near a server is.
pub(crate) fn locality_of(standpoint: &Standpoint, server: &Server) -> Locality {
    let same = |ours: &str, theirs: &str| !ours.is_empty() && ours == theirs;
    let shown = &server.chunkserver;
    if same(&standpoint.node, &shown.node) {
        Locality::Node
    } else if same(&standpoint.zone, &shown.zone) {
        Locality::Zone
    } else if same(&standpoint.region, &shown.region) {
        Locality::Region
    } else {
        Locality::Remote
    }
}
