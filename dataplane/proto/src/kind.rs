//! Kinds of messages: the one list of what the protocol can say.
//!
//! Numbers are never used again. `0x01xx` every connection, `0x02xx` manager, `0x03xx` metadata
//! server, `0x04xx` chunkserver.

use std::fmt;

/// Number of a message kind.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Kind(pub u16);

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $value:literal;)*) => {
        impl Kind {
            $($(#[$doc])* pub const $name: Self = Self($value);)*

            /// Name for logs, `None` for a number this build does not know.
            #[must_use]
            pub fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($name)),)*
                    _ => None,
                }
            }

            /// All kinds this build knows.
            pub const ALL: &'static [Self] = &[$(Self($value)),*];
        }
    };
}

kinds! {
    /// First request on a connection.
    HELLO = 0x0101;
    /// Answered at once by every server.
    PING = 0x0102;

    /// Fetch the cluster map.
    MAP_FETCH = 0x0201;
    /// Fetch the cluster map and get every later change pushed.
    MAP_SUBSCRIBE = 0x0202;
    /// Push: a change of the cluster map.
    MAP_PUSH = 0x0203;
    /// A chunkserver's sign of life.
    HEARTBEAT = 0x0204;
    /// A server could not be reached.
    REPORT_UNREACHABLE = 0x0205;
    /// A metadata server's sign of life.
    RANK_BEAT = 0x0206;
    /// Make or change a storage class.
    CLASS_SET = 0x0207;
    /// Remove a storage class.
    CLASS_DELETE = 0x0208;
    /// Change a chunkserver's labels by hand.
    SERVER_LABEL = 0x0209;
    /// Maintenance on or off.
    SERVER_MAINTENANCE = 0x020a;
    /// Set distances between zones.
    DISTANCE_SET = 0x020b;
    /// Everything `hither status` shows.
    CLUSTER_STATUS = 0x020c;
    /// Stream the whole store out.
    META_DUMP = 0x020d;
    /// Forget a chunkserver that will not come back.
    SERVER_FORGET = 0x020e;
    /// Empty a chunkserver, or stop doing so.
    SERVER_DRAIN = 0x020f;

    /// Open or resume a session.
    SESSION_OPEN = 0x0301;
    /// Keep a session.
    SESSION_RENEW = 0x0302;
    /// End a session.
    SESSION_CLOSE = 0x0303;
    /// Re-state what a session holds.
    RECLAIM = 0x0304;
    /// An operation on the name-space.
    META_REQUEST = 0x0305;
    /// Server to client: give something back.
    RECALL = 0x0306;
    /// Push: changes up to a batch are in the store.
    SAFE = 0x0307;
    /// Administration: list sessions.
    SESSION_LIST = 0x0308;
    /// Administration: end a session by force.
    SESSION_EVICT = 0x0309;
    /// Administration: counters of a metadata server.
    MDS_STATUS = 0x030a;

    /// Read bytes of a copy.
    CHUNK_READ = 0x0401;
    /// Write bytes along a chain.
    CHUNK_WRITE = 0x0402;
    /// Make applied bytes stable along a chain.
    CHUNK_FLUSH = 0x0403;
    /// Drain a chunk and refuse lower leases.
    CHUNK_SEAL = 0x0404;
    /// Make blocks of a copy equal to another's.
    CHUNK_SETTLE = 0x0405;
    /// Drop bytes of a copy.
    CHUNK_TRIM = 0x0406;
    /// Clear open marks.
    CHUNK_CLOSE = 0x0407;
    /// Free chunks.
    CHUNK_DELETE = 0x0408;
    /// List a group's copies.
    CHUNK_LIST = 0x0409;
    /// Read for repair and filling.
    CHUNK_FETCH = 0x040a;
    /// Refuse a session.
    FENCE_SESSION = 0x040b;
    /// Counters of a chunkserver.
    CHUNK_STATUS = 0x040c;
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "kind {:#06x}", self.0),
        }
    }
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unique() {
        let mut all = Kind::ALL.to_vec();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), Kind::ALL.len());
    }
}
