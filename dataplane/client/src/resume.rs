//! Opening, resuming and keeping a session.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use hither_clustermap::ClusterView;
use hither_managerlink::ManagerLink;
use hither_net::{Connection, NetError, connect};
use hither_proto::ids::{BatchNumber, RankId};
use hither_proto::kind::Kind;
use hither_proto::meta::{HeldLease, Reclaim, Reply, Request, SessionOpen, SessionOpenReply};
use hither_proto::status::{Errno, Status};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::error::FsError;
use crate::session::{Batch, Pushes, RENEW_TIMEOUT, Session, State};

impl Session {
    // ---- opening and resuming

    async fn open(self: &Arc<Self>, served: &Served) -> Result<Arc<Connection>, NetError> {
        let address = &served.address;
        if address.is_empty() {
            return Err(NetError::Lost("nobody serves the rank yet".into()));
        }
        let handler = Arc::new(Pushes {
            session: Arc::downgrade(self),
        });
        let connection = connect(address, &self.identity, handler, CONNECT_TIMEOUT).await?;
        let opened = tokio::select! {
            opened = self.open_on(&connection, served) => opened,
            () = served.elsewhere() => Err(NetError::Lost("the rank has moved".into())),
        };
        match opened {
            Ok(()) => Ok(connection),
            Err(error) => {
                connection.close();
                Err(error)
            }
        }
    }

    async fn open_on(&self, connection: &Arc<Connection>, served: &Served) -> Result<(), NetError> {
        let known = self.id() != 0;
        let mut opened = self.say_open(connection).await?;
        served.check(opened.epoch)?;
        if known && !opened.resumed {
            tracing::warn!(rank = %self.rank, "the session was ended by the server");
            let old = {
                let mut state = self.state.lock();
                let (next_number, safe) = (state.next_number, state.safe);
                std::mem::replace(
                    &mut *state,
                    State {
                        next_number,
                        safe,
                        ..State::default()
                    },
                )
            };
            let changes: Vec<Request> = old.unsafe_requests.into_values().map(|(_, r)| r).collect();
            if let Some(owner) = self.owner.upgrade()
                && !owner.lost(&changes)
            {
                self.give_up();
                return Err(NetError::Lost("the session has ended".into()));
            }
            opened = self.say_open(connection).await?;
        }
        if opened.reclaim {
            self.reclaim(connection).await?;
        }
        Ok(())
    }

    async fn say_open(&self, connection: &Arc<Connection>) -> Result<SessionOpenReply, NetError> {
        let (session, ack_below) = self.stamp();
        let open = SessionOpen {
            session,
            host: self.config.host.clone(),
            mount_point: self.config.mount_point.clone(),
            // Where nobody stands any more nothing is opened for long.
            zone: self
                .owner
                .upgrade()
                .map(|owner| owner.zone())
                .unwrap_or_default(),
            ack_below,
        };
        let sent = Instant::now();
        let reply = connection
            .call(Kind::SESSION_OPEN, &open, &[], OPEN_TIMEOUT)
            .await?;
        let opened: SessionOpenReply = reply.decode()?;
        if session == 0 || opened.resumed {
            {
                let mut state = self.state.lock();
                state.id = opened.session;
                state.epoch = opened.epoch;
                state.lease = Duration::from_millis(u64::from(opened.lease_ms));
            }
            self.extend(sent);
        }
        Ok(opened)
    }

    /// Re-states what is held and resends, in order, what a successor may not know.
    async fn reclaim(&self, connection: &Arc<Connection>) -> Result<(), NetError> {
        let (leases, open) = match self.owner.upgrade() {
            Some(owner) => owner.held(),
            None => (Vec::new(), Vec::new()),
        };
        let parts = leases.chunks(RECLAIM_LEASES).map(<[HeldLease]>::to_vec);
        let mut open = Some(open);
        for leases in parts {
            let reclaim = Reclaim {
                leases,
                open: open.take().unwrap_or_default(),
                ..Reclaim::default()
            };
            connection
                .call(Kind::RECLAIM, &reclaim, &[], OPEN_TIMEOUT)
                .await?;
        }
        if let Some(open) = open {
            let reclaim = Reclaim {
                open,
                ..Reclaim::default()
            };
            connection
                .call(Kind::RECLAIM, &reclaim, &[], OPEN_TIMEOUT)
                .await?;
        }
        let resend: Vec<(u64, Request)> = {
            let state = self.state.lock();
            let all = state.unsafe_requests.iter();
            all.map(|(number, (_, request))| (*number, request.clone()))
                .collect()
        };
        for (number, mut request) in resend {
            (request.session, request.ack_below) = self.stamp();
            request.replay = true;
            let sent = connection
                .call(Kind::META_REQUEST, &request, &[], OPEN_TIMEOUT)
                .await;
            let batch = match sent {
                // Not now: the session is opened anew, and everything sent again.
                Err(
                    error @ NetError::Refused {
                        status: Status::RETRY | Status::BUSY | Status::NOT_MINE | Status::NO_SESSION,
                        ..
                    },
                ) => return Err(error),
                Ok(reply) => {
                    let reply: Reply = reply.decode()?;
                    if let Some(owner) = self.owner.upgrade() {
                        owner.replayed(&reply);
                    }
                    Batch {
                        epoch: self.state.lock().epoch,
                        number: BatchNumber(reply.batch),
                    }
                }
                Err(NetError::Refused { status, failure }) => {
                    // It had been answered with success: whoever relied on it must hear of it.
                    tracing::error!(number, %status, text = failure.text, "a change was lost in a failover");
                    if let Some(owner) = self.owner.upgrade() {
                        let why = FsError::of_status(status, failure.text.clone());
                        let why = FsError::new(Errno::EIO, why.reason);
                        owner.change_lost(&request, &why);
                    }
                    let mut state = self.state.lock();
                    state.unsafe_requests.remove(&number);
                    state.outstanding.remove(&number);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let mut state = self.state.lock();
            if batch.number == BatchNumber(0) || state.is_safe(batch) {
                state.unsafe_requests.remove(&number);
                state.outstanding.remove(&number);
            } else if let Some(entry) = state.unsafe_requests.get_mut(&number) {
                entry.0 = batch;
            }
        }
        let done = Reclaim {
            done: true,
            ..Reclaim::default()
        };
        connection
            .call(Kind::RECLAIM, &done, &[], OPEN_TIMEOUT)
            .await?;
        Ok(())
    }
}

/// Keeps the session: connects, resumes, renews. Ends with the session.
pub(crate) async fn maintain(weak: Weak<Session>) {
    let mut pause = PAUSE_MIN;
    loop {
        let Some(session) = weak.upgrade() else {
            return;
        };
        {
            let state = session.state.lock();
            if state.ended || state.over {
                return;
            }
        }
        let served = Served::now(&session.link, session.rank);
        match session.open(&served).await {
            Ok(connection) => {
                pause = PAUSE_MIN;
                session.up.send_replace(Some(Arc::clone(&connection)));
                let every = (session.state.lock().lease / 3).max(PAUSE_MIN);
                drop(session);
                keep(&weak, &connection, every, &served).await;
            }
            Err(error) => {
                tracing::debug!(%error, "no session yet");
                let mut map = session.link.watch();
                drop(session);
                // The next attempt comes with a new map, or after a moment.
                let _ = tokio::time::timeout(pause, map.changed()).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }
}

/// Renews until the connection ends, or the rank is served elsewhere.
async fn keep(
    weak: &Weak<Session>,
    connection: &Arc<Connection>,
    every: Duration,
    served: &Served,
) {
    loop {
        tokio::select! {
            () = connection.closed() => return,
            () = served.elsewhere() => {
                // Its process may hang: nobody would tell those who wait for an answer.
                tracing::info!("the rank has moved: following it");
                connection.close();
                return;
            }
            () = tokio::time::sleep(every) => {}
        }
        let Some(session) = weak.upgrade() else {
            connection.close();
            return;
        };
        if let Err(error) = session.renew(connection, every.max(RENEW_TIMEOUT)).await {
            tracing::debug!(%error, "the session could not be renewed");
            connection.close();
            return;
        }
    }
}

/// Tells the owner when the leases lapse without renewal.
pub(crate) async fn watch_lapse(weak: Weak<Session>) {
    let mut told = false;
    loop {
        let Some(session) = weak.upgrade() else {
            return;
        };
        let (until, ended) = {
            let state = session.state.lock();
            (state.valid_until, state.ended || state.over)
        };
        if ended {
            return;
        }
        let now = Instant::now();
        let valid = until.filter(|until| *until > now);
        match (valid, until) {
            (Some(until), _) => {
                told = false;
                drop(session);
                tokio::time::sleep_until(until).await;
            }
            (None, Some(_)) if !told => {
                told = true;
                tracing::warn!(rank = %session.rank, "the leases have lapsed: no metadata server answers");
                if let Some(owner) = session.owner.upgrade() {
                    owner.lapsed();
                }
            }
            _ => {
                let mut up = session.up.subscribe();
                drop(session);
                // A new connection renews them; so may one that stands.
                let _ = tokio::time::timeout(PAUSE_MAX, up.changed()).await;
            }
        }
    }
}

/// By whom a rank is served.
struct Served {
    map: watch::Receiver<Arc<ClusterView>>,
    rank: RankId,
    /// Empty: nobody that the map knows.
    address: String,
    /// Highest epoch heard of, from the map or the process itself.
    epoch: AtomicU64,
}

impl Served {
    fn now(link: &ManagerLink, rank: RankId) -> Self {
        let map = link.watch();
        let (address, epoch) = map
            .borrow()
            .rank(rank)
            .map(|rank| (rank.address.clone(), AtomicU64::new(rank.epoch)))
            .unwrap_or_default();
        Self {
            map,
            rank,
            address,
            epoch,
        }
    }

    /// The process says its epoch; an older one has been deposed and does not know.
    fn check(&self, epoch: u64) -> Result<(), NetError> {
        let known = self.epoch.fetch_max(epoch, Ordering::AcqRel);
        if epoch < known {
            return Err(NetError::Lost("another process has the rank".into()));
        }
        Ok(())
    }

    /// Waits until the map shows a later epoch: another process.
    async fn elsewhere(&self) {
        let mut map = self.map.clone();
        let moved = map.wait_for(|map| {
            let known = self.epoch.load(Ordering::Acquire);
            map.rank(self.rank).is_some_and(|rank| rank.epoch > known)
        });
        if moved.await.is_err() {
            // The link has ended, and with it the mount.
            std::future::pending::<()>().await;
        }
    }
}

/// Times for the steps of opening a session.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const OPEN_TIMEOUT: Duration = Duration::from_secs(20);
/// First and longest pause between attempts to open.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Leases re-stated in one message.
const RECLAIM_LEASES: usize = 10_000;
