//! A disk as its owner sees it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use bytes::Bytes;
use hither_proto::ids::{ChunkId, DiskIndex, Epoch, GroupId, InodeId, LeaseId, SessionId};
use parking_lot::Mutex;

use crate::change::{SealedCopy, SettleOp, TrimOp};
use crate::core::Core;
use crate::entry::Entry;
use crate::error::Error;
use crate::fill::BaseCopy;
use crate::identity::Identity;
use crate::keeper;
use crate::marks::Doubt;
use crate::medium::Space;
use crate::pool::Refused;
use crate::read::ReadData;
use crate::scrub::Scrubbed;
use crate::write::WriteOp;

/// One open disk. Clones are the same disk.
///
/// `write` and `flush` may be called on a thread that must not wait; all other methods that do I/O
/// block, and belong on the disk's own threads: [`Disk::submit`].
#[derive(Clone)]
pub struct Disk {
    core: Arc<Core>,
    keeper: Arc<Mutex<Option<JoinHandle<()>>>>,
}

/// What happened on a disk since it was opened, and how much it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Reads answered.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes applied.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Files made stable.
    pub flushes: u64,
    /// Blocks that a crash had torn.
    pub torn_blocks: u64,
    /// Bad blocks met.
    pub bad_blocks: u64,
    /// Blocks moved from the log to their place.
    pub moved_blocks: u64,
    /// Copies.
    pub chunks: u64,
    /// Bytes of the log in use.
    pub log_bytes: u64,
    /// Bytes kept in memory because they are in the log only.
    pub overlay_bytes: u64,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Disk({})", self.core.medium.path)
    }
}

impl Disk {
    pub(crate) fn start(core: Arc<Core>) -> Result<Self, Error> {
        let keeper = match core.options.tick {
            None => None,
            Some(tick) => Some(
                keeper::spawn(&core, tick).map_err(|error| core.io("start a thread", &error))?,
            ),
        };
        Ok(Self {
            core,
            keeper: Arc::new(Mutex::new(keeper)),
        })
    }

    /// Number of the disk inside its server.
    #[must_use]
    pub fn index(&self) -> DiskIndex {
        self.core.index_number
    }

    /// Whose disk it is.
    #[must_use]
    pub fn identity(&self) -> Identity {
        *self.core.identity.lock()
    }

    /// Where the disk is.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.core.medium.path
    }

    /// Why the disk serves nothing any more; `None` while it does.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.core.failed.get().cloned()
    }

    /// Room on the disk.
    ///
    /// # Errors
    /// `DiskFailed` when the file system does not answer.
    pub fn space(&self) -> Result<Space, Error> {
        self.core.space()
    }

    /// Whether the disk, with so much room, is below its floor: no new chunk is to be placed there.
    #[must_use]
    pub fn is_full(&self, space: &Space) -> bool {
        space.free_bytes < self.core.options.floor_bytes
    }

    /// Runs a job on one of the disk's threads.
    ///
    /// # Errors
    /// `Busy` when too many jobs wait already, `Closed` at the end.
    pub fn submit(&self, job: impl FnOnce(&Self) + Send + 'static) -> Result<(), Error> {
        let disk = self.clone();
        let submitted = self.core.pool.submit(move || job(&disk));
        submitted.map_err(|refused| match refused {
            Refused::Full => Error::Busy(self.index()),
            Refused::Closed => Error::Closed,
        })
    }

    /// Reads from a copy, verifying the checksum of every block it touches.
    ///
    /// # Errors
    /// `NoSuchChunk`, `Incomplete`, `BadBlock`, `DiskFailed`, `BadRequest`.
    pub fn read(&self, chunk: ChunkId, offset: u32, length: u32) -> Result<ReadData, Error> {
        self.core.read(chunk, offset, length)
    }

    /// As [`Disk::read`] if that can be answered from memory, on any thread; `None` if not.
    #[must_use]
    pub fn try_read_cached(
        &self,
        chunk: ChunkId,
        offset: u32,
        length: u32,
    ) -> Option<Result<ReadData, Error>> {
        self.core.try_read_cached(chunk, offset, length)
    }

    /// Writes to a copy, behind all writes to it that were submitted before. Never waits; `done`
    /// is called once, on any thread, when the bytes are applied, or stable if the write says
    /// `sync`. It must be short and must not call back into the disk.
    pub fn write(&self, op: WriteOp, done: impl FnOnce(Result<(), Error>) + Send + 'static) {
        self.core.submit_write(Box::new(op), Box::new(done));
    }

    /// As [`Disk::write`], waiting for the outcome.
    ///
    /// # Errors
    /// What `done` would get.
    pub fn write_wait(&self, op: WriteOp) -> Result<(), Error> {
        wait(|done| self.core.submit_write(Box::new(op), done))
    }

    /// Makes everything stable that was submitted for these chunks before. A chunk that is not here
    /// has nothing to make stable: whoever wrote it sees by the boot id that it was lost. Never
    /// waits; `done` is called once as for [`Disk::write`], with the first error if there is one.
    pub fn flush(&self, chunks: &[ChunkId], done: impl FnOnce(Result<(), Error>) + Send + 'static) {
        let Some((last, others)) = chunks.split_last() else {
            return done(Ok(()));
        };
        let join = Arc::new(Join {
            left: AtomicUsize::new(chunks.len()),
            outcome: Mutex::new((Ok(()), Some(Box::new(done)))),
        });
        for chunk in others.iter().chain([last]) {
            let join = Arc::clone(&join);
            self.core
                .submit_flush(*chunk, Box::new(move |outcome| join.arrived(outcome)));
        }
    }

    /// As [`Disk::flush`], waiting for the outcome.
    ///
    /// # Errors
    /// What `done` would get.
    pub fn flush_wait(&self, chunks: &[ChunkId]) -> Result<(), Error> {
        wait(|done| self.flush(chunks, done))
    }

    /// Makes everything on the disk stable.
    ///
    /// # Errors
    /// `DiskFailed`.
    pub fn flush_all(&self) -> Result<(), Error> {
        self.core.flush_all()
    }

    /// Refuses lower leases from now on, durably, and tells the state of the copy. Under a lease
    /// already sealed it tells the state again.
    ///
    /// # Errors
    /// `StaleLease`, `WrongGroup`, `Deleted`, `DiskFailed`.
    pub fn seal(
        &self,
        chunk: ChunkId,
        group: GroupId,
        lease: LeaseId,
    ) -> Result<SealedCopy, Error> {
        self.core.seal(chunk, group, lease)
    }

    /// Drops bytes of a copy; stable when this returns.
    ///
    /// # Errors
    /// As [`Disk::seal`].
    pub fn trim(&self, op: &TrimOp) -> Result<(), Error> {
        self.core.trim(op)
    }

    /// Makes blocks of a copy equal to another's and cuts it; stable when this returns.
    ///
    /// # Errors
    /// As [`Disk::seal`], and `NoSpace`.
    pub fn settle_blocks(&self, op: &SettleOp) -> Result<(), Error> {
        self.core.settle_blocks(op)
    }

    /// Overwrites a bad block with another member's bytes (zeros behind what is given). `false`
    /// when the block is not bad any more.
    ///
    /// # Errors
    /// `NoSuchChunk`, `NoSpace`, `DiskFailed`.
    pub fn repair_block(&self, chunk: ChunkId, block: u32, bytes: &Bytes) -> Result<bool, Error> {
        self.core.repair_block(chunk, block, bytes)
    }

    /// Clears open marks of this lease or a lower one; durable when this returns. Returns the
    /// chunks whose mark stays, since their copies are in doubt and were not sealed.
    ///
    /// # Errors
    /// `DiskFailed`, `NoSpace`.
    pub fn close_marks(&self, chunks: &[ChunkId], lease: LeaseId) -> Result<Vec<ChunkId>, Error> {
        self.core.close_marks(chunks, lease)
    }

    /// Notes that other members may have applied a write that this one has not, or the other way
    /// round: the open mark of the copy, made if need be, ends only with a seal. Durable when this
    /// returns, if the log has any room.
    ///
    /// # Errors
    /// `DiskFailed`.
    pub fn doubt(&self, doubt: &Doubt) -> Result<(), Error> {
        self.core.doubt(doubt)
    }

    /// Frees chunks; durable when this returns. Their ids are refused from then on.
    ///
    /// # Errors
    /// `DiskFailed`.
    pub fn delete(&self, chunks: &[ChunkId]) -> Result<(), Error> {
        self.core.delete(chunks)
    }

    /// Marks a copy as partial, made if need be. What chain writes of this epoch have put there is
    /// kept, what came under an older one counts as not there.
    ///
    /// # Errors
    /// `Deleted`, `WrongGroup`, `NoSpace`, `DiskFailed`, `BadRequest` when the copy is being filled
    /// in a later epoch.
    pub fn fill_begin(
        &self,
        chunk: ChunkId,
        group: GroupId,
        inode: InodeId,
        epoch: Epoch,
    ) -> Result<(), Error> {
        self.core.fill_begin(chunk, group, inode, epoch, false)
    }

    /// As [`Disk::fill_begin`], and nothing that is there is kept: the other member's copy is final.
    ///
    /// # Errors
    /// As [`Disk::fill_begin`].
    pub fn refill_begin(
        &self,
        chunk: ChunkId,
        group: GroupId,
        inode: InodeId,
        epoch: Epoch,
    ) -> Result<(), Error> {
        self.core.fill_begin(chunk, group, inode, epoch, true)
    }

    /// Drops a copy that no in-sync member has. Unlike a deleted one it may be written again, under
    /// a lease that is no lower than the highest it has seen.
    ///
    /// # Errors
    /// `DiskFailed`.
    pub fn discard(&self, chunk: ChunkId) -> Result<(), Error> {
        self.core.discard(chunk)
    }

    /// Copies of a group that are partial.
    #[must_use]
    pub fn partial(&self, group: GroupId) -> Vec<ChunkId> {
        self.core.index.lock().partial(group)
    }

    /// Whether a range of a partial copy is here already: its blocks have these checksums (of
    /// pieces cut at the 4 KiB boundaries of the chunk), and no chain write of this epoch was there.
    ///
    /// # Errors
    /// `NoSuchChunk`, `DiskFailed`, `BadRequest` for a copy that is not being filled in this epoch.
    pub fn has_base(
        &self,
        chunk: ChunkId,
        range: Range<u32>,
        checksums: &[u32],
        epoch: Epoch,
    ) -> Result<bool, Error> {
        self.core.has_base(chunk, range, checksums, epoch)
    }

    /// Puts bytes of another member's copy where no chain write has been.
    ///
    /// # Errors
    /// `NoSuchChunk`, `NoSpace`, `DiskFailed`, `BadRequest` for a copy that is not being filled in
    /// this epoch.
    pub fn fill_base(
        &self,
        chunk: ChunkId,
        offset: u32,
        bytes: &Bytes,
        epoch: Epoch,
    ) -> Result<(), Error> {
        self.core.fill_base(chunk, offset, bytes, epoch)
    }

    /// Ends the filling of a copy. Not stable until it is flushed.
    ///
    /// # Errors
    /// As [`Disk::fill_base`].
    pub fn fill_end(&self, chunk: ChunkId, base: &BaseCopy, epoch: Epoch) -> Result<(), Error> {
        self.core.fill_end(chunk, base, epoch)
    }

    /// Notes that a copy equals that of an in-sync member in this epoch, unless it changed since
    /// `seen` was read: `false` then.
    #[must_use]
    pub fn mark_verified(&self, chunk: ChunkId, seen: &Entry, epoch: Epoch) -> bool {
        self.core.mark_verified(chunk, seen, epoch)
    }

    /// Verifies the blocks of a range of a copy as the device has them, not as memory has.
    ///
    /// # Errors
    /// `BadRequest`, `DiskFailed`.
    pub fn scrub(&self, chunk: ChunkId, offset: u32, length: u32) -> Result<Scrubbed, Error> {
        self.core.scrub(chunk, offset, length)
    }

    /// The first copy from `chunk` on.
    #[must_use]
    pub fn next_copy(&self, chunk: ChunkId) -> Option<(ChunkId, Entry)> {
        self.core.next_copy(chunk)
    }

    /// Bytes of all copies.
    #[must_use]
    pub fn copy_bytes(&self) -> u64 {
        self.core.index.lock().copy_bytes()
    }

    /// Whether a copy has to be compared with another member's after a crash: blocks of it were taken
    /// as they were, or may yet be.
    #[must_use]
    pub fn may_be_torn(&self, chunk: ChunkId, entry: &Entry) -> bool {
        let unsettled = || {
            let live = self.core.lives.find(chunk);
            live.is_some_and(|live| Core::is_unsettled(&live.state.read(), entry))
        };
        entry.is_torn() || unsettled()
    }

    /// What is known of a copy.
    #[must_use]
    pub fn entry(&self, chunk: ChunkId) -> Option<Entry> {
        self.core.entry(chunk).filter(Entry::exists)
    }

    /// Copies of a group from chunk `from` on in order, at most `limit`, and whether there are more.
    #[must_use]
    pub fn list(
        &self,
        group: GroupId,
        from: ChunkId,
        limit: usize,
    ) -> (Vec<(ChunkId, Entry)>, bool) {
        self.core.index.lock().list(group, from, limit)
    }

    /// Groups with copies here.
    #[must_use]
    pub fn groups(&self) -> Vec<GroupId> {
        self.core.index.lock().groups()
    }

    /// Copies with an open mark, of one session or of all.
    #[must_use]
    pub fn open_chunks(&self, session: Option<SessionId>) -> Vec<(ChunkId, Entry)> {
        self.core.index.lock().open(session)
    }

    /// Settles the copies that the last run left in the middle of something. They are settled at
    /// their first use too; this is for the time after the start.
    ///
    /// # Errors
    /// `DiskFailed`.
    pub fn settle_after_start(&self) -> Result<(), Error> {
        let suspects = self.core.index.lock().suspects();
        for chunk in suspects {
            let live = self.core.lives.get(chunk);
            let settled = self.core.with_room(&live, |core, state| {
                core.settled_entry(crate::core::How::Blocking, &live, state)
            });
            match settled {
                Ok(_) | Err(Error::NoSuchChunk(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Moves everything in place that is in the log, makes the index durable and releases the log.
    ///
    /// # Errors
    /// `NoSpace`, `DiskFailed`.
    pub fn tidy(&self) -> Result<(), Error> {
        self.core.tidy()
    }

    /// Makes the index durable and releases of the log what nothing needs any more.
    ///
    /// # Errors
    /// `NoSpace`, `DiskFailed`.
    pub fn checkpoint(&self) -> Result<(), Error> {
        self.core.write_checkpoint()
    }

    /// What happened on the disk and how much it has.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let counts = &self.core.counts;
        Counters {
            reads: counts.reads.load(Ordering::Relaxed),
            read_bytes: counts.read_bytes.load(Ordering::Relaxed),
            writes: counts.writes.load(Ordering::Relaxed),
            write_bytes: counts.write_bytes.load(Ordering::Relaxed),
            flushes: counts.flushes.load(Ordering::Relaxed),
            torn_blocks: counts.torn_blocks.load(Ordering::Relaxed),
            bad_blocks: counts.bad_blocks.load(Ordering::Relaxed),
            moved_blocks: counts.moved_blocks.load(Ordering::Relaxed),
            chunks: self.core.index.lock().len() as u64,
            log_bytes: self.core.log.bytes_in_use(),
            overlay_bytes: self.core.holds.lock().overlay_bytes() as u64,
        }
    }

    pub(crate) fn store_identity(&self, identity: Identity) -> Result<(), Error> {
        let stored = identity.store(self.core.medium.dir.as_ref());
        stored.map_err(|error| self.core.io("write the identity", &error))?;
        *self.core.identity.lock() = identity;
        Ok(())
    }

    /// Carries out what was submitted, makes everything stable and ends the disk's threads. What
    /// comes later is refused. The directory stays locked until the last clone is dropped.
    ///
    /// # Errors
    /// `DiskFailed`: what was not answered as stable may be lost.
    pub fn close(&self) -> Result<(), Error> {
        self.core.pool.close();
        self.core.sync_pool.close();
        {
            let mut signal = self.core.keeper.signal.lock();
            signal.closing = true;
            self.core.keeper.wake.notify_all();
        }
        if let Some(thread) = self.keeper.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the background thread of a disk has panicked");
        }
        self.core.check()?;
        let outcome = self
            .core
            .flush_all()
            .and_then(|()| self.core.write_checkpoint());
        self.core.closed.store(true, Ordering::Release);
        self.core.log.close();
        outcome
    }
}

type JoinDone = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// Waits for several outcomes.
struct Join {
    left: AtomicUsize,
    outcome: Mutex<(Result<(), Error>, Option<JoinDone>)>,
}

impl Join {
    fn arrived(&self, outcome: Result<(), Error>) {
        if outcome.is_err() {
            let mut kept = self.outcome.lock();
            if kept.0.is_ok() {
                kept.0 = outcome;
            }
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let (outcome, done) = {
                let mut kept = self.outcome.lock();
                (kept.0.clone(), kept.1.take())
            };
            if let Some(done) = done {
                done(outcome);
            }
        }
    }
}

fn wait(start: impl FnOnce(Box<dyn FnOnce(Result<(), Error>) + Send>)) -> Result<(), Error> {
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    start(Box::new(move |outcome| {
        // Nobody waits any more only if this thread is gone.
        let _ = sender.send(outcome);
    }));
    receiver.recv().unwrap_or(Err(Error::Closed))
}
