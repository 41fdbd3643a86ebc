//! Links to the next members of chains: requests go out in the order in which they were given.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hither_net::{Connection, NetError, Pool, Reply};
use hither_proto::chunk::{Flush, Write};
use hither_proto::common::Empty;
use hither_proto::kind::Kind;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;

/// What goes to the next member.
pub(crate) enum Message {
    Write(Box<Write>),
    Flush(Flush),
}

pub(crate) type LinkDone = Box<dyn FnOnce(Result<Reply, NetError>) + Send>;

/// A request on its way to the next member.
pub(crate) struct Outgoing {
    pub(crate) message: Message,
    pub(crate) payload: Bytes,
    pub(crate) timeout: Duration,
    pub(crate) done: LinkDone,
}

/// The links to next members. Each sends in the order in which it was given requests, with at most
/// [`WINDOW_BYTES`] of unanswered payload. What waits is bounded by what the server admits.
pub(crate) struct Links {
    pool: Arc<Pool>,
    runtime: tokio::runtime::Handle,
    links: Mutex<BTreeMap<String, mpsc::UnboundedSender<Outgoing>>>,
}

impl Links {
    pub(crate) fn new(pool: Arc<Pool>, runtime: tokio::runtime::Handle) -> Self {
        Self {
            pool,
            runtime,
            links: Mutex::default(),
        }
    }

    pub(crate) fn send(&self, address: &str, outgoing: Outgoing) {
        let mut links = self.links.lock();
        let link = links.entry(address.to_owned()).or_insert_with(|| {
            let (sender, receiver) = mpsc::unbounded_channel();
            let pool = Arc::clone(&self.pool);
            self.runtime
                .spawn(run_link(pool, address.to_owned(), receiver));
            sender
        });
        if let Err(mpsc::error::SendError(outgoing)) = link.send(outgoing) {
            drop(links);
            (outgoing.done)(Err(NetError::Lost("the server is stopping".into())));
        }
    }

    /// Ends all links once what was given to them is sent.
    pub(crate) fn close(&self) {
        self.links.lock().clear();
    }
}

async fn run_link(
    pool: Arc<Pool>,
    address: String,
    mut requests: mpsc::UnboundedReceiver<Outgoing>,
) {
    let window = Arc::new(Semaphore::new(WINDOW_BYTES));
    let checking = Arc::new(AtomicBool::new(false));
    let mut down: Option<Down> = None;
    while let Some(outgoing) = requests.recv().await {
        down = down.filter(|down| !down.is_over());
        if let Some(down) = &down {
            // Whoever waits here could go round this link.
            (outgoing.done)(Err(down.error.clone()));
            continue;
        }
        let bytes = outgoing.payload.len().clamp(1, WINDOW_BYTES);
        let bytes = u32::try_from(bytes).unwrap_or(1);
        let Ok(room) = Arc::clone(&window).acquire_many_owned(bytes).await else {
            return;
        };
        let connection = match pool.get(&address, outgoing.timeout).await {
            Ok(connection) => connection,
            Err(error) => {
                down = Some(Down::begin(&pool, &address, error.clone()));
                (outgoing.done)(Err(error));
                continue;
            }
        };
        let timeout = outgoing.timeout;
        let done = outgoing.done;
        let mut call = call(connection, outgoing.message, outgoing.payload, timeout);
        // The first poll sends: so the order of requests is that of the queue.
        match futures::poll!(call.as_mut()) {
            std::task::Poll::Ready(outcome) => done(outcome),
            std::task::Poll::Pending => {
                let (pool, address) = (Arc::clone(&pool), address.clone());
                let checking = Arc::clone(&checking);
                tokio::spawn(async move {
                    let outcome = call.await;
                    drop(room);
                    let silent = matches!(outcome, Err(NetError::Timeout { .. }));
                    done(outcome);
                    if silent && !checking.swap(true, Ordering::AcqRel) {
                        check(&pool, &address).await;
                        checking.store(false, Ordering::Release);
                    }
                });
            }
        }
    }
}

type Calling = Pin<Box<dyn Future<Output = Result<Reply, NetError>> + Send>>;

fn call(
    connection: Arc<Connection>,
    message: Message,
    payload: Bytes,
    timeout: Duration,
) -> Calling {
    Box::pin(async move {
        match message {
            Message::Write(write) => {
                let payload = [payload];
                connection
                    .call(Kind::CHUNK_WRITE, &*write, &payload, timeout)
                    .await
            }
            Message::Flush(flush) => {
                connection
                    .call(Kind::CHUNK_FLUSH, &flush, &[], timeout)
                    .await
            }
        }
    })
}

/// A member that was too slow may be cut off: its connection would wait for the kernel's patience.
async fn check(pool: &Pool, address: &str) {
    let Some(connection) = pool.live(address) else {
        return;
    };
    let pong = connection
        .call(Kind::PING, &Empty {}, &[], CHECK_TIMEOUT)
        .await;
    if pong.is_err() {
        tracing::debug!(
            address,
            "the next member is silent: its connection is given up"
        );
        connection.close();
    }
}

/// The next member cannot be reached; requests fail at once until it can, or for a while.
struct Down {
    error: NetError,
    reached: JoinHandle<()>,
}

impl Down {
    fn begin(pool: &Arc<Pool>, address: &str, error: NetError) -> Self {
        let (pool, address) = (Arc::clone(pool), address.to_owned());
        let reached = tokio::spawn(async move {
            let mut pause = REACH_PAUSE;
            for _ in 0..REACH_ATTEMPTS {
                if pool.get(&address, REACH_TIMEOUT).await.is_ok() {
                    return;
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(REACH_PAUSE_MAX);
            }
        });
        Self { error, reached }
    }

    fn is_over(&self) -> bool {
        self.reached.is_finished()
    }
}

impl Drop for Down {
    fn drop(&mut self) {
        self.reached.abort();
    }
}

/// Unanswered payload on one link. Below what the connection lets gather before it makes senders
/// wait, so that the order in which requests are polled first is the order on the wire.
const WINDOW_BYTES: usize = 3 << 20;
/// Time a silent member has to show that it is there.
const CHECK_TIMEOUT: Duration = Duration::from_millis(500);
/// Time for one attempt to reach a member again, and the first and longest pause before the next.
const REACH_TIMEOUT: Duration = Duration::from_secs(1);
const REACH_PAUSE: Duration = Duration::from_millis(100);
const REACH_PAUSE_MAX: Duration = Duration::from_secs(2);
/// Attempts before the next request has to find out by itself: the server may be gone for good.
const REACH_ATTEMPTS: usize = 20;
