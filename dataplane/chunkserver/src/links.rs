//! Links to the next members of chains: requests go out in the order in which they were given.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hither_net::{NetError, Pool, Reply};
use hither_proto::chunk::{Flush, Write};
use hither_proto::kind::Kind;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc};

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
    while let Some(outgoing) = requests.recv().await {
        let bytes = outgoing.payload.len().clamp(1, WINDOW_BYTES);
        let bytes = u32::try_from(bytes).unwrap_or(1);
        let Ok(room) = Arc::clone(&window).acquire_many_owned(bytes).await else {
            return;
        };
        let connection = match pool.get(&address, outgoing.timeout).await {
            Ok(connection) => connection,
            Err(error) => {
                // What waits behind it would only wait as long again for the same answer.
                (outgoing.done)(Err(error.clone()));
                while let Ok(next) = requests.try_recv() {
                    (next.done)(Err(error.clone()));
                }
                continue;
            }
        };
        let Outgoing {
            message,
            payload,
            timeout,
            done,
        } = outgoing;
        let mut call: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(async move {
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
        });
        // The first poll sends: so the order of requests is that of the queue.
        match futures::poll!(call.as_mut()) {
            std::task::Poll::Ready(outcome) => done(outcome),
            std::task::Poll::Pending => {
                tokio::spawn(async move {
                    let outcome = call.await;
                    drop(room);
                    done(outcome);
                });
            }
        }
    }
}

/// Unanswered payload on one link. Below what the connection lets gather before it makes senders
/// wait, so that the order in which requests are polled first is the order on the wire.
const WINDOW_BYTES: usize = 3 << 20;
