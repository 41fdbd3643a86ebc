//! The embedded store: one directory, one process, no service to run.
//!
//! A commit is checked against all commits ordered before it, gets its number, and becomes one
//! record of the log. When the log has flushed it, it is applied to a layer in memory, which
//! readers see over the last checkpoint, and answered. A thread of its own moves layers into an
//! ordered engine (redb) in large sorted batches and releases log space. After a crash the layer
//! is built again from the log.
//!
//! Locks are taken in the order `checkpointing`, `ordering`, `view`.

mod checkpoint;
mod history;
mod identity;
mod layer;
mod ordered;
mod ordering;
mod redb_store;
mod view;

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering as Memory};
use std::thread::JoinHandle;

use bytes::Bytes;
use hither_log::{Log, LogDir, LogOptions, Lsn, Record, RecordKind, Recovered};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, oneshot};

use crate::batch::Batch;
use crate::codec::{Commit, encode_body};
use crate::embedded::checkpoint::Trigger;
use crate::embedded::history::History;
use crate::embedded::identity::{Identity, StoreState};
use crate::embedded::layer::Layer;
use crate::embedded::ordered::{Applied, OrderedStore};
use crate::embedded::ordering::{Ordering, Pending};
use crate::embedded::redb_store::RedbStore;
use crate::embedded::view::{View, effective_limit};
use crate::error::Error;
use crate::store::MetaStore;
use crate::types::{KeyRange, Revision, ScanPage, Versioned};
use crate::watch::Watch;

pub use crate::embedded::view::EmbeddedSnapshot;

/// Settings of an embedded store; all may change from one opening to the next, except the
/// segment size, which is that of the first opening.
#[derive(Debug, Clone)]
pub struct EmbeddedOptions {
    /// Size of a log segment in bytes, 16 MiB at least, so that the largest batch fits. Default
    /// 64 MiB.
    pub log_segment_bytes: u64,
    /// How many segments the log may have, 2 at least. Commits wait when it is full. Default 8.
    pub log_segments_max: u32,
    /// A checkpoint begins when so many bytes of changes are in memory, or when half the log is
    /// in use. Default 64 MiB.
    pub checkpoint_bytes: usize,
    /// Commits wait while changes take more than this in memory. Default 256 MiB.
    pub memory_bytes_max: usize,
    /// The engine's page cache in bytes. Default 256 MiB.
    pub cache_bytes: usize,
    /// So many bytes of past commits are kept for watches. Default 16 MiB.
    pub history_bytes_max: usize,
}

impl Default for EmbeddedOptions {
    fn default() -> Self {
        Self {
            log_segment_bytes: 64 << 20,
            log_segments_max: 8,
            checkpoint_bytes: 64 << 20,
            memory_bytes_max: 256 << 20,
            cache_bytes: 256 << 20,
            history_bytes_max: 16 << 20,
        }
    }
}

/// A metadata store in a directory that belongs to this process alone.
///
/// Reads are answered from memory or the engine's files on the calling thread. Dropping the store
/// waits for its threads; commits that were not answered may or may not have taken place.
pub struct EmbeddedStore {
    inner: Arc<Inner>,
    checkpointer: Option<JoinHandle<()>>,
}

pub(crate) struct Inner {
    options: EmbeddedOptions,
    log: Log,
    engine: Box<dyn OrderedStore>,
    ordering: Mutex<Ordering>,
    view: RwLock<View>,
    history: Arc<History>,
    trigger: Trigger,
    /// Held during a checkpoint; how far the last one came.
    checkpointing: Mutex<Applied>,
    /// Tells commits that wait for room to try again.
    progress: Arc<Notify>,
    /// Commits wait while changes take more memory than this, see [`Inner::admit`].
    admitted_bytes: AtomicUsize,
    /// A commit waits for a checkpoint.
    starving: AtomicBool,
    /// Keeps other processes out until the end.
    identity: Mutex<Identity>,
}

impl EmbeddedStore {
    /// Opens the store in `dir`, creating it in an empty directory. Blocks while it reads the
    /// log; call it where that is allowed.
    ///
    /// Fails with [`Error::InUse`] while another process has it, and with [`Error::Corrupt`] if
    /// anything that was acknowledged is damaged or missing.
    pub fn open(dir: &Arc<dyn LogDir>, options: EmbeddedOptions) -> Result<Self, Error> {
        let mut identity = Identity::open(dir.as_ref())?;
        let engine = RedbStore::open(dir.as_ref(), options.cache_bytes, identity.state)?;
        let applied = engine.applied()?;
        let log_dir = dir
            .subdir(LOG_DIR)
            .map_err(|error| failed("open the log", &error))?;
        let has_log = log_dir
            .list()
            .map_err(|error| failed("open the log", &error))?;
        if identity.state != StoreState::New && has_log.is_empty() {
            return Err(Error::Corrupt {
                cause: "the log is missing".to_owned(),
            });
        }
        let log_options = LogOptions {
            segment_bytes: options.log_segment_bytes,
            segments_max: options.log_segments_max,
            ..LogOptions::new(identity.id)
        };
        let (log, records) = Log::open(log_dir, &log_options).map_err(log_error)?;
        identity.set_state(StoreState::Open)?;

        let history = Arc::new(History::new(options.history_bytes_max, applied.revision));
        let mut view = View {
            base: engine.snapshot()?,
            frozen: Vec::new(),
            active: Layer::default(),
            committed: applied,
        };
        replay(records, applied, |commit, lsn| {
            view.active.apply(&commit);
            view.committed = Applied {
                revision: commit.revision,
                lsn,
            };
            history.push(Arc::new(commit));
            if view.active.memory_bytes() >= options.checkpoint_bytes {
                let layer = Arc::new(std::mem::take(&mut view.active));
                engine.apply(&[layer], view.committed, &|_| ())?;
                view.base = engine.snapshot()?;
            }
            Ok(())
        })?;
        history.announce(view.committed.revision);
        let inner = Arc::new(Inner {
            log,
            engine: Box::new(engine),
            ordering: Mutex::new(Ordering::new(view.committed.revision)),
            view: RwLock::new(view),
            history,
            trigger: Trigger::default(),
            checkpointing: Mutex::new(applied),
            progress: Arc::new(Notify::new()),
            admitted_bytes: AtomicUsize::new(options.memory_bytes_max),
            starving: AtomicBool::new(false),
            identity: Mutex::new(identity),
            options,
        });
        let thread = Arc::clone(&inner);
        let checkpointer = std::thread::Builder::new()
            .name("meta-checkpoint".to_owned())
            .spawn(move || checkpoint::run(&thread))
            .map_err(|error| failed("start the checkpoint thread", &error))?;
        Ok(Self {
            inner,
            checkpointer: Some(checkpointer),
        })
    }

    /// Moves everything committed until now into the engine and frees the log. Blocks; never
    /// needed, since it happens by itself, but makes the next opening fast.
    pub fn checkpoint(&self) -> Result<(), Error> {
        checkpoint::checkpoint(&self.inner)
    }

    /// The last commit that readers see.
    #[must_use]
    pub fn revision(&self) -> Revision {
        self.inner.view.read().committed.revision
    }
}

impl MetaStore for EmbeddedStore {
    type Snapshot = EmbeddedSnapshot;

    async fn get(&self, key: &[u8]) -> Result<Option<Versioned>, Error> {
        self.inner.read(key)
    }

    async fn scan(&self, range: &KeyRange, limit: usize) -> Result<ScanPage, Error> {
        self.inner.read_page(range, limit)
    }

    async fn commit(&self, batch: Batch) -> Result<Revision, Error> {
        batch.check()?;
        let body = encode_body(&batch);
        loop {
            let progress = self.inner.progress.notified();
            let mut progress = std::pin::pin!(progress);
            // From here on no change of room is missed.
            progress.as_mut().enable();
            match Inner::order(&self.inner, &batch, &body)? {
                Some(answer) => {
                    let closed = |_| Error::Unknown {
                        cause: "the store was closed".to_owned(),
                    };
                    return answer.await.map_err(closed)?;
                }
                None => progress.await,
            }
        }
    }

    async fn watch(&self, prefix: &[u8], after: Revision) -> Result<Watch, Error> {
        Ok(self.inner.history.watch(prefix, after))
    }

    async fn snapshot(&self) -> Result<EmbeddedSnapshot, Error> {
        loop {
            let progress = self.inner.progress.notified();
            let mut progress = std::pin::pin!(progress);
            progress.as_mut().enable();
            if let Some(snapshot) = self.inner.try_snapshot()? {
                return Ok(snapshot);
            }
            progress.await;
        }
    }

    fn try_get(&self, key: &[u8]) -> Option<Result<Option<Versioned>, Error>> {
        Some(self.inner.read(key))
    }

    fn try_scan(&self, range: &KeyRange, limit: usize) -> Option<Result<ScanPage, Error>> {
        Some(self.inner.read_page(range, limit))
    }
}

impl Inner {
    fn read(&self, key: &[u8]) -> Result<Option<Versioned>, Error> {
        let found = self.view.read().lookup(key);
        found.map_or_else(|base| base.get(key), Ok)
    }

    fn read_page(&self, range: &KeyRange, limit: usize) -> Result<ScanPage, Error> {
        let limit = effective_limit(limit);
        let slice = self.view.read().slice(range, limit);
        let page = slice.page(range, limit)?;
        if page.entries.is_empty() && page.more() {
            return self.view.read().page(range, limit);
        }
        Ok(page)
    }

    /// Checks a batch against everything ordered before it and puts it into the log; `None` if
    /// that has to wait for `progress`.
    fn order(
        inner: &Arc<Self>,
        batch: &Batch,
        body: &Bytes,
    ) -> Result<Option<oneshot::Receiver<Result<Revision, Error>>>, Error> {
        let mut ordering = inner.ordering.lock();
        if let Some(error) = &ordering.failed {
            return Err(error.clone());
        }
        let admitted_bytes = inner.admitted_bytes.load(Memory::Relaxed);
        if inner.view.read().memory_bytes() > admitted_bytes {
            // With a lower bound a checkpoint is running, and its progress will tell.
            if admitted_bytes >= inner.options.memory_bytes_max {
                inner.starve();
            }
            return Ok(None);
        }
        inner.check_preconditions(&ordering, batch)?;
        let revision = ordering.next;
        let number = revision.0.to_le_bytes();
        let record = [IoSlice::new(&number), IoSlice::new(body)];
        let lsn = match inner.log.try_append(COMMIT_RECORD, &record) {
            Ok(appended) => appended.lsn,
            Err(hither_log::Error::Busy) => {
                drop(ordering);
                let progress = Arc::clone(&inner.progress);
                let ready = move || progress.notify_waiters();
                inner.log.when_room(number.len() + body.len(), ready);
                return Ok(None);
            }
            Err(hither_log::Error::Full { .. }) => {
                inner.starve();
                return Ok(None);
            }
            Err(error) => return Err(log_error(error)),
        };
        let (done, answer) = oneshot::channel();
        let commit = Commit::from_body(revision, body.clone());
        let commit = Arc::new(commit.expect("what was just encoded can be decoded"));
        ordering.push(Pending { commit, lsn, done });
        let first = !std::mem::replace(&mut ordering.flushing, true);
        drop(ordering);
        if first {
            Self::flush(inner, lsn);
        }
        Ok(Some(answer))
    }

    fn check_preconditions(&self, ordering: &Ordering, batch: &Batch) -> Result<(), Error> {
        for (index, precondition) in batch.preconditions().iter().enumerate() {
            let key = precondition.key();
            let now = match ordering.lookup(key) {
                Some(pending) => pending,
                None => self.read(key)?,
            };
            if !precondition.holds(now.as_ref()) {
                return Err(Error::PreconditionFailed { index });
            }
        }
        Ok(())
    }

    /// Asks for a flush up to `lsn`. Must not be called with a lock held: the answer may come at
    /// once.
    fn flush(inner: &Arc<Self>, lsn: Lsn) {
        let weak = Arc::downgrade(inner);
        inner.log.flush(lsn, move |flushed| {
            // Without the store there is nobody left who would want to know.
            if let Some(inner) = weak.upgrade() {
                match flushed {
                    Ok(durable) => Self::commit_up_to(&inner, durable),
                    Err(error) => inner.fail(log_error(error)),
                }
            }
        });
    }

    /// Shows and answers the commits whose records are durable, in order.
    fn commit_up_to(inner: &Arc<Self>, durable: Lsn) {
        let mut answers = Vec::new();
        let next = {
            let mut ordering = inner.ordering.lock();
            let mut view = inner.view.write();
            for pending in ordering.durable(durable) {
                view.active.apply(&pending.commit);
                view.committed = Applied {
                    revision: pending.commit.revision,
                    lsn: pending.lsn,
                };
                inner.history.push(Arc::clone(&pending.commit));
            }
            drop(view);
            while let Some(pending) = ordering.pop(durable) {
                answers.push(pending);
            }
            let next = ordering.last_lsn();
            ordering.flushing = next.is_some();
            next
        };
        if let Some(last) = answers.last() {
            inner.history.announce(last.commit.revision);
        }
        for pending in answers {
            // Nobody listens if the caller has given up.
            let _ = pending.done.send(Ok(pending.commit.revision));
        }
        inner.consider_checkpoint();
        if let Some(lsn) = next {
            Self::flush(inner, lsn);
        }
    }

    fn consider_checkpoint(&self) {
        let mut due = self.log.bytes_in_use() >= self.log.bytes_bound() / 2
            || self.starving.swap(false, Memory::Relaxed);
        let mut view = self.view.write();
        if view.active.memory_bytes() >= self.options.checkpoint_bytes {
            view.freeze();
            due = true;
        }
        drop(view);
        if due {
            self.trigger.pull();
        }
    }

    /// While a checkpoint runs, lets commits use the upper half of the memory bound only as fast
    /// as it makes progress: a steady pace instead of a standstill until it is done.
    fn admit(&self, done: usize, count: usize) {
        let lower = self.options.memory_bytes_max / 2;
        let upper = self.options.memory_bytes_max - lower;
        let part = upper / count.max(1) * done;
        self.admitted_bytes.store(lower + part, Memory::Relaxed);
        self.progress.notify_waiters();
    }

    /// Asks for a checkpoint now, and for one more after the next flush: what fills the log may
    /// not be committed yet.
    fn starve(&self) {
        self.starving.store(true, Memory::Relaxed);
        self.trigger.pull();
    }

    fn try_snapshot(&self) -> Result<Option<EmbeddedSnapshot>, Error> {
        let mut view = self.view.write();
        if view.frozen.len() >= FROZEN_MAX && !view.active.is_empty() {
            drop(view);
            if let Some(error) = &self.ordering.lock().failed {
                return Err(error.clone());
            }
            self.trigger.pull();
            return Ok(None);
        }
        view.freeze();
        Ok(Some(view.below()))
    }

    /// Ends service for commits; reads go on.
    fn fail(&self, error: Error) {
        let cause = error.to_string();
        let pending = self.ordering.lock().fail(error);
        for pending in pending {
            let unknown = Error::Unknown {
                cause: cause.clone(),
            };
            let _ = pending.done.send(Err(unknown));
        }
        self.progress.notify_waiters();
    }
}

impl Drop for EmbeddedStore {
    fn drop(&mut self) {
        self.inner.history.close();
        self.inner.trigger.close();
        if let Some(thread) = self.checkpointer.take()
            && thread.join().is_err()
        {
            tracing::error!("the checkpoint thread has panicked");
        }
        // Ends the callbacks, which are all that could keep the directory locked longer.
        self.inner.log.close();
        if self.inner.ordering.lock().failed.is_none()
            && let Err(error) = self.inner.identity.lock().set_state(StoreState::Closed)
        {
            tracing::warn!(%error, "metadata store not noted as closed");
        }
    }
}

impl std::fmt::Debug for EmbeddedStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EmbeddedStore")
            .field("revision", &self.revision())
            .field("log", &self.inner.log)
            .finish_non_exhaustive()
    }
}

/// Applies the log's commits after `applied`, and checks that none is missing.
fn replay(
    records: Recovered,
    applied: Applied,
    mut apply: impl FnMut(Commit, Lsn) -> Result<(), Error>,
) -> Result<(), Error> {
    let corrupt = |cause: String| Error::Corrupt { cause };
    if records.last_lsn() < applied.lsn {
        let (last, applied) = (records.last_lsn(), applied.lsn);
        return Err(corrupt(format!(
            "the log ends at {last}, before the checkpoint at {applied}"
        )));
    }
    let mut last = applied.revision;
    for record in records {
        let Record {
            lsn, kind, payload, ..
        } = record.map_err(log_error)?;
        if kind != COMMIT_RECORD {
            return Err(corrupt(format!(
                "record {lsn} of the log has unknown kind {}",
                kind.0
            )));
        }
        let commit = Commit::decode(&payload)
            .ok_or_else(|| corrupt(format!("record {lsn} of the log is no commit")))?;
        if commit.revision <= applied.revision {
            continue;
        }
        if commit.revision.0 != last.0 + 1 {
            let found = commit.revision;
            return Err(corrupt(format!("commit {found} follows {last} in the log")));
        }
        last = commit.revision;
        apply(commit, lsn)?;
    }
    Ok(())
}

fn log_error(error: hither_log::Error) -> Error {
    match error {
        hither_log::Error::Corrupt { .. }
        | hither_log::Error::ForeignLog { .. }
        | hither_log::Error::UnsupportedVersion { .. } => Error::Corrupt {
            cause: format!("log: {error}"),
        },
        hither_log::Error::Locked => Error::InUse,
        hither_log::Error::Closed => Error::Closed,
        other => failed("use the log", &other),
    }
}

fn failed(action: &str, error: &dyn std::error::Error) -> Error {
    let source = error
        .source()
        .map(|source| format!(": {source}"))
        .unwrap_or_default();
    Error::Failed {
        cause: format!("{action}: {error}{source}"),
    }
}

const LOG_DIR: &str = "log";
const COMMIT_RECORD: RecordKind = RecordKind(1);
/// Snapshots freeze what is in memory; when so many layers have gathered, they wait for a
/// checkpoint.
const FROZEN_MAX: usize = 16;
