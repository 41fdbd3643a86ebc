//! One socket: sending, and matching replies to calls.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use hither_proto::common::{Failure, Hello, HelloReply, Role};
use hither_proto::frame::{
    Class, FrameHeader, HEADER_SIZE, MESSAGE_BYTES_MAX, PAYLOAD_BYTES_MAX, PROTOCOL_VERSIONS,
};
use hither_proto::kind::Kind;
use hither_proto::status::{Errno, Status};
use parking_lot::Mutex;
use prost::Message;
use tokio::net::TcpStream;
use tokio::sync::{Notify, oneshot};

use crate::error::NetError;
use crate::handler::{Handler, Incoming};
use crate::reader;

/// Bytes that may wait to be sent; beyond, calls fail until the peer reads, and a reply or a push
/// ends the connection.
pub(crate) const QUEUE_BYTES_MAX: usize = 64 << 20;
/// Above this many waiting bytes, calls wait and the reader takes no further requests.
pub(crate) const QUEUE_BYTES_HIGH: usize = 4 << 20;
/// Requests of one peer that may be unanswered; beyond, no more are read from it.
pub(crate) const UNANSWERED_MAX: usize = 4096;

/// Who this process is, told to every peer.
#[derive(Debug, Clone, Default)]
pub struct Identity {
    /// Role of this process.
    pub role: Role,
    /// Random id of the installation; empty: not known yet.
    pub cluster_id: Bytes,
    /// Stable id of this server, 0 for a client.
    pub server_id: u64,
    /// Random number of this run.
    pub boot_id: u64,
}

/// An OK reply.
#[derive(Debug, Clone)]
pub struct Reply {
    /// The frame.
    pub incoming: Incoming,
}

impl Reply {
    /// Decodes the message.
    ///
    /// # Errors
    /// `Protocol` when the bytes are no such message.
    pub fn decode<M: Message + Default>(&self) -> Result<M, NetError> {
        self.incoming.decode()
    }

    /// The bytes after the message.
    #[must_use]
    pub fn payload(&self) -> &Bytes {
        &self.incoming.payload
    }
}

/// One socket with a peer. Ends when either side closes it or a frame is damaged.
pub struct Connection {
    id: u64,
    address: String,
    pub(crate) stream: TcpStream,
    pub(crate) handler: Arc<dyn Handler>,
    out: Mutex<OutQueue>,
    out_wake: Notify,
    out_space: Notify,
    pending: Mutex<BTreeMap<u64, oneshot::Sender<Result<Reply, NetError>>>>,
    next_request: AtomicU64,
    pub(crate) unanswered: AtomicU64,
    pub(crate) unanswered_less: Notify,
    bytes_heard: AtomicU64,
    closed: AtomicBool,
    closed_wake: Notify,
    peer: OnceLock<Identity>,
}

#[derive(Default)]
struct OutQueue {
    parts: VecDeque<Bytes>,
    bytes: usize,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Connection({} to {})", self.id, self.address)
    }
}

/// Connects, says hello and starts the connection's tasks on the current runtime.
///
/// # Errors
/// `Connect` when nobody answers within `timeout`, `Refused` when the peer wants no part of us.
pub async fn connect(
    address: &str,
    identity: &Identity,
    handler: Arc<dyn Handler>,
    timeout: Duration,
) -> Result<Arc<Connection>, NetError> {
    let failed = |reason: String| NetError::Connect {
        address: address.to_owned(),
        reason,
    };
    let work = async {
        let stream = TcpStream::connect(address)
            .await
            .map_err(|e| failed(e.to_string()))?;
        let connection = Connection::start(stream, address.to_owned(), handler)
            .map_err(|e| failed(e.to_string()))?;
        match connection.hello(identity, timeout).await {
            Ok(()) => Ok(connection),
            Err(error) => {
                connection.close();
                Err(error)
            }
        }
    };
    tokio::time::timeout(timeout, work)
        .await
        .unwrap_or_else(|_| {
            Err(failed(format!(
                "no answer within {} ms",
                timeout.as_millis()
            )))
        })
}

impl Connection {
    pub(crate) fn start(
        stream: TcpStream,
        address: String,
        handler: Arc<dyn Handler>,
    ) -> io::Result<Arc<Self>> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        stream.set_nodelay(true)?;
        let socket = socket2::SockRef::from(&stream);
        socket.set_tcp_user_timeout(Some(TCP_USER_TIMEOUT))?;
        socket.set_keepalive(true)?;
        let connection = Arc::new(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            address,
            stream,
            handler,
            out: Mutex::default(),
            out_wake: Notify::new(),
            out_space: Notify::new(),
            pending: Mutex::default(),
            next_request: AtomicU64::new(1),
            unanswered: AtomicU64::new(0),
            unanswered_less: Notify::new(),
            bytes_heard: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            closed_wake: Notify::new(),
            peer: OnceLock::new(),
        });
        tokio::spawn(reader::run(Arc::clone(&connection)));
        tokio::spawn(Arc::clone(&connection).write_waiting());
        Ok(connection)
    }

    /// Number of the connection, unique in this process.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Address of the peer as it was dialled or accepted.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Who the peer said it is; `None` before its hello.
    #[must_use]
    pub fn peer(&self) -> Option<&Identity> {
        self.peer.get()
    }

    pub(crate) fn set_peer(&self, peer: Identity) {
        // A second hello changes nothing: the first one was checked.
        let _ = self.peer.set(peer);
    }

    /// Bytes that have come from the peer so far.
    #[must_use]
    pub fn bytes_heard(&self) -> u64 {
        self.bytes_heard.load(Ordering::Relaxed)
    }

    pub(crate) fn hears(&self, bytes: usize) {
        self.bytes_heard.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Whether the connection has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Waits for the end of the connection.
    pub async fn closed(&self) {
        loop {
            let woken = self.closed_wake.notified();
            tokio::pin!(woken);
            woken.as_mut().enable();
            if self.is_closed() {
                return;
            }
            woken.await;
        }
    }

    /// Ends the connection: open calls fail with `Lost`, waiting bytes are dropped.
    pub fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let socket = socket2::SockRef::from(&self.stream);
        // The socket may be gone already: either way nothing more is sent.
        let _ = socket.shutdown(std::net::Shutdown::Both);
        self.fail_pending("closed");
        self.closed_wake.notify_waiters();
        self.out_wake.notify_waiters();
        self.out_wake.notify_one();
        self.out_space.notify_waiters();
        self.unanswered_less.notify_waiters();
        self.unanswered_less.notify_one();
    }

    pub(crate) fn fail_pending(&self, reason: &str) {
        let pending = std::mem::take(&mut *self.pending.lock());
        for (_, waiter) in pending {
            let _ = waiter.send(Err(NetError::Lost(reason.to_owned())));
        }
    }

    /// Sends a request and waits for its reply. Dropping the future takes the request back.
    ///
    /// # Errors
    /// Every [`NetError`]; `Refused` for a reply that is not OK.
    pub async fn call(
        self: &Arc<Self>,
        kind: Kind,
        message: &impl Message,
        payload: &[Bytes],
        timeout: Duration,
    ) -> Result<Reply, NetError> {
        self.wait_for_space().await;
        let (waiter, answer) = oneshot::channel();
        let request_id = self.next_request.fetch_add(1, Ordering::Relaxed);
        self.pending.lock().insert(request_id, waiter);
        let mut open = OpenCall {
            connection: self,
            kind,
            request_id,
            done: false,
        };
        self.send(
            Class::Request,
            kind,
            request_id,
            Status::OK,
            message,
            payload,
        )?;
        let answered = tokio::time::timeout(timeout, answer).await;
        match answered {
            Ok(result) => {
                open.done = true;
                result.unwrap_or_else(|_| Err(NetError::Lost("closed".into())))
            }
            Err(_) => {
                let millis = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
                Err(NetError::Timeout { kind, millis })
            }
        }
    }

    /// Sends a message that needs no answer.
    ///
    /// # Errors
    /// `Lost` when the connection has ended, `QueueFull` when the peer does not read: it has ended
    /// then too, since nobody sends the message again to a peer that stays connected.
    pub fn push(&self, kind: Kind, message: &impl Message) -> Result<(), NetError> {
        self.send(Class::Push, kind, 0, Status::OK, message, &[])
    }

    pub(crate) fn send_reply(
        &self,
        kind: Kind,
        request_id: u64,
        status: Status,
        message: &impl Message,
        payload: &[Bytes],
    ) -> Result<(), NetError> {
        self.unanswered.fetch_sub(1, Ordering::AcqRel);
        self.unanswered_less.notify_one();
        let sent = self.send(Class::Reply, kind, request_id, status, message, payload);
        let Err(NetError::Protocol(reason)) = sent else {
            return sent;
        };
        // Any answer is better than one that never comes.
        tracing::error!(peer = self.address, reason, "no answer but an error");
        let failure = Failure {
            text: reason,
            ..Failure::default()
        };
        let status = Errno::EIO.into();
        self.send(Class::Reply, kind, request_id, status, &failure, &[])
    }

    fn send(
        &self,
        class: Class,
        kind: Kind,
        request_id: u64,
        status: Status,
        message: &impl Message,
        payload: &[Bytes],
    ) -> Result<(), NetError> {
        let head = encode(class, kind, request_id, status, message, payload)?;
        let mut out = self.out.lock();
        if self.is_closed() {
            return Err(NetError::Lost("closed".into()));
        }
        if out.bytes > QUEUE_BYTES_MAX {
            drop(out);
            if matches!(class, Class::Reply | Class::Push) {
                // The peer waits for it, or counts on it. Once it has to connect again it knows
                // that something is missing.
                tracing::warn!(peer = self.address, %kind, "peer does not read, disconnected");
                self.close();
            }
            return Err(NetError::QueueFull);
        }
        let direct = out.parts.is_empty();
        let parts = std::iter::once(head).chain(payload.iter().cloned());
        for part in parts.filter(|part| !part.is_empty()) {
            out.bytes += part.len();
            out.parts.push_back(part);
        }
        if direct && !self.write_some(&mut out) {
            // The reader sees the broken socket too and closes the connection.
            return Err(NetError::Lost("write failed".into()));
        }
        let waiting = !out.parts.is_empty();
        drop(out);
        if waiting && direct {
            self.out_wake.notify_one();
        }
        Ok(())
    }

    /// Writes what the socket takes now. False: the socket is broken.
    fn write_some(&self, out: &mut OutQueue) -> bool {
        while !out.parts.is_empty() {
            let mut slices = [IoSlice::new(&[]); WRITE_SLICES];
            let count = out.parts.len().min(WRITE_SLICES);
            for (slice, part) in slices.iter_mut().zip(&out.parts) {
                *slice = IoSlice::new(part);
            }
            match self.stream.try_write_vectored(&slices[..count]) {
                Ok(written) => out.consume(written),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }

    async fn write_waiting(self: Arc<Self>) {
        while !self.is_closed() {
            let waiting = !self.out.lock().parts.is_empty();
            if !waiting {
                self.out_wake.notified().await;
                continue;
            }
            if self.stream.writable().await.is_err() {
                break;
            }
            let (sound, low) = {
                let mut out = self.out.lock();
                (self.write_some(&mut out), out.bytes <= QUEUE_BYTES_HIGH)
            };
            if low {
                self.out_space.notify_waiters();
                self.unanswered_less.notify_one();
            }
            if !sound {
                break;
            }
        }
        self.close();
    }

    async fn wait_for_space(&self) {
        loop {
            let woken = self.out_space.notified();
            tokio::pin!(woken);
            woken.as_mut().enable();
            if self.is_closed() || !self.queue_is_high() {
                return;
            }
            woken.await;
        }
    }

    pub(crate) fn queue_is_high(&self) -> bool {
        self.out.lock().bytes > QUEUE_BYTES_HIGH
    }

    pub(crate) fn complete(&self, incoming: Incoming) {
        let waiter = self.pending.lock().remove(&incoming.header.request_id);
        let Some(waiter) = waiter else { return };
        let status = incoming.header.status;
        let result = if status.is_ok() {
            Ok(Reply { incoming })
        } else {
            let failure = incoming.decode::<Failure>().unwrap_or_default();
            Err(NetError::Refused {
                status,
                failure: Box::new(failure),
            })
        };
        let _ = waiter.send(result);
    }

    async fn hello(
        self: &Arc<Self>,
        identity: &Identity,
        timeout: Duration,
    ) -> Result<(), NetError> {
        let hello = Hello {
            version_min: PROTOCOL_VERSIONS.0,
            version_max: PROTOCOL_VERSIONS.1,
            role: identity.role.into(),
            cluster_id: identity.cluster_id.clone(),
            server_id: identity.server_id,
            boot_id: identity.boot_id,
            capability: Bytes::new(),
        };
        let reply = self.call(Kind::HELLO, &hello, &[], timeout).await?;
        let reply: HelloReply = reply.decode()?;
        let ours = &identity.cluster_id;
        if !ours.is_empty() && !reply.cluster_id.is_empty() && *ours != reply.cluster_id {
            return Err(NetError::Refused {
                status: Status::WRONG_CLUSTER,
                failure: Box::new(Failure {
                    text: format!("{} belongs to another cluster", self.address),
                    ..Failure::default()
                }),
            });
        }
        self.set_peer(Identity {
            role: Role::try_from(reply.role).unwrap_or_default(),
            cluster_id: reply.cluster_id,
            server_id: reply.server_id,
            boot_id: reply.boot_id,
        });
        Ok(())
    }
}

impl OutQueue {
    fn consume(&mut self, mut written: usize) {
        self.bytes -= written;
        while let Some(front) = self.parts.front_mut() {
            if front.len() > written {
                front.advance(written);
                return;
            }
            written -= front.len();
            self.parts.pop_front();
        }
    }
}

/// Takes the request back when its future is dropped or times out.
struct OpenCall<'a> {
    connection: &'a Arc<Connection>,
    kind: Kind,
    request_id: u64,
    done: bool,
}

impl Drop for OpenCall<'_> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        self.connection.pending.lock().remove(&self.request_id);
        // If this is lost the peer merely does work nobody waits for.
        let _ = self.connection.send(
            Class::Cancel,
            self.kind,
            self.request_id,
            Status::OK,
            &hither_proto::common::Empty {},
            &[],
        );
    }
}

fn encode(
    class: Class,
    kind: Kind,
    request_id: u64,
    status: Status,
    message: &impl Message,
    payload: &[Bytes],
) -> Result<Bytes, NetError> {
    let too_long = || NetError::Protocol(format!("{kind} is too long to send"));
    let message_length = u32::try_from(message.encoded_len()).map_err(|_| too_long())?;
    let payload_length =
        u32::try_from(payload.iter().map(Bytes::len).sum::<usize>()).map_err(|_| too_long())?;
    if message_length > MESSAGE_BYTES_MAX || payload_length > PAYLOAD_BYTES_MAX {
        return Err(too_long());
    }
    let mut head = BytesMut::with_capacity(HEADER_SIZE + message_length as usize);
    head.put_bytes(0, HEADER_SIZE);
    message.encode(&mut head).map_err(|_| too_long())?;
    let header = FrameHeader {
        class,
        kind,
        flags: 0,
        status,
        message_length,
        payload_length,
        request_id,
    };
    let fixed = header.encode(&head[HEADER_SIZE..]);
    head[..HEADER_SIZE].copy_from_slice(&fixed);
    Ok(head.freeze())
}

/// Slices handed to the kernel in one write.
const WRITE_SLICES: usize = 16;
/// A peer that acknowledges no byte for this long is gone.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);
