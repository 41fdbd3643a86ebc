//! What happens again and again as long as all is well, seen from outside.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::hold::LeaseClock;

/// When something happened last that happens again and again.
#[derive(Debug, Clone)]
pub struct Pulse {
    started: Instant,
    /// Milliseconds since `started`.
    last_ms: Arc<AtomicU64>,
}

impl Default for Pulse {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            last_ms: Arc::default(),
        }
    }
}

impl Pulse {
    /// It happens now.
    pub fn beat(&self) {
        let now_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.fetch_max(now_ms, Ordering::AcqRel);
    }

    /// Time since it happened, or since there could have been a beat.
    #[must_use]
    pub fn silent_for(&self) -> Duration {
        let last = Duration::from_millis(self.last_ms.load(Ordering::Acquire));
        self.started.elapsed().saturating_sub(last)
    }
}

/// A rank's signs of life; by default those of one that has just begun and that nobody else can
/// have.
#[derive(Debug, Clone, Default)]
pub struct Vitals {
    pub(crate) turns: Pulse,
    pub(crate) lease: LeaseClock,
}

impl Vitals {
    /// Time since the rank's thread was last through with what it had to do. It is back at least
    /// four times a second, whatever store and clients do.
    #[must_use]
    pub fn silent_for(&self) -> Duration {
        self.turns.silent_for()
    }

    /// Whether the rank is surely held, and answers.
    #[must_use]
    pub fn serves(&self) -> bool {
        self.lease.holds()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn silence_is_counted_from_the_last_beat() {
        let pulse = Pulse::default();
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(pulse.silent_for(), Duration::from_secs(5));
        pulse.clone().beat();
        assert_eq!(pulse.silent_for(), Duration::ZERO);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(pulse.silent_for(), Duration::from_secs(2));
    }
}
