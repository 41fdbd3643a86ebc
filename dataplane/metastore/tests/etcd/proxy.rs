//! A TCP proxy that can break all its connections.

use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinHandle};

/// A proxy on a loopback port; ended when dropped.
pub(crate) struct Proxy {
    port: u16,
    connections: std::sync::Arc<Mutex<Vec<AbortHandle>>>,
    listener: JoinHandle<()>,
}

impl Proxy {
    /// Starts a proxy to a loopback port.
    pub(crate) async fn start(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let connections = std::sync::Arc::new(Mutex::new(Vec::<AbortHandle>::new()));
        let own = std::sync::Arc::clone(&connections);
        let listener = tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let connection = tokio::spawn(async move {
                    if let Ok(mut far) = TcpStream::connect(("127.0.0.1", target)).await {
                        near.set_nodelay(true).ok();
                        far.set_nodelay(true).ok();
                        tokio::io::copy_bidirectional(&mut near, &mut far)
                            .await
                            .ok();
                    }
                });
                let mut connections = own.lock();
                connections.retain(|connection| !connection.is_finished());
                connections.push(connection.abort_handle());
            }
        });
        Self {
            port,
            connections,
            listener,
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn break_connections(&self) {
        for connection in self.connections.lock().drain(..) {
            connection.abort();
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.listener.abort();
        self.break_connections();
    }
}
