//! What a client is made with.

use std::time::Duration;

use hither_labels::PreferredLabels;

use crate::budget::Budget;

/// Where a client stands and which servers it prefers; may change while it runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Standpoint {
    /// Zone this client runs in; empty: unknown.
    pub zone: String,
    /// Region this client runs in; empty: unknown.
    pub region: String,
    /// Node this client runs on; empty: unknown.
    pub node: String,
    /// Servers to prefer.
    pub preferred: PreferredLabels,
}

impl Default for Standpoint {
    fn default() -> Self {
        Self {
            zone: String::new(),
            region: String::new(),
            node: String::new(),
            preferred: PreferredLabels::NONE,
        }
    }
}

/// What a client is made with.
#[derive(Debug, Clone)]
pub struct ClientConfig {
    /// Addresses of managers, `host:port`.
    pub managers: Vec<String>,
    /// Name of this host, for people.
    pub host: String,
    /// Where the mount is, for people.
    pub mount_point: String,
    /// Where it stands and what it prefers, at the start.
    pub standpoint: Standpoint,
    /// Remember servers that failed; off gives the order of the list alone.
    pub failure_memory: bool,
    /// Ask a second server when the first is slow.
    pub hedge: bool,
    /// Longest wait of one operation for servers to answer.
    pub timeout: Duration,
    /// Bytes written and not yet applied on the chunkservers, all files together.
    pub dirty_bytes_max: usize,
    /// Bytes applied and not yet covered by a flush that are kept for resending, all files.
    pub unsynced_bytes_max: usize,
    /// Bytes read ahead, all files together; 0: none.
    pub read_ahead_bytes_max: usize,
    /// Inodes whose attributes and entries are kept.
    pub cached_inodes_max: usize,
    /// Memory it shares with other clients of the process; the numbers above are its own bounds.
    pub budget: Option<Budget>,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self {
            managers: Vec::new(),
            host: String::new(),
            mount_point: String::new(),
            standpoint: Standpoint::default(),
            failure_memory: true,
            hedge: true,
            timeout: Duration::from_secs(30),
            dirty_bytes_max: 64 << 20,
            unsynced_bytes_max: 64 << 20,
            read_ahead_bytes_max: 64 << 20,
            cached_inodes_max: 200_000,
            budget: None,
        }
    }
}
