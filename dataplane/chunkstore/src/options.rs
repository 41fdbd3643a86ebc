//! Settings of a store.

use std::time::Duration;

/// Settings that all disks of a server share.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Free bytes below which a disk is full: new chunks go elsewhere. Below half of them new chunks
    /// and longer copies are refused, below a quarter holes inside copies stay holes too. More
    /// than four times what the log may have and what may wait in memory, so that all of it can
    /// still move to its place. Default 1 GiB.
    pub floor_bytes: u64,
    /// Bytes of one log segment, a multiple of 4 KiB, at least 256 KiB; fixed when the disk is made.
    /// Default 32 MiB.
    pub log_segment_bytes: u64,
    /// Segments the log may have. Default 8.
    pub log_segments_max: u32,
    /// Bytes of small writes that one disk keeps in memory until they are in place; at the bound a
    /// write waits until some have moved. Default 64 MiB.
    pub overlay_bytes_max: usize,
    /// Threads of one disk for reads and writes, and as many for syncs. Default 4.
    pub threads: usize,
    /// Jobs that may wait for the threads of one disk; beyond, [`Error::Busy`](crate::Error::Busy).
    /// Default 4096.
    pub jobs_max: usize,
    /// Files of one disk that are kept open. Default 1024.
    pub files_max: usize,
    /// How often the background work looks for something to do; `None` runs none, for tests that
    /// call [`Disk::tidy`](crate::Disk::tidy) themselves. Default 1 s.
    pub tick: Option<Duration>,
    /// Ids of deleted chunks that one disk remembers. Default 65536.
    pub deleted_max: usize,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            floor_bytes: 1 << 30,
            log_segment_bytes: 32 << 20,
            log_segments_max: 8,
            overlay_bytes_max: 64 << 20,
            threads: 4,
            jobs_max: 4096,
            files_max: 1024,
            tick: Some(Duration::from_secs(1)),
            deleted_max: 65_536,
        }
    }
}
