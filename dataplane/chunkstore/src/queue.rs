//! Writes and flushes of a chunk, carried out in the order in which they were submitted.

use std::sync::Arc;

use hither_proto::ids::ChunkId;

use crate::core::{Core, Stop};
use crate::error::Error;
use crate::geometry::{LARGE_WRITE_BYTES, len32};
use crate::live::{Done, Job, Live};
use crate::pool::Refused;
use crate::write::{WriteOp, Written, check_range};

impl Core {
    /// Queues a write behind the earlier ones of its chunk. A small one that need not wait for
    /// anything is carried out at once.
    pub(crate) fn submit_write(self: &Arc<Self>, op: Box<WriteOp>, done: Done) {
        let small = len32(&op.payload) < LARGE_WRITE_BYTES;
        if let Err(error) = self.check().and_then(|()| check_range(&op)) {
            return done(Err(error));
        }
        let live = self.lives.get(op.chunk);
        {
            let mut queue = live.queue.lock();
            if queue.busy {
                if queue.waiting.len() >= self.options.jobs_max {
                    drop(queue);
                    return done(Err(Error::Busy(self.index_number)));
                }
                queue.waiting.push_back(Job::Write(op, done));
                return;
            }
            queue.busy = true;
        }
        if small {
            match self.try_write(&live, &op) {
                Ok(written) => {
                    self.answer(&live, op.sync, Ok(written), done);
                    self.next_job(&live);
                    return;
                }
                Err(Stop::Failed(error)) => {
                    done(Err(error));
                    self.next_job(&live);
                    return;
                }
                Err(Stop::Needs(_)) => {}
            }
        }
        self.start_job(&live, Job::Write(op, done));
    }

    /// Queues a flush behind the earlier writes of its chunk.
    pub(crate) fn submit_flush(self: &Arc<Self>, chunk: ChunkId, done: Done) {
        if let Err(error) = self.check() {
            return done(Err(error));
        }
        let live = self.lives.get(chunk);
        {
            let mut queue = live.queue.lock();
            if queue.busy {
                queue.waiting.push_back(Job::Flush(done));
                return;
            }
            queue.busy = true;
        }
        // The entry is read now that nothing submitted earlier is under way.
        let Some(entry) = self.entry(chunk) else {
            done(Ok(()));
            return self.next_job(&live);
        };
        let clean = live.state.try_read().is_some_and(|state| {
            state.dirty.is_empty() && !state.unsynced_file && !Self::is_unsettled(&state, &entry)
        }) && live.syncing.try_lock().is_some();
        if clean {
            let written = Written {
                lsn: entry.lsn,
                file: false,
            };
            self.answer(&live, true, Ok(written), done);
            return self.next_job(&live);
        }
        self.start_job(&live, Job::Flush(done));
    }

    /// Hands the job of a chunk whose queue is busy to a thread of the disk.
    fn start_job(self: &Arc<Self>, live: &Arc<Live>, job: Job) {
        let slot = Arc::new(parking_lot::Mutex::new(Some(job)));
        let (core, live_for_job, slot_for_job) =
            (Arc::clone(self), Arc::clone(live), Arc::clone(&slot));
        let submitted = self.pool.submit(move || {
            if let Some(job) = slot_for_job.lock().take() {
                core.run_jobs(&live_for_job, job);
            }
        });
        if let Err(refused) = submitted {
            let error = match refused {
                Refused::Full => Error::Busy(self.index_number),
                Refused::Closed => Error::Closed,
            };
            if let Some(Job::Write(_, done) | Job::Flush(done)) = slot.lock().take() {
                done(Err(error));
            }
            self.next_job(live);
        }
    }

    /// Carries out a job and those that have gathered behind it.
    fn run_jobs(self: &Arc<Self>, live: &Arc<Live>, job: Job) {
        match job {
            Job::Write(op, done) => {
                let written = self.write_blocking(live, &op);
                self.answer(live, op.sync, written, done);
            }
            Job::Flush(done) => self.flush_later(live, done),
        }
        self.next_job(live);
    }

    /// Goes on with what waits for the chunk, on a thread of the disk.
    fn next_job(self: &Arc<Self>, live: &Arc<Live>) {
        let mut queue = live.queue.lock();
        let Some(next) = queue.waiting.pop_front() else {
            queue.busy = false;
            return;
        };
        drop(queue);
        let (core, live) = (Arc::clone(self), Arc::clone(live));
        self.pool.resume(move || core.run_jobs(&live, next));
    }

    /// Answers a write at once, or when it is stable.
    fn answer(
        self: &Arc<Self>,
        live: &Arc<Live>,
        sync: bool,
        written: Result<Written, Error>,
        done: Done,
    ) {
        match written {
            Err(error) => done(Err(error)),
            Ok(_) if !sync => done(Ok(())),
            Ok(written) if written.file => self.flush_later(live, done),
            Ok(written) => {
                let core = Arc::clone(self);
                self.log.flush(written.lsn, move |flushed| {
                    done(match flushed {
                        Ok(_) => Ok(()),
                        Err(error) => Err(match core.log_error(error) {
                            Stop::Failed(error) => error,
                            Stop::Needs(_) => Error::Busy(core.index_number),
                        }),
                    });
                });
            }
        }
    }

    fn flush_later(self: &Arc<Self>, live: &Arc<Live>, done: Done) {
        let (core, live) = (Arc::clone(self), Arc::clone(live));
        self.sync_pool
            .resume(move || done(core.flush_chunk(&live).map(|_| ())));
    }
}
