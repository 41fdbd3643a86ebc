//! flock and byte-range locks.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use hither_proto::ids::{InodeId, SessionId};
use hither_proto::stored::{HeldLock, LockTable};
use prost::Message;

use super::run::{Blocker, Core};
use crate::keys;

/// Locks of all files.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    files: BTreeMap<InodeId, Vec<HeldLock>>,
}

impl Locks {
    /// The lock table as it was stored.
    pub(crate) fn restored(stored: impl IntoIterator<Item = (InodeId, LockTable)>) -> Self {
        Self {
            files: stored
                .into_iter()
                .map(|(ino, table)| (ino, table.locks))
                .collect(),
        }
    }

    /// A lock of another owner that stands in the way, if any.
    pub(crate) fn conflict(&self, ino: InodeId, wanted: &HeldLock) -> Option<HeldLock> {
        self.files
            .get(&ino)?
            .iter()
            .find(|held| {
                held.flock == wanted.flock
                    && !same_owner(held, wanted)
                    && (held.exclusive || wanted.exclusive)
                    && held.start <= wanted.end
                    && wanted.start <= held.end
            })
            .cloned()
    }

    /// Whether taking (or giving back) the range leaves more locks on the file than are stored.
    pub(crate) fn too_many(&self, ino: InodeId, wanted: &HeldLock, held: bool) -> bool {
        let Some(locks) = self.files.get(&ino) else {
            return false;
        };
        if locks.len() < LOCKS_MAX {
            return false;
        }
        let mut after = Self::default();
        after.files.insert(ino, locks.clone());
        after.set(ino, wanted, held);
        after.files.get(&ino).map_or(0, Vec::len) > locks.len()
    }

    /// Takes the range from the owner, and gives it back as wanted if `held` is set.
    ///
    /// What the owner held partly inside the range keeps its parts outside, as POSIX wants.
    pub(crate) fn set(&mut self, ino: InodeId, wanted: &HeldLock, held: bool) {
        let locks = self.files.entry(ino).or_default();
        let old = std::mem::take(locks);
        for lock in old {
            let apart = lock.end < wanted.start || wanted.end < lock.start;
            if lock.flock != wanted.flock || !same_owner(&lock, wanted) || apart {
                locks.push(lock);
                continue;
            }
            if lock.start < wanted.start {
                locks.push(HeldLock {
                    end: wanted.start - 1,
                    ..lock
                });
            }
            if lock.end > wanted.end {
                locks.push(HeldLock {
                    start: wanted.end + 1,
                    ..lock
                });
            }
        }
        if held {
            locks.push(*wanted);
        }
        if locks.is_empty() {
            self.files.remove(&ino);
        }
    }

    /// Drops all locks of a session; the files that had some.
    pub(crate) fn forget(&mut self, session: SessionId) -> BTreeSet<InodeId> {
        let mut changed = BTreeSet::new();
        self.files.retain(|ino, locks| {
            let before = locks.len();
            locks.retain(|lock| lock.session != session.0);
            if locks.len() != before {
                changed.insert(*ino);
            }
            !locks.is_empty()
        });
        changed
    }

    fn owners(&self) -> BTreeSet<SessionId> {
        let locks = self.files.values().flatten();
        locks.map(|lock| SessionId(lock.session)).collect()
    }

    pub(crate) fn count_of(&self, session: SessionId) -> u64 {
        self.files
            .values()
            .flatten()
            .filter(|lock| lock.session == session.0)
            .count() as u64
    }

    fn encode(&self, ino: InodeId) -> Option<Bytes> {
        let locks = self.files.get(&ino)?.clone();
        Some(LockTable { locks }.encode_to_vec().into())
    }
}

impl Core {
    /// Encodes the lock tables a batch changes.
    pub(crate) fn lock_writes(&self, files: &BTreeSet<InodeId>) -> Vec<(Bytes, Option<Bytes>)> {
        let encoded = |ino: &InodeId| (keys::locks(*ino), self.locks.encode(*ino));
        files.iter().map(encoded).collect()
    }

    pub(crate) fn store_locks(&mut self, ino: InodeId) {
        self.open.touch_locks(ino);
        self.wake(&Blocker::Lock(ino));
    }

    /// Drops locks of sessions nobody knows: they would be held for ever.
    pub(crate) fn drop_ownerless_locks(&mut self) {
        let owners: BTreeSet<SessionId> = self.locks.owners();
        for session in owners {
            if !self.sessions.contains_key(&session) {
                tracing::warn!(
                    session = session.0,
                    "locks of an unknown session are dropped"
                );
                self.unlock_session(session);
            }
        }
    }

    pub(crate) fn unlock_session(&mut self, session: SessionId) {
        for ino in self.locks.forget(session) {
            self.store_locks(ino);
        }
    }
}

/// Locks on one file: their table must fit into a value of the store.
const LOCKS_MAX: usize = 8192;

fn same_owner(a: &HeldLock, b: &HeldLock) -> bool {
    a.session == b.session && a.owner == b.owner
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "numbers below 16")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const INO: InodeId = InodeId(20);

    fn lock(owner: u64, start: u64, end: u64, exclusive: bool) -> HeldLock {
        HeldLock {
            session: 1,
            owner,
            flock: false,
            exclusive,
            start,
            end,
            pid: 1,
        }
    }

    proptest! {
        /// Against one flag per byte and owner.
        #[test]
        fn ranges_are_split_and_replaced_as_bytes_would_be(
            steps in prop::collection::vec((0u64..3, 0u64..16, 0u64..16, 0u8..3), 1..40)
        ) {
            let mut locks = Locks::default();
            let mut bytes = [[0u8; 16]; 3];
            for (owner, a, b, what) in steps {
                let (start, end) = (a.min(b), a.max(b));
                let wanted = lock(owner, start, end, what == 2);
                let free = (start..=end).all(|at| {
                    (0..3).filter(|other| *other != owner).all(|other| {
                        let held = bytes[other as usize][at as usize];
                        held == 0 || (held == 1 && what == 1)
                    })
                });
                if what != 0 {
                    prop_assert_eq!(locks.conflict(INO, &wanted).is_none(), free);
                }
                if what == 0 || free {
                    locks.set(INO, &wanted, what != 0);
                    for at in start..=end {
                        bytes[owner as usize][at as usize] = what;
                    }
                }
            }
            for owner in 0..3u64 {
                for at in 0..16u64 {
                    let held = locks.files.get(&INO).into_iter().flatten()
                        .filter(|l| l.owner == owner && l.start <= at && at <= l.end)
                        .map(|l| if l.exclusive { 2 } else { 1 })
                        .collect::<Vec<u8>>();
                    let expected = match bytes[owner as usize][at as usize] {
                        0 => vec![],
                        what => vec![what],
                    };
                    prop_assert_eq!(held, expected);
                }
            }
        }
    }

    #[test]
    fn flock_and_ranges_do_not_see_each_other_and_sessions_are_forgotten() {
        let mut locks = Locks::default();
        locks.set(INO, &lock(1, 0, u64::MAX, true), true);
        let flock = HeldLock {
            flock: true,
            ..lock(2, 0, u64::MAX, true)
        };
        assert_eq!(locks.conflict(INO, &flock), None);
        assert!(locks.conflict(INO, &lock(2, 5, 5, false)).is_some());
        assert_eq!(locks.count_of(SessionId(1)), 1);
        assert_eq!(locks.forget(SessionId(1)), BTreeSet::from([INO]));
        assert_eq!(locks.conflict(INO, &lock(2, 5, 5, false)), None);
    }
}
