//! A file's data as this mount holds it: lease, references, what is not on the servers yet.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hither_proto::ids::{BootId, CHUNK_SIZE, ChunkserverId, GroupId, InodeId, LeaseId};
use hither_proto::meta::{Reply, Space, WriteReport};
use hither_proto::stored::ChunkRef;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::error::FsError;
use crate::errors::{Seen, WriteErrors};
use crate::extents::Extents;
use crate::read::Stream;
use crate::tidy::IDLE_TICKS;

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

impl Unsynced {
    /// Whether one of these servers has restarted since it acknowledged some of the data.
    pub(crate) fn restarted(&self, boots: &[(ChunkserverId, BootId)]) -> bool {
        boots
            .iter()
            .any(|(server, boot)| self.boots.get(server).is_some_and(|known| known != boot))
    }
}

/// State of a file's data.
#[derive(Debug, Default)]
pub(crate) struct Data {
    pub(crate) lease: Lease,
    /// Raised whenever a lease begins or ends: what was begun under another one does not count.
    pub(crate) tenure: u64,
    /// A lease is being asked for.
    pub(crate) asking: bool,
    /// Recalls that were acknowledged although what they named was not held: a grant that was on
    /// its way then is void.
    pub(crate) declined: u64,
    pub(crate) size: u64,
    pub(crate) mtime: i64,
    pub(crate) refs: BTreeMap<u32, ChunkRef>,
    /// References up to this index (excluded) are all in `refs`.
    pub(crate) refs_known: u32,
    /// Lowest epoch of a group that may be used.
    pub(crate) floors: BTreeMap<u32, u64>,
    /// Written here, not sent.
    pub(crate) dirty: Extents,
    /// Mapped pages the kernel wrote back while the exclusive lease was not held.
    pub(crate) mapped: Extents,
    /// The exclusive lease is being asked for because of them.
    pub(crate) fetching: bool,
    /// Pages that writes of this moment keep locked in the kernel, and how many of those there were.
    writing: Vec<u64>,
    pub(crate) writes_begun: u64,
    /// Recalls of a lease that are being answered, and cuts of this mount that are under way.
    pub(crate) recalls: u32,
    cuts: u32,
    /// Sent, not acknowledged.
    pub(crate) in_flight: Extents,
    /// Acknowledged, not flushed; by chunk index.
    pub(crate) unsynced: BTreeMap<u32, Unsynced>,
    /// Chunks no flush has covered yet: a member that lacks one may make it.
    pub(crate) young: BTreeSet<u32>,
    /// Chunks written under this lease whose open marks stand.
    pub(crate) marked: BTreeSet<u32>,
    /// Chunks of which some members may hold what others refused: sealed when the lease ends.
    pub(crate) torn: BTreeSet<u32>,
    /// Pieces that hold data the metadata server has not heard of.
    pub(crate) unreported: BTreeSet<u32>,
    /// Size or times the metadata server has not heard of.
    pub(crate) unreported_size: bool,
    /// Chain numbers by chunk index.
    pub(crate) chains: BTreeMap<u32, u32>,
    /// Bytes the quota leaves for growth beyond the size at the time of the lease.
    pub(crate) size_max: u64,
    /// For the next fsync or close.
    pub(crate) errors: WriteErrors,
    /// Raised whenever what was read before may be outdated.
    pub(crate) generation: u64,
    pub(crate) flusher_runs: bool,
    /// Rounds of tidying in which something was unreported, and in which nothing happened.
    pub(crate) ticks_unreported: u32,
    pub(crate) ticks_idle: u32,
    /// Something was sent to a chunkserver under the lease, whatever became of it.
    pub(crate) sent: bool,
}

/// A file this mount has something of.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) ino: InodeId,
    pub(crate) data: Mutex<Data>,
    /// Held shared by whoever uses the lease, alone by who ends it. Nobody waits for the metadata
    /// server to give something while holding it.
    pub(crate) gate: Arc<tokio::sync::RwLock<()>>,
    /// Told when something a task here may wait for has changed in `data`.
    changed: Notify,
    /// Reads begun.
    reads: AtomicU64,
    /// One request for a lease at a time.
    pub(crate) acquiring: Arc<tokio::sync::Mutex<()>>,
    /// One flusher at a time.
    pub(crate) flushing: tokio::sync::Mutex<()>,
    /// One at a time makes data stable: who waits for it finds everything of the other stable too.
    pub(crate) syncing: tokio::sync::Mutex<()>,
    /// One report at a time is made and answered: one that gives the lease back must not overtake
    /// another that is made under it.
    pub(crate) reporting: tokio::sync::Mutex<()>,
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
    pub(crate) seen: Mutex<Seen>,
    /// Writes go to the end of the file.
    pub append: bool,
    /// Every write waits for stable storage.
    pub sync: bool,
}

impl OpenFile {
    pub(crate) fn new(file: Arc<File>, append: bool, sync: bool) -> Self {
        let seen = file.data.lock().errors.begin();
        Self {
            file,
            stream: Mutex::default(),
            seen: Mutex::new(seen),
            append,
            sync,
        }
    }

    /// Errors of written data this descriptor has not been told of.
    pub(crate) fn told(&self) -> Result<(), FsError> {
        self.file.data.lock().errors.tell(&mut self.seen.lock())
    }

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
            gate: Arc::default(),
            changed: Notify::new(),
            reads: AtomicU64::new(0),
            acquiring: Arc::default(),
            flushing: tokio::sync::Mutex::new(()),
            syncing: tokio::sync::Mutex::new(()),
            reporting: tokio::sync::Mutex::new(()),
            handles: Mutex::default(),
        })
    }

    pub(crate) fn lease(&self) -> Lease {
        self.data.lock().lease
    }

    /// Nothing is held, and nothing waits to be written.
    pub(crate) fn is_idle(&self) -> bool {
        let data = self.data.lock();
        data.lease == Lease::None && data.mapped.is_empty()
    }

    /// Size and modification time, where this mount decides about them.
    pub(crate) fn own_attributes(&self) -> Option<(u64, i64)> {
        let data = self.data.lock();
        matches!(data.lease, Lease::Exclusive(_)).then_some((data.size, data.mtime))
    }

    /// A read begins: what the kernel was told to forget before may come back into its caches.
    pub(crate) fn read_begins(&self) {
        self.reads.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn reads_begun(&self) -> u64 {
        self.reads.load(Ordering::Acquire)
    }

    /// A lease is being recalled that this mount has been given but does not hold yet: waits until
    /// it has taken it in and (with the gate) used it once, so that mounts that want the same file
    /// all make progress.
    pub(crate) async fn await_grant(&self, lease: u64) {
        let taken = self.until(|data| !data.asking || data.holds(lease));
        // A grant that was lost with a connection never comes.
        let _ = tokio::time::timeout(GRANT_WAIT, taken).await;
    }

    /// Waits until this is so; only what tells of changes may be asked for.
    pub(crate) async fn until(&self, so: impl Fn(&Data) -> bool) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if so(&self.data.lock()) {
                return;
            }
            changed.await;
        }
    }
}

/// A recall that is being answered.
pub(crate) struct Recalled<'a>(&'a File);

impl Drop for Recalled<'_> {
    fn drop(&mut self) {
        self.0.data.lock().recalls -= 1;
    }
}

/// A cut that is under way.
pub(crate) struct Cutting<'a>(&'a File);

impl Drop for Cutting<'_> {
    fn drop(&mut self) {
        self.0.data.lock().cuts -= 1;
    }
}

/// A write that keeps a page locked in the kernel.
pub(crate) struct Writing<'a>(&'a File, u64);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let writing = &mut self.0.data.lock().writing;
        if let Some(at) = writing.iter().position(|page| *page == self.1) {
            writing.swap_remove(at);
        }
    }
}

impl File {
    /// A lease is asked for; how many recalls were declined so far.
    pub(crate) fn ask_begins(&self) -> u64 {
        let declined = {
            let mut data = self.data.lock();
            data.asking = true;
            data.declined
        };
        self.changed.notify_waiters();
        declined
    }

    /// A recall is being answered until the guard is dropped.
    pub(crate) fn recall_begins(&self) -> Recalled<'_> {
        self.data.lock().recalls += 1;
        self.changed.notify_waiters();
        Recalled(self)
    }

    /// A write is under way until the guard is dropped, and keeps this page locked in the kernel.
    pub(crate) fn write_begins(&self, page: Option<u64>) -> Option<Writing<'_>> {
        let page = page?;
        {
            let mut data = self.data.lock();
            data.writing.push(page);
            data.writes_begun += 1;
        }
        self.changed.notify_waiters();
        Some(Writing(self, page))
    }

    /// How many writes have kept pages locked so far, and the pages of those under way, in order.
    pub(crate) fn writes(&self) -> (u64, Vec<u64>) {
        let data = self.data.lock();
        let mut pages = data.writing.clone();
        pages.sort_unstable();
        pages.dedup();
        (data.writes_begun, pages)
    }

    /// A cut is under way until the guard is dropped: the kernel holds back pages it writes back.
    pub(crate) fn cut_begins(&self) -> Cutting<'_> {
        self.data.lock().cuts += 1;
        self.changed.notify_waiters();
        Cutting(self)
    }

    /// Waits until somebody here has wanted more than the shared lease that is held for so long.
    pub(crate) async fn wants_to_change_for(&self, long: Duration) {
        tokio::time::sleep(long).await;
        let wants = |data: &Data| data.lease == Lease::Shared && (data.asking || data.cuts > 0);
        self.until(wants).await;
    }

    /// Leases are being re-stated: what is granted and not taken in yet does not count.
    pub(crate) fn restate(&self) {
        let mut data = self.data.lock();
        if data.asking {
            data.declined += 1;
        }
    }

    /// The answer has been taken in, or there is none.
    pub(crate) fn ask_ended(&self) {
        self.data.lock().asking = false;
        self.changed.notify_waiters();
    }
}

impl Data {
    /// Whether a recall of this lease has something to take back.
    fn holds(&self, lease: u64) -> bool {
        match self.lease {
            Lease::None => false,
            Lease::Shared => lease == SHARED,
            Lease::Exclusive(_) => true,
        }
    }

    /// A recall is about to be acknowledged.
    pub(crate) fn note_recall(&mut self, lease: u64) {
        if !self.holds(lease) {
            self.declined += 1;
        }
    }

    /// Takes in what a reply gives under a data lease.
    pub(crate) fn take_grant(&mut self, reply: &Reply) {
        let data = self;
        let exclusive = reply.data_exclusive;
        let fresh = !matches!(data.lease, Lease::Exclusive(_));
        data.tenure += u64::from(fresh);
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
            data.young.clear();
            data.generation += 1;
            data.sent = false;
        }
        for chunk in &reply.chunks {
            data.learn(chunk);
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
            .map_or(u64::MAX, |space| data.size.saturating_add(room(&space)));
        data.take_epochs(reply);
    }

    /// Bytes of a range that this mount has itself, in the order in which they lie over each other:
    /// servers may have lost what no flush has covered.
    pub(crate) fn own(&self, range: &Range<u64>) -> Vec<(u64, Bytes)> {
        let mut parts = Vec::new();
        if !self.unsynced.is_empty() {
            let first = u32::try_from(range.start / CHUNK_SIZE).unwrap_or(u32::MAX);
            let last = u32::try_from(range.end / CHUNK_SIZE).unwrap_or(u32::MAX);
            for (_, unsynced) in self.unsynced.range(first..=last) {
                parts.extend(unsynced.data.within(range));
            }
        }
        if !self.in_flight.is_empty() {
            parts.extend(self.in_flight.within(range));
        }
        if !self.dirty.is_empty() {
            parts.extend(self.dirty.within(range));
        }
        if !self.mapped.is_empty() {
            parts.extend(self.mapped.within(range));
        }
        parts
    }

    /// Takes in a reference.
    pub(crate) fn learn(&mut self, chunk: &ChunkRef) {
        if self.refs.insert(chunk.index, *chunk).is_none() && !chunk.written {
            self.young.insert(chunk.index);
        }
    }
}

impl File {
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
            || self.errors.untold().is_err()
            || !self.dirty.is_empty()
            || !self.mapped.is_empty()
            || !self.in_flight.is_empty()
            || !self.unsynced.is_empty()
            || !self.unreported.is_empty();
        (!used).then_some(lease)
    }

    /// Groups of chunks whose open marks may be closed: nothing has happened for a while, and all
    /// is stable.
    pub(crate) fn idle_groups(&self) -> BTreeSet<GroupId> {
        if !self.may_close() {
            return BTreeSet::new();
        }
        let chunks = self.marked.iter().filter_map(|at| self.refs.get(at));
        chunks.map(|chunk| GroupId(chunk.group)).collect()
    }

    fn may_close(&self) -> bool {
        self.ticks_idle >= IDLE_TICKS
            && self.unsynced.is_empty()
            && self.torn.is_empty()
            && matches!(self.lease, Lease::Exclusive(_))
    }

    /// Takes the marks in one group, with the lease they are of.
    pub(crate) fn take_idle_marks(&mut self, group: GroupId) -> Vec<(u64, LeaseId)> {
        let (Lease::Exclusive(lease), true) = (self.lease, self.may_close()) else {
            return Vec::new();
        };
        let (refs, mut taken) = (&self.refs, Vec::new());
        self.marked.retain(|at| match refs.get(at) {
            Some(chunk) if chunk.group == group.0 => {
                taken.push((chunk.chunk, lease));
                false
            }
            known => known.is_some(),
        });
        taken
    }

    /// Chunks of which a member says that a write failed there: they are sealed with the lease.
    pub(crate) fn note_torn(&mut self, chunks: &[u64]) {
        let torn = self
            .refs
            .values()
            .filter(|known| chunks.contains(&known.chunk));
        let torn: Vec<u32> = torn.map(|known| known.index).collect();
        self.torn.extend(torn);
    }

    /// The lease is gone, and with it everything known under it.
    pub(crate) fn drop_lease(&mut self, to: Lease) {
        self.lease = to;
        self.tenure += 1;
        self.generation += 1;
        if to == Lease::None {
            self.refs.clear();
            self.refs_known = 0;
        }
        self.chains.clear();
        self.young.clear();
        self.marked.clear();
        self.torn.clear();
    }
}

/// By how much a file may grow. A server that does not say what a quota leaves counts it as space.
pub(crate) fn room(space: &Space) -> u64 {
    space.quota_bytes_left.unwrap_or(space.free_bytes)
}

/// What a shared lease is called in a recall.
const SHARED: u64 = 1;
/// Longest wait for a grant that a recall has overtaken.
const GRANT_WAIT: Duration = Duration::from_secs(1);
/// References the metadata server keeps in the inode.
const INLINE_CHUNKS: u32 = 8;
/// References in one answer at most.
const REFS_IN_ANSWER: usize = 4096;
