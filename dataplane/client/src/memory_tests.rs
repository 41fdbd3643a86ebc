//! A mount and a server that is near, well, slow or gone, in simulated time.

use super::*;
use crate::late::Wait;

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// One mount that reads from a near server, one read after the other.
struct Reader {
    near: Memory,
    now: Instant,
    /// When the near server answers what was overtaken.
    due: Option<Instant>,
    reads: u32,
    /// Reads that went farther.
    far: u32,
}

impl Default for Reader {
    fn default() -> Self {
        Self {
            near: Memory::default(),
            now: Instant::now(),
            due: None,
            reads: 0,
            far: 0,
        }
    }
}

impl Reader {
    /// A read that the near server would answer after `takes` of silence, `None`: never; the machine
    /// wakes the reader `over` too late each time. When its answer is here, or another is asked.
    fn read(&mut self, takes: Option<Duration>, over: Duration) -> Duration {
        self.reads += 1;
        let begun = self.now;
        if let Some(due) = self.due.take_if(|due| *due <= begun) {
            self.near.answered(DISK, ms(500), due);
        }
        let mut wait = Wait::begin(0);
        let quiet = self.near.last(self.now, Some(DISK)).is_some();
        if quiet {
            self.near.strayed();
        }
        while !quiet && let Some(pause) = wait.next(self.near.patience(true)) {
            let answered = takes.map(|takes| begun + takes);
            self.now += pause + over;
            if let Some(at) = answered.filter(|at| *at <= self.now) {
                self.now = at;
                self.near.answered(DISK, at - begun, at);
                return at - begun;
            }
            wait.pass(pause + over, 0);
        }
        let waited = self.now - begun;
        self.far += 1;
        if !quiet {
            self.near.hedged(true);
            self.near.silent(self.now);
            self.due = takes.map(|takes| begun + takes);
        }
        self.now += FAR_TAKES;
        waited
    }

    fn share(&self) -> f64 {
        f64::from(self.far) / f64::from(self.reads)
    }
}

/// How long the far server takes.
const FAR_TAKES: Duration = ms(10);
/// Where everything is, and another disk of the same server.
const DISK: u32 = 1;
const OTHER_DISK: u32 = 2;

#[test]
fn a_server_that_is_gone_is_given_up_soon_and_once() {
    let mut reader = Reader::default();
    for _ in 0..500 {
        reader.read(Some(ms(3)), ms(0));
    }
    assert_eq!(reader.far, 0);
    assert_eq!(reader.read(None, ms(0)), ms(100));
    assert_eq!(reader.read(None, ms(0)), ms(0), "nobody waits for it again");
    assert!(reader.near.fails(), "and it says nothing for good");
    assert!(!reader.near.fails(), "which is news only once");
    assert_eq!(reader.near.last(reader.now, None), Some(Detour::Suspect));
    reader.near.answered(DISK, ms(3), reader.now);
    assert_eq!(reader.near.last(reader.now, Some(DISK)), None, "one answer");
}

#[test]
fn the_first_read_of_all_does_not_wait_long_for_a_server_that_is_gone() {
    assert_eq!(Reader::default().read(None, ms(0)), ms(200));
}

/// Silences of 150 ms now and then: the patience follows what the server does under load.
#[test]
fn a_slow_server_keeps_its_readers() {
    let mut reader = Reader::default();
    for n in 0..2000 {
        let takes = if n % 10 == 0 { ms(150) } else { ms(30) };
        reader.read(Some(takes), ms(0));
    }
    assert!(reader.share() < 0.01, "{}", reader.share());
}

/// However often it is slow, a server that answers soon after loses a bounded share of the reads.
#[test]
fn reads_that_go_farther_since_a_server_is_slow_are_few() {
    for silence in [220, 300, 380] {
        let mut reader = Reader::default();
        for n in 0..4000 {
            let takes = if n % 3 == 0 { ms(silence) } else { ms(10) };
            reader.read(Some(takes), ms(0));
        }
        assert!(
            reader.far > 0 && reader.share() < 0.06,
            "{silence} ms: {}",
            reader.share()
        );
    }
}

/// A server that slept is not known to be bad: the reader slept as well.
#[test]
fn an_overloaded_machine_is_no_evidence_against_a_server() {
    let mut reader = Reader::default();
    for n in 0..500 {
        let takes = if n % 4 == 0 { ms(380) } else { ms(40) };
        reader.read(Some(takes), ms(80));
    }
    assert_eq!(reader.far, 0);
}

/// Once the share is spent, a server that is gone is still given up within a second.
#[test]
fn a_spent_budget_delays_and_does_not_block() {
    let mut reader = Reader::default();
    for _ in 0..10 {
        reader.near.hedged(true);
    }
    assert_eq!(reader.read(None, ms(0)), ms(400));
    reader.near.fails();
    reader.near.answered(DISK, ms(3), reader.now);
    assert_eq!(
        reader.read(None, ms(0)),
        ms(100),
        "what a failure sent elsewhere is not counted"
    );
}

/// The same where the reader is woken late each time: the clock counts as well.
#[test]
fn a_spent_budget_and_an_overloaded_machine_together_delay_by_less_than_a_second() {
    for over in [40, 80, 150, 300] {
        let mut reader = Reader::default();
        for _ in 0..10 {
            reader.near.hedged(true);
        }
        let waited = reader.read(None, ms(over));
        assert!(waited <= ms(800 + 20 + over), "{over}: {waited:?}");
    }
}

/// A disk of the near server hangs, the others answer, so that the server is never silent: reads
/// from the disk are few, and none waits for a second.
#[test]
fn a_disk_that_hangs_is_left_and_the_others_are_not() {
    let mut near = Memory::default();
    let mut now = Instant::now();
    let (mut asked, mut waited) = (0, ms(0));
    for n in 0..6000 {
        near.answered(OTHER_DISK, ms(3), now);
        assert_eq!(near.last(now, Some(OTHER_DISK)), None);
        if n % 10 == 0 && near.last(now, Some(DISK)).is_none() {
            let age = near.patience(true).age;
            assert!(age < ms(1000), "{age:?}");
            near.hedged(true);
            near.overtaken(DISK, age, now + age);
            if asked == 0 {
                near.hangs(DISK, now + age);
            }
            (asked, waited, now) = (asked + 1, waited + age, now + age);
        }
        now += ms(10);
    }
    assert!((2..=20).contains(&asked), "{asked} in a minute");
    near.answered(DISK, ms(3), now);
    near.overtaken(DISK, ms(300), now);
    assert_eq!(near.last(now, Some(DISK)), None, "it only was slow");
    near.hangs(DISK, now);
    assert_eq!(near.last(now, Some(DISK)), Some(Detour::Busy));
    assert_eq!(near.last(now, None), None, "writes need every copy");
}

/// The age of a read is never waited for as long as a second, whatever the server was like.
#[test]
fn a_server_that_sends_other_things_is_overtaken_within_a_second() {
    for slow in [ms(1), ms(500), ms(5000)] {
        let mut memory = Memory::default();
        for _ in 0..200 {
            memory.answered(DISK, slow, Instant::now());
        }
        assert!(memory.patience(true).age < ms(1000), "{slow:?}");
        for _ in 0..50 {
            memory.hedged(true);
        }
        assert!(memory.patience(true).age < ms(1000), "spent, {slow:?}");
    }
}

/// A pause of half a second, over and over: each time it is left at once, and soon.
#[test]
fn what_a_long_silence_sends_elsewhere_is_not_counted() {
    let mut reader = Reader::default();
    for round in 0..20 {
        for _ in 0..100 {
            reader.read(Some(ms(3)), ms(0));
        }
        let waited = reader.read(Some(ms(700)), ms(0));
        assert!(waited <= ms(200), "round {round}: {waited:?}");
        while reader.due.is_some() {
            assert_eq!(reader.read(Some(ms(3)), ms(0)).max(ms(3)), ms(3));
        }
    }
}

#[test]
fn a_silent_server_keeps_its_place_in_chains() {
    let (mut memory, now) = (Memory::default(), Instant::now());
    memory.silent(now);
    assert_eq!(memory.last(now, Some(DISK)), Some(Detour::Quiet));
    assert_eq!(memory.last(now, None), None);
    memory.busy(now);
    assert_eq!(memory.last(now, None), Some(Detour::Busy));
    assert_eq!(memory.last(now + BUSY * 2, None), None);
}

#[test]
fn a_server_as_near_is_asked_for_a_share_of_the_reads() {
    let mut memory = Memory::default();
    assert_eq!(memory.patience(false), Patience::of(OVERTAKE), "unknown");
    for _ in 0..200 {
        memory.answered(DISK, ms(4), Instant::now());
    }
    assert!(memory.patience(false).age < ms(10));
    for _ in 0..11 {
        memory.hedged(false);
    }
    assert_eq!(memory.patience(false), Patience::of(OVERTAKE), "spent");
}
