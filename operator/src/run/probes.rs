//! What probes ask: `/livez` and `/readyz`, over plain HTTP/1.1.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::health::Health;

/// Answers probes; the process is alive while its watches work. A standby is ready too: readiness
/// says that it waits for the lease as it should.
pub(super) async fn serve(
    address: SocketAddr,
    health: Health,
) -> anyhow::Result<impl Future<Output = anyhow::Result<()>>> {
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("listen for probes at {address}"))?;
    Ok(async move {
        loop {
            let (stream, _) = listener.accept().await.context("accept a probe")?;
            let health = health.clone();
            tokio::spawn(async move {
                // A probe that goes away has its answer.
                let _ = tokio::time::timeout(PROBE_IN, answer(stream, &health)).await;
            });
        }
    })
}

async fn answer(mut stream: TcpStream, health: &Health) -> std::io::Result<()> {
    let mut request = [0; REQUEST_MAX];
    let read = stream.read(&mut request).await?;
    let known = [&b"GET /livez"[..], b"GET /readyz", b"GET /healthz"];
    let (status, body) = match health.complaint() {
        _ if !known.iter().any(|path| request[..read].starts_with(path)) => {
            ("404 Not Found", "there are /livez and /readyz".to_owned())
        }
        Some(complaint) => ("503 Service Unavailable", complaint),
        None => ("200 OK", "ok".to_owned()),
    };
    let text = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(text.as_bytes()).await
}

/// Bytes of a request that are looked at.
const REQUEST_MAX: usize = 1024;
/// Time a probe has.
const PROBE_IN: Duration = Duration::from_secs(5);
