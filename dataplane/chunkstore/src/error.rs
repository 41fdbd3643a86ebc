//! Why the store refused or failed.

use hither_proto::ids::{ChainNumber, ChunkId, ChunkserverId, DiskIndex, GroupId, LeaseId};

use crate::identity::ClusterId;

/// Why an operation was refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no copy of this chunk here, and the write may not make one. Never means zeros.
    #[error("no copy of chunk {0}")]
    NoSuchChunk(ChunkId),
    /// The copy lacks bytes that are still being fetched. Another member has them.
    #[error("the copy of chunk {0} is being filled")]
    Incomplete(ChunkId),
    /// The chunk was freed; its id is never used again. A retry does not help.
    #[error("chunk {0} was deleted")]
    Deleted(ChunkId),
    /// A higher lease or chain number was seen. A retry under a new lease or chain helps.
    #[error("chunk {chunk} has seen lease {lease} chain {chain}")]
    StaleLease {
        /// The chunk.
        chunk: ChunkId,
        /// Highest lease seen.
        lease: LeaseId,
        /// Highest chain number seen under that lease.
        chain: ChainNumber,
    },
    /// The copy belongs to another group. A retry does not help.
    #[error("chunk {chunk} belongs to group {group}")]
    WrongGroup {
        /// The chunk.
        chunk: ChunkId,
        /// Its group.
        group: GroupId,
    },
    /// The bytes sent do not match the checksums sent. Sending again may help.
    #[error("the bytes do not match their checksums")]
    BadChecksum,
    /// The request contradicts itself. A retry does not help.
    #[error("{0}")]
    BadRequest(&'static str),
    /// A block on the disk does not match its checksum. Repair it from another member, then retry.
    #[error("block {block} of chunk {chunk} is damaged")]
    BadBlock {
        /// The chunk.
        chunk: ChunkId,
        /// Number of the 4 KiB block.
        block: u32,
    },
    /// The disk is full, or below its floor and the write would make a copy or make one larger.
    /// Nothing was lost; a retry helps once something was freed.
    #[error("no space left on disk {0}")]
    NoSpace(DiskIndex),
    /// The disk gave an I/O error and serves nothing more until the server is started again.
    #[error("disk {disk} has failed: {cause}")]
    DiskFailed {
        /// The disk.
        disk: DiskIndex,
        /// The first error.
        cause: String,
    },
    /// Too much waits for this disk already. A retry later helps.
    #[error("too many requests wait for disk {0}")]
    Busy(DiskIndex),
    /// The disk is being closed.
    #[error("the disk is closed")]
    Closed,
    /// The disk belongs to another cluster. A retry does not help.
    #[error("disk {path} belongs to cluster {found}, not {expected}")]
    ForeignCluster {
        /// Where the disk is.
        path: String,
        /// What its identity says.
        found: ClusterId,
        /// What was asked for.
        expected: ClusterId,
    },
    /// The disk belongs to another chunkserver than the others here. A retry does not help.
    #[error("disk {path} belongs to chunkserver {found}, not {expected}")]
    ForeignServer {
        /// Where the disk is.
        path: String,
        /// What its identity says.
        found: ChunkserverId,
        /// What the other disks say.
        expected: ChunkserverId,
    },
    /// The disk was taken out of service for good. A retry does not help.
    #[error("disk {path} is decommissioned")]
    Decommissioned {
        /// Where the disk is.
        path: String,
    },
    /// Two disks carry the same number: one is a copy of the other. A retry does not help.
    #[error("disks {path} and {other} both are disk {index}")]
    SameDisk {
        /// Where one is.
        path: String,
        /// Where the other is.
        other: String,
        /// The number both carry.
        index: DiskIndex,
    },
    /// Another process has the disk. Helps to retry once that one has ended.
    #[error("disk {path} is in use by another process")]
    InUse {
        /// Where the disk is.
        path: String,
    },
    /// The directory is not empty and not a disk. A retry does not help.
    #[error("{path} holds files but no identity of a hither disk")]
    NotADisk {
        /// Where it is.
        path: String,
    },
    /// A file of the disk is damaged or of a newer format. A retry does not help.
    #[error("{path}: {cause}")]
    Unusable {
        /// Where the disk is.
        path: String,
        /// What is wrong.
        cause: String,
    },
    /// The cluster id is not known yet and a disk has to be formatted with it.
    #[error("disk {path} is new and the cluster's id is not known yet")]
    NoClusterId {
        /// Where the disk is.
        path: String,
    },
}

impl Error {
    /// Whether only room, memory or descriptors are lacking: others may go on, and so may this
    /// later.
    pub(crate) fn is_lack(&self) -> bool {
        matches!(self, Self::NoSpace(_) | Self::Busy(_))
    }
}
