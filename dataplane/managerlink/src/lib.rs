//! How every other process talks to the managers: finds the leader, follows the cluster map.
#![forbid(unsafe_code)]

use std::sync::{Arc, Weak};
use std::time::Duration;

use hither_clustermap::ClusterView;
use hither_net::{Connection, Handler, Identity, Incoming, NetError, Pool, Reply, Responder};
use hither_proto::common::Failure;
use hither_proto::ids::MapVersion;
use hither_proto::kind::Kind;
use hither_proto::manager::MapFetch;
use hither_proto::map::ClusterMap;
use hither_proto::status::Status;
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::watch;
use tokio::time::Instant;

/// The link of one process to the managers of its cluster.
///
/// Keeps one connection to the leader, subscribes to the cluster map, and resubscribes wherever
/// the leader is when that ends. Dropping the last clone ends it.
#[derive(Debug, Clone)]
pub struct ManagerLink {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    pool: Pool,
    /// Where managers were said to be, most promising first.
    addresses: Mutex<Vec<String>>,
    map: watch::Sender<Arc<ClusterView>>,
    zone: Mutex<String>,
}

impl ManagerLink {
    /// Starts to look for the leader at these addresses and to follow the map.
    #[must_use]
    pub fn start(addresses: Vec<String>, identity: Identity, zone: &str) -> Self {
        let (map, _) = watch::channel(Arc::new(ClusterView::default()));
        let shared = Arc::new_cyclic(|weak| Shared {
            pool: Pool::new(
                identity,
                Arc::new(MapPushes {
                    shared: Weak::clone(weak),
                }),
            ),
            addresses: Mutex::new(addresses),
            map,
            zone: Mutex::new(zone.to_owned()),
        });
        tokio::spawn(follow(Arc::downgrade(&shared)));
        Self { shared }
    }

    /// The map as it is now; version 0 before the first one has come.
    #[must_use]
    pub fn map(&self) -> Arc<ClusterView> {
        Arc::clone(&self.shared.map.borrow())
    }

    /// Follows the map.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Arc<ClusterView>> {
        self.shared.map.subscribe()
    }

    /// Stands in another zone: the next subscription says so.
    pub fn set_zone(&self, zone: &str) {
        zone.clone_into(&mut self.shared.zone.lock());
    }

    /// Changes what later connections say of this process (an id learnt after start).
    pub fn set_identity(&self, identity: Identity) {
        self.shared.pool.set_identity(identity);
    }

    /// Waits for a map of at least this version.
    ///
    /// # Errors
    /// `Timeout` when none comes in time.
    pub async fn at_least(
        &self,
        version: MapVersion,
        timeout: Duration,
    ) -> Result<Arc<ClusterView>, NetError> {
        let mut map = self.watch();
        let wanted = map.wait_for(|map| map.version() >= version);
        match tokio::time::timeout(timeout, wanted).await {
            Ok(Ok(map)) => Ok(Arc::clone(&map)),
            Ok(Err(_)) => Err(NetError::Lost("the link has ended".into())),
            Err(_) => Err(timed_out(Kind::MAP_FETCH, timeout)),
        }
    }

    /// Fetches what is newer than the map at hand, now.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub async fn refresh(&self, timeout: Duration) -> Result<Arc<ClusterView>, NetError> {
        let fetch = MapFetch {
            since: self.map().version().0,
            zone: self.shared.zone.lock().clone(),
        };
        let reply = self.call(Kind::MAP_FETCH, &fetch, timeout).await?;
        self.shared.take(&reply.decode()?);
        Ok(self.map())
    }

    /// Asks the leader, looking for it if need be.
    ///
    /// # Errors
    /// What the leader answers; when there is none in time, `Refused` with `NOT_LEADER` and the
    /// reason if a manager knows one, else `Timeout`.
    pub async fn call(
        &self,
        kind: Kind,
        message: &impl Message,
        timeout: Duration,
    ) -> Result<Reply, NetError> {
        self.shared.call(kind, message, timeout).await
    }
}

struct MapPushes {
    shared: Weak<Shared>,
}

impl Handler for MapPushes {
    fn request(&self, _: &Arc<Connection>, incoming: Incoming, responder: Responder) {
        responder.fail(
            Status::UNSUPPORTED,
            format!("{} is not served here", incoming.header.kind),
        );
    }

    fn push(&self, connection: &Arc<Connection>, incoming: Incoming) {
        let Some(shared) = self.shared.upgrade() else {
            return connection.close();
        };
        if incoming.header.kind != Kind::MAP_PUSH {
            return;
        }
        match incoming.decode::<ClusterMap>() {
            Ok(delta) => {
                if !shared.take(&delta) {
                    // A gap: subscribing again brings a snapshot.
                    connection.close();
                }
            }
            Err(error) => tracing::warn!(%error, "a map that cannot be read"),
        }
    }
}

impl Shared {
    /// False: the delta does not fit.
    fn take(&self, message: &ClusterMap) -> bool {
        let mut fits = true;
        self.map.send_if_modified(|map| match map.applied(message) {
            Ok(next) => {
                let newer = next.version() != map.version() || map.cluster_id().is_empty();
                if newer {
                    *map = Arc::new(next);
                }
                newer
            }
            Err(_) => {
                fits = false;
                false
            }
        });
        if !message.managers.is_empty() {
            let mut addresses = self.addresses.lock();
            let old = std::mem::replace(&mut *addresses, message.managers.clone());
            for address in old {
                if !addresses.contains(&address) && addresses.len() < ADDRESSES_MAX {
                    addresses.push(address);
                }
            }
        }
        fits
    }

    async fn call(
        &self,
        kind: Kind,
        message: &impl Message,
        timeout: Duration,
    ) -> Result<Reply, NetError> {
        let deadline = Instant::now() + timeout;
        let mut pause = PAUSE_MIN;
        // Why nobody leads says more than that nobody does.
        let mut refused = None;
        loop {
            let candidates = self.addresses.lock().clone();
            for address in &candidates {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(refused.unwrap_or_else(|| timed_out(kind, timeout)));
                }
                let one = left.min(TRY_MAX);
                match self.pool.call(address, kind, message, &[], one).await {
                    Ok(reply) => {
                        self.prefer(address);
                        return Ok(reply);
                    }
                    Err(NetError::Refused {
                        status: status @ Status::NOT_LEADER,
                        failure,
                    }) => {
                        self.take_hint(&failure);
                        refused = Some(NetError::Refused { status, failure });
                    }
                    Err(NetError::Refused {
                        status: Status::RETRY,
                        ..
                    }) => {}
                    Err(refused @ NetError::Refused { .. }) => return Err(refused),
                    Err(error) => {
                        tracing::debug!(%address, %error, "manager does not answer");
                        self.pool.drop_connection(address);
                    }
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left <= pause {
                return Err(refused.unwrap_or_else(|| timed_out(kind, timeout)));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    fn prefer(&self, address: &str) {
        let mut addresses = self.addresses.lock();
        if addresses.first().is_some_and(|first| first == address) {
            return;
        }
        addresses.retain(|known| known != address);
        addresses.insert(0, address.to_owned());
    }

    fn take_hint(&self, failure: &Failure) {
        if !failure.hint_address.is_empty() {
            self.prefer(&failure.hint_address);
        }
    }
}

/// Subscribes, waits for the end of the connection, subscribes again.
async fn follow(shared: Weak<Shared>) {
    loop {
        let Some(link) = shared.upgrade() else { return };
        let fetch = MapFetch {
            since: 0,
            zone: link.zone.lock().clone(),
        };
        let subscribed = link
            .call(Kind::MAP_SUBSCRIBE, &fetch, SUBSCRIBE_TIMEOUT)
            .await;
        match subscribed.and_then(|reply| reply.decode::<ClusterMap>()) {
            Ok(map) => {
                // Managers may tell addresses that are of no use here: the one that answered stays
                // the first.
                let served = link.addresses.lock().first().cloned();
                link.take(&map);
                let live = served.and_then(|address| {
                    link.prefer(&address);
                    link.pool.live(&address)
                });
                drop(link);
                match live {
                    Some(connection) => watch_over(&shared, &connection).await,
                    None => tokio::time::sleep(PAUSE_MIN).await,
                }
            }
            Err(error) => {
                tracing::debug!(%error, "no manager to follow yet");
                drop(link);
                tokio::time::sleep(PAUSE_MIN).await;
            }
        }
    }
}

/// Waits for the end of a subscription; looks now and then whether there is still somebody behind
/// it: a leader that hangs says nothing, and its successor cannot push into its connections.
async fn watch_over(shared: &Weak<Shared>, connection: &Arc<Connection>) {
    loop {
        tokio::select! {
            () = connection.closed() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
        let Some(link) = shared.upgrade() else {
            return connection.close();
        };
        let fetch = MapFetch {
            since: link.map.borrow().version().0,
            zone: link.zone.lock().clone(),
        };
        match connection.call(Kind::MAP_FETCH, &fetch, &[], TRY_MAX).await {
            Ok(_)
            | Err(NetError::Refused {
                status: Status::BUSY | Status::RETRY,
                ..
            }) => {}
            Err(error) => {
                tracing::debug!(%error, "the leader has gone silent: looking for another");
                return connection.close();
            }
        }
    }
}

fn timed_out(kind: Kind, timeout: Duration) -> NetError {
    let millis = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
    NetError::Timeout { kind, millis }
}

/// Addresses remembered at most.
const ADDRESSES_MAX: usize = 32;
/// Time one manager gets before the next one is asked.
const TRY_MAX: Duration = Duration::from_secs(2);
/// First and longest pause between rounds.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How often a follower looks whether the leader is still there.
const LOOK: Duration = Duration::from_secs(2);
/// Time for one attempt to subscribe.
const SUBSCRIBE_TIMEOUT: Duration = Duration::from_secs(5);
