//! The end of open marks.
//!
//! A mark goes when the lease is over and every in-sync member has the same bytes, stable. A copy
//! about which that is not sure is in doubt: its mark outlasts the lease, until a seal has made the
//! copies equal.

use hither_log::Lsn;
use hither_proto::ids::{ChunkId, Epoch, GroupId, LeaseId, SessionId};

use crate::core::{Core, How, Stop};
use crate::entry::{Entry, EntryFlags, OpenMark, Regions};
use crate::error::Error;
use crate::live::{ChunkState, Live};

/// A write that some members may have applied and others not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Doubt {
    /// The chunk.
    pub chunk: ChunkId,
    /// Its group.
    pub group: GroupId,
    /// Lease of the write.
    pub lease: LeaseId,
    /// Who wrote.
    pub session: SessionId,
    /// Group epoch of the write.
    pub epoch: Epoch,
    /// Where it wrote.
    pub regions: Regions,
}

impl Core {
    /// Puts a copy in doubt, durably: its mark stays until it is settled. A lease sealed since has
    /// had its copies compared.
    pub(crate) fn doubt(&self, doubt: &Doubt) -> Result<(), Error> {
        let live = self.lives.get(doubt.chunk);
        let lsn = self.locked(&live, |core, state| core.doubt_locked(&live, state, doubt))?;
        self.flush_log(lsn)
    }

    fn doubt_locked(
        &self,
        live: &Live,
        state: &mut ChunkState,
        doubt: &Doubt,
    ) -> Result<Lsn, Stop> {
        if self.index.lock().was_deleted(doubt.chunk) {
            return Ok(Lsn(0));
        }
        let mut entry = match self.settled_entry(How::Blocking, live, state) {
            Err(Stop::Failed(Error::NoSuchChunk(_))) => Entry {
                group: doubt.group,
                flags: EntryFlags::ABSENT,
                ..Entry::default()
            },
            other => other?,
        };
        if entry.lease > doubt.lease {
            return Ok(Lsn(0));
        }
        entry.lease = doubt.lease;
        if entry.open.is_none_or(|open| open.lease < doubt.lease) {
            entry.open = Some(OpenMark {
                lease: doubt.lease,
                session: doubt.session,
                epoch: doubt.epoch,
            });
        }
        entry.touched = entry.touched.with(doubt.regions);
        entry = entry.with_flag(EntryFlags::IN_DOUBT, true);
        match self.record_state(How::Blocking, live.chunk, &mut entry) {
            Err(Stop::Needs(_)) => {
                // Not even the log has room: until the next start memory has to do. The copy is
                // compared then anyway.
                self.index.lock().note(live.chunk, |noted| *noted = entry);
                Ok(Lsn(0))
            }
            other => other,
        }
    }

    /// Clears open marks of this lease or a lower one, durably; those in doubt only if the lease is
    /// that of a seal since. What the copies have is made stable first. Returns the chunks whose
    /// mark stays because it is in doubt.
    pub(crate) fn close_marks(
        &self,
        chunks: &[ChunkId],
        lease: LeaseId,
    ) -> Result<Vec<ChunkId>, Error> {
        let mut kept = Vec::new();
        let mut closing = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            match self.entry(*chunk) {
                Some(entry) if keeps_doubt(&entry, lease) => kept.push(*chunk),
                Some(entry) if is_over(&entry, lease) => closing.push(self.lives.get(*chunk)),
                _ => {}
            }
        }
        let mut last = Lsn(0);
        for live in &closing {
            last = last.max(self.sync_chunk(live)?);
        }
        // One wait for all of them, and one more for their marks.
        self.flush_log(last)?;
        let mut last = Lsn(0);
        for live in &closing {
            let lsn = self.with_room(live, |core, state| {
                let found = core.entry(live.chunk);
                let Some(mut entry) = found.filter(|entry| is_over(entry, lease)) else {
                    return Ok(Lsn(0));
                };
                if !state.dirty.is_empty() {
                    return Ok(Lsn(0));
                }
                entry.open = None;
                entry.touched = Regions::NONE;
                entry.lease_before = LeaseId(0);
                entry = entry.with_flag(EntryFlags::IN_DOUBT, false);
                core.record_state(How::Blocking, live.chunk, &mut entry)
            })?;
            last = last.max(lsn);
        }
        self.flush_log(last)?;
        Ok(kept)
    }
}

/// Whether the lease of the mark may be over with `lease`, but not the doubt about the copy.
fn keeps_doubt(entry: &Entry, lease: LeaseId) -> bool {
    entry.is_in_doubt() && entry.open.is_some_and(|open| open.lease == lease)
}

fn is_over(entry: &Entry, lease: LeaseId) -> bool {
    match entry.open {
        Some(open) if entry.is_in_doubt() => open.lease < lease,
        Some(open) => open.lease <= lease,
        // Sealed without having been written: what the seal remembers can go too.
        None => entry.lease_before != LeaseId(0) && entry.lease <= lease,
    }
}
