//! What goes into and comes out of the core.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

use hither_proto::common::Failure;
use hither_proto::ids::{BatchNumber, ChunkId, Epoch, GroupId, InodeId, LeaseId, SessionId};
use hither_proto::meta::{
    Recall, RecallReply, Reclaim, Reply, Request, SessionInfo, SessionOpen, SessionOpenReply,
};
use hither_proto::status::{Errno, Status};

use super::batch::Commit;
use super::cache::{LoadKey, Loaded};

/// The shell's handle of somebody who waits for an answer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Token(pub u64);

/// A cluster-wide counter that is reserved in blocks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Counter {
    /// Chunk ids.
    Chunk,
    /// Inode numbers.
    Inode,
    /// Data lease ids.
    Lease,
    /// Session ids.
    Session,
}

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// A client wants a session.
    SessionOpen(Token, SessionOpen),
    /// A session is kept.
    SessionRenew(Token, SessionId, u64),
    /// A session ends by itself.
    SessionClose(Token, SessionId),
    /// Part of what a session holds after a failover.
    Reclaim(Token, SessionId, Reclaim),
    /// An operation.
    Request(Token, Box<Request>),
    /// The requester no longer waits.
    Cancel(Token),
    /// These requesters are gone with their connection.
    Gone(BTreeSet<Token>),
    /// A load has come back.
    Loaded(LoadKey, Box<Loaded>),
    /// A commit has come back.
    Committed(BatchNumber, CommitOutcome),
    /// A block of a counter is ours.
    Reserved(Counter, Range<u64>),
    /// The answer to a recall; `None`: the holder cannot be reached now.
    RecallAnswered(u64, Option<RecallReply>),
    /// A trim is stable on all in-sync members; the epoch its group has.
    Trimmed(InodeId, GroupId, Epoch),
    /// An unclean lease is sealed: chunks that exist, with their groups' epochs.
    Sealed(InodeId, Vec<(SealChunk, bool, Epoch)>),
    /// An evicted session is fenced everywhere; what it had left open.
    Fenced(SessionId, Vec<(InodeId, SealChunk)>),
    /// Placement groups that may take new chunks, by storage class, and the space they have.
    Groups(Box<GroupChoice>),
    /// The table of subtrees has changed.
    Subtrees(
        Vec<(
            InodeId,
            hither_proto::fragment::Fragment,
            hither_proto::ids::RankId,
            Epoch,
        )>,
    ),
    /// Administration: end a session.
    Evict(Token, SessionId),
    /// Administration: list sessions.
    List(Token),
    /// Another process has the rank.
    Deposed,
    /// Time has passed.
    Tick,
}

/// What the core needs to know of placement.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GroupChoice {
    /// For each class id: groups new chunks may go to.
    pub by_class: std::collections::BTreeMap<u32, Vec<GroupId>>,
    /// Classes whose groups take nothing because disks are full.
    pub full: BTreeSet<u32>,
    /// Epoch of every group.
    pub epochs: std::collections::BTreeMap<GroupId, Epoch>,
    /// Class of the root directory of a new cluster.
    pub default_class: u32,
    /// Bytes all chunkservers together can hold, divided by the copies of the default class.
    pub total_bytes: u64,
    /// The same of what is free.
    pub free_bytes: u64,
}

/// A chunk that has to be sealed or trimmed, with the id the new state carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SealChunk {
    /// The chunk.
    pub chunk: ChunkId,
    /// Its group.
    pub group: GroupId,
    /// Which piece of the file it is; `None`: a server listed it, and servers do not know.
    pub index: Option<u32>,
    /// Lease id under which it is sealed: higher than any given before.
    pub lease: LeaseId,
    /// Bytes of the chunk that count; what a copy has beyond is dropped.
    pub length_max: u32,
}

/// Outcome of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommitOutcome {
    /// In the store.
    Done,
    /// A precondition failed: authority is lost.
    Fenced,
    /// The store does not take so much at once: nothing more can be made safe.
    TooLarge,
}

/// Why a request got no OK reply.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    /// The status.
    pub status: Status,
    /// What there is to say about it.
    pub failure: Box<Failure>,
}

/// An answer to somebody who waits.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// To a request.
    Reply(Box<Reply>),
    /// To an open session.
    Opened(SessionOpenReply),
    /// To anything without content.
    Done,
    /// To a list.
    Sessions(Vec<SessionInfo>),
    /// A refusal.
    Refused(Refusal),
}

/// What the shell has to do.
#[derive(Debug, PartialEq)]
pub enum Effect {
    /// Answer.
    Answer(Token, Answer),
    /// Read from the store, then [`Event::Loaded`].
    Load(LoadKey),
    /// Write to the store, then [`Event::Committed`].
    Commit(Box<Commit>),
    /// Reserve a block of a counter, then [`Event::Reserved`].
    Reserve(Counter),
    /// Ask a session to give something back, then [`Event::RecallAnswered`].
    Recall(u64, SessionId, Recall),
    /// Tell a session that its changes up to a batch are in the store.
    Safe(SessionId, BatchNumber),
    /// Make all in-sync members drop what is beyond the length, then [`Event::Trimmed`].
    Trim(InodeId, SealChunk),
    /// Seal these chunks, then [`Event::Sealed`].
    Seal(InodeId, Vec<SealChunk>),
    /// Fence a session at all chunkservers, then [`Event::Fenced`].
    Fence(SessionId),
    /// Close the connection of a session that has been ended without its doing: it hears of it by
    /// that.
    Disconnect(SessionId),
    /// Chunks were put on the list of those to be freed.
    FreeChunks,
    /// Call [`Event::Tick`] at this time or soon after.
    WakeAt(Duration),
    /// Authority is lost: stop serving.
    Stop,
}

impl Refusal {
    /// An errno.
    #[must_use]
    pub fn errno(errno: Errno) -> Self {
        Self {
            status: errno.into(),
            failure: Box::default(),
        }
    }

    /// A status with a text.
    #[must_use]
    pub fn status(status: Status, text: &str) -> Self {
        Self {
            status,
            failure: Box::new(Failure {
                text: text.into(),
                ..Failure::default()
            }),
        }
    }
}
