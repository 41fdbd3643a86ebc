//! Errors of the log.

use std::io;
use std::sync::Arc;

use crate::format::{LogId, Lsn};

/// Why the log refused or failed.
///
/// Clonable, because one failed flush answers everybody who waited for it.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file operation failed while the log was opened or read. Opening again may help.
    #[error("{action} {file}")]
    Io {
        /// What was being done, as a verb phrase.
        action: &'static str,
        /// Name of the file inside the log's directory.
        file: String,
        /// What the operating system said.
        #[source]
        source: Arc<io::Error>,
    },
    /// A write or a sync failed earlier, so nobody knows what is on the disk. A retry never helps:
    /// drop the log and open it again, which finds out.
    #[error("the log is poisoned: {action} {file}")]
    Poisoned {
        /// What was being done, as a verb phrase.
        action: &'static str,
        /// Name of the file inside the log's directory.
        file: String,
        /// What the operating system said.
        #[source]
        source: Arc<io::Error>,
    },
    /// Bytes that were acknowledged are damaged. A retry does not help; the data must come from
    /// another copy.
    #[error("{file} is damaged at byte {offset}: {reason}")]
    Corrupt {
        /// Name of the file inside the log's directory.
        file: String,
        /// Where the first damaged or missing byte is.
        offset: u64,
        /// What is wrong there.
        reason: &'static str,
    },
    /// The directory holds the log of somebody else. A retry does not help.
    #[error("the directory holds log {found}, not {expected}")]
    ForeignLog {
        /// Whose log it is.
        found: LogId,
        /// Whose log was asked for.
        expected: LogId,
    },
    /// The log was written by a newer release. A retry does not help.
    #[error("log format version {found} is newer than this build reads")]
    UnsupportedVersion {
        /// The version found in the control file.
        found: u32,
    },
    /// Another process, or another `Log` of this one, has the directory open. Helps to retry once
    /// that one has ended.
    #[error("the log is in use by another process")]
    Locked,
    /// No room for another record until [`Log::release`](crate::Log::release) makes some. Helps to
    /// retry after that.
    #[error("the log is full: all {bytes_bound} bytes are in use")]
    Full {
        /// The largest size of the log in bytes.
        bytes_bound: u64,
    },
    /// `try_append` would have had to wait. Helps to retry after the next flush.
    #[error("the log's buffer is full")]
    Busy,
    /// The record is larger than a segment. A retry does not help.
    #[error("a record of {bytes} bytes does not fit a segment (payload at most {bytes_max})")]
    TooLarge {
        /// Payload size of the record.
        bytes: usize,
        /// The largest payload.
        bytes_max: usize,
    },
    /// A flush was asked for a record that was never appended. A retry does not help.
    #[error("record {lsn} was not appended")]
    NotAppended {
        /// The number asked for.
        lsn: Lsn,
    },
    /// The log was closed while the caller waited. A retry does not help.
    #[error("the log is closed")]
    Closed,
    /// The options contradict themselves or the log on disk. A retry does not help.
    #[error("log options: {reason}")]
    Options {
        /// What is wrong with them.
        reason: &'static str,
    },
}

impl Error {
    /// Wraps a failure of a file operation.
    pub(crate) fn io(action: &'static str, file: &str, source: io::Error) -> Self {
        Self::Io {
            action,
            file: file.to_owned(),
            source: Arc::new(source),
        }
    }

    /// The same failure as the state in which it leaves the log.
    pub(crate) fn into_poison(self) -> Self {
        match self {
            Self::Io {
                action,
                file,
                source,
            } => Self::Poisoned {
                action,
                file,
                source,
            },
            other => other,
        }
    }
}
