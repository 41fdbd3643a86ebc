//! A sign for probes: an address that takes connections from a moment on, and hangs up.

use std::net::SocketAddr;

use anyhow::Context as _;
use tokio::net::TcpSocket;
use tokio::task::JoinHandle;

/// An address that is taken and refuses connections, or none.
pub(crate) struct Sign(Option<TcpSocket>);

/// The sign while it is shown, or waits to be; it ends with this.
pub(crate) struct Shown(Option<JoinHandle<()>>);

impl Drop for Shown {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

impl Sign {
    /// Takes an address; an empty one is none.
    pub(crate) fn at(address: &str) -> anyhow::Result<Self> {
        if address.is_empty() {
            return Ok(Self(None));
        }
        let take = |parsed: SocketAddr| -> std::io::Result<TcpSocket> {
            let socket = match parsed {
                SocketAddr::V4(_) => TcpSocket::new_v4()?,
                SocketAddr::V6(_) => TcpSocket::new_v6()?,
            };
            socket.set_reuseaddr(true)?;
            socket.bind(parsed)?;
            Ok(socket)
        };
        let what = || format!("listen for probes at {address}");
        let parsed = address.parse().with_context(what)?;
        Ok(Self(Some(take(parsed).with_context(what)?)))
    }

    /// Takes connections once this has come about.
    pub(crate) fn show_when<T: Send>(
        self,
        ready: impl Future<Output = T> + Send + 'static,
    ) -> Shown {
        let Some(socket) = self.0 else {
            return Shown(None);
        };
        Shown(Some(tokio::spawn(async move {
            ready.await;
            let listener = match socket.listen(BACKLOG) {
                Ok(listener) => listener,
                Err(error) => return tracing::warn!(%error, "probes are not answered"),
            };
            loop {
                // Whoever asks knows enough when it is connected.
                if let Err(error) = listener.accept().await {
                    return tracing::warn!(%error, "probes are not answered any more");
                }
            }
        })))
    }
}

/// Probes that wait.
const BACKLOG: u32 = 16;

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn connections_are_taken_from_the_moment_on() {
        let sign = Sign::at("127.0.0.1:0").unwrap();
        let address = sign.0.as_ref().unwrap().local_addr().unwrap();
        let (tell, told) = oneshot::channel();
        let shown = sign.show_when(told);
        assert!(TcpStream::connect(address).await.is_err());
        tell.send(()).unwrap();
        while TcpStream::connect(address).await.is_err() {
            tokio::task::yield_now().await;
        }
        drop(shown);
        assert!(Sign::at("nowhere").is_err());
        assert!(Sign::at("").unwrap().0.is_none());
    }
}
