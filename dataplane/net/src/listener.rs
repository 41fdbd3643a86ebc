//! Accepting connections.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use hither_proto::common::{Hello, HelloReply, Role};
use hither_proto::frame::PROTOCOL_VERSIONS;
use hither_proto::kind::Kind;
use hither_proto::status::Status;
use parking_lot::RwLock;
use tokio::net::TcpListener;
use tokio::sync::Notify;

use crate::connection::{Connection, Identity};
use crate::handler::{Handler, Incoming, Responder};

/// A listening socket whose connections are served by one handler.
#[derive(Debug)]
pub struct Listener {
    address: SocketAddr,
    identity: Arc<RwLock<Identity>>,
    stop: Arc<Notify>,
}

impl Listener {
    /// Binds and starts to accept on the current runtime.
    ///
    /// # Errors
    /// What binding says, for example that the address is taken.
    pub async fn bind(
        address: &str,
        identity: Identity,
        handler: Arc<dyn Handler>,
    ) -> io::Result<Self> {
        let socket = TcpListener::bind(address).await?;
        let address = socket.local_addr()?;
        let identity = Arc::new(RwLock::new(identity));
        let stop = Arc::new(Notify::new());
        let front = Arc::new(HelloFirst {
            identity: Arc::clone(&identity),
            inner: handler,
        });
        tokio::spawn(accept(socket, front, Arc::clone(&stop)));
        Ok(Self {
            address,
            identity,
            stop,
        })
    }

    /// The bound address, with the real port when 0 was asked for.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes what later hellos are answered with (a server id or cluster id learnt after start).
    pub fn set_identity(&self, identity: Identity) {
        *self.identity.write() = identity;
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop.notify_one();
    }
}

async fn accept(socket: TcpListener, handler: Arc<HelloFirst>, stop: Arc<Notify>) {
    loop {
        let accepted = tokio::select! {
            accepted = socket.accept() => accepted,
            () = stop.notified() => return,
        };
        match accepted {
            Ok((stream, peer)) => {
                let handler: Arc<dyn Handler> = Arc::clone(&handler) as _;
                match Connection::start(stream, peer.to_string(), handler) {
                    Ok(connection) => {
                        tokio::spawn(expect_hello(Arc::downgrade(&connection)));
                    }
                    Err(error) => {
                        tracing::debug!(%peer, %error, "connection ended before it began");
                    }
                }
            }
            Err(error) => {
                // Out of descriptors, mostly: the next accept waits for one to be free.
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Ends a connection that says nothing: its descriptor and memory are for those who do.
async fn expect_hello(connection: Weak<Connection>) {
    tokio::time::sleep(HELLO_PATIENCE).await;
    if let Some(connection) = connection.upgrade()
        && connection.peer().is_none()
    {
        tracing::debug!(
            address = connection.address(),
            "no hello: the connection is closed"
        );
        connection.close();
    }
}

/// Answers the hello, passes everything else on.
struct HelloFirst {
    identity: Arc<RwLock<Identity>>,
    inner: Arc<dyn Handler>,
}

impl HelloFirst {
    fn hello(&self, connection: &Arc<Connection>, incoming: &Incoming, responder: Responder) {
        let hello: Hello = match incoming.decode() {
            Ok(hello) => hello,
            Err(error) => return responder.fail(Status::BAD_REQUEST, error.to_string()),
        };
        let identity = self.identity.read().clone();
        let (low, high) = PROTOCOL_VERSIONS;
        if hello.version_max < low || hello.version_min > high {
            return responder.fail(
                Status::UNSUPPORTED,
                format!(
                    "this server speaks protocol versions {low} to {high}, the caller {} to {}",
                    hello.version_min, hello.version_max
                ),
            );
        }
        let (ours, theirs) = (&identity.cluster_id, &hello.cluster_id);
        if !ours.is_empty() && !theirs.is_empty() && ours != theirs {
            return responder.fail(
                Status::WRONG_CLUSTER,
                "this server belongs to another cluster",
            );
        }
        connection.set_peer(Identity {
            role: Role::try_from(hello.role).unwrap_or_default(),
            cluster_id: hello.cluster_id,
            server_id: hello.server_id,
            boot_id: hello.boot_id,
        });
        responder.ok(&HelloReply {
            version: high.min(hello.version_max),
            role: identity.role.into(),
            cluster_id: identity.cluster_id,
            server_id: identity.server_id,
            boot_id: identity.boot_id,
        });
    }
}

impl Handler for HelloFirst {
    fn request(&self, connection: &Arc<Connection>, incoming: Incoming, responder: Responder) {
        if incoming.header.kind == Kind::HELLO {
            self.hello(connection, &incoming, responder);
        } else {
            self.inner.request(connection, incoming, responder);
        }
    }

    fn push(&self, connection: &Arc<Connection>, incoming: Incoming) {
        self.inner.push(connection, incoming);
    }

    fn reply(&self, connection: &Arc<Connection>, incoming: &Incoming) {
        self.inner.reply(connection, incoming);
    }

    fn cancel(&self, connection: &Arc<Connection>, request_id: u64) {
        self.inner.cancel(connection, request_id);
    }

    fn closed(&self, connection: &Arc<Connection>) {
        self.inner.closed(connection);
    }
}

/// Pause after a failed accept.
const ACCEPT_PAUSE: std::time::Duration = std::time::Duration::from_millis(50);
/// Time a connection has to say who it is.
const HELLO_PATIENCE: std::time::Duration = std::time::Duration::from_secs(10);
