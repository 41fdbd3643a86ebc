//! A rank's shell without a rank, and chunkservers that say what a test wants, for the tests of what
//! is asked of chunkservers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use hither_clustermap::ClusterView;
use hither_metastore::{EmbeddedOptions, EmbeddedStore};
use hither_net::{Connection, Handler, Identity, Incoming, Listener, NoHandler, Pool, Responder};
use hither_proto::chunk::SealReply;
use hither_proto::common::Empty;
use hither_proto::ids::{Epoch, RankId};
use hither_proto::kind::Kind;
use hither_proto::manager::ReportUnreachable;
use hither_proto::map::{Chunkserver, ClusterMap, Group, Member as MapMember, MemberState};
use hither_proto::status::Status;
use tokio::sync::{Notify, mpsc, watch};

use super::Shared;
use super::reach::Silences;
use crate::core::Event;

/// A chunkserver that has done what it is asked to do.
#[derive(Default)]
pub(super) struct Member {
    /// It knows a later lease.
    pub(super) knows_later: bool,
    /// So many seals end with the connection.
    pub(super) loses: AtomicU32,
}

impl Handler for Member {
    fn request(&self, connection: &Arc<Connection>, incoming: Incoming, responder: Responder) {
        match incoming.header.kind {
            Kind::CHUNK_SEAL if self.knows_later => {
                responder.fail(Status::STALE_LEASE, "a later one");
            }
            Kind::CHUNK_SEAL => {
                let less = |left: u32| left.checked_sub(1);
                let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
                if self.loses.fetch_update(set, fetch, less).is_ok() {
                    return connection.close();
                }
                responder.ok(&SealReply {
                    exists: true,
                    copy_length: 100,
                    lease_before: 7,
                    boot_id: 1,
                    ..SealReply::default()
                });
            }
            _ => responder.ok(&Empty {}),
        }
    }
}

pub(super) struct Bench {
    pub(super) shared: Arc<Shared<EmbeddedStore>>,
    pub(super) map: watch::Sender<Arc<ClusterView>>,
    addresses: Vec<String>,
    reports: mpsc::UnboundedReceiver<ReportUnreachable>,
    events: mpsc::UnboundedReceiver<super::handler::Incoming>,
    _listeners: Vec<Listener>,
}

/// Servers 1 and up, all in the in-sync set of group 7 at epoch 3; `None`: nobody can reach it. After
/// `patience` one is silent for long.
pub(super) async fn bench(patience: Duration, members: Vec<Option<Member>>) -> Bench {
    let (mut addresses, mut listeners) = (Vec::new(), Vec::new());
    for member in members {
        let Some(member) = member else {
            addresses.push("127.0.0.1:1".to_owned());
            continue;
        };
        let listener = Listener::bind("127.0.0.1:0", Identity::default(), Arc::new(member));
        let listener = listener.await.unwrap();
        addresses.push(listener.address().to_string());
        listeners.push(listener);
    }
    let (map, followed) = watch::channel(map_of(3, &addresses, &[]));
    let (report, reports) = mpsc::unbounded_channel();
    let (events, seen) = mpsc::unbounded_channel();
    let disk = hither_log::crash::CrashDisk::new();
    let store = EmbeddedStore::open(&disk.root(), EmbeddedOptions::default()).unwrap();
    let shared = Shared {
        store: Arc::new(store),
        map: followed,
        pool: Pool::new(Identity::default(), Arc::new(NoHandler)),
        events,
        reaper_wake: Notify::new(),
        rank: RankId(0),
        epoch: Epoch(1),
        unreachable: Box::new(move |said| {
            // After the test nobody listens.
            let _ = report.send(said);
        }),
        silences: Silences::new(patience),
        batches: AtomicU64::new(0),
    };
    Bench {
        shared: Arc::new(shared),
        map,
        addresses,
        reports,
        events: seen,
        _listeners: listeners,
    }
}

impl Bench {
    /// The group's next epoch, in which these members lag.
    pub(super) fn let_lag(&self, lagging: &[u64]) {
        self.map.send_replace(map_of(4, &self.addresses, lagging));
    }

    pub(super) async fn report(&mut self) -> ReportUnreachable {
        self.reports.recv().await.unwrap()
    }

    /// The next report that asks to go on without a server.
    pub(super) async fn left_out(&mut self) -> ReportUnreachable {
        loop {
            let report = self.report().await;
            if report.needs_all {
                return report;
            }
        }
    }

    /// Whether any report so far asks to go on without a server.
    pub(super) fn has_left_out(&mut self) -> bool {
        std::iter::from_fn(|| self.reports.try_recv().ok()).any(|report| report.needs_all)
    }

    pub(super) async fn event(&mut self) -> Event {
        match self.events.recv().await {
            Some(super::handler::Incoming::Event(event)) => event,
            _ => panic!("not an event"),
        }
    }
}

pub(super) fn map_of(epoch: u64, addresses: &[String], lagging: &[u64]) -> Arc<ClusterView> {
    let numbered = || (1..).zip(addresses);
    let server = |(id, address): (u64, &String)| Chunkserver {
        id,
        addresses: vec![address.clone()],
        ..Chunkserver::default()
    };
    let member = |(server, _): (u64, &String)| {
        let state = if lagging.contains(&server) {
            MemberState::Lagging
        } else {
            MemberState::InSync
        };
        MapMember {
            server,
            disk: 0,
            state: state.into(),
        }
    };
    Arc::new(ClusterView::from_snapshot(&ClusterMap {
        version: epoch,
        chunkservers: numbered().map(server).collect(),
        groups: vec![Group {
            id: 7,
            epoch,
            members: numbered().map(member).collect(),
            ..Group::default()
        }],
        ..ClusterMap::default()
    }))
}
