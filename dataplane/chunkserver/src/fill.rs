//! Filling: a member that the map shows as filling takes over what it lacks.
//!
//! First it lists what an in-sync member has; writes that arrive meanwhile are kept apart from the
//! base of their chunk. What differs is then fetched, several copies at a time, from all in-sync
//! members in turn, and from another when one fails; of a copy that was here before, only the
//! ranges whose checksums differ. A chunk that was not in the list was made after the group's epoch
//! began, and all its writes came here too. When nothing is missing and all is stable, the manager is told.

mod take;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures::StreamExt;
use hither_chunkstore::Error;
use hither_net::NetError;
use hither_proto::chunk::Copy;
use hither_proto::ids::{ChunkId, ChunkserverId};
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::authority::Mandate;
use crate::counters::add;
use crate::fetch::{Place, list_page};
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
#[derive(Debug, thiserror::Error)]
pub(crate) enum Trouble {
    #[error("the group has moved on")]
    Cancelled,
    /// No in-sync member has all bytes, and none will in this epoch.
    #[error("{NO_SOURCE}")]
    NoSource,
    /// The member asked has not got all bytes either.
    #[error("the copy of chunk {0} is partial there too")]
    Partial(ChunkId),
    /// The copy was cut while it was taken over: it may be taken over again at once.
    #[error("chunk {0} became shorter while it was taken over")]
    Shorter(ChunkId),
    #[error("{0}")]
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
        let mut told = false;
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
                Err(cause) => {
                    tracing::debug!(%group, %cause, "filling waits");
                    let lost = matches!(cause, Trouble::NoSource);
                    if lost && !std::mem::replace(&mut told, true) {
                        self.report_lost(inner);
                    }
                    let slow = lost || self.mends;
                    tokio::time::sleep(if slow { MEND_PAUSE } else { PAUSE }).await;
                }
            }
        }
    }

    /// Says which copies lack bytes that nobody else has.
    fn report_lost(&self, inner: &Inner) {
        let Mandate {
            group, epoch, disk, ..
        } = self.mandate;
        let partial = inner
            .store
            .disk(disk)
            .map_or_else(Vec::new, |disk| disk.partial(group));
        let chunks: Vec<u64> = partial
            .iter()
            .take(NAMED_MAX)
            .map(|chunk| chunk.0)
            .collect();
        let count = partial.len();
        tracing::error!(%group, %epoch, disk = disk.0, count, ?chunks, "copies here: {NO_SOURCE}");
    }

    /// Everything from the start; what is here already is found to be.
    async fn attempt(self: &Arc<Self>, inner: &Arc<Inner>) -> Result<(), Trouble> {
        self.check()?;
        self.adopt(inner).await?;
        if self.mends && !has_partial(inner, &self.mandate) {
            return Ok(());
        }
        let sources = self.sources(inner)?;
        let first = sources.first().ok_or(Trouble::NoSource)?;
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
        self.check()?;
        if has_partial(inner, &self.mandate) {
            return Err(Trouble::Later("a copy is being taken over again".into()));
        }
        Ok(())
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

    /// The other in-sync members of this epoch.
    pub(crate) fn sources(&self, inner: &Inner) -> Result<Vec<ChunkserverId>, Trouble> {
        let map = inner.link.map();
        let Mandate { group, epoch, .. } = self.mandate;
        if map.epoch(group) != Some(epoch) {
            return Err(Trouble::Cancelled);
        }
        Ok(map.in_sync(group).filter(|id| *id != inner.me).collect())
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
                    && !copy.partial
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
            let sources = turned(sources, number);
            async move {
                self.take_over(inner, chunk, &sources).await?;
                self.state.lock().missing.remove(&chunk);
                add(&inner.counts.filled_chunks, 1);
                Ok::<(), Trouble>(())
            }
        });
        let mut jobs =
            futures::stream::iter(jobs).buffer_unordered(inner.config.fill_parallel.max(1));
        let mut failed = Failed::default();
        while let Some(outcome) = jobs.next().await {
            failed.note(outcome)?;
        }
        failed.outcome()
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
        let mut failed = Failed::default();
        for (number, chunk) in partial.into_iter().enumerate() {
            let sources = turned(sources, number);
            failed.note(self.take_over(inner, chunk, &sources).await)?;
        }
        failed.outcome()
    }
}

/// What went wrong with some of many copies, which is no reason to leave out the others.
#[derive(Default)]
struct Failed(Option<Trouble>);

impl Failed {
    /// An error ends everything.
    fn note(&mut self, outcome: Result<(), Trouble>) -> Result<(), Trouble> {
        match outcome {
            Err(Trouble::Cancelled) => return Err(Trouble::Cancelled),
            // Only when nothing else is left to be hoped for.
            Err(Trouble::NoSource) if self.0.is_some() => {}
            Err(trouble) => self.0 = Some(trouble),
            Ok(()) => {}
        }
        Ok(())
    }

    fn outcome(self) -> Result<(), Trouble> {
        self.0.map_or(Ok(()), Err)
    }
}

/// The sources, beginning with another one for each number.
fn turned(sources: &[ChunkserverId], number: usize) -> Vec<ChunkserverId> {
    let mut turned = sources.to_vec();
    turned.rotate_left(number % sources.len().max(1));
    turned
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

/// Why a copy stays as it is.
pub(crate) const NO_SOURCE: &str =
    "bytes are missing that no other in-sync member has; a member that is away may have them";
/// Chunks that are named in one line of the log.
const NAMED_MAX: usize = 16;
/// Copies in one page of a list.
const PAGE: u32 = 1024;
/// Pause before a filling tries again.
const PAUSE: Duration = Duration::from_millis(100);
/// Pause before the completing of copies is tried again by a member that is in-sync.
const MEND_PAUSE: Duration = Duration::from_secs(1);
