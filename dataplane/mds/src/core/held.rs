//! What one session holds, in the order it was given: beyond a bound the oldest is asked back.
//!
//! The oldest are the root and the top directories. They go first, and are the youngest once they
//! have been used again: a session that goes through many files is asked for them once in a while.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use hither_proto::ids::{InodeId, SessionId};

/// Inodes on whose attributes or entries sessions have leases.
#[derive(Debug, Default)]
pub(crate) struct HeldTable {
    sessions: BTreeMap<SessionId, Held>,
    /// Session that was asked last: the next one is asked first.
    hand: SessionId,
    /// Inodes one session may hold; 0: no bound.
    max: usize,
}

#[derive(Debug, Default)]
struct Held {
    /// Oldest first. What was given back stays until it comes to the front, and what is given again
    /// has another place behind.
    given: VecDeque<InodeId>,
    /// How many places of an inode, its first ones, are of what was given back.
    void: BTreeMap<InodeId, u32>,
    /// All of these places.
    voids: usize,
    /// It was beyond the bound, and is not far enough below yet.
    shrinking: bool,
}

impl HeldTable {
    pub(crate) fn new(max: usize) -> Self {
        Self {
            max,
            ..Self::default()
        }
    }

    /// Notes that the session was given a lease on an inode it had none on.
    pub(crate) fn note(&mut self, session: SessionId, ino: InodeId) {
        if self.max > 0 {
            let held = self.sessions.entry(session).or_default();
            held.given.push_back(ino);
            for _ in 0..LOOKS_PER_LEASE {
                if held.voids <= self.max / VOID_PART {
                    break;
                }
                held.look();
            }
        }
    }

    /// Notes that the session has no lease on the inode any more.
    pub(crate) fn note_given_back(&mut self, session: SessionId, ino: InodeId) {
        if let Some(held) = self.sessions.get_mut(&session) {
            *held.void.entry(ino).or_default() += 1;
            held.voids += 1;
        }
    }

    /// Whether the session gives back so slowly that it gets no more for now.
    pub(crate) fn is_behind(&self, session: SessionId) -> bool {
        let held = self.sessions.get(&session);
        held.is_some_and(|held| held.count() > self.max + self.max / BEHIND_PART)
    }

    pub(crate) fn forget(&mut self, session: SessionId) {
        self.sessions.remove(&session);
    }

    /// Whether a session holds so much that something is to be asked back.
    pub(crate) fn has_surplus(&self) -> bool {
        let mut held = self.sessions.values();
        held.any(|held| held.shrinking || held.count() > self.max)
    }

    /// Up to `count` inodes to be asked back, the oldest of each session that are not in use.
    /// Sessions take turns, and `asked` says how much is asked of one already: it is asked for
    /// `asked_max` at a time.
    pub(crate) fn ask_back(
        &mut self,
        count: usize,
        asked_max: usize,
        asked: impl Fn(SessionId) -> usize,
        in_use: impl Fn(SessionId, InodeId) -> bool,
    ) -> Vec<(SessionId, InodeId)> {
        let mut wanted = Vec::new();
        let after = (Bound::Excluded(self.hand), Bound::Unbounded);
        let turns = self.sessions.range(after);
        let turns = turns.chain(self.sessions.range(..=self.hand));
        let turns: Vec<SessionId> = turns.map(|(session, _)| *session).collect();
        for session in turns {
            let left = count.saturating_sub(wanted.len());
            if left == 0 {
                break;
            }
            let Some(held) = self.sessions.get_mut(&session) else {
                continue;
            };
            let asked = asked(session);
            let most = left.min(asked_max.saturating_sub(asked));
            let surplus = held.surplus(self.max, asked).min(most);
            let oldest = held.oldest(surplus, |ino| in_use(session, ino));
            if !oldest.is_empty() {
                self.hand = session;
            }
            wanted.extend(oldest.into_iter().map(|ino| (session, ino)));
        }
        wanted
    }
}

impl Held {
    /// Inodes that are held.
    fn count(&self) -> usize {
        self.given.len().saturating_sub(self.voids)
    }

    /// How many are to be asked back beside the `asked` that are.
    fn surplus(&mut self, max: usize, asked: usize) -> usize {
        let stay = self.count().saturating_sub(asked);
        let floor = max - max / SLACK_PART;
        self.shrinking = stay > max || (self.shrinking && stay > floor);
        if self.shrinking { stay - floor } else { 0 }
    }

    /// Up to `count` of the oldest that are not in use. What was looked at and is held becomes the
    /// youngest.
    fn oldest(&mut self, count: usize, in_use: impl Fn(InodeId) -> bool) -> Vec<InodeId> {
        let mut oldest = Vec::with_capacity(count);
        for _ in 0..LOOK_MAX.min(self.given.len()) {
            if oldest.len() >= count {
                break;
            }
            oldest.extend(self.look().filter(|ino| !in_use(*ino)));
        }
        oldest
    }

    /// Looks at the oldest place: it goes, or what is held moves to the end.
    fn look(&mut self) -> Option<InodeId> {
        let ino = self.given.pop_front()?;
        if let Some(void) = self.void.get_mut(&ino) {
            *void -= 1;
            if *void == 0 {
                self.void.remove(&ino);
            }
            self.voids -= 1;
            return None;
        }
        self.given.push_back(ino);
        Some(ino)
    }
}

/// A session beyond the bound is brought below it by this part, so that it is not asked all the time.
const SLACK_PART: usize = 16;
/// A session gets no more leases while it holds this part of the bound beyond it.
const BEHIND_PART: usize = 4;
/// Places that are looked at in one session at a time.
const LOOK_MAX: usize = 1024;
/// With more void places than this part of the bound, each new lease clears some.
const VOID_PART: usize = 2;
const LOOKS_PER_LEASE: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    const S: SessionId = SessionId(1);

    /// What is to be asked back of sessions nothing is asked of.
    fn ask(table: &mut HeldTable, count: usize, in_use: impl Fn(u64) -> bool) -> Vec<u64> {
        let wanted = table.ask_back(count, 100, |_| 0, |_, ino| in_use(ino.0));
        wanted.iter().map(|(_, ino)| ino.0).collect()
    }

    fn note(table: &mut HeldTable, session: SessionId, inos: std::ops::Range<u64>) {
        for ino in inos {
            table.note(session, InodeId(ino));
        }
    }

    #[test]
    fn the_oldest_beyond_the_bound_are_asked_back() {
        let mut table = HeldTable::new(32);
        note(&mut table, S, 0..32);
        assert!(!table.has_surplus());
        assert!(ask(&mut table, 100, |_| false).is_empty());
        note(&mut table, S, 32..40);
        // Given again: not among the oldest any more.
        table.note_given_back(S, InodeId(0));
        table.note(S, InodeId(0));
        assert!(table.has_surplus());
        // 40 are held, 30 may stay.
        assert_eq!(ask(&mut table, 3, |_| false), [1, 2, 3]);
        for ino in 1..4 {
            table.note_given_back(S, InodeId(ino));
        }
        let rest = ask(&mut table, 100, |ino| ino == 5);
        assert_eq!(rest, [4, 6, 7, 8, 9, 10, 11]);
        for ino in rest {
            table.note_given_back(S, InodeId(ino));
        }
        assert!(ask(&mut table, 100, |_| false).is_empty());
        assert!(!table.has_surplus());
    }

    #[test]
    fn what_was_given_back_leaves_the_list() {
        let mut table = HeldTable::new(32);
        table.note(S, InodeId(7));
        for _ in 0..1000 {
            note(&mut table, S, 10..30);
            for ino in 10..30 {
                table.note_given_back(S, InodeId(ino));
            }
        }
        let held = &table.sessions[&S];
        assert_eq!(held.count(), 1);
        assert!(held.given.len() < 64, "{} places", held.given.len());
        assert!(!table.has_surplus());
    }

    #[test]
    fn a_session_that_gives_nothing_back_gets_no_more() {
        let mut table = HeldTable::new(32);
        note(&mut table, S, 0..40);
        assert!(!table.is_behind(S));
        note(&mut table, S, 40..50);
        assert!(table.is_behind(S));
        for ino in ask(&mut table, 100, |_| false) {
            table.note_given_back(S, InodeId(ino));
        }
        assert!(!table.is_behind(S));
        table.forget(S);
        assert!(table.sessions.is_empty());
    }

    /// One that gave nothing back took all that may be under way, and nobody else was asked.
    #[test]
    fn a_session_that_answers_slowly_does_not_keep_others_from_being_asked() {
        let mut table = HeldTable::new(32);
        let others = [SessionId(2), SessionId(3)];
        for session in [S, others[0], others[1]] {
            note(&mut table, session, 0..40);
        }
        let slow = |session| if session == S { 4 } else { 0 };
        let mut asked = |count| {
            let wanted = table.ask_back(count, 4, slow, |_, _| false);
            wanted.iter().map(|(of, _)| of.0).collect::<Vec<_>>()
        };
        assert_eq!(asked(100), [2, 2, 2, 2, 3, 3, 3, 3]);
        // And they take turns.
        assert_eq!((asked(1), asked(1), asked(1)), (vec![2], vec![3], vec![2]));
    }

    /// A list of what is in use was gone through as a whole, each time.
    #[test]
    fn a_look_has_a_bound() {
        let mut table = HeldTable::new(8000);
        note(&mut table, S, 0..9000);
        let looked = std::cell::Cell::new(0);
        let in_use = |_| {
            looked.set(looked.get() + 1);
            true
        };
        assert!(ask(&mut table, 100, in_use).is_empty());
        assert_eq!(looked.get(), LOOK_MAX);
    }
}
