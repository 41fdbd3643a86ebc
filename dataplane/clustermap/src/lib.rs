//! The cluster map as a value: look things up, apply deltas, compute deltas.
//!
//! The manager makes maps and sends what has changed; clients, metadata servers and chunkservers
//! keep a [`ClusterView`] and apply it. Pure: no I/O, no clock.
#![forbid(unsafe_code)]

mod delta;
mod health;
mod view;

pub use delta::{ApplyError, delta_between, snapshot_of};
pub use health::{
    GroupCounts, classes_without_writes, count_groups, groups_in_use, lacks_members, takes_writes,
};
pub use view::{ClusterView, Server};
