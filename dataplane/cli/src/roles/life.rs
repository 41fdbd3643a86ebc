//! How a metadata server is, for those who probe it.

use std::time::Duration;

use hither_mds::{Pulse, Vitals};
use parking_lot::Mutex;

use super::probes::Health;

/// What a metadata server is doing.
#[derive(Debug, Default)]
pub(crate) struct Life(Mutex<Doing>);

/// What it may be doing.
#[derive(Debug, Clone, Default)]
pub(crate) enum Doing {
    /// Waiting for the store, or for a manager that leads.
    #[default]
    Beginning,
    /// Waiting for the rank; the pulse beats when the store says who has it.
    StandingBy(Pulse),
    /// Serving the rank.
    Serving(Vitals),
}

impl Life {
    /// From now on it does this.
    pub(crate) fn turns_to(&self, doing: Doing) {
        *self.0.lock() = doing;
    }
}

impl Health for Life {
    /// Only the rank's own thread is looked at: who waits for the store or for a manager would
    /// wait again after a restart.
    fn hung(&self) -> Option<String> {
        let Doing::Serving(vitals) = self.0.lock().clone() else {
            return None;
        };
        let silent = vitals.silent_for();
        (silent > HUNG_AFTER).then(|| {
            format!(
                "the rank's thread has not turned for {} s",
                silent.as_secs()
            )
        })
    }

    fn unready(&self) -> Option<String> {
        match &*self.0.lock() {
            Doing::Beginning => Some("the store or a manager has not answered yet".into()),
            Doing::StandingBy(looks) => (looks.silent_for() > BLIND_AFTER)
                .then(|| "the store does not say who has the rank".into()),
            Doing::Serving(vitals) => (!vitals.serves())
                .then(|| "the rank's lease is not renewed: the store does not answer".into()),
        }
    }
}

/// The rank's thread is back four times a second; a step of its work may take a while.
const HUNG_AFTER: Duration = Duration::from_secs(30);
/// A standby looks four times a second.
const BLIND_AFTER: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[tokio::test(start_paused = true)]
    async fn who_waits_is_not_ended_for_it() {
        let life = Life::default();
        advance(LONG).await;
        assert!(life.hung().is_none() && life.unready().is_some());
        let looks = Pulse::default();
        life.turns_to(Doing::StandingBy(looks.clone()));
        looks.beat();
        assert!(life.hung().is_none() && life.unready().is_none());
        // The store is away.
        advance(LONG).await;
        assert!(life.hung().is_none() && life.unready().is_some());
        looks.beat();
        assert!(life.unready().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_rank_whose_thread_does_not_turn_is_ended() {
        let life = Life::default();
        life.turns_to(Doing::Serving(Vitals::default()));
        advance(HUNG_AFTER).await;
        assert!(life.hung().is_none() && life.unready().is_none());
        advance(Duration::from_secs(1)).await;
        assert!(life.hung().unwrap().contains("for 31 s"));
        // It stands by for another.
        life.turns_to(Doing::StandingBy(Pulse::default()));
        assert!(life.hung().is_none());
    }
}
