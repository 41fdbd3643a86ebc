//! A rate of bytes that background work keeps to.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Spreads bytes over time.
pub(crate) struct Throttle {
    bytes_per_second: u64,
    /// When the next bytes may be taken.
    next: Mutex<Option<Instant>>,
}

impl Throttle {
    /// `bytes_per_second` 0: no limit.
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        Self {
            bytes_per_second,
            next: Mutex::default(),
        }
    }

    /// Waits until so many bytes may go.
    pub(crate) async fn take(&self, bytes: u32) {
        if self.bytes_per_second == 0 {
            return;
        }
        let until = {
            let mut next = self.next.lock();
            let now = Instant::now();
            let at = next.unwrap_or(now).max(now);
            let nanos = u64::from(bytes).saturating_mul(1_000_000_000) / self.bytes_per_second;
            *next = Some(at + Duration::from_nanos(nanos));
            at
        };
        tokio::time::sleep_until(until).await;
    }
}
