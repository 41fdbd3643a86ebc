//! Outcomes of requests.
//!
//! 0 is success, 1..=4095 is an errno of Linux, the statuses below say something about the
//! protocol. Each maps to an errno here and nowhere else.

use std::fmt;

/// Outcome of a request as it stands in a reply's header.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Status(pub u16);

/// A Linux errno, 1..=4095.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Errno(pub u16);

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $errno:ident;)*) => {
        impl Status {
            $($(#[$doc])* pub const $name: Self = Self($value);)*

            fn protocol_name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($name)),)*
                    _ => None,
                }
            }

            /// The errno a caller of the file system sees when this status is final.
            #[must_use]
            pub fn errno(self) -> Option<Errno> {
                match self.0 {
                    0 => None,
                    errno @ 1..=4095 => Some(Errno(errno)),
                    $($value => Some(Errno::$errno),)*
                    _ => Some(Errno::EIO),
                }
            }

            /// All protocol statuses.
            pub const PROTOCOL: &'static [Self] = &[$(Self($value)),*];
        }
    };
}

statuses! {
    /// The answerer has no authority over this; refresh the map, ask another. Not "does not exist".
    NOT_MINE = 0x1001, EIO;
    /// Authority in doubt, frozen or not ready: try again after the time given.
    RETRY = 0x1002, EAGAIN;
    /// The caller's group epoch is older than the answerer's.
    STALE_EPOCH = 0x1003, EIO;
    /// The caller's lease is older than one already seen.
    STALE_LEASE = 0x1004, ESTALE;
    /// The member has no copy of this chunk. Never means zeros.
    NO_SUCH_CHUNK = 0x1005, EIO;
    /// Overloaded: try another copy, or this one later.
    BUSY = 0x1006, EAGAIN;
    /// A member of the chain could not reach the next one.
    BROKEN_LINK = 0x1007, EIO;
    /// Bytes do not match their checksums.
    BAD_CHECKSUM = 0x1008, EIO;
    /// The session is unknown or was evicted.
    NO_SESSION = 0x1009, EIO;
    /// The answerer does not know this kind of request.
    UNSUPPORTED = 0x100a, EOPNOTSUPP;
    /// The message could not be decoded or contradicts itself.
    BAD_REQUEST = 0x100b, EINVAL;
    /// The request was taken back.
    CANCELLED = 0x100c, EINTR;
    /// The peer belongs to another cluster.
    WRONG_CLUSTER = 0x100d, EIO;
    /// Too few in-sync members to acknowledge a write.
    TOO_FEW_COPIES = 0x100e, EIO;
    /// The disk of the copy failed or is full.
    DISK_FAILED = 0x100f, EIO;
    /// Not the leader; the failure's hint names it.
    NOT_LEADER = 0x1010, EAGAIN;
    /// Copies may differ by a write that failed: the lease is to be sealed, not closed.
    NEEDS_SEAL = 0x1011, EIO;
}

impl Status {
    /// Success.
    pub const OK: Self = Self(0);

    /// Whether this is success.
    #[must_use]
    pub fn is_ok(self) -> bool {
        self.0 == 0
    }
}

impl From<Errno> for Status {
    fn from(errno: Errno) -> Self {
        Self(errno.0)
    }
}

macro_rules! errnos {
    ($($name:ident = $value:literal,)*) => {
        impl Errno {
            $(#[doc = concat!("`", stringify!($name), "` of Linux.")] pub const $name: Self = Self($value);)*

            fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

errnos! {
    EPERM = 1, ENOENT = 2, EINTR = 4, EIO = 5, ENXIO = 6, E2BIG = 7, EBADF = 9, EAGAIN = 11, ENOMEM = 12,
    EACCES = 13, EBUSY = 16, EEXIST = 17, EXDEV = 18, ENOTDIR = 20, EISDIR = 21, EINVAL = 22,
    EFBIG = 27, ENOSPC = 28, EROFS = 30, EMLINK = 31, ERANGE = 34, EDEADLK = 35, ENAMETOOLONG = 36,
    ENOLCK = 37, ENOSYS = 38, ENOTEMPTY = 39, ELOOP = 40, ENODATA = 61, EPROTO = 71, EOPNOTSUPP = 95,
    ENOTCONN = 107, ETIMEDOUT = 110, ESTALE = 116, EDQUOT = 122,
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "errno {}", self.0),
        }
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_ok() {
            return f.write_str("OK");
        }
        match (self.protocol_name(), self.0) {
            (Some(name), _) => f.write_str(name),
            (None, errno @ 1..=4095) => Errno(errno).fmt(f),
            (None, other) => write!(f, "status {other:#06x}"),
        }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_an_errno_and_a_name() {
        assert_eq!(Status::OK.errno(), None);
        assert_eq!(Status::from(Errno::ENOENT).errno(), Some(Errno::ENOENT));
        for status in Status::PROTOCOL {
            assert!(status.errno().is_some());
            assert!(status.protocol_name().is_some());
            assert!(status.0 > 4095);
        }
        assert_eq!(
            Status(0xffff).errno(),
            Some(Errno::EIO),
            "from a newer peer"
        );
    }

    #[test]
    fn names() {
        assert_eq!(Status::NOT_MINE.to_string(), "NOT_MINE");
        assert_eq!(Status::from(Errno::ENOSPC).to_string(), "ENOSPC");
        assert_eq!(Status(4000).to_string(), "errno 4000");
    }
}
