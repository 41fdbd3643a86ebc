//! The async shell around a rank's core: connections, the store, chunkservers, time.
//!
//! The core runs on a thread of its own, which also sends the answers; what has to wait (commits,
//! recalls, seals) runs as tasks on the runtime and comes back as events.

#[cfg(test)]
mod bench;
mod chunks;
mod claim;
mod fence;
mod groups;
mod handler;
mod hold;
mod pulse;
mod reach;
mod reaper;
mod serving;
mod store;
mod thread;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use futures::future::BoxFuture;
use hither_clustermap::ClusterView;
use hither_metastore::MetaStore;
use hither_net::{Identity, Listener, NoHandler, Pool};
use hither_proto::common::Role;
use hither_proto::ids::{Epoch, RankId};
use hither_proto::manager::ReportUnreachable;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::AbortHandle;

use crate::core::{Core, Event, Options};
use claim::Authority;
use handler::{Incoming, Sessions};
pub use hold::Holder;
use hold::LeaseClock;
pub use pulse::{Pulse, Vitals};
use reach::Silences;

/// How a rank is run.
#[derive(Debug, Clone)]
pub struct RankConfig {
    /// The rank to serve.
    pub rank: RankId,
    /// Address to listen at, port 0 for any.
    pub listen: String,
    /// Time after its last renewal at which a session ends.
    pub session_lease: Duration,
    /// Answer changes before they are in the store.
    pub early_answers: bool,
    /// Inodes kept in memory.
    pub cached_inodes_max: usize,
    /// Class of the root directory of a new cluster.
    pub default_class: u32,
    /// Who this process is among those that may take the rank; `None`: no other can open the
    /// store.
    pub holder: Option<Holder>,
}

/// Why a rank could not start.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RankError {
    /// The store failed. Trying again may help.
    #[error("metadata store: {0}")]
    Store(#[from] hither_metastore::Error),
    /// The store holds something unreadable. A retry does not help: restore a dump.
    #[error("key {key} of the metadata store cannot be read: {reason}")]
    Damaged {
        /// The key.
        key: String,
        /// What is wrong.
        reason: String,
    },
    /// The address cannot be listened at.
    #[error("listen at {address}: {reason}")]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        reason: String,
    },
}

/// A running rank. Dropping it stops the rank at once, as a kill would.
#[derive(Debug)]
pub struct RankServer {
    listener: Listener,
    events: mpsc::UnboundedSender<Incoming>,
    epoch: Epoch,
    stopped: Arc<Notify>,
    vitals: Vitals,
    /// Gives the rank up at the end.
    release: Option<Release>,
    background: Background,
}

struct Release(BoxFuture<'static, ()>);

impl std::fmt::Debug for Release {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Release")
    }
}

/// Tasks that end with the rank.
#[derive(Debug, Default)]
struct Background(Vec<AbortHandle>);

impl Background {
    fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.0.push(tokio::spawn(task).abort_handle());
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        for task in &self.0 {
            task.abort();
        }
    }
}

/// What every part of the shell shares.
pub(crate) struct Shared<S> {
    pub(crate) store: Arc<S>,
    pub(crate) map: watch::Receiver<Arc<ClusterView>>,
    pub(crate) pool: Pool,
    pub(crate) events: mpsc::UnboundedSender<Incoming>,
    pub(crate) reaper_wake: Notify,
    pub(crate) rank: RankId,
    pub(crate) epoch: Epoch,
    pub(crate) unreachable: Box<dyn Fn(ReportUnreachable) + Send + Sync>,
    pub(crate) silences: Silences,
    pub(crate) batches: AtomicU64,
}

impl RankServer {
    /// Claims the rank in the store (fencing whoever had it), makes the root directory of a new
    /// cluster, and serves. With a holder in the configuration it waits first, for as long as it
    /// takes, until nobody else holds the rank. `unreachable` is told of chunkservers that do not
    /// answer.
    ///
    /// # Errors
    /// [`RankError`].
    pub async fn start<S: MetaStore>(
        config: RankConfig,
        identity: Identity,
        store: Arc<S>,
        map: watch::Receiver<Arc<ClusterView>>,
        unreachable: Box<dyn Fn(ReportUnreachable) + Send + Sync>,
    ) -> Result<Self, RankError> {
        let (events, inbox) = mpsc::unbounded_channel();
        let mut background = Background::default();
        let (authority, clock) = take(&config, &store, &events, &mut background).await?;
        let epoch = authority.epoch;
        let mut restored = claim::restore(&*store, config.rank, authority).await?;
        let identity = Identity {
            role: Role::Mds,
            server_id: u64::from(config.rank.0) + 1,
            ..identity
        };
        let shared = Arc::new(Shared {
            store,
            map,
            pool: Pool::new(identity.clone(), Arc::new(NoHandler)),
            events: events.clone(),
            reaper_wake: Notify::new(),
            rank: config.rank,
            epoch,
            unreachable,
            silences: Silences::default(),
            batches: AtomicU64::new(0),
        });
        restored.groups = groups::choice(&shared.map.borrow());
        let sessions = Arc::new(Sessions::default());
        let stopped = Arc::new(Notify::new());
        let vitals = Vitals {
            turns: Pulse::default(),
            lease: clock,
        };
        let runner = thread::Runner::new(
            Arc::clone(&shared),
            Core::new(options(&config, epoch), restored, Duration::ZERO),
            Arc::clone(&sessions),
            Arc::clone(&stopped),
            vitals.clone(),
        );
        let handler = Arc::new(handler::Front::new(events.clone(), Arc::clone(&sessions)));
        let listener = runner
            .spawn(inbox, config.listen.clone(), identity, handler)
            .await
            .map_err(|reason| RankError::Listen {
                address: config.listen.clone(),
                reason,
            })?;
        background.spawn(groups::follow(Arc::clone(&shared)));
        background.spawn(reaper::run(Arc::clone(&shared)));
        // What a predecessor left to be freed.
        shared.reaper_wake.notify_one();
        let release = config.holder.map(|holder| release(shared, holder.boot_id));
        Ok(Self {
            listener,
            events,
            epoch,
            stopped,
            vitals,
            release,
            background,
        })
    }

    /// Where the rank listens.
    #[must_use]
    pub fn address(&self) -> std::net::SocketAddr {
        self.listener.address()
    }

    /// Epoch of the rank's authority.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Its signs of life, also after its end.
    #[must_use]
    pub fn vitals(&self) -> Vitals {
        self.vitals.clone()
    }

    /// Waits until the rank has lost its authority.
    pub async fn fenced(&self) {
        self.stopped.notified().await;
    }

    /// Waits until everything that was answered is in the store, then stops.
    pub async fn shutdown(mut self) {
        let (done, waiting) = tokio::sync::oneshot::channel();
        // A rank that is gone has nothing left to wait for.
        if self.events.send(Incoming::Shutdown(done)).is_ok()
            && waiting.await.is_ok()
            && let Some(release) = self.release.take()
        {
            // Nobody renews any more.
            drop(std::mem::take(&mut self.background));
            release.0.await;
        }
    }
}

/// Gains authority over the rank's subtrees; where others could have it, waits for its turn.
async fn take<S: MetaStore>(
    config: &RankConfig,
    store: &Arc<S>,
    events: &mpsc::UnboundedSender<Incoming>,
    background: &mut Background,
) -> Result<(Authority, LeaseClock), RankError> {
    let Some(holder) = &config.holder else {
        let authority = claim::claim(&**store, config.rank, config.default_class).await?;
        return Ok((authority, LeaseClock::endless()));
    };
    let taken = hold::take(&**store, config.rank, config.default_class, holder).await?;
    let keep = taken.lease.keep(Arc::clone(store), taken.clock.clone());
    let events = events.clone();
    background.spawn(async move {
        keep.await;
        // A rank that has stopped by itself need not hear it.
        let _ = events.send(Incoming::Event(Event::Deposed));
    });
    Ok((taken.authority, taken.clock))
}

fn options(config: &RankConfig, epoch: Epoch) -> Options {
    Options {
        rank: config.rank,
        epoch,
        session_lease: config.session_lease,
        replay_grace: REPLAY_GRACE,
        early_answers: config.early_answers,
        batch_delay: BATCH_DELAY,
        cached_inodes_max: config.cached_inodes_max,
        session_inodes_max: SESSION_INODES_MAX,
    }
}

fn release<S: MetaStore>(shared: Arc<Shared<S>>, boot_id: u64) -> Release {
    Release(Box::pin(async move {
        hold::release(&*shared.store, shared.rank, boot_id).await;
    }))
}

impl Drop for RankServer {
    fn drop(&mut self) {
        // A rank that stopped by itself does not listen any more.
        let _ = self.events.send(Incoming::Stop);
    }
}

/// Inodes a session may have leases on: twice what a mount keeps by default.
const SESSION_INODES_MAX: usize = 400_000;
/// Time an open batch waits for company while nobody waits for it.
const BATCH_DELAY: Duration = Duration::from_millis(5);
/// Time after a takeover in which only sessions that come back are served.
const REPLAY_GRACE: Duration = Duration::from_secs(1);
