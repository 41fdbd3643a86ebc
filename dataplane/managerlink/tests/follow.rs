//! Following a manager.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hither_managerlink::ManagerLink;
use hither_net::{Connection, Handler, Identity, Incoming, Listener, Responder};
use hither_proto::ids::MapVersion;
use hither_proto::kind::Kind;
use hither_proto::map::ClusterMap;

/// Tells an address at which nobody can reach it.
#[derive(Default)]
struct Elsewhere {
    subscriptions: AtomicU64,
}

fn map(version: u64, since: u64) -> ClusterMap {
    ClusterMap {
        cluster_id: b"test".as_slice().into(),
        version,
        since,
        managers: vec!["127.0.0.1:1".into()],
        ..ClusterMap::default()
    }
}

impl Handler for Elsewhere {
    fn request(&self, connection: &Arc<Connection>, incoming: Incoming, responder: Responder) {
        if incoming.header.kind == Kind::MAP_SUBSCRIBE {
            self.subscriptions.fetch_add(1, Ordering::AcqRel);
            return responder.ok(&map(1, 0));
        }
        // Whoever follows has the first map by now.
        connection.push(Kind::MAP_PUSH, &map(2, 1)).unwrap();
        responder.ok(&map(2, 0));
    }
}

#[tokio::test]
async fn a_manager_that_tells_a_useless_address_is_followed_where_it_answered() {
    let handler = Arc::new(Elsewhere::default());
    let front = Arc::clone(&handler) as Arc<dyn Handler>;
    let listener = Listener::bind("127.0.0.1:0", Identity::default(), front)
        .await
        .unwrap();
    let address = listener.address().to_string();
    let link = ManagerLink::start(vec![address], Identity::default(), "");
    link.at_least(MapVersion(1), Duration::from_secs(10))
        .await
        .unwrap();
    for _ in 0..5 {
        let seen = link.refresh(Duration::from_secs(5)).await.unwrap();
        assert_eq!(seen.version(), MapVersion(2));
    }
    assert_eq!(handler.subscriptions.load(Ordering::Acquire), 1);
}
