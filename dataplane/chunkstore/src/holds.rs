//! What keeps the log from being released.

use std::collections::BTreeSet;

use hither_log::Lsn;
use hither_proto::ids::ChunkId;

/// Why a record is still needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Reason {
    /// Its bytes are not in place.
    Overlay,
    /// Its trim is not in place.
    Trim,
    /// The files of its chunks are not removed.
    Delete,
}

/// Records that are still needed.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    held: BTreeSet<(Lsn, Reason, ChunkId)>,
    overlay_bytes: usize,
}

impl Holds {
    pub(crate) fn add(&mut self, lsn: Lsn, reason: Reason, chunk: ChunkId) {
        self.held.insert((lsn, reason, chunk));
    }

    pub(crate) fn remove(&mut self, lsn: Lsn, reason: Reason, chunk: ChunkId) {
        self.held.remove(&(lsn, reason, chunk));
    }

    /// The oldest record that is needed.
    pub(crate) fn oldest(&self) -> Option<Lsn> {
        self.held.first().map(|(lsn, ..)| *lsn)
    }

    /// Chunks with bytes in the log that are older than `before`, oldest first.
    pub(crate) fn oldest_chunks(&self, before: Lsn, limit: usize) -> Vec<ChunkId> {
        self.held
            .iter()
            .take_while(|(lsn, ..)| *lsn < before)
            .filter(|(_, reason, _)| *reason == Reason::Overlay)
            .map(|(.., chunk)| *chunk)
            .take(limit)
            .collect()
    }

    /// Chunks with trims older than `before` that are not in place.
    pub(crate) fn trimmed_chunks(&self, before: Lsn) -> Vec<ChunkId> {
        self.held
            .iter()
            .take_while(|(lsn, ..)| *lsn < before)
            .filter(|(_, reason, _)| *reason == Reason::Trim)
            .map(|(.., chunk)| *chunk)
            .collect()
    }

    /// Freed chunks whose files may still be there, of records up to `upto`.
    pub(crate) fn deleted_chunks(&self, upto: Lsn) -> Vec<(Lsn, ChunkId)> {
        self.held
            .iter()
            .take_while(|(lsn, ..)| *lsn <= upto)
            .filter(|(_, reason, _)| *reason == Reason::Delete)
            .map(|(lsn, _, chunk)| (*lsn, *chunk))
            .collect()
    }

    /// A chunk's overlay changed its size.
    pub(crate) fn resize(&mut self, before: usize, after: usize) {
        self.overlay_bytes = (self.overlay_bytes + after).saturating_sub(before);
    }

    /// Memory of all overlays.
    pub(crate) fn overlay_bytes(&self) -> usize {
        self.overlay_bytes
    }
}
