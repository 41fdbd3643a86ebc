//! What the store's errors are on the wire: here and nowhere else.

use hither_chunkstore::Error;
use hither_net::{NetError, Responder};
use hither_proto::common::Failure;
use hither_proto::ids::Epoch;
use hither_proto::status::{Errno, Status};

/// An answer that is not OK.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Refusal {
    pub(crate) status: Status,
    pub(crate) failure: Box<Failure>,
}

impl Refusal {
    pub(crate) fn new(status: Status, text: impl Into<String>) -> Self {
        Self {
            status,
            failure: Box::new(Failure {
                text: text.into(),
                ..Failure::default()
            }),
        }
    }

    /// Authority in doubt: try again soon.
    pub(crate) fn retry(text: impl Into<String>) -> Self {
        let mut refusal = Self::new(Status::RETRY, text);
        refusal.failure.retry_after_ms = RETRY_AFTER_MS;
        refusal
    }

    /// The sender's epoch is too old.
    pub(crate) fn stale_epoch(known: Epoch) -> Self {
        let mut refusal = Self::new(
            Status::STALE_EPOCH,
            format!("the group is at epoch {known}"),
        );
        refusal.failure.epoch = known.0;
        refusal
    }

    /// `from` could not reach `to`.
    pub(crate) fn broken_link(from: u64, to: u64, error: &NetError) -> Self {
        let mut refusal = Self::new(Status::BROKEN_LINK, format!("chunkserver {to}: {error}"));
        refusal.failure.link_from = from;
        refusal.failure.link_to = to;
        refusal
    }

    /// Answers a request.
    pub(crate) fn answer(self, responder: Responder) {
        responder.refuse(self.status, &self.failure);
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let mut refusal = Self::new(status_of(&error), error.to_string());
        if let Error::StaleLease { lease, chain, .. } = error {
            refusal.failure.lease = lease.0;
            refusal.failure.chain = chain.0;
        }
        refusal
    }
}

fn status_of(error: &Error) -> Status {
    match error {
        Error::NoSuchChunk(_) | Error::Incomplete(_) | Error::Deleted(_) => Status::NO_SUCH_CHUNK,
        Error::StaleLease { .. } => Status::STALE_LEASE,
        Error::WrongGroup { .. } => Status::NOT_MINE,
        Error::BadChecksum | Error::BadBlock { .. } => Status::BAD_CHECKSUM,
        Error::BadRequest(_) => Status::BAD_REQUEST,
        Error::NoSpace(_) => Errno::ENOSPC.into(),
        Error::Busy(_) => Status::BUSY,
        Error::Closed => Status::RETRY,
        _ => Status::DISK_FAILED,
    }
}

/// Time after which a request in doubt may be tried again.
const RETRY_AFTER_MS: u32 = 20;

#[cfg(test)]
mod tests {
    use hither_proto::ids::{ChainNumber, ChunkId, DiskIndex, GroupId, LeaseId};

    use super::*;

    #[test]
    fn every_error_has_its_status() {
        let chunk = ChunkId(1);
        let cases = [
            (Error::NoSuchChunk(chunk), Status::NO_SUCH_CHUNK),
            (Error::Incomplete(chunk), Status::NO_SUCH_CHUNK),
            (Error::Deleted(chunk), Status::NO_SUCH_CHUNK),
            (
                Error::WrongGroup {
                    chunk,
                    group: GroupId(1),
                },
                Status::NOT_MINE,
            ),
            (Error::BadChecksum, Status::BAD_CHECKSUM),
            (Error::BadBlock { chunk, block: 1 }, Status::BAD_CHECKSUM),
            (Error::BadRequest("x"), Status::BAD_REQUEST),
            (Error::NoSpace(DiskIndex(0)), Errno::ENOSPC.into()),
            (Error::Busy(DiskIndex(0)), Status::BUSY),
            (Error::Closed, Status::RETRY),
            (
                Error::DiskFailed {
                    disk: DiskIndex(0),
                    cause: String::new(),
                },
                Status::DISK_FAILED,
            ),
        ];
        for (error, status) in cases {
            assert_eq!(Refusal::from(error).status, status);
        }
        let stale = Refusal::from(Error::StaleLease {
            chunk,
            lease: LeaseId(9),
            chain: ChainNumber(2),
        });
        assert_eq!(
            (stale.status, stale.failure.lease, stale.failure.chain),
            (Status::STALE_LEASE, 9, 2)
        );
    }
}
