//! Identifiers: a newtype for every number that could be mixed up with another.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $repr:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $repr);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }
    };
}

id!(
    /// Number of an inode: unique in a cluster, never used again.
    InodeId,
    u64
);
id!(
    /// Number of a chunk: unique in a cluster, never used again.
    ChunkId,
    u64
);
id!(
    /// Number of a data lease; a later lease always has a higher one. Version of a copy.
    LeaseId,
    u64
);
id!(
    /// Stable number of a chunkserver, kept on its disks.
    ChunkserverId,
    u64
);
id!(
    /// Number of a disk inside its chunkserver, kept on the disk.
    DiskIndex,
    u16
);
id!(
    /// Number of a placement group.
    GroupId,
    u32
);
id!(
    /// Number of a storage definition: what groups are made for.
    DefinitionId,
    u32
);
id!(
    /// Number of a storage class.
    ClassId,
    u32
);
id!(
    /// Rises whenever authority over a thing (group, subtree, rank) changes.
    Epoch,
    u64
);
id!(
    /// Version of the cluster map.
    MapVersion,
    u64
);
id!(
    /// Number of a client's session with the metadata servers.
    SessionId,
    u64
);
id!(
    /// Number of a changing request inside its session, from 1 on.
    RequestNumber,
    u64
);
id!(
    /// Number of a batch of one metadata rank.
    BatchNumber,
    u64
);
id!(
    /// Number of a metadata server in the cluster map.
    RankId,
    u16
);
id!(
    /// Which 64 MiB piece of a file: offset divided by [`CHUNK_SIZE`].
    ChunkIndex,
    u32
);
id!(
    /// Raised by a client whenever it builds a write chain anew.
    ChainNumber,
    u32
);
id!(
    /// Random number of one run of a server process.
    BootId,
    u64
);
id!(
    /// Hash of a name inside its directory; part of the stored format.
    NameHash,
    u64
);

/// The root directory.
pub const ROOT: InodeId = InodeId(1);
/// Directory that holds the root's own entry and nothing else.
pub const ABOVE_ROOT: InodeId = InodeId(0);
/// Directory of inodes that are removed and still open, or whose first name was removed.
pub const STRAYS: InodeId = InodeId(2);
/// First inode number given to anything but the root.
pub const FIRST_INODE: InodeId = InodeId(16);
/// Bytes of a file in one chunk.
pub const CHUNK_SIZE: u64 = 64 << 20;
/// Bytes of the unit of a read request.
pub const BLOCK_SIZE: u32 = 64 << 10;
/// Bytes covered by one checksum.
pub const CHECKSUM_BLOCK: u32 = 4096;
/// Longest name, bytes.
pub const NAME_MAX: usize = 255;
/// Longest symbolic link, bytes.
pub const SYMLINK_MAX: usize = 4095;
/// Longest value of an extended attribute, bytes.
pub const XATTR_VALUE_MAX: usize = 64 << 10;

impl ChunkIndex {
    /// The chunk that holds byte `offset`; `None` beyond the largest file (2^32 chunks).
    #[must_use]
    pub fn of_offset(offset: u64) -> Option<Self> {
        u32::try_from(offset / CHUNK_SIZE).ok().map(Self)
    }

    /// Offset of the chunk's first byte in its file.
    #[must_use]
    pub fn start(self) -> u64 {
        u64::from(self.0) * CHUNK_SIZE
    }
}

impl NameHash {
    /// The hash under which `name` is stored in its directory: XXH3-64 with seed 0.
    #[must_use]
    pub fn of(name: &[u8]) -> Self {
        Self(xxhash_rust::xxh3::xxh3_64(name))
    }

    /// Directory cookie: the top 63 bits, at least 3, so that 0, 1 and 2 stay free for the
    /// start, `.` and `..`; equal cookies share a page.
    #[must_use]
    pub fn cookie(self) -> u64 {
        (self.0 >> 1).max(3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_hash_is_part_of_the_format() {
        // Changing this value would make every stored directory unreadable.
        assert_eq!(NameHash::of(b"hello"), NameHash(0x9555_e855_5c62_dcfd));
    }

    #[test]
    fn chunk_index_of_offset() {
        assert_eq!(ChunkIndex::of_offset(0), Some(ChunkIndex(0)));
        assert_eq!(ChunkIndex::of_offset(CHUNK_SIZE - 1), Some(ChunkIndex(0)));
        assert_eq!(ChunkIndex::of_offset(CHUNK_SIZE), Some(ChunkIndex(1)));
        assert_eq!(ChunkIndex::of_offset(CHUNK_SIZE << 32), None);
        assert_eq!(ChunkIndex(3).start(), 3 * CHUNK_SIZE);
    }
}
