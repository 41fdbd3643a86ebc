//! Requests about the copies of one group.

use hither_net::{Incoming, NetError, Responder};
use hither_proto::chunk::{Close, Delete, Fetch, Flush, List, Seal, Settle, Target, Trim, Write};
use hither_proto::ids::{Epoch, GroupId};
use hither_proto::kind::Kind;

use crate::admit::Permit;
use crate::authority::Need;

/// A decoded request about a group. Reads are not among them: they change nothing and are under
/// way for nobody.
#[derive(Debug)]
pub(crate) enum Operation {
    Write(Box<Write>),
    Flush(Flush),
    Seal(Seal),
    Settle(Settle),
    Trim(Trim),
    Close(Close),
    Delete(Delete),
    List(List),
    Fetch(Fetch),
}

/// What comes with a request, and what its answer goes to.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) payload: bytes::Bytes,
    pub(crate) responder: Responder,
    /// Held until the answer.
    pub(crate) permit: Permit,
    /// The chunkserver that sent it; `None` for everybody else.
    pub(crate) peer: Option<u64>,
}

/// A request that waits.
pub(crate) struct Parked {
    pub(crate) operation: Operation,
    pub(crate) call: Call,
}

impl Operation {
    /// Decodes a request; `None` for a kind that is not about a group.
    pub(crate) fn decode(incoming: &Incoming) -> Option<Result<Self, NetError>> {
        Some(match incoming.header.kind {
            Kind::CHUNK_WRITE => incoming.decode().map(Box::new).map(Self::Write),
            Kind::CHUNK_FLUSH => incoming.decode().map(Self::Flush),
            Kind::CHUNK_SEAL => incoming.decode().map(Self::Seal),
            Kind::CHUNK_SETTLE => incoming.decode().map(Self::Settle),
            Kind::CHUNK_TRIM => incoming.decode().map(Self::Trim),
            Kind::CHUNK_CLOSE => incoming.decode().map(Self::Close),
            Kind::CHUNK_DELETE => incoming.decode().map(Self::Delete),
            Kind::CHUNK_LIST => incoming.decode().map(Self::List),
            Kind::CHUNK_FETCH => incoming.decode().map(Self::Fetch),
            _ => return None,
        })
    }

    /// The group and the epoch its sender believes in.
    pub(crate) fn group(&self) -> (GroupId, Epoch) {
        let (group, epoch) = match self {
            Self::Write(write) => of(write.target.as_ref()),
            Self::Seal(seal) => of(seal.target.as_ref()),
            Self::Settle(settle) => of(settle.target.as_ref()),
            Self::Trim(trim) => of(trim.target.as_ref()),
            Self::Flush(flush) => (flush.group, flush.epoch),
            Self::Close(close) => (close.group, close.epoch),
            Self::Delete(delete) => (delete.group, delete.epoch),
            Self::List(list) => (list.group, list.epoch),
            Self::Fetch(fetch) => (fetch.group, fetch.epoch),
        };
        (GroupId(group), Epoch(epoch))
    }

    /// What a member must be to serve it.
    pub(crate) fn need(&self) -> Need {
        match self {
            Self::List(_) | Self::Fetch(_) => Need::InSync,
            _ => Need::Chain,
        }
    }

    /// Bytes of an answer, as far as the request says.
    pub(crate) fn reply_bytes(&self) -> usize {
        match self {
            Self::Fetch(fetch) => fetch.length as usize,
            _ => 0,
        }
    }
}

fn of(target: Option<&Target>) -> (u32, u64) {
    target.map_or((0, 0), |target| (target.group, target.epoch))
}
