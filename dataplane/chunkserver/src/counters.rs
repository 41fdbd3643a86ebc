//! What happened on this server since it was started.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use hither_proto::ids::ChunkId;
use parking_lot::Mutex;

/// Counters, and the last writes.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) reads: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) inline_reads: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) write_bytes: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) busy: AtomicU64,
    pub(crate) repaired_blocks: AtomicU64,
    pub(crate) filled_chunks: AtomicU64,
    pub(crate) filled_bytes: AtomicU64,
    pub(crate) scrubbed_bytes: AtomicU64,
    recent: Mutex<VecDeque<RecentWrite>>,
}

/// A write this server has applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecentWrite {
    /// The chunk.
    pub chunk: ChunkId,
    /// Members behind this one in the chain: the head of a chain of three has 2.
    pub behind: usize,
    /// Whether a client sent it here, and not another chunkserver.
    pub head: bool,
}

/// What happened on this server since it was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Reads answered.
    pub reads: u64,
    /// Bytes of these.
    pub read_bytes: u64,
    /// Reads answered at once from memory.
    pub inline_reads: u64,
    /// Writes acknowledged.
    pub writes: u64,
    /// Bytes of these.
    pub write_bytes: u64,
    /// Flushes acknowledged.
    pub flushes: u64,
    /// Requests refused as too many.
    pub busy: u64,
    /// Bad blocks repaired from another member.
    pub repaired_blocks: u64,
    /// Copies fetched to fill a group.
    pub filled_chunks: u64,
    /// Bytes of these.
    pub filled_bytes: u64,
    /// Bytes verified in the background.
    pub scrubbed_bytes: u64,
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

impl Counts {
    /// Remembers a write, and forgets the oldest when there are too many.
    pub(crate) fn remember(&self, write: RecentWrite) {
        let mut recent = self.recent.lock();
        if recent.len() >= RECENT_MAX {
            recent.pop_front();
        }
        recent.push_back(write);
    }

    /// The last writes, oldest first.
    pub(crate) fn recent(&self) -> Vec<RecentWrite> {
        self.recent.lock().iter().copied().collect()
    }

    pub(crate) fn snapshot(&self) -> Counters {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counters {
            reads: of(&self.reads),
            read_bytes: of(&self.read_bytes),
            inline_reads: of(&self.inline_reads),
            writes: of(&self.writes),
            write_bytes: of(&self.write_bytes),
            flushes: of(&self.flushes),
            busy: of(&self.busy),
            repaired_blocks: of(&self.repaired_blocks),
            filled_chunks: of(&self.filled_chunks),
            filled_bytes: of(&self.filled_bytes),
            scrubbed_bytes: of(&self.scrubbed_bytes),
        }
    }
}

/// Writes that are remembered.
const RECENT_MAX: usize = 256;
