//! Running a request on the thread that has received it, as far as it goes.
//!
//! What needs no server is answered without a thread switch. What has to wait becomes a task of
//! the runtime when what it waits for is there, on the thread that brings it: nobody is woken
//! merely to wait.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

use parking_lot::Mutex;
use tokio::runtime::Handle;

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runs `work` to its first wait on this thread; the rest runs on `runtime`.
pub(super) fn run(runtime: &Handle, work: Work) {
    let waiting = Arc::new(Waiting {
        work: Mutex::new(Some(work)),
        runtime: runtime.clone(),
    });
    let waker = Waker::from(Arc::clone(&waiting));
    let _inside = runtime.enter();
    // Held over the poll: who is woken by it meanwhile finds the work only afterwards.
    let mut slot = waiting.work.lock();
    if let Some(work) = slot.as_mut()
        && work
            .as_mut()
            .poll(&mut Context::from_waker(&waker))
            .is_ready()
    {
        *slot = None;
    }
}

/// Work at its first wait.
struct Waiting {
    work: Mutex<Option<Work>>,
    runtime: Handle,
}

impl Wake for Waiting {
    fn wake(self: Arc<Self>) {
        let runtime = self.runtime.clone();
        runtime.spawn(async move {
            // A second wake finds nothing.
            let work = self.work.lock().take();
            if let Some(work) = work {
                work.await;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::{mpsc, oneshot};

    use super::*;

    #[test]
    fn work_without_a_wait_is_done_at_once() {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let runtime = runtime.expect("runtime");
        let (done, mut seen) = oneshot::channel();
        run(
            runtime.handle(),
            Box::pin(async move {
                let _ = done.send(());
            }),
        );
        assert!(seen.try_recv().is_ok(), "no task of the runtime has run");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn work_goes_on_whenever_it_is_woken() {
        const ROUNDS: u64 = 2000;
        let (done, mut seen) = mpsc::unbounded_channel();
        for round in 0..ROUNDS {
            let (first, wait) = oneshot::channel::<()>();
            let (second, wait_more) = oneshot::channel::<()>();
            let done = done.clone();
            // Sometimes before the first wait, sometimes after it.
            let waking = std::thread::spawn(move || {
                let _ = first.send(());
                let _ = second.send(());
            });
            run(
                &Handle::current(),
                Box::pin(async move {
                    wait.await.expect("first");
                    tokio::task::yield_now().await;
                    wait_more.await.expect("second");
                    let _ = done.send(round);
                }),
            );
            waking.join().expect("thread");
        }
        let mut all = std::collections::BTreeSet::new();
        for _ in 0..ROUNDS {
            all.insert(seen.recv().await.expect("every round ends"));
        }
        assert_eq!(all.len() as u64, ROUNDS);
    }
}
