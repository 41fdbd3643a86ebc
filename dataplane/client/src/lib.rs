//! The client library: everything a mount, a block device or a command does with a cluster.
//!
//! | module | concern |
//! | --- | --- |
//! | `servers` | chunkservers as this mount sees them: order, suspects, latency, load |
//! | `session`, `resume` | the session with the metadata servers: numbers, resending, renewal |
//! | `cache`, `entries` | attributes and entries under leases |
//! | `recall` | giving leases back |
//! | `names`, `list` | operations on names and attributes |
//! | `lease`, `file` | data leases and what this mount holds under them |
//! | `read`, `attempt` | reading: read-ahead, the copies in turn |
//! | `write`, `flush`, `chain`, `sync` | writing: into memory, along chains, to stable storage |
//! | `errors` | what went wrong, for the next fsync |
//! | `budget` | memory shared by the clients of a process |
//! | `claim` | having a directory alone |
//! | `tidy` | what is done now and then |
//! | `counters` | who served what, from where |
#![forbid(unsafe_code)]

mod attempt;
mod budget;
mod cache;
mod chain;
mod claim;
mod client;
mod config;
mod counters;
mod entries;
mod error;
mod errors;
mod extents;
mod file;
mod flush;
mod lease;
mod list;
mod locks;
mod marks;
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

pub use budget::Budget;
pub use cache::Attributes;
pub use claim::{ClaimError, Holder};
pub use client::{Client, KernelCaches, NoKernelCaches, StartError};
pub use config::{ClientConfig, Standpoint};
pub use counters::{Locality, LocalityReport};
pub use error::FsError;
pub use file::OpenFile;
pub use list::{GoOn, Listing, ListingEntry};
pub use names::{Created, Found, SetAttributes};
pub use r#where::{ChunkPlace, ServerPlace};
