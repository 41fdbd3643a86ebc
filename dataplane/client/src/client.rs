//! The client: parts and their life.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use futures::future::BoxFuture;
use hither_clustermap::ClusterView;
use hither_managerlink::ManagerLink;
use hither_net::Identity;
use hither_proto::common::Role;
use hither_proto::fragment::Fragment;
use hither_proto::ids::{Epoch, GroupId, InodeId, MapVersion, NameHash, RankId};
use hither_proto::meta::{Reply, request::Op};
use hither_proto::status::{Errno, Status};
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use crate::budget::{Account, Gauge};
use crate::cache::Cache;
use crate::config::{ClientConfig, Standpoint};
use crate::counters::{Counters, LocalityReport};
use crate::error::FsError;
use crate::file::{File, Lease, OpenFile};
use crate::servers::Servers;
use crate::session::{AskError, How, Session, SessionOwner};

/// What a front end has to do when something it passed to the kernel is recalled. Each call
/// returns once the kernel has dropped it; it may write dirty pages back meanwhile.
pub trait KernelCaches: Send + Sync + 'static {
    /// Attributes of an inode.
    fn forget_attributes(&self, ino: InodeId) -> BoxFuture<'static, ()>;
    /// Attributes of an inode, and its pages in which bytes of this range lie.
    fn forget_pages(&self, ino: InodeId, bytes: Range<u64>) -> BoxFuture<'static, ()>;
    /// An entry of a directory, or with an empty name all of them.
    fn forget_entries(&self, dir: InodeId, name: &Bytes) -> BoxFuture<'static, ()>;
}

/// For front ends without a kernel behind them.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoKernelCaches;

impl KernelCaches for NoKernelCaches {
    fn forget_attributes(&self, _: InodeId) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }

    fn forget_pages(&self, _: InodeId, _: Range<u64>) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }

    fn forget_entries(&self, _: InodeId, _: &Bytes) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }
}

/// Why a client could not start.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// No manager answered.
    #[error("no manager answers at {addresses}: is the cluster running, and is this its address?")]
    NoManager {
        /// Where it was looked for.
        addresses: String,
    },
    /// No session could be opened.
    #[error("open a session with the metadata server: {0}")]
    NoSession(FsError),
}

/// A client of a cluster. Clones share everything.
#[derive(Clone)]
pub struct Client {
    pub(crate) inner: Arc<Inner>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client(of {:?})", self.inner.config.managers)
    }
}

pub(crate) struct Inner {
    pub(crate) me: Weak<Self>,
    pub(crate) config: Arc<ClientConfig>,
    pub(crate) link: ManagerLink,
    pub(crate) servers: Arc<Servers>,
    pub(crate) cache: Cache,
    pub(crate) counters: Arc<Counters>,
    pub(crate) kernel: Arc<dyn KernelCaches>,
    pub(crate) dirty_bytes: Gauge,
    /// Mapped pages that wait for a lease.
    pub(crate) mapped_bytes: AtomicUsize,
    pub(crate) dirty_less: Notify,
    pub(crate) unsynced_bytes: Gauge,
    /// Memory shared with others.
    pub(crate) account: Arc<Account>,
    /// Everything is being made stable.
    pub(crate) stabilising: AtomicBool,
    /// Bytes that may be read ahead still.
    pub(crate) ahead: Arc<Semaphore>,
    identity: Identity,
    sessions: Mutex<BTreeMap<RankId, Arc<Session>>>,
    files: Mutex<BTreeMap<InodeId, Arc<File>>>,
    /// Descriptors that read ahead.
    pub(crate) streams: Mutex<Vec<Weak<OpenFile>>>,
    operations: AtomicU64,
    /// It has a claim, which a new session would not have.
    pub(crate) ends_with_session: AtomicBool,
    /// A session has ended, and everything with it.
    pub(crate) over: AtomicBool,
}

impl Client {
    /// Finds the cluster and opens a session, within the configured time.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start(
        config: ClientConfig,
        kernel: Arc<dyn KernelCaches>,
    ) -> Result<Self, StartError> {
        let config = Arc::new(config);
        let identity = Identity {
            role: Role::Client,
            boot_id: rand::random(),
            ..Identity::default()
        };
        let link = ManagerLink::start(
            config.managers.clone(),
            identity.clone(),
            &config.standpoint.zone,
        );
        let counters = Arc::new(Counters::default());
        let account = Account::of(config.budget.clone());
        let inner = Arc::new_cyclic(|me| Inner {
            me: Weak::clone(me),
            servers: Servers::new(Arc::clone(&config), identity.clone(), Arc::clone(&counters)),
            cache: Cache::new(config.cached_inodes_max),
            counters,
            kernel,
            dirty_bytes: Gauge::new(&account),
            mapped_bytes: AtomicUsize::new(0),
            dirty_less: Notify::new(),
            unsynced_bytes: Gauge::new(&account),
            account,
            stabilising: AtomicBool::new(false),
            ahead: Arc::new(Semaphore::new(
                config.read_ahead_bytes_max.min(Semaphore::MAX_PERMITS),
            )),
            identity,
            sessions: Mutex::default(),
            files: Mutex::default(),
            streams: Mutex::default(),
            operations: AtomicU64::new(0),
            ends_with_session: AtomicBool::new(false),
            over: AtomicBool::new(false),
            link,
            config,
        });
        let deadline = inner.deadline();
        let timeout = inner.config.timeout;
        if inner.link.at_least(MapVersion(1), timeout).await.is_err() {
            return Err(StartError::NoManager {
                addresses: inner.config.managers.join(", "),
            });
        }
        let session = inner.session(RankId(0));
        session
            .ready(deadline)
            .await
            .map_err(StartError::NoSession)?;
        tokio::spawn(crate::tidy::tidy(Arc::downgrade(&inner)));
        Ok(Self { inner })
    }

    /// Counters of this mount.
    #[must_use]
    pub fn locality(&self) -> LocalityReport {
        self.inner.counters.report()
    }

    /// The cluster map as this client knows it.
    #[must_use]
    pub fn map(&self) -> Arc<ClusterView> {
        self.inner.link.map()
    }

    /// What the client was made with.
    #[must_use]
    pub fn config(&self) -> &ClientConfig {
        &self.inner.config
    }

    /// Where the client stands and what it prefers now.
    #[must_use]
    pub fn standpoint(&self) -> Arc<Standpoint> {
        self.inner.servers.standpoint()
    }

    /// Stands elsewhere or prefers other servers from the next operation on; what is under way
    /// goes on as it began.
    pub fn stand(&self, standpoint: Standpoint) {
        self.inner.link.set_zone(&standpoint.zone);
        self.inner.servers.stand(standpoint);
    }

    /// Number of operations so far.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.inner.operations.load(Ordering::Relaxed)
    }

    /// Writes everything back, gives everything back and ends the sessions. Ends when everything is
    /// stored, or when the cluster has taken nothing for the configured time.
    ///
    /// # Errors
    /// What an fsync of the first file that could not be stored would have said.
    pub async fn close(&self) -> Result<(), FsError> {
        let mut first = self.inner.give_all_back().await;
        let sessions: Vec<Arc<Session>> = self.inner.sessions.lock().values().cloned().collect();
        for session in sessions {
            // A cluster that has just been silent for that long is not asked again.
            if first.is_ok() {
                first = session.barrier().await;
            }
            session.close().await;
        }
        self.inner.servers.pool.close();
        first
    }

    /// Everything written and changed so far is on stable storage when this returns.
    ///
    /// # Errors
    /// The first error of any file.
    pub async fn sync_all(&self) -> Result<(), FsError> {
        let mut first = Ok(());
        for file in self.inner.all_files() {
            let safe = self.inner.make_safe(&file).await;
            first = first.and(safe).and(file.data.lock().errors.untold());
        }
        let sessions: Vec<Arc<Session>> = self.inner.sessions.lock().values().cloned().collect();
        for session in sessions {
            first = first.and(session.barrier().await);
        }
        first
    }
}

impl Inner {
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.config.timeout
    }

    /// The map, at an epoch of the group that may be used.
    pub(crate) async fn map_with(
        &self,
        group: GroupId,
        floor: Epoch,
        deadline: Instant,
    ) -> Result<Arc<ClusterView>, FsError> {
        loop {
            let map = self.link.map();
            if map.epoch(group).is_some_and(|epoch| epoch >= floor) {
                return Ok(map);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(crate::session::timed_out("the manager"));
            }
            if self.link.refresh(left.min(MAP_TIMEOUT)).await.is_err() {
                self.wait_for_map(map.version(), MAP_PAUSE).await;
            } else if self.link.map().version() == map.version() {
                tokio::time::sleep(MAP_PAUSE).await;
            }
        }
    }

    // ---- sessions

    fn session(&self, rank: RankId) -> Arc<Session> {
        let mut sessions = self.sessions.lock();
        let session = sessions.entry(rank).or_insert_with(|| {
            let owner: Weak<dyn SessionOwner> = Weak::<Self>::clone(&self.me);
            Session::start(
                rank,
                Arc::clone(&self.config),
                self.link.clone(),
                self.identity.clone(),
                owner,
            )
        });
        let session = Arc::clone(session);
        drop(sessions);
        if self.over.load(Ordering::Acquire) {
            session.give_up();
        }
        session
    }

    /// Ends with one session: nothing is done under the others either.
    pub(crate) fn end_with_session(&self) {
        self.over.store(true, Ordering::Release);
        for session in self.sessions.lock().values() {
            session.give_up();
        }
    }

    /// The session with the rank that serves an inode's primary entry, as this client believes.
    pub(crate) fn session_for(&self, ino: InodeId) -> Arc<Session> {
        self.session(self.rank_of_inode(ino))
    }

    pub(crate) fn rank_of_inode(&self, ino: InodeId) -> RankId {
        match self.cache.hint(ino) {
            Some(hint) => self.rank_of_name(InodeId(hint.parent), &hint.name),
            None => self.rank_of_name(ino, b""),
        }
    }

    /// The owner of the nearest enclosing subtree.
    fn rank_of_name(&self, dir: InodeId, name: &[u8]) -> RankId {
        let map = self.link.map();
        let subtrees = map.subtrees();
        let rank = |raw: u32| RankId(u16::try_from(raw).unwrap_or(0));
        let Some(first) = subtrees.first() else {
            return RankId(0);
        };
        if subtrees.iter().all(|s| s.rank == first.rank) {
            return rank(first.rank);
        }
        let mut at = dir;
        let mut hash = NameHash::of(name);
        for _ in 0..DEPTH_MAX {
            let root = subtrees.iter().find(|s| {
                let fragment = Fragment::from_wire(s.fragment);
                s.dir == at.0 && fragment.is_some_and(|f| f.contains(hash))
            });
            if let Some(root) = root {
                return rank(root.rank);
            }
            let Some(hint) = self.cache.hint(at) else {
                break;
            };
            hash = NameHash::of(&hint.name);
            at = InodeId(hint.parent);
        }
        RankId(0)
    }

    /// Asks the rank that serves the inode.
    pub(crate) async fn ask(&self, ino: InodeId, op: Op, how: How) -> Result<Reply, FsError> {
        self.ask_rank(self.rank_of_inode(ino), op, how).await
    }

    /// Asks the rank that serves a name.
    pub(crate) async fn ask_name(
        &self,
        dir: InodeId,
        name: &[u8],
        op: Op,
        how: How,
    ) -> Result<Reply, FsError> {
        self.ask_rank(self.rank_of_name(dir, name), op, how).await
    }

    pub(crate) async fn ask_rank(&self, first: RankId, op: Op, how: How) -> Result<Reply, FsError> {
        self.operations.fetch_add(1, Ordering::Relaxed);
        let mut rank = first;
        for _ in 0..HOPS_MAX {
            match self.session(rank).ask(op.clone(), how).await {
                Ok(reply) => return Ok(reply),
                Err(AskError::Failed(error)) => return Err(error),
                Err(AskError::NotMine(hint)) => {
                    // The map at hand is old; the next guess is better with or without a new one.
                    let _ = self.link.refresh(MAP_TIMEOUT).await;
                    rank = hint.unwrap_or(RankId(0));
                }
            }
        }
        Err(FsError::of_status(
            Status::NOT_MINE,
            "no rank admits to serving this",
        ))
    }

    // ---- files

    pub(crate) fn file(&self, ino: InodeId) -> Arc<File> {
        let mut files = self.files.lock();
        Arc::clone(files.entry(ino).or_insert_with(|| File::new(ino)))
    }

    pub(crate) fn known_file(&self, ino: InodeId) -> Option<Arc<File>> {
        self.files.lock().get(&ino).cloned()
    }

    pub(crate) fn all_files(&self) -> Vec<Arc<File>> {
        self.files.lock().values().cloned().collect()
    }

    pub(crate) fn file_count(&self) -> usize {
        self.files.lock().len()
    }

    /// Forgets files of which nothing is held. The caller holds an `Arc` of each.
    pub(crate) fn forget_given_back(&self, given: &[InodeId]) {
        let mut known = self.files.lock();
        for ino in given {
            let idle = known.get(ino).is_some_and(|file| {
                file.handles.lock().open == 0 && file.is_idle() && Arc::strong_count(file) <= 2
            });
            if idle {
                known.remove(ino);
            }
        }
    }

    /// Forgets a file of which nothing is held. The caller holds its gate and an `Arc` from
    /// [`all_files`](Self::all_files).
    pub(crate) fn forget_if_unused(&self, file: &Arc<File>) {
        let mut files = self.files.lock();
        let told = {
            let data = file.data.lock();
            data.errors.untold().is_ok() && data.mapped.is_empty()
        };
        // The map's, the list's and the caller's.
        if file.handles.lock().open == 0 && told && Arc::strong_count(file) <= 3 {
            files.remove(&file.ino);
        }
    }

    pub(crate) fn files_with_dirty_data(&self) -> Vec<Arc<File>> {
        let files = self.files.lock();
        files
            .values()
            .filter(|file| !file.data.lock().dirty.is_empty())
            .cloned()
            .collect()
    }

    /// The inode is gone: nothing of it has to be stored any more.
    pub(crate) fn drop_file(&self, file: &File) {
        let gone = FsError::from(Errno::ENOENT);
        self.lose_file(file, &gone);
        file.data.lock().errors.forget();
        self.files.lock().remove(&file.ino);
        self.cache.remove(file.ino);
    }
}

impl Inner {
    /// Gives back every file, many at a time.
    async fn give_all_back(self: &Arc<Self>) -> Result<(), FsError> {
        // Those of which nothing has to be said take no request each.
        self.forget_unused_files(usize::MAX).await;
        let files = self.all_files();
        let (mut left, mut lost, mut first) = (files.len(), 0usize, Ok(()));
        let ends =
            futures::stream::iter(files).map(|file| async move { self.end_file(&file).await });
        let mut ends = std::pin::pin!(ends.buffer_unordered(ENDING_MAX));
        let pending = || {
            let dirty = self.dirty_bytes.get();
            (dirty, self.unsynced_bytes.get())
        };
        let (mut seen, mut limit) = (pending(), self.deadline());
        loop {
            match tokio::time::timeout_at(limit, ends.next()).await {
                Ok(None) => break,
                Ok(Some(Ok(()))) => limit = self.deadline(),
                Ok(Some(Err(error))) => {
                    lost += 1;
                    first = first.and(Err(error));
                    // Those behind it have not been tried for long.
                    limit = self.deadline();
                }
                Err(_) if pending() != seen => {
                    (seen, limit) = (pending(), self.deadline());
                    continue;
                }
                Err(_) => {
                    lost += left;
                    first = first.and(Err(crate::session::timed_out("the cluster")));
                    break;
                }
            }
            left -= 1;
        }
        if lost > 0 {
            tracing::error!(files = lost, "files could not be stored before the end");
        }
        first
    }

    async fn end_file(&self, file: &Arc<File>) -> Result<(), FsError> {
        self.settle_mapped(file).await?;
        let _alone = file.gate.write().await;
        let ended = self.give_back(file, Lease::None).await;
        ended.and(file.data.lock().errors.untold())
    }
}

/// Hops from rank to rank before a request fails.
const HOPS_MAX: usize = 8;
/// Files given back at a time when a client ends.
const ENDING_MAX: usize = 256;
/// Time to fetch a newer map, and the pause between attempts.
const MAP_TIMEOUT: Duration = Duration::from_secs(2);
const MAP_PAUSE: Duration = Duration::from_millis(20);
/// Deepest directory for which an owner is looked for.
const DEPTH_MAX: usize = 65_536;
