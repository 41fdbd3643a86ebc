//! The etcd backend against a real etcd, with connections that break and processes that die.

#![allow(clippy::unwrap_used, reason = "a failed helper fails its test")]

mod proxy;
mod server;
#[cfg(feature = "etcd-tls")]
mod tls;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hither_metastore::conformance::Harness;
use hither_metastore::{
    Batch, Change, Error, EtcdOptions, EtcdStore, KeyRange, MetaStore, Revision, WatchItem,
};
use tokio::sync::OnceCell;

use crate::proxy::Proxy;
use crate::server::Server;

/// Stores below prefixes of their own in one etcd, behind a proxy that can break connections.
struct Etcd {
    server: Arc<Server>,
    proxy: OnceCell<Proxy>,
}

impl Etcd {
    fn new() -> Self {
        Self {
            server: Server::shared(),
            proxy: OnceCell::new(),
        }
    }

    async fn connect(&self, prefix: &str) -> EtcdStore {
        let proxy = self
            .proxy
            .get_or_init(|| Proxy::start(self.server.port()))
            .await;
        let endpoint = format!("http://127.0.0.1:{}", proxy.port());
        EtcdStore::connect(EtcdOptions::new(vec![endpoint], prefix))
            .await
            .unwrap()
    }
}

impl Harness for Etcd {
    type Store = EtcdStore;

    async fn store(&self) -> EtcdStore {
        self.connect(&unique_prefix()).await
    }

    async fn break_connections(&self) {
        if let Some(proxy) = self.proxy.get() {
            proxy.break_connections();
        }
    }
}

fn unique_prefix() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("/hither/{}/", NEXT.fetch_add(1, Ordering::SeqCst))
}

hither_metastore::conformance_tests!(Etcd::new());

type State = BTreeMap<Vec<u8>, Vec<u8>>;

async fn state(store: &EtcdStore) -> State {
    let mut state = State::new();
    let mut range = KeyRange::all();
    loop {
        let page = store.scan(&range, 0).await.unwrap();
        for entry in page.entries {
            state.insert(entry.key.to_vec(), entry.versioned.value.to_vec());
        }
        match page.resume {
            Some(start) => range = range.from_key(start),
            None => return state,
        }
    }
}

/// Range deletes, 250 changes and 130 preconditions, of which the last fails if `holds` is not set.
fn large(holds: bool) -> Batch {
    let mut batch = Batch::new();
    for number in 0..129 {
        batch.require_value(format!("old/{number:03}"), "old");
    }
    batch.require_value("old/129", if holds { "old" } else { "new" });
    batch.delete_range(KeyRange::prefix("old/"));
    for number in 0..240 {
        batch.put(format!("new/{number:03}"), "new");
    }
    for number in 0..10 {
        batch.put(format!("old/{number:03}"), "kept");
    }
    batch
}

/// What it leaves of [`fill`], if it holds.
fn whole() -> State {
    let new = (0..240).map(|number| (format!("new/{number:03}"), "new"));
    let kept = (0..10).map(|number| (format!("old/{number:03}"), "kept"));
    new.chain(kept)
        .map(|(key, value)| (key.into_bytes(), value.as_bytes().to_vec()))
        .collect()
}

async fn fill(store: &EtcdStore) -> State {
    for half in 0..2 {
        let mut batch = Batch::new();
        for number in half * 65..(half + 1) * 65 {
            batch.put(format!("old/{number:03}"), "old");
        }
        store.commit(batch).await.unwrap();
    }
    state(store).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_batch_whose_sender_dies_at_any_call_is_finished_or_gone() {
    let etcd = Etcd::new();
    for (holds, late) in [(true, false), (false, false), (true, true), (false, true)] {
        let mut call = 0;
        loop {
            call += 1;
            let prefix = unique_prefix();
            let sender = etcd.connect(&prefix).await;
            let other = etcd.connect(&prefix).await;
            let before = fill(&other).await;
            let mut watch = other.watch(b"", Revision(0)).await.unwrap();
            sender.faults().die_at(call);
            let outcome = sender.commit(large(holds)).await;
            let made = sender.faults().calls();
            let context = format!("holds {holds}, late {late}, call {call}: {outcome:?}");
            let mut allowed = [before, whole()];
            if late {
                // A small batch comes first: it must not slip in between.
                let small = Batch::new().put("old/000", "late").clone();
                other.commit(small).await.unwrap();
                for state in &mut allowed {
                    state.insert(b"old/000".to_vec(), b"late".to_vec());
                }
            }
            let after = state(&other).await;
            let happened = after == allowed[1];
            assert!(happened || after == allowed[0], "{context}: {after:?}");
            assert!(holds || !happened, "{context}");
            match outcome {
                Ok(_) => assert!(happened, "{context}"),
                Err(Error::Unknown { .. }) => {}
                Err(Error::Unavailable { .. }) => assert!(!happened, "{context}"),
                Err(Error::PreconditionFailed { index: 129 }) => assert!(!holds, "{context}"),
                Err(_) => panic!("{context}"),
            }
            // The store goes on, and nothing is left that could come to life later.
            let end = other
                .commit(Batch::new().put("end", "").clone())
                .await
                .unwrap();
            sender.faults().die_at(0);
            assert_eq!(state(&sender).await, state(&other).await, "{context}");
            assert_eq!(
                follow(&mut watch, end).await,
                state(&other).await,
                "{context}"
            );
            if made < call {
                // It came to the end before it would have died.
                break;
            }
        }
        // Part, head, verdict, four pieces, end; or part, head, end.
        let least = if holds { 8 } else { 3 };
        assert!(call > least, "only {call} calls");
    }
}

/// What a watch makes of an empty state up to a commit; each commit is one item.
async fn follow(watch: &mut hither_metastore::Watch, end: Revision) -> State {
    use futures::StreamExt;
    let mut state = State::new();
    let mut last = Revision(0);
    loop {
        let WatchItem::Commit { revision, changes } = watch.next().await.unwrap().unwrap() else {
            panic!("compacted");
        };
        assert!(revision > last);
        last = revision;
        for change in changes {
            match change {
                Change::Put { key, value } => drop(state.insert(key.to_vec(), value.to_vec())),
                Change::Deleted { key } => drop(state.remove(&key[..])),
                Change::RangeDeleted { range } => state.retain(|key, _| !range.contains(key)),
            }
        }
        if revision == end {
            return state;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proposal_that_reaches_etcd_late_does_not_come_to_life() {
    let etcd = Etcd::new();
    let prefix = unique_prefix();
    let sender = etcd.connect(&prefix).await;
    let other = etcd.connect(&prefix).await;
    let before = fill(&other).await;
    // The part is call 1, the proposal call 2.
    sender.faults().hold_back(2);
    let outcome = sender.commit(large(true)).await;
    assert!(
        matches!(outcome, Err(Error::Unavailable { .. })),
        "{outcome:?}"
    );
    assert!(sender.let_go().await.unwrap());
    assert_eq!(state(&other).await, before);
    sender.commit(large(true)).await.unwrap();
    assert_eq!(state(&other).await, whole());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_batches_of_many_senders_take_turns() {
    let etcd = Etcd::new();
    let prefix = unique_prefix();
    let mut tasks = Vec::new();
    for sender in 0..4u32 {
        let store = etcd.connect(&prefix).await;
        tasks.push(tokio::spawn(async move {
            for round in 0..5u32 {
                let mut batch = Batch::new();
                batch.delete_range(KeyRange::prefix("all/"));
                for number in 0..150 {
                    batch.put(format!("all/{number:03}"), format!("{sender}.{round}"));
                    batch.put(format!("own/{sender}/{round}/{number:03}"), "");
                }
                store.commit(batch).await.unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let store = etcd.connect(&prefix).await;
    let found = state(&store).await;
    assert_eq!(found.len(), 150 + 4 * 5 * 150);
    let all: Vec<_> = found
        .iter()
        .filter(|(key, _)| key.starts_with(b"all/"))
        .collect();
    assert!(all.iter().all(|(_, value)| *value == all[0].1), "{all:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_of_the_forgotten_past_says_so() {
    use futures::StreamExt;
    // Of its own: the past is gone for all of its stores.
    let server = Arc::new(Server::start());
    let etcd = Etcd {
        server,
        proxy: OnceCell::new(),
    };
    let store = etcd.store().await;
    let first = store
        .commit(Batch::new().put("a", "1").clone())
        .await
        .unwrap();
    let mut last = first;
    for number in 0..5 {
        last = store
            .commit(Batch::new().put("a", number.to_string()).clone())
            .await
            .unwrap();
    }
    etcd.server.compact(last.0).await;
    let mut watch = store.watch(b"a", first).await.unwrap();
    assert_eq!(watch.next().await, Some(Ok(WatchItem::Compacted)));
    assert_eq!(watch.next().await, None);
    let mut watch = store.watch(b"a", last).await.unwrap();
    let next = store
        .commit(Batch::new().put("a", "new").clone())
        .await
        .unwrap();
    let item = watch.next().await;
    assert!(matches!(item, Some(Ok(WatchItem::Commit { revision, .. })) if revision == next));
}

#[tokio::test]
async fn an_etcd_that_is_not_there_is_unavailable() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let options = EtcdOptions {
        request_timeout: std::time::Duration::from_millis(300),
        ..EtcdOptions::new(vec![endpoint], "/x/")
    };
    let refused = EtcdStore::connect(options).await.map(drop);
    assert!(
        matches!(refused, Err(Error::Unavailable { .. })),
        "{refused:?}"
    );
}
