//! What crosses a wire or is stored: identifiers, frame header, message types, status codes.
//!
//! The messages are described in `proto/*.proto`, the frame in [`frame`], both byte by byte in
//! `docs/protocol.md`. Nothing here does I/O.
#![forbid(unsafe_code)]

pub mod checksum;
pub mod clock;
pub mod fragment;
pub mod frame;
pub mod ids;
pub mod kind;
pub mod size;
pub mod status;

/// Messages every connection speaks.
#[allow(
    missing_docs,
    rustdoc::all,
    clippy::all,
    clippy::pedantic,
    reason = "generated; documented in proto/"
)]
pub mod common {
    include!(concat!(env!("OUT_DIR"), "/hither.common.rs"));
}
/// The cluster map.
#[allow(
    missing_docs,
    rustdoc::all,
    clippy::all,
    clippy::pedantic,
    reason = "generated; documented in proto/"
)]
pub mod map {
    include!(concat!(env!("OUT_DIR"), "/hither.map.rs"));
}
/// Requests to the manager.
#[allow(
    missing_docs,
    rustdoc::all,
    clippy::all,
    clippy::pedantic,
    reason = "generated; documented in proto/"
)]
pub mod manager {
    include!(concat!(env!("OUT_DIR"), "/hither.manager.rs"));
}
/// A client's session with a metadata server.
#[allow(
    missing_docs,
    rustdoc::all,
    clippy::all,
    clippy::pedantic,
    reason = "generated; documented in proto/"
)]
pub mod meta {
    include!(concat!(env!("OUT_DIR"), "/hither.meta.rs"));
}
/// Requests to a chunkserver.
#[allow(
    missing_docs,
    rustdoc::all,
    clippy::all,
    clippy::pedantic,
    reason = "generated; documented in proto/"
)]
pub mod chunk {
    include!(concat!(env!("OUT_DIR"), "/hither.chunk.rs"));
}
/// Values of the metadata store.
#[allow(
    missing_docs,
    rustdoc::all,
    clippy::all,
    clippy::pedantic,
    reason = "generated; documented in proto/"
)]
pub mod stored {
    include!(concat!(env!("OUT_DIR"), "/hither.stored.rs"));
}
