//! What one session holds, in the order it was given: beyond a bound the oldest is asked back.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use hither_proto::ids::{InodeId, SessionId};

/// Inodes on whose attributes or entries sessions have leases.
///
/// What is given back stays listed until the next look at a list that has become too long: a look
/// costs as much as was given since the one before.
#[derive(Debug, Default)]
pub(crate) struct HeldTable {
    sessions: BTreeMap<SessionId, Held>,
    /// Inodes one session may hold; 0: no bound.
    max: usize,
}

#[derive(Debug, Default)]
struct Held {
    /// Oldest first.
    given: VecDeque<InodeId>,
    /// To be asked back, and not asked yet.
    surplus: VecDeque<InodeId>,
    /// Length at which the list is looked at again.
    look_at: usize,
}

impl HeldTable {
    pub(crate) fn new(max: usize) -> Self {
        Self {
            sessions: BTreeMap::new(),
            max,
        }
    }

    /// Notes that the session was given a lease on an inode it had none on.
    pub(crate) fn note(&mut self, session: SessionId, ino: InodeId) {
        if self.max > 0 {
            let held = self.sessions.entry(session).or_default();
            held.given.push_back(ino);
        }
    }

    /// Whether the session gives back so slowly that it gets no more for now.
    pub(crate) fn is_behind(&self, session: SessionId) -> bool {
        let held = self.sessions.get(&session);
        held.is_some_and(|held| held.surplus.len() > self.max / BEHIND_PART)
    }

    pub(crate) fn forget(&mut self, session: SessionId) {
        self.sessions.remove(&session);
    }

    /// Up to `count` inodes to be asked back, oldest first; `holds` says what is still held.
    pub(crate) fn ask_back(
        &mut self,
        count: usize,
        holds: impl Fn(SessionId, InodeId) -> bool,
    ) -> Vec<(SessionId, InodeId)> {
        let mut wanted = Vec::new();
        let slack = self.max / SLACK_PART;
        for (session, held) in &mut self.sessions {
            if self.max > 0 && held.given.len() > self.max.max(held.look_at) {
                held.look(self.max - slack, |ino| holds(*session, ino));
                // What is in use comes back to the list however often it is taken out.
                held.look_at = held.given.len() + slack;
            }
            while wanted.len() < count
                && let Some(ino) = held.surplus.pop_front()
            {
                if holds(*session, ino) {
                    wanted.push((*session, ino));
                }
            }
        }
        wanted
    }
}

impl Held {
    /// Drops what is not held any more, and takes what is too much out as surplus.
    fn look(&mut self, max: usize, holds: impl Fn(InodeId) -> bool) {
        let mut seen = BTreeSet::new();
        // Given, given back and given again counts as of the last time.
        let newest_first = std::mem::take(&mut self.given).into_iter().rev();
        let mut kept: VecDeque<InodeId> = newest_first
            .filter(|ino| seen.insert(*ino) && holds(*ino))
            .collect();
        let surplus = kept.len().saturating_sub(max);
        let oldest = kept.len() - surplus;
        self.surplus.extend(kept.drain(oldest..).rev());
        self.given = kept.into_iter().rev().collect();
    }
}

/// A list longer than the bound is made shorter than it by this part, so that few looks are needed.
const SLACK_PART: usize = 16;
/// A session gets no more leases while this part of the bound waits to be asked back from it.
const BEHIND_PART: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    const S: SessionId = SessionId(1);

    fn numbers(wanted: &[(SessionId, InodeId)]) -> Vec<u64> {
        wanted.iter().map(|(_, ino)| ino.0).collect()
    }

    #[test]
    fn the_oldest_beyond_the_bound_are_asked_back_once() {
        let mut table = HeldTable::new(32);
        for ino in 0..32 {
            table.note(S, InodeId(ino));
        }
        assert!(table.ask_back(100, |_, _| true).is_empty());
        for ino in 32..40 {
            table.note(S, InodeId(ino));
        }
        // Given again: not among the oldest any more.
        table.note(S, InodeId(0));
        let first = table.ask_back(3, |_, _| true);
        assert_eq!(numbers(&first), [1, 2, 3]);
        let rest = table.ask_back(100, |_, ino| ino.0 != 5);
        assert_eq!(numbers(&rest), [4, 6, 7, 8, 9, 10]);
        assert!(table.ask_back(100, |_, _| true).is_empty());
    }

    #[test]
    fn what_was_given_back_makes_room() {
        let mut table = HeldTable::new(32);
        for ino in 0..1000 {
            table.note(S, InodeId(ino));
        }
        let wanted = table.ask_back(2000, |_, ino| ino.0 % 40 == 0);
        assert_eq!(wanted, []);
        assert!(table.sessions[&S].given.len() <= 25);
    }

    #[test]
    fn a_session_that_gives_nothing_back_gets_no_more() {
        let mut table = HeldTable::new(32);
        for ino in 0..50 {
            table.note(S, InodeId(ino));
        }
        assert_eq!(table.ask_back(1, |_, _| true).len(), 1);
        assert!(table.is_behind(S));
        assert_eq!(table.ask_back(100, |_, _| true).len(), 19);
        assert!(!table.is_behind(S));
        table.forget(S);
        assert!(table.sessions.is_empty());
    }
}
