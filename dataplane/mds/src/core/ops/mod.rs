//! The operations of the name-space, each a function over the cache.
//!
//! An operation first finds what it needs (and may stop for a load), then checks, then asks for
//! recalls, and only then changes anything: from its first change on it cannot stop.

mod attributes;
mod create;
mod data;
mod find;
mod list;
mod lock;
mod remove;
mod rename;
mod seal;
mod xattr;

use hither_proto::common::Failure;
use hither_proto::ids::{CHUNK_SIZE, ChunkId, GroupId, InodeId, LeaseId, RequestNumber};
use hither_proto::meta::{Hint, Reply, Request, request::Op};
use hither_proto::status::{Errno, Status};
use hither_proto::stored::ChunkRef;

use super::event::{Refusal, SealChunk};
use super::run::{Attempt, Core, Stop};

pub(crate) type Outcome = Result<Reply, Stop>;

impl Core {
    pub(crate) fn operation(&mut self, attempt: &mut Attempt, request: &Request) -> Outcome {
        let Some(op) = &request.op else {
            return Err(refuse(
                Status::BAD_REQUEST,
                "the request holds no operation",
            ));
        };
        match op {
            Op::Lookup(op) => self.lookup(attempt, op),
            Op::Getattr(op) => self.getattr(attempt, op),
            Op::Setattr(op) => self.setattr(attempt, op, RequestNumber(request.number)),
            Op::Create(op) => self.create(attempt, op),
            Op::Unlink(op) => self.unlink(attempt, op),
            Op::Rename(op) => self.rename(attempt, op),
            Op::Link(op) => self.link(attempt, op),
            Op::Readdir(op) => self.readdir(attempt, op),
            Op::SetXattr(op) => self.set_xattr(attempt, op),
            Op::RemoveXattr(op) => self.remove_xattr(attempt, op),
            Op::Acquire(op) => self.acquire(attempt, op),
            Op::AllocChunks(op) => self.alloc_chunks(attempt, op),
            Op::WriteReport(op) => self.write_report(attempt, op),
            Op::ChunkRefs(op) => self.chunk_refs(attempt, op),
            Op::PunchHole(op) => self.punch_hole(attempt, op),
            Op::CloseInode(op) => self.close_inode(attempt, InodeId(op.ino)),
            Op::OpenInode(op) => self.open_inode(attempt, op),
            Op::GiveBack(op) => Ok(self.give_back(attempt.session, op)),
            Op::SetLock(op) => self.set_lock(attempt, op),
            Op::TestLock(op) => self.test_lock(attempt, op),
            Op::Statfs(op) => self.statfs(attempt, op),
            Op::Barrier(_) => self.barrier(attempt),
        }
    }

    /// Waits for everything the session has changed.
    fn barrier(&mut self, attempt: &mut Attempt) -> Outcome {
        if let Some(session) = self.sessions.get(&attempt.session) {
            attempt.depends = attempt.depends.max(session.last_batch);
        }
        Ok(Reply::default())
    }
}

/// A chunk reference as something to be sealed; the lease is filled in when it is.
pub(crate) fn seal_of(chunk: &ChunkRef) -> SealChunk {
    SealChunk {
        chunk: ChunkId(chunk.chunk),
        group: GroupId(chunk.group),
        index: Some(chunk.index),
        lease: LeaseId(0),
        length_max: u32::try_from(CHUNK_SIZE).unwrap_or(u32::MAX),
    }
}

pub(crate) fn refuse(status: Status, text: &str) -> Stop {
    Stop::Refuse(Refusal {
        status,
        failure: Box::new(Failure {
            text: text.into(),
            ..Failure::default()
        }),
    })
}

pub(crate) fn hint_of(hint: Option<&Hint>) -> Option<(InodeId, &bytes::Bytes)> {
    hint.filter(|hint| !hint.name.is_empty())
        .map(|hint| (InodeId(hint.parent), &hint.name))
}

pub(crate) fn check_name(name: &[u8]) -> Result<(), Errno> {
    match name {
        b"" | b"." | b".." => Err(Errno::EINVAL),
        _ if name.len() > hither_proto::ids::NAME_MAX => Err(Errno::ENAMETOOLONG),
        _ if name.contains(&b'/') || name.contains(&0) => Err(Errno::EINVAL),
        _ => Ok(()),
    }
}

/// File type bits of a mode.
pub(crate) const TYPE_MASK: u32 = 0o170_000;
/// Regular file.
pub(crate) const REGULAR: u32 = 0o100_000;
/// Directory.
pub(crate) const DIRECTORY: u32 = 0o040_000;
/// Symbolic link.
pub(crate) const SYMLINK: u32 = 0o120_000;
/// Set-group-id bit.
pub(crate) const SETGID: u32 = 0o2000;

pub(crate) fn is_dir(mode: u32) -> bool {
    mode & TYPE_MASK == DIRECTORY
}

pub(crate) fn is_regular(mode: u32) -> bool {
    mode & TYPE_MASK == REGULAR
}
