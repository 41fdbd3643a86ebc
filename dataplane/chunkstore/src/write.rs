//! Writing: small writes into the log, large ones in place.

use std::ops::Range;

use bytes::Bytes;
use hither_log::Lsn;
use hither_proto::checksum::{crc32c, pieces_match};
use hither_proto::ids::{ChainNumber, ChunkId, Epoch, GroupId, InodeId, LeaseId, SessionId};

use crate::core::{Core, How, Need, Stop, count};
use crate::entry::{Entry, EntryFlags, OpenMark, REGION_BYTES, Regions};
use crate::error::Error;
use crate::geometry::{
    BLOCK, BLOCK_LEN, CHUNK_BYTES, LARGE_WRITE_BYTES, block_of, blocks_of, len32, part_in_block,
    within,
};
use crate::holds::Reason;
use crate::live::{ChunkState, Live};
use crate::record::{Head, WRITE};

/// A write to a copy.
#[derive(Debug, Clone)]
pub struct WriteOp {
    /// The chunk.
    pub chunk: ChunkId,
    /// Its group.
    pub group: GroupId,
    /// File it belongs to.
    pub inode: InodeId,
    /// Exclusive lease of the writer.
    pub lease: LeaseId,
    /// Number of the writer's chain.
    pub chain: ChainNumber,
    /// First byte.
    pub offset: u32,
    /// The bytes, at least one.
    pub payload: Bytes,
    /// CRC32C of each piece, cut at the 4 KiB boundaries of the chunk.
    pub checksums: Vec<u32>,
    /// The write may make the copy.
    pub may_create: bool,
    /// Who writes.
    pub session: SessionId,
    /// Group epoch of the write.
    pub epoch: Epoch,
    /// Answer only when the bytes are stable.
    pub sync: bool,
    /// This member is filling: a copy it did not find or make complete in this epoch takes the
    /// write, made if need be, and keeps it apart from the base that is still to come.
    pub filling: bool,
}

/// What a write left to do before its bytes are stable.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Written {
    pub(crate) lsn: Lsn,
    pub(crate) file: bool,
}

/// Whether what is below a write is here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Base {
    /// The copy is complete.
    Here,
    /// The copy is being filled in the epoch of the write.
    Apart,
    /// As `Apart`, and this is the first that is known of it in this epoch.
    Unseen,
}

impl Core {
    /// Carries out a small write if that need not wait for anything.
    pub(crate) fn try_write(&self, live: &Live, op: &WriteOp) -> Result<Written, Stop> {
        check_payload(op)?;
        let mut state = live.state.try_write().ok_or(Stop::Needs(Need::Thread))?;
        self.write_locked(How::Inline, live, &mut state, op)
    }

    /// Carries out a write on a thread that may wait.
    pub(crate) fn write_blocking(&self, live: &Live, op: &WriteOp) -> Result<Written, Error> {
        check_payload(op)?;
        self.with_room(live, |core, state| {
            core.write_locked(How::Blocking, live, state, op)
        })
    }

    /// Carries out a change under the chunk's lock, again after what it needed was done.
    pub(crate) fn with_room<T>(
        &self,
        live: &Live,
        change: impl Fn(&Self, &mut ChunkState) -> Result<T, Stop>,
    ) -> Result<T, Error> {
        for _ in 0..ATTEMPTS_MAX {
            let outcome = change(self, &mut live.state.write());
            match outcome {
                Ok(value) => return Ok(value),
                Err(Stop::Failed(error)) => return Err(error),
                Err(Stop::Needs(need)) => self.make_room(live, need)?,
            }
        }
        Err(Error::NoSpace(self.index_number))
    }

    /// Carries out a change under the chunk's lock that must not wait for room: it makes room.
    pub(crate) fn locked<T>(
        &self,
        live: &Live,
        change: impl FnOnce(&Self, &mut ChunkState) -> Result<T, Stop>,
    ) -> Result<T, Error> {
        match change(self, &mut live.state.write()) {
            Ok(value) => Ok(value),
            Err(Stop::Failed(error)) => Err(error),
            Err(Stop::Needs(_)) => Err(Error::NoSpace(self.index_number)),
        }
    }

    fn write_locked(
        &self,
        how: How,
        live: &Live,
        state: &mut ChunkState,
        op: &WriteOp,
    ) -> Result<Written, Stop> {
        self.check_log_room()?;
        let (mut entry, base) = self.entry_for_write(how, live, state, op)?;
        let range = op.offset..op.offset + len32(&op.payload);
        self.check_growth(how, live, state, &entry, &range)?;
        if base == Base::Apart && state.written.count() >= WRITTEN_RANGES_MAX {
            return Err(Error::Busy(self.index_number).into());
        }
        entry.lease = op.lease;
        entry.chain = op.chain;
        entry.touch(
            &range,
            OpenMark {
                lease: op.lease,
                session: op.session,
                epoch: op.epoch,
            },
        );
        let written = self.put(
            how,
            live,
            state,
            &mut entry,
            (range.start, &op.payload, &op.checksums),
        )?;
        if base == Base::Unseen {
            // The base that comes in this epoch has what was written under older ones.
            state.fill_in(op.epoch);
        }
        if base != Base::Here {
            state.written.add(&range);
        }
        count(&self.counts.writes, 1);
        count(&self.counts.write_bytes, op.payload.len());
        Ok(written)
    }

    /// The entry that a write may change, a new one if it may make the copy.
    fn entry_for_write(
        &self,
        how: How,
        live: &Live,
        state: &mut ChunkState,
        op: &WriteOp,
    ) -> Result<(Entry, Base), Stop> {
        self.check()?;
        let chunk = op.chunk;
        let (found, deleted) = {
            let index = self.index.lock();
            (index.get(chunk), index.was_deleted(chunk))
        };
        let stale = |entry: &Entry| (op.lease, op.chain) < (entry.lease, entry.chain);
        let entry = match found {
            _ if deleted => return Err(Error::Deleted(chunk).into()),
            Some(entry) if stale(&entry) => {
                return Err(Error::StaleLease {
                    chunk,
                    lease: entry.lease,
                    chain: entry.chain,
                }
                .into());
            }
            Some(entry) if entry.group != op.group => {
                return Err(Error::WrongGroup {
                    chunk,
                    group: entry.group,
                }
                .into());
            }
            Some(entry) if entry.exists() => self.settled_entry(how, live, state)?,
            absent => {
                if !op.may_create && !op.filling {
                    return Err(Error::NoSuchChunk(chunk).into());
                }
                self.check_floor(how)?;
                Entry {
                    group: op.group,
                    inode: op.inode,
                    lease_before: absent.map_or(LeaseId(0), |entry| entry.lease_before),
                    ..Entry::default()
                }
            }
        };
        let incomplete = op.filling && entry.verified < op.epoch;
        let base = match entry.is_partial() {
            false if !incomplete => Base::Here,
            true if state.fill_epoch == op.epoch => Base::Apart,
            _ => Base::Unseen,
        };
        Ok((
            entry.with_flag(EntryFlags::PARTIAL, base != Base::Here),
            base,
        ))
    }

    /// Puts bytes into a copy whose entry says already what it will be. Bytes that lie over others
    /// in the log go to the log, so that replay need not know what is in place.
    pub(crate) fn put(
        &self,
        how: How,
        live: &Live,
        state: &mut ChunkState,
        entry: &mut Entry,
        (offset, payload, checksums): (u32, &Bytes, &[u32]),
    ) -> Result<Written, Stop> {
        let range = offset..offset + len32(payload);
        if len32(payload) < LARGE_WRITE_BYTES {
            let room = self.options.overlay_bytes_max;
            if self.holds.lock().overlay_bytes() > room {
                return Err(Stop::Needs(Need::OverlayRoom));
            }
            let lsn = self.put_in_log(how, live, state, entry, (offset, payload, checksums))?;
            return Ok(Written { lsn, file: false });
        }
        if how == How::Inline {
            return Err(Stop::Needs(Need::Thread));
        }
        let blocks = blocks_of(&range);
        let runs = runs(state, &blocks);
        let logged: u32 = runs
            .iter()
            .filter(|(_, over)| *over)
            .map(|(run, _)| run.end - run.start)
            .sum();
        if logged > LOGGED_BLOCKS_MAX {
            return Err(Stop::Needs(Need::Move));
        }
        let slice = |run: &Range<u32>| {
            let bytes = part_of(&range, run);
            let sums = (run.start - blocks.start) as usize..(run.end - blocks.start) as usize;
            (
                bytes.start,
                payload.slice(within(&bytes, offset)),
                &checksums[sums],
            )
        };
        let mut in_place = Vec::new();
        for (run, _) in runs.iter().filter(|(_, over)| !over) {
            let (start, bytes, sums) = slice(run);
            let sums = self.merged_checksums(live, state, entry, (start, &bytes, sums))?;
            in_place.push((start, bytes, sums));
        }
        self.open_regions(entry, &range);
        let opened = entry_is_looser(self, live.chunk, entry);
        let mut lsn = None;
        for (run, _) in runs.iter().filter(|(_, over)| *over) {
            let (start, bytes, sums) = slice(run);
            lsn = Some(self.put_in_log(how, live, state, entry, (start, &bytes, sums))?);
        }
        let lsn = match lsn {
            Some(lsn) => lsn,
            None => self.record_state(how, live.chunk, entry)?,
        };
        if opened {
            // From here on data may reach the file at any time.
            self.flush_log(lsn)?;
        }
        self.put_in_place(live, state, entry, &in_place)?;
        Ok(Written { lsn, file: true })
    }

    fn put_in_log(
        &self,
        how: How,
        live: &Live,
        state: &mut ChunkState,
        entry: &mut Entry,
        (offset, payload, checksums): (u32, &Bytes, &[u32]),
    ) -> Result<Lsn, Stop> {
        let head = Head::write(live.chunk, entry, offset, len32(payload), checksums);
        let hold = state.held.is_none().then_some(Reason::Overlay);
        let lsn = self.record(how, live.chunk, entry, WRITE, (&head, payload), hold)?;
        state.held.get_or_insert(lsn);
        // A short payload is part of a large receive buffer, which must not be kept for it.
        let kept = if payload.len() <= COPIED_LEN_MAX {
            Bytes::copy_from_slice(payload)
        } else {
            payload.clone()
        };
        let before = state.overlay.bytes();
        state.overlay.put(offset, &kept, checksums, lsn);
        let overlay_bytes = {
            let mut holds = self.holds.lock();
            holds.resize(before, state.overlay.bytes());
            holds.overlay_bytes()
        };
        if overlay_bytes > self.options.overlay_bytes_max / 2 {
            self.wake_keeper();
        }
        Ok(lsn)
    }

    /// Checksums of the whole blocks that a write makes: its short pieces are merged with what is
    /// in place, which is verified first.
    fn merged_checksums(
        &self,
        live: &Live,
        state: &mut ChunkState,
        entry: &Entry,
        (offset, payload, checksums): (u32, &Bytes, &[u32]),
    ) -> Result<Vec<u32>, Stop> {
        let range = offset..offset + len32(payload);
        let blocks = blocks_of(&range);
        let mut merged = checksums.to_vec();
        for block in [blocks.start, blocks.end - 1] {
            let part = part_in_block(&range, block);
            if part.len() == BLOCK_LEN {
                continue;
            }
            let mut whole = self.base_block(live.chunk, state, entry, block)?;
            whole[within(&part, block * BLOCK)].copy_from_slice(&payload[within(&part, offset)]);
            if part.len() < BLOCK_LEN && blocks.len() == 1 {
                return Ok(vec![crc32c(&whole)]);
            }
            merged[(block - blocks.start) as usize] = crc32c(&whole);
        }
        Ok(merged)
    }

    /// Notes the regions that data is about to reach; more of them where writes come in a row, so
    /// that not each has to wait for the log.
    fn open_regions(&self, entry: &mut Entry, range: &Range<u32>) {
        let wanted = Regions::of(range);
        if entry.loose.contains(wanted) {
            return;
        }
        let before = range.start.saturating_sub(1)..range.start.max(1);
        let in_a_row = range.start == 0 || entry.loose.contains(Regions::of(&before));
        let ahead = if in_a_row { AHEAD_BYTES } else { 0 };
        let end = range.end.saturating_add(ahead).min(CHUNK_BYTES);
        entry.loose = entry.loose.with(Regions::of(&(range.start..end)));
    }

    fn put_in_place(
        &self,
        live: &Live,
        state: &mut ChunkState,
        entry: &Entry,
        runs: &[(u32, Bytes, Vec<u32>)],
    ) -> Result<(), Stop> {
        if runs.is_empty() {
            return Ok(());
        }
        let file = self.file_or_new(live.chunk, state, entry)?;
        let outcome = runs.iter().try_for_each(|(offset, bytes, sums)| {
            state.dirty = state
                .dirty
                .with(Regions::of(&(*offset..offset + len32(bytes))));
            file.write(bytes, *offset)?;
            file.put_table(block_of(*offset), sums)
        });
        outcome.map_err(|error| {
            // Some of the bytes may be there: the table has to follow before the next use.
            let dirty = state.dirty;
            self.index.lock().note(live.chunk, |entry| {
                entry.suspect = entry.suspect.with(dirty);
            });
            self.io("write a copy", &error)
        })?;
        Ok(())
    }
}

/// Whether data may go to regions now that a crash must be told of first.
fn entry_is_looser(core: &Core, chunk: ChunkId, entry: &Entry) -> bool {
    core.entry(chunk).is_none_or(|old| {
        !old.loose.contains(entry.loose)
            || old.open != entry.open
            || old.is_partial() != entry.is_partial()
    })
}

/// Cuts blocks into runs of those that the overlay has a part of, and of those it has not.
fn runs(state: &ChunkState, blocks: &Range<u32>) -> Vec<(Range<u32>, bool)> {
    let mut runs = Vec::new();
    let mut at = blocks.start;
    for (over, _) in state.overlay.range(blocks.clone()) {
        if over > at {
            runs.push((at..over, false));
        }
        match runs.last_mut() {
            Some((run, true)) if run.end == over && run.end - run.start < RECORD_BLOCKS_MAX => {
                run.end = over + 1;
            }
            _ => runs.push((over..over + 1, true)),
        }
        at = over + 1;
    }
    if at < blocks.end {
        runs.push((at..blocks.end, false));
    }
    runs
}

/// The part of a range of bytes that lies in a run of blocks.
fn part_of(range: &Range<u32>, run: &Range<u32>) -> Range<u32> {
    range.start.max(run.start * BLOCK)..range.end.min(run.end * BLOCK)
}

pub(crate) fn check_range(op: &WriteOp) -> Result<(), Error> {
    let length = u32::try_from(op.payload.len()).unwrap_or(u32::MAX);
    let end = op.offset.checked_add(length);
    if length == 0 || end.is_none_or(|end| end > CHUNK_BYTES) {
        return Err(Error::BadRequest("the range is not inside a chunk"));
    }
    Ok(())
}

fn check_payload(op: &WriteOp) -> Result<(), Error> {
    check_range(op)?;
    if pieces_match(op.offset, &op.payload, &op.checksums) {
        Ok(())
    } else {
        Err(Error::BadChecksum)
    }
}

/// How often a write is tried again after room was made for it.
const ATTEMPTS_MAX: usize = 16;
/// Ranges of a copy that is being filled which are kept apart from its base.
const WRITTEN_RANGES_MAX: usize = 4096;
/// A large write puts so many blocks into the log before those below are moved in place.
const LOGGED_BLOCKS_MAX: u32 = 64;
/// Blocks in one record of a large write: a record fits the smallest segment.
const RECORD_BLOCKS_MAX: u32 = 32;
/// Payloads up to this size are copied when they are kept.
const COPIED_LEN_MAX: usize = 32 << 10;
/// Bytes ahead of a row of writes that are marked with them.
const AHEAD_BYTES: u32 = 8 * REGION_BYTES;
