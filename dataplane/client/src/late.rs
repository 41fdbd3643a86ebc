//! When a server that was asked counts as late.
//!
//! Time in which this process was not awake counts for little: on a machine with more work than it
//! can do, a timer that fires late is no evidence against the server, whose answer may lie in the
//! socket.
//! And a server from which bytes come is at work on what was asked before, however long that takes.

use std::time::Duration;

/// How long a request has been out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Wait {
    /// Time since it was sent.
    age: Duration,
    /// Time since it was sent, or since anything came from the server after that.
    silence: Duration,
    /// Time since it was sent by the clock, whether this process was awake or not.
    clock: Duration,
    /// Bytes that had come from the server at the last look.
    heard: u64,
}

/// How late a server may be before another is asked as well: either is enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Patience {
    /// With the one answer.
    pub(crate) age: Duration,
    /// With any byte at all.
    pub(crate) silence: Duration,
}

impl Patience {
    /// For both the same.
    pub(crate) fn of(time: Duration) -> Self {
        Self {
            age: time,
            silence: time,
        }
    }
}

impl Wait {
    /// A request is sent to a server from which this many bytes have come before.
    pub(crate) fn begin(heard: u64) -> Self {
        Self {
            heard,
            ..Self::default()
        }
    }

    /// How long to wait before looking again; `None`: the server is late.
    pub(crate) fn next(&self, patience: Patience) -> Option<Duration> {
        // A sleep counts half of SILENT at most: three looks at least have found no answer.
        if self.clock >= CLOCK_MAX && self.age > SILENT {
            return None;
        }
        let left = patience
            .age
            .saturating_sub(self.age)
            .min(patience.silence.saturating_sub(self.silence));
        (!left.is_zero()).then(|| left.min(SLICE))
    }

    /// Time went by, at most as much as was to be waited, unless this process was not awake.
    pub(crate) fn pass(&mut self, time: Duration, heard: u64) {
        self.clock += time;
        let asleep = time.min(ASLEEP_MAX) / ASLEEP_SHARE;
        let time = time.min(SLICE + SLACK).max(asleep);
        self.age += time;
        self.silence += time;
        if heard != self.heard {
            self.heard = heard;
            self.silence = Duration::ZERO;
        }
    }

    /// How long it has been out.
    pub(crate) fn age(&self) -> Duration {
        self.age
    }

    /// Whether the server has said nothing for so long that it may be gone.
    pub(crate) fn is_silent(&self, heard: u64) -> bool {
        heard == self.heard && self.silence >= SILENT
    }
}

/// Longest wait between two looks.
const SLICE: Duration = Duration::from_millis(20);
/// How late a timer may be and still count in full.
const SLACK: Duration = Duration::from_millis(5);
/// What counts of a wait that took longer: one part in so many, of so much at most. So readers on an
/// overloaded machine wait for a server that is gone longer than others, and not forever.
const ASLEEP_SHARE: u32 = 3;
const ASLEEP_MAX: Duration = Duration::from_millis(150);
/// So long by the clock without the answer is enough.
const CLOCK_MAX: Duration = Duration::from_millis(800);
/// Silence after which a server may be gone.
pub(crate) const SILENT: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Waits as told, each time `over` longer than asked for; `hears` says what has come by then.
    /// The time when the server is late.
    fn late_after(patience: Patience, over: Duration, hears: impl Fn(Duration) -> u64) -> Duration {
        let mut wait = Wait::begin(hears(Duration::ZERO));
        let mut now = Duration::ZERO;
        while let Some(slice) = wait.next(patience) {
            now += slice + over;
            wait.pass(slice + over, hears(now));
            assert!(now < ms(60_000), "never late");
        }
        now
    }

    const FAR: Patience = Patience {
        age: ms(500),
        silence: ms(100),
    };

    #[test]
    fn a_silent_server_is_late_when_patience_ends() {
        assert_eq!(late_after(FAR, ms(0), |_| 7), ms(100));
        assert_eq!(
            late_after(FAR, ms(1), |_| 7),
            ms(101),
            "timers are never early"
        );
        assert_eq!(late_after(Patience::of(ms(3)), ms(0), |_| 0), ms(3));
    }

    #[test]
    fn a_server_that_sends_other_things_is_not_silent() {
        let streams = |now: Duration| u64::try_from(now.as_millis() / 50).unwrap();
        assert_eq!(late_after(FAR, ms(0), streams), ms(500), "late by age only");
        let stops = |now: Duration| streams(now.min(ms(300)));
        let late = late_after(FAR, ms(0), stops);
        assert!(late >= ms(400) && late <= ms(420), "{late:?}");
    }

    #[test]
    fn time_in_which_this_process_slept_counts_for_little() {
        // Every look is 180 ms late: the machine is overloaded, and nothing is known of the server.
        let late = late_after(FAR, ms(180), |_| 7);
        assert_eq!(late, ms(2 * 200));
        let mut stopped = Wait::begin(7);
        stopped.pass(ms(20), 7);
        stopped.pass(ms(60_000), 7);
        assert!(!stopped.is_silent(7));
        assert!(stopped.next(FAR).is_some());
    }

    #[test]
    fn some_time_by_the_clock_is_enough_if_three_looks_have_found_nothing() {
        let spent = Patience {
            age: ms(2000),
            silence: ms(400),
        };
        for over in [40, 150, 300, 480, 980] {
            let most = ms((800 + 20 + over).max(3 * (20 + over)));
            let late = late_after(spent, ms(over), |_| 7);
            assert!(late <= most, "{over}: {late:?}");
            let streams = |now: Duration| u64::try_from(now.as_millis() / 50).unwrap();
            let late = late_after(spent, ms(over), streams);
            assert!(late <= most, "with other things, {over}: {late:?}");
        }
        let mut wait = Wait::begin(7);
        wait.pass(ms(5000), 7);
        wait.pass(ms(5000), 7);
        assert!(wait.next(spent).is_some(), "two looks");
        wait.pass(ms(20), 7);
        assert_eq!(wait.next(spent), None);
        assert!(wait.is_silent(7));
    }

    #[test]
    fn one_byte_after_the_last_look_is_a_sign_of_life() {
        let mut wait = Wait::begin(7);
        for _ in 0..5 {
            wait.pass(ms(20), 7);
        }
        assert_eq!(wait.next(FAR), None);
        assert!(wait.is_silent(7) && !wait.is_silent(8));
    }
}
