//! Why a call gave no OK reply.

use hither_proto::common::Failure;
use hither_proto::frame::FrameError;
use hither_proto::kind::Kind;
use hither_proto::status::{Errno, Status};

/// Why a call gave no OK reply.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NetError {
    /// No connection could be made. Another server, or the same one later, may answer.
    #[error("connect to {address}: {reason}")]
    Connect {
        /// Where to.
        address: String,
        /// What the system said.
        reason: String,
    },
    /// The connection ended while the call was open: whether it was carried out is unknown.
    #[error("connection lost: {0}")]
    Lost(String),
    /// No reply in time: whether it was carried out is unknown.
    #[error("{kind} not answered within {millis} ms")]
    Timeout {
        /// What was asked.
        kind: Kind,
        /// The time it was given.
        millis: u64,
    },
    /// The peer answered with a status that is not OK.
    #[error("{status}: {}", failure.text)]
    Refused {
        /// The status.
        status: Status,
        /// What the peer says about it.
        failure: Box<Failure>,
    },
    /// The peer's bytes are no valid frames or messages; a bug or another protocol.
    #[error("peer speaks nonsense: {0}")]
    Protocol(String),
    /// Too many bytes wait to be sent to this peer. Later may work.
    #[error("send queue to the peer is full")]
    QueueFull,
}

impl NetError {
    /// The status the peer answered with, if it answered.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// The peer's explanation, if it answered.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Refused { failure, .. } => Some(failure),
            _ => None,
        }
    }

    /// Whether the peer could not be reached or gave no answer. What never left this process, or came
    /// back unreadable, says nothing of that.
    #[must_use]
    pub fn is_silence(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. } | Self::Lost(_) | Self::Timeout { .. }
        )
    }

    /// The errno a caller sees when this is final.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            Self::Refused { status, .. } => status.errno().unwrap_or(Errno::EIO),
            Self::Timeout { .. } => Errno::ETIMEDOUT,
            Self::QueueFull => Errno::EAGAIN,
            Self::Connect { .. } | Self::Lost(_) => Errno::EIO,
            Self::Protocol(_) => Errno::EPROTO,
        }
    }
}

impl From<FrameError> for NetError {
    fn from(error: FrameError) -> Self {
        Self::Protocol(error.to_string())
    }
}
