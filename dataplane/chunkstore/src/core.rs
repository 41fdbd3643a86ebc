//! One disk: what all operations share.

use std::collections::BTreeSet;
use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use hither_log::{Log, LogDir, Lsn, RecordKind};
use hither_proto::checksum::crc32c;
use hither_proto::ids::{ChunkId, DiskIndex};
use parking_lot::{Condvar, Mutex, RwLock};
use rustix::io::Errno;

use crate::buffers::Buffers;
use crate::checkpoint::Checkpoint;
use crate::entry::{Entry, EntryFlags};
use crate::error::Error;
use crate::file::{BAD_CHECKSUM, ChunkFile};
use crate::geometry::{BLOCK, BLOCK_LEN};
use crate::header::Header;
use crate::holds::{Holds, Reason};
use crate::identity::Identity;
use crate::index::Index;
use crate::live::{ChunkState, Live, Lives};
use crate::medium::Medium;
use crate::options::StoreOptions;
use crate::pool::Pool;
use crate::record::Head;
use crate::room::FreeBytes;

/// One open disk.
pub(crate) struct Core {
    pub(crate) index_number: DiskIndex,
    pub(crate) identity: Mutex<Identity>,
    pub(crate) medium: Medium,
    pub(crate) options: StoreOptions,
    pub(crate) log: Log,
    pub(crate) index: Mutex<Index>,
    pub(crate) checkpoint: Mutex<Checkpoint>,
    pub(crate) lives: Lives,
    pub(crate) holds: Mutex<Holds>,
    pub(crate) free: FreeBytes,
    /// Shared from the append of a record until the index and the holds show it; exclusive while
    /// a checkpoint takes its picture of them.
    pub(crate) gate: RwLock<()>,
    /// The directories below `chunks`, by number.
    pub(crate) dirs: Vec<Arc<dyn LogDir>>,
    /// Directories in which files were removed since they were synced.
    pub(crate) unsynced_dirs: Mutex<BTreeSet<usize>>,
    pub(crate) failed: OnceLock<String>,
    pub(crate) closed: AtomicBool,
    pub(crate) pool: Pool,
    /// Syncs wait for the device: reads must not wait behind them for a thread.
    pub(crate) sync_pool: Pool,
    pub(crate) buffers: Buffers,
    pub(crate) keeper: Keeper,
    pub(crate) counts: Counts,
    /// Whoever holds this keeps others from using the disk.
    pub(crate) _lock: Arc<dyn hither_log::LogFile>,
}

/// Wakes the background work.
#[derive(Debug, Default)]
pub(crate) struct Keeper {
    pub(crate) signal: Mutex<KeeperSignal>,
    pub(crate) wake: Condvar,
    /// Held during a pass.
    pub(crate) pass: Mutex<()>,
}

#[derive(Debug, Default)]
pub(crate) struct KeeperSignal {
    pub(crate) wanted: bool,
    pub(crate) closing: bool,
}

/// What happened on a disk since it was opened.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) reads: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) write_bytes: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) torn_blocks: AtomicU64,
    pub(crate) bad_blocks: AtomicU64,
    pub(crate) moved_blocks: AtomicU64,
}

/// Adds to a counter.
pub(crate) fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}

/// Whether an operation may wait for the disk or for a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// On a thread of the disk.
    Blocking,
    /// On the caller's thread, which must not wait.
    Inline,
}

/// Why an operation stopped before it changed anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Stop {
    Failed(Error),
    Needs(Need),
}

/// What has to be done before the operation is tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// It would have to wait: a thread of the disk must do it.
    Thread,
    /// Room in the log.
    LogRoom,
    /// One more segment of the log.
    LogGrowth,
    /// Room in memory for bytes that are in the log.
    OverlayRoom,
    /// The chunk's bytes in the log have to be moved in place.
    Move,
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Core {
    /// Fails if the disk has failed or was closed.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.failed.get() {
            None if self.closed.load(Ordering::Acquire) => Err(Error::Closed),
            None => Ok(()),
            Some(cause) => Err(Error::DiskFailed {
                disk: self.index_number,
                cause: cause.clone(),
            }),
        }
    }

    /// Takes the disk out of service for good.
    pub(crate) fn fail(&self, cause: String) -> Error {
        if self.failed.set(cause.clone()).is_ok() {
            tracing::error!(
                disk = self.index_number.0,
                path = self.medium.path,
                cause,
                "disk failed"
            );
        }
        Error::DiskFailed {
            disk: self.index_number,
            cause,
        }
    }

    /// What an I/O error means: a full disk and a lack of descriptors or memory are survived,
    /// everything else ends the disk's service.
    pub(crate) fn io(&self, action: &str, error: &io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                return Error::NoSpace(self.index_number);
            }
            io::ErrorKind::OutOfMemory => return Error::Busy(self.index_number),
            _ => {}
        }
        let lack = [Errno::MFILE, Errno::NFILE, Errno::NOMEM];
        if Errno::from_io_error(error).is_some_and(|errno| lack.contains(&errno)) {
            tracing::warn!(disk = self.index_number.0, action, %error, "out of descriptors or memory");
            return Error::Busy(self.index_number);
        }
        self.fail(format!("{action}: {error}"))
    }

    /// What an error of the log means.
    pub(crate) fn log_error(&self, error: hither_log::Error) -> Stop {
        match error {
            hither_log::Error::Busy => Stop::Needs(Need::Thread),
            hither_log::Error::Full { .. } => Stop::Needs(Need::LogRoom),
            hither_log::Error::Closed => Stop::Failed(Error::Closed),
            hither_log::Error::TooLarge { .. } => Stop::Failed(Error::BadRequest(
                "the write is larger than a segment of the log",
            )),
            other => {
                let source = std::error::Error::source(&other).map(ToString::to_string);
                let cause = source.map_or(other.to_string(), |source| format!("{other}: {source}"));
                Stop::Failed(self.fail(cause))
            }
        }
    }

    /// The entry of a chunk.
    pub(crate) fn entry(&self, chunk: ChunkId) -> Option<Entry> {
        self.index.lock().get(chunk)
    }

    /// Appends a record and makes `entry` the chunk's, in one step as a checkpoint sees it. The
    /// caller has the chunk's state locked for writing. `hold` says that the record's effect is
    /// not in place.
    pub(crate) fn record(
        &self,
        how: How,
        chunk: ChunkId,
        entry: &mut Entry,
        kind: RecordKind,
        (head, data): (&Head, &[u8]),
        hold: Option<Reason>,
    ) -> Result<Lsn, Stop> {
        self.check()?;
        let gate = match how {
            How::Blocking => Some(self.gate.read()),
            How::Inline => self.gate.try_read(),
        };
        let _gate = gate.ok_or(Stop::Needs(Need::Thread))?;
        let parts = [head.slice(), IoSlice::new(data)];
        let appended = match how {
            How::Blocking => self.log.append(kind, &parts),
            How::Inline => self.log.try_append(kind, &parts).map(|placed| placed.lsn),
        };
        let lsn = appended.map_err(|error| self.log_error(error))?;
        entry.lsn = lsn;
        self.index.lock().put(chunk, *entry);
        if let Some(reason) = hold {
            self.holds.lock().add(lsn, reason, chunk);
        }
        Ok(lsn)
    }

    /// Appends a record that says nothing but what `entry` is now.
    pub(crate) fn record_state(
        &self,
        how: How,
        chunk: ChunkId,
        entry: &mut Entry,
    ) -> Result<Lsn, Stop> {
        let head = Head::state(chunk, entry);
        self.record(how, chunk, entry, crate::record::STATE, (&head, &[]), None)
    }

    /// Waits until a record is durable.
    pub(crate) fn flush_log(&self, lsn: Lsn) -> Result<(), Error> {
        match self
            .log
            .flush_blocking(lsn)
            .map_err(|error| self.log_error(error))
        {
            Ok(_) => Ok(()),
            Err(Stop::Failed(error)) => Err(error),
            Err(Stop::Needs(_)) => Err(Error::Busy(self.index_number)),
        }
    }

    /// The directory of a chunk's file and the file's name.
    pub(crate) fn place(&self, chunk: ChunkId) -> (usize, &Arc<dyn LogDir>, String) {
        let number = usize::from(chunk.0.to_le_bytes()[0]);
        (number, &self.dirs[number], format!("{:016x}", chunk.0))
    }

    /// The file of a copy; `None` when nothing of it is in place.
    pub(crate) fn file(
        &self,
        chunk: ChunkId,
        state: &mut ChunkState,
        entry: &Entry,
    ) -> Result<Option<Arc<ChunkFile>>, Error> {
        if let Some(file) = &state.file {
            return Ok(Some(Arc::clone(file)));
        }
        if state.no_file {
            return Ok(None);
        }
        let (_, dir, name) = self.place(chunk);
        let found = ChunkFile::open(dir.as_ref(), &name).map_err(|e| self.io("open a copy", &e))?;
        let known = entry.flags.has(EntryFlags::HAS_FILE);
        let file = match found {
            None if !known => {
                state.no_file = true;
                return Ok(None);
            }
            None => self.remake(chunk, state, entry)?,
            Some(file) => {
                if !known {
                    // A run that ended before its sync may have left less of it than a table.
                    let completed = file.drop_cache().and_then(|()| file.complete());
                    completed.map_err(|e| self.io("complete a copy", &e))?;
                }
                let header = file.header().map_err(|e| self.io("read a header", &e))?;
                let whole = file.has_table().map_err(|e| self.io("read a size", &e))?;
                match header {
                    _ if !whole => self.remake(chunk, state, entry)?,
                    Some(header) if header.chunk == chunk => file,
                    Some(_) => self.remake(chunk, state, entry)?,
                    None => {
                        if known {
                            tracing::warn!(%chunk, "header of a copy is damaged and written anew");
                        }
                        let header = header_of(chunk, entry);
                        file.put_header(&header)
                            .map_err(|e| self.io("write a header", &e))?;
                        file
                    }
                }
            }
        };
        let file = Arc::new(file);
        state.file = Some(Arc::clone(&file));
        state.unsynced_file |= !known;
        Ok(Some(file))
    }

    /// The file of a copy, made when there is none.
    pub(crate) fn file_or_new(
        &self,
        chunk: ChunkId,
        state: &mut ChunkState,
        entry: &Entry,
    ) -> Result<Arc<ChunkFile>, Error> {
        if let Some(file) = self.file(chunk, state, entry)? {
            return Ok(file);
        }
        let (_, dir, name) = self.place(chunk);
        let made = ChunkFile::create(dir.as_ref(), &name, &header_of(chunk, entry));
        let file = Arc::new(made.map_err(|e| self.io("make a copy", &e))?);
        state.file = Some(Arc::clone(&file));
        state.no_file = false;
        state.unsynced_file = true;
        Ok(file)
    }

    /// A file that should be there is not: makes one in which every block is bad, so that each is
    /// repaired from another member.
    fn remake(
        &self,
        chunk: ChunkId,
        state: &mut ChunkState,
        entry: &Entry,
    ) -> Result<ChunkFile, Error> {
        tracing::error!(%chunk, disk = self.index_number.0, "the file of a copy is missing, cut short or another's");
        let (_, dir, name) = self.place(chunk);
        let table = vec![BAD_CHECKSUM; entry.length.div_ceil(BLOCK) as usize];
        let header = header_of(chunk, entry);
        let file = ChunkFile::create_with_table(dir.as_ref(), &name, &header, &table)
            .map_err(|e| self.io("make a copy", &e))?;
        // What is repaired in it must not go with its directory entry.
        state.unsynced_file = true;
        Ok(file)
    }

    /// One block as it is in place, without what lies over it.
    pub(crate) fn base_block(
        &self,
        chunk: ChunkId,
        state: &mut ChunkState,
        entry: &Entry,
        block: u32,
    ) -> Result<Vec<u8>, Error> {
        let Some(file) = self.file(chunk, state, entry)? else {
            return Ok(vec![0; BLOCK_LEN]);
        };
        let (bytes, checksum) = file.block(block).map_err(|e| self.io("read a block", &e))?;
        if crc32c(&bytes) == checksum {
            return Ok(bytes);
        }
        Err(self.bad_block(chunk, block))
    }

    /// Counts a bad block and names it.
    pub(crate) fn bad_block(&self, chunk: ChunkId, block: u32) -> Error {
        count(&self.counts.bad_blocks, 1);
        tracing::warn!(%chunk, block, disk = self.index_number.0, "block is damaged");
        Error::BadBlock { chunk, block }
    }

    /// The chunk's overlay may have become empty or another record its oldest.
    pub(crate) fn hold_overlay(&self, live: &Live, state: &mut ChunkState, bytes_before: usize) {
        let first = state.overlay.first();
        let mut holds = self.holds.lock();
        if first != state.held {
            if let Some(lsn) = state.held {
                holds.remove(lsn, Reason::Overlay, live.chunk);
            }
            if let Some(lsn) = first {
                holds.add(lsn, Reason::Overlay, live.chunk);
            }
            state.held = first;
        }
        holds.resize(bytes_before, state.overlay.bytes());
    }
}

fn header_of(chunk: ChunkId, entry: &Entry) -> Header {
    Header {
        chunk,
        group: entry.group,
        inode: entry.inode,
    }
}
