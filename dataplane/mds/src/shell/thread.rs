//! The core's thread: events in, effects carried out or started.
//!
//! The rank's connections are read on this thread as well: a request is carried out and answered
//! where it arrives, and no other thread is woken for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hither_metastore::MetaStore;
use hither_net::{Identity, Listener, NetError, Responder};
use hither_proto::common::{Empty, Failure};
use hither_proto::ids::SessionId;
use hither_proto::kind::Kind;
use hither_proto::meta::{Recall, RecallReply, Safe, SessionList, StatusReply};
use hither_proto::status::Status;
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::handler::{Ask, Front, Incoming, Sessions};
use super::hold::LeaseClock;
use super::pulse::{Pulse, Vitals};
use super::serving::ServingClock;
use super::{Shared, chunks, fence, store};
use crate::core::{Answer, Core, Effect, Event, LoadKey, Token};

/// A rank's core with everything it needs to carry out effects.
pub(crate) struct Runner<S> {
    shared: Arc<Shared<S>>,
    core: Core,
    sessions: Arc<Sessions>,
    stopped: Arc<Notify>,
    lease: LeaseClock,
    turns: Pulse,
    runtime: Handle,
    /// What was started and has not come back; ends with the rank.
    tasks: JoinSet<()>,
    started: Instant,
    clock: ServingClock,
    waiting: BTreeMap<Token, Responder>,
    by_request: BTreeMap<(u64, u64), Token>,
    next_token: u64,
    wake_at: Option<Duration>,
    ending: Option<oneshot::Sender<()>>,
    running: bool,
}

impl<S: MetaStore> Runner<S> {
    pub(crate) fn new(
        shared: Arc<Shared<S>>,
        core: Core,
        sessions: Arc<Sessions>,
        stopped: Arc<Notify>,
        vitals: Vitals,
    ) -> Self {
        Self {
            shared,
            core,
            sessions,
            stopped,
            lease: vitals.lease,
            turns: vitals.turns,
            runtime: Handle::current(),
            tasks: JoinSet::new(),
            started: Instant::now(),
            clock: ServingClock::default(),
            waiting: BTreeMap::new(),
            by_request: BTreeMap::new(),
            next_token: 1,
            wake_at: None,
            ending: None,
            running: true,
        }
    }

    /// Starts the thread, which listens at `address` and runs the core until it is stopped. Why
    /// it cannot listen, if so.
    pub(crate) async fn spawn(
        mut self,
        mut inbox: mpsc::UnboundedReceiver<Incoming>,
        address: String,
        identity: Identity,
        handler: Arc<Front>,
    ) -> Result<Listener, String> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| error.to_string())?;
        let (tell, listening) = oneshot::channel();
        let name = format!("mds-{}", self.shared.rank);
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            runtime.block_on(async {
                match Listener::bind(&address, identity, handler).await {
                    Ok(listener) => {
                        // Whoever started the rank may have gone; then it is stopped at once.
                        let _ = tell.send(Ok(listener));
                        self.run(&mut inbox).await;
                    }
                    Err(error) => drop(tell.send(Err(error.to_string()))),
                }
            });
        });
        // Without a thread there is no server: as fatal as running out of memory.
        drop(spawned.expect("the system gives the rank a thread"));
        listening
            .await
            .unwrap_or_else(|_| Err("the rank's thread has ended".into()))
    }

    async fn run(&mut self, inbox: &mut mpsc::UnboundedReceiver<Incoming>) {
        self.handle(Event::Tick);
        let sleep = tokio::time::sleep(Duration::ZERO);
        tokio::pin!(sleep);
        let mut last_tick = self.now();
        while self.running {
            self.turns.beat();
            // The core's clock may stand still for a while: only the distance counts.
            let wait = match self.wake_at {
                Some(at) => at.saturating_sub(self.now()).min(TICK),
                None => TICK,
            };
            let due = Instant::now() + wait;
            // Setting a timer costs more than being woken a little early.
            if due < sleep.deadline() || sleep.is_elapsed() {
                sleep.as_mut().reset(due);
            }
            tokio::select! {
                biased;
                incoming = inbox.recv() => match incoming {
                    Some(incoming) => self.take_all(incoming, inbox),
                    None => return,
                },
                () = &mut sleep => {}
            }
            // Also while there is always something to do: sessions expire, memory is given back.
            let now = self.now();
            if now >= last_tick + TICK || self.wake_at.is_some_and(|at| at <= now) {
                last_tick = now;
                self.wake_at = None;
                self.handle(Event::Tick);
            }
            if self.ending.is_some() && self.core.is_settled() {
                self.running = false;
            }
        }
        self.sessions.close_all();
        if let Some(ending) = self.ending.take() {
            // Whoever asked may have gone; the rank stops all the same.
            let _ = ending.send(());
        }
    }

    /// Takes what has arrived; what arrives meanwhile on the rank's connections waits its turn.
    fn take_all(&mut self, first: Incoming, inbox: &mut mpsc::UnboundedReceiver<Incoming>) {
        self.take(first);
        while self.running
            && let Ok(more) = inbox.try_recv()
        {
            self.take(more);
        }
    }

    fn now(&mut self) -> Duration {
        let serves = self.lease.holds();
        self.clock.at(self.started.elapsed(), serves)
    }

    fn take(&mut self, incoming: Incoming) {
        match incoming {
            Incoming::Ask(ask, responder) => self.ask(ask, responder),
            Incoming::Event(event) => self.handle(event),
            Incoming::Cancel(connection, request) => {
                if let Some(token) = self.by_request.remove(&(connection, request)) {
                    self.handle(Event::Cancel(token));
                }
            }
            Incoming::Closed(connection) => self.closed(connection),
            Incoming::Shutdown(done) => {
                self.ending = Some(done);
                self.handle(Event::Tick);
            }
            Incoming::Stop => self.running = false,
        }
    }

    fn ask(&mut self, ask: Ask, responder: Responder) {
        if !self.lease.holds() {
            // Another process may have the rank, and have changed what we would tell.
            return responder.refuse(Status::RETRY, &unsure());
        }
        let token = Token(self.next_token);
        self.next_token += 1;
        let event = match ask {
            Ask::Open(open) => Event::SessionOpen(token, open),
            Ask::Renew(renew) => {
                Event::SessionRenew(token, SessionId(renew.session), renew.ack_below)
            }
            Ask::Close(close) => Event::SessionClose(token, SessionId(close.session)),
            Ask::Reclaim(session, reclaim) => Event::Reclaim(token, session, reclaim),
            Ask::Request(request) => {
                if waits_for_lock(&request) {
                    let key = (responder.connection().id(), responder.request_id());
                    self.by_request.insert(key, token);
                }
                Event::Request(token, request)
            }
            Ask::Evict(evict) => Event::Evict(token, SessionId(evict.session)),
            Ask::List => Event::List(token),
            Ask::Status => return self.status(responder),
        };
        self.waiting.insert(token, responder);
        self.handle(event);
    }

    fn closed(&mut self, connection: u64) {
        let gone: BTreeSet<Token> = self
            .waiting
            .iter()
            .filter(|(_, responder)| responder.connection().id() == connection)
            .map(|(token, _)| *token)
            .collect();
        if !gone.is_empty() {
            self.handle(Event::Gone(gone));
        }
    }

    fn status(&self, responder: Responder) {
        let (requests, waiting) = self.core.counters();
        responder.ok(&StatusReply {
            requests,
            batches: self.shared.batches.load(Ordering::Relaxed),
            cached_inodes: self.core.cached_inodes() as u64,
            cache_bytes: 0,
            waiting: waiting as u64,
        });
    }

    /// Events that are ready at once (loads the store can answer) are handled in the same turn.
    fn handle(&mut self, event: Event) {
        let mut next = vec![event];
        while let Some(event) = next.pop() {
            let now = self.now();
            for effect in self.core.handle(event, now) {
                next.extend(self.carry_out(effect));
            }
        }
    }

    fn carry_out(&mut self, effect: Effect) -> Option<Event> {
        match effect {
            Effect::Answer(token, answer) => self.answer(token, answer),
            Effect::Load(key) => return self.load(key),
            Effect::Commit(commit) => {
                let shared = Arc::clone(&self.shared);
                self.begin(async move {
                    let (batch, outcome) = store::commit(&shared, *commit).await;
                    shared.send(Event::Committed(batch, outcome));
                });
            }
            Effect::Reserve(counter) => {
                let shared = Arc::clone(&self.shared);
                self.begin(async move {
                    let block = store::reserve(&*shared.store, counter).await;
                    shared.send(Event::Reserved(counter, block));
                });
            }
            Effect::Recall(id, session, recall) => self.recall(id, session, recall),
            Effect::Safe(session, batch) => {
                if let Some(connection) = self.sessions.connection(session) {
                    // A client that is gone learns it when it resumes.
                    let safe = Safe {
                        batch: batch.0,
                        epoch: self.shared.epoch.0,
                    };
                    let _ = connection.push(Kind::SAFE, &safe);
                }
            }
            Effect::Trim(ino, chunk) => {
                self.begin(chunks::trim(Arc::clone(&self.shared), ino, chunk));
            }
            Effect::Seal(ino, list) => {
                self.begin(chunks::seal(Arc::clone(&self.shared), ino, list));
            }
            Effect::Fence(session) => {
                self.begin(fence::fence(Arc::clone(&self.shared), session));
            }
            Effect::Disconnect(session) => {
                if let Some(connection) = self.sessions.connection(session) {
                    connection.close();
                }
            }
            Effect::FreeChunks => self.shared.reaper_wake.notify_one(),
            Effect::WakeAt(at) => {
                self.wake_at = Some(self.wake_at.map_or(at, |sooner| sooner.min(at)));
            }
            Effect::Stop => {
                tracing::warn!(rank = %self.shared.rank, "the rank stops: authority is lost or nothing can be written");
                self.stopped.notify_one();
                self.running = false;
            }
        }
        None
    }

    fn begin(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        if self.tasks.len() >= TASKS_TIDY {
            while self.tasks.try_join_next().is_some() {}
        }
        self.tasks.spawn_on(task, &self.runtime);
    }

    fn load(&mut self, key: LoadKey) -> Option<Event> {
        if let Some(loaded) = store::try_load(&*self.shared.store, &key) {
            return Some(Event::Loaded(key, Box::new(loaded)));
        }
        let shared = Arc::clone(&self.shared);
        self.begin(async move {
            let loaded = store::load(&*shared.store, &key).await;
            shared.send(Event::Loaded(key, Box::new(loaded)));
        });
        None
    }

    fn recall(&mut self, id: u64, session: SessionId, recall: Recall) {
        let shared = Arc::clone(&self.shared);
        let connection = self.sessions.connection(session);
        self.begin(async move {
            let answer = match connection {
                Some(connection) => {
                    connection
                        .call(Kind::RECALL, &recall, &[], RECALL_TIMEOUT)
                        .await
                }
                None => Err(NetError::Lost("not connected".into())),
            };
            let answer = answer.and_then(|reply| reply.decode::<RecallReply>());
            if let Err(error) = &answer {
                tracing::debug!(session = session.0, %error, "recall is not answered");
            }
            shared.send(Event::RecallAnswered(id, answer.ok()));
        });
    }

    fn answer(&mut self, token: Token, answer: Answer) {
        let Some(responder) = self.waiting.remove(&token) else {
            return;
        };
        let key = (responder.connection().id(), responder.request_id());
        self.by_request.remove(&key);
        if !self.lease.holds() {
            return responder.refuse(Status::RETRY, &unsure());
        }
        match answer {
            Answer::Reply(reply) => responder.ok(&*reply),
            Answer::Opened(reply) => {
                self.sessions
                    .bind(SessionId(reply.session), responder.connection());
                responder.ok(&reply);
            }
            Answer::Done => responder.ok(&Empty {}),
            Answer::Sessions(sessions) => responder.ok(&SessionList { sessions }),
            Answer::Refused(refusal) => responder.refuse(refusal.status, &refusal.failure),
        }
    }
}

impl<S> Shared<S> {
    /// Hands an event to the core; a rank that has stopped takes none.
    pub(crate) fn send(&self, event: Event) {
        let _ = self.events.send(Incoming::Event(event));
    }
}

fn unsure() -> Failure {
    Failure {
        text: "the rank's lease is not renewed: the metadata store does not answer".into(),
        retry_after_ms: UNSURE_RETRY_MS,
        ..Failure::default()
    }
}

fn waits_for_lock(request: &hither_proto::meta::Request) -> bool {
    use hither_proto::meta::request::Op;
    matches!(&request.op, Some(Op::SetLock(op)) if op.wait)
}

/// Longest sleep of the thread: sessions are looked after at least this often.
const TICK: Duration = Duration::from_millis(250);
/// So many started tasks are looked through for those that have come back.
const TASKS_TIDY: usize = 64;
/// Pause a client makes while the rank is not sure of its authority.
const UNSURE_RETRY_MS: u32 = 100;
/// Time a recall waits for its answer before it is sent again: a client may have to write what it
/// holds to slow servers first.
const RECALL_TIMEOUT: Duration = Duration::from_secs(60);
