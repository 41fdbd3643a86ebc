//! What every backend of the metadata store does.

use std::future::Future;

use crate::batch::Batch;
use crate::error::Error;
use crate::types::{KeyRange, Revision, ScanPage, Versioned};
use crate::watch::Watch;

/// An ordered key-value store with atomic batches.
///
/// Reads are linearizable: they see every batch whose commit was answered before they began, all
/// of it, and nothing of a batch that can still get lost. Dropping any of the futures is harmless;
/// a dropped commit may or may not take place.
pub trait MetaStore: Send + Sync + 'static {
    /// What [`MetaStore::snapshot`] gives.
    type Snapshot: Snapshot;

    /// The value of `key`.
    fn get(&self, key: &[u8]) -> impl Future<Output = Result<Option<Versioned>, Error>> + Send;

    /// The first entries of `range`, at most `limit`, as they are at one moment. A limit of 0, or
    /// one above [`SCAN_ENTRIES_MAX`](crate::SCAN_ENTRIES_MAX), means the latter.
    fn scan(
        &self,
        range: &KeyRange,
        limit: usize,
    ) -> impl Future<Output = Result<ScanPage, Error>> + Send;

    /// Commits a batch: all of it is durable and visible when this returns its number, or nothing
    /// of it was changed when this returns an error other than [`Error::Unknown`].
    fn commit(&self, batch: Batch) -> impl Future<Output = Result<Revision, Error>> + Send;

    /// Follows all changes of keys that begin with `prefix` in commits after `after`, whole commits
    /// in order.
    ///
    /// To follow a range from its present state, scan it and watch after the revision of the first
    /// page; changes that a later page shows already are then seen again. Nothing is missed,
    /// however often the connection to the store breaks; if the store no longer knows what came
    /// after `after`, the stream ends with [`WatchItem::Compacted`](crate::WatchItem::Compacted).
    fn watch(
        &self,
        prefix: &[u8],
        after: Revision,
    ) -> impl Future<Output = Result<Watch, Error>> + Send;

    /// The whole store as it is now, for reading at leisure while it changes. Keeps resources as
    /// long as it lives.
    fn snapshot(&self) -> impl Future<Output = Result<Self::Snapshot, Error>> + Send;

    /// As [`MetaStore::get`], answered at once by a backend that can; `None` means that this one
    /// cannot.
    fn try_get(&self, key: &[u8]) -> Option<Result<Option<Versioned>, Error>> {
        let _ = key;
        None
    }

    /// As [`MetaStore::scan`], answered at once by a backend that can; `None` means that this one
    /// cannot.
    fn try_scan(&self, range: &KeyRange, limit: usize) -> Option<Result<ScanPage, Error>> {
        let _ = (range, limit);
        None
    }
}

/// A store as it was at one moment.
pub trait Snapshot: Send + Sync + 'static {
    /// The last commit that it shows.
    fn revision(&self) -> Revision;

    /// As [`MetaStore::scan`], in the past.
    fn scan(
        &self,
        range: &KeyRange,
        limit: usize,
    ) -> impl Future<Output = Result<ScanPage, Error>> + Send;
}
