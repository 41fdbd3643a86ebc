//! Changes that the metadata side asks for: seal, trim, settle, close, delete.

use std::ops::Range;

use bytes::Bytes;
use hither_log::Lsn;
use hither_proto::checksum::{crc32c, piece_checksums};
use hither_proto::ids::{ChainNumber, ChunkId, Epoch, GroupId, InodeId, LeaseId, SessionId};

use crate::core::{Core, How, Stop};
use crate::entry::{Entry, EntryFlags, OpenMark};
use crate::error::Error;
use crate::file::{BAD_CHECKSUM, ChunkFile};
use crate::geometry::{
    BLOCK, BLOCK_LEN, BLOCKS_MAX, CHUNK_BYTES, ZERO_CHECKSUM, blocks_of, bytes_of, len32,
};
use crate::holds::Reason;
use crate::live::{ChunkState, Live};
use crate::record::{DELETE, Head, TRIM};

/// State of a copy when it was sealed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SealedCopy {
    /// Whether there is a copy.
    pub exists: bool,
    /// Bytes of the copy.
    pub copy_length: u32,
    /// Highest lease seen before the seal.
    pub lease_before: LeaseId,
    /// Blocks that may have been touched under leases not closed.
    pub touched: Vec<TouchedBlock>,
}

/// A block and its checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TouchedBlock {
    /// Number of the 4 KiB block.
    pub block: u32,
    /// CRC32C of its 4096 bytes; zeros count behind the end of the copy.
    pub checksum: u32,
}

/// Drops bytes of a copy.
#[derive(Debug, Clone, Copy)]
pub struct TrimOp {
    /// The chunk.
    pub chunk: ChunkId,
    /// Its group.
    pub group: GroupId,
    /// The new lease under which this is done.
    pub lease: LeaseId,
    /// Group epoch.
    pub epoch: Epoch,
    /// First byte.
    pub offset: u32,
    /// Bytes that become zeros; 0 cuts the copy to `offset`.
    pub length: u32,
}

/// Makes blocks of a copy equal to another's.
#[derive(Debug, Clone)]
pub struct SettleOp {
    /// The chunk.
    pub chunk: ChunkId,
    /// Its group.
    pub group: GroupId,
    /// File it belongs to, for a copy that has to be made.
    pub inode: InodeId,
    /// The lease of the seal.
    pub lease: LeaseId,
    /// Group epoch.
    pub epoch: Epoch,
    /// Numbers of first blocks and the bytes from there on, at most 1 MiB each; what is left of a
    /// last block becomes zeros.
    pub runs: Vec<(u32, Bytes)>,
    /// Bytes of the copy afterwards.
    pub length: u32,
    /// The copy is settled with this: its open mark goes.
    pub clear_open: bool,
}

impl Core {
    /// Refuses lower leases from now on, durably, and tells the state of the copy.
    pub(crate) fn seal(
        &self,
        chunk: ChunkId,
        group: GroupId,
        lease: LeaseId,
    ) -> Result<SealedCopy, Error> {
        let live = self.lives.get(chunk);
        let (sealed, lsn) = self.with_room(&live, |core, state| {
            core.check_log_room()?;
            let mut entry = core.entry_under_lease(&live, state, group, lease)?;
            core.file(chunk, state, &entry)?;
            if entry.lease < lease {
                entry.lease_before = entry.lease;
                entry.lease = lease;
                entry.chain = ChainNumber(0);
            }
            let lsn = core.record_state(How::Blocking, chunk, &mut entry)?;
            let sealed = SealedCopy {
                exists: entry.exists() && !entry.is_partial(),
                copy_length: entry.length,
                lease_before: entry.lease_before,
                touched: core.touched(state, &entry)?,
            };
            Ok((sealed, lsn))
        })?;
        self.flush_log(lsn)?;
        Ok(sealed)
    }

    /// The entry of a copy for a change under `lease`; one that says there is none, so that the
    /// lease is remembered.
    fn entry_under_lease(
        &self,
        live: &Live,
        state: &mut ChunkState,
        group: GroupId,
        lease: LeaseId,
    ) -> Result<Entry, Stop> {
        if self.index.lock().was_deleted(live.chunk) {
            return Err(Error::Deleted(live.chunk).into());
        }
        let entry = match self.settled_entry(How::Blocking, live, state) {
            Err(Stop::Failed(Error::NoSuchChunk(_))) => Entry {
                group,
                flags: EntryFlags::ABSENT,
                ..Entry::default()
            },
            other => other?,
        };
        if entry.group != group {
            return Err(Error::WrongGroup {
                chunk: live.chunk,
                group: entry.group,
            }
            .into());
        }
        if lease < entry.lease {
            return Err(Error::StaleLease {
                chunk: live.chunk,
                lease: entry.lease,
                chain: entry.chain,
            }
            .into());
        }
        Ok(entry)
    }

    fn touched(&self, state: &mut ChunkState, entry: &Entry) -> Result<Vec<TouchedBlock>, Stop> {
        let mut touched = Vec::new();
        if entry.open.is_none() {
            return Ok(touched);
        }
        // Others may have become longer by what this copy has not got.
        let end = match entry.is_in_doubt() {
            true => CHUNK_BYTES,
            false => entry.length.next_multiple_of(BLOCK),
        };
        for region in entry.touched.ranges() {
            let blocks = blocks_of(&(region.start.min(end)..region.end.min(end)));
            if blocks.is_empty() {
                continue;
            }
            let table = match &state.file {
                Some(file) => file
                    .table(&blocks)
                    .map_err(|e| self.io("read checksums", &e))?,
                None => vec![ZERO_CHECKSUM; blocks.len()],
            };
            for (block, mut checksum) in blocks.zip(table) {
                if let Some(over) = state.overlay.get(block) {
                    checksum = match over.whole() {
                        Some((_, checksum)) => checksum,
                        None => self.laid_over(state, block)?,
                    };
                }
                touched.push(TouchedBlock { block, checksum });
            }
        }
        Ok(touched)
    }

    /// Checksum of a block of which a part is in the log; that of a bad block if what is below is
    /// bad.
    fn laid_over(&self, state: &ChunkState, block: u32) -> Result<u32, Stop> {
        let mut bytes = vec![0; BLOCK_LEN];
        if let Some(file) = &state.file {
            let found = file.block(block).map_err(|e| self.io("read a block", &e))?;
            if crc32c(&found.0) != found.1 {
                return Ok(BAD_CHECKSUM);
            }
            bytes = found.0;
        }
        if let Some(over) = state.overlay.get(block) {
            over.lay_over(&mut bytes);
        }
        Ok(crc32c(&bytes))
    }

    /// Drops bytes of a copy. Stable when this returns.
    pub(crate) fn trim(&self, op: &TrimOp) -> Result<(), Error> {
        let end = op.offset.checked_add(op.length);
        if end.is_none_or(|end| end > CHUNK_BYTES) {
            return Err(Error::BadRequest("the range is not inside a chunk"));
        }
        let live = self.lives.get(op.chunk);
        self.tidy_if_full()?;
        let _one = live.syncing.lock();
        self.locked(&live, |core, state| {
            let mut entry = core.entry_under_lease(&live, state, op.group, op.lease)?;
            if entry.lease < op.lease {
                entry.lease = op.lease;
                entry.chain = ChainNumber(0);
            }
            entry.changed_epoch = entry.changed_epoch.max(op.epoch);
            let empties = (op.offset, op.length) == (0, 0);
            let ends_filling = empties && entry.is_partial();
            if ends_filling {
                // Nothing is left that is to be fetched.
                entry = entry.with_flag(EntryFlags::PARTIAL, false);
            }
            core.trim_locked(&live, state, &mut entry, &[(op.offset, op.length)])?;
            if ends_filling {
                state.filled();
            }
            Ok(())
        })
    }

    /// Drops bytes under the chunk's lock; the rest of `entry` says already what it will be. Each
    /// cut is an offset and a length, or 0 to cut the copy there. Stable when this returns.
    pub(crate) fn trim_locked(
        &self,
        live: &Live,
        state: &mut ChunkState,
        entry: &mut Entry,
        cuts: &[(u32, u32)],
    ) -> Result<(), Stop> {
        let (old_length, exists) = (entry.length, entry.exists());
        for (offset, _) in cuts.iter().filter(|(_, length)| *length == 0) {
            entry.length = entry.length.min(*offset);
        }
        let mut real = cuts
            .iter()
            .filter(|(offset, _)| exists && *offset < old_length)
            .peekable();
        if real.peek().is_none() {
            let lsn = self.record_state(How::Blocking, live.chunk, entry)?;
            return Ok(self.flush_log(lsn)?);
        }
        let file = self.file(live.chunk, state, entry)?;
        let mut begun = Vec::new();
        let done = real
            .try_for_each(|cut| {
                let lsn = self.cut_overlay(live, state, entry, *cut)?;
                begun.push((lsn, cut.0, cut.1));
                Ok(())
            })
            .and_then(|()| self.cut_file(file.as_deref(), &begun));
        if let Err(stop) = done {
            // What is in the log has to reach the file before the next use.
            state.unsettled |= !begun.is_empty();
            state.trims.extend(begun);
            return Err(stop);
        }
        for (lsn, ..) in begun {
            self.trimmed(live, entry, lsn)?;
        }
        Ok(())
    }

    /// Puts a trim into the log and takes its bytes from what lies there.
    fn cut_overlay(
        &self,
        live: &Live,
        state: &mut ChunkState,
        entry: &mut Entry,
        (offset, length): (u32, u32),
    ) -> Result<Lsn, Stop> {
        let head = Head::trim(live.chunk, entry, offset, length);
        let hold = Some(Reason::Trim);
        let lsn = self.record(How::Blocking, live.chunk, entry, TRIM, (&head, &[]), hold)?;
        let before = state.overlay.bytes();
        state.overlay.cut(&trimmed_range(offset, length));
        self.hold_overlay(live, state, before);
        Ok(lsn)
    }

    /// Carries out trims in the file once they are durable in the log.
    fn cut_file(&self, file: Option<&ChunkFile>, trims: &[(Lsn, u32, u32)]) -> Result<(), Stop> {
        if let Some((last, ..)) = trims.last() {
            self.flush_log(*last)?;
        }
        let Some(file) = file else { return Ok(()) };
        let zero =
            |(_, offset, length): &(Lsn, u32, u32)| file.zero(&trimmed_range(*offset, *length));
        let done = trims.iter().try_for_each(zero).and_then(|()| file.sync());
        Ok(done.map_err(|error| self.io("trim a copy", &error))?)
    }

    /// Makes blocks of a copy equal to another's and cuts it. Stable when this returns.
    pub(crate) fn settle_blocks(&self, op: &SettleOp) -> Result<(), Error> {
        if op.length > CHUNK_BYTES || op.runs.iter().any(|(block, bytes)| !fits(*block, bytes)) {
            return Err(Error::BadRequest("a block is not inside a chunk"));
        }
        let live = self.lives.get(op.chunk);
        for (block, bytes) in &op.runs {
            self.with_room(&live, |core, state| {
                core.check_log_room()?;
                let mut entry = core.entry_to_settle(&live, state, op)?;
                let start = block * BLOCK;
                let range = start..(start + len32(bytes)).min(op.length).max(start);
                let mark = OpenMark {
                    lease: op.lease,
                    session: SessionId(0),
                    epoch: op.epoch,
                };
                entry.touch(&range, mark);
                core.put_blocks(&live, state, &mut entry, *block, bytes)?;
                if entry.is_partial() {
                    state.written.add(&bytes_of(&blocks_of(&range)));
                }
                Ok(())
            })?;
        }
        self.tidy_if_full()?;
        let one = live.syncing.lock();
        self.locked(&live, |core, state| {
            let mut entry = core.entry_to_settle(&live, state, op)?;
            entry.changed_epoch = entry.changed_epoch.max(op.epoch);
            if entry.length > op.length {
                core.trim_locked(&live, state, &mut entry, &[(op.length, 0)])?;
            }
            entry.length = op.length;
            if entry.is_partial() && state.written.gaps(&(0..op.length)).is_empty() {
                // All of it came with this: nothing is left to be fetched.
                entry.flags = entry.flags.set(EntryFlags::PARTIAL, false);
                state.filled();
            }
            if op.clear_open {
                entry = entry.with_flag(EntryFlags::IN_DOUBT, false);
            }
            core.record_state(How::Blocking, op.chunk, &mut entry)?;
            Ok(())
        })?;
        drop(one);
        self.flush_chunk(&live)?;
        if op.clear_open {
            self.close_marks(&[op.chunk], op.lease)?;
        }
        Ok(())
    }

    fn entry_to_settle(
        &self,
        live: &Live,
        state: &mut ChunkState,
        op: &SettleOp,
    ) -> Result<Entry, Stop> {
        let mut entry = self.entry_under_lease(live, state, op.group, op.lease)?;
        if !entry.exists() {
            entry.inode = op.inode;
            entry.flags = entry.flags.set(EntryFlags::ABSENT, false);
        }
        if entry.lease < op.lease {
            entry.lease = op.lease;
            entry.chain = ChainNumber(0);
        }
        if entry.is_partial() && state.fill_epoch != op.epoch {
            state.fill_in(op.epoch);
        }
        Ok(entry)
    }

    /// Overwrites a block whose content is bad with that of another member. Does nothing when the
    /// block is not bad any more: then it was written meanwhile and may be newer.
    pub(crate) fn repair_block(
        &self,
        chunk: ChunkId,
        block: u32,
        bytes: &Bytes,
    ) -> Result<bool, Error> {
        if !fits(block, bytes) {
            return Err(Error::BadRequest("a block is not inside a chunk"));
        }
        let live = self.lives.get(chunk);
        self.with_room(&live, |core, state| {
            core.check_log_room()?;
            let mut entry = core.settled_entry(How::Blocking, &live, state)?;
            if !entry.exists() {
                return Err(Error::NoSuchChunk(chunk).into());
            }
            let file = core.file(chunk, state, &entry)?;
            let bad = match &file {
                None => false,
                Some(file) => {
                    let found = file.block(block).map_err(|e| core.io("read a block", &e))?;
                    crc32c(&found.0) != found.1
                }
            };
            let over = state.overlay.get(block);
            if !bad || over.is_some_and(|over| over.whole().is_some()) {
                return Ok(false);
            }
            let mut whole = bytes.to_vec();
            whole.resize(BLOCK_LEN, 0);
            if let Some(over) = over {
                // Written here already, and perhaps not yet there.
                over.lay_over(&mut whole);
            }
            core.put_blocks(&live, state, &mut entry, block, &whole.into())?;
            Ok(true)
        })
    }

    /// Puts whole blocks, zeros behind what is given.
    fn put_blocks(
        &self,
        live: &Live,
        state: &mut ChunkState,
        entry: &mut Entry,
        first: u32,
        bytes: &Bytes,
    ) -> Result<(), Stop> {
        let whole_length = bytes.len().next_multiple_of(BLOCK_LEN).max(BLOCK_LEN);
        let whole = if bytes.len() == whole_length {
            bytes.clone()
        } else {
            let mut padded = bytes.to_vec();
            padded.resize(whole_length, 0);
            padded.into()
        };
        let offset = first * BLOCK;
        let checksums = piece_checksums(offset, &whole);
        self.put(
            How::Blocking,
            live,
            state,
            entry,
            (offset, &whole, &checksums),
        )?;
        Ok(())
    }

    /// Frees chunks, durably. Absent ones count as done, and are refused later too. May use what
    /// the log keeps for such records: this is how a full disk gets room again.
    pub(crate) fn delete(&self, chunks: &[ChunkId]) -> Result<(), Error> {
        let mut freed = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let live = self.lives.get(*chunk);
            let lsn = self.with_room(&live, |core, state| {
                core.check()?;
                core.delete_locked(&live, state)
            })?;
            freed.push((lsn, *chunk));
        }
        if let Some((last, _)) = freed.last() {
            self.flush_log(*last)?;
        }
        let removed = freed.into_iter().map(|(lsn, chunk)| {
            self.unlink(chunk)?;
            self.holds.lock().remove(lsn, Reason::Delete, chunk);
            Ok(())
        });
        // One that cannot be removed now, which a later pass does, keeps no other.
        let outcomes: Vec<Result<(), Error>> = removed.collect();
        outcomes.into_iter().collect()
    }

    fn delete_locked(&self, live: &Live, state: &mut ChunkState) -> Result<Lsn, Stop> {
        let head = Head::delete(&[live.chunk]);
        let lsn = {
            let _gate = self.gate.read();
            let appended = self.log.append(DELETE, &[head.slice()]);
            let lsn = appended.map_err(|error| self.log_error(error))?;
            self.index
                .lock()
                .delete(live.chunk, self.options.deleted_max);
            self.holds.lock().add(lsn, Reason::Delete, live.chunk);
            lsn
        };
        let before = state.overlay.bytes();
        state.overlay.clear();
        self.hold_overlay(live, state, before);
        let mut holds = self.holds.lock();
        for (trim, ..) in state.trims.drain(..) {
            holds.remove(trim, Reason::Trim, live.chunk);
        }
        drop(holds);
        *state = ChunkState::default();
        Ok(lsn)
    }

    /// Removes the file of a freed chunk; the directory is synced by the next checkpoint.
    pub(crate) fn unlink(&self, chunk: ChunkId) -> Result<(), Error> {
        let (number, dir, name) = self.place(chunk);
        match dir.remove(&name) {
            Ok(()) => {
                self.unsynced_dirs.lock().insert(number);
                Ok(())
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(self.io("remove a copy", &error)),
        }
    }
}

/// The bytes that a trim makes zeros.
pub(crate) fn trimmed_range(offset: u32, length: u32) -> Range<u32> {
    match length {
        0 => offset..CHUNK_BYTES,
        length => offset..offset + length,
    }
}

fn fits(block: u32, bytes: &[u8]) -> bool {
    let blocks = u32::try_from(bytes.len().div_ceil(BLOCK_LEN)).ok();
    let end = blocks.and_then(|blocks| block.checked_add(blocks.max(1)));
    bytes.len() <= RUN_LEN_MAX && end.is_some_and(|end| end <= BLOCKS_MAX)
}

/// Bytes that are settled under one hold of the chunk's lock.
const RUN_LEN_MAX: usize = 1 << 20;
