//! Manager: who is in the cluster, where chunks go, what everybody believes.
//!
//! [`State`] is everything the manager decides about; the functions of [`decide`] take a state and
//! something that happened and give the next state: no I/O, no clock. The shell ([`Manager`])
//! stores what changed, then publishes the new map.
#![forbid(unsafe_code)]

pub mod decide;
mod leader;
mod server;
mod service;
mod state;

pub use server::{Manager, ManagerConfig, ManagerError};
pub use state::State;
