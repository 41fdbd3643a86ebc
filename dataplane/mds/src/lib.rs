//! Metadata server: the name-space, its sessions and leases.
//!
//! [`core`] is a deterministic state machine: events in, effects out, no clock and no I/O.
//! Everything that reads or writes runs outside, in the shell.
#![forbid(unsafe_code)]

pub mod core;
pub mod keys;
mod shell;

pub use shell::{Holder, Pulse, RankConfig, RankError, RankServer, Vitals};
