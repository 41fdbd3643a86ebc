//! The cluster map as a value: look things up, apply deltas, compute deltas.
//!
//! The manager makes maps and sends what has changed; clients, metadata servers and chunkservers
//! keep a [`ClusterView`] and apply it. Pure: no I/O, no clock.
#![forbid(unsafe_code)]

mod delta;
mod view;

pub use delta::{ApplyError, delta_between, snapshot_of};
pub use view::{ClusterView, Server};
