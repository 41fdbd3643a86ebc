//! Keys, values, ranges and revisions.

use std::fmt;
use std::ops::Bound;

use bytes::Bytes;

/// Number of a commit. Grows with each commit that changes the store; the same number never stands
/// for two commits. Numbers of different stores have nothing to do with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Revision(pub u64);

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A value and the commit that wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versioned {
    /// The value.
    pub value: Bytes,
    /// The commit that wrote it last, as [`MetaStore::commit`](crate::MetaStore::commit) returned
    /// it.
    pub revision: Revision,
}

/// A key with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: Bytes,
    /// Its value and revision.
    pub versioned: Versioned,
}

/// Part of the result of a scan, as it was at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ScanPage {
    /// Entries in the order of their keys. May be fewer than asked for while there is more, but
    /// then there is at least one.
    pub entries: Vec<Entry>,
    /// Where the next scan of the range has to start; `None` when this was the end of the range.
    pub resume: Option<Bytes>,
    /// The last commit that this page can show.
    pub revision: Revision,
}

impl ScanPage {
    /// Whether the range has more than this page.
    #[must_use]
    pub fn more(&self) -> bool {
        self.resume.is_some()
    }
}

/// The keys from `start` on and before `end`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyRange {
    /// The first key of the range.
    pub start: Bytes,
    /// The first key after the range; `None` if it has no end.
    pub end: Option<Bytes>,
}

impl KeyRange {
    /// The keys from `start` on and before `end`.
    #[must_use]
    pub fn new(start: impl Into<Bytes>, end: impl Into<Bytes>) -> Self {
        Self {
            start: start.into(),
            end: Some(end.into()),
        }
    }

    /// Every key.
    #[must_use]
    pub fn all() -> Self {
        Self {
            start: Bytes::new(),
            end: None,
        }
    }

    /// The keys that begin with `prefix`.
    #[must_use]
    pub fn prefix(prefix: impl Into<Bytes>) -> Self {
        let start = prefix.into();
        let end = start.iter().rposition(|&byte| byte != u8::MAX).map(|last| {
            let mut end = start[..=last].to_vec();
            end[last] += 1;
            Bytes::from(end)
        });
        Self { start, end }
    }

    /// The part of the range from `start` on.
    #[must_use]
    pub fn from_key(&self, start: Bytes) -> Self {
        Self {
            start: start.max(self.start.clone()),
            end: self.end.clone(),
        }
    }

    /// Whether `key` is in the range.
    #[must_use]
    pub fn contains(&self, key: &[u8]) -> bool {
        key >= &self.start[..] && self.end.as_ref().is_none_or(|end| key < &end[..])
    }

    /// Whether no key can be in the range.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.end.as_ref().is_some_and(|end| *end <= self.start)
    }

    /// The keys that are in both ranges.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        let end = match (&self.end, &other.end) {
            (Some(a), Some(b)) => Some(a.min(b).clone()),
            (a, b) => a.as_ref().or(b.as_ref()).cloned(),
        };
        Self {
            start: self.start.clone().max(other.start.clone()),
            end,
        }
    }

    /// The range as standard bounds; never starts after its end.
    pub(crate) fn bounds(&self) -> (Bound<&[u8]>, Bound<&[u8]>) {
        let start = Bound::Included(&self.start[..]);
        match &self.end {
            None => (start, Bound::Unbounded),
            Some(end) if *end > self.start => (start, Bound::Excluded(&end[..])),
            Some(_) => (start, Bound::Excluded(&self.start[..])),
        }
    }
}

/// The longest key in bytes. The shortest has one byte.
pub const KEY_BYTES_MAX: usize = 1 << 10;
/// The longest value in bytes.
pub const VALUE_BYTES_MAX: usize = 1 << 20;
/// The most entries of one [`ScanPage`]; a larger limit means this one.
pub const SCAN_ENTRIES_MAX: usize = 4096;
/// A page ends after the entry that takes it past this size.
pub(crate) const SCAN_BYTES_MAX: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_prefix_range_has_exactly_the_keys_with_the_prefix(
            prefix in proptest::collection::vec(prop_oneof![Just(0u8), Just(254), Just(255)], 0..4),
            key in proptest::collection::vec(prop_oneof![Just(0u8), Just(254), Just(255)], 0..6),
        ) {
            let range = KeyRange::prefix(prefix.clone());
            prop_assert_eq!(range.contains(&key), key.starts_with(&prefix));
        }

        #[test]
        fn an_intersection_has_the_keys_of_both(
            a in ranges(), b in ranges(), key in proptest::collection::vec(0..4u8, 0..3),
        ) {
            let both = a.intersection(&b);
            prop_assert_eq!(both.contains(&key), a.contains(&key) && b.contains(&key));
            prop_assert!(!(both.is_empty() && both.contains(&key)));
        }
    }

    fn ranges() -> impl Strategy<Value = KeyRange> {
        let key = || proptest::collection::vec(0..4u8, 0..3);
        (key(), proptest::option::of(key())).prop_map(|(start, end)| KeyRange {
            start: start.into(),
            end: end.map(Bytes::from),
        })
    }
}
