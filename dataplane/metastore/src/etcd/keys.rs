//! Where things are in etcd, and how values are stored (`docs/formats/metastore.md`).

use bytes::{BufMut, Bytes};

use crate::error::Error;
use crate::types::{KeyRange, Revision, Versioned};

/// Number of a large batch, drawn at random.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RedoId(pub(crate) u64);

/// Names of everything below the store's prefix.
#[derive(Debug, Clone)]
pub(crate) struct Keys {
    prefix: Vec<u8>,
}

impl Keys {
    pub(crate) fn new(prefix: &[u8]) -> Self {
        Self {
            prefix: prefix.to_vec(),
        }
    }

    fn name(&self, kind: u8, rest: &[u8]) -> Vec<u8> {
        let mut name = Vec::with_capacity(self.prefix.len() + 1 + rest.len());
        name.extend_from_slice(&self.prefix);
        name.push(kind);
        name.extend_from_slice(rest);
        name
    }

    /// Start and end of everything of one kind.
    fn kind(&self, kind: u8) -> (Vec<u8>, Vec<u8>) {
        (self.name(kind, &[]), self.name(kind + 1, &[]))
    }

    pub(crate) fn data(&self, key: &[u8]) -> Vec<u8> {
        self.name(DATA, key)
    }

    /// Start and end of a range of keys, which is not empty.
    pub(crate) fn data_range(&self, range: &KeyRange) -> (Vec<u8>, Vec<u8>) {
        let end = range
            .end
            .as_ref()
            .map_or_else(|| self.kind(DATA).1, |end| self.data(end));
        (self.data(&range.start), end)
    }

    /// The key that is stored under a name.
    pub(crate) fn key(&self, name: &[u8]) -> Option<Bytes> {
        let rest = name.strip_prefix(&self.prefix[..])?;
        Some(Bytes::copy_from_slice(rest.strip_prefix(&[DATA])?))
    }

    pub(crate) fn version(&self) -> Vec<u8> {
        self.name(VERSION, &[])
    }

    /// Present while a large batch is under way.
    pub(crate) fn pending(&self) -> Vec<u8> {
        self.name(PENDING, &[])
    }

    pub(crate) fn part(&self, id: RedoId, index: u32) -> Vec<u8> {
        let mut rest = id.0.to_be_bytes().to_vec();
        rest.extend_from_slice(&index.to_be_bytes());
        self.name(PART, &rest)
    }

    /// Start and end of the parts of one large batch.
    pub(crate) fn parts(&self, id: RedoId) -> (Vec<u8>, Vec<u8>) {
        let start = self.name(PART, &id.0.to_be_bytes());
        let end = id.0.checked_add(1);
        let end = end.map(|end| self.name(PART, &end.to_be_bytes()));
        (start, end.unwrap_or_else(|| self.all_parts().1))
    }

    pub(crate) fn all_parts(&self) -> (Vec<u8>, Vec<u8>) {
        self.kind(PART)
    }

    pub(crate) fn outcome(&self, revision: Revision, id: RedoId) -> Vec<u8> {
        let mut rest = revision.0.to_be_bytes().to_vec();
        rest.extend_from_slice(&id.0.to_be_bytes());
        self.name(OUTCOME, &rest)
    }

    /// Start and end of all outcomes.
    pub(crate) fn outcomes(&self) -> (Vec<u8>, Vec<u8>) {
        self.kind(OUTCOME)
    }

    /// Start and end of the outcomes of large batches before `revision`.
    pub(crate) fn outcomes_before(&self, revision: Revision) -> (Vec<u8>, Vec<u8>) {
        (
            self.kind(OUTCOME).0,
            self.name(OUTCOME, &revision.0.to_be_bytes()),
        )
    }
}

/// Encodes a value whose revision is that of its transaction.
pub(crate) fn plain(value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1 + value.len());
    bytes.push(PLAIN);
    bytes.extend_from_slice(value);
    bytes
}

/// Encodes a value of a large batch, whose revision is that of the batch.
pub(crate) fn stamped(revision: Revision, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(9 + value.len());
    bytes.push(STAMPED);
    bytes.put_u64_le(revision.0);
    bytes.extend_from_slice(value);
    bytes
}

/// A stored value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) versioned: Versioned,
    /// Whether a large batch wrote it.
    pub(crate) stamped: bool,
}

/// Decodes what was stored by the transaction `mod_revision`.
pub(crate) fn decode(bytes: &[u8], mod_revision: i64) -> Result<Stored, Error> {
    let corrupt = || Error::Corrupt {
        cause: "a value in etcd has an unknown form".to_owned(),
    };
    let (&kind, rest) = bytes.split_first().ok_or_else(corrupt)?;
    let (revision, value) = match kind {
        PLAIN => (revision(mod_revision), rest),
        STAMPED => {
            let (revision, value) = rest.split_first_chunk().ok_or_else(corrupt)?;
            (Revision(u64::from_le_bytes(*revision)), value)
        }
        _ => return Err(corrupt()),
    };
    let versioned = Versioned {
        value: Bytes::copy_from_slice(value),
        revision,
    };
    Ok(Stored {
        versioned,
        stamped: kind == STAMPED,
    })
}

/// etcd counts in signed numbers, but never below zero.
pub(crate) fn revision(revision: i64) -> Revision {
    Revision(u64::try_from(revision).unwrap_or_default())
}

/// The number as etcd wants it; a number that etcd cannot reach becomes its last one.
pub(crate) fn etcd_revision(revision: Revision) -> i64 {
    i64::try_from(revision.0).unwrap_or(i64::MAX)
}

const DATA: u8 = b'k';
const OUTCOME: u8 = b'o';
const PENDING: u8 = b'p';
const PART: u8 = b'r';
const VERSION: u8 = b'v';
const PLAIN: u8 = 0;
const STAMPED: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_keep_the_order_of_keys_and_ranges_stay_inside_their_kind() {
        let keys = Keys::new(b"/a/");
        assert_eq!(keys.data(b"x"), b"/a/kx");
        assert_eq!(keys.key(b"/a/kx"), Some(Bytes::from("x")));
        assert_eq!(keys.key(b"/a/px"), None);
        let (start, end) = keys.data_range(&KeyRange::all());
        assert!(start <= keys.data(b"\0") && keys.data(&[255; 1024]) < end);
        for other in [keys.pending(), keys.version(), keys.part(RedoId(0), 0)] {
            assert!(other < start || other >= end);
        }
        let (start, end) = keys.parts(RedoId(u64::MAX));
        assert!(start <= keys.part(RedoId(u64::MAX), 0) && keys.part(RedoId(u64::MAX), 9) < end);
        assert!(keys.part(RedoId(u64::MAX - 1), u32::MAX) < start);
    }

    #[test]
    fn values_decode_to_what_was_stored() {
        let found = decode(&plain(b"abc"), 7).unwrap();
        assert_eq!(
            (found.versioned.revision, found.stamped),
            (Revision(7), false)
        );
        assert_eq!(&found.versioned.value[..], b"abc");
        let found = decode(&stamped(Revision(5), b"abc"), 7).unwrap();
        assert_eq!(
            (found.versioned.revision, found.stamped),
            (Revision(5), true)
        );
        assert_eq!(&found.versioned.value[..], b"abc");
        for damaged in [&b""[..], b"\x01123", b"\x02"] {
            assert!(matches!(decode(damaged, 7), Err(Error::Corrupt { .. })));
        }
    }
}
