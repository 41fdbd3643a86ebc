//! Entries of one directory, as far as a mount knows them, in the order of listings.

use std::collections::BTreeMap;
use std::ops::Bound;

use bytes::Bytes;
use hither_proto::ids::{InodeId, NameHash};

/// Place of an entry in its directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    pub(crate) hash: NameHash,
    pub(crate) name: Bytes,
}

impl Position {
    pub(crate) fn of(name: &Bytes) -> Self {
        Self {
            hash: NameHash::of(name),
            name: name.clone(),
        }
    }
}

/// What a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) ino: InodeId,
    /// File type bits of the mode.
    pub(crate) kind: u32,
}

impl Target {
    pub(crate) fn of(inode: &hither_proto::stored::Inode) -> Self {
        Self {
            ino: InodeId(inode.ino),
            kind: inode.mode & TYPE_MASK,
        }
    }
}

/// Known entries. Without the lease nothing is known.
#[derive(Debug, Default)]
pub(crate) struct Entries {
    leased: bool,
    /// Every entry of the directory is known: what is not known is not there.
    complete: bool,
    /// `None`: known to be absent; not used while all are known.
    known: BTreeMap<Position, Option<Target>>,
    /// Moment of the recall clock at which this mount last changed a name: what was read before
    /// is not taken in.
    changed_at: u64,
    /// Requests that a complete directory would have saved.
    misses: u32,
    /// The whole directory is being fetched.
    fetching: bool,
}

impl Entries {
    pub(crate) fn is_leased(&self) -> bool {
        self.leased
    }

    pub(crate) fn len(&self) -> usize {
        self.known.len()
    }

    /// `None`: not known; `Some(None)`: there is no such name.
    pub(crate) fn lookup(&self, name: &Bytes) -> Option<Option<Target>> {
        if !self.leased {
            return None;
        }
        let found = self.known.get(&Position::of(name)).copied();
        found.or_else(|| self.complete.then_some(None))
    }

    /// Takes in what the server says of a name under the lease.
    pub(crate) fn learn(&mut self, name: &Bytes, target: Option<Target>) {
        self.leased = true;
        self.insert(Position::of(name), target);
    }

    /// Whether something read at this moment is not older than the mount's own changes.
    pub(crate) fn takes(&self, read_at: u64) -> bool {
        self.changed_at <= read_at
    }

    /// This mount itself has changed a name.
    pub(crate) fn changed(&mut self, clock: u64) {
        self.changed_at = clock;
    }

    /// A name changed by this mount itself.
    pub(crate) fn set(&mut self, name: &Bytes, target: Option<Target>, clock: u64) {
        self.changed_at = clock;
        if self.leased {
            self.insert(Position::of(name), target);
        }
    }

    fn insert(&mut self, position: Position, target: Option<Target>) {
        if self.complete && target.is_none() {
            self.known.remove(&position);
        } else {
            self.known.insert(position, target);
        }
    }

    /// Takes in an entry of a listing.
    pub(crate) fn learn_listed(&mut self, position: Position, target: Target) {
        self.leased = true;
        self.known.insert(position, Some(target));
    }

    /// All entries have been taken in.
    pub(crate) fn set_complete(&mut self) {
        self.leased = true;
        self.complete = true;
        self.known.retain(|_, target| target.is_some());
    }

    /// A name is no longer known.
    pub(crate) fn forget(&mut self, name: &Bytes) {
        self.known.remove(&Position::of(name));
        self.complete = false;
    }

    /// No name is known any more; the lease stays.
    pub(crate) fn forget_all(&mut self) {
        self.known.clear();
        self.complete = false;
    }

    /// The lease is taken back. Whether anything was known under it.
    pub(crate) fn give_back(&mut self) -> bool {
        self.forget_all();
        std::mem::take(&mut self.leased)
    }

    /// Up to `limit` entries after `after`, and whether nothing follows; `None` unless all are
    /// known.
    pub(crate) fn list(
        &self,
        after: Option<&Position>,
        limit: usize,
    ) -> Option<(Vec<(Position, Target)>, bool)> {
        if !self.leased || !self.complete {
            return None;
        }
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut rest = self
            .known
            .range((from, Bound::Unbounded))
            .filter_map(|(position, target)| Some((position, (*target)?)));
        let page = rest
            .by_ref()
            .take(limit)
            .map(|(position, target)| (position.clone(), target))
            .collect();
        Some((page, rest.next().is_none()))
    }

    /// Notes a request for a single name in a directory of so many entries. Says, once in a
    /// while, that fetching the whole directory would have been cheaper.
    pub(crate) fn count_miss(&mut self, entries: u64) -> bool {
        self.misses = self.misses.saturating_add(1);
        let due = !self.complete
            && !self.fetching
            && self.misses >= MISSES_MIN
            && u64::from(self.misses).saturating_mul(ENTRIES_PER_MISS) >= entries;
        if due {
            self.misses = 0;
            self.fetching = true;
        }
        due
    }

    /// Fetching has ended, in one way or another.
    pub(crate) fn fetched(&mut self) {
        self.fetching = false;
    }
}

const TYPE_MASK: u32 = 0o170_000;
/// Single names asked for before a directory is fetched as a whole.
const MISSES_MIN: u32 = 8;
/// An entry in a listing costs about this many times less than one that is asked for.
const ENTRIES_PER_MISS: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn target(ino: u64) -> Target {
        Target {
            ino: InodeId(ino),
            kind: 0o100_000,
        }
    }

    fn name(n: u64) -> Bytes {
        Bytes::from(n.to_string())
    }

    #[test]
    fn pages_of_a_complete_directory_hold_every_entry_once_in_order() {
        let mut entries = Entries::default();
        entries.set_complete();
        for n in 0..100 {
            entries.learn(&name(n), Some(target(n)));
        }
        entries.set(&name(7), None, 1);
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let (page, end) = entries.list(after.as_ref(), 9).expect("all are known");
            after = page.last().map(|(position, _)| position.clone());
            all.extend(page);
            if end {
                break;
            }
        }
        assert_eq!(all.len(), 99);
        assert!(all.is_sorted_by(|a, b| a.0 < b.0));
        assert!(all.iter().all(|(position, _)| position.name != name(7)));
        entries.forget(&name(8));
        assert_eq!(entries.list(None, 9), None, "a name is missing");
    }

    #[test]
    fn absence_is_known_of_single_names_and_of_all_when_complete() {
        let mut entries = Entries::default();
        entries.set(&name(1), None, 1);
        assert_eq!(entries.lookup(&name(1)), None, "no lease");
        entries.learn(&name(1), None);
        assert_eq!(entries.lookup(&name(1)), Some(None));
        assert_eq!(entries.lookup(&name(2)), None);
        entries.set_complete();
        assert_eq!(entries.len(), 0, "needs no mark of what is absent");
        assert_eq!(entries.lookup(&name(2)), Some(None));
        assert!(entries.give_back());
        assert_eq!(entries.lookup(&name(2)), None);
        assert!(!entries.give_back(), "nothing is held any more");
    }

    #[test]
    fn a_directory_is_fetched_when_single_names_have_cost_as_much() {
        let mut entries = Entries::default();
        let due = |entries: &mut Entries, size| (1..=1000).find(|_| entries.count_miss(size));
        assert_eq!(due(&mut entries, 10), Some(u64::from(MISSES_MIN)));
        assert_eq!(due(&mut entries, 10), None, "under way");
        entries.fetched();
        assert_eq!(
            due(&mut entries, 6400 + 64 * 1000),
            Some(100),
            "misses count on"
        );
        entries.fetched();
        assert_eq!(due(&mut entries, 1 << 40), None);
        entries.set_complete();
        assert_eq!(due(&mut entries, 10), None);
    }
}
