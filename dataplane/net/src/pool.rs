//! One connection per address, made when first needed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hither_proto::kind::Kind;
use parking_lot::{Mutex, RwLock};
use prost::Message;

use crate::connection::{Connection, Identity, Reply, connect};
use crate::error::NetError;
use crate::handler::Handler;

/// Connections of this process to servers. Bounded by the number of servers ever in the cluster
/// map; a connection that ended is dialled again at the next use.
pub struct Pool {
    identity: RwLock<Identity>,
    handler: Arc<dyn Handler>,
    slots: Mutex<BTreeMap<String, Arc<Slot>>>,
}

#[derive(Default)]
struct Slot {
    live: Mutex<Option<Arc<Connection>>>,
    /// Held while dialling, so that any number of callers makes one connection.
    dialling: tokio::sync::Mutex<()>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} addresses)", self.slots.lock().len())
    }
}

impl Pool {
    /// A pool whose connections say `identity` and are served by `handler`.
    #[must_use]
    pub fn new(identity: Identity, handler: Arc<dyn Handler>) -> Self {
        Self {
            identity: RwLock::new(identity),
            handler,
            slots: Mutex::default(),
        }
    }

    /// Changes what later connections say (a cluster id or server id learnt after start).
    pub fn set_identity(&self, identity: Identity) {
        *self.identity.write() = identity;
    }

    /// The live connection to `address`, if there is one.
    #[must_use]
    pub fn live(&self, address: &str) -> Option<Arc<Connection>> {
        let slot = Arc::clone(self.slots.lock().get(address)?);
        let live = slot.live.lock();
        live.as_ref()
            .filter(|connection| !connection.is_closed())
            .cloned()
    }

    /// Bytes that have come over the live connection to `address`; 0 without one.
    #[must_use]
    pub fn bytes_heard(&self, address: &str) -> u64 {
        self.live(address).map_or(0, |live| live.bytes_heard())
    }

    /// The connection to `address`, dialled if need be.
    ///
    /// # Errors
    /// As [`connect`].
    pub async fn get(&self, address: &str, timeout: Duration) -> Result<Arc<Connection>, NetError> {
        if let Some(live) = self.live(address) {
            return Ok(live);
        }
        let slot = Arc::clone(self.slots.lock().entry(address.to_owned()).or_default());
        let waited = tokio::time::timeout(timeout, slot.dialling.lock()).await;
        let Ok(_dialling) = waited else {
            return Err(NetError::Connect {
                address: address.to_owned(),
                reason: format!("no answer within {} ms", timeout.as_millis()),
            });
        };
        if let Some(live) = self.live(address) {
            return Ok(live);
        }
        let identity = self.identity.read().clone();
        let made = connect(address, &identity, Arc::clone(&self.handler), timeout).await?;
        *slot.live.lock() = Some(Arc::clone(&made));
        Ok(made)
    }

    /// Dials if need be, asks, waits for the reply; `timeout` covers all of it.
    ///
    /// # Errors
    /// As [`connect`] and [`Connection::call`].
    pub async fn call(
        &self,
        address: &str,
        kind: Kind,
        message: &impl Message,
        payload: &[Bytes],
        timeout: Duration,
    ) -> Result<Reply, NetError> {
        if let Some(live) = self.live(address) {
            return live.call(kind, message, payload, timeout).await;
        }
        let started = tokio::time::Instant::now();
        let connection = self.get(address, timeout).await?;
        let left = timeout.saturating_sub(started.elapsed());
        connection.call(kind, message, payload, left).await
    }

    /// Closes the connection to `address`: the next use dials anew.
    pub fn drop_connection(&self, address: &str) {
        if let Some(live) = self.live(address) {
            live.close();
        }
    }

    /// Closes all connections.
    pub fn close(&self) {
        let slots: Vec<_> = self.slots.lock().values().cloned().collect();
        for slot in slots {
            if let Some(connection) = slot.live.lock().take() {
                connection.close();
            }
        }
    }
}
