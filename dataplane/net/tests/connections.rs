//! Connections between two ends of this process, over loopback.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hither_net::{
    Connection, Handler, Identity, Incoming, Listener, NetError, NoHandler, Pool, Responder,
    connect,
};
use hither_proto::chunk::{Fetch, ReadReply};
use hither_proto::common::{Empty, Role};
use hither_proto::kind::Kind;
use hither_proto::status::Status;
use parking_lot::Mutex;
use tokio::sync::mpsc;

const TIMEOUT: Duration = Duration::from_secs(10);

/// Answers fetches with patterned bytes, keeps `CHUNK_STATUS` unanswered, and asks back on PING-like kinds.
#[derive(Default)]
struct Echo {
    held: Mutex<Vec<Responder>>,
    cancelled: Mutex<Option<mpsc::UnboundedSender<u64>>>,
}

impl Handler for Echo {
    fn request(&self, connection: &Arc<Connection>, incoming: Incoming, responder: Responder) {
        match incoming.header.kind {
            Kind::CHUNK_FETCH => {
                let fetch: Fetch = incoming.decode().unwrap();
                let bytes = pattern(fetch.chunk, fetch.length as usize);
                responder.ok_with(&ReadReply::default(), &[bytes, incoming.payload]);
            }
            Kind::CHUNK_STATUS => self.held.lock().push(responder),
            Kind::RECALL => {
                let connection = Arc::clone(connection);
                tokio::spawn(async move {
                    let asked = connection.call(Kind::RECALL, &Empty {}, &[], TIMEOUT).await;
                    match asked {
                        Ok(_) => responder.ok(&Empty {}),
                        Err(error) => responder.fail_with(&error),
                    }
                });
            }
            _ => drop(responder),
        }
    }

    fn cancel(&self, _: &Arc<Connection>, request_id: u64) {
        if let Some(sender) = &*self.cancelled.lock() {
            sender.send(request_id).unwrap();
        }
    }
}

#[tokio::test]
async fn who_says_nothing_is_not_kept() {
    let listener = Listener::bind("127.0.0.1:0", Identity::default(), Arc::new(NoHandler));
    let listener = listener.await.unwrap();
    let address = listener.address().to_string();
    let identity = Identity::default();
    let known = connect(&address, &identity, Arc::new(NoHandler), TIMEOUT);
    let known = known.await.unwrap();
    let mut silent = tokio::net::TcpStream::connect(&address).await.unwrap();
    // Both ends are real: time passes by itself once nothing else happens.
    tokio::time::pause();
    let mut byte = [0; 1];
    let read = tokio::io::AsyncReadExt::read(&mut silent, &mut byte);
    let ended = tokio::time::timeout(6 * TIMEOUT, read).await;
    assert!(matches!(ended, Ok(Ok(0) | Err(_))), "{ended:?}");
    assert!(!known.is_closed());
}

struct Obliging;

impl Handler for Obliging {
    fn request(&self, _: &Arc<Connection>, _: Incoming, responder: Responder) {
        responder.ok(&Empty {});
    }
}

fn pattern(seed: u64, length: usize) -> Bytes {
    (0..length)
        .map(|at| u8::try_from((seed + at as u64 * 31) % 251).unwrap())
        .collect()
}

fn identity(role: Role, cluster: &'static [u8]) -> Identity {
    Identity {
        role,
        cluster_id: Bytes::from_static(cluster),
        server_id: 7,
        boot_id: 9,
    }
}

async fn server(handler: Arc<dyn Handler>) -> (Listener, String) {
    let listener = Listener::bind("127.0.0.1:0", identity(Role::Chunkserver, b"one"), handler)
        .await
        .unwrap();
    let address = listener.address().to_string();
    (listener, address)
}

#[tokio::test]
async fn many_calls_at_once_get_their_own_answers() {
    let (_listener, address) = server(Arc::new(Echo::default())).await;
    let pool = Arc::new(Pool::new(
        identity(Role::Client, b"one"),
        Arc::new(NoHandler),
    ));
    let mut calls = tokio::task::JoinSet::new();
    for n in 0..200u32 {
        let (pool, address) = (Arc::clone(&pool), address.clone());
        calls.spawn(async move {
            let length = n * 1500 % 200_000;
            let fetch = Fetch {
                chunk: u64::from(n),
                length,
                ..Fetch::default()
            };
            let tail = pattern(99, n as usize * 100);
            let reply = pool
                .call(
                    &address,
                    Kind::CHUNK_FETCH,
                    &fetch,
                    std::slice::from_ref(&tail),
                    TIMEOUT,
                )
                .await
                .unwrap();
            let (head, rest) = reply.payload().split_at(length as usize);
            assert_eq!(head, pattern(u64::from(n), length as usize));
            assert_eq!(rest, tail);
        });
    }
    while let Some(done) = calls.join_next().await {
        done.unwrap();
    }
}

#[tokio::test]
async fn the_server_asks_the_client_over_the_same_connection() {
    let (_listener, address) = server(Arc::new(Echo::default())).await;
    let client = identity(Role::Client, b"one");
    let connection = connect(&address, &client, Arc::new(Obliging), TIMEOUT)
        .await
        .unwrap();
    connection
        .call(Kind::RECALL, &Empty {}, &[], TIMEOUT)
        .await
        .unwrap();
    assert_eq!(connection.peer().unwrap().server_id, 7);
}

#[tokio::test]
async fn a_dropped_call_is_taken_back_and_a_timeout_says_so() {
    let echo = Arc::new(Echo::default());
    let (sender, mut cancelled) = mpsc::unbounded_channel();
    *echo.cancelled.lock() = Some(sender);
    let (_listener, address) = server(Arc::clone(&echo) as _).await;
    let client = identity(Role::Client, b"one");
    let connection = connect(&address, &client, Arc::new(NoHandler), TIMEOUT)
        .await
        .unwrap();
    let short = Duration::from_millis(20);
    let error = connection
        .call(Kind::CHUNK_STATUS, &Empty {}, &[], short)
        .await
        .unwrap_err();
    assert_eq!(
        error,
        NetError::Timeout {
            kind: Kind::CHUNK_STATUS,
            millis: 20
        }
    );
    assert!(error.is_silence());
    cancelled.recv().await.unwrap();
}

#[tokio::test]
async fn refusals_carry_status_and_text_and_unanswered_requests_say_retry() {
    let (_listener, address) = server(Arc::new(NoHandler)).await;
    let client = identity(Role::Client, b"one");
    let connection = connect(&address, &client, Arc::new(NoHandler), TIMEOUT)
        .await
        .unwrap();
    let error = connection
        .call(Kind::CHUNK_READ, &Empty {}, &[], TIMEOUT)
        .await
        .unwrap_err();
    assert_eq!(error.status(), Some(Status::UNSUPPORTED));
    assert!(
        error.to_string().contains("CHUNK_READ is not served here"),
        "{error}"
    );

    let (_listener, address) = server(Arc::new(Echo::default())).await;
    let connection = connect(&address, &client, Arc::new(NoHandler), TIMEOUT)
        .await
        .unwrap();
    let error = connection
        .call(Kind::MAP_FETCH, &Empty {}, &[], TIMEOUT)
        .await
        .unwrap_err();
    assert_eq!(error.status(), Some(Status::RETRY));
}

#[tokio::test]
async fn the_end_of_a_server_fails_open_calls_and_the_pool_dials_again() {
    let echo = Arc::new(Echo::default());
    let (listener, address) = server(Arc::clone(&echo) as _).await;
    let pool = Pool::new(identity(Role::Client, b"one"), Arc::new(NoHandler));
    let connection = pool.get(&address, TIMEOUT).await.unwrap();
    let call = {
        let connection = Arc::clone(&connection);
        tokio::spawn(async move {
            connection
                .call(Kind::CHUNK_STATUS, &Empty {}, &[], TIMEOUT)
                .await
        })
    };
    while echo.held.lock().is_empty() {
        tokio::task::yield_now().await;
    }
    let held = echo.held.lock().pop().unwrap();
    held.connection().close();
    assert!(matches!(call.await.unwrap(), Err(NetError::Lost(_))));
    connection.closed().await;
    let again = pool.get(&address, TIMEOUT).await.unwrap();
    assert_ne!(again.id(), connection.id());
    drop(listener);
}

#[tokio::test]
async fn another_cluster_is_refused_by_name() {
    let (_listener, address) = server(Arc::new(NoHandler)).await;
    let stranger = identity(Role::Client, b"two");
    let error = connect(&address, &stranger, Arc::new(NoHandler), TIMEOUT)
        .await
        .unwrap_err();
    assert_eq!(error.status(), Some(Status::WRONG_CLUSTER));
}

#[tokio::test]
async fn nonsense_and_impatience_close_the_connection_only() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (_listener, address) = server(Arc::new(NoHandler)).await;
    let mut raw = tokio::net::TcpStream::connect(&address).await.unwrap();
    raw.write_all(b"GET / HTTP/1.1\r\nHost: nobody here\r\n\r\n")
        .await
        .unwrap();
    let mut rest = Vec::new();
    // A reset is as good as an end: the server hung up.
    let _ = raw.read_to_end(&mut rest).await;
    assert!(rest.is_empty());
    let client = identity(Role::Client, b"one");
    let connection = connect(&address, &client, Arc::new(NoHandler), TIMEOUT)
        .await
        .unwrap();
    connection
        .call(Kind::PING, &Empty {}, &[], TIMEOUT)
        .await
        .unwrap();
}

#[tokio::test]
async fn nobody_listening_is_a_connect_error_in_time() {
    let client = identity(Role::Client, b"one");
    let error = connect("127.0.0.1:1", &client, Arc::new(NoHandler), TIMEOUT)
        .await
        .unwrap_err();
    assert!(matches!(error, NetError::Connect { .. }), "{error}");
}

/// Keeps requests unanswered, tells when a connection has ended.
struct Holding {
    held: Mutex<Vec<Responder>>,
    ended: mpsc::UnboundedSender<()>,
}

impl Handler for Holding {
    fn request(&self, _: &Arc<Connection>, _: Incoming, responder: Responder) {
        self.held.lock().push(responder);
    }

    fn closed(&self, _: &Arc<Connection>) {
        // The test may be over.
        let _ = self.ended.send(());
    }
}

/// Frames of a client, of which the first is its hello.
fn frames(count: u64) -> Vec<u8> {
    use hither_proto::common::Hello;
    use hither_proto::frame::{Class, FrameHeader};
    use prost::Message;
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        role: Role::Client.into(),
        ..Hello::default()
    };
    let mut bytes = Vec::new();
    for request_id in 1..=count {
        let (kind, message) = match request_id {
            1 => (Kind::HELLO, hello.encode_to_vec()),
            _ => (Kind::CHUNK_STATUS, Vec::new()),
        };
        let header = FrameHeader {
            class: Class::Request,
            kind,
            flags: 0,
            status: Status::OK,
            message_length: u32::try_from(message.len()).unwrap(),
            payload_length: 0,
            request_id,
        };
        bytes.extend_from_slice(&header.encode(&message));
        bytes.extend_from_slice(&message);
    }
    bytes
}

/// Replies and pushes that found no room in the queue were dropped, and the peer waited for them
/// on a connection that looked sound.
#[tokio::test]
async fn a_peer_that_does_not_read_is_disconnected_instead_of_losing_answers() {
    use tokio::io::AsyncWriteExt;
    for pushes in [false, true] {
        let (sender, mut ended) = mpsc::unbounded_channel();
        let holding = Arc::new(Holding {
            held: Mutex::default(),
            ended: sender,
        });
        let (_listener, address) = server(Arc::clone(&holding) as _).await;
        let mut raw = tokio::net::TcpStream::connect(&address).await.unwrap();
        raw.write_all(&frames(20)).await.unwrap();
        while holding.held.lock().len() < 19 {
            tokio::task::yield_now().await;
        }
        let held = std::mem::take(&mut *holding.held.lock());
        let connection = Arc::clone(held[0].connection());
        let large = Bytes::from(vec![1; 8 << 20]);
        let mut held = held.into_iter();
        for responder in held.by_ref().take(if pushes { 12 } else { 19 }) {
            responder.ok_with(&Empty {}, std::slice::from_ref(&large));
            if connection.is_closed() {
                break;
            }
        }
        if pushes {
            let mut last = Ok(());
            for _ in 0..3 {
                last = connection.push(Kind::SAFE, &Empty {});
            }
            assert!(last.is_err(), "{last:?}");
        }
        tokio::time::timeout(TIMEOUT, ended.recv())
            .await
            .expect("the connection ends");
        assert!(connection.is_closed());
    }
}

#[tokio::test]
async fn an_answer_that_is_too_long_is_an_error_and_not_silence() {
    let echo = Arc::new(Echo::default());
    let (_listener, address) = server(Arc::clone(&echo) as _).await;
    let client = identity(Role::Client, b"one");
    let connection = connect(&address, &client, Arc::new(NoHandler), TIMEOUT)
        .await
        .unwrap();
    let call = connection.call(Kind::CHUNK_STATUS, &Empty {}, &[], TIMEOUT);
    let answer = async {
        while echo.held.lock().is_empty() {
            tokio::task::yield_now().await;
        }
        let held = echo.held.lock().pop().unwrap();
        held.ok_with(&Empty {}, &[Bytes::from(vec![0; (8 << 20) + 1])]);
    };
    let (outcome, ()) = tokio::join!(call, answer);
    let error = outcome.unwrap_err();
    assert!(matches!(error, NetError::Refused { .. }), "{error}");
}
