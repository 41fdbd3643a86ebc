//! What probes ask: `/livez` and `/readyz`, over plain HTTP/1.1.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// Who knows how a process is.
pub(crate) trait Health: Send + Sync + 'static {
    /// Why only a new process would help, if so. Waiting for others is no reason.
    fn hung(&self) -> Option<String>;
    /// Why it does not do now what it is there for, if so.
    fn unready(&self) -> Option<String>;
}

/// Probes that are answered; they end with this.
pub(crate) struct Probes(Option<JoinHandle<()>>);

impl Drop for Probes {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

impl Probes {
    /// Answers at an address; at an empty one nobody asks.
    pub(crate) async fn answer(address: &str, health: Arc<impl Health>) -> anyhow::Result<Self> {
        if address.is_empty() {
            return Ok(Self(None));
        }
        let what = || format!("listen for probes at {address}");
        let parsed: SocketAddr = address.parse().with_context(what)?;
        let listener = TcpListener::bind(parsed).await.with_context(what)?;
        Ok(Self(Some(tokio::spawn(serve(listener, health)))))
    }
}

async fn serve(listener: TcpListener, health: Arc<impl Health>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let health = Arc::clone(&health);
                tokio::spawn(async move {
                    // A probe that goes away has its answer.
                    let _ = tokio::time::timeout(PROBE_IN, answer(stream, &*health)).await;
                });
            }
            Err(error) => {
                // Of one connection, or for want of descriptors.
                tracing::warn!(%error, "a probe is not answered");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn answer(mut stream: TcpStream, health: &impl Health) -> std::io::Result<()> {
    let mut request = [0; REQUEST_MAX];
    let read = stream.read(&mut request).await?;
    let (status, body) = said(&request[..read], health);
    let text = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(text.as_bytes()).await
}

fn said(request: &[u8], health: &impl Health) -> (&'static str, String) {
    let complaint = if request.starts_with(b"GET /livez") {
        health.hung()
    } else if request.starts_with(b"GET /readyz") {
        health.hung().or_else(|| health.unready())
    } else {
        return ("404 Not Found", "there are /livez and /readyz\n".into());
    };
    match complaint {
        Some(complaint) => ("503 Service Unavailable", complaint + "\n"),
        None => ("200 OK", "ok\n".into()),
    }
}

/// Bytes of a request that are looked at.
const REQUEST_MAX: usize = 1024;
/// Time a probe has.
const PROBE_IN: Duration = Duration::from_secs(5);
/// Pause after a connection that could not be taken.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    struct Says(Option<&'static str>, Option<&'static str>);

    impl Health for Says {
        fn hung(&self) -> Option<String> {
            self.0.map(str::to_owned)
        }

        fn unready(&self) -> Option<String> {
            self.1.map(str::to_owned)
        }
    }

    fn status(path: &str, health: &Says) -> &'static str {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
        &said(request.as_bytes(), health).0[..3]
    }

    #[test]
    fn who_waits_is_alive_and_who_hangs_is_not_ready() {
        let (well, waits) = (Says(None, None), Says(None, Some("the store is away")));
        let hangs = Says(Some("nothing turns"), None);
        let both = |health| (status("/livez", health), status("/readyz", health));
        assert_eq!(both(&well), ("200", "200"));
        assert_eq!(both(&waits), ("200", "503"));
        assert_eq!(both(&hangs), ("503", "503"));
        assert_eq!(status("/", &well), "404");
    }

    #[tokio::test]
    async fn an_answer_comes_over_a_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(serve(listener, Arc::new(Says(None, Some("not yet")))));
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream
            .write_all(b"GET /readyz HTTP/1.1\r\n\r\n")
            .await
            .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        assert!(text.starts_with("HTTP/1.1 503 ") && text.ends_with("\r\n\r\nnot yet\n"));
        task.abort();
        assert!(
            Probes::answer("nowhere", Arc::new(Says(None, None)))
                .await
                .is_err()
        );
    }
}
