//! The client library: everything a mount, a block device or a command does with a cluster.
//!
//! | module | concern |
//! | --- | --- |
//! | `servers`, `memory` | chunkservers as this mount sees them: order, suspects, latency, load |
//! | `session`, `resume` | the session with the metadata servers: numbers, resending, renewal |
//! | `cache`, `entries` | attributes and entries under leases |
//! | `recall`, `mapped` | giving leases back; pages the kernel writes back meanwhile |
//! | `names`, `list`, `attributes` | operations on names and attributes |
//! | `descriptors`, `holes` | operations on open files |
//! | `lease`, `file` | data leases and what this mount holds under them |
//! | `read`, `attempt`, `late`, `detour` | reading: read-ahead, the copies in turn, and why a farther one |
//! | `write`, `flush`, `chain`, `sync` | writing: into memory, along chains, to stable storage |
//! | `errors` | what went wrong, for the next fsync |
//! | `budget` | memory shared by the clients of a process |
//! | `claim` | having a directory alone |
//! | `tidy` | what is done now and then |
//! | `counters` | who served what, from where |
#![forbid(unsafe_code)]

mod attempt;
mod attributes;
mod budget;
mod cache;
mod chain;
mod claim;
mod client;
mod config;
mod counters;
mod descriptors;
mod detour;
mod entries;
mod error;
mod errors;
mod extents;
mod file;
mod flush;
mod holes;
mod late;
mod lease;
mod list;
mod locks;
mod mapped;
mod marks;
mod memory;
mod names;
mod read;
mod recall;
mod resume;
mod servers;
mod session;
mod sync;
mod tidy;
mod r#where;
mod write;

pub use attributes::SetAttributes;
pub use budget::Budget;
pub use cache::Attributes;
pub use claim::{ClaimError, Holder};
pub use client::{Client, KernelCaches, NoKernelCaches, StartError};
pub use config::{ClientConfig, Standpoint};
pub use counters::{Locality, LocalityReport};
pub use detour::Detour;
pub use error::FsError;
pub use file::OpenFile;
pub use list::{GoOn, Listing, ListingEntry};
pub use names::{Created, Found};
pub use r#where::{ChunkPlace, ServerPlace};
