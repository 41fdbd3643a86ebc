//! Why a chunkserver does not start.

use hither_proto::ids::ChunkserverId;

/// Why a chunkserver does not start, or stopped by itself.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// No disk is configured. A retry does not help.
    #[error("no disks are configured")]
    NoDisks,
    /// A directory cannot be used. A retry rarely helps.
    #[error("open disk {path}: {cause}")]
    Disk {
        /// Where it is.
        path: String,
        /// What the system said.
        cause: String,
    },
    /// The disks do not fit together or belong to somebody else. A retry does not help.
    #[error(transparent)]
    Store(#[from] hither_chunkstore::Error),
    /// The address cannot be listened on. A retry helps once it is free.
    #[error("listen on {address}: {cause}")]
    Listen {
        /// The address.
        address: String,
        /// What the system said.
        cause: String,
    },
    /// No manager answered in time. A retry helps.
    #[error("no manager answered: {0}")]
    NoManager(String),
    /// Another live process has the same disks' id. A retry does not help while it runs.
    #[error("chunkserver {0} is already served by another process")]
    Duplicate(ChunkserverId),
}
