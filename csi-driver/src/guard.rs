//! One request for a volume at a time, each within its budget.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::Refusal;

/// Volumes with a request under way.
#[derive(Debug, Clone, Default)]
pub struct Guards {
    busy: Arc<Mutex<BTreeSet<String>>>,
}

/// A volume that is taken; given back when dropped.
#[derive(Debug)]
pub struct Held {
    busy: Arc<Mutex<BTreeSet<String>>>,
    name: String,
}

impl Guards {
    /// Takes a volume.
    ///
    /// # Errors
    /// `Busy` while another request has it.
    pub fn take(&self, name: &str) -> Result<Held, Refusal> {
        if !self.busy.lock().insert(name.to_owned()) {
            return Err(Refusal::Busy(format!(
                "another request for {name} is under way: repeat"
            )));
        }
        Ok(Held {
            busy: Arc::clone(&self.busy),
            name: name.to_owned(),
        })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.busy.lock().remove(&self.name);
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

    #[test]
    fn a_volume_is_taken_once() {
        let guards = Guards::default();
        let held = guards.take("a").unwrap();
        assert!(matches!(guards.take("a"), Err(Refusal::Busy(_))));
        let other = guards.take("b").unwrap();
        drop(held);
        drop(guards.take("a").unwrap());
        drop(other);
    }

    #[tokio::test(start_paused = true)]
    async fn work_outlives_its_budget_and_its_caller() {
        let guards = Guards::default();
        let held = guards.take("a").unwrap();
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let work = async move {
            let _held = held;
            ended.await.ok();
            Ok(())
        };
        let late = within(Duration::from_secs(1), work).await;
        assert!(matches!(late, Err(Refusal::TooSlow(_))));
        assert!(guards.take("a").is_err(), "the work goes on");
        end.send(()).unwrap();
        while guards.take("a").is_err() {
            tokio::task::yield_now().await;
        }
    }
}
