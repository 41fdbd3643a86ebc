//! What a mount remembers of one chunkserver, and what follows from it.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::detour::Detour;
use crate::late::{Patience, SILENT};

/// What is remembered of one server.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) in_flight: u32,
    /// It failed, and has not answered since.
    suspect: bool,
    /// Another answered while it said nothing, and it has said nothing since.
    quiet: Option<Quiet>,
    /// It cannot serve until then.
    busy_until: Option<Instant>,
    /// Disks that have answered nothing since they left a read unanswered, and until when they are
    /// asked last.
    hanging: BTreeMap<u32, Instant>,
    latency: Latency,
    /// Of late, for the budgets: reads it answered, reads for which an equally near server was
    /// asked as well, and reads that went farther since it was slow.
    reads: u32,
    hedges: u32,
    strays: u32,
}

/// A silence that has not ended.
#[derive(Debug)]
struct Quiet {
    since: Instant,
    /// Reads that had gone farther before.
    strays: u32,
}

/// Tracked latency of reads: a high quantile that follows what it sees.
#[derive(Debug, Default)]
struct Latency {
    /// Estimate of the 95th percentile, nanoseconds; 0: nothing seen.
    p95_nanos: f64,
}

impl Latency {
    /// Moves the estimate up by 19 steps for a slower read and down by 1 for a faster one: it
    /// rests where one in twenty is slower.
    fn see(&mut self, took: Duration) {
        let nanos = took.as_secs_f64() * 1e9;
        if self.p95_nanos == 0.0 {
            self.p95_nanos = nanos * 2.0;
            return;
        }
        let step = self.p95_nanos * 0.01;
        if nanos > self.p95_nanos {
            self.p95_nanos += step * 19.0;
        } else {
            self.p95_nanos -= step;
        }
    }

    fn p95(&self) -> Option<Duration> {
        (self.p95_nanos > 0.0).then(|| Duration::from_secs_f64(self.p95_nanos / 1e9))
    }
}

impl Memory {
    /// Why it is asked last for a read from this disk, `None`: for a write, if it is. Writes need
    /// every copy: silence, and a disk that hangs, put it last for reads only.
    pub(crate) fn last(&self, now: Instant, disk: Option<u32>) -> Option<Detour> {
        let after = |until: &Instant| *until > now;
        if self.suspect {
            return Some(Detour::Suspect);
        }
        if self.busy_until.as_ref().is_some_and(after) {
            return Some(Detour::Busy);
        }
        let disk = disk?;
        if self.quiet.is_some() {
            return Some(Detour::Quiet);
        }
        self.hanging
            .get(&disk)
            .is_some_and(after)
            .then_some(Detour::Busy)
    }

    pub(crate) fn is_suspect(&self) -> bool {
        self.suspect
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.quiet.is_some()
    }

    /// It answered a read from a disk.
    pub(crate) fn answered(&mut self, disk: u32, took: Duration, now: Instant) {
        self.hanging.remove(&disk);
        self.latency.see(took);
        self.speaks(now);
        self.reads += 1;
        if self.reads >= BUDGET_WINDOW {
            for count in [&mut self.reads, &mut self.hedges, &mut self.strays] {
                *count /= 2;
            }
        }
    }

    /// It gave a sign of life.
    pub(crate) fn speaks(&mut self, now: Instant) {
        self.suspect = false;
        if let Some(quiet) = self.quiet.take()
            && now.duration_since(quiet.since) >= AWAY
        {
            self.strays = self.strays.min(quiet.strays);
        }
    }

    /// A read was answered by another; this one would have taken longer than that.
    pub(crate) fn overtaken(&mut self, disk: u32, after: Duration, now: Instant) {
        self.latency.see(after);
        if after >= SILENT && self.hanging.contains_key(&disk) {
            self.hangs(disk, now);
        }
    }

    /// It leaves a read from a disk unanswered.
    pub(crate) fn hangs(&mut self, disk: u32, now: Instant) {
        self.hanging.insert(disk, now + HANGING);
    }

    /// Another answered while it said nothing at all.
    pub(crate) fn silent(&mut self, now: Instant) {
        let strays = self.strays.saturating_sub(1);
        self.quiet.get_or_insert(Quiet { since: now, strays });
    }

    /// It failed. True: that is news.
    pub(crate) fn fails(&mut self) -> bool {
        // What went elsewhere went there rightly.
        self.strays = 0;
        self.quiet = None;
        !std::mem::replace(&mut self.suspect, true)
    }

    /// It says that it cannot serve now.
    pub(crate) fn busy(&mut self, now: Instant) {
        self.busy_until = Some(now + BUSY);
    }

    /// Another server is asked besides this one, a farther one or one as near.
    pub(crate) fn hedged(&mut self, farther: bool) {
        *(if farther {
            &mut self.strays
        } else {
            &mut self.hedges
        }) += 1;
    }

    /// A read went farther since this server was quiet.
    pub(crate) fn strayed(&mut self) {
        self.strays += 1;
    }

    /// How late it may be before a server is asked too that is farther, or as near.
    ///
    /// One that is as near is asked after the tracked 95th percentile. One that is farther costs
    /// money: it is asked when this one is far slower than it is of late, and says nothing else
    /// either; and only for a share of the reads unless it turns out to be gone.
    pub(crate) fn patience(&self, farther: bool) -> Patience {
        let share = f64::from(self.reads).max(BUDGET_FREE) * BUDGET_SHARE;
        let p95 = self.latency.p95();
        if !farther {
            let usual = p95.filter(|_| f64::from(self.hedges) <= share);
            let usual = usual.map_or(OVERTAKE, |p95| p95.clamp(HEDGE_MIN, OVERTAKE));
            return Patience::of(usual);
        }
        if f64::from(self.strays) > share && self.quiet.is_none() {
            return Patience {
                age: FAR_AGE_MAX,
                silence: FAR_SILENCE_SPENT,
            };
        }
        let late = p95.unwrap_or(OVERTAKE) * FAR_TIMES;
        Patience {
            age: late.clamp(SILENT, FAR_AGE_MAX),
            silence: late.clamp(SILENT, FAR_SILENCE_MAX),
        }
    }
}

/// Reads after which the budgets' counts are halved.
const BUDGET_WINDOW: u32 = 10_000;
/// Share of reads for which another server may be asked too, and reads taken as done before the
/// first.
const BUDGET_SHARE: f64 = 0.05;
const BUDGET_FREE: f64 = 100.0;
/// No server as near is asked sooner.
const HEDGE_MIN: Duration = Duration::from_millis(2);
/// A server that has not answered for this long is overtaken by one as near, whatever the budget
/// says.
pub(crate) const OVERTAKE: Duration = Duration::from_millis(300);
/// How much slower than of late a server has to be before a farther one is asked.
const FAR_TIMES: u32 = 4;
/// The longest that takes: of one answer, of silence, and of silence once the budget is spent.
pub(crate) const FAR_AGE_MAX: Duration = Duration::from_millis(800);
const FAR_SILENCE_MAX: Duration = Duration::from_millis(200);
const FAR_SILENCE_SPENT: Duration = Duration::from_millis(400);
/// A silence as long as this was no delay: what went elsewhere meanwhile went there rightly.
const AWAY: Duration = Duration::from_millis(300);
/// Time an overloaded server loses its place for.
const BUSY: Duration = Duration::from_secs(1);
/// Time after which a disk that hangs is asked again.
const HANGING: Duration = Duration::from_secs(3);

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
