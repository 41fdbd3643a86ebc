//! Background work of a disk: bytes move from the log to their place, the index is checkpointed,
//! the log is released.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use hither_log::Lsn;
use hither_proto::checksum::crc32c;
use hither_proto::ids::ChunkId;

use crate::core::{Core, How, Need, Stop, count};
use crate::entry::Entry;
use crate::error::Error;
use crate::file::{BAD_CHECKSUM, ChunkFile};
use crate::flush::{Syncing, begin_sync};
use crate::geometry::{BLOCK, BLOCK_LEN, BLOCKS_MAX};
use crate::holds::Reason;
use crate::live::{ChunkState, Live};

impl Core {
    /// Asks for a pass soon.
    pub(crate) fn wake_keeper(&self) {
        let mut signal = self.keeper.signal.lock();
        if !signal.wanted {
            signal.wanted = true;
            self.keeper.wake.notify_all();
        }
    }

    /// Does what an operation needs before it is tried again.
    pub(crate) fn make_room(&self, live: &Live, need: Need) -> Result<(), Error> {
        match need {
            Need::Thread => {}
            Need::Move => self.move_chunk(live)?,
            Need::OverlayRoom => self.move_oldest()?,
            Need::LogGrowth => self.log.grow(),
            Need::LogRoom => {
                match self.tidy() {
                    Err(error) if error.is_lack() && self.check_log_room().is_ok() => {}
                    other => other?,
                }
                self.wait_for_log();
            }
        }
        Ok(())
    }

    /// Released segments become free a moment later.
    fn wait_for_log(&self) {
        let pair = Arc::new((parking_lot::Mutex::new(false), parking_lot::Condvar::new()));
        let of_callback = Arc::clone(&pair);
        let wanted = LARGEST_RECORD_LEN.min(self.log.payload_bytes_max());
        self.log.when_room(wanted, move || {
            *of_callback.0.lock() = true;
            of_callback.1.notify_all();
        });
        let mut ready = pair.0.lock();
        if !*ready {
            pair.1.wait_for(&mut ready, LOG_WAIT);
        }
    }

    /// Moves everything in place that is in the log now, checkpoints, and releases the log. What
    /// lacks room stays and is the error at the end; it stops nothing else.
    pub(crate) fn tidy(&self) -> Result<(), Error> {
        let _one = self.keeper.pass.lock();
        let end = self.log.next_lsn();
        let mut pass = Pass::default();
        self.repeat_deletes(&mut pass)?;
        self.repeat_trims(end, &mut pass)?;
        self.move_before(end, &mut pass)?;
        pass.note(self.write_checkpoint())?;
        pass.outcome()
    }

    /// Removes files of freed chunks that could not be removed before.
    fn repeat_deletes(&self, pass: &mut Pass) -> Result<(), Error> {
        let durable = self.log.durable_lsn();
        let chunks = self.holds.lock().deleted_chunks(durable);
        for (lsn, chunk) in chunks {
            let removed = self.unlink(chunk);
            if removed.is_ok() {
                self.holds.lock().remove(lsn, Reason::Delete, chunk);
            }
            pass.note(removed)?;
        }
        Ok(())
    }

    /// Does trims that failed, or that the last run left undone: they hold the log.
    fn repeat_trims(&self, end: Lsn, pass: &mut Pass) -> Result<(), Error> {
        let chunks = self.holds.lock().trimmed_chunks(end);
        for chunk in chunks {
            let live = self.lives.get(chunk);
            let settled = self.locked(&live, |core, state| {
                core.settled_entry(How::Blocking, &live, state)
            });
            match settled {
                Ok(_) | Err(Error::NoSuchChunk(_)) => {}
                Err(error) => pass.note(Err(error))?,
            }
        }
        Ok(())
    }

    /// Moves what is older than record `end`.
    fn move_before(&self, end: Lsn, pass: &mut Pass) -> Result<(), Error> {
        let chunks = self.holds.lock().oldest_chunks(end, usize::MAX);
        let mut batches = chunks.chunks(BATCH_CHUNKS);
        batches.try_for_each(|batch| self.move_batch(batch, pass))
    }

    /// Moves bytes that have waited long; all bytes if these lack room.
    fn move_oldest(&self) -> Result<(), Error> {
        let mut pass = Pass::default();
        let chunks = self.holds.lock().oldest_chunks(Lsn(u64::MAX), BATCH_CHUNKS);
        self.move_batch(&chunks, &mut pass)?;
        if pass.lack.is_some() {
            self.move_before(Lsn(u64::MAX), &mut pass)?;
        }
        if pass.moved > 0 {
            return Ok(());
        }
        pass.outcome()
    }

    /// Moves the bytes of one chunk in place and waits until they are stable there.
    pub(crate) fn move_chunk(&self, live: &Live) -> Result<(), Error> {
        let durable = self.flush_appended()?;
        let _one = live.syncing.lock();
        if let Some(syncing) = self.place_overlay(live, durable)? {
            self.sync_file(live, &syncing)?;
            self.end_sync(live, &syncing)?;
        }
        Ok(())
    }

    /// Moves the bytes of some chunks: writes them all, then syncs them all, so that the file
    /// system can put the syncs together.
    fn move_batch(&self, chunks: &[ChunkId], pass: &mut Pass) -> Result<(), Error> {
        // Only what is durable in the log may reach the files: a block that a crash tears is made
        // whole again from there.
        let durable = self.flush_appended()?;
        let mut chunks = chunks.to_vec();
        chunks.sort();
        let lives: Vec<Arc<Live>> = chunks.iter().map(|chunk| self.lives.get(*chunk)).collect();
        let mut placed = Vec::new();
        for live in &lives {
            // In the order of ids, and nobody else holds two: no two can wait for each other.
            let one = live.syncing.lock();
            match self.place_overlay(live, durable) {
                Ok(Some(syncing)) => placed.push((live, syncing, one)),
                Ok(None) => {}
                Err(error) => pass.note(Err(error))?,
            }
        }
        // From here on these copies look as if they had nothing to sync: each has to be synced,
        // whatever happens to the others.
        for (live, syncing, one) in placed {
            let ended = self.sync_file(live, &syncing);
            let ended = ended.and_then(|()| self.end_sync(live, &syncing));
            pass.moved += usize::from(ended.is_ok());
            pass.note(ended)?;
            // Whoever flushes this chunk need not wait for the rest.
            drop(one);
        }
        Ok(())
    }

    fn flush_appended(&self) -> Result<Lsn, Error> {
        let last = self.log.next_lsn().previous();
        self.flush_log(last)?;
        Ok(last)
    }

    /// Writes a chunk's overlay to the file. `None` when there is nothing of records up to
    /// `durable`, the last that is known to be durable.
    fn place_overlay(&self, live: &Live, durable: Lsn) -> Result<Option<Syncing>, Error> {
        self.locked(live, |core, state| {
            let entry = match core.settled_entry(How::Blocking, live, state) {
                Err(Stop::Failed(Error::NoSuchChunk(_))) => return Ok(None),
                other => other?,
            };
            if state.overlay.first().is_none_or(|first| first > durable) {
                return Ok(None);
            }
            // A block with old bytes may have got new ones since. If it were left out, its old
            // bytes would hold the log for as long as somebody writes to it.
            let durable = match state.overlay.is_torn_by(durable) {
                true => core.flush_appended()?,
                false => durable,
            };
            let wanted = state.overlay.range(0..BLOCKS_MAX);
            let wanted: Vec<u32> = wanted
                .filter(|(_, block)| block.last() <= durable)
                .map(|(number, _)| number)
                .collect();
            let file = core.file_or_new(live.chunk, state, &entry)?;
            let placed = core.place_blocks(live, state, &entry, &file, &wanted);
            if placed.is_err() {
                // Data may be there whose checksums are not.
                state.unsettled = true;
            }
            placed?;
            count(&core.counts.moved_blocks, wanted.len());
            state.unsynced_file |= !entry.flags.has(crate::entry::EntryFlags::HAS_FILE);
            let mut syncing = begin_sync(state);
            syncing.file = Some(file);
            syncing.placed = durable;
            Ok(Some(syncing))
        })
    }

    fn place_blocks(
        &self,
        live: &Live,
        state: &mut ChunkState,
        entry: &Entry,
        file: &ChunkFile,
        wanted: &[u32],
    ) -> Result<(), Error> {
        let mut run = Run::default();
        for number in wanted {
            if run.end() != Some(*number) || run.bytes.len() >= RUN_LEN_MAX {
                run.write(file).map_err(|e| self.io("move bytes", &e))?;
                run = Run::default();
            }
            let whole = state.overlay.get(*number).and_then(|block| {
                let (bytes, checksum) = block.whole()?;
                Some((bytes.to_vec(), checksum))
            });
            let (bytes, checksum) = match whole {
                Some(whole) => whole,
                None => self.merged_block(live, state, entry, *number)?,
            };
            run.push(*number, &bytes, checksum);
        }
        run.write(file).map_err(|e| self.io("move bytes", &e))
    }

    fn merged_block(
        &self,
        live: &Live,
        state: &mut ChunkState,
        entry: &Entry,
        number: u32,
    ) -> Result<(Vec<u8>, u32), Error> {
        let (mut bytes, sound) = match self.base_block(live.chunk, state, entry, number) {
            Ok(bytes) => (bytes, true),
            // The block stays bad, so that whoever reads it has it repaired; the log must not wait
            // for that.
            Err(Error::BadBlock { .. }) => (vec![0; BLOCK_LEN], false),
            Err(error) => return Err(error),
        };
        if let Some(block) = state.overlay.get(number) {
            block.lay_over(&mut bytes);
        }
        let checksum = if sound { crc32c(&bytes) } else { BAD_CHECKSUM };
        Ok((bytes, checksum))
    }

    /// Makes the index durable and releases what the log holds beyond that.
    pub(crate) fn write_checkpoint(&self) -> Result<(), Error> {
        let mut checkpoint = self.checkpoint.lock();
        let (changes, next, floor, dirs) = {
            let _gate = self.gate.write();
            let next = self.log.next_lsn();
            let floor = self.holds.lock().oldest().unwrap_or(next).min(next);
            let dirs = std::mem::take(&mut *self.unsynced_dirs.lock());
            (self.index.lock().take_changes(), next, floor, dirs)
        };
        let outcome = (|| {
            // The index must not know of records that a crash can still take.
            self.flush_log(next.previous())?;
            for dir in &dirs {
                self.dirs[*dir]
                    .sync_dir()
                    .map_err(|error| self.io("sync a directory", &error))?;
            }
            if changes.is_empty() {
                return Ok(());
            }
            let committed = checkpoint.commit(&changes, next);
            committed.map_err(|error| self.io("write the index", &error))
        })();
        if outcome.is_err() {
            self.index.lock().give_back(changes);
            self.unsynced_dirs.lock().extend(dirs);
            return outcome;
        }
        self.log.release(floor);
        Ok(())
    }

    /// A look at what there is to do: much at once when room is short, else what has waited long.
    fn look(&self, round: &mut Round) -> Result<(), Error> {
        // Others may have taken room meanwhile.
        self.space()?;
        let overlay_bytes = self.holds.lock().overlay_bytes();
        let log_bytes = self.log.bytes_in_use();
        let short = overlay_bytes > self.options.overlay_bytes_max / 4
            || log_bytes > self.log.bytes_bound() / 4;
        round.number += 1;
        if short {
            return self.tidy();
        }
        if round.number.is_multiple_of(CALM_ROUNDS) {
            let _one = self.keeper.pass.lock();
            let mut pass = Pass::default();
            self.move_before(round.seen, &mut pass)?;
            round.seen = self.log.next_lsn();
            if self.index.lock().is_changed() {
                self.write_checkpoint()?;
            }
            return pass.outcome();
        }
        Ok(())
    }
}

/// What a pass over many copies has come to.
#[derive(Default)]
struct Pass {
    /// Copies moved.
    moved: usize,
    /// The first lack of room, memory or descriptors.
    lack: Option<Error>,
}

impl Pass {
    /// Takes note of the outcome for one copy; an error ends the pass.
    fn note(&mut self, outcome: Result<(), Error>) -> Result<(), Error> {
        match outcome {
            Err(error) if error.is_lack() => {
                self.lack.get_or_insert(error);
                Ok(())
            }
            other => other,
        }
    }

    fn outcome(self) -> Result<(), Error> {
        self.lack.map_or(Ok(()), Err)
    }
}

/// Where the background work is.
struct Round {
    number: u32,
    /// The log's end at the last calm round.
    seen: Lsn,
    /// The last look did not do all it wanted.
    delayed: bool,
}

/// Neighbouring blocks on their way to the file.
#[derive(Default)]
struct Run {
    first: u32,
    bytes: Vec<u8>,
    checksums: Vec<u32>,
}

impl Run {
    fn end(&self) -> Option<u32> {
        let count = u32::try_from(self.checksums.len()).ok()?;
        (count > 0).then(|| self.first + count)
    }

    fn push(&mut self, number: u32, bytes: &[u8], checksum: u32) {
        if self.checksums.is_empty() {
            self.first = number;
        }
        self.bytes.extend_from_slice(bytes);
        self.checksums.push(checksum);
    }

    fn write(&self, file: &ChunkFile) -> std::io::Result<()> {
        if self.checksums.is_empty() {
            return Ok(());
        }
        file.write(&self.bytes, self.first * BLOCK)?;
        file.put_table(self.first, &self.checksums)
    }
}

/// Starts the background thread of a disk. It ends when the disk is closed or dropped.
pub(crate) fn spawn(core: &Arc<Core>, tick: Duration) -> std::io::Result<JoinHandle<()>> {
    let weak = Arc::downgrade(core);
    std::thread::Builder::new()
        .name("disk-keeper".to_owned())
        .spawn(move || run(&weak, tick))
}

fn run(weak: &Weak<Core>, tick: Duration) {
    let mut round = Round {
        number: 0,
        seen: Lsn(0),
        delayed: false,
    };
    while let Some(core) = weak.upgrade() {
        {
            let mut signal = core.keeper.signal.lock();
            if !signal.wanted && !signal.closing {
                core.keeper.wake.wait_for(&mut signal, tick);
            }
            if signal.closing {
                return;
            }
            signal.wanted = false;
        }
        if core.check().is_err() {
            return;
        }
        match core.look(&mut round) {
            Ok(()) => round.delayed = false,
            Err(Error::DiskFailed { .. } | Error::Closed) => return,
            Err(error) if round.delayed => {
                tracing::debug!(disk = core.index_number.0, %error, "background work is still delayed");
            }
            Err(error) => {
                round.delayed = true;
                tracing::warn!(disk = core.index_number.0, %error, "background work is delayed");
            }
        }
    }
}

/// Chunks whose bytes are moved together.
const BATCH_CHUNKS: usize = 32;
/// Bytes that are moved with one write.
const RUN_LEN_MAX: usize = 1 << 20;
/// Ticks between two rounds in which bytes move that nobody is short of room for.
const CALM_ROUNDS: u32 = 5;
/// Room that is waited for.
const LARGEST_RECORD_LEN: usize = 512 << 10;
/// How long a write waits for released log space before it looks again.
const LOG_WAIT: Duration = Duration::from_secs(1);
