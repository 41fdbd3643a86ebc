//! Why an operation failed, as an errno with its reason.

use hither_net::NetError;
use hither_proto::status::{Errno, Status};

/// Why an operation failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{errno}: {reason}")]
pub struct FsError {
    /// What the caller of the file system sees.
    pub errno: Errno,
    /// Why, for the log.
    pub reason: String,
}

impl FsError {
    /// An error with its reason.
    pub fn new(errno: Errno, reason: impl Into<String>) -> Self {
        Self {
            errno,
            reason: reason.into(),
        }
    }

    pub(crate) fn of_status(status: Status, reason: impl Into<String>) -> Self {
        Self::new(status.errno().unwrap_or(Errno::EIO), reason)
    }
}

impl From<Errno> for FsError {
    fn from(errno: Errno) -> Self {
        Self {
            errno,
            reason: String::new(),
        }
    }
}

impl From<NetError> for FsError {
    fn from(error: NetError) -> Self {
        Self {
            errno: error.errno(),
            reason: error.to_string(),
        }
    }
}
