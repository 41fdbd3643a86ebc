//! What every backend has to do, as tests that run against any of them.
//!
//! A backend's tests implement [`Harness`] and call
//! [`conformance_tests!`](crate::conformance_tests), which makes one test of each case. A case
//! panics when the store does something wrong.

#![allow(clippy::unwrap_used, reason = "a case that cannot go on has failed")]

mod batches;
mod concurrency;
mod dumps;
mod model;
mod watches;

use std::future::Future;

use bytes::Bytes;

use crate::error::Error;
use crate::store::MetaStore;
use crate::types::{Entry, KeyRange};

pub use batches::{large_batches, limits, preconditions, range_deletes, revisions};
pub use concurrency::{counter, no_half_batches, snapshots, unknown_outcomes};
pub use dumps::{damaged_dumps, dump_and_load};
pub use model::random_batches;
pub use watches::{watch_follows, watch_over_reconnect};

/// How a case gets its stores.
pub trait Harness: Send + Sync {
    /// The backend.
    type Store: MetaStore;

    /// A new, empty store. A case may ask for several, which must have nothing in common.
    fn store(&self) -> impl Future<Output = Self::Store> + Send;

    /// Breaks all connections of all stores to their service, so that answers on the way are lost.
    /// Nothing, for a backend without any.
    fn break_connections(&self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }
}

/// Makes a test of each case: `conformance_tests!(HARNESS)`, with an expression that gives a
/// [`Harness`]. The crate that uses it needs tokio with `macros` and `rt-multi-thread`.
#[macro_export]
macro_rules! conformance_tests {
    ($harness:expr) => {
        $crate::conformance_tests!($harness;
            scans revisions preconditions range_deletes limits large_batches random_batches
            counter no_half_batches snapshots unknown_outcomes watch_follows
            watch_over_reconnect dump_and_load damaged_dumps);
    };
    ($harness:expr; $($case:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                $crate::conformance::$case(&$harness).await;
            }
        )*
    };
}

/// Keys come in byte order, in pages that together are the range.
pub async fn scans<H: Harness>(harness: &H) {
    let store = harness.store().await;
    assert_eq!(all(&store).await, []);
    assert_eq!(store.get(b"a").await, Ok(None));
    let keys: [&[u8]; 8] = [
        b"\0a",
        b"a",
        b"a\0",
        b"ab",
        b"a\xff",
        b"b",
        b"\xff",
        b"\xff\xff",
    ];
    for key in keys.iter().rev() {
        put(&store, key, key).await;
    }
    let found: Vec<_> = all(&store)
        .await
        .into_iter()
        .map(|entry| entry.key)
        .collect();
    assert_eq!(found, keys);
    for limit in 1..=9 {
        let mut found = Vec::new();
        let mut range = KeyRange::all();
        loop {
            let page = store.scan(&range, limit).await.unwrap();
            assert!(page.entries.len() <= limit);
            found.extend(page.entries.iter().map(|entry| entry.key.clone()));
            if let Some(same) = store.try_scan(&range, limit) {
                assert_eq!(same, Ok(page.clone()));
            }
            match page.resume {
                Some(start) => range = range.from_key(start),
                None => break,
            }
        }
        assert_eq!(found, keys, "limit {limit}");
    }
    // A page that is not the last has something, whatever was deleted before it.
    let mut batch = crate::Batch::new();
    for number in 0..200u8 {
        batch.put(vec![b'c', number], "");
    }
    store.commit(batch).await.unwrap();
    for number in 0..199u8 {
        store
            .commit(crate::Batch::new().delete(vec![b'c', number]).clone())
            .await
            .unwrap();
        let page = store.scan(&KeyRange::prefix("c"), 1).await.unwrap();
        assert_eq!(page.entries.len(), 1, "{number}");
        assert_eq!(page.entries[0].key, [b'c', number + 1][..]);
    }
    store
        .commit(
            crate::Batch::new()
                .delete_range(KeyRange::prefix("c"))
                .clone(),
        )
        .await
        .unwrap();
    assert_eq!(
        store.scan(&KeyRange::prefix("c"), 1).await.unwrap().resume,
        None
    );
    let ranges = [
        (KeyRange::prefix("a"), 1..5),
        (KeyRange::new("a\0", "b"), 2..5),
        (KeyRange::new("b", "a"), 0..0),
        (KeyRange::prefix(vec![255]), 6..8),
        (
            KeyRange {
                start: Bytes::from("b"),
                end: None,
            },
            5..8,
        ),
    ];
    for (range, expected) in ranges {
        let found: Vec<_> = collect(&store, &range)
            .await
            .into_iter()
            .map(|e| e.key)
            .collect();
        assert_eq!(found, keys[expected], "{range:?}");
    }
}

/// Everything in the store.
async fn all<S: MetaStore>(store: &S) -> Vec<Entry> {
    collect(store, &KeyRange::all()).await
}

/// Everything in a range.
async fn collect<S: MetaStore>(store: &S, range: &KeyRange) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut range = range.clone();
    loop {
        let page = retry(|| store.scan(&range, 0)).await;
        entries.extend(page.entries);
        match page.resume {
            Some(start) => range = range.from_key(start),
            None => return entries,
        }
    }
}

/// Repeats what changes nothing until the store can be reached.
async fn retry<T, F: Future<Output = Result<T, Error>>>(mut attempt: impl FnMut() -> F) -> T {
    loop {
        match attempt().await {
            Ok(value) => return value,
            Err(Error::Unavailable { .. }) => tokio::task::yield_now().await,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Puts one key without any condition.
async fn put<S: MetaStore>(store: &S, key: &[u8], value: &[u8]) -> crate::Revision {
    let mut batch = crate::Batch::new();
    batch.put(Bytes::copy_from_slice(key), Bytes::copy_from_slice(value));
    store.commit(batch).await.unwrap()
}

/// The splitmix64 generator.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}
