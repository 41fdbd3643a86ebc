//! The session with one metadata rank: one connection, request numbers, what has to be sent again,
//! renewal.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use hither_managerlink::ManagerLink;
use hither_net::{Connection, Handler, Identity, Incoming, NetError, Responder};
use hither_proto::clock::WallNanos;
use hither_proto::ids::{BatchNumber, RankId};
use hither_proto::kind::Kind;
use hither_proto::meta::{
    Caller, HeldLease, Recall, Reply, Request, Safe, SessionClose, SessionEvict, SessionRenew,
    request::Op,
};
use hither_proto::status::{Errno, Status};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::config::ClientConfig;
use crate::error::FsError;
use crate::resume::{maintain, watch_lapse};

/// What the session needs of its owner.
pub(crate) trait SessionOwner: Send + Sync + 'static {
    /// Something is to be given back; the answer is the acknowledgement. Called on the reading
    /// task, in order with replies.
    fn recall(&self, recall: Recall, responder: Responder);
    /// Zone it stands in now.
    fn zone(&self) -> String;
    /// Leases to be re-stated to a successor, and inodes held open.
    fn held(&self) -> (Vec<HeldLease>, Vec<u64>);
    /// A change was carried out anew by a successor: a lease may have got a new id.
    fn replayed(&self, reply: &Reply);
    /// The session was ended by the server: everything it held is gone, and so are these changes,
    /// which were answered and not safe. Whether a new one may be opened.
    fn lost(&self, changes: &[Request]) -> bool;
    /// A change that had been answered was refused by a successor.
    fn change_lost(&self, change: &Request, why: &FsError);
    /// The leases have lapsed by this client's own clock.
    fn lapsed(&self);
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
    pub(crate) rank: RankId,
    pub(crate) config: Arc<ClientConfig>,
    pub(crate) link: ManagerLink,
    pub(crate) identity: Identity,
    pub(crate) owner: Weak<dyn SessionOwner>,
    pub(crate) state: Mutex<State>,
    pub(crate) up: watch::Sender<Option<Arc<Connection>>>,
    pub(crate) ended: Notify,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) id: u64,
    pub(crate) lease: Duration,
    pub(crate) valid_until: Option<Instant>,
    pub(crate) next_number: u64,
    /// Numbers whose results are still awaited or not safe.
    pub(crate) outstanding: BTreeSet<u64>,
    /// Answered and not safe: sent again to a successor.
    pub(crate) unsafe_requests: BTreeMap<u64, (Batch, Request)>,
    /// Epoch of the process that serves the rank, as far as this session has been opened with it.
    pub(crate) epoch: u64,
    /// Everything up to this batch is in the store; batches of other epochs are others.
    pub(crate) safe: Batch,
    pub(crate) ended: bool,
    /// It was ended by the server, and no new one follows.
    pub(crate) over: bool,
}

/// A batch of one process: its successor counts on from what is in the store, and may use the number
/// of a batch that was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Batch {
    pub(crate) epoch: u64,
    pub(crate) number: BatchNumber,
}

impl State {
    /// Whether everything of a batch is in the store, as far as known.
    pub(crate) fn is_safe(&self, batch: Batch) -> bool {
        batch.epoch == self.safe.epoch && batch.number <= self.safe.number
    }
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
            ended: Notify::new(),
        });
        tokio::spawn(maintain(Arc::downgrade(&session)));
        tokio::spawn(watch_lapse(Arc::downgrade(&session)));
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
        let mut made_in = self.stamp().0;
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
        let mut is_sent = false;
        loop {
            let connection = match self.connection(deadline).await {
                Ok(connection) => connection,
                Err(error) => {
                    self.settle(request.number);
                    return Err(AskError::Failed(error));
                }
            };
            (request.session, request.ack_below) = self.stamp();
            let epoch = self.state.lock().epoch;
            if request.number != 0 && made_in != request.session {
                self.settle(request.number);
                if is_sent {
                    // Whether it was carried out for the session that is gone, nobody can say.
                    return Err(AskError::Failed(session_ended()));
                }
                // The new session may have said already that it waits for no such number.
                request.number = self.new_number();
                made_in = request.session;
                continue;
            }
            is_sent = true;
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
                    match self.answered(&mut request, epoch, reply.decode::<Reply>()) {
                        Some(answer) => return answer,
                        // By a process that is gone: its successor may know nothing of it.
                        None => request.replay = request.number != 0,
                    }
                }
                Err(error) => self.failed(&request, &connection, error, deadline).await?,
            }
        }
    }

    /// `None`: the answer counts no more, the request is to be sent again.
    fn answered(
        &self,
        request: &mut Request,
        epoch: u64,
        reply: Result<Reply, NetError>,
    ) -> Option<Result<Reply, AskError>> {
        let number = request.number;
        let reply = match reply {
            Ok(reply) => reply,
            Err(error) => {
                self.settle(number);
                return Some(Err(AskError::Failed(error.into())));
            }
        };
        let mut state = self.state.lock();
        if let (Some(Op::Create(create)), Some(inode)) = (&mut request.op, &reply.inode)
            && number != 0
        {
            request.replay_ino = inode.ino;
            // The lease it brought is re-stated by itself.
            create.open_for_write &= state.epoch != epoch;
        }
        if state.epoch != epoch {
            return None;
        }
        let batch = Batch {
            epoch,
            number: BatchNumber(reply.batch),
        };
        if number == 0 {
            return Some(Ok(reply));
        }
        if reply.batch == 0 || state.is_safe(batch) {
            state.outstanding.remove(&number);
        } else {
            state
                .unsafe_requests
                .insert(number, (batch, request.clone()));
        }
        Some(Ok(reply))
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
                    final_error(session_ended())
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
    pub(crate) fn stamp(&self) -> (u64, u64) {
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

    pub(crate) fn extend(&self, sent: Instant) {
        let mut state = self.state.lock();
        let until = sent + state.lease;
        state.valid_until = Some(state.valid_until.map_or(until, |known| known.max(until)));
    }

    /// Lets the server end another session.
    pub(crate) async fn evict(&self, session: u64, deadline: Instant) -> Result<(), FsError> {
        let connection = self.connection(deadline).await?;
        let left = deadline.saturating_duration_since(Instant::now());
        let evict = SessionEvict { session };
        connection
            .call(Kind::SESSION_EVICT, &evict, &[], left)
            .await?;
        Ok(())
    }

    /// No new session follows the one the server has ended.
    pub(crate) fn give_up(&self) {
        self.state.lock().over = true;
        // Whoever waits for a connection looks again.
        self.up.send_replace(None);
    }

    async fn connection(&self, deadline: Instant) -> Result<Arc<Connection>, FsError> {
        if let Some(connection) = &*self.up.borrow()
            && !connection.is_closed()
        {
            return Ok(Arc::clone(connection));
        }
        let mut up = self.up.subscribe();
        let is_over = || self.state.lock().over;
        let wanted = up.wait_for(|up| up.as_ref().is_some_and(|c| !c.is_closed()) || is_over());
        match tokio::time::timeout_at(deadline, wanted).await {
            Ok(Ok(_)) if is_over() => Err(session_over()),
            Ok(Ok(up)) => up.clone().ok_or_else(|| timed_out("the metadata server")),
            Ok(Err(_)) => Err(FsError::new(Errno::EIO, "the mount is ending")),
            Err(_) => Err(timed_out("the metadata server")),
        }
    }

    pub(crate) async fn renew(
        &self,
        connection: &Arc<Connection>,
        timeout: Duration,
    ) -> Result<(), NetError> {
        let (session, ack_below) = self.stamp();
        let sent = Instant::now();
        let renew = SessionRenew { session, ack_below };
        connection
            .call(Kind::SESSION_RENEW, &renew, &[], timeout)
            .await?;
        self.extend(sent);
        Ok(())
    }

    fn now_safe(&self, batch: Batch) {
        let mut state = self.state.lock();
        state.safe = state.safe.max(batch);
        let done: Vec<u64> = state
            .unsafe_requests
            .iter()
            .filter(|(_, (made, _))| state.is_safe(*made))
            .map(|(number, _)| *number)
            .collect();
        for number in done {
            state.unsafe_requests.remove(&number);
            state.outstanding.remove(&number);
        }
    }
}

pub(crate) struct Pushes {
    pub(crate) session: Weak<Session>,
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
            session.now_safe(Batch {
                epoch: safe.epoch,
                number: BatchNumber(safe.batch),
            });
        }
    }
}

fn session_over() -> FsError {
    FsError::new(
        Errno::ENOTCONN,
        "the session was ended by the server, and with it the claim of this mount",
    )
}

fn session_ended() -> FsError {
    FsError::new(Errno::EIO, "the session was ended by the server")
}

pub(crate) fn timed_out(who: &str) -> FsError {
    FsError::new(Errno::ETIMEDOUT, format!("{who} did not answer in time"))
}

/// A lease this close to its end is not relied on.
const LEASE_MARGIN: Duration = Duration::from_millis(500);
/// Time for a renewal, and for the last message.
pub(crate) const RENEW_TIMEOUT: Duration = Duration::from_secs(4);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// A wait for a lock has no end of its own.
const ENDLESS: Duration = Duration::from_secs(365 * 24 * 3600);
