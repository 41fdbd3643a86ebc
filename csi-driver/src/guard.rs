//! One request for a volume at a time, each within its budget.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::error::Refusal;

/// Volumes with a request under way.
#[derive(Debug, Clone, Default)]
pub struct Guards {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Who has a volume lightly is told here to let go.
    busy: Mutex<BTreeMap<String, Option<Arc<Notify>>>>,
    /// A volume was given back.
    free: Notify,
}

/// A volume that is taken; given back when dropped.
#[derive(Debug)]
pub struct Held {
    shared: Arc<Shared>,
    name: String,
}

impl Guards {
    /// Takes a volume for a request. Who has it lightly lets go first.
    ///
    /// # Errors
    /// `Busy` while another request has it.
    pub async fn take(&self, name: &str) -> Result<Held, Refusal> {
        loop {
            let freed = self.shared.free.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            {
                let mut busy = self.shared.busy.lock();
                match busy.get(name) {
                    None => {
                        busy.insert(name.to_owned(), None);
                        return Ok(self.held(name));
                    }
                    Some(Some(light)) => light.notify_one(),
                    Some(None) => {
                        return Err(Refusal::Busy(format!(
                            "another request for {name} is under way: repeat"
                        )));
                    }
                }
            }
            freed.await;
        }
    }

    /// Does work on a volume that nobody has, until it is done or a request wants the volume: then
    /// it is dropped where it waits, as if the process had been killed there.
    pub async fn lightly<T>(&self, name: &str, work: impl Future<Output = T>) -> Option<T> {
        let wanted = Arc::new(Notify::new());
        {
            let mut busy = self.shared.busy.lock();
            if busy.contains_key(name) {
                return None;
            }
            busy.insert(name.to_owned(), Some(Arc::clone(&wanted)));
        }
        let _held = self.held(name);
        tokio::select! {
            done = work => Some(done),
            () = wanted.notified() => None,
        }
    }

    fn held(&self, name: &str) -> Held {
        Held {
            shared: Arc::clone(&self.shared),
            name: name.to_owned(),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shared.busy.lock().remove(&self.name);
        self.shared.free.notify_waiters();
    }
}

/// Runs the work of a request to its end, whatever becomes of the caller, and answers within the
/// budget. What it holds is held until it has ended.
///
/// # Errors
/// What the work says; `TooSlow` when the budget is used up and the work goes on.
pub async fn within<T: Send + 'static>(
    budget: Duration,
    work: impl Future<Output = Result<T, Refusal>> + Send + 'static,
) -> Result<T, Refusal> {
    match tokio::time::timeout(budget, tokio::spawn(work)).await {
        Ok(Ok(done)) => done,
        Ok(Err(error)) => Err(Refusal::Broken(format!("the work has ended: {error}"))),
        Err(_) => Err(Refusal::TooSlow(format!(
            "not done within {} s; the work goes on: repeat",
            budget.as_secs()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_volume_is_taken_once() {
        let guards = Guards::default();
        let held = guards.take("a").await.unwrap();
        assert!(matches!(guards.take("a").await, Err(Refusal::Busy(_))));
        assert_eq!(guards.lightly("a", async {}).await, None);
        let other = guards.take("b").await.unwrap();
        drop(held);
        drop(guards.take("a").await.unwrap());
        drop(other);
    }

    #[tokio::test]
    async fn a_request_comes_before_work_that_nobody_asked_for() {
        let guards = Guards::default();
        assert_eq!(guards.lightly("a", async { 5 }).await, Some(5));
        let repair = {
            let guards = guards.clone();
            tokio::spawn(async move { guards.lightly("a", std::future::pending::<()>()).await })
        };
        while !guards.shared.busy.lock().contains_key("a") {
            tokio::task::yield_now().await;
        }
        let held = guards.take("a").await.unwrap();
        assert_eq!(repair.await.unwrap(), None, "the work was dropped");
        assert!(matches!(guards.take("a").await, Err(Refusal::Busy(_))));
        drop(held);
    }

    #[tokio::test(start_paused = true)]
    async fn work_outlives_its_budget_and_its_caller() {
        let guards = Guards::default();
        let held = guards.take("a").await.unwrap();
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let work = async move {
            let _held = held;
            ended.await.ok();
            Ok(())
        };
        let late = within(Duration::from_secs(1), work).await;
        assert!(matches!(late, Err(Refusal::TooSlow(_))));
        assert!(guards.take("a").await.is_err(), "the work goes on");
        end.send(()).unwrap();
        while guards.take("a").await.is_err() {
            tokio::task::yield_now().await;
        }
    }
}
