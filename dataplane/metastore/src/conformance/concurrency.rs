//! Many at once, and connections that break.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Harness, all, collect, put, retry};
use crate::batch::Batch;
use crate::error::Error;
use crate::store::{MetaStore, Snapshot};
use crate::types::KeyRange;

/// A counter that eight tasks raise by compare and swap loses nothing.
pub async fn counter<H: Harness>(harness: &H) {
    let store = Arc::new(harness.store().await);
    let tasks: Vec<_> = (0..8u64)
        .map(|task| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                for round in 0..25u64 {
                    while !raise(&*store, task, round).await {}
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let found = store.get(b"counter").await.unwrap().unwrap();
    assert_eq!(found.value, 200u64.to_le_bytes()[..]);
    assert_eq!(
        collect(&*store, &KeyRange::prefix("done/")).await.len(),
        200
    );
}

/// One attempt; the odd tasks compare revisions, the even ones values.
async fn raise<S: MetaStore>(store: &S, task: u64, round: u64) -> bool {
    let now = store.get(b"counter").await.unwrap();
    let mut batch = Batch::new();
    let count = match &now {
        None => {
            batch.require_absent("counter");
            0
        }
        Some(now) if task.is_multiple_of(2) => {
            batch.require_value("counter", now.value.clone());
            decode(&now.value)
        }
        Some(now) => {
            batch.require_revision("counter", now.revision);
            decode(&now.value)
        }
    };
    batch.put("counter", (count + 1).to_le_bytes().to_vec());
    batch.put(format!("done/{task}/{round}"), "");
    match store.commit(batch).await {
        Ok(_) => true,
        Err(Error::PreconditionFailed { index: 0 }) => false,
        Err(error) => panic!("{error}"),
    }
}

fn decode(value: &[u8]) -> u64 {
    u64::from_le_bytes(value.try_into().unwrap())
}

/// Readers see large batches whole or not at all, by scans and by gets in the order of their keys.
pub async fn no_half_batches<H: Harness>(harness: &H) {
    let store = Arc::new(harness.store().await);
    let generation = |generation: u64| {
        let mut batch = Batch::new();
        batch.delete_range(KeyRange::prefix("k/"));
        // The even ones have many small puts, the odd ones fewer.
        let count = if generation.is_multiple_of(2) {
            400
        } else {
            150
        };
        for number in 0..count {
            batch.put(format!("k/{number:03}"), generation.to_le_bytes().to_vec());
        }
        batch
    };
    store.commit(generation(0)).await.unwrap();
    let writer = {
        let store = Arc::clone(&store);
        tokio::spawn(async move {
            for number in 1..20 {
                store.commit(generation(number)).await.unwrap();
            }
        })
    };
    while !writer.is_finished() {
        let page = store.scan(&KeyRange::prefix("k/"), 0).await.unwrap();
        let number = decode(&page.entries[0].versioned.value);
        assert!(!page.more());
        assert_eq!(
            page.entries.len(),
            if number.is_multiple_of(2) { 400 } else { 150 }
        );
        assert!(
            page.entries
                .iter()
                .all(|entry| decode(&entry.versioned.value) == number)
        );
        let first = store.get(b"k/000").await.unwrap().unwrap();
        let last = store.get(b"k/149").await.unwrap().unwrap();
        assert!(decode(&first.value) >= number && decode(&last.value) >= decode(&first.value));
    }
    writer.await.unwrap();
    assert_eq!(
        decode(&store.get(b"k/149").await.unwrap().unwrap().value),
        19
    );
}

/// A snapshot does not change.
pub async fn snapshots<H: Harness>(harness: &H) {
    let store = harness.store().await;
    for number in 0..50u8 {
        put(&store, &[b'a', number], b"old").await;
    }
    let expected = all(&store).await;
    let snapshot = store.snapshot().await.unwrap();
    store
        .commit(
            Batch::new()
                .delete_range(KeyRange::new("a\x10", "a\x20"))
                .clone(),
        )
        .await
        .unwrap();
    let newest = put(&store, b"a\x05", b"new").await;
    assert!(snapshot.revision() < newest);
    let mut found = Vec::new();
    let mut range = KeyRange::all();
    loop {
        let page = snapshot.scan(&range, 7).await.unwrap();
        found.extend(page.entries);
        match page.resume {
            Some(start) => range = range.from_key(start),
            None => break,
        }
    }
    assert_eq!(found, expected);
    assert_eq!(
        store
            .snapshot()
            .await
            .unwrap()
            .scan(&KeyRange::all(), 0)
            .await
            .unwrap()
            .entries,
        all(&store).await
    );
}

/// When connections break, a commit happened, or did not, or its outcome is unknown; and reading
/// back tells which.
pub async fn unknown_outcomes<H: Harness>(harness: &H) {
    let store = Arc::new(harness.store().await);
    let writer = {
        let store = Arc::clone(&store);
        tokio::spawn(async move {
            let mut expected = BTreeMap::new();
            let mut unknown = 0;
            for number in 0..60u64 {
                let key = format!("k/{number:02}");
                // Now and then a batch of more than any single transaction takes.
                let size = if number % 10 == 9 { 300 } else { 1 };
                loop {
                    let mut batch = Batch::new();
                    batch.require_absent(key.clone()).put(key.clone(), "");
                    for extra in 1..size {
                        batch.put(format!("x/{number:02}/{extra:03}"), "");
                    }
                    match store.commit(batch).await {
                        Ok(_) => break,
                        Err(Error::Unknown { .. }) => {
                            unknown += 1;
                            if retry(|| store.get(key.as_bytes())).await.is_some() {
                                break;
                            }
                        }
                        Err(Error::Unavailable { .. }) => tokio::task::yield_now().await,
                        Err(error) => panic!("{number}: {error}"),
                    }
                }
                expected.insert(key, size);
            }
            (expected, unknown)
        })
    };
    while !writer.is_finished() {
        harness.break_connections().await;
        tokio::task::yield_now().await;
        retry(|| store.get(b"k/00")).await;
    }
    let (expected, _) = writer.await.unwrap();
    let found = collect(&*store, &KeyRange::prefix("k/")).await;
    assert_eq!(found.len(), expected.len());
    for (key, size) in expected {
        let extra = collect(&*store, &KeyRange::prefix(key.replace('k', "x"))).await;
        assert_eq!(extra.len() + 1, size, "{key}");
    }
}
