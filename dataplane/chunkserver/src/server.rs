//! A running chunkserver.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hither_chunkstore::{ClusterId, Disk, Error, Medium, Store};
use hither_managerlink::ManagerLink;
use hither_net::{Identity, Listener, NoHandler, Pool};
use hither_proto::common::Role;
use hither_proto::ids::{BootId, ChunkserverId, DiskIndex, GroupId};
use hither_proto::manager::HeartbeatReply;
use hither_proto::status::Status;
use parking_lot::RwLock;
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::admit::Admission;
use crate::beat::{self, Description};
use crate::config::ChunkServerConfig;
use crate::counters::{Counters, Counts, RecentWrite};
use crate::doubts::Doubts;
use crate::error::StartError;
use crate::fills::{FillProgress, Fills};
use crate::gate::Gates;
use crate::handler::Front;
use crate::links::Links;
use crate::operation::Parked;
use crate::probes::Probes;
use crate::scrub;
use crate::sessions::Sessions;
use crate::status::Refusal;

/// What all requests share.
pub(crate) struct Inner {
    pub(crate) config: ChunkServerConfig,
    pub(crate) me: ChunkserverId,
    pub(crate) boot: BootId,
    /// What others are told.
    pub(crate) address: String,
    pub(crate) store: Store,
    pub(crate) link: ManagerLink,
    pub(crate) pool: Arc<Pool>,
    pub(crate) links: Links,
    pub(crate) gates: Gates<Parked>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) fills: Fills,
    pub(crate) doubts: Doubts,
    pub(crate) probes: Probes,
    pub(crate) counts: Counts,
    pub(crate) labels: RwLock<Vec<String>>,
    /// Something to tell the manager at once.
    pub(crate) beat_now: Notify,
    /// Threads of the disks start tasks here.
    pub(crate) runtime: tokio::runtime::Handle,
    stopping: AtomicBool,
    stopped: watch::Sender<Option<StartError>>,
}

impl Inner {
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Serves nothing more, and tells why to who waits for the end.
    pub(crate) fn stop_with(&self, error: StartError) {
        self.stopping.store(true, Ordering::Release);
        self.stopped.send_replace(Some(error));
    }

    /// The disk of this number.
    pub(crate) fn disk(&self, index: DiskIndex) -> Result<&Disk, Refusal> {
        self.store.disk(index).ok_or_else(|| self.no_disk())
    }

    pub(crate) fn no_disk(&self) -> Refusal {
        Refusal::new(Status::DISK_FAILED, "the disk of the group does not serve")
    }

    /// Carries a job out on a thread of a disk.
    pub(crate) async fn on_disk<T: Send + 'static>(
        &self,
        index: DiskIndex,
        job: impl FnOnce(&Disk) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let disk = self.store.disk(index).ok_or_else(|| Error::DiskFailed {
            disk: index,
            cause: "it does not serve".into(),
        })?;
        let (sender, receiver) = oneshot::channel();
        disk.submit(move |disk| {
            // Whoever asked for it may be gone.
            let _ = sender.send(job(disk));
        })?;
        receiver.await.unwrap_or(Err(Error::Closed))
    }
}

/// A running chunkserver. Dropping it without [`ChunkServer::shutdown`] is like killing it.
pub struct ChunkServer {
    inner: Arc<Inner>,
    front: Arc<Front>,
    /// Gone once the server stops.
    listener: Option<Listener>,
    tasks: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for ChunkServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "ChunkServer({} at {})",
            self.inner.me, self.inner.address
        )
    }
}

impl ChunkServer {
    /// Opens the disks, registers with the manager and serves.
    ///
    /// # Errors
    /// Every [`StartError`].
    pub async fn start(config: ChunkServerConfig) -> Result<Self, StartError> {
        let media = media(&config)?;
        Self::start_on(config, media).await
    }

    /// As [`ChunkServer::start`], on these disks instead of the configured ones.
    ///
    /// # Errors
    /// Every [`StartError`].
    pub async fn start_on(
        config: ChunkServerConfig,
        media: Vec<Medium>,
    ) -> Result<Self, StartError> {
        if media.is_empty() {
            return Err(StartError::NoDisks);
        }
        let deadline = Instant::now() + Duration::from_millis(config.start_timeout_ms);
        let mut identity = Identity {
            role: Role::Chunkserver,
            cluster_id: Bytes::new(),
            server_id: 0,
            boot_id: rand::random::<u64>().max(1),
        };
        let link = ManagerLink::start(config.managers.clone(), identity.clone(), &config.zone);
        // Disks of another cluster are refused by name when they are opened.
        let cluster = cluster_from_map(&link, deadline).await?;
        identity.cluster_id = cluster_bytes(cluster);
        let store = open_store(media, cluster, &config).await?;
        let front = Arc::new(Front::default());
        let listener = Listener::bind(&config.listen, identity.clone(), Arc::clone(&front) as _)
            .await
            .map_err(|error| StartError::Listen {
                address: config.listen.clone(),
                cause: error.to_string(),
            })?;
        let address = match config.advertise.as_str() {
            "" => listener.address().to_string(),
            advertised => advertised.to_owned(),
        };
        let boot = BootId(identity.boot_id);
        let me = register(&link, &store, &config, &address, boot, deadline).await?;
        identity.server_id = me.0;
        listener.set_identity(identity.clone());
        link.set_identity(identity.clone());
        let inner = inner(config, &identity, address, store, link);
        wait_for_own_entry(&inner, deadline).await?;
        let mut tasks = vec![
            tokio::spawn(beat::run(Arc::clone(&inner))),
            tokio::spawn(follow_map(Arc::clone(&inner))),
        ];
        if inner.config.scrub_days > 0 {
            let disks = inner.store.disks();
            tasks.extend(
                disks.map(|disk| tokio::spawn(scrub::run(Arc::clone(&inner), disk.index()))),
            );
        }
        settle_disks(&inner);
        front.open(Arc::clone(&inner));
        tracing::info!(server = %inner.me, address = inner.address, "chunkserver serves");
        Ok(Self {
            inner,
            front,
            listener: Some(listener),
            tasks,
        })
    }

    /// The server's number.
    #[must_use]
    pub fn id(&self) -> ChunkserverId {
        self.inner.me
    }

    /// Number of this run.
    #[must_use]
    pub fn boot_id(&self) -> BootId {
        self.inner.boot
    }

    /// Address that others are told.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.inner.address
    }

    /// What happened since the start.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.inner.counts.snapshot()
    }

    /// The last writes that were applied, oldest first.
    #[must_use]
    pub fn recent_writes(&self) -> Vec<RecentWrite> {
        self.inner.counts.recent()
    }

    /// How far the filling of each group is that this server fills.
    #[must_use]
    pub fn fill_progress(&self) -> BTreeMap<GroupId, FillProgress> {
        self.inner.fills.progress()
    }

    /// The disks.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.inner.store
    }

    /// Changes the server's own labels; the manager is told at once.
    pub fn set_labels(&self, labels: Vec<String>) {
        *self.inner.labels.write() = labels;
        self.inner.beat_now.notify_one();
    }

    /// Waits until the server stops by itself, and says why.
    pub async fn stopped(&self) -> StartError {
        let mut stopped = self.inner.stopped.subscribe();
        match stopped.wait_for(Option::is_some).await {
            Ok(error) => error
                .clone()
                .unwrap_or(StartError::Duplicate(self.inner.me)),
            Err(_) => StartError::Duplicate(self.inner.me),
        }
    }

    /// Takes no more requests, finishes those under way, makes everything stable and closes the
    /// disks.
    ///
    /// # Errors
    /// A disk that could not be closed; what was not acknowledged as stable may be lost there.
    pub async fn shutdown(mut self) -> Result<(), StartError> {
        let inner = Arc::clone(&self.inner);
        inner.stopping.store(true, Ordering::Release);
        self.listener = None;
        for task in std::mem::take(&mut self.tasks) {
            task.abort();
            // Ended or not is all the same, as long as it is over.
            let _ = task.await;
        }
        if tokio::time::timeout(STOP_TIMEOUT, inner.gates.idle())
            .await
            .is_err()
        {
            tracing::warn!("requests are still under way, stopping without them");
        }
        inner.fills.close().await;
        // Whoever asks a disk for its room has it open.
        inner.probes.answers().await;
        inner.links.close();
        inner.pool.close();
        self.front.close();
        let closing = Arc::clone(&inner);
        tokio::task::spawn_blocking(move || closing.store.close())
            .await
            .unwrap_or(Err(Error::Closed))?;
        // Calls that were cut off let go of the disks, which stay locked until then.
        for _ in 0..LET_GO_ROUNDS {
            if Arc::strong_count(&inner) <= 2 {
                break;
            }
            tokio::time::sleep(LET_GO_PAUSE).await;
        }
        Ok(())
    }
}

impl Drop for ChunkServer {
    fn drop(&mut self) {
        self.inner.stopping.store(true, Ordering::Release);
        self.front.close();
        self.inner.fills.cancel();
        self.inner.links.close();
        self.inner.pool.close();
        for task in &self.tasks {
            task.abort();
        }
    }
}

fn media(config: &ChunkServerConfig) -> Result<Vec<Medium>, StartError> {
    let media = config.disks.iter().map(|path| {
        Medium::real(path).map_err(|error| StartError::Disk {
            path: path.display().to_string(),
            cause: error.to_string(),
        })
    });
    media.collect()
}

fn cluster_bytes(cluster: ClusterId) -> Bytes {
    Bytes::copy_from_slice(cluster.as_bytes())
}

async fn cluster_from_map(link: &ManagerLink, deadline: Instant) -> Result<ClusterId, StartError> {
    let mut map = link.watch();
    let first = map.wait_for(|map| !map.cluster_id().is_empty());
    let found = tokio::time::timeout_at(deadline, first).await;
    let Ok(Ok(map)) = found else {
        return Err(StartError::NoManager("no cluster map has come".into()));
    };
    ClusterId::new(map.cluster_id())
        .ok_or_else(|| StartError::NoManager("the cluster's id is no id".into()))
}

async fn open_store(
    media: Vec<Medium>,
    cluster: ClusterId,
    config: &ChunkServerConfig,
) -> Result<Store, StartError> {
    let options = config.store_options();
    let opened =
        tokio::task::spawn_blocking(move || Store::open(media, Some(cluster), &options)).await;
    Ok(opened.unwrap_or(Err(Error::Closed))?)
}

/// Gets the server's number, or has it confirmed.
async fn register(
    link: &ManagerLink,
    store: &Store,
    config: &ChunkServerConfig,
    address: &str,
    boot: BootId,
    deadline: Instant,
) -> Result<ChunkserverId, StartError> {
    let description = Description {
        config,
        labels: config.labels.clone(),
        address,
        boot,
        server: store.server(),
        disks: Probes::default().describe(store).await,
    };
    let left = deadline.saturating_duration_since(Instant::now());
    let reply: HeartbeatReply = beat::beat(link, description, Vec::new(), 0, left)
        .await
        .map_err(|error| StartError::NoManager(error.to_string()))?;
    if reply.duplicate {
        return Err(StartError::Duplicate(store.server()));
    }
    let me = ChunkserverId(reply.server);
    if me == ChunkserverId(0) {
        return Err(StartError::NoManager("the manager gave no number".into()));
    }
    store.assign(me)?;
    Ok(me)
}

fn inner(
    config: ChunkServerConfig,
    identity: &Identity,
    address: String,
    store: Store,
    link: ManagerLink,
) -> Arc<Inner> {
    let runtime = tokio::runtime::Handle::current();
    let pool = Arc::new(Pool::new(identity.clone(), Arc::new(NoHandler)));
    Arc::new(Inner {
        me: ChunkserverId(identity.server_id),
        boot: BootId(identity.boot_id),
        address,
        store,
        link,
        links: Links::new(Arc::clone(&pool), runtime.clone()),
        pool,
        gates: Gates::default(),
        admission: Arc::new(Admission::new(
            config.requests_max,
            config.request_bytes_max,
        )),
        sessions: Arc::default(),
        fills: Fills::new(config.fill_bytes_per_second),
        doubts: Doubts::default(),
        probes: Probes::default(),
        counts: Counts::default(),
        labels: RwLock::new(config.labels.clone()),
        beat_now: Notify::new(),
        runtime,
        stopping: AtomicBool::new(false),
        stopped: watch::channel(None).0,
        config,
    })
}

/// Waits for a map that knows of this run: an older one may still say that this server has
/// everything, although its last run may have lost what was not stable.
async fn wait_for_own_entry(inner: &Inner, deadline: Instant) -> Result<(), StartError> {
    let mut map = inner.link.watch();
    let knows = map.wait_for(|map| {
        map.server(inner.me)
            .is_some_and(|server| server.chunkserver.boot_id == inner.boot.0)
    });
    match tokio::time::timeout_at(deadline, knows).await {
        Ok(Ok(_)) => Ok(()),
        _ => Err(StartError::NoManager(
            "the map does not know of this server".into(),
        )),
    }
}

async fn follow_map(inner: Arc<Inner>) {
    let mut map = inner.link.watch();
    loop {
        inner.fills.follow(&inner);
        if map.changed().await.is_err() {
            return;
        }
    }
}

/// Settles in the background what the last run left in the middle of something.
fn settle_disks(inner: &Inner) {
    for disk in inner.store.disks() {
        let submitted = disk.submit(|disk| {
            if let Err(error) = disk.settle_after_start() {
                tracing::error!(%error, "copies of the last run are not settled");
            }
        });
        if let Err(error) = submitted {
            tracing::warn!(%error, "copies of the last run are settled at their first use");
        }
    }
}

/// How long stopping waits for calls that were cut off.
const LET_GO_ROUNDS: u32 = 1000;
const LET_GO_PAUSE: Duration = Duration::from_millis(1);
/// Time requests under way get to finish when the server stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
