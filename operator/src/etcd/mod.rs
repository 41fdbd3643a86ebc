//! A managed etcd: what is decided about its members and certificates, and how they are asked.

pub mod ask;
pub mod certificates;
pub mod member;
pub mod message;
pub mod plan;
pub mod state;
pub mod wal;

/// Port at which members take clients.
pub const CLIENT_PORT: u16 = 2379;
/// Port at which members take each other.
pub const PEER_PORT: u16 = 2380;
/// Port of the members' health and metrics, without TLS.
pub const HEALTH_PORT: u16 = 2381;
/// Members there are to be.
pub const MEMBERS: i32 = 3;
/// Bytes at which members take no more changes.
pub const QUOTA_BYTES: u64 = 8 << 30;
