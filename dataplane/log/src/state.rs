//! What appenders, the flusher and the housekeeper share.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::sync::Arc;

use crc_fast::Digest;
use parking_lot::{Condvar, Mutex, RwLock};

use crate::dir::{LogDir, LogFile};
use crate::error::Error;
use crate::format::{Control, Header, Incarnation, LogId, Lsn, PAGE_BYTES, RecordKind};
use crate::segments::{LiveSegment, SegmentIndex, Segments};

/// Called once with the last durable record, or with the reason why there will be none.
pub(crate) type Callback = Box<dyn FnOnce(Result<Lsn, Error>) + Send>;

pub(crate) struct Shared {
    pub(crate) id: LogId,
    pub(crate) incarnation: Incarnation,
    pub(crate) buffer_bytes_max: usize,
    pub(crate) segment_bytes: u64,
    pub(crate) dir: Arc<dyn LogDir>,
    pub(crate) files: RwLock<BTreeMap<SegmentIndex, Arc<dyn LogFile>>>,
    pub(crate) control: Mutex<ControlFile>,
    pub(crate) state: Mutex<State>,
    /// The flusher waits here.
    pub(crate) flush_work: Condvar,
    /// The housekeeper waits here.
    pub(crate) house_work: Condvar,
    /// Appenders that found no room and blocking flushes wait here.
    pub(crate) progress: Condvar,
}

impl Shared {
    pub(crate) fn file(&self, index: SegmentIndex) -> Result<Arc<dyn LogFile>, Error> {
        let found = self.files.read().get(&index).cloned();
        found.ok_or_else(|| {
            Error::io(
                "open",
                &index.to_string(),
                std::io::ErrorKind::NotFound.into(),
            )
        })
    }

    /// Wakes everybody who found no room.
    pub(crate) fn room_has_changed(&self) {
        let room_waiters = std::mem::take(&mut self.state.lock().room_waiters);
        self.progress.notify_all();
        for ready in room_waiters {
            ready();
        }
    }

    /// Ends the log's service for good and answers everybody who waits.
    pub(crate) fn poison(&self, error: Error) {
        let error = error.into_poison();
        let waiters = {
            let mut state = self.state.lock();
            state.poison.get_or_insert_with(|| error.clone());
            std::mem::take(&mut state.waiters)
        };
        self.room_has_changed();
        self.flush_work.notify_all();
        self.house_work.notify_all();
        for (_, callback) in waiters {
            callback(Err(error.clone()));
        }
    }
}

/// The open control file and what it says.
#[derive(Debug)]
pub(crate) struct ControlFile {
    pub(crate) file: Arc<dyn LogFile>,
    pub(crate) written: Control,
}

impl ControlFile {
    /// Makes the next version of the control file durable, in the slot of the one before last.
    pub(crate) fn write(&mut self, mut control: Control) -> Result<(), Error> {
        control.counter = self.written.counter + 1;
        let io = |error| Error::io("write", crate::format::CONTROL_FILE, error);
        self.file
            .write_at(&control.encode(), control.offset())
            .map_err(io)?;
        self.file.sync_data().map_err(io)?;
        self.written = control;
        Ok(())
    }
}

/// A run of bytes to be written to one segment.
#[derive(Debug)]
pub(crate) struct Extent {
    pub(crate) index: SegmentIndex,
    /// A multiple of the page size.
    pub(crate) offset: u64,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) struct State {
    pub(crate) segments: Segments,
    /// The number the next record gets.
    pub(crate) next: Lsn,
    pub(crate) durable: Lsn,
    /// Flush at least up to here.
    pub(crate) flush_wanted: Lsn,
    /// What the caller has released, which may be ahead of what is durable.
    pub(crate) release_wanted: Lsn,
    /// Records not yet handed to the flusher. The last extent begins with the part of its page
    /// that was written before, so that whole pages can be written.
    extents: Vec<Extent>,
    /// Bytes of records in `extents`.
    pub(crate) gathered_bytes: usize,
    /// Emptied buffers.
    spare: Vec<Vec<u8>>,
    pub(crate) waiters: Vec<(Lsn, Callback)>,
    /// Those who want to try an append again.
    pub(crate) room_waiters: Vec<Box<dyn FnOnce() + Send>>,
    pub(crate) poison: Option<Error>,
    pub(crate) closing: bool,
}

impl State {
    /// `tail` is the written part of the last page of the current segment, if there is one.
    pub(crate) fn new(segments: Segments, last: Lsn, needed: Lsn, tail: Option<Extent>) -> Self {
        Self {
            segments,
            next: last.next(),
            durable: last,
            flush_wanted: last,
            release_wanted: needed,
            extents: tail.into_iter().collect(),
            gathered_bytes: 0,
            spare: Vec::new(),
            waiters: Vec::new(),
            room_waiters: Vec::new(),
            poison: None,
            closing: false,
        }
    }

    /// The oldest record that is needed: never past the first that is not durable, since a log
    /// that ends before its oldest needed record is damaged.
    pub(crate) fn needed(&self) -> Lsn {
        self.release_wanted.min(self.durable.next())
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        match &self.poison {
            Some(error) => Err(error.clone()),
            None if self.closing => Err(Error::Closed),
            None => Ok(()),
        }
    }

    /// Encodes a record into the buffer. Room was made for it before.
    pub(crate) fn gather(
        &mut self,
        (id, incarnation): (LogId, Incarnation),
        kind: RecordKind,
        payload: &[IoSlice<'_>],
        (payload_bytes, digest): (u32, Digest),
    ) -> (Lsn, LiveSegment, u64) {
        let record_bytes = crate::format::record_bytes(payload_bytes as usize);
        let (segment, offset) = self.segments.place(record_bytes as u64);
        let header = Header {
            lsn: self.next,
            durable: self.durable,
            incarnation,
            segment_use: segment.segment_use,
            payload_bytes,
            kind,
        };
        if self
            .extents
            .last()
            .is_none_or(|extent| extent.index != segment.index || offset == 0)
        {
            assert!(offset == 0, "a segment is begun at its start");
            let bytes = self.spare.pop().unwrap_or_default();
            self.extents.push(Extent {
                index: segment.index,
                offset: 0,
                bytes,
            });
        }
        let extent = self
            .extents
            .last_mut()
            .expect("an extent was pushed if there was none");
        assert!(
            extent.offset + extent.bytes.len() as u64 == offset,
            "the buffer has a gap before a record"
        );
        let end = extent.bytes.len() + record_bytes;
        extent.bytes.extend_from_slice(&header.encode(digest, id));
        for part in payload {
            extent.bytes.extend_from_slice(part);
        }
        extent.bytes.resize(end, 0);
        self.gathered_bytes += record_bytes;
        self.next = header.lsn.next();
        (header.lsn, segment, offset)
    }

    /// Takes what has gathered, in whole pages, and the last record in it.
    pub(crate) fn take_batch(&mut self) -> Option<(Vec<Extent>, Lsn)> {
        if self.gathered_bytes == 0 {
            return None;
        }
        let mut batch = std::mem::take(&mut self.extents);
        let page_bytes = usize::try_from(PAGE_BYTES).expect("a page fits memory");
        if let Some(last) = batch.last() {
            let whole = last.bytes.len() / page_bytes * page_bytes;
            let mut bytes = self.spare.pop().unwrap_or_default();
            bytes.extend_from_slice(&last.bytes[whole..]);
            let offset = last.offset + whole as u64;
            self.extents.push(Extent {
                index: last.index,
                offset,
                bytes,
            });
        }
        for extent in &mut batch {
            // Zeros to the end of the page: nothing of an earlier use is left behind the tail.
            extent
                .bytes
                .resize(extent.bytes.len().next_multiple_of(page_bytes), 0);
        }
        self.gathered_bytes = 0;
        Some((batch, self.next.previous()))
    }

    /// Keeps emptied buffers for later batches.
    pub(crate) fn recycle(&mut self, batch: Vec<Extent>) {
        for mut extent in batch {
            if self.spare.len() < SPARE_BUFFERS_MAX {
                extent.bytes.clear();
                self.spare.push(extent.bytes);
            }
        }
    }
}

/// One is being filled, one written; a batch that crosses into another segment takes a third.
const SPARE_BUFFERS_MAX: usize = 3;
