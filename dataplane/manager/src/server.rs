//! The manager's one task: takes things in, decides, stores, publishes.

mod admin;
mod dump;
mod office;
mod publish;
mod uses;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hither_clustermap::ClusterView;
use hither_metastore::{Error, KeyRange, MetaStore};
use hither_net::{Identity, Incoming, Listener, NetError, NoHandler, Responder};
use hither_proto::common::{Empty, Failure, Role};
use hither_proto::ids::{ChunkserverId, ClassId, GroupId, RankId};
use hither_proto::kind::Kind;
use hither_proto::manager::{Heartbeat, RankBeat, ReportUnreachable};
use hither_proto::map::{Rank, ServerState as Shown};
use hither_proto::status::Status;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::decide::{self, Hearing, Liveness};
use crate::leader::{self, Leadership};
use crate::service::Front;
use crate::state::State;
use publish::Subscribers;
use uses::Uses;

/// How a manager is run.
#[derive(Debug, Clone)]
pub struct ManagerConfig {
    /// Address to listen at, port 0 for any.
    pub listen: String,
    /// Address others are told; empty: the one listened at.
    pub advertise: String,
    /// Nobody else can have the store: no need to wait for a predecessor's lease.
    pub store_is_exclusive: bool,
    /// Labels count only inside a client's own zone.
    pub locations: bool,
    /// Time a client's session lives without renewal.
    pub session_lease: Duration,
    /// Class of the root directory of a new cluster, in the grammar of storage classes.
    pub default_class: String,
    /// What kind of store this is, for people.
    pub store_name: String,
    /// Time a chunkserver may be down before its copies are made elsewhere.
    pub repair_after: Duration,
}

/// Why a manager could not start.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ManagerError {
    /// The store failed. Trying again may help.
    #[error("metadata store: {0}")]
    Store(#[from] Error),
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
    /// The default class is none.
    #[error("default storage class: {0}")]
    DefaultClass(String),
}

/// A running manager. Dropping it stops it at once, as a kill would.
#[derive(Debug)]
pub struct Manager {
    address: String,
    inbox: mpsc::Sender<Message>,
    map: watch::Receiver<Arc<ClusterView>>,
    _listener: Listener,
}

/// What the manager's task receives.
pub(crate) enum Message {
    /// A request from the network, and when it arrived.
    Request(Incoming, Responder, Instant),
    /// A rank in this process says where it is.
    Rank(RankBeat),
    /// Somebody in this process could not reach a chunkserver.
    Unreachable(ReportUnreachable),
    /// What a probe found.
    Probed(ReportUnreachable, bool),
    /// What names a class that is to be removed.
    ClassUsed(ClassId, String, Result<Uses, Error>, Responder),
    /// Stop.
    Shutdown(oneshot::Sender<()>),
}

impl Manager {
    /// Binds, stands for election, and serves in the background.
    ///
    /// # Errors
    /// [`ManagerError`].
    pub async fn start<S: MetaStore>(
        config: ManagerConfig,
        store: Arc<S>,
    ) -> Result<Self, ManagerError> {
        let (inbox, messages) = mpsc::channel(INBOX);
        let boot_id = rand::random();
        let identity = Identity {
            role: Role::Manager,
            boot_id,
            ..Identity::default()
        };
        let front = Arc::new(Front::new(inbox.clone()));
        let listener = Listener::bind(&config.listen, identity.clone(), front)
            .await
            .map_err(|e| ManagerError::Listen {
                address: config.listen.clone(),
                reason: e.to_string(),
            })?;
        let address = if config.advertise.is_empty() {
            listener.address().to_string()
        } else {
            config.advertise.clone()
        };
        let (publish, map) = watch::channel(Arc::new(ClusterView::default()));
        let task = Task {
            identity,
            config,
            store,
            boot_id,
            address: address.clone(),
            started: Instant::now(),
            ticked: Duration::ZERO,
            state: State::default(),
            stored: None,
            liveness: Liveness::default(),
            hearing: Hearing::default(),
            leadership: None,
            renewed: Instant::now(),
            leader_seen: None,
            hint: String::new(),
            store_is_away: false,
            subscribers: Subscribers::new(publish),
            links: decide::Links::default(),
            inbox: inbox.downgrade(),
            dumps: dump::Dumps::default(),
            class_scan: Arc::default(),
        };
        tokio::spawn(task.run(messages));
        Ok(Self {
            address,
            inbox,
            map,
            _listener: listener,
        })
    }

    /// Address others are told.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Follows the map; version 0 until this manager leads.
    #[must_use]
    pub fn map(&self) -> watch::Receiver<Arc<ClusterView>> {
        self.map.clone()
    }

    /// A rank in this process says where it is.
    pub async fn announce_rank(&self, rank: RankId, address: String, epoch: u64) {
        let beat = RankBeat {
            rank: u32::from(rank.0),
            address,
            epoch,
            boot_id: 0,
        };
        // A manager that has stopped needs no rank.
        let _ = self.inbox.send(Message::Rank(beat)).await;
    }

    /// A function that takes reports of chunkservers that cannot be reached.
    #[must_use]
    pub fn unreachable_reporter(&self) -> Box<dyn Fn(ReportUnreachable) + Send + Sync> {
        let inbox = self.inbox.downgrade();
        Box::new(move |report| {
            if let Some(inbox) = inbox.upgrade() {
                // Too busy to take it: whoever failed tries again and reports again.
                let _ = inbox.try_send(Message::Unreachable(report));
            }
        })
    }

    /// Finishes what was begun and stops.
    pub async fn shutdown(self) {
        let (done, waiting) = oneshot::channel();
        // A manager that has stopped has nothing to finish.
        if self.inbox.send(Message::Shutdown(done)).await.is_ok() {
            let _ = waiting.await;
        }
    }
}

struct Task<S> {
    config: ManagerConfig,
    store: Arc<S>,
    boot_id: u64,
    address: String,
    started: Instant,
    /// When time was last looked at.
    ticked: Duration,
    state: State,
    /// The state's record as it is in the store.
    stored: Option<Bytes>,
    liveness: Liveness,
    hearing: Hearing,
    leadership: Option<Leadership>,
    renewed: Instant,
    /// Revision of another leader's record and when it was first seen.
    leader_seen: Option<(hither_metastore::Revision, Instant)>,
    hint: String,
    /// Said once while it lasts.
    store_is_away: bool,
    subscribers: Subscribers,
    links: decide::Links,
    identity: Identity,
    inbox: mpsc::WeakSender<Message>,
    dumps: dump::Dumps,
    /// Held while the store is searched for what names a class: one search at a time.
    class_scan: Arc<tokio::sync::Mutex<()>>,
}

impl<S: MetaStore> Task<S> {
    async fn run(mut self, mut messages: mpsc::Receiver<Message>) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        loop {
            tokio::select! {
                message = messages.recv() => match message {
                    Some(Message::Shutdown(done)) => {
                        if let Some(leadership) = self.leadership.take() {
                            let end = leadership.release(&*self.store);
                            // A store that is away is not waited for.
                            let _ = tokio::time::timeout(leader::RENEW, end).await;
                        }
                        self.subscribers.close_all();
                        // Whoever asked may have gone: the manager stops all the same.
                        let _ = done.send(());
                        return;
                    }
                    Some(message) => self.take(message).await,
                    None => return,
                },
                _ = ticks.tick() => {
                    let heard = self.hearing.until(!messages.is_empty(), self.now());
                    self.tick(heard).await;
                }
            }
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Whether this manager may act: it leads and has shown so recently enough.
    fn leads(&self) -> bool {
        self.leadership.is_some() && self.renewed.elapsed() < leader::LEADER_LOST_AFTER
    }

    /// Looks at the time; everything that arrived before `heard` has been taken in.
    async fn tick(&mut self, heard: Duration) {
        let now = self.now();
        self.liveness.excuse(now.saturating_sub(self.ticked), now);
        self.ticked = now;
        if self.leadership.is_none() {
            return self.stand().await;
        }
        if self.renewed.elapsed() >= leader::RENEW {
            self.renew().await;
        }
        if !self.leads() {
            return;
        }
        let now = self.now();
        self.liveness.tidy(now);
        for id in decide::lost_servers(&self.state, &self.liveness, heard) {
            tracing::warn!(%id, "chunkserver is silent: taken as lost");
            let next = decide::server_lost(&self.state, id);
            self.adopt(next).await;
        }
        let repair_after = self.config.repair_after;
        for id in decide::gone_servers(&self.state, &self.liveness, repair_after, now) {
            tracing::warn!(%id, "chunkserver is down for long: its copies are made elsewhere");
            let next = decide::server_gone(&self.state, id);
            self.adopt(next).await;
        }
    }

    async fn take(&mut self, message: Message) {
        match message {
            Message::Request(incoming, responder, arrived) => {
                self.hearing
                    .took(arrived.saturating_duration_since(self.started));
                self.request(incoming, responder).await;
            }
            Message::Rank(beat) => self.rank_beat(beat).await,
            Message::Unreachable(report) => self.probe(report),
            Message::Probed(report, alive) => self.probed(report, alive).await,
            Message::ClassUsed(id, name, uses, responder) => {
                self.class_used(id, &name, uses, responder).await;
            }
            Message::Shutdown(_) => {}
        }
    }

    async fn request(&mut self, incoming: Incoming, responder: Responder) {
        if !self.leads() {
            let text = if self.store_is_away {
                "no manager leads: the metadata store does not answer"
            } else {
                "this manager does not lead"
            };
            let failure = Failure {
                text: text.into(),
                hint_address: self.hint.clone(),
                ..Failure::default()
            };
            return responder.refuse(Status::NOT_LEADER, &failure);
        }
        if let Err(error) = self.serve(&incoming, responder).await {
            tracing::debug!(%error, kind = %incoming.header.kind, "a request cannot be read");
        }
    }

    async fn serve(&mut self, incoming: &Incoming, responder: Responder) -> Result<(), NetError> {
        match incoming.header.kind {
            Kind::HEARTBEAT => {
                let beat: Heartbeat = incoming.decode()?;
                let described = beat.description.as_ref();
                if described.is_none_or(|server| server.addresses.is_empty() || server.boot_id == 0)
                {
                    let text = "a chunkserver says its address and its run";
                    responder.fail(Status::BAD_REQUEST, text);
                    return Ok(());
                }
                let reply = self.heartbeat(&beat).await;
                responder.ok(&reply);
            }
            Kind::MAP_FETCH => self
                .subscribers
                .fetch(&self.state, &incoming.decode()?, responder),
            Kind::MAP_SUBSCRIBE => {
                self.subscribers
                    .subscribe(&self.state, &incoming.decode()?, responder);
            }
            Kind::REPORT_UNREACHABLE => {
                self.probe(incoming.decode()?);
                responder.ok(&Empty {});
            }
            Kind::RANK_BEAT => {
                self.rank_beat(incoming.decode()?).await;
                responder.ok(&Empty {});
            }
            _ => return self.administer(incoming, responder).await,
        }
        Ok(())
    }

    async fn heartbeat(&mut self, beat: &Heartbeat) -> hither_proto::manager::HeartbeatReply {
        let now = self.now();
        let outcome = decide::beat(&self.state, &mut self.liveness, beat, now);
        if let Some(next) = outcome.next {
            self.adopt(next).await;
        }
        let mut reply = outcome.reply;
        // An id that could not be stored was not given.
        if !self
            .state
            .servers
            .contains_key(&ChunkserverId(reply.server))
        {
            reply.server = beat.server;
        }
        reply.map_version = self.state.version;
        reply
    }

    async fn rank_beat(&mut self, beat: RankBeat) {
        let id = RankId(u16::try_from(beat.rank).unwrap_or(u16::MAX));
        let known = self.state.ranks.get(&id);
        if !decide::rank_is_news(known, &beat) {
            return;
        }
        let mut next = self.state.clone();
        next.ranks.insert(
            id,
            Rank {
                rank: beat.rank,
                address: beat.address,
                epoch: beat.epoch,
            },
        );
        match self.read_subtrees().await {
            Ok(subtrees) => next.subtrees = subtrees,
            Err(error) => tracing::warn!(%error, "the table of subtrees cannot be read"),
        }
        self.adopt(next).await;
    }

    /// A report is checked before anything is done: the reporter may be the one that is cut off.
    fn probe(&mut self, report: ReportUnreachable) {
        let id = ChunkserverId(report.to);
        let Some(server) = self.state.servers.get(&id) else {
            return;
        };
        if server.shown.state == i32::from(Shown::Down) {
            return;
        }
        let Some(address) = server.shown.addresses.first().cloned() else {
            return;
        };
        let Some(inbox) = self.inbox.upgrade() else {
            return;
        };
        let identity = self.identity.clone();
        tokio::spawn(async move {
            let alive =
                match hither_net::connect(&address, &identity, Arc::new(NoHandler), PROBE_TIMEOUT)
                    .await
                {
                    Ok(connection) => {
                        let pong = connection
                            .call(Kind::PING, &Empty {}, &[], PROBE_TIMEOUT)
                            .await
                            .is_ok();
                        connection.close();
                        pong
                    }
                    Err(_) => false,
                };
            // A manager that has stopped needs no answer.
            let _ = inbox.send(Message::Probed(report, alive)).await;
        });
    }

    async fn probed(&mut self, report: ReportUnreachable, alive: bool) {
        if !self.leads() {
            return;
        }
        let (from, to) = (ChunkserverId(report.from), ChunkserverId(report.to));
        let now = self.now();
        if !alive {
            tracing::warn!(id = %to, "chunkserver does not answer: taken as lost");
            self.liveness.hold_down(to, now);
            let next = decide::server_lost(&self.state, to);
            return self.adopt(next).await;
        }
        if report.needs_all {
            return self.go_on_without(&report, now).await;
        }
        let group = GroupId(report.group);
        let broken = self.links.note(&report);
        if let Some(next) = decide::link_broken(&self.state, group, report.epoch, &broken, to) {
            tracing::warn!(%group, %from, %to, "no chain avoids the broken links");
            self.liveness.hold_out(group, to, now);
            self.adopt(next).await;
        }
    }

    /// A metadata server cannot reach a member that is alive: what it has to do on all members would
    /// never end.
    async fn go_on_without(&mut self, report: &ReportUnreachable, now: Duration) {
        let to = ChunkserverId(report.to);
        let gone_on = decide::out_of_reach(&self.state, &mut self.liveness, report, now);
        let Some((next, groups)) = gone_on else {
            tracing::debug!(%to, group = report.group, "a metadata server cannot reach it: it stays");
            return;
        };
        tracing::warn!(%to, groups = groups.len(), "a metadata server cannot reach it: its groups go on without it");
        self.adopt(next).await;
    }

    /// Class by name, for requests that name one.
    fn class_id(&self, name: &str) -> Option<ClassId> {
        self.state
            .classes
            .iter()
            .find(|(_, class)| class.name == name)
            .map(|(id, _)| *id)
    }

    async fn raw_revision(&self) -> u64 {
        match self
            .store
            .scan(&KeyRange::prefix(Bytes::from_static(b"m/")), 1)
            .await
        {
            Ok(page) => page.revision.0,
            Err(_) => 0,
        }
    }
}

/// Messages that may wait for the manager.
const INBOX: usize = 4096;
/// How often time is looked at.
const TICK: Duration = Duration::from_millis(100);
/// Time a probed server has to answer.
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);
