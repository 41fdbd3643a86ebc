//! Room: how much the disk has left, and who may still take some of it.
//!
//! Bytes that are in the log have to be moved to their place later on, so whoever makes a copy
//! larger is refused while there is still room for that. The log keeps some room for the records
//! that free others, or a full disk could never be made less full.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::core::{Core, How, Need, Stop};
use crate::entry::Entry;
use crate::error::Error;
use crate::geometry::{BLOCK, ZERO_CHECKSUM, blocks_of};
use crate::live::{ChunkState, Live};
use crate::medium::Space;

/// Free bytes of the disk, as far as known without asking.
#[derive(Debug, Default)]
pub(crate) struct FreeBytes(AtomicU64);

impl FreeBytes {
    fn set(&self, bytes: u64) {
        self.0.store(bytes, Ordering::Relaxed);
    }

    fn known(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Takes bytes if `floor` are left then; what is known is never more than was free when the
    /// disk was last asked.
    fn take(&self, bytes: u64, floor: u64) -> bool {
        let taken = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| {
                free.checked_sub(bytes).filter(|left| *left >= floor)
            });
        taken.is_ok()
    }
}

impl Core {
    /// Asks the disk for its room. May hang as long as the disk does.
    pub(crate) fn space(&self) -> Result<Space, Error> {
        let space = self.medium.probe.space();
        let space = space.map_err(|error| self.io("look for free space", &error))?;
        self.free.set(space.free_bytes);
        Ok(space)
    }

    /// Refuses new copies on a disk that is nearly full: well below the floor at which the disk says
    /// that it is full, since who chooses disks learns that a little later.
    pub(crate) fn check_floor(&self, how: How) -> Result<(), Stop> {
        let floor = self.options.floor_bytes / FLOOR_GRACE;
        self.take_room(how, u64::from(BLOCK), floor)
    }

    /// Refuses what would make a copy larger on a disk that is nearly full. Blocks that the copy
    /// may have already may be written for longer; those it certainly has, always.
    pub(crate) fn check_growth(
        &self,
        how: How,
        live: &Live,
        state: &mut ChunkState,
        entry: &Entry,
        range: &Range<u32>,
    ) -> Result<(), Stop> {
        let floor = self.options.floor_bytes / FLOOR_GRACE;
        let end = entry.length.next_multiple_of(BLOCK);
        let new_bytes = range.end.saturating_sub(range.start.max(end));
        if new_bytes > 0 {
            self.take_room(how, u64::from(new_bytes), floor)?;
        }
        let hole_floor = floor / 2;
        let inside = blocks_of(&(range.start.min(end)..range.end.min(end)));
        if self.free.known() >= hole_floor || inside.is_empty() {
            return Ok(());
        }
        if how == How::Inline {
            return Err(Stop::Needs(Need::Thread));
        }
        let table = match self.file(live.chunk, state, entry)? {
            Some(file) => file
                .table(&inside)
                .map_err(|e| self.io("read checksums", &e))?,
            None => vec![ZERO_CHECKSUM; inside.len()],
        };
        let hole =
            |(block, sum): (u32, u32)| sum == ZERO_CHECKSUM && state.overlay.get(block).is_none();
        let holes = inside.zip(table).filter(|found| hole(*found)).count();
        if holes > 0 {
            self.take_room(how, holes as u64 * u64::from(BLOCK), hole_floor)?;
        }
        Ok(())
    }

    fn take_room(&self, how: How, bytes: u64, floor: u64) -> Result<(), Stop> {
        if self.free.take(bytes, floor) {
            return Ok(());
        }
        if how == How::Inline {
            // The disk has to be asked.
            return Err(Stop::Needs(Need::Thread));
        }
        if self.space()?.free_bytes < floor {
            return Err(Error::NoSpace(self.index_number).into());
        }
        self.free.take(bytes, 0);
        Ok(())
    }

    /// Keeps the end of the log for the records that free the rest of it, or of the disk: of what
    /// the log may have a segment, of what it has a part of one.
    pub(crate) fn check_log_room(&self) -> Result<(), Stop> {
        let segment_bytes = self.log.payload_bytes_max() as u64;
        let space = self.log.space();
        if space.in_use_bytes + segment_bytes >= space.bound_bytes {
            return Err(Stop::Needs(Need::LogRoom));
        }
        // The disk may turn out to have no room for one more.
        if space.in_use_bytes + segment_bytes / RESERVE_PART >= space.made_bytes {
            return Err(Stop::Needs(Need::LogGrowth));
        }
        Ok(())
    }

    /// Makes room in the log before a change that frees something. Without any, what is kept in
    /// the log for such changes has to do.
    pub(crate) fn tidy_if_full(&self) -> Result<(), Error> {
        if self.check_log_room().is_ok() {
            return Ok(());
        }
        match self.tidy() {
            Err(error) if error.is_lack() => Ok(()),
            other => other,
        }
    }
}

/// This part of a segment is kept while no other one is ready.
const RESERVE_PART: u64 = 8;
/// New copies are refused at the floor divided by this.
const FLOOR_GRACE: u64 = 2;
