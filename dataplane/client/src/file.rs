//! A file's data as this mount holds it: lease, references, what is not on the servers yet.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hither_proto::ids::{BootId, ChunkserverId, InodeId, LeaseId};
use hither_proto::meta::{Acquire, ChunkRefs, Reply, WriteReport, request::Op};
use hither_proto::status::{Errno, Status};
use hither_proto::stored::ChunkRef;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::client::Inner;
use crate::error::FsError;
use crate::extents::Extents;
use crate::read::Stream;
use crate::session::How;

/// Data lease of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Lease {
    #[default]
    None,
    Shared,
    Exclusive(LeaseId),
}

/// Data that chunkservers have applied and no flush has covered.
#[derive(Debug, Default)]
pub(crate) struct Unsynced {
    pub(crate) data: Extents,
    /// Boot ids of the servers that acknowledged it.
    pub(crate) boots: BTreeMap<ChunkserverId, BootId>,
}

/// State of a file's data.
#[derive(Debug, Default)]
pub(crate) struct Data {
    pub(crate) lease: Lease,
    pub(crate) size: u64,
    pub(crate) mtime: i64,
    pub(crate) refs: BTreeMap<u32, ChunkRef>,
    /// References up to this index (excluded) are all in `refs`.
    pub(crate) refs_known: u32,
    /// Lowest epoch of a group that may be used.
    pub(crate) floors: BTreeMap<u32, u64>,
    /// Written here, not sent.
    pub(crate) dirty: Extents,
    /// Sent, not acknowledged.
    pub(crate) in_flight: Extents,
    /// Acknowledged, not flushed; by chunk index.
    pub(crate) unsynced: BTreeMap<u32, Unsynced>,
    /// Pieces that hold data the metadata server has not heard of.
    pub(crate) unreported: BTreeSet<u32>,
    /// Size or times the metadata server has not heard of.
    pub(crate) unreported_size: bool,
    /// Chain numbers by chunk index.
    pub(crate) chains: BTreeMap<u32, u32>,
    /// Bytes the quota leaves for growth beyond the size at the time of the lease.
    pub(crate) size_max: u64,
    /// Kept for the next fsync or close.
    pub(crate) error: Option<FsError>,
    /// Raised whenever what was read before may be outdated.
    pub(crate) generation: u64,
    pub(crate) flusher_runs: bool,
    /// Something was sent to a chunkserver under the lease, whatever became of it.
    pub(crate) sent: bool,
}

/// A file this mount has something of.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) ino: InodeId,
    pub(crate) data: Mutex<Data>,
    /// Writers hold it shared while they put data in; a recall holds it alone for its last step.
    pub(crate) gate: tokio::sync::RwLock<()>,
    /// One request for a lease at a time.
    pub(crate) acquiring: Arc<tokio::sync::Mutex<()>>,
    /// One flusher at a time.
    pub(crate) flushing: tokio::sync::Mutex<()>,
    pub(crate) handles: Mutex<Handles>,
}

/// Descriptors of a file.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    pub(crate) open: u32,
    /// The last name is gone: the server waits for the last descriptor.
    pub(crate) orphaned: bool,
    /// The server was told of the descriptor although there may be no lease.
    pub(crate) told: bool,
}

/// An open descriptor.
#[derive(Debug)]
pub struct OpenFile {
    pub(crate) file: Arc<File>,
    pub(crate) stream: Mutex<Stream>,
    /// Writes go to the end of the file.
    pub append: bool,
    /// Every write waits for stable storage.
    pub sync: bool,
}

impl OpenFile {
    /// Number of the inode.
    #[must_use]
    pub fn ino(&self) -> InodeId {
        self.file.ino
    }
}

impl File {
    pub(crate) fn new(ino: InodeId) -> Arc<Self> {
        Arc::new(Self {
            ino,
            data: Mutex::default(),
            gate: tokio::sync::RwLock::new(()),
            acquiring: Arc::default(),
            flushing: tokio::sync::Mutex::new(()),
            handles: Mutex::default(),
        })
    }

    pub(crate) fn lease(&self) -> Lease {
        self.data.lock().lease
    }

    /// Size and modification time, where this mount decides about them.
    pub(crate) fn own_attributes(&self) -> Option<(u64, i64)> {
        let data = self.data.lock();
        matches!(data.lease, Lease::Exclusive(_)).then_some((data.size, data.mtime))
    }

    /// Takes in what a reply gives under a data lease.
    pub(crate) fn take_grant(&self, reply: &Reply) {
        let mut data = self.data.lock();
        let exclusive = reply.data_exclusive;
        let fresh = !matches!(data.lease, Lease::Exclusive(_));
        data.lease = if exclusive {
            Lease::Exclusive(LeaseId(reply.data_lease))
        } else {
            Lease::Shared
        };
        if fresh {
            if let Some(inode) = &reply.inode {
                data.size = inode.size;
                data.mtime = inode.mtime;
            }
            data.refs.clear();
            data.chains.clear();
            data.generation += 1;
            data.sent = false;
        }
        for chunk in &reply.chunks {
            data.refs.insert(chunk.index, *chunk);
        }
        // Asked for all; what follows a full answer is fetched when it is needed.
        let full = reply.chunks.len() >= REFS_IN_ANSWER;
        data.refs_known = if full {
            reply.chunks.last().map_or(0, |chunk| chunk.index + 1)
        } else {
            u32::MAX
        };
        if reply
            .chunks
            .iter()
            .any(|chunk| chunk.index >= INLINE_CHUNKS)
            || fresh
        {
            let paged = reply
                .inode
                .as_ref()
                .is_some_and(|inode| inode.paged_chunks > 0);
            if paged {
                data.refs_known = data.refs_known.min(INLINE_CHUNKS);
            }
        }
        data.size_max = reply
            .space
            .map_or(u64::MAX, |space| data.size.saturating_add(space.free_bytes));
        data.take_epochs(reply);
    }

    /// What the metadata server has to hear; `None`: nothing.
    pub(crate) fn report(&self, hint: Option<hither_proto::meta::Hint>) -> Option<WriteReport> {
        let data = self.data.lock();
        let Lease::Exclusive(lease) = data.lease else {
            return None;
        };
        if data.unreported.is_empty() && !data.unreported_size {
            return None;
        }
        Some(data.report(self.ino, hint, lease))
    }

    /// The server has heard of this report.
    pub(crate) fn reported(&self, report: &WriteReport) {
        let mut data = self.data.lock();
        for chunk in &report.written {
            data.unreported.remove(&chunk.index);
            if let Some(known) = data.refs.get_mut(&chunk.index) {
                known.written = true;
            }
        }
        if data.size == report.size && data.mtime == report.mtime {
            data.unreported_size = false;
        }
    }

    /// The exclusive lease, if nothing was done under it.
    pub(crate) fn unused_lease(&self) -> Option<LeaseId> {
        self.data.lock().unused_lease()
    }

    /// The error kept for the next fsync or close, once.
    pub(crate) fn take_error(&self) -> Result<(), FsError> {
        self.data.lock().error.take().map_or(Ok(()), Err)
    }
}

impl Data {
    pub(crate) fn take_epochs(&mut self, reply: &Reply) {
        for epoch in &reply.epochs {
            let floor = self.floors.entry(epoch.group).or_default();
            *floor = (*floor).max(epoch.epoch);
        }
    }

    pub(crate) fn report(
        &self,
        ino: InodeId,
        hint: Option<hither_proto::meta::Hint>,
        lease: LeaseId,
    ) -> WriteReport {
        let written = self
            .unreported
            .iter()
            .filter_map(|index| self.refs.get(index).copied())
            .collect();
        let epochs = self
            .floors
            .iter()
            .map(|(group, epoch)| hither_proto::meta::GroupEpoch {
                group: *group,
                epoch: *epoch,
            })
            .collect();
        WriteReport {
            ino: ino.0,
            hint,
            lease: lease.0,
            size: self.size,
            mtime: self.mtime,
            written,
            epochs,
            ..WriteReport::default()
        }
    }

    /// The exclusive lease, if nothing was done under it.
    pub(crate) fn unused_lease(&self) -> Option<LeaseId> {
        let Lease::Exclusive(lease) = self.lease else {
            return None;
        };
        let used = self.sent
            || self.unreported_size
            || self.error.is_some()
            || !self.dirty.is_empty()
            || !self.in_flight.is_empty()
            || !self.unsynced.is_empty()
            || !self.unreported.is_empty();
        (!used).then_some(lease)
    }

    /// The lease is gone, and with it everything known under it.
    pub(crate) fn drop_lease(&mut self, to: Lease) {
        self.lease = to;
        self.generation += 1;
        if to == Lease::None {
            self.refs.clear();
            self.refs_known = 0;
        }
        self.chains.clear();
    }
}

impl Inner {
    /// Makes sure that the file's data may be read.
    pub(crate) async fn need_shared(&self, file: &File, deadline: Instant) -> Result<(), FsError> {
        self.need_lease(file, false, deadline).await
    }

    /// Makes sure that the file's data may be written.
    pub(crate) async fn need_exclusive(
        &self,
        file: &File,
        deadline: Instant,
    ) -> Result<(), FsError> {
        self.need_lease(file, true, deadline).await
    }

    async fn need_lease(
        &self,
        file: &File,
        exclusive: bool,
        deadline: Instant,
    ) -> Result<(), FsError> {
        let enough = |lease: Lease| match lease {
            Lease::None => false,
            Lease::Shared => !exclusive,
            Lease::Exclusive(_) => true,
        };
        loop {
            if enough(file.lease()) {
                return self.session_for(file.ino).wait_valid(deadline).await;
            }
            let _one = file.acquiring.lock().await;
            if enough(file.lease()) {
                continue;
            }
            let sent = self.cache.sent_at();
            let op = Acquire {
                ino: file.ino.0,
                hint: self.cache.hint(file.ino),
                exclusive,
            };
            let reply = self.ask(file.ino, Op::Acquire(op), How::default()).await?;
            if !self.cache.still_good(file.ino, sent) {
                // Recalled before it was taken in: as good as not given.
                if Instant::now() >= deadline {
                    return Err(crate::session::timed_out("the metadata server"));
                }
                continue;
            }
            if let Some(inode) = &reply.inode {
                self.cache
                    .put_inode(sent, inode, reply.attributes_leased, None);
            }
            file.take_grant(&reply);
        }
    }

    /// Makes sure that the references of these pieces are known.
    pub(crate) async fn need_refs(
        &self,
        file: &File,
        first: u32,
        last: u32,
    ) -> Result<(), FsError> {
        loop {
            let from = {
                let data = file.data.lock();
                if last < data.refs_known || data.lease == Lease::None {
                    return Ok(());
                }
                data.refs_known.max(first.min(data.refs_known))
            };
            let op = ChunkRefs {
                ino: file.ino.0,
                hint: self.cache.hint(file.ino),
                index: from,
                limit: REFS_ASKED,
            };
            let reply = self
                .ask(file.ino, Op::ChunkRefs(op), How::default())
                .await?;
            let mut data = file.data.lock();
            if data.lease == Lease::None {
                return Ok(());
            }
            for chunk in &reply.chunks {
                data.refs.entry(chunk.index).or_insert(*chunk);
            }
            data.take_epochs(&reply);
            data.refs_known = from.saturating_add(REFS_ASKED);
        }
    }

    /// Asks for chunks of pieces that have none.
    pub(crate) async fn need_chunks(&self, file: &File, indices: &[u32]) -> Result<(), FsError> {
        if let (Some(first), Some(last)) = (indices.first(), indices.last()) {
            self.need_refs(file, *first, *last).await?;
        }
        let (lease, missing) = {
            let data = file.data.lock();
            let Lease::Exclusive(lease) = data.lease else {
                return Err(FsError::of_status(
                    Status::STALE_LEASE,
                    "the file's lease is lost",
                ));
            };
            let missing: Vec<u32> = indices
                .iter()
                .copied()
                .filter(|index| !data.refs.contains_key(index))
                .collect();
            (lease, missing)
        };
        if missing.is_empty() {
            return Ok(());
        }
        let op = hither_proto::meta::AllocChunks {
            ino: file.ino.0,
            hint: self.cache.hint(file.ino),
            lease: lease.0,
            indices: missing,
        };
        let reply = self
            .ask(file.ino, Op::AllocChunks(op), How::default())
            .await?;
        let mut data = file.data.lock();
        if data.lease != Lease::Exclusive(lease) {
            return Err(Errno::ESTALE.into());
        }
        for chunk in &reply.chunks {
            data.refs.entry(chunk.index).or_insert(*chunk);
        }
        data.take_epochs(&reply);
        Ok(())
    }
}

/// References the metadata server keeps in the inode.
const INLINE_CHUNKS: u32 = 8;
/// References in one answer at most.
const REFS_IN_ANSWER: usize = 4096;
/// References asked for at a time.
const REFS_ASKED: u32 = 1024;
