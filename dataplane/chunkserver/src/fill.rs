//! Filling: a member that the map shows as filling takes over what it lacks.
//!
//! First it lists what an in-sync member has; writes that arrive meanwhile are kept apart from the
//! base of their chunk. What differs is then fetched, several copies at a time, from all in-sync
//! members in turn; of a copy that was here before, only the ranges whose checksums differ. A chunk that was not in the list was made after the group's epoch began, and
//! all its writes came here too. When nothing is missing and all is stable, the manager is told.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures::StreamExt;
use hither_chunkstore::{BaseCopy, Error};
use hither_net::NetError;
use hither_proto::chunk::Copy;
use hither_proto::ids::{ChunkId, ChunkserverId, Epoch, InodeId, LeaseId};
use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::authority::Mandate;
use crate::counters::add;
use crate::fetch::{Place, copy_of, fetch_checksums, fetch_range, list_page};
use crate::fills::FillProgress;
use crate::gate::Entered;
use crate::server::Inner;
use crate::status::Refusal;

/// The filling of one group for one epoch.
pub(crate) struct Fill {
    pub(crate) mandate: Mandate,
    /// Only partial copies are completed: the member is in-sync, and became so while a copy was
    /// being taken over.
    pub(crate) mends: bool,
    cancelled: AtomicBool,
    state: Mutex<State>,
    /// Since when chunks that came along the chain are not found at the others.
    absent_since: Mutex<BTreeMap<ChunkId, Instant>>,
    /// One filler of a chunk at a time.
    chunks: Mutex<BTreeMap<ChunkId, Arc<tokio::sync::Mutex<()>>>>,
    bytes_done: AtomicU64,
    task: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct State {
    /// The list of an in-sync member is known.
    listed: bool,
    missing: BTreeSet<ChunkId>,
    chunks: u64,
    caught_up: bool,
}

/// Why a filling stops, or waits and goes on.
pub(crate) enum Trouble {
    Cancelled,
    Later(String),
}

impl From<NetError> for Trouble {
    fn from(error: NetError) -> Self {
        Self::Later(error.to_string())
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Later(error.to_string())
    }
}

impl Fill {
    pub(crate) fn start(inner: &Arc<Inner>, mandate: Mandate, old: Option<Arc<Self>>) -> Arc<Self> {
        let fill = Arc::new(Self {
            mandate,
            mends: !mandate.filling,
            cancelled: AtomicBool::new(false),
            state: Mutex::default(),
            absent_since: Mutex::default(),
            chunks: Mutex::default(),
            bytes_done: AtomicU64::new(0),
            task: Mutex::default(),
        });
        if let Some(old) = &old {
            old.cancel();
        }
        let (for_task, inner) = (Arc::clone(&fill), Arc::clone(inner));
        let task = tokio::spawn(async move {
            let before = old.and_then(|old| old.task.lock().take());
            if let Some(before) = before {
                // What it still puts down belongs to an older epoch and must not come after ours.
                let _ = before.await;
            }
            for_task.run(&inner).await;
        });
        *fill.task.lock() = Some(task);
        fill
    }

    /// Lets it end as soon as it notices.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    /// Ends it.
    pub(crate) async fn end(&self) {
        self.cancel();
        let task = self.task.lock().take();
        if let Some(task) = task
            && task.await.is_err()
        {
            tracing::error!("a filling has panicked");
        }
    }

    /// Whether the base of a chunk may be missing here.
    pub(crate) fn lacks(&self, chunk: ChunkId) -> bool {
        let state = self.state.lock();
        !state.listed || state.missing.contains(&chunk)
    }

    pub(crate) fn is_caught_up(&self) -> bool {
        self.state.lock().caught_up
    }

    pub(crate) fn progress(&self) -> FillProgress {
        let state = self.state.lock();
        FillProgress {
            epoch: self.mandate.epoch.0,
            chunks: state.chunks,
            chunks_done: state.chunks - state.missing.len() as u64,
            bytes_done: self.bytes_done.load(Ordering::Relaxed),
            caught_up: state.caught_up,
        }
    }

    fn check(&self) -> Result<(), Trouble> {
        if self.cancelled.load(Ordering::Acquire) {
            return Err(Trouble::Cancelled);
        }
        Ok(())
    }

    async fn run(self: &Arc<Self>, inner: &Arc<Inner>) {
        let group = self.mandate.group;
        loop {
            match self.attempt(inner).await {
                Ok(()) => {
                    self.state.lock().caught_up = true;
                    if self.mends {
                        return;
                    }
                    tracing::info!(%group, epoch = %self.mandate.epoch, "group is filled");
                    inner.beat_now.notify_one();
                    return;
                }
                Err(Trouble::Cancelled) => return,
                Err(Trouble::Later(cause)) => {
                    tracing::debug!(%group, cause, "filling waits");
                    let pause = if self.mends { MEND_PAUSE } else { PAUSE };
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    /// Everything from the start; what is here already is found to be.
    async fn attempt(self: &Arc<Self>, inner: &Arc<Inner>) -> Result<(), Trouble> {
        self.check()?;
        self.adopt(inner).await?;
        if self.mends && !has_partial(inner, &self.mandate) {
            return Ok(());
        }
        let sources = self.sources(inner);
        let Some(first) = sources.first() else {
            return Err(Trouble::Later("no other member is in-sync".into()));
        };
        if self.mends {
            return self.end_partial(inner, &sources).await;
        }
        let theirs = self.list(inner, *first).await?;
        self.compare(inner, &theirs).await?;
        self.fetch_missing(inner, &theirs, &sources).await?;
        self.end_partial(inner, &sources).await?;
        self.check()?;
        inner
            .on_disk(self.mandate.disk, |disk| disk.flush_all())
            .await?;
        self.check()
    }

    /// Waits until nothing of an older epoch is under way here.
    async fn adopt(&self, inner: &Arc<Inner>) -> Result<(), Trouble> {
        let Mandate { group, epoch, .. } = self.mandate;
        loop {
            match inner.gates.enter(group, epoch) {
                Entered::In(_) => return Ok(()),
                Entered::Stale(_) => return Err(Trouble::Cancelled),
                Entered::Draining => inner.gates.drained(group, epoch).await,
            }
        }
    }

    /// In-sync members that are up.
    pub(crate) fn sources(&self, inner: &Inner) -> Vec<ChunkserverId> {
        let map = inner.link.map();
        map.in_sync(self.mandate.group)
            .filter(|id| *id != inner.me)
            .collect()
    }

    fn place(&self, member: ChunkserverId) -> Place {
        Place {
            member,
            group: self.mandate.group,
            epoch: self.mandate.epoch,
        }
    }

    async fn list(
        &self,
        inner: &Inner,
        source: ChunkserverId,
    ) -> Result<BTreeMap<ChunkId, Copy>, Trouble> {
        let mut theirs = BTreeMap::new();
        let mut from = ChunkId(0);
        loop {
            self.check()?;
            let (page, more) = list_page(inner, self.place(source), from, PAGE).await?;
            let last = page.last().map(|copy| copy.chunk);
            theirs.extend(page.into_iter().map(|copy| (ChunkId(copy.chunk), copy)));
            match last.and_then(|last| last.checked_add(1)) {
                Some(next) if more => from = ChunkId(next),
                _ => return Ok(theirs),
            }
        }
    }

    /// Finds out what is missing, and drops what nobody in-sync has.
    async fn compare(
        &self,
        inner: &Inner,
        theirs: &BTreeMap<ChunkId, Copy>,
    ) -> Result<(), Trouble> {
        let disk = inner.disk(self.mandate.disk).map_err(refused)?;
        let epoch = self.mandate.epoch;
        let mut missing = BTreeSet::new();
        for (chunk, copy) in theirs {
            let same = disk.entry(*chunk).is_some_and(|entry| {
                let equal = entry.lease.0 == copy.lease
                    && entry.length == copy.length
                    && entry.changed_epoch.0 == copy.changed_epoch
                    && !copy.open
                    && entry.open.is_none()
                    && !entry.is_partial()
                    && !disk.may_be_torn(*chunk, &entry);
                equal && disk.mark_verified(*chunk, &entry, epoch)
            });
            if !same {
                missing.insert(*chunk);
            }
        }
        let mut gone = Vec::new();
        let mut from = ChunkId(0);
        loop {
            let (page, more) = disk.list(self.mandate.group, from, PAGE as usize);
            for (chunk, entry) in &page {
                // One that was made in this epoch came along the chain after the list was taken.
                let old = entry.changed_epoch < epoch;
                if old && !theirs.contains_key(chunk) {
                    gone.push(*chunk);
                }
            }
            match page.last().and_then(|(chunk, _)| chunk.0.checked_add(1)) {
                Some(next) if more => from = ChunkId(next),
                _ => break,
            }
        }
        {
            let mut state = self.state.lock();
            state.chunks = missing.len() as u64;
            state.missing = missing;
            state.listed = true;
        }
        for chunk in gone {
            self.check()?;
            tracing::info!(%chunk, group = %self.mandate.group, "a copy that no in-sync member has is dropped");
            inner
                .on_disk(self.mandate.disk, move |disk| disk.discard(chunk))
                .await?;
        }
        Ok(())
    }

    async fn fetch_missing(
        &self,
        inner: &Arc<Inner>,
        theirs: &BTreeMap<ChunkId, Copy>,
        sources: &[ChunkserverId],
    ) -> Result<(), Trouble> {
        let missing: Vec<ChunkId> = {
            let state = self.state.lock();
            theirs
                .keys()
                .filter(|chunk| state.missing.contains(chunk))
                .copied()
                .collect()
        };
        let jobs = missing.into_iter().enumerate().map(|(number, chunk)| {
            let source = sources[number % sources.len()];
            async move {
                self.take_over(inner, chunk, source, false).await?;
                self.state.lock().missing.remove(&chunk);
                add(&inner.counts.filled_chunks, 1);
                Ok::<(), Trouble>(())
            }
        });
        let mut jobs =
            futures::stream::iter(jobs).buffer_unordered(inner.config.fill_parallel.max(1));
        while let Some(outcome) = jobs.next().await {
            outcome?;
        }
        Ok(())
    }

    /// Chunks made along the chain while the list was taken: those that are still marked as
    /// partial get the base they may have by now.
    async fn end_partial(
        &self,
        inner: &Arc<Inner>,
        sources: &[ChunkserverId],
    ) -> Result<(), Trouble> {
        let disk = inner.disk(self.mandate.disk).map_err(refused)?;
        let partial = disk.partial(self.mandate.group);
        for (number, chunk) in partial.into_iter().enumerate() {
            let source = sources[number % sources.len()];
            self.take_over(inner, chunk, source, false).await?;
        }
        Ok(())
    }

    /// Takes one copy over. `afresh`: whatever is here counts for nothing.
    pub(crate) async fn take_over(
        &self,
        inner: &Arc<Inner>,
        chunk: ChunkId,
        source: ChunkserverId,
        afresh: bool,
    ) -> Result<(), Trouble> {
        let _one = self.alone(chunk).await;
        self.take_over_locked(inner, chunk, source, afresh).await
    }

    /// Waits until nobody else takes this copy over or changes it while it may be taken over.
    pub(crate) async fn alone(&self, chunk: ChunkId) -> OwnedMutexGuard<()> {
        let lock = {
            let mut chunks = self.chunks.lock();
            chunks.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(chunks.entry(chunk).or_default())
        };
        lock.lock_owned().await
    }

    /// As [`Fill::take_over`], for the one that is [`Fill::alone`] with the copy.
    pub(crate) async fn take_over_locked(
        &self,
        inner: &Arc<Inner>,
        chunk: ChunkId,
        source: ChunkserverId,
        afresh: bool,
    ) -> Result<(), Trouble> {
        self.check()?;
        if self.mends && !is_partial(inner, &self.mandate, chunk) {
            // Completed meanwhile, and perhaps changed since, here before there.
            return Ok(());
        }
        let (group, epoch) = (self.mandate.group, self.mandate.epoch);
        let place = self.place(source);
        let Some(copy) = copy_of(inner, place, chunk).await? else {
            return self.without_base(inner, chunk, afresh).await;
        };
        let inode = InodeId(copy.inode);
        // Of a copy that was here before, most is usually as it was.
        let held = inner.disk(self.mandate.disk).map_err(refused)?.entry(chunk);
        let held_length = held.map_or(0, |entry| entry.length);
        let begun = inner
            .on_disk(self.mandate.disk, move |disk| {
                if afresh {
                    disk.refill_begin(chunk, group, inode, epoch)
                } else {
                    disk.fill_begin(chunk, group, inode, epoch)
                }
            })
            .await;
        match begun {
            // Freed meanwhile.
            Err(Error::Deleted(_)) => return Ok(()),
            other => other?,
        }
        let mut at = 0;
        while at < copy.length {
            self.check()?;
            let length = FETCH_BYTES.min(copy.length - at);
            let same =
                at + length <= held_length && self.is_same(inner, place, chunk, at, length).await?;
            if !same {
                self.take_range(inner, place, chunk, at, length).await?;
            }
            at += length;
        }
        let base = BaseCopy {
            lease: LeaseId(copy.lease),
            length: copy.length,
            inode,
            changed_epoch: Epoch(copy.changed_epoch),
            open: copy.open,
        };
        let ended = inner
            .on_disk(self.mandate.disk, move |disk| {
                disk.fill_end(chunk, &base, epoch)
            })
            .await;
        match ended {
            Err(Error::NoSuchChunk(_)) => Ok(()),
            other => Ok(other?),
        }
    }

    /// Whether a range is here as the other member has it, by the checksums of its blocks.
    async fn is_same(
        &self,
        inner: &Arc<Inner>,
        place: Place,
        chunk: ChunkId,
        offset: u32,
        length: u32,
    ) -> Result<bool, Trouble> {
        let sums = fetch_checksums(inner, place, chunk, offset, length).await?;
        let epoch = self.mandate.epoch;
        let same = inner
            .on_disk(self.mandate.disk, move |disk| {
                disk.has_base(chunk, offset..offset + length, &sums, epoch)
            })
            .await;
        match same {
            Err(Error::NoSuchChunk(_)) => Ok(false),
            other => Ok(other?),
        }
    }

    async fn take_range(
        &self,
        inner: &Arc<Inner>,
        place: Place,
        chunk: ChunkId,
        offset: u32,
        length: u32,
    ) -> Result<(), Trouble> {
        inner.fills.throttle.take(length).await;
        let fetched = fetch_range(inner, place, chunk, offset, length).await?;
        let bytes = fetched.bytes;
        add(&inner.counts.filled_bytes, bytes.len() as u64);
        self.bytes_done
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if bytes.len() < length as usize {
            return Err(Trouble::Later(format!(
                "chunk {chunk} became shorter while it was taken over"
            )));
        }
        let epoch = self.mandate.epoch;
        let put = inner
            .on_disk(self.mandate.disk, move |disk| {
                disk.fill_base(chunk, offset, &bytes, epoch)
            })
            .await;
        match put {
            Err(Error::NoSuchChunk(_)) => Ok(()),
            other => Ok(other?),
        }
    }

    /// The other member has no such copy: what is here came along the chain and is all there is,
    /// or it is gone.
    async fn without_base(
        &self,
        inner: &Arc<Inner>,
        chunk: ChunkId,
        afresh: bool,
    ) -> Result<(), Trouble> {
        let disk = inner.disk(self.mandate.disk).map_err(refused)?;
        let Some(entry) = disk.entry(chunk) else {
            return Ok(());
        };
        let epoch = self.mandate.epoch;
        if afresh || entry.changed_epoch < epoch {
            inner
                .on_disk(self.mandate.disk, move |disk| disk.discard(chunk))
                .await?;
            return Ok(());
        }
        if !entry.is_partial() {
            return Ok(());
        }
        // A write reaches this tail of the chain before its head has applied it, so the head may
        // have the copy a moment later. If it has not for so long, it refused the write.
        let now = Instant::now();
        let since = *self.absent_since.lock().entry(chunk).or_insert(now);
        if now.duration_since(since) < ABSENT_WAIT {
            return Err(Trouble::Later(format!(
                "chunk {chunk} is not at its other members yet"
            )));
        }
        inner
            .on_disk(self.mandate.disk, move |disk| disk.discard(chunk))
            .await?;
        Ok(())
    }
}

pub(crate) fn has_partial(inner: &Inner, mandate: &Mandate) -> bool {
    let disk = inner.store.disk(mandate.disk);
    disk.is_some_and(|disk| !disk.partial(mandate.group).is_empty())
}

pub(crate) fn is_partial(inner: &Inner, mandate: &Mandate, chunk: ChunkId) -> bool {
    let entry = inner
        .store
        .disk(mandate.disk)
        .and_then(|disk| disk.entry(chunk));
    entry.is_some_and(|entry| entry.is_partial())
}

fn refused(refusal: Refusal) -> Trouble {
    Trouble::Later(refusal.failure.text)
}

/// Copies in one page of a list.
const PAGE: u32 = 1024;
/// Bytes fetched at once.
const FETCH_BYTES: u32 = 1 << 20;
/// Time after which a copy that only this member has is taken for one that was refused elsewhere.
const ABSENT_WAIT: Duration = Duration::from_secs(10);
/// Pause before a filling tries again.
const PAUSE: Duration = Duration::from_millis(100);
/// Pause before the completing of copies is tried again by a member that is in-sync.
const MEND_PAUSE: Duration = Duration::from_secs(1);
