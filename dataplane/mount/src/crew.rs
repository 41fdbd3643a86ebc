//! Threads for work that may wait long: as many as there is work, up to a bound, so that what waits
//! holds up nothing else; idle ones end, but for the first.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Threads that do one kind of work.
pub(crate) struct Crew<W> {
    name: &'static str,
    work: Box<dyn Fn(W) + Send + Sync>,
    queue: Mutex<Queue<W>>,
    more: Condvar,
}

struct Queue<W> {
    waiting: VecDeque<W>,
    threads: usize,
    idle: usize,
    /// No more comes.
    ended: bool,
}

impl<W> std::fmt::Debug for Crew<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Crew({})", self.name)
    }
}

impl<W: Send + 'static> Crew<W> {
    /// A crew of threads of this name; its first one is there from now on.
    ///
    /// # Errors
    /// No thread can be had.
    pub(crate) fn start(
        name: &'static str,
        work: impl Fn(W) + Send + Sync + 'static,
    ) -> std::io::Result<Arc<Self>> {
        let crew = Arc::new(Self {
            name,
            work: Box::new(work),
            queue: Mutex::new(Queue {
                waiting: VecDeque::new(),
                threads: 1,
                idle: 0,
                ended: false,
            }),
            more: Condvar::new(),
        });
        crew.hire(true)?;
        Ok(crew)
    }

    fn hire(self: &Arc<Self>, stays: bool) -> std::io::Result<()> {
        let crew = Arc::clone(self);
        let thread = std::thread::Builder::new().name(self.name.into());
        thread.spawn(move || crew.serve(stays)).map(drop)
    }

    /// Has a piece of work done, by another thread than those that are at work if one can be had.
    pub(crate) fn send(self: &Arc<Self>, piece: W) {
        let mut queue = self.queue.lock();
        queue.waiting.push_back(piece);
        if queue.idle >= queue.waiting.len() || queue.threads >= THREADS_MAX {
            self.more.notify_one();
            return;
        }
        match self.hire(false) {
            Ok(()) => queue.threads += 1,
            Err(error) => tracing::warn!(%error, name = self.name, "no further thread"),
        }
    }

    /// Threads end once what was sent is done.
    pub(crate) fn end(&self) {
        self.queue.lock().ended = true;
        self.more.notify_all();
    }

    fn serve(&self, stays: bool) {
        let mut queue = self.queue.lock();
        loop {
            if let Some(piece) = queue.waiting.pop_front() {
                parking_lot::MutexGuard::unlocked(&mut queue, || (self.work)(piece));
                continue;
            }
            if queue.ended || (queue.idle >= IDLE_MAX && !stays) {
                break;
            }
            queue.idle += 1;
            let waited = self.more.wait_for(&mut queue, IDLE);
            queue.idle -= 1;
            if waited.timed_out() && queue.waiting.is_empty() && !stays {
                break;
            }
        }
        queue.threads -= 1;
    }
}

/// Threads at most.
const THREADS_MAX: usize = 1024;
/// Threads that wait for work, and how long.
const IDLE_MAX: usize = 4;
const IDLE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    /// Far more wait than there used to be threads: the last one is done all the same.
    #[test]
    fn what_waits_holds_up_nothing() {
        let (release, gate) = mpsc::channel::<()>();
        let (done, results) = mpsc::channel();
        let gate = Mutex::new(gate);
        let crew = Crew::start("test", move |piece: u32| {
            if piece < 40 {
                let _ = gate.lock().recv();
            }
            done.send(piece).unwrap();
        });
        let crew = crew.unwrap();
        (0..41).for_each(|piece| crew.send(piece));
        assert_eq!(results.recv_timeout(SOON), Ok(40));
        drop(release);
        let mut rest: Vec<u32> = (0..40)
            .map(|_| results.recv_timeout(SOON).unwrap())
            .collect();
        rest.sort_unstable();
        assert_eq!(rest, (0..40).collect::<Vec<_>>());
    }

    #[test]
    fn idle_threads_are_few_and_end() {
        let (done, results) = mpsc::channel();
        let crew = Crew::start("test", move |piece: u32| done.send(piece).unwrap()).unwrap();
        for round in 0..100 {
            crew.send(round);
            assert_eq!(results.recv_timeout(SOON), Ok(round));
        }
        assert!(crew.queue.lock().threads <= IDLE_MAX + 2);
        crew.end();
        drop(results);
        // Once no thread has it any more.
        let weak = Arc::downgrade(&crew);
        drop(crew);
        let begun = tokio::time::Instant::now();
        while weak.upgrade().is_some() {
            assert!(begun.elapsed() < SOON, "threads do not end");
            std::thread::yield_now();
        }
    }
}
