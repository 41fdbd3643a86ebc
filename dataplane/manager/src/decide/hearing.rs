//! How far the manager has listened: silence counts only up to there.

use std::time::Duration;

/// The time up to which everything that arrived has been taken in. Signs of life that wait, because
/// the manager is late with its work, are no silence.
#[derive(Debug, Clone, Copy, Default)]
pub struct Hearing {
    until: Duration,
}

impl Hearing {
    /// A message that arrived at that time is taken in; they come in the order they arrived.
    pub fn took(&mut self, arrived: Duration) {
        self.until = self.until.max(arrived);
    }

    /// The time up to which silence counts, when messages are `waiting` or when none are.
    pub fn until(&mut self, waiting: bool, now: Duration) -> Duration {
        if !waiting {
            self.until = now;
        }
        self.until
    }
}

#[cfg(test)]
mod tests {
    use hither_proto::manager::Heartbeat;
    use hither_proto::map::Chunkserver;

    use super::super::{Liveness, beat, lost_servers};
    use super::*;
    use crate::state::State;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// A manager that was five seconds behind with its messages took everybody as lost.
    #[test]
    fn what_waits_to_be_heard_is_no_silence() {
        let (mut liveness, mut hearing) = (Liveness::default(), Hearing::default());
        let description = Chunkserver {
            boot_id: 7,
            ..Chunkserver::default()
        };
        let mut sign = Heartbeat {
            description: Some(description),
            ..Heartbeat::default()
        };
        let first = beat(&State::default(), &mut liveness, &sign, at(0));
        sign.server = first.reply.server;
        let state = first.next.unwrap();
        hearing.took(at(0));
        // Beats have arrived since, every second, and wait.
        let until = hearing.until(true, at(5));
        assert_eq!(lost_servers(&state, &liveness, until), Vec::new());
        hearing.took(at(1));
        let _ = beat(&state, &mut liveness, &sign, at(5));
        assert_eq!(hearing.until(true, at(6)), at(1));
        // Nothing waits any more: from here on the server is silent.
        let until = hearing.until(false, at(7));
        assert_eq!(lost_servers(&state, &liveness, until), Vec::new());
        let until = hearing.until(false, at(8));
        assert_eq!(lost_servers(&state, &liveness, until).len(), 1);
    }
}
