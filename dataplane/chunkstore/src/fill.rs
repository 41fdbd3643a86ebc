//! Filling: a member takes a copy over from another while writes to it go on.
//!
//! A copy that is being filled is marked as partial. What chain writes put there is remembered in
//! memory, and the base that comes from the other member goes only where they have not been. A
//! partial copy found after a restart is filled from the start.

use std::ops::Range;

use bytes::Bytes;
use hither_proto::checksum::piece_checksums;
use hither_proto::ids::{ChunkId, Epoch, GroupId, InodeId, LeaseId, SessionId};

use crate::core::{Core, How, Stop};
use crate::entry::{Entry, EntryFlags, OpenMark};
use crate::error::Error;
use crate::geometry::{CHUNK_BYTES, len32, within};
use crate::live::ChunkState;

/// What the other member says of its copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BaseCopy {
    /// Version of its copy.
    pub lease: LeaseId,
    /// Bytes of its copy.
    pub length: u32,
    /// File the chunk belongs to.
    pub inode: InodeId,
    /// Group epoch of its last change.
    pub changed_epoch: Epoch,
    /// Whether it has an open mark.
    pub open: bool,
}

impl Core {
    /// Marks a copy as partial, made if there is none. What chain writes of this epoch have written
    /// stays apart from the base, unless `afresh` says that nothing is to be kept.
    pub(crate) fn fill_begin(
        &self,
        chunk: ChunkId,
        group: GroupId,
        inode: InodeId,
        epoch: Epoch,
        afresh: bool,
    ) -> Result<(), Error> {
        let live = self.lives.get(chunk);
        self.with_room(&live, |core, state| {
            core.check_log_room()?;
            if core.index.lock().was_deleted(chunk) {
                return Err(Error::Deleted(chunk).into());
            }
            if epoch < state.fill_epoch {
                return Err(NOT_FILLED.into());
            }
            let mut entry = match core.settled_entry(How::Blocking, &live, state) {
                Err(Stop::Failed(Error::NoSuchChunk(_))) => Entry {
                    group,
                    inode,
                    ..Entry::default()
                },
                other => other?.with_flag(EntryFlags::ABSENT, false),
            };
            if entry.is_partial() {
                if afresh || state.fill_epoch != epoch {
                    state.fill_in(epoch);
                }
                return Ok(());
            }
            core.check_floor(How::Blocking)?;
            if entry.group != group {
                return Err(Error::WrongGroup {
                    chunk,
                    group: entry.group,
                }
                .into());
            }
            entry = entry.with_flag(EntryFlags::PARTIAL, true);
            state.fill_in(epoch);
            core.record_state(How::Blocking, chunk, &mut entry)?;
            Ok(())
        })
    }

    /// Cuts a copy to nothing and takes note that there is none.
    pub(crate) fn discard(&self, chunk: ChunkId) -> Result<(), Error> {
        let live = self.lives.get(chunk);
        self.tidy_if_full()?;
        let _one = live.syncing.lock();
        self.locked(&live, |core, state| {
            let mut entry = match core.settled_entry(How::Blocking, &live, state) {
                Err(Stop::Failed(Error::NoSuchChunk(_))) => return Ok(()),
                other => other?,
            };
            core.trim_locked(&live, state, &mut entry, &[(0, 0)])?;
            entry.open = None;
            entry.touched = crate::entry::Regions::NONE;
            entry.flags = entry
                .flags
                .set(EntryFlags::PARTIAL, false)
                .set(EntryFlags::IN_DOUBT, false)
                .set(EntryFlags::TORN, false)
                .set(EntryFlags::ABSENT, true);
            state.filled();
            core.record_state(How::Blocking, chunk, &mut entry)?;
            Ok(())
        })
    }

    /// Whether a range of a partial copy has blocks with these checksums, without help of chain
    /// writes.
    pub(crate) fn has_base(
        &self,
        chunk: ChunkId,
        range: Range<u32>,
        checksums: &[u32],
        epoch: Epoch,
    ) -> Result<bool, Error> {
        let live = self.lives.get(chunk);
        self.with_room(&live, |core, state| {
            let entry = core.settled_entry(How::Blocking, &live, state)?;
            check_filling(state, &entry, epoch)?;
            let untouched = state.written.gaps(&range) == [range.clone()];
            if range.end > entry.length || !untouched {
                return Ok(false);
            }
            core.file(chunk, state, &entry)?;
            match core.read_range(How::Blocking, chunk, state, &entry, range.clone()) {
                Ok(data) => Ok(data.checksums == checksums),
                Err(Stop::Failed(Error::BadBlock { .. })) => Ok(false),
                Err(stop) => Err(stop),
            }
        })
    }

    /// Puts bytes of the other member's copy where no chain write has been.
    pub(crate) fn fill_base(
        &self,
        chunk: ChunkId,
        offset: u32,
        bytes: &Bytes,
        epoch: Epoch,
    ) -> Result<(), Error> {
        let end = u32::try_from(bytes.len())
            .ok()
            .and_then(|length| offset.checked_add(length));
        let Some(end) = end.filter(|end| *end <= CHUNK_BYTES) else {
            return Err(Error::BadRequest("the range is not inside a chunk"));
        };
        let live = self.lives.get(chunk);
        // Again from the start after room was made: the gaps may have shrunk by then.
        self.with_room(&live, |core, state| {
            core.check_log_room()?;
            let mut entry = core.settled_entry(How::Blocking, &live, state)?;
            check_filling(state, &entry, epoch)?;
            for gap in state.written.gaps(&(offset..end)) {
                let payload = bytes.slice(within(&gap, offset));
                let checksums = piece_checksums(gap.start, &payload);
                core.check_growth(How::Blocking, &live, state, &entry, &gap)?;
                entry.length = entry.length.max(gap.start + len32(&payload));
                entry.touched = entry.touched.with(crate::entry::Regions::of(&gap));
                core.put(
                    How::Blocking,
                    &live,
                    state,
                    &mut entry,
                    (gap.start, &payload, &checksums),
                )?;
            }
            Ok(())
        })
    }

    /// The base is there: the copy is complete. Not stable until it is flushed.
    pub(crate) fn fill_end(
        &self,
        chunk: ChunkId,
        base: &BaseCopy,
        epoch: Epoch,
    ) -> Result<(), Error> {
        let live = self.lives.get(chunk);
        self.tidy_if_full()?;
        let _one = live.syncing.lock();
        self.locked(&live, |core, state| {
            let mut entry = core.settled_entry(How::Blocking, &live, state)?;
            check_filling(state, &entry, epoch)?;
            let length = base.length.max(state.written.end());
            // Behind the base there is what was written meanwhile, and else nothing: a copy that
            // was here before may have been longer.
            let behind = base.length.min(entry.length)..entry.length;
            let stale = state.written.gaps(&behind);
            for gaps in stale.chunks(CUTS_AT_ONCE) {
                let cut = |gap: &Range<u32>| match gap.end {
                    end if end > length => (gap.start, 0),
                    end => (gap.start, end - gap.start),
                };
                let cuts: Vec<_> = gaps.iter().map(cut).collect();
                core.trim_locked(&live, state, &mut entry, &cuts)?;
            }
            entry.length = length;
            entry.inode = base.inode;
            if entry.lease < base.lease {
                entry.lease = base.lease;
                entry.chain = hither_proto::ids::ChainNumber(0);
            }
            entry.changed_epoch = entry.changed_epoch.max(base.changed_epoch);
            if base.open && entry.open.is_none() {
                entry.open = Some(OpenMark {
                    lease: base.lease,
                    session: SessionId(0),
                    epoch,
                });
            }
            if !base.open && state.written.count() == 0 {
                // Marked under a lease that is over: the copy is the other member's now.
                entry.open = None;
                entry.touched = crate::entry::Regions::NONE;
            }
            entry.verified = epoch;
            entry.flags = entry
                .flags
                .set(EntryFlags::PARTIAL, false)
                .set(EntryFlags::IN_DOUBT, false)
                .set(EntryFlags::TORN, false);
            state.filled();
            core.record_state(How::Blocking, chunk, &mut entry)?;
            Ok(())
        })
    }

    /// Notes that the copy is as complete as that of another member in this epoch, unless it
    /// changed since `seen` was read.
    pub(crate) fn mark_verified(&self, chunk: ChunkId, seen: &Entry, epoch: Epoch) -> bool {
        let live = self.lives.get(chunk);
        let _state = live.state.write();
        let mut index = self.index.lock();
        if index
            .get(chunk)
            .is_none_or(|entry| entry.lsn != seen.lsn || entry.is_partial())
        {
            return false;
        }
        index.note(chunk, |entry| entry.verified = epoch);
        true
    }
}

/// A filling of an older epoch that is still under way would put down what has changed since.
fn check_filling(state: &ChunkState, entry: &Entry, epoch: Epoch) -> Result<(), Error> {
    if entry.is_partial() && state.fill_epoch == epoch {
        return Ok(());
    }
    Err(NOT_FILLED)
}

const NOT_FILLED: Error = Error::BadRequest("the copy is not being filled in this epoch");
/// Stale ranges that are cut out with one sync of the file.
const CUTS_AT_ONCE: usize = 64;
