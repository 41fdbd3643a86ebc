//! Ends of unclean leases (seals) and cuts of files (trims): what has to happen on the
//! chunkservers before anybody gets a lease again.

use hither_proto::ids::{ChunkId, Epoch, GroupId, InodeId, RequestNumber};
use hither_proto::meta::Reply;
use hither_proto::stored::ChunkRef;

use super::create::length_in_chunk;
use super::{Outcome, seal_of};
use crate::core::batch::Object;
use crate::core::event::{Answer, Effect, SealChunk};
use crate::core::lease::Data;
use crate::core::run::{Attempt, Blocker, Core, Stop};

impl Core {
    /// Starts to seal what a gone writer had open: the chunks known to be open and those the file
    /// refers to.
    pub(crate) fn seal(
        &mut self,
        attempt: &mut Attempt,
        ino: InodeId,
        chunks: &[SealChunk],
    ) -> Outcome {
        match self.need_inode(attempt, ino, None) {
            Ok(()) => self.need_refs(ino, 0, u32::MAX)?,
            // A file nobody can reach: its chunks are freed when its removal is carried out, and
            // a name without back-pointer has no data that was ever reported.
            Err(Stop::Refuse(_)) => {
                let lost: Vec<ChunkRef> = chunks.iter().map(reference).collect();
                self.free_chunks(ino, &lost);
                self.end_seal(ino);
                return Ok(Reply::default());
            }
            Err(stop) => return Err(stop),
        }
        let size = self.cache.inodes[&ino].inode.size;
        let mut all: Vec<SealChunk> = chunks.to_vec();
        for chunk in self.refs_in(ino, 0, u32::MAX) {
            match all.iter_mut().find(|known| known.chunk.0 == chunk.chunk) {
                // A server that lists an open chunk does not know which piece of the file it is.
                Some(known) => known.index = chunk.index,
                None => all.push(seal_of(&chunk)),
            }
        }
        let mut numbered = Vec::with_capacity(all.len());
        for chunk in all {
            let lease = self.new_lease()?;
            let length_max = length_in_chunk(size, chunk.index);
            numbered.push(SealChunk {
                lease,
                length_max,
                ..chunk
            });
        }
        if numbered.is_empty() {
            self.end_seal(ino);
        } else {
            self.effects.push(Effect::Seal(ino, numbered));
        }
        Ok(Reply::default())
    }

    /// All members agree again: what exists and counts is kept, the rest is freed.
    pub(crate) fn sealed(&mut self, ino: InodeId, chunks: &[(SealChunk, bool, Epoch)]) {
        let mut attempt = Attempt::of_session(hither_proto::ids::SessionId(0));
        for (chunk, exists, epoch) in chunks {
            self.raise_floor(chunk.group, *epoch);
            let reference = reference(chunk);
            let referred = self.refs_in(ino, chunk.index, chunk.index);
            let is_ours = referred.iter().any(|known| known.chunk == chunk.chunk.0);
            if is_ours {
                continue;
            }
            let known = self.cache.inodes.contains_key(&ino);
            if known && *exists && chunk.length_max > 0 && referred.is_empty() {
                self.put_ref(
                    &mut attempt,
                    ino,
                    &ChunkRef {
                        written: true,
                        ..reference
                    },
                );
                self.need_back_pointer(&mut attempt, ino);
            } else {
                self.free_chunks(ino, &[reference]);
            }
        }
        self.end_seal(ino);
    }

    fn end_seal(&mut self, ino: InodeId) {
        self.leases.of_mut(ino).sealing = false;
        self.leases.prune(ino);
        self.wake(&Blocker::Inode(ino));
    }

    /// Starts to cut the copies of the chunk that holds the inode's pending trim; true when there
    /// is one. The trim carries a new lease id, which the writer (if any) goes on with.
    pub(crate) fn start_trim(&mut self, ino: InodeId) -> Result<bool, Stop> {
        let Some(at) = self.cache.inodes[&ino].inode.rare().pending_trim else {
            return Ok(false);
        };
        let index = super::create::chunk_index(at)?;
        let mut held = self.refs_in(ino, index, index);
        if let Some(Data::Exclusive(exclusive)) = self.leases.of(ino).map(|l| &l.data) {
            held.extend(
                exclusive
                    .reserved
                    .iter()
                    .filter(|c| c.index == index)
                    .cloned(),
            );
        }
        let lease = self.new_lease()?;
        let Some(chunk) = held.first() else {
            return Ok(false);
        };
        let seal = SealChunk {
            lease,
            length_max: length_in_chunk(at, index),
            ..seal_of(chunk)
        };
        let leases = self.leases.of_mut(ino);
        leases.trimming = true;
        if let Data::Exclusive(exclusive) = &mut leases.data {
            exclusive.lease = lease;
        }
        self.effects.push(Effect::Trim(ino, seal));
        Ok(true)
    }

    /// The cut is stable on all members: the file may be extended again.
    pub(crate) fn trimmed(&mut self, ino: InodeId, group: GroupId, epoch: Epoch) {
        self.raise_floor(group, epoch);
        self.leases.of_mut(ino).trimming = false;
        let mut attempt = Attempt::of_session(hither_proto::ids::SessionId(0));
        if let Some(slot) = self.cache.inodes.get_mut(&ino) {
            slot.inode.rare_mut().pending_trim = None;
            self.touch(&mut attempt, Object::Inode(ino));
        }
        for (attempt, reply, number) in self.trim_answers.remove(&ino).unwrap_or_default() {
            self.answer_trim(&attempt, reply, number);
        }
        self.leases.prune(ino);
        self.wake(&Blocker::Inode(ino));
    }

    fn answer_trim(&mut self, attempt: &Attempt, mut reply: Reply, number: RequestNumber) {
        reply.batch = self.open.number.0;
        let result = Ok(reply);
        self.record(attempt.session, number, &result);
        if let (Some(token), Ok(reply)) = (attempt.token, result) {
            self.answer_after(attempt.depends, token, Answer::Reply(Box::new(reply)));
        }
    }

    fn raise_floor(&mut self, group: GroupId, epoch: Epoch) {
        let floor = self.group_floor.entry(group).or_default();
        *floor = (*floor).max(epoch);
    }
}

fn reference(chunk: &SealChunk) -> ChunkRef {
    let ChunkId(id) = chunk.chunk;
    ChunkRef {
        index: chunk.index,
        chunk: id,
        group: chunk.group.0,
        written: false,
    }
}
