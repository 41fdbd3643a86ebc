//! What a copy needs before its first use after a crash.

use hither_log::Lsn;

use crate::change::trimmed_range;
use crate::core::{Core, How, Stop, count};
use crate::entry::{Entry, EntryFlags, Regions};
use crate::error::Error;
use crate::geometry::{BLOCK, bytes_of};
use crate::holds::Reason;
use crate::live::{ChunkState, Live};
use crate::record::{Head, TRIMMED};

impl Core {
    /// Whether [`Core::settle`] has something to do.
    pub(crate) fn is_unsettled(state: &ChunkState, entry: &Entry) -> bool {
        state.unsettled || !entry.suspect.is_empty()
    }

    /// Repeats trims that may not have reached the file, and makes the checksums right of those
    /// blocks that a crash may have caught between data and table. They keep the bytes they have:
    /// what was acknowledged as synced is not among those that changed.
    pub(crate) fn settle(
        &self,
        live: &Live,
        state: &mut ChunkState,
        entry: &mut Entry,
    ) -> Result<(), Stop> {
        if !Self::is_unsettled(state, entry) {
            return Ok(());
        }
        let file = self.file(live.chunk, state, entry)?;
        if let Some(file) = &file {
            let settled = self.settle_file(state, entry, file);
            let torn = settled.map_err(|error| self.io("settle a copy", &error))?;
            if torn > 0 {
                tracing::info!(chunk = %live.chunk, torn, "blocks were torn by a crash");
                // Damage looks the same: it is found by comparing with another member.
                *entry = entry.with_flag(EntryFlags::TORN, true);
            }
            count(&self.counts.torn_blocks, torn);
            file.sync()
                .map_err(|error| self.io("sync a copy", &error))?;
            if !entry.flags.has(EntryFlags::HAS_FILE) {
                // Nothing is left for a later flush to do, so the file has to stay as well.
                let (_, dir, _) = self.place(live.chunk);
                dir.sync_dir()
                    .map_err(|error| self.io("sync a directory", &error))?;
                *entry = entry.with_flag(EntryFlags::HAS_FILE, true);
                state.unsynced_file = false;
            }
        }
        entry.loose = state.dirty;
        entry.suspect = Regions::NONE;
        self.record_state(How::Blocking, live.chunk, entry)?;
        // A trim that nobody remembers would hold the log for ever.
        while let Some((lsn, ..)) = state.trims.first().copied() {
            self.trimmed(live, entry, lsn)?;
            state.trims.remove(0);
        }
        state.unsettled = false;
        Ok(())
    }

    fn settle_file(
        &self,
        state: &ChunkState,
        entry: &Entry,
        file: &crate::file::ChunkFile,
    ) -> std::io::Result<usize> {
        let mut torn = 0;
        file.drop_cache()?;
        for (_, offset, length) in &state.trims {
            file.zero(&trimmed_range(*offset, *length))?;
        }
        if !entry.suspect.is_empty() {
            file.cut(entry.length)?;
            let end = entry.length.next_multiple_of(BLOCK);
            for region in entry.suspect.ranges() {
                let range = region.start.min(end)..region.end.min(end);
                if !range.is_empty() {
                    torn += file.settle(&range)?;
                }
            }
        }
        for (block, over) in state.overlay.range(0..crate::geometry::BLOCKS_MAX) {
            if over.whole().is_none() {
                torn += file.settle(&bytes_of(&(block..block + 1)))?;
            }
        }
        Ok(usize::try_from(torn).unwrap_or(usize::MAX))
    }

    /// Notes that a trim is in place and stable.
    pub(crate) fn trimmed(&self, live: &Live, entry: &mut Entry, lsn: Lsn) -> Result<(), Stop> {
        let head = Head::upto(live.chunk, entry, lsn);
        self.record(
            How::Blocking,
            live.chunk,
            entry,
            TRIMMED,
            (&head, &[]),
            None,
        )?;
        self.holds.lock().remove(lsn, Reason::Trim, live.chunk);
        Ok(())
    }

    /// The entry of a copy that may be used now, after [`Core::settle`] if it needs that.
    pub(crate) fn settled_entry(
        &self,
        how: How,
        live: &Live,
        state: &mut ChunkState,
    ) -> Result<Entry, Stop> {
        self.check()?;
        let Some(mut entry) = self.entry(live.chunk) else {
            return Err(Error::NoSuchChunk(live.chunk).into());
        };
        if Self::is_unsettled(state, &entry) {
            if how == How::Inline {
                return Err(Stop::Needs(crate::core::Need::Thread));
            }
            self.settle(live, state, &mut entry)?;
        }
        Ok(entry)
    }
}
