//! The threads of one disk.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

/// A bounded queue of jobs and the threads that carry them out.
#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    jobs_max: usize,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<PoolJob>,
    closing: bool,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Queue({} jobs)", self.jobs.len())
    }
}

type PoolJob = Box<dyn FnOnce() + Send>;

/// Why a job was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    Full,
    Closed,
}

impl Pool {
    pub(crate) fn start(name: &str, threads: usize, jobs_max: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let pool = Self {
            shared: Arc::clone(&shared),
            threads: Mutex::default(),
            jobs_max,
        };
        for _ in 0..threads.max(1) {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(move || run(&shared))?;
            pool.threads.lock().push(thread);
        }
        Ok(pool)
    }

    /// Queues a job.
    pub(crate) fn submit(&self, job: impl FnOnce() + Send + 'static) -> Result<(), Refused> {
        self.push(Box::new(job), self.jobs_max)
            .map_err(|(refused, _)| refused)
    }

    /// Queues a job that continues one which was counted when it was taken. After the end of the
    /// threads it is carried out at once.
    pub(crate) fn resume(&self, job: impl FnOnce() + Send + 'static) {
        if let Err((_, job)) = self.push(Box::new(job), usize::MAX) {
            job();
        }
    }

    fn push(&self, job: PoolJob, max: usize) -> Result<(), (Refused, PoolJob)> {
        let mut queue = self.shared.queue.lock();
        if queue.closing {
            return Err((Refused::Closed, job));
        }
        if queue.jobs.len() >= max {
            return Err((Refused::Full, job));
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.shared.work.notify_one();
        Ok(())
    }

    /// Carries out what is queued, takes nothing more, ends the threads.
    pub(crate) fn close(&self) {
        self.shared.queue.lock().closing = true;
        self.shared.work.notify_all();
        let own = std::thread::current().id();
        for thread in std::mem::take(&mut *self.threads.lock()) {
            if thread.thread().id() != own && thread.join().is_err() {
                tracing::error!("a thread of a disk has panicked");
            }
        }
    }
}

fn run(shared: &Shared) {
    loop {
        let job = {
            let mut queue = shared.queue.lock();
            loop {
                if let Some(job) = queue.jobs.pop_front() {
                    break job;
                }
                if queue.closing {
                    return;
                }
                shared.work.wait(&mut queue);
            }
        };
        job();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.close();
    }
}
