//! Changes in memory that lie over an older state.

use std::collections::BTreeMap;
use std::ops::Bound;

use bytes::Bytes;

use crate::codec::Commit;
use crate::types::{KeyRange, Revision, Versioned};

/// What a layer says about a key.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// It has this value, or none.
    Known(Option<Versioned>),
    /// Ask the layer below.
    Below,
}

/// The last change of a key; without a value it was deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) revision: Revision,
    pub(crate) value: Option<Bytes>,
}

impl Cell {
    pub(crate) fn versioned(&self) -> Option<Versioned> {
        let value = self.value.clone()?;
        Some(Versioned {
            value,
            revision: self.revision,
        })
    }
}

/// Commits that were applied on top of each other: deleted ranges, and over them cells.
#[derive(Debug, Default)]
pub(crate) struct Layer {
    cells: BTreeMap<Bytes, Cell>,
    deleted: RangeSet,
    memory_bytes: usize,
}

impl Layer {
    pub(crate) fn apply(&mut self, commit: &Commit) {
        for range in &commit.range_deletes {
            let inside: Vec<Bytes> = self
                .cells
                .range::<[u8], _>(range.bounds())
                .map(|(key, _)| key.clone())
                .collect();
            for key in inside {
                self.cells.remove(&key);
            }
            self.deleted.insert(range.clone());
        }
        for (key, value) in &commit.changes {
            let cell = Cell {
                revision: commit.revision,
                value: value.clone(),
            };
            self.cells.insert(key.clone(), cell);
        }
        // An upper bound: what was replaced is not taken off.
        self.memory_bytes += commit.memory_bytes();
    }

    pub(crate) fn lookup(&self, key: &[u8]) -> Lookup {
        match self.cells.get(key) {
            Some(cell) => Lookup::Known(cell.versioned()),
            None if self.deleted.covers(key) => Lookup::Known(None),
            None => Lookup::Below,
        }
    }

    pub(crate) fn cells<'a>(
        &'a self,
        range: &KeyRange,
    ) -> impl Iterator<Item = (&'a Bytes, &'a Cell)> + Send + use<'a> {
        self.cells.range::<[u8], _>(range.bounds())
    }

    pub(crate) fn deleted(&self) -> &RangeSet {
        &self.deleted
    }

    pub(crate) fn cell_count(&self) -> usize {
        self.cells.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.cells.is_empty() && self.deleted.is_empty()
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }
}

/// A set of keys made of ranges, which are kept apart from each other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RangeSet {
    /// End by start.
    ranges: BTreeMap<Bytes, Option<Bytes>>,
}

impl RangeSet {
    pub(crate) fn insert(&mut self, range: KeyRange) {
        if range.is_empty() {
            return;
        }
        let KeyRange { mut start, mut end } = range;
        // Swallow every range that overlaps or touches.
        while let Some((other_start, other_end)) = self.last_starting_up_to(end.as_ref()) {
            if other_end
                .as_ref()
                .is_some_and(|other_end| *other_end < start)
            {
                break;
            }
            let (other_start, other_end) = (other_start.clone(), other_end.clone());
            self.ranges.remove(&other_start);
            start = start.min(other_start);
            end = match (end, other_end) {
                (Some(a), Some(b)) => Some(a.max(b)),
                _ => None,
            };
        }
        self.ranges.insert(start, end);
    }

    fn last_starting_up_to(&self, end: Option<&Bytes>) -> Option<(&Bytes, &Option<Bytes>)> {
        let bound = end.map_or(Bound::Unbounded, Bound::Included);
        self.ranges
            .range::<Bytes, _>((Bound::Unbounded, bound))
            .next_back()
    }

    pub(crate) fn covers(&self, key: &[u8]) -> bool {
        let mut before = self
            .ranges
            .range::<[u8], _>((Bound::Unbounded, Bound::Included(key)));
        before
            .next_back()
            .is_some_and(|(_, end)| end.as_ref().is_none_or(|end| key < &end[..]))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = KeyRange> + '_ {
        self.ranges.iter().map(|(start, end)| KeyRange {
            start: start.clone(),
            end: end.clone(),
        })
    }

    /// The part of the set inside `range`.
    pub(crate) fn within(&self, range: &KeyRange) -> Self {
        let mut part = Self::default();
        if self.ranges.is_empty() || range.is_empty() {
            return part;
        }
        // The first candidate may start before the range.
        let first = self.ranges.range(..=range.start.clone()).next_back();
        let after = (Bound::Excluded(&range.start[..]), range.bounds().1);
        for (start, end) in first.into_iter().chain(self.ranges.range::<[u8], _>(after)) {
            let other = KeyRange {
                start: start.clone(),
                end: end.clone(),
            };
            part.insert(range.intersection(&other));
        }
        part
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ranges() -> impl Strategy<Value = KeyRange> {
        (0..12u8, proptest::option::of(0..12u8)).prop_map(|(start, end)| KeyRange {
            start: vec![start].into(),
            end: end.map(|end| vec![end].into()),
        })
    }

    proptest! {
        #[test]
        fn a_set_covers_what_its_ranges_cover(
            inserted in proptest::collection::vec(ranges(), 0..8), window in ranges(),
        ) {
            let mut set = RangeSet::default();
            for range in &inserted {
                set.insert(range.clone());
            }
            let part = set.within(&window);
            for key in 0..14u8 {
                let expected = inserted.iter().any(|range| range.contains(&[key]));
                prop_assert_eq!(set.covers(&[key]), expected);
                prop_assert_eq!(set.iter().filter(|r| r.contains(&[key])).count() == 1, expected);
                prop_assert_eq!(part.covers(&[key]), expected && window.contains(&[key]));
            }
        }
    }

    #[test]
    fn a_put_in_a_deleted_range_is_seen_and_the_rest_is_known_to_be_gone() {
        let mut layer = Layer::default();
        let put = |key: &'static str| (Bytes::from(key), Some(Bytes::from("v")));
        layer.apply(&Commit {
            revision: Revision(1),
            range_deletes: vec![],
            changes: vec![put("b"), put("x")],
        });
        layer.apply(&Commit {
            revision: Revision(2),
            range_deletes: vec![KeyRange::new("a", "m")],
            changes: vec![put("c")],
        });
        assert_eq!(layer.lookup(b"b"), Lookup::Known(None));
        assert!(matches!(layer.lookup(b"c"), Lookup::Known(Some(found)) if found.revision.0 == 2));
        assert!(matches!(layer.lookup(b"x"), Lookup::Known(Some(found)) if found.revision.0 == 1));
        assert_eq!(layer.lookup(b"m"), Lookup::Below);
    }
}
