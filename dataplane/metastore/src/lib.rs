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
mod codec;
#[cfg(feature = "test-util")]
pub mod conformance;
mod dump;
mod embedded;
mod error;
#[cfg(feature = "etcd")]
mod etcd;
mod store;
mod types;
mod watch;

pub use crate::batch::{BATCH_BYTES_MAX, Batch, Precondition};
pub use crate::dump::{DumpSummary, LOADING_KEY, check_dump, dump, load};
pub use crate::embedded::{EmbeddedOptions, EmbeddedSnapshot, EmbeddedStore};
pub use crate::error::Error;
#[cfg(all(feature = "etcd", feature = "test-util"))]
pub use crate::etcd::EtcdFaults;
#[cfg(feature = "etcd-tls")]
pub use crate::etcd::EtcdTls;
#[cfg(feature = "etcd")]
pub use crate::etcd::{EtcdOptions, EtcdSnapshot, EtcdStore};
pub use crate::store::{MetaStore, Snapshot};
pub use crate::types::{
    Entry, KEY_BYTES_MAX, KeyRange, Revision, SCAN_ENTRIES_MAX, ScanPage, VALUE_BYTES_MAX,
    Versioned,
};
pub use crate::watch::{Change, Watch, WatchItem};
