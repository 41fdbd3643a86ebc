//! The log as its owner sees it.

use std::fmt;
use std::io::IoSlice;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

use crate::dir::LogDir;
use crate::error::Error;
use crate::format::{Control, LogId, Lsn, RECORD_HEADER_BYTES, RecordKind, payload_digest};
use crate::options::{LogOptions, payload_bytes_max};
use crate::recover::{Recovered, recover};
use crate::segments::{Room, SegmentIndex, Segments};
use crate::state::{Shared, State};
use crate::{flusher, housekeeper};

/// An open log. All methods may be called from any thread.
///
/// Dropping it flushes what was appended, answers everybody who waits, and ends its two threads;
/// it may be dropped inside a flush callback.
pub struct Log {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Where a record's payload is inside the log, for [`Log::read`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub(crate) index: SegmentIndex,
    pub(crate) offset: u64,
}

/// The number and the place that an append gave to its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Appended {
    /// Number of the record.
    pub lsn: Lsn,
    /// Where its payload is going to be.
    pub place: Place,
}

/// How much of a log is used and how much there is, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogSpace {
    /// As [`Log::bytes_in_use`].
    pub in_use_bytes: u64,
    /// Bytes of all segments that exist.
    pub made_bytes: u64,
    /// As [`Log::bytes_bound`].
    pub bound_bytes: u64,
}

impl Log {
    /// Opens the log in `dir`, creating it when the directory has none, and finds its records.
    ///
    /// The log ends before the first record that is not intact; if that record is known to have
    /// been flushed, the log is [`Error::Corrupt`]. Everything that [`Recovered`] yields is
    /// durable. Fails with [`Error::Locked`] while another `Log` has the directory.
    pub fn open(dir: Arc<dyn LogDir>, options: &LogOptions) -> Result<(Self, Recovered), Error> {
        options.check()?;
        let found = recover(dir.as_ref(), options)?;
        let segment_bytes = found.control.written.segment_bytes;
        let needed = found.control.written.needed;
        let segments = Segments::new(
            segment_bytes,
            options.segments_max,
            found.live,
            found.position,
            found.free,
        );
        let shared = Arc::new(Shared {
            id: options.id,
            incarnation: found.control.written.incarnation,
            buffer_bytes_max: options.buffer_bytes_max,
            segment_bytes,
            dir,
            files: RwLock::new(found.files),
            control: Mutex::new(found.control),
            state: Mutex::new(State::new(segments, found.last, needed, found.tail)),
            flush_work: Condvar::new(),
            house_work: Condvar::new(),
            progress: Condvar::new(),
        });
        let log = Self {
            shared,
            threads: Mutex::default(),
        };
        log.threads.lock().push(flusher::spawn(&log.shared)?);
        log.threads.lock().push(housekeeper::spawn(&log.shared)?);
        Ok((log, found.records))
    }

    /// Orders a record after all earlier ones and copies it into memory. It is durable once
    /// [`Log::flush`] says so.
    ///
    /// Waits while the buffer is full or a segment is being made ready, which takes no longer than
    /// a flush or the writing of one segment. [`Error::Full`] asks for a [`Log::release`]; the
    /// record was not appended then.
    pub fn append(&self, kind: RecordKind, payload: &[IoSlice<'_>]) -> Result<Lsn, Error> {
        Ok(self.append_or(Self::wait, kind, payload)?.lsn)
    }

    /// As [`Log::append`], and says where the payload will be.
    pub fn append_placed(
        &self,
        kind: RecordKind,
        payload: &[IoSlice<'_>],
    ) -> Result<Appended, Error> {
        self.append_or(Self::wait, kind, payload)
    }

    /// As [`Log::append_placed`], but fails with [`Error::Busy`] where that would wait. For
    /// callers on a thread that must not block.
    pub fn try_append(&self, kind: RecordKind, payload: &[IoSlice<'_>]) -> Result<Appended, Error> {
        self.append_or(|_, _| Err(Error::Busy), kind, payload)
    }

    /// Calls `ready` once when a record with a payload of `payload_bytes` may be worth another
    /// [`Log::try_append`] after [`Error::Busy`]: at once if there is room now or never will be,
    /// else after the next flush or change of segments.
    ///
    /// `ready` runs under the rules of [`Log::flush`].
    pub fn when_room(&self, payload_bytes: usize, ready: impl FnOnce() + Send + 'static) {
        // One that no segment can hold must not begin segments: each would stay without a record,
        // and recovery goes from one segment to the next by counting them.
        if payload_bytes <= self.payload_bytes_max() {
            let mut state = self.shared.state.lock();
            let record_bytes = crate::format::record_bytes(payload_bytes);
            if let Ok(false) = self.make_room(&mut state, record_bytes) {
                state.room_waiters.push(Box::new(ready));
                return;
            }
        }
        ready();
    }

    /// Calls `done` once with the last durable record when the record `lsn` is durable, or with
    /// the reason why it never will be.
    ///
    /// `done` runs on the flusher's thread, or at once on this one if the answer is known; it
    /// must be short, must not wait for the log, and must not need a lock that the caller holds.
    pub fn flush(&self, lsn: Lsn, done: impl FnOnce(Result<Lsn, Error>) + Send + 'static) {
        let answer = {
            let mut state = self.shared.state.lock();
            if lsn <= state.durable {
                Ok(state.durable)
            } else if let Err(error) = self.want_flush(&mut state, lsn) {
                Err(error)
            } else {
                state.waiters.push((lsn, Box::new(done)));
                return;
            }
        };
        done(answer);
    }

    /// Waits until the record `lsn` is durable; returns the last durable record.
    pub fn flush_blocking(&self, lsn: Lsn) -> Result<Lsn, Error> {
        let mut state = self.shared.state.lock();
        while lsn > state.durable {
            self.want_flush(&mut state, lsn)?;
            self.shared.progress.wait(&mut state);
        }
        Ok(state.durable)
    }

    /// Says that no record before `lsn` is needed again: the caller has made their effects
    /// durable elsewhere. Their space is reused; a later open may still yield some of them.
    pub fn release(&self, lsn: Lsn) {
        let mut state = self.shared.state.lock();
        state.release_wanted = state.release_wanted.max(lsn);
        let (needed, durable) = (state.needed(), state.durable);
        if state.segments.reclaim(needed, durable) {
            self.shared.house_work.notify_one();
        }
    }

    /// Reads from the payload of a durable record that was not released, `skip_bytes` after its
    /// start. The log does not know which records those are: reading another gives other bytes.
    pub fn read(&self, place: Place, skip_bytes: u64, buffer: &mut [u8]) -> Result<(), Error> {
        let file = self.shared.file(place.index)?;
        file.read_at(buffer, place.offset + skip_bytes)
            .map_err(|error| Error::io("read", &place.index.to_string(), error))
    }

    /// Flushes what was appended, answers everybody who waits, and ends the log's threads: when
    /// this returns, no callback runs or will run. Everything but reading fails from then on. The
    /// directory stays locked until the log is dropped, which closes it too.
    pub fn close(&self) {
        self.shared.state.lock().closing = true;
        self.shared.flush_work.notify_all();
        self.shared.house_work.notify_all();
        self.shared.room_has_changed();
        let threads = std::mem::take(&mut *self.threads.lock());
        if threads.is_empty() {
            return;
        }
        let own = std::thread::current().id();
        for thread in threads {
            // In a flush callback this is the flusher itself: it ends after the callback.
            if thread.thread().id() != own && thread.join().is_err() {
                tracing::error!("a thread of the log has panicked");
            }
        }
        let state = self.shared.state.lock();
        if state.poison.is_some() {
            return;
        }
        let (needed, durable) = (state.needed(), state.durable);
        drop(state);
        let mut control = self.shared.control.lock();
        let last = Control {
            needed,
            durable,
            ..control.written
        };
        if let Err(error) = control.write(last) {
            tracing::warn!(%error, "log closed without a last note in its control file");
        }
    }

    /// The number that the next record gets.
    #[must_use]
    pub fn next_lsn(&self) -> Lsn {
        self.shared.state.lock().next
    }

    /// The last durable record; 0 if there is none.
    #[must_use]
    pub fn durable_lsn(&self) -> Lsn {
        self.shared.state.lock().durable
    }

    /// Bytes of segments that hold records which are still needed or share a segment with such.
    #[must_use]
    pub fn bytes_in_use(&self) -> u64 {
        self.shared.state.lock().segments.bytes_in_use()
    }

    /// What [`Log::bytes_in_use`] cannot exceed. Sinks when the disk has no room to grow.
    #[must_use]
    pub fn bytes_bound(&self) -> u64 {
        self.shared.state.lock().segments.bytes_bound()
    }

    /// How much is used and how much there is.
    #[must_use]
    pub fn space(&self) -> LogSpace {
        let segments = &self.shared.state.lock().segments;
        LogSpace {
            in_use_bytes: segments.bytes_in_use(),
            made_bytes: segments.bytes_made(),
            bound_bytes: segments.bytes_bound(),
        }
    }

    /// Has one more segment made if none is free and the bound allows it, and waits for that. It
    /// may fail: [`LogSpace::bound_bytes`] has sunk then.
    pub fn grow(&self) {
        let mut state = self.shared.state.lock();
        if !state.segments.want_spare() {
            return;
        }
        self.shared.house_work.notify_one();
        while state.segments.to_create().is_some() && state.check().is_ok() {
            self.shared.progress.wait(&mut state);
        }
    }

    /// The largest payload of a record.
    #[must_use]
    pub fn payload_bytes_max(&self) -> usize {
        payload_bytes_max(self.shared.segment_bytes)
    }

    /// Whose log it is.
    #[must_use]
    pub fn id(&self) -> LogId {
        self.shared.id
    }

    fn append_or(
        &self,
        on_wait: impl Fn(&Self, &mut MutexGuard<'_, State>) -> Result<(), Error>,
        kind: RecordKind,
        payload: &[IoSlice<'_>],
    ) -> Result<Appended, Error> {
        let bytes = payload.iter().map(|part| part.len()).sum::<usize>();
        let bytes_max = self.payload_bytes_max();
        let payload_bytes = match u32::try_from(bytes) {
            Ok(payload_bytes) if bytes <= bytes_max => payload_bytes,
            _ => return Err(Error::TooLarge { bytes, bytes_max }),
        };
        let digest = payload_digest(payload);
        let record_bytes = crate::format::record_bytes(bytes);
        let shared = &*self.shared;
        let mut state = shared.state.lock();
        while !self.make_room(&mut state, record_bytes)? {
            on_wait(self, &mut state)?;
        }
        let owner = (shared.id, shared.incarnation);
        let (lsn, segment, offset) = state.gather(owner, kind, payload, (payload_bytes, digest));
        if state.gathered_bytes >= shared.buffer_bytes_max / 2 {
            shared.flush_work.notify_one();
        }
        let offset = offset + RECORD_HEADER_BYTES as u64;
        Ok(Appended {
            lsn,
            place: Place {
                index: segment.index,
                offset,
            },
        })
    }

    /// Whether a record of this size can be placed now; asks for what is missing if not.
    fn make_room(&self, state: &mut State, record_bytes: usize) -> Result<bool, Error> {
        state.check()?;
        let (next, needed, gathered) = (state.next, state.needed(), state.gathered_bytes);
        if gathered > 0 && gathered + record_bytes > self.shared.buffer_bytes_max {
            self.want_flush(state, next.previous())?;
            return Ok(false);
        }
        match state.segments.make_room(record_bytes as u64, next, needed) {
            Room::Here => return Ok(true),
            Room::Rolled => {
                self.shared.house_work.notify_one();
                return Ok(true);
            }
            Room::Preparing => {
                self.shared.house_work.notify_one();
            }
            Room::AfterFlush => self.want_flush(state, next.previous())?,
            Room::None => {
                return Err(Error::Full {
                    bytes_bound: state.segments.bytes_bound(),
                });
            }
        }
        Ok(false)
    }

    fn wait(&self, state: &mut MutexGuard<'_, State>) -> Result<(), Error> {
        self.shared.progress.wait(state);
        Ok(())
    }

    fn want_flush(&self, state: &mut State, lsn: Lsn) -> Result<(), Error> {
        state.check()?;
        if lsn >= state.next {
            return Err(Error::NotAppended { lsn });
        }
        if lsn > state.flush_wanted {
            state.flush_wanted = lsn;
            self.shared.flush_work.notify_one();
        }
        Ok(())
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.state.lock();
        f.debug_struct("Log")
            .field("id", &self.shared.id)
            .field("next", &state.next)
            .field("durable", &state.durable)
            .field("segments", &state.segments)
            .finish_non_exhaustive()
    }
}
