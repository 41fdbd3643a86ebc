//! The FUSE mount.
//!
//! [`transport`] is our own view of a FUSE server: typed requests in, one reply handle out; today
//! `fuser` stands behind it. `serve` answers the requests with a client of the cluster, `notify`
//! makes the kernel forget what is recalled, `options` reads what stands after `-o`.
#![forbid(unsafe_code)]

mod advice;
mod crew;
mod front;
mod mount;
mod notify;
pub mod options;
mod readahead;
mod serve;
pub mod transport;

pub use advice::advice;
pub use mount::{MountError, Mounted, mount, serve_connection};
