//! Following changes.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;

use super::{Harness, all, put, retry};
use crate::batch::Batch;
use crate::error::Error;
use crate::store::MetaStore;
use crate::types::{KeyRange, Revision};
use crate::watch::{Change, Watch, WatchItem};

/// A watch sees each commit once, whole, in order, from where it was asked to begin.
pub async fn watch_follows<H: Harness>(harness: &H) {
    let store = harness.store().await;
    put(&store, b"p/early", b"1").await;
    let start = put(&store, b"p/known", b"2").await;
    let mut watch = store.watch(b"p/", start).await.unwrap();
    let mut earlier = store.watch(b"p/", Revision(start.0 - 1)).await.unwrap();
    let (revision, changes) = next(&mut earlier).await;
    assert_eq!((revision, changes.len()), (start, 1));

    put(&store, b"q/other", b"3").await;
    let mut batch = Batch::new();
    batch
        .put("p/a", "4")
        .put("p/b", "4")
        .put("q/c", "4")
        .delete("p/early");
    let second = store.commit(batch).await.unwrap();
    let (revision, mut changes) = next(&mut watch).await;
    changes.sort_by_key(|change| format!("{change:?}"));
    let put_change = |key: &'static str, value: &'static str| Change::Put {
        key: Bytes::from(key),
        value: Bytes::from(value),
    };
    assert_eq!(revision, second);
    let deleted = Change::Deleted {
        key: Bytes::from("p/early"),
    };
    assert_eq!(
        changes,
        [deleted, put_change("p/a", "4"), put_change("p/b", "4")]
    );

    // Large batches and range deletes are one item as well.
    let mut batch = Batch::new();
    batch.delete_range(KeyRange::prefix("p/"));
    for number in 0..300 {
        batch.put(format!("p/{number:03}"), "5");
    }
    let third = store.commit(batch).await.unwrap();
    let fourth = put(&store, b"p/end", b"6").await;
    let mut seen = BTreeMap::from([("p/a", "4"), ("p/b", "4"), ("p/known", "2")].map(owned));
    let (revision, changes) = next(&mut watch).await;
    assert_eq!(revision, third);
    apply(&mut seen, changes);
    assert_eq!(seen.len(), 300);
    let (revision, changes) = next(&mut watch).await;
    assert_eq!(
        (revision, changes),
        (fourth, vec![put_change("p/end", "6")])
    );
    let mut from_there = store.watch(b"p/", third).await.unwrap();
    assert_eq!(next(&mut from_there).await.0, fourth);
}

/// A watch misses nothing and repeats nothing while connections break.
pub async fn watch_over_reconnect<H: Harness>(harness: &H) {
    let store = Arc::new(harness.store().await);
    let mut watch = store.watch(b"", Revision(0)).await.unwrap();
    let writer = {
        let store = Arc::clone(&store);
        tokio::spawn(async move {
            for number in 0..100u32 {
                loop {
                    let mut batch = Batch::new();
                    batch.put(format!("k/{:02}", number % 40), number.to_string());
                    if number % 7 == 0 {
                        batch.delete(format!("k/{:02}", (number + 3) % 40));
                    }
                    if number % 25 == 24 {
                        batch.delete_range(KeyRange::new("k/10", "k/20"));
                    }
                    match store.commit(batch).await {
                        Ok(_) => break,
                        // Doing it twice is the same as doing it once.
                        Err(Error::Unknown { .. } | Error::Unavailable { .. }) => {
                            tokio::task::yield_now().await;
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        })
    };
    let mut seen = BTreeMap::new();
    let mut last = Revision(0);
    let mut count = 0;
    loop {
        let (revision, changes) = next(&mut watch).await;
        assert!(revision > last, "{revision} after {last}");
        last = revision;
        let done = changes
            .iter()
            .any(|change| matches!(change, Change::Put { value, .. } if *value == "99"));
        apply(&mut seen, changes);
        count += 1;
        if count % 10 == 0 {
            harness.break_connections().await;
        }
        if done {
            break;
        }
    }
    writer.await.unwrap();
    // The last batch may have been sent twice.
    let everything = KeyRange::all();
    let now = retry(|| store.scan(&everything, 0)).await;
    while last
        < now
            .entries
            .iter()
            .map(|e| e.versioned.revision)
            .max()
            .unwrap_or_default()
    {
        let (revision, changes) = next(&mut watch).await;
        last = revision;
        apply(&mut seen, changes);
    }
    let found: BTreeMap<_, _> = all(&*store)
        .await
        .into_iter()
        .map(|e| (e.key, e.versioned.value))
        .collect();
    assert_eq!(seen, found);
}

async fn next(watch: &mut Watch) -> (Revision, Vec<Change>) {
    match watch.next().await.unwrap().unwrap() {
        WatchItem::Commit { revision, changes } => (revision, changes),
        other => panic!("{other:?}"),
    }
}

fn owned(pair: (&'static str, &'static str)) -> (Bytes, Bytes) {
    (Bytes::from(pair.0), Bytes::from(pair.1))
}

fn apply(seen: &mut BTreeMap<Bytes, Bytes>, changes: Vec<Change>) {
    let (ranges, keys): (Vec<_>, Vec<_>) = changes
        .into_iter()
        .partition(|change| matches!(change, Change::RangeDeleted { .. }));
    for change in ranges.into_iter().chain(keys) {
        match change {
            Change::Put { key, value } => _ = seen.insert(key, value),
            Change::Deleted { key } => _ = seen.remove(&key),
            Change::RangeDeleted { range } => seen.retain(|key, _| !range.contains(key)),
        }
    }
}
