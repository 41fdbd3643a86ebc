//! Ends of unclean leases (seals) and cuts of files (trims): what has to happen on the
//! chunkservers before anybody gets a lease again.

use hither_proto::ids::{ChunkId, Epoch, GroupId, InodeId, RequestNumber, SessionId};
use hither_proto::meta::Reply;
use hither_proto::status::Status;
use hither_proto::stored::ChunkRef;

use super::create::length_in_chunk;
use super::{Outcome, seal_of};
use crate::core::batch::Object;
use crate::core::event::{Answer, Counter, Effect, SealChunk, Token};
use crate::core::lease::{Data, Leases};
use crate::core::run::{Attempt, Blocker, Core, Stop, Work};
use crate::core::session::EndStep;

impl Core {
    /// Seals what was written of the file, chunks that are known to be open among it. One seal of a
    /// file at a time: what one links, the next must find linked.
    pub(crate) fn begin_seal(&mut self, ino: InodeId, chunks: Vec<SealChunk>) {
        if !std::mem::replace(&mut self.leases.of_mut(ino).sealing, true) {
            return self.spawn(Work::Seal { ino, chunks });
        }
        let next = self.next_seals.entry(ino).or_default();
        for chunk in chunks {
            let known = next.entry(chunk.chunk).or_insert(chunk);
            known.index = known.index.or(chunk.index);
        }
    }

    /// Starts to seal what a gone writer had open: the chunks known to be open and those the file
    /// refers to.
    pub(crate) fn seal(
        &mut self,
        attempt: &mut Attempt,
        ino: InodeId,
        chunks: &[SealChunk],
    ) -> Outcome {
        // The cut comes first: its lease id is the lower one, and members would refuse it.
        if self.leases.of(ino).is_some_and(|leases| leases.trimming) {
            return Err(Stop::Block(Blocker::Inode(ino)));
        }
        match self.need_inode(attempt, ino, None) {
            Ok(()) => self.need_refs(ino, 0, u32::MAX)?,
            // The file is another rank's now, which is no reason to free anything.
            Err(Stop::Refuse(refusal)) if refusal.status == Status::NOT_MINE => {
                return Err(Stop::Block(Blocker::Authority));
            }
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
        let mut all = chunks.to_vec();
        for chunk in self.refs_in(ino, 0, u32::MAX) {
            match all.iter_mut().find(|known| known.chunk.0 == chunk.chunk) {
                Some(known) => known.index = Some(chunk.index),
                None => all.push(seal_of(&chunk)),
            }
        }
        // Nobody knows which piece of the file these would be.
        let nowhere: Vec<ChunkRef> = all
            .extract_if(.., |chunk| chunk.index.is_none())
            .map(|chunk| reference(&chunk))
            .collect();
        if self.numbers.left(Counter::Lease) < all.len() as u64 {
            self.reserve_numbers();
            return Err(Stop::Block(Blocker::Numbers));
        }
        let mut numbered = Vec::with_capacity(all.len());
        for chunk in all {
            let lease = self.new_lease()?;
            let length_max = length_in_chunk(size, chunk.index.unwrap_or_default());
            numbered.push(SealChunk {
                lease,
                length_max,
                ..chunk
            });
        }
        self.free_chunks(ino, &nowhere);
        if numbered.is_empty() {
            self.end_seal(ino);
        } else {
            self.effects.push(Effect::Seal(ino, numbered));
        }
        Ok(Reply::default())
    }

    /// All members agree again: what exists and counts is kept, the rest is freed. Chunks that a later
    /// seal has taken over are not listed.
    pub(crate) fn sealed(&mut self, ino: InodeId, chunks: &[(SealChunk, bool, Epoch)]) {
        let mut attempt = Attempt::of_session(SessionId(0));
        self.note_absent_pages(ino, chunks.iter().filter_map(|(chunk, ..)| chunk.index));
        for (chunk, exists, epoch) in chunks {
            self.raise_floor(chunk.group, *epoch);
            let referred = chunk
                .index
                .map(|index| self.refs_in(ino, index, index))
                .unwrap_or_default();
            if referred.iter().any(|known| known.chunk == chunk.chunk.0) {
                continue;
            }
            let known = self.cache.inodes.contains_key(&ino) && chunk.index.is_some();
            let mut reference = reference(chunk);
            if known && *exists && chunk.length_max > 0 && referred.is_empty() {
                reference.written = true;
                self.put_ref(&mut attempt, ino, &reference);
                self.need_back_pointer(&mut attempt, ino);
            } else {
                self.free_chunks(ino, &[reference]);
            }
        }
        self.end_seal(ino);
    }

    fn end_seal(&mut self, ino: InodeId) {
        if let Some(next) = self.next_seals.remove(&ino) {
            let chunks = next.into_values().collect();
            return self.spawn(Work::Seal { ino, chunks });
        }
        self.leases.of_mut(ino).sealing = false;
        if let Some(slot) = self.cache.inodes.get_mut(&ino)
            && slot.inode.rare().pending_seal
        {
            slot.inode.set_pending_seal(false);
            let mut attempt = Attempt::of_session(SessionId(0));
            self.touch(&mut attempt, Object::Inode(ino));
        }
        self.end_sessions(Some(EndStep::Seal(ino)));
        self.leases.prune(ino);
        self.wake(&Blocker::Inode(ino));
    }

    /// Makes sure that no cut or seal of the file is under way or was left by a predecessor: it is
    /// finished before anybody reads or extends the file.
    pub(crate) fn need_trimmed(&mut self, ino: InodeId) -> Result<(), Stop> {
        let under_way = |leases: &Leases| leases.trimming || leases.sealing;
        if self.leases.of(ino).is_some_and(under_way) {
            return Err(Stop::Block(Blocker::Inode(ino)));
        }
        if self.cache.inodes[&ino].inode.rare().pending_seal {
            self.begin_seal(ino, Vec::new());
            return Err(Stop::Block(Blocker::Inode(ino)));
        }
        let Some(at) = self.cache.inodes[&ino].inode.rare().pending_trim else {
            return Ok(());
        };
        let index = super::create::chunk_index(at)?;
        self.need_refs(ino, index, index)?;
        if self.start_trim(ino)? {
            return Err(Stop::Block(Blocker::Inode(ino)));
        }
        // No chunk is there to be cut: it was reserved at most, and nobody knows it any more.
        if let Some(slot) = self.cache.inodes.get_mut(&ino) {
            slot.inode.set_pending_trim(None);
            let mut attempt = Attempt::of_session(SessionId(0));
            self.touch(&mut attempt, Object::Inode(ino));
        }
        Ok(())
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
        let mut attempt = Attempt::of_session(SessionId(0));
        if let Some(slot) = self.cache.inodes.get_mut(&ino) {
            slot.inode.set_pending_trim(None);
            self.touch(&mut attempt, Object::Inode(ino));
        }
        for (attempt, reply, number) in self.trim_answers.remove(&ino).unwrap_or_default() {
            self.answer_trim(&attempt, reply, number);
        }
        self.leases.prune(ino);
        self.wake(&Blocker::Inode(ino));
    }

    /// A request that waits for a trim was resent: the newer requester gets the answer.
    pub(crate) fn replace_trim_token(
        &mut self,
        session: SessionId,
        number: RequestNumber,
        token: Token,
    ) {
        let waiting = self.trim_answers.values_mut().flatten();
        for (attempt, _, waits) in waiting {
            if attempt.session == session && *waits == number {
                attempt.token = Some(token);
            }
        }
    }

    fn answer_trim(&mut self, attempt: &Attempt, mut reply: Reply, number: RequestNumber) {
        reply.batch = self.open.number.0;
        let result = Ok(reply);
        self.record(attempt.session, number, &result, self.open.number);
        if let (Some(token), Ok(reply)) = (attempt.token, result) {
            // Never early: carried out anew by a successor, the cut would take what its requester has
            // written since it was answered.
            self.answer_after(self.open.number, token, Answer::Reply(Box::new(reply)));
        }
    }

    fn raise_floor(&mut self, group: GroupId, epoch: Epoch) {
        let floor = self.group_floor.entry(group).or_default();
        *floor = (*floor).max(epoch);
    }
}

/// What the file would refer to the chunk with; freeing one asks for no place.
fn reference(chunk: &SealChunk) -> ChunkRef {
    let ChunkId(id) = chunk.chunk;
    ChunkRef {
        index: chunk.index.unwrap_or_default(),
        chunk: id,
        group: chunk.group.0,
        written: false,
    }
}
