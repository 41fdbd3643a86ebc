//! The mounter: serves mounts that another process makes, and hands over by a unix socket.
//!
//! It never unmounts: whoever mounted does. A mount ends here when its kernel connection has ended.
//! Signals end the process only when no mount is left: without it all of them would be dead.

mod memory;
mod mounts;

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use hither_mounter_proto::{Kind, Reply, Request, WireError, receive, reply};
use tokio::net::UnixListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use self::mounts::Mounts;
use super::{Signals, raise_descriptor_limit};

/// Serves the socket until a signal comes and no mount is left; `memory_bytes`: what all mounts
/// together may keep, if it is said.
pub(crate) async fn run(socket: &Path, memory_bytes: Option<u64>) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    raise_descriptor_limit();
    let listener = listen(socket)?;
    let memory_bytes = memory::budget_bytes(memory_bytes);
    match memory_bytes {
        Some(bytes) => tracing::info!(bytes, "memory of all mounts together"),
        None => tracing::warn!("nothing says how much memory there is: each mount has its own"),
    }
    let mounts = Arc::new(Mounts::within(memory_bytes));
    println!("mounter ready at {}", socket.display());
    let room = Arc::new(Semaphore::new(REQUESTS_MAX));
    loop {
        let fewer = mounts.fewer();
        if mounts.has_ended() {
            break;
        }
        tokio::select! {
            taken = listener.accept() => match taken {
                Ok((stream, _)) => {
                    // Who comes when all places are taken is told so.
                    let place = Arc::clone(&room).try_acquire_owned().ok();
                    tokio::spawn(answer(Arc::clone(&mounts), stream, place));
                }
                Err(error) => {
                    // Out of descriptors or memory: others give some back.
                    tracing::warn!(%error, "a connection was not taken");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            () = signals.next() => {
                mounts.end_after_last();
                tracing::info!(mounts = mounts.len(), "ends when the last mount has ended");
            }
            () = fewer => {}
        }
    }
    // Whoever waits for an end is answered before this process is gone.
    let places = u32::try_from(REQUESTS_MAX).unwrap_or(u32::MAX);
    let answered = room.acquire_many(places);
    if tokio::time::timeout(TALK_TIMEOUT, answered).await.is_err() {
        tracing::warn!("somebody asked and did not take the reply");
    }
    std::fs::remove_file(socket).with_context(|| format!("remove {}", socket.display()))
}

/// Listens in place of a process that is gone.
fn listen(socket: &Path) -> anyhow::Result<UnixListener> {
    if socket.exists() {
        if UnixStream::connect(socket).is_ok() {
            anyhow::bail!("another mounter serves {}", socket.display());
        }
        std::fs::remove_file(socket).with_context(|| format!("remove {}", socket.display()))?;
    }
    let listener =
        UnixListener::bind(socket).with_context(|| format!("listen at {}", socket.display()))?;
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

async fn answer(
    mounts: Arc<Mounts>,
    stream: tokio::net::UnixStream,
    place: Option<OwnedSemaphorePermit>,
) {
    let taken = tokio::task::spawn_blocking(move || {
        let mut stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(TALK_TIMEOUT))?;
        stream.set_write_timeout(Some(TALK_TIMEOUT))?;
        let request = receive(&mut stream);
        Ok::<_, std::io::Error>((stream, request))
    });
    let (mut stream, request) = match taken.await {
        Ok(Ok(taken)) => taken,
        Ok(Err(error)) => return tracing::debug!(%error, "no request came"),
        Err(error) => return tracing::error!(%error, "take a request"),
    };
    let (request, descriptor) = match request {
        Ok((request, descriptor)) => (Some(request), descriptor),
        Err(error @ WireError::Io(_)) => return tracing::debug!(%error, "no request came"),
        Err(error) => {
            tracing::warn!(%error, "a request is refused");
            (None, None)
        }
    };
    let said = match (&place, request) {
        (None, _) => Reply::refused(Kind::Overloaded, "too many requests at a time"),
        (_, None) => Reply::refused(Kind::Internal, "this mounter does not know the request"),
        (_, Some(Request::Serve(serve))) => mounts.serve(serve, descriptor).await,
        (_, Some(Request::Rerank(rerank))) => mounts.rerank(&rerank),
        (_, Some(Request::List)) => mounts.list(),
        (_, Some(Request::End { mount })) => mounts.end(&mount).await,
        (_, Some(_)) => Reply::refused(Kind::Internal, "this mounter does not know the request"),
    };
    let sent = tokio::task::spawn_blocking(move || reply(&mut stream, &said)).await;
    drop(place);
    if let Ok(Err(error)) = sent {
        // Whoever asked has gone; it asks for the list when it is back.
        tracing::debug!(%error, "a reply was not taken");
    }
}

/// Requests under way at a time.
const REQUESTS_MAX: usize = 64;
/// Time to say a request, and to take a reply.
const TALK_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after a connection could not be taken.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
