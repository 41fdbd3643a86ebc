//! The session with one metadata rank: one connection, request numbers, what has to be sent again,
//! renewal.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use hither_clustermap::ClusterView;
use hither_managerlink::ManagerLink;
use hither_net::{Connection, Handler, Identity, Incoming, NetError, Responder, connect};
use hither_proto::clock::WallNanos;
use hither_proto::ids::{BatchNumber, RankId};
use hither_proto::kind::Kind;
use hither_proto::meta::{
    Caller, HeldLease, Recall, Reclaim, Reply, Request, Safe, SessionClose, SessionOpen,
    SessionOpenReply, SessionRenew, request::Op,
};
use hither_proto::status::{Errno, Status};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::config::ClientConfig;
use crate::error::FsError;

/// What the session needs of its owner.
pub(crate) trait SessionOwner: Send + Sync + 'static {
    /// Something is to be given back; the answer is the acknowledgement. Called on the reading
    /// task, in order with replies.
    fn recall(&self, recall: Recall, responder: Responder);
    /// Leases to be re-stated to a successor, and inodes held open.
    fn held(&self) -> (Vec<HeldLease>, Vec<u64>);
    /// A change was carried out anew by a successor: a lease may have got a new id.
    fn replayed(&self, reply: &Reply);
    /// The session was ended by the server: everything it held is gone.
    fn lost(&self);
}

/// How a request is sent.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct How {
    /// It may change something: it gets a number and is sent again until it is safe.
    pub(crate) changes: bool,
    /// Answer only when the change is in the store.
    pub(crate) safe: bool,
    /// It may wait for somebody else as long as that takes (a lock).
    pub(crate) endless: bool,
    pub(crate) caller: Caller,
}

/// Why a request was not answered by this rank.
#[derive(Debug)]
pub(crate) enum AskError {
    /// Another rank serves it; perhaps this one.
    NotMine(Option<RankId>),
    Failed(FsError),
}

/// The session with one rank.
pub(crate) struct Session {
    rank: RankId,
    config: Arc<ClientConfig>,
    link: ManagerLink,
    identity: Identity,
    owner: Weak<dyn SessionOwner>,
    state: Mutex<State>,
    up: watch::Sender<Option<Arc<Connection>>>,
    safe: watch::Sender<BatchNumber>,
    ended: Notify,
}

#[derive(Default)]
struct State {
    id: u64,
    lease: Duration,
    valid_until: Option<Instant>,
    next_number: u64,
    /// Numbers whose results are still awaited or not safe.
    outstanding: BTreeSet<u64>,
    /// Answered and not safe: sent again to a successor.
    unsafe_requests: BTreeMap<u64, (BatchNumber, Request)>,
    ended: bool,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session(rank {})", self.rank)
    }
}

impl Session {
    pub(crate) fn start(
        rank: RankId,
        config: Arc<ClientConfig>,
        link: ManagerLink,
        identity: Identity,
        owner: Weak<dyn SessionOwner>,
    ) -> Arc<Self> {
        let session = Arc::new(Self {
            rank,
            config,
            link,
            identity,
            owner,
            state: Mutex::new(State {
                next_number: 1,
                ..State::default()
            }),
            up: watch::channel(None).0,
            safe: watch::channel(BatchNumber(0)).0,
            ended: Notify::new(),
        });
        tokio::spawn(maintain(Arc::downgrade(&session)));
        session
    }

    /// Waits until the session is open.
    pub(crate) async fn ready(&self, deadline: Instant) -> Result<(), FsError> {
        self.connection(deadline).await.map(|_| ())
    }

    /// Id of the session; 0 before the first one.
    pub(crate) fn id(&self) -> u64 {
        self.state.lock().id
    }

    /// Time for which everything under leases is good.
    pub(crate) fn valid_for(&self) -> Duration {
        let until = self.state.lock().valid_until;
        until.map_or(Duration::ZERO, |until| {
            until.saturating_duration_since(Instant::now())
        })
    }

    /// Waits until the session's leases hold.
    pub(crate) async fn wait_valid(&self, deadline: Instant) -> Result<(), FsError> {
        if self.valid_for() > LEASE_MARGIN {
            return Ok(());
        }
        loop {
            let connection = self.connection(deadline).await?;
            if self.valid_for() > LEASE_MARGIN {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(timed_out("the metadata server"));
            }
            if self
                .renew(&connection, left.min(RENEW_TIMEOUT))
                .await
                .is_err()
            {
                connection.close();
            }
        }
    }

    pub(crate) async fn ask(&self, op: Op, how: How) -> Result<Reply, AskError> {
        let number = if how.changes { self.new_number() } else { 0 };
        let mut request = Request {
            number,
            caller: Some(how.caller),
            now: WallNanos::now().0,
            safe: how.safe,
            op: Some(op),
            ..Request::default()
        };
        let deadline = Instant::now() + self.config.timeout;
        loop {
            let connection = match self.connection(deadline).await {
                Ok(connection) => connection,
                Err(error) => {
                    self.settle(number);
                    return Err(AskError::Failed(error));
                }
            };
            (request.session, request.ack_below) = self.stamp();
            let sent = Instant::now();
            let left = if how.endless {
                ENDLESS
            } else {
                deadline.saturating_duration_since(sent)
            };
            match connection
                .call(Kind::META_REQUEST, &request, &[], left)
                .await
            {
                Ok(reply) => {
                    self.extend(sent);
                    return self.answered(request, reply.decode::<Reply>());
                }
                Err(error) => self.failed(&request, &connection, error, deadline).await?,
            }
        }
    }

    fn answered(
        &self,
        mut request: Request,
        reply: Result<Reply, NetError>,
    ) -> Result<Reply, AskError> {
        let number = request.number;
        let reply = match reply {
            Ok(reply) => reply,
            Err(error) => {
                self.settle(number);
                return Err(AskError::Failed(error.into()));
            }
        };
        let batch = BatchNumber(reply.batch);
        if number == 0 {
            return Ok(reply);
        }
        let mut state = self.state.lock();
        if batch > *self.safe.borrow() {
            if let (Some(Op::Create(create)), Some(inode)) = (&mut request.op, &reply.inode) {
                request.replay_ino = inode.ino;
                // The lease it brought is re-stated by itself.
                create.open_for_write = false;
            }
            state.unsafe_requests.insert(number, (batch, request));
        } else {
            state.outstanding.remove(&number);
        }
        Ok(reply)
    }

    /// `Ok`: the request is to be sent again.
    async fn failed(
        &self,
        request: &Request,
        connection: &Arc<Connection>,
        error: NetError,
        deadline: Instant,
    ) -> Result<(), AskError> {
        let final_error = |error: FsError| {
            self.settle(request.number);
            Err(AskError::Failed(error))
        };
        match error {
            NetError::Refused { status, failure } => match status {
                Status::RETRY | Status::BUSY => {
                    let pause = Duration::from_millis(u64::from(failure.retry_after_ms.max(10)));
                    if Instant::now() + pause >= deadline {
                        return final_error(timed_out("the metadata server"));
                    }
                    tokio::time::sleep(pause).await;
                    Ok(())
                }
                Status::NO_SESSION => {
                    connection.close();
                    if request.number == 0 {
                        return Ok(());
                    }
                    final_error(FsError::new(
                        Errno::EIO,
                        "the session was ended by the server",
                    ))
                }
                Status::NOT_MINE => {
                    self.settle(request.number);
                    let hint = failure.hint_rank_plus_one.checked_sub(1);
                    let hint = hint.and_then(|rank| u16::try_from(rank).ok()).map(RankId);
                    Err(AskError::NotMine(hint))
                }
                status => final_error(FsError::of_status(status, failure.text)),
            },
            NetError::Protocol(reason) => final_error(FsError::new(Errno::EPROTO, reason)),
            silence => {
                if Instant::now() >= deadline {
                    return final_error(silence.into());
                }
                // A server that says nothing is asked again over a new connection.
                connection.close();
                Ok(())
            }
        }
    }

    /// Waits until everything this session has changed is in the store.
    pub(crate) async fn barrier(&self) -> Result<(), FsError> {
        if self.state.lock().unsafe_requests.is_empty() {
            return Ok(());
        }
        let barrier = Op::Barrier(hither_proto::meta::Barrier {});
        match self.ask(barrier, How::default()).await {
            Ok(_) => Ok(()),
            Err(AskError::Failed(error)) => Err(error),
            Err(AskError::NotMine(_)) => Err(Errno::EIO.into()),
        }
    }

    /// Gives everything back and ends the session.
    pub(crate) async fn close(&self) {
        let connection = self.up.borrow().clone();
        if let Some(connection) = connection {
            let close = SessionClose { session: self.id() };
            // A server that is gone ends the session by itself.
            let _ = connection
                .call(Kind::SESSION_CLOSE, &close, &[], CLOSE_TIMEOUT)
                .await;
        }
        self.state.lock().ended = true;
        self.ended.notify_waiters();
        if let Some(connection) = self.up.send_replace(None) {
            connection.close();
        }
    }

    fn new_number(&self) -> u64 {
        let mut state = self.state.lock();
        let number = state.next_number;
        state.next_number += 1;
        state.outstanding.insert(number);
        number
    }

    fn settle(&self, number: u64) {
        self.state.lock().outstanding.remove(&number);
    }

    /// Session id, and the lowest number still awaited.
    fn stamp(&self) -> (u64, u64) {
        let state = self.state.lock();
        (
            state.id,
            state
                .outstanding
                .first()
                .copied()
                .unwrap_or(state.next_number),
        )
    }

    fn extend(&self, sent: Instant) {
        let mut state = self.state.lock();
        let until = sent + state.lease;
        state.valid_until = Some(state.valid_until.map_or(until, |known| known.max(until)));
    }

    async fn connection(&self, deadline: Instant) -> Result<Arc<Connection>, FsError> {
        if let Some(connection) = &*self.up.borrow()
            && !connection.is_closed()
        {
            return Ok(Arc::clone(connection));
        }
        let mut up = self.up.subscribe();
        let wanted = up.wait_for(|up| up.as_ref().is_some_and(|c| !c.is_closed()));
        match tokio::time::timeout_at(deadline, wanted).await {
            Ok(Ok(up)) => up.clone().ok_or_else(|| timed_out("the metadata server")),
            Ok(Err(_)) => Err(FsError::new(Errno::EIO, "the mount is ending")),
            Err(_) => Err(timed_out("the metadata server")),
        }
    }

    async fn renew(&self, connection: &Arc<Connection>, timeout: Duration) -> Result<(), NetError> {
        let (session, ack_below) = self.stamp();
        let sent = Instant::now();
        let renew = SessionRenew { session, ack_below };
        connection
            .call(Kind::SESSION_RENEW, &renew, &[], timeout)
            .await?;
        self.extend(sent);
        Ok(())
    }

    fn now_safe(&self, batch: BatchNumber) {
        self.safe.send_if_modified(|safe| {
            let newer = batch > *safe;
            if newer {
                *safe = batch;
            }
            newer
        });
        let mut state = self.state.lock();
        let done: Vec<u64> = state
            .unsafe_requests
            .iter()
            .filter(|(_, (made, _))| *made <= batch)
            .map(|(number, _)| *number)
            .collect();
        for number in done {
            state.unsafe_requests.remove(&number);
            state.outstanding.remove(&number);
        }
    }

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
            {
                let mut state = self.state.lock();
                let next_number = state.next_number;
                *state = State {
                    next_number,
                    ..State::default()
                };
            }
            if let Some(owner) = self.owner.upgrade() {
                owner.lost();
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
            zone: self.config.zone.clone(),
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
                Ok(reply) => {
                    let reply: Reply = reply.decode()?;
                    if let Some(owner) = self.owner.upgrade() {
                        owner.replayed(&reply);
                    }
                    BatchNumber(reply.batch)
                }
                Err(NetError::Refused { status, failure }) => {
                    // It had been answered with success: whoever relied on it must hear of it.
                    tracing::error!(number, %status, text = failure.text, "a change was lost in a failover");
                    if let Some(owner) = self.owner.upgrade() {
                        owner.lost();
                    }
                    self.state.lock().unsafe_requests.remove(&number);
                    continue;
                }
                Err(error) => return Err(error),
            };
            if let Some(entry) = self.state.lock().unsafe_requests.get_mut(&number) {
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
async fn maintain(weak: Weak<Session>) {
    let mut pause = PAUSE_MIN;
    loop {
        let Some(session) = weak.upgrade() else {
            return;
        };
        if session.state.lock().ended {
            return;
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

struct Pushes {
    session: Weak<Session>,
}

impl Handler for Pushes {
    fn request(&self, _: &Arc<Connection>, incoming: Incoming, responder: Responder) {
        let owner = self
            .session
            .upgrade()
            .and_then(|session| session.owner.upgrade());
        match (incoming.header.kind, owner) {
            (Kind::RECALL, Some(owner)) => match incoming.decode::<Recall>() {
                Ok(recall) => owner.recall(recall, responder),
                Err(error) => responder.fail(Status::BAD_REQUEST, error.to_string()),
            },
            (kind, _) => responder.fail(Status::UNSUPPORTED, format!("{kind} is not served here")),
        }
    }

    fn push(&self, _: &Arc<Connection>, incoming: Incoming) {
        let Some(session) = self.session.upgrade() else {
            return;
        };
        if incoming.header.kind == Kind::SAFE
            && let Ok(safe) = incoming.decode::<Safe>()
        {
            session.now_safe(BatchNumber(safe.batch));
        }
    }
}

pub(crate) fn timed_out(who: &str) -> FsError {
    FsError::new(Errno::ETIMEDOUT, format!("{who} did not answer in time"))
}

/// A lease this close to its end is not relied on.
const LEASE_MARGIN: Duration = Duration::from_millis(500);
/// Times for the steps of a session.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const OPEN_TIMEOUT: Duration = Duration::from_secs(20);
const RENEW_TIMEOUT: Duration = Duration::from_secs(4);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// A wait for a lock has no end of its own.
const ENDLESS: Duration = Duration::from_secs(365 * 24 * 3600);
/// First and longest pause between attempts to open.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Leases re-stated in one message.
const RECLAIM_LEASES: usize = 10_000;
