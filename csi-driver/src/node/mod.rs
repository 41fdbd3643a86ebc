//! The node service.

pub mod events;
pub mod fencing;
pub mod kernel;
pub mod labels;
pub mod mounter;
pub mod mountinfo;
pub mod record;
pub mod repair;
pub mod service;
pub mod stats;
pub mod volume;
pub mod watching;
