//! The daemon that serves the mounts of this node: reached through its socket.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use hither_mounter_proto::{Kind, Mount as Served, Reply, Request, Rerank, Serve, WireError, call};

use crate::error::Refusal;
use crate::node::labels::Standpoint;

/// Whoever serves the mounts of this node.
#[tonic::async_trait]
pub trait Mounter: std::fmt::Debug + Send + Sync + 'static {
    /// Serves a connection to the kernel; returns when the mount can be used.
    ///
    /// # Errors
    /// `Invalid` for options, `NotFound` for a directory that is not there, `Taken` for one that
    /// another mount has claimed, `Unreachable` when daemon or cluster do not answer.
    async fn serve(&self, serve: Serve, device: OwnedFd) -> Result<(), Refusal>;

    /// Lets a mount stand elsewhere and prefer other servers.
    ///
    /// # Errors
    /// As [`serve`](Self::serve).
    async fn rerank(&self, mount: &str, standpoint: &Standpoint) -> Result<(), Refusal>;

    /// The mounts that are served.
    ///
    /// # Errors
    /// `Unreachable` when the daemon does not answer.
    async fn list(&self) -> Result<Vec<Served>, Refusal>;

    /// Stores everything and ends a mount that was taken away.
    ///
    /// # Errors
    /// As [`serve`](Self::serve); `DataLost` once, when the mount has ended and could not store
    /// everything; `Busy` or `TooSlow` while it still is used or stores.
    async fn end(&self, mount: &str) -> Result<(), Refusal>;
}

/// The daemon behind a socket.
#[derive(Debug, Clone)]
pub struct SocketMounter {
    socket: PathBuf,
}

impl SocketMounter {
    /// The daemon that listens at this path.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    async fn call(
        &self,
        request: Request,
        device: Option<OwnedFd>,
        timeout: Duration,
    ) -> Result<Reply, Refusal> {
        let socket = self.socket.clone();
        let called = tokio::task::spawn_blocking(move || {
            let device = device.as_ref().map(OwnedFd::as_fd);
            call(&socket, &request, device, timeout)
        });
        let reply = match called.await {
            Ok(Ok(reply)) => reply,
            Ok(Err(WireError::Io(error))) if is_timeout(&error) => {
                return Err(Refusal::TooSlow(format!(
                    "the mount daemon of this node is at it for {} s: repeat",
                    timeout.as_secs()
                )));
            }
            Ok(Err(error @ WireError::Io(_))) => {
                return Err(Refusal::Unreachable(format!(
                    "the mount daemon of this node does not answer: {error}"
                )));
            }
            Ok(Err(error)) => return Err(Refusal::Broken(error.to_string())),
            Err(error) => return Err(Refusal::Broken(format!("call the mount daemon: {error}"))),
        };
        for advice in &reply.advice {
            tracing::warn!(advice, "the mount daemon advises");
        }
        if reply.ok {
            Ok(reply)
        } else {
            Err(refusal(&reply))
        }
    }
}

#[tonic::async_trait]
impl Mounter for SocketMounter {
    async fn serve(&self, serve: Serve, device: OwnedFd) -> Result<(), Refusal> {
        let request = Request::Serve(serve);
        self.call(request, Some(device), SERVE_TIMEOUT)
            .await
            .map(|_| ())
    }

    async fn rerank(&self, mount: &str, standpoint: &Standpoint) -> Result<(), Refusal> {
        let request = Request::Rerank(Rerank {
            mount: mount.to_owned(),
            preferred: Some(standpoint.preferred.clone()),
            zone: Some(standpoint.zone.clone()),
            region: Some(standpoint.region.clone()),
            node: Some(standpoint.node.clone()),
        });
        self.call(request, None, ASK_TIMEOUT).await.map(|_| ())
    }

    async fn list(&self) -> Result<Vec<Served>, Refusal> {
        Ok(self.call(Request::List, None, ASK_TIMEOUT).await?.mounts)
    }

    async fn end(&self, mount: &str) -> Result<(), Refusal> {
        let mount = mount.to_owned();
        self.call(Request::End { mount }, None, END_TIMEOUT)
            .await
            .map(|_| ())
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{TimedOut, WouldBlock};
    matches!(error.kind(), TimedOut | WouldBlock)
}

fn refusal(reply: &Reply) -> Refusal {
    let text = reply.error.clone();
    if let (Some(Kind::Taken), Some(holder)) = (reply.kind, &reply.holder) {
        return Refusal::Taken {
            text,
            holder: holder.clone(),
        };
    }
    match reply.kind {
        Some(Kind::BadOptions) => Refusal::Invalid(text),
        Some(Kind::NoSuchDirectory | Kind::NoSuchMount) => Refusal::NotFound(text),
        // Another one follows a daemon that is ending.
        Some(Kind::Unreachable | Kind::Overloaded | Kind::Ending) => Refusal::Unreachable(text),
        Some(Kind::DataLost) => Refusal::DataLost(text),
        Some(Kind::Busy) => Refusal::Busy(text),
        _ => Refusal::Broken(text),
    }
}

/// Longest wait for a mount to stand: longer than its own wait for the cluster.
const SERVE_TIMEOUT: Duration = Duration::from_secs(45);
/// Longest wait for what the daemon answers from memory.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for a mount to store everything. After that the daemon goes on by itself.
const END_TIMEOUT: Duration = Duration::from_secs(25);
