//! Errors of the metadata store.

/// Why the store refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A precondition of the batch does not hold, and nothing was changed. The same batch will not
    /// succeed; read and build another.
    #[error("precondition {index} of the batch does not hold")]
    PreconditionFailed {
        /// Which one, in the order in which they were added; the first that failed.
        index: usize,
    },
    /// It is not known whether the batch was committed. Never send it again blindly: read back
    /// something that it would have changed.
    #[error("the outcome of the batch is not known: {cause}")]
    Unknown {
        /// What went wrong on the way.
        cause: String,
    },
    /// A key, a value or a batch is larger than the store takes. A retry does not help.
    #[error("a {what} of {bytes} bytes is larger than {bytes_max}")]
    TooLarge {
        /// Which part.
        what: &'static str,
        /// Its size.
        bytes: usize,
        /// The largest size.
        bytes_max: usize,
    },
    /// The batch or the key cannot mean anything. A retry does not help.
    #[error("{reason}")]
    Invalid {
        /// What is wrong.
        reason: &'static str,
    },
    /// The store cannot be reached or has no room just now; nothing was changed. A retry may help.
    #[error("the metadata store is unavailable: {cause}")]
    Unavailable {
        /// What went wrong.
        cause: String,
    },
    /// The store's own storage failed earlier, so it takes no more batches; nothing was changed.
    /// Only opening it again can help.
    #[error("the metadata store has failed: {cause}")]
    Failed {
        /// What went wrong.
        cause: String,
    },
    /// Stored data is damaged. A retry does not help: restore a dump.
    #[error("the metadata store is damaged: {cause}")]
    Corrupt {
        /// What is wrong and where.
        cause: String,
    },
    /// The store was closed. A retry does not help.
    #[error("the metadata store is closed")]
    Closed,
    /// Another process has the store open. Helps to retry once that one has ended.
    #[error("the metadata store is in use by another process")]
    InUse,
    /// A dump can only be loaded into an empty store. A retry does not help.
    #[error("the metadata store is not empty")]
    NotEmpty,
    /// The file is no intact dump; nothing was loaded. A retry does not help.
    #[error("the dump is damaged at byte {offset}: {reason}")]
    DumpDamaged {
        /// Where.
        offset: u64,
        /// What is wrong there.
        reason: &'static str,
    },
    /// The dump file could not be read or written. A retry may help.
    #[error("{action} the dump: {cause}")]
    DumpIo {
        /// What was being done, as a verb.
        action: &'static str,
        /// What went wrong.
        cause: String,
    },
}
