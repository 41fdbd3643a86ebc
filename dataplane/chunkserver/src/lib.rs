//! The network service around the copies of one server.
//!
//! [`ChunkServer::start`] opens the disks, registers with the manager, follows the cluster map and
//! serves. What may be answered is decided by the map alone (`authority`, pure): every request names
//! a group and the epoch its sender believes in. A new epoch is adopted only after what came under
//! the old one is done (`gate`). Writes go to the disk and to the next member of their chain at the
//! same time and are acknowledged when both have them. A member that the map shows as filling
//! fetches what it lacks (`fill`).

#![forbid(unsafe_code)]

mod admit;
mod authority;
mod beat;
mod chain;
mod config;
mod counters;
mod doubts;
mod error;
mod fetch;
mod fill;
mod fills;
mod gate;
mod handler;
mod links;
mod maintain;
mod operation;
mod probes;
mod read;
mod scrub;
mod server;
mod sessions;
mod status;
mod throttle;

pub use crate::config::ChunkServerConfig;
pub use crate::counters::{Counters, RecentWrite};
pub use crate::error::StartError;
pub use crate::fills::FillProgress;
pub use crate::server::ChunkServer;
