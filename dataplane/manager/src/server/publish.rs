//! Who follows the map, and what they are sent.

use std::collections::VecDeque;
use std::sync::Arc;

use hither_clustermap::{ClusterView, delta_between, snapshot_of};
use hither_net::{Connection, Responder};
use hither_proto::kind::Kind;
use hither_proto::manager::MapFetch;
use hither_proto::map::ClusterMap;
use tokio::sync::watch;

use crate::state::State;

/// Followers and recent maps.
pub(crate) struct Subscribers {
    publish: watch::Sender<Arc<ClusterView>>,
    /// Recent maps, oldest first: a fetch since one of them gets a delta.
    history: VecDeque<Arc<ClusterView>>,
    followers: Vec<Follower>,
}

struct Follower {
    connection: Arc<Connection>,
    zone: String,
}

impl Subscribers {
    pub(crate) fn new(publish: watch::Sender<Arc<ClusterView>>) -> Self {
        Self {
            publish,
            history: VecDeque::new(),
            followers: Vec::new(),
        }
    }

    /// Tells everybody.
    pub(crate) fn publish(&mut self, state: &State) {
        let new = Arc::new(state.view());
        let old = Arc::clone(&self.publish.borrow());
        let delta = delta_between(&old, &new);
        self.publish.send_replace(Arc::clone(&new));
        self.history.push_back(new);
        if self.history.len() > HISTORY {
            self.history.pop_front();
        }
        let locations = state.locations;
        self.followers.retain(|follower| {
            let message = seen_from(delta.clone(), &follower.zone, locations);
            let told = follower.connection.push(Kind::MAP_PUSH, &message).is_ok();
            if !told {
                // It cannot take the map: it has to come again and fetch a snapshot.
                follower.connection.close();
            }
            told
        });
    }

    pub(crate) fn fetch(&self, state: &State, fetch: &MapFetch, responder: Responder) {
        let now = Arc::clone(&self.publish.borrow());
        let since = self
            .history
            .iter()
            .find(|view| view.version().0 == fetch.since);
        let message = match since {
            Some(old) => delta_between(old, &now),
            None => snapshot_of(&now),
        };
        responder.ok(&seen_from(message, &fetch.zone, state.locations));
    }

    pub(crate) fn subscribe(&mut self, state: &State, fetch: &MapFetch, responder: Responder) {
        let connection = Arc::clone(responder.connection());
        self.followers
            .retain(|f| f.connection.id() != connection.id());
        self.fetch(state, fetch, responder);
        self.followers.push(Follower {
            connection,
            zone: fetch.zone.clone(),
        });
    }

    /// Followers look for the leader when their connection ends.
    pub(crate) fn close_all(&mut self) {
        for follower in self.followers.drain(..) {
            follower.connection.close();
        }
        self.history.clear();
    }
}

/// With locations on, servers outside the receiver's zone are shown without labels.
fn seen_from(mut map: ClusterMap, zone: &str, locations: bool) -> ClusterMap {
    if locations {
        for server in map
            .chunkservers
            .iter_mut()
            .filter(|server| server.zone != zone)
        {
            server.labels.clear();
        }
    }
    map
}

/// Maps kept for deltas.
const HISTORY: usize = 64;
