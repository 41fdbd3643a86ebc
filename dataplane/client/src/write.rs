//! Writing: into memory under an exclusive lease, then along the chain in large frames.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use hither_proto::clock::WallNanos;
use hither_proto::ids::CHUNK_SIZE;
use hither_proto::status::Errno;
use tokio::time::Instant;

use crate::client::Inner;
use crate::error::FsError;
use crate::file::{Data, File, Lease, OpenFile};
use crate::mapped::locked_page;

/// Data that is dirty now.
struct Written {
    offset: u64,
    /// A flusher is to be started.
    kick: bool,
}

/// What became of data that was to be written.
enum Put {
    Done(Written),
    LeaseGone,
    NoRoom,
    Refused(FsError),
}

impl Inner {
    /// Writes at `offset`, or at the end for a descriptor that appends; where it was written.
    pub(crate) async fn write(
        self: &Arc<Self>,
        open: &OpenFile,
        offset: u64,
        data: Bytes,
    ) -> Result<u64, FsError> {
        let file = &open.file;
        let deadline = self.deadline();
        let page = locked_page(offset, data.len()).filter(|_| !open.append);
        let writing = file.write_begins(page);
        self.wait_for_memory(file, data.len(), deadline).await?;
        let mut asked = false;
        let written = loop {
            let held = self.hold(file, true, deadline).await?;
            match self.put_dirty(open, offset, data.clone()) {
                Put::Done(written) => break written,
                Put::Refused(error) => return Err(error),
                Put::LeaseGone => {}
                // Space may have been freed since the lease was given.
                Put::NoRoom if !asked => {
                    drop(held);
                    asked = true;
                    self.ask_for_room(file).await?;
                }
                Put::NoRoom => return Err(Errno::EDQUOT.into()),
            }
        };
        if written.kick {
            self.spawn_flusher(file);
        }
        if open.sync {
            self.fsync(open).await?;
        }
        drop(writing);
        Ok(written.offset)
    }

    /// Makes the file at least so long; what is new reads as zeros.
    pub(crate) async fn extend(&self, open: &OpenFile, size: u64) -> Result<(), FsError> {
        let file = &open.file;
        let deadline = self.deadline();
        if size > FILE_BYTES_MAX {
            return Err(Errno::EFBIG.into());
        }
        let mut asked = false;
        loop {
            let held = self.hold(file, true, deadline).await?;
            {
                let mut data = file.data.lock();
                if size <= data.size {
                    return Ok(());
                }
                if size <= data.size_max {
                    data.size = size;
                    data.mtime = WallNanos::now().0;
                    data.unreported_size = true;
                    data.generation += 1;
                    return Ok(());
                }
            }
            drop(held);
            if asked {
                return Err(Errno::EDQUOT.into());
            }
            asked = true;
            self.ask_for_room(file).await?;
        }
    }

    /// Puts data among what is dirty, if the file's exclusive lease is held.
    fn put_dirty(&self, open: &OpenFile, offset: u64, data: Bytes) -> Put {
        let mut state = open.file.data.lock();
        if !matches!(state.lease, Lease::Exclusive(_)) {
            return Put::LeaseGone;
        }
        let offset = if open.append { state.size } else { offset };
        let end = offset.saturating_add(data.len() as u64);
        if end > FILE_BYTES_MAX {
            return Put::Refused(Errno::EFBIG.into());
        }
        if end > state.size && end > state.size_max {
            return Put::NoRoom;
        }
        let kick = self.make_dirty(&mut state, offset, data);
        Put::Done(Written { offset, kick })
    }

    /// Puts data among what is dirty; true: the caller starts a flusher.
    pub(crate) fn make_dirty(&self, state: &mut Data, offset: u64, data: Bytes) -> bool {
        if data.is_empty() {
            return false;
        }
        let end = offset.saturating_add(data.len() as u64);
        let before = state.dirty.bytes();
        state.dirty.insert(offset, data);
        let after = state.dirty.bytes();
        self.dirty_bytes.add(after.saturating_sub(before));
        state.size = state.size.max(end);
        state.mtime = WallNanos::now().0;
        state.unreported_size = true;
        state.generation += 1;
        let kick = after >= FRAME_BYTES && !state.flusher_runs;
        state.flusher_runs |= kick;
        kick
    }

    /// Writers wait while too much is not on the servers yet.
    pub(crate) async fn wait_for_memory(
        self: &Arc<Self>,
        file: &Arc<File>,
        bytes: usize,
        deadline: Instant,
    ) -> Result<(), FsError> {
        loop {
            let less = self.dirty_less.notified();
            let less_elsewhere = self.account.less();
            tokio::pin!(less, less_elsewhere);
            less.as_mut().enable();
            less_elsewhere.as_mut().enable();
            let dirty = self.dirty_bytes.get();
            let unsynced = self.unsynced_bytes.get();
            let short = !self.account.takes(bytes);
            let much = dirty != 0 && dirty + bytes > self.config.dirty_bytes_max;
            let unstable = unsynced > self.config.unsynced_bytes_max;
            if !much && !unstable && !short {
                return Ok(());
            }
            if much || short {
                self.flush_all_soon(file);
            }
            if unstable || short && unsynced > 0 {
                self.make_stable_soon();
            }
            let either = futures::future::select(less, less_elsewhere);
            if tokio::time::timeout_at(deadline, either).await.is_err() {
                return Err(crate::session::timed_out("a chunkserver"));
            }
        }
    }

    fn flush_all_soon(self: &Arc<Self>, file: &Arc<File>) {
        let mut files = self.files_with_dirty_data();
        files.push(Arc::clone(file));
        for file in files {
            let start = {
                let mut data = file.data.lock();
                let start = !data.dirty.is_empty() && !data.flusher_runs;
                data.flusher_runs |= start;
                start
            };
            if start {
                self.spawn_flusher(&file);
            }
        }
    }

    /// Starts to make everything stable, if nobody is at it.
    fn make_stable_soon(self: &Arc<Self>) {
        if self.stabilising.swap(true, Ordering::AcqRel) {
            return;
        }
        let inner = Arc::clone(self);
        tokio::spawn(async move {
            for file in inner.all_files() {
                if file.data.lock().unsynced.is_empty() {
                    continue;
                }
                if let Err(error) = inner.flush_stable(&file).await {
                    tracing::debug!(ino = %file.ino, %error, "data is not stable yet");
                }
            }
            inner.stabilising.store(false, Ordering::Release);
            inner.dirty_less.notify_waiters();
        });
    }

    pub(crate) fn spawn_flusher(self: &Arc<Self>, file: &Arc<File>) {
        let (inner, file) = (Arc::clone(self), Arc::clone(file));
        tokio::spawn(async move {
            if let Err(error) = inner.flush_dirty(&file, false).await {
                tracing::debug!(ino = %file.ino, %error, "kept for the next fsync or close");
            }
            file.data.lock().flusher_runs = false;
        });
    }
}

/// Largest file: 2^32 chunks.
const FILE_BYTES_MAX: u64 = CHUNK_SIZE << 32;
/// Bytes in one frame at most.
pub(crate) const FRAME_BYTES: usize = 1 << 20;
