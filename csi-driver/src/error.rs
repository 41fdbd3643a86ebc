//! Why a request is refused, and the gRPC code of each reason.

use hither_client::{FsError, StartError};
use hither_mounter_proto::Holder;
use hither_proto::status::Errno;
use tonic::{Code, Status};

/// Why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The request contradicts itself or asks for what is not offered. A retry cannot help.
    #[error("{0}")]
    Invalid(String),
    /// There is no such volume, or the path is not where it is mounted.
    #[error("{0}")]
    NotFound(String),
    /// The name, path or volume is there already and is another one.
    #[error("{0}")]
    Exists(String),
    /// The size cannot be had.
    #[error("{0}")]
    OutOfRange(String),
    /// There is no room.
    #[error("{0}")]
    NoRoom(String),
    /// Something else has to happen first.
    #[error("{0}")]
    NotNow(String),
    /// Another mount has claimed the volume.
    #[error("{text}")]
    Taken {
        /// What the mount daemon says.
        text: String,
        /// The other mount.
        holder: Holder,
    },
    /// Data that no fsync had answered could not be stored. Said once.
    #[error("{0}")]
    DataLost(String),
    /// Another request for the volume is under way, or something of this one may remain: repeat.
    #[error("{0}")]
    Busy(String),
    /// The cluster or the mount daemon does not answer: repeat later.
    #[error("{0}")]
    Unreachable(String),
    /// The budget of the request is used up; the work goes on or has been taken back.
    #[error("{0}")]
    TooSlow(String),
    /// A token of a listing that this driver did not give.
    #[error("{0}")]
    BadToken(String),
    /// The node's system or the cluster answers what it should not.
    #[error("{0}")]
    Broken(String),
}

impl Refusal {
    /// Code of the answer.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Self::Invalid(_) => Code::InvalidArgument,
            Self::NotFound(_) => Code::NotFound,
            Self::Exists(_) => Code::AlreadyExists,
            Self::OutOfRange(_) => Code::OutOfRange,
            Self::NoRoom(_) => Code::ResourceExhausted,
            Self::NotNow(_) | Self::Taken { .. } => Code::FailedPrecondition,
            Self::Busy(_) | Self::BadToken(_) => Code::Aborted,
            Self::Unreachable(_) => Code::Unavailable,
            Self::TooSlow(_) => Code::DeadlineExceeded,
            Self::Broken(_) => Code::Internal,
            Self::DataLost(_) => Code::DataLoss,
        }
    }

    /// Whether the kubelet takes the answer for the end: after it, it undoes nothing.
    #[must_use]
    pub fn is_final(&self) -> bool {
        !matches!(
            self.code(),
            Code::Aborted | Code::Unavailable | Code::DeadlineExceeded
        )
    }

    /// What the file system said while `doing` something.
    #[must_use]
    pub fn of_fs(doing: &str, error: &FsError) -> Self {
        let text = format!("{doing}: {error}");
        match error.errno {
            Errno::ENOENT | Errno::ESTALE => Self::NotFound(text),
            Errno::ENOSPC | Errno::EDQUOT => Self::NoRoom(text),
            Errno::EINVAL => Self::Invalid(text),
            Errno::EEXIST | Errno::EBUSY | Errno::ENOTEMPTY => Self::Busy(text),
            Errno::ETIMEDOUT | Errno::EAGAIN | Errno::EIO => Self::Unreachable(text),
            _ => Self::Broken(text),
        }
    }

    /// What the node's system said while `doing` something.
    #[must_use]
    pub fn of_io(doing: &str, error: &std::io::Error) -> Self {
        Self::Broken(format!("{doing}: {error}"))
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        Self::new(refusal.code(), refusal.to_string())
    }
}

impl From<StartError> for Refusal {
    fn from(error: StartError) -> Self {
        Self::Unreachable(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_answers_after_which_the_kubelet_undoes_nothing_are_final() {
        let text = String::new;
        for (refusal, is_final) in [
            (Refusal::Invalid(text()), true),
            (Refusal::NotFound(text()), true),
            (Refusal::Exists(text()), true),
            (Refusal::OutOfRange(text()), true),
            (Refusal::NoRoom(text()), true),
            (Refusal::NotNow(text()), true),
            (Refusal::Busy(text()), false),
            (Refusal::Unreachable(text()), false),
            (Refusal::TooSlow(text()), false),
            (Refusal::BadToken(text()), false),
            (Refusal::Broken(text()), true),
        ] {
            assert_eq!(refusal.is_final(), is_final, "{:?}", refusal.code());
        }
    }

    #[test]
    fn silence_of_the_cluster_is_never_absence() {
        let silent = FsError::new(Errno::ETIMEDOUT, "no answer");
        assert_eq!(Refusal::of_fs("look", &silent).code(), Code::Unavailable);
        let gone = FsError::new(Errno::ENOENT, "");
        assert_eq!(Refusal::of_fs("look", &gone).code(), Code::NotFound);
    }
}
