//! A commit, and its bytes in the log and in redo records.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::batch::Batch;
use crate::types::{KEY_BYTES_MAX, KeyRange, Revision, Versioned};
use crate::watch::Change;

/// The changes of a batch that was found to be valid, and its number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Commit {
    pub(crate) revision: Revision,
    /// Take effect first.
    pub(crate) range_deletes: Vec<KeyRange>,
    /// Puts and deletes, by ascending key.
    pub(crate) changes: Vec<(Bytes, Option<Bytes>)>,
}

impl Commit {
    /// Roughly the memory it takes.
    pub(crate) fn memory_bytes(&self) -> usize {
        let changes = self.changes.iter().map(|(key, value)| {
            CHANGE_OVERHEAD_BYTES + key.len() + value.as_ref().map_or(0, Bytes::len)
        });
        changes.sum::<usize>() + self.range_deletes.len() * CHANGE_OVERHEAD_BYTES
    }

    /// What the commit makes of a key; `None` if it does not touch it.
    pub(crate) fn lookup(&self, key: &[u8]) -> Option<Option<Versioned>> {
        match self
            .changes
            .binary_search_by(|(other, _)| other[..].cmp(key))
        {
            Ok(index) => {
                let value = self.changes.get(index)?.1.clone();
                let revision = self.revision;
                Some(value.map(|value| Versioned { value, revision }))
            }
            Err(_) => {
                let deleted = self.range_deletes.iter().any(|range| range.contains(key));
                deleted.then_some(None)
            }
        }
    }

    /// Decodes a record's payload; `None` if the bytes are no commit. Keys and values are slices
    /// of a copy, which does not hold the whole log segment in memory.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (revision, body) = bytes.split_first_chunk()?;
        let revision = Revision(u64::from_le_bytes(*revision));
        Self::from_body(revision, Bytes::copy_from_slice(body))
    }

    /// Decodes what [`encode_body`] has encoded. Keys and values are slices of it: one allocation
    /// for all, and nothing of what the caller passed in is kept.
    pub(crate) fn from_body(revision: Revision, mut body: Bytes) -> Option<Self> {
        let range_count = body.try_get_u32_le().ok()?;
        let change_count = body.try_get_u32_le().ok()?;
        let mut range_deletes = Vec::new();
        for _ in 0..range_count {
            let start_bytes = usize::from(body.try_get_u16_le().ok()?);
            let end_bytes = body.try_get_u16_le().ok()?;
            let start = take(&mut body, start_bytes)?;
            let end = match end_bytes {
                NO_END => None,
                end_bytes => Some(take(&mut body, usize::from(end_bytes))?),
            };
            range_deletes.push(KeyRange { start, end });
        }
        // The count comes from the record: do not trust it with more memory than the record has.
        let room = usize::try_from(change_count).ok()?.min(body.len() / 6);
        let mut changes: Vec<(Bytes, Option<Bytes>)> = Vec::with_capacity(room);
        for _ in 0..change_count {
            let key_bytes = usize::from(body.try_get_u16_le().ok()?);
            let value_bytes = body.try_get_u32_le().ok()?;
            let key = take(&mut body, key_bytes)?;
            if changes.last().is_some_and(|(last, _)| *last >= key) {
                return None;
            }
            let value = match value_bytes {
                NO_VALUE => None,
                value_bytes => Some(take(&mut body, usize::try_from(value_bytes).ok()?)?),
            };
            changes.push((key, value));
        }
        body.is_empty().then_some(Self {
            revision,
            range_deletes,
            changes,
        })
    }
}

/// Encodes the record of a batch without the revision in front, which is known only when the
/// commit is ordered. The batch has passed its check.
pub(crate) fn encode_body(batch: &Batch) -> Bytes {
    let count = batch.changes().len() + batch.range_deletes().len();
    let mut bytes = BytesMut::with_capacity(8 + batch.size_bytes() + count * 6);
    bytes.put_u32_le(length(batch.range_deletes().len()));
    bytes.put_u32_le(length(batch.changes().len()));
    for range in batch.range_deletes() {
        bytes.put_u16_le(key_length(&range.start));
        bytes.put_u16_le(range.end.as_ref().map_or(NO_END, |end| key_length(end)));
        bytes.put_slice(&range.start);
        bytes.put_slice(range.end.as_deref().unwrap_or_default());
    }
    for (key, value) in batch.changes() {
        bytes.put_u16_le(key_length(key));
        bytes.put_u32_le(value.as_ref().map_or(NO_VALUE, |value| length(value.len())));
        bytes.put_slice(key);
        bytes.put_slice(value.as_deref().unwrap_or_default());
    }
    bytes.freeze()
}

/// The changes of a commit inside `range`: range deletes cut to it first, then keys in order.
pub(crate) fn changes_within(commit: &Commit, range: &KeyRange) -> Vec<Change> {
    let mut changes = Vec::new();
    for deleted in &commit.range_deletes {
        let range = deleted.intersection(range);
        if !range.is_empty() {
            changes.push(Change::RangeDeleted { range });
        }
    }
    let start = commit
        .changes
        .partition_point(|(key, _)| *key < range.start);
    for (key, value) in commit.changes.iter().skip(start) {
        if !range.contains(key) {
            break;
        }
        let key = key.clone();
        changes.push(match value {
            Some(value) => Change::Put {
                key,
                value: value.clone(),
            },
            None => Change::Deleted { key },
        });
    }
    changes
}

fn length(length: usize) -> u32 {
    u32::try_from(length).expect("a checked batch is smaller than 4 GiB")
}

fn key_length(key: &[u8]) -> u16 {
    u16::try_from(key.len()).expect("a checked key is shorter than 64 KiB")
}

fn take(bytes: &mut Bytes, count: usize) -> Option<Bytes> {
    (count <= bytes.len()).then(|| bytes.split_to(count))
}

const NO_END: u16 = u16::MAX;
const NO_VALUE: u32 = u32::MAX;
/// What a change takes in the maps beside its key and value.
const CHANGE_OVERHEAD_BYTES: usize = 128;

const _: () = assert!(KEY_BYTES_MAX + 1 < NO_END as usize);

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn record(revision: u64, batch: &Batch) -> Vec<u8> {
        let mut bytes = revision.to_le_bytes().to_vec();
        bytes.extend_from_slice(&encode_body(batch));
        bytes
    }

    prop_compose! {
        fn batches()(
            puts in proptest::collection::btree_map(
                proptest::collection::vec(any::<u8>(), 1..20),
                proptest::option::of(proptest::collection::vec(any::<u8>(), 0..50)), 0..20),
            ranges in proptest::collection::vec(
                (proptest::collection::vec(any::<u8>(), 0..5),
                 proptest::option::of(proptest::collection::vec(any::<u8>(), 0..5))), 0..4),
        ) -> Batch {
            let mut batch = Batch::new();
            for (key, value) in puts {
                match value {
                    Some(value) => batch.put(key, value),
                    None => batch.delete(key),
                };
            }
            for (start, end) in ranges {
                batch.delete_range(KeyRange { start: start.into(), end: end.map(Bytes::from) });
            }
            batch
        }
    }

    proptest! {
        #[test]
        fn a_record_decodes_to_its_commit(batch in batches(), revision in any::<u64>()) {
            let decoded = Commit::decode(&record(revision, &batch)).unwrap();
            prop_assert_eq!(decoded.revision, Revision(revision));
            prop_assert_eq!(&decoded.range_deletes[..], batch.range_deletes());
            prop_assert_eq!(decoded.changes.into_iter().collect::<BTreeMap<_, _>>(),
                batch.changes().clone());
        }

        #[test]
        fn a_cut_record_is_none(batch in batches(), cut in any::<prop::sample::Index>()) {
            let bytes = record(1, &batch);
            prop_assert_eq!(Commit::decode(&bytes[..cut.index(bytes.len())]), None);
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Commit::decode(&bytes);
        }
    }
}
