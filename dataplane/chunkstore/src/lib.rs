//! Copies of chunks on the disks of one server. No network.
//!
//! A [`Store`] is the disks of a server, a [`Disk`] is one directory: identity, log, index and one
//! sparse file per copy. Small writes go to the log and are answered by its group commit; they
//! move to their place later. Large writes go to their place at once. `docs/formats/disk.md` and
//! `docs/formats/chunk.md` describe every byte and what recovery does with each torn state.
//!
//! Which server may write what and when (groups, epochs, chains) is the business of the crate
//! above; here a chunk only refuses a lease and chain number lower than the highest it has seen.

#![forbid(unsafe_code)]

mod buffers;
mod change;
mod checkpoint;
mod core;
mod disk;
mod entry;
mod error;
mod file;
mod fill;
mod flush;
mod geometry;
mod header;
mod holds;
mod identity;
mod index;
mod keeper;
mod live;
mod marks;
mod medium;
mod options;
mod overlay;
mod pool;
mod queue;
mod ranges;
mod read;
mod record;
mod recover;
mod room;
mod scrub;
mod settle;
mod store;
mod write;

pub use crate::change::{SealedCopy, SettleOp, TouchedBlock, TrimOp};
pub use crate::disk::{Counters, Disk};
pub use crate::entry::{Entry, EntryFlags, OpenMark, Regions};
pub use crate::error::Error;
pub use crate::fill::BaseCopy;
pub use crate::identity::{ClusterId, Identity};
pub use crate::marks::Doubt;
pub use crate::medium::{Medium, Probe, Space};
pub use crate::options::StoreOptions;
pub use crate::read::ReadData;
pub use crate::scrub::Scrubbed;
pub use crate::store::{DiskState, Store};
pub use crate::write::WriteOp;
