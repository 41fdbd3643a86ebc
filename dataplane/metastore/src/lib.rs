//! The metadata store: an ordered key-value store with atomic batches, where all metadata truth
//! lives.
//!
//! [`MetaStore`] is what metadata servers and managers see. [`EmbeddedStore`] keeps everything in
//! one directory and needs no service; `EtcdStore` (feature `etcd`) keeps it in etcd. A [`Batch`]
//! has preconditions and changes and succeeds or fails as one; reads see every batch that was
//! acknowledged and nothing of one that was not. [`dump`] and [`load`] move a whole store as a
//! file. `docs/formats/metastore.md` describes everything that is stored.

#![forbid(unsafe_code)]

mod batch;
#[cfg(feature = "test-util")]
pub mod conformance;
mod dump;
pub mod embedded;
mod error;
mod store;
mod types;
mod watch;

pub use crate::batch::{BATCH_BYTES_MAX, Batch, Precondition};
pub use crate::dump::{DumpSummary, LOADING_KEY, dump, load};
pub use crate::embedded::{EmbeddedOptions, EmbeddedStore};
pub use crate::error::Error;
pub use crate::store::{MetaStore, Snapshot};
pub use crate::types::{
    Entry, KEY_BYTES_MAX, KeyRange, Revision, SCAN_ENTRIES_MAX, ScanPage, VALUE_BYTES_MAX,
    Versioned,
};
pub use crate::watch::{Change, Watch, WatchItem};
