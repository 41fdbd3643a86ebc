//! Batches: what is to hold, and what is to change if it does.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::error::Error;
use crate::types::{KEY_BYTES_MAX, KeyRange, Revision, VALUE_BYTES_MAX, Versioned};

/// Something that must hold for a batch to be committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Precondition {
    /// The key has no value.
    Absent(Bytes),
    /// The key has a value, and this commit wrote it.
    AtRevision(Bytes, Revision),
    /// The key has exactly this value.
    ValueEquals(Bytes, Bytes),
}

impl Precondition {
    /// The key it is about.
    #[must_use]
    pub fn key(&self) -> &Bytes {
        match self {
            Self::Absent(key) | Self::AtRevision(key, _) | Self::ValueEquals(key, _) => key,
        }
    }

    /// Whether it holds for what its key has now.
    #[must_use]
    pub fn holds(&self, now: Option<&Versioned>) -> bool {
        match (self, now) {
            (Self::Absent(_), None) => true,
            (Self::AtRevision(_, revision), Some(now)) => now.revision == *revision,
            (Self::ValueEquals(_, value), Some(now)) => now.value == *value,
            _ => false,
        }
    }
}

/// A set of preconditions and changes that is committed as one or not at all.
///
/// Range deletes take effect before puts and deletes: a put inside a deleted range stays. A later
/// put or delete of a key replaces an earlier one of the same batch. Sizes are checked when the
/// batch is committed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Batch {
    preconditions: Vec<Precondition>,
    range_deletes: Vec<KeyRange>,
    changes: BTreeMap<Bytes, Option<Bytes>>,
}

impl Batch {
    /// An empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Requires that `key` has no value.
    pub fn require_absent(&mut self, key: impl Into<Bytes>) -> &mut Self {
        self.preconditions.push(Precondition::Absent(key.into()));
        self
    }

    /// Requires that `key` was last written by the commit `revision`.
    pub fn require_revision(&mut self, key: impl Into<Bytes>, revision: Revision) -> &mut Self {
        self.preconditions
            .push(Precondition::AtRevision(key.into(), revision));
        self
    }

    /// Requires that `key` has exactly this value.
    pub fn require_value(&mut self, key: impl Into<Bytes>, value: impl Into<Bytes>) -> &mut Self {
        self.preconditions
            .push(Precondition::ValueEquals(key.into(), value.into()));
        self
    }

    /// Gives `key` a value.
    pub fn put(&mut self, key: impl Into<Bytes>, value: impl Into<Bytes>) -> &mut Self {
        self.changes.insert(key.into(), Some(value.into()));
        self
    }

    /// Removes `key`; fine if it has no value.
    pub fn delete(&mut self, key: impl Into<Bytes>) -> &mut Self {
        self.changes.insert(key.into(), None);
        self
    }

    /// Removes every key of the range that this batch does not put.
    pub fn delete_range(&mut self, range: KeyRange) -> &mut Self {
        if !range.is_empty() {
            self.range_deletes.push(range);
        }
        self
    }

    /// What has to hold, in the order in which it was added.
    #[must_use]
    pub fn preconditions(&self) -> &[Precondition] {
        &self.preconditions
    }

    /// The ranges to delete; none is empty.
    #[must_use]
    pub fn range_deletes(&self) -> &[KeyRange] {
        &self.range_deletes
    }

    /// Puts (`Some`) and deletes (`None`) by key.
    #[must_use]
    pub fn changes(&self) -> &BTreeMap<Bytes, Option<Bytes>> {
        &self.changes
    }

    /// Whether the batch changes nothing (it may still have preconditions).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.range_deletes.is_empty()
    }

    /// Size of all keys and values, without any overhead.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        let preconditions = self
            .preconditions
            .iter()
            .map(|precondition| match precondition {
                Precondition::ValueEquals(key, value) => key.len() + value.len(),
                other => other.key().len(),
            });
        let ranges = self.range_deletes.iter().map(range_bytes);
        let changes = self
            .changes
            .iter()
            .map(|(key, value)| key.len() + value.as_ref().map_or(0, Bytes::len));
        preconditions.chain(ranges).chain(changes).sum()
    }

    /// Checks all limits. Every backend does so before it commits.
    pub fn check(&self) -> Result<(), Error> {
        for precondition in &self.preconditions {
            check_key(precondition.key())?;
            if let Precondition::ValueEquals(_, value) = precondition {
                check_size("value", value.len(), VALUE_BYTES_MAX)?;
            }
        }
        for range in &self.range_deletes {
            check_size("key", range.start.len(), KEY_BYTES_MAX + 1)?;
            let end_bytes = range.end.as_ref().map_or(0, Bytes::len);
            check_size("key", end_bytes, KEY_BYTES_MAX + 1)?;
        }
        for (key, value) in &self.changes {
            check_key(key)?;
            check_size(
                "value",
                value.as_ref().map_or(0, Bytes::len),
                VALUE_BYTES_MAX,
            )?;
        }
        check_size("batch", self.size_bytes(), BATCH_BYTES_MAX)
    }
}

/// Checks that a key can be stored.
pub(crate) fn check_key(key: &[u8]) -> Result<(), Error> {
    if key.is_empty() {
        return Err(Error::Invalid {
            reason: "the empty key cannot be stored",
        });
    }
    check_size("key", key.len(), KEY_BYTES_MAX)
}

fn check_size(what: &'static str, bytes: usize, bytes_max: usize) -> Result<(), Error> {
    if bytes > bytes_max {
        return Err(Error::TooLarge {
            what,
            bytes,
            bytes_max,
        });
    }
    Ok(())
}

fn range_bytes(range: &KeyRange) -> usize {
    range.start.len() + range.end.as_ref().map_or(0, Bytes::len)
}

/// The largest [`Batch::size_bytes`].
pub const BATCH_BYTES_MAX: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_exact_and_name_what_is_too_large() {
        let key = |bytes: usize| vec![7; bytes];
        let fits = Batch::new().put(key(1024), vec![0; 1 << 20]).clone();
        assert_eq!(fits.check(), Ok(()));
        let too_large = |what, bytes, bytes_max| {
            Err(Error::TooLarge {
                what,
                bytes,
                bytes_max,
            })
        };
        assert_eq!(
            Batch::new().put(key(1025), "").check(),
            too_large("key", 1025, 1024)
        );
        assert_eq!(
            Batch::new().delete(key(1025)).check(),
            too_large("key", 1025, 1024)
        );
        assert_eq!(
            Batch::new().require_absent(key(1025)).check(),
            too_large("key", 1025, 1024)
        );
        let large = (1 << 20) + 1;
        assert_eq!(
            Batch::new().put("a", vec![0; large]).check(),
            too_large("value", large, 1 << 20)
        );
        let mut batch = Batch::new();
        for number in 0..9u8 {
            batch.put(vec![number], vec![0; 1 << 20]);
        }
        assert_eq!(
            batch.check(),
            too_large("batch", 9 * ((1 << 20) + 1), BATCH_BYTES_MAX)
        );
        assert!(matches!(
            Batch::new().put("", "").check(),
            Err(Error::Invalid { .. })
        ));
    }

    #[test]
    fn a_later_change_of_a_key_replaces_an_earlier_one() {
        let batch = Batch::new().put("a", "1").delete("a").put("a", "2").clone();
        assert_eq!(batch.changes().len(), 1);
        assert_eq!(batch.changes()[&b"a"[..]], Some(Bytes::from("2")));
    }
}
