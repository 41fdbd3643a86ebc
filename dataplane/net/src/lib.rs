//! Framed connections: many requests at a time over one socket, in both directions.
//!
//! A [`Connection`] is symmetric: either side sends requests and pushes, and a [`Handler`]
//! receives those of the other side. [`connect`] and [`Listener`] make connections, a [`Pool`]
//! keeps one per address. The frame itself is described in `hither_proto::frame`.
#![forbid(unsafe_code)]

mod connection;
mod error;
mod handler;
mod listener;
mod pool;
mod reader;

pub use connection::{Connection, Identity, Reply, connect};
pub use error::NetError;
pub use handler::{Handler, Incoming, NoHandler, Responder};
pub use listener::Listener;
pub use pool::Pool;
