//! The core's time: only what the rank spends serving counts.
//!
//! Sessions run out by this time. A client cannot renew while the rank does not hold its lease,
//! or while its process is stopped, and must not be evicted for that.

use std::time::Duration;

/// Time that stands still while nobody is served.
#[derive(Debug, Default)]
pub(crate) struct ServingClock {
    seen: Duration,
    skipped: Duration,
}

impl ServingClock {
    /// The core's time at the time `real`; `serves`: whether requests are taken now. To be asked
    /// more often than [`STEP_MAX`].
    pub(crate) fn at(&mut self, real: Duration, serves: bool) -> Duration {
        let step = real.saturating_sub(self.seen);
        self.seen = self.seen.max(real);
        let counted = if serves {
            step.min(STEP_MAX)
        } else {
            Duration::ZERO
        };
        self.skipped += step - counted;
        self.seen - self.skipped
    }
}

/// A longer step is a process that did not run.
const STEP_MAX: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_without_service_does_not_count() {
        let at = Duration::from_millis;
        let mut clock = ServingClock::default();
        assert_eq!(clock.at(at(300), true), at(300));
        assert_eq!(clock.at(at(900), true), at(900));
        // Without the lease.
        assert_eq!(clock.at(at(1200), false), at(900));
        assert_eq!(clock.at(at(60_000), false), at(900));
        assert_eq!(clock.at(at(60_100), true), at(1000));
        // The process was stopped.
        assert_eq!(clock.at(at(200_100), true), at(2000));
        assert_eq!(clock.at(at(200_000), true), at(2000), "never backwards");
    }
}
