//! Listening: sockets for requests, and the liveness answer.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::Stream;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UnixListener, UnixStream};

use crate::authority::Legal;

/// The path in an endpoint, which is a path or `unix://` and a path.
#[must_use]
pub fn socket_of(endpoint: &str) -> PathBuf {
    let path = endpoint.strip_prefix("unix:").unwrap_or(endpoint);
    let rest = path.trim_start_matches('/');
    if path.len() == rest.len() {
        return PathBuf::from(rest);
    }
    Path::new("/").join(rest)
}

/// Listens at a path, in place of who listened there before.
///
/// # Errors
/// What the system says.
pub fn listen(
    path: &Path,
) -> io::Result<impl Stream<Item = io::Result<Legal<UnixStream>>> + Send + use<>> {
    listen_by(path, &path.with_extension("new"))
}

/// The same, bound at `beside` and moved to `path`: at no time nobody listens there. Both are on
/// one file system; who watches the directory of `path` for sockets must not see `beside`.
///
/// # Errors
/// What the system says.
pub fn listen_by(
    path: &Path,
    beside: &Path,
) -> io::Result<impl Stream<Item = io::Result<Legal<UnixStream>>> + Send + use<>> {
    for parent in [path.parent(), beside.parent()].into_iter().flatten() {
        std::fs::create_dir_all(parent)?;
    }
    match std::fs::remove_file(beside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(beside)?;
    std::fs::set_permissions(beside, std::fs::Permissions::from_mode(0o600))?;
    std::fs::rename(beside, path)?;
    Ok(futures::stream::unfold(listener, |listener| async move {
        let accepted = listener
            .accept()
            .await
            .map(|(stream, _)| Legal::new(stream));
        Some((accepted, listener))
    }))
}

/// Answers `GET` of anything with "alive" from now on, as long as this process's loop turns. Nothing
/// else is looked at: a cluster that does not answer is no reason to restart. The future never ends.
///
/// # Errors
/// When nothing can listen there: then somebody else answers, or nobody.
pub async fn liveness(address: &str) -> io::Result<impl Future<Output = ()> + Send + use<>> {
    let listener = TcpListener::bind(address).await?;
    Ok(async move {
        loop {
            let mut stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Of one connection, or for want of descriptors.
                    tracing::warn!(%error, "a liveness probe is not answered");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            tokio::spawn(async move {
                let mut request = [0; 1024];
                let asked = tokio::time::timeout(LIVENESS_PATIENCE, stream.read(&mut request));
                if asked.await.is_ok_and(|read| read.is_ok()) {
                    stream.write_all(ALIVE).await.ok();
                }
            });
        }
    })
}

const ALIVE: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 6\r\nConnection: close\r\n\r\nalive\n";
/// Longest wait for a request on a connection.
const LIVENESS_PATIENCE: Duration = Duration::from_secs(5);
/// Pause after a connection that could not be taken.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn liveness_is_answered_or_refused_at_once() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = taken.local_addr().unwrap().to_string();
        assert!(
            liveness(&address).await.is_err(),
            "another one answers there"
        );
        drop(taken);
        tokio::spawn(liveness(&address).await.unwrap());
        let mut stream = tokio::net::TcpStream::connect(&address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        assert!(text.starts_with("HTTP/1.1 200 "));
    }

    #[test]
    fn endpoints() {
        for endpoint in [
            "/a/b.sock",
            "unix:/a/b.sock",
            "unix:///a/b.sock",
            "unix://a/b.sock",
        ] {
            assert_eq!(socket_of(endpoint), Path::new("/a/b.sock"), "{endpoint}");
        }
        assert_eq!(socket_of("b.sock"), Path::new("b.sock"));
    }
}
