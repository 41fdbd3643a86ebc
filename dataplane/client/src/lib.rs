//! The client library: everything a mount, a block device or a command does with a cluster.
//!
//! | module | concern |
//! | --- | --- |
//! | `servers` | chunkservers as this mount sees them: order, suspects, latency, load |
//! | `session` | the session with the metadata servers: numbers, resending, renewal |
//! | `cache`, `entries` | attributes and entries under leases |
//! | `recall` | giving leases back |
//! | `names`, `list` | operations on names and attributes |
//! | `file`, `read`, `write`, `sync` | file data under data leases |
//! | `counters` | who served what, from where |
#![forbid(unsafe_code)]

mod cache;
mod client;
mod config;
mod counters;
mod entries;
mod error;
mod extents;
mod file;
mod list;
mod locks;
mod names;
mod read;
mod recall;
mod servers;
mod session;
mod sync;
mod r#where;
mod write;

pub use cache::Attributes;
pub use client::{Client, KernelCaches, NoKernelCaches, StartError};
pub use config::ClientConfig;
pub use counters::{Locality, LocalityReport};
pub use error::FsError;
pub use file::OpenFile;
pub use list::{GoOn, Listing, ListingEntry};
pub use names::{Created, Found, SetAttributes};
pub use r#where::{ChunkPlace, ServerPlace};
