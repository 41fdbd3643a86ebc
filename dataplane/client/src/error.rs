//! Why an operation failed, as an errno with its reason.

use std::fmt;

use hither_net::NetError;
use hither_proto::status::{Errno, Status};

/// Why an operation failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub struct FsError {
    /// What the caller of the file system sees.
    pub errno: Errno,
    /// Why, for the log; empty when the errno says it all.
    pub reason: String,
}

impl fmt::Display for FsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.reason.is_empty() {
            return write!(f, "{}: {}", self.errno, self.reason);
        }
        let system = std::io::Error::from_raw_os_error(self.errno.0.into());
        let text = system.to_string();
        let words = text.split(" (os error").next().unwrap_or(&text);
        write!(f, "{}: {words}", self.errno)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_errno_without_a_reason_is_told_in_words() {
        let error = FsError::from(Errno::ENOENT).to_string();
        assert_eq!(error, "ENOENT: No such file or directory");
        let error = FsError::new(Errno::EIO, "all copies failed").to_string();
        assert_eq!(error, "EIO: all copies failed");
    }
}
