//! Making a copy stable.

use std::sync::Arc;

use hither_log::Lsn;

use crate::core::{Core, How, Stop, count};
use crate::entry::EntryFlags;
use crate::error::Error;
use crate::file::ChunkFile;
use crate::live::{ChunkState, Live};
use crate::record::{Head, IN_PLACE};

/// A file that is to be made stable, as the chunk was when that began.
pub(crate) struct Syncing {
    pub(crate) file: Option<Arc<ChunkFile>>,
    new_file: bool,
    /// What the overlay had of records up to this one was written to the file before.
    pub(crate) placed: Lsn,
}

impl Core {
    /// Makes everything applied to a copy stable. Returns the last record this covers.
    pub(crate) fn flush_chunk(&self, live: &Live) -> Result<Lsn, Error> {
        let lsn = self.sync_chunk(live)?;
        self.flush_log(lsn)?;
        Ok(lsn)
    }

    /// Syncs the file of a copy if it has to be. The copy is stable once the record that is
    /// returned is.
    pub(crate) fn sync_chunk(&self, live: &Live) -> Result<Lsn, Error> {
        let _one = live.syncing.lock();
        count(&self.counts.flushes, 1);
        let begun = self.locked(live, |core, state| {
            let entry = match core.settled_entry(How::Blocking, live, state) {
                Err(Stop::Failed(Error::NoSuchChunk(_))) => return Ok(None),
                other => other?,
            };
            Ok(Some((begin_sync(state), entry.lsn)))
        })?;
        let Some((syncing, lsn)) = begun else {
            return Ok(Lsn(0));
        };
        self.log.flush(lsn, |_| {});
        if syncing.file.is_some() {
            self.sync_file(live, &syncing)?;
            self.end_sync(live, &syncing)?;
        }
        Ok(lsn)
    }

    /// Syncs the file, and its directory entry if it is new.
    pub(crate) fn sync_file(&self, live: &Live, syncing: &Syncing) -> Result<(), Error> {
        let Some(file) = &syncing.file else {
            return Ok(());
        };
        // After a failed sync nobody knows what of the file is stable, so even a full disk is
        // fatal here.
        file.sync()
            .map_err(|error| self.fail(format!("sync a copy: {error}")))?;
        if syncing.new_file {
            let (_, dir, _) = self.place(live.chunk);
            dir.sync_dir()
                .map_err(|error| self.fail(format!("sync a directory: {error}")))?;
        }
        Ok(())
    }

    /// Notes that what was in place when the sync began is stable. The caller holds the chunk's
    /// lock for syncs.
    pub(crate) fn end_sync(&self, live: &Live, syncing: &Syncing) -> Result<(), Error> {
        let placed = syncing.placed;
        self.locked(live, |core, state| {
            let Some(mut entry) = core.entry(live.chunk) else {
                return Ok(());
            };
            // What was written meanwhile is not covered.
            entry.loose = entry.loose.and(state.dirty);
            entry.flags = entry.flags.set(EntryFlags::HAS_FILE, true);
            let head = Head::upto(live.chunk, &entry, placed);
            core.record(
                How::Blocking,
                live.chunk,
                &mut entry,
                IN_PLACE,
                (&head, &[]),
                None,
            )?;
            let before = state.overlay.bytes();
            if placed > Lsn(0) {
                state.overlay.moved(placed);
                core.hold_overlay(live, state, before);
            }
            Ok(())
        })
    }

    /// Flushes every copy that has something to flush, and the log.
    pub(crate) fn flush_all(&self) -> Result<(), Error> {
        for live in self.lives.all() {
            let wanted = {
                let state = live.state.read();
                !state.dirty.is_empty() || state.unsynced_file
            };
            if wanted {
                self.flush_chunk(&live)?;
            }
        }
        self.flush_log(self.log.next_lsn().previous())
    }
}

/// Takes note that a sync begins: what is dirty now will be covered by it.
pub(crate) fn begin_sync(state: &mut ChunkState) -> Syncing {
    let wanted = !state.dirty.is_empty() || state.unsynced_file;
    state.dirty = crate::entry::Regions::NONE;
    let new_file = std::mem::take(&mut state.unsynced_file);
    Syncing {
        file: state.file.clone().filter(|_| wanted),
        new_file,
        placed: Lsn(0),
    }
}
