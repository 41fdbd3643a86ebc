//! Large batches: their record, and the pieces in which they are applied. Pure.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::batch::{Batch, Precondition};
use crate::codec::{Commit, encode_body};
use crate::error::Error;
use crate::etcd::keys::RedoId;
use crate::types::{KeyRange, Revision};

/// A large batch as its record has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Redo {
    pub(crate) preconditions: Vec<Precondition>,
    pub(crate) commit: Commit,
}

/// A part of a large batch that fits one transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece<'a> {
    RangeDeletes(&'a [KeyRange]),
    Changes(&'a [(Bytes, Option<Bytes>)]),
}

impl Redo {
    /// Encodes the record of a batch.
    pub(crate) fn encode(batch: &Batch) -> Bytes {
        let mut rest = BytesMut::with_capacity(batch.size_bytes());
        rest.put_u32_le(u32_of(batch.preconditions().len()));
        for precondition in batch.preconditions() {
            let (kind, key) = match precondition {
                Precondition::Absent(key) => (ABSENT, key),
                Precondition::AtRevision(key, _) => (AT_REVISION, key),
                Precondition::ValueEquals(key, _) => (VALUE_EQUALS, key),
            };
            rest.put_u8(kind);
            rest.put_u32_le(u32_of(key.len()));
            rest.put_slice(key);
            match precondition {
                Precondition::Absent(_) => {}
                Precondition::AtRevision(_, revision) => rest.put_u64_le(revision.0),
                Precondition::ValueEquals(_, value) => {
                    rest.put_u32_le(u32_of(value.len()));
                    rest.put_slice(value);
                }
            }
        }
        rest.put_slice(&encode_body(batch));
        let mut record = BytesMut::with_capacity(8 + rest.len());
        record.put_u32_le(MAGIC);
        record.put_u32_le(checksum(&rest));
        record.put_slice(&rest);
        record.freeze()
    }

    /// Decodes a record; the revision is that of the batch.
    pub(crate) fn decode(record: Bytes, revision: Revision) -> Result<Self, Error> {
        let corrupt = || Error::Corrupt {
            cause: "the record of a large batch is damaged".to_owned(),
        };
        Self::try_decode(record, revision).ok_or_else(corrupt)
    }

    fn try_decode(mut record: Bytes, revision: Revision) -> Option<Self> {
        let (magic, crc) = (record.try_get_u32_le().ok()?, record.try_get_u32_le().ok()?);
        if magic != MAGIC || crc != checksum(&record) {
            return None;
        }
        let mut preconditions = Vec::new();
        for _ in 0..record.try_get_u32_le().ok()? {
            let kind = record.try_get_u8().ok()?;
            let key = take(&mut record)?;
            preconditions.push(match kind {
                ABSENT => Precondition::Absent(key),
                AT_REVISION => {
                    Precondition::AtRevision(key, Revision(record.try_get_u64_le().ok()?))
                }
                VALUE_EQUALS => Precondition::ValueEquals(key, take(&mut record)?),
                _ => return None,
            });
        }
        let commit = Commit::from_body(revision, record)?;
        Some(Self {
            preconditions,
            commit,
        })
    }

    /// The pieces of the batch, in the order in which they have to be applied. Part of the format:
    /// whoever goes on with a batch cuts it as the one before has.
    pub(crate) fn pieces(&self) -> Vec<Piece<'_>> {
        let ranges = self.commit.range_deletes.chunks(PIECE_OPERATIONS_MAX);
        let mut pieces: Vec<_> = ranges.map(Piece::RangeDeletes).collect();
        let changes = &self.commit.changes[..];
        let (mut start, mut bytes) = (0, 0);
        for (index, (key, value)) in changes.iter().enumerate() {
            let size = key.len() + value.as_ref().map_or(0, Bytes::len);
            let full = index - start >= PIECE_OPERATIONS_MAX || bytes + size > PIECE_BYTES_MAX;
            if index > start && full {
                pieces.push(Piece::Changes(&changes[start..index]));
                (start, bytes) = (index, 0);
            }
            bytes += size;
        }
        if start < changes.len() {
            pieces.push(Piece::Changes(&changes[start..]));
        }
        pieces
    }
}

/// What the pending key says: which large batch is under way and how far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) id: RedoId,
    pub(crate) parts: u32,
    pub(crate) stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Nobody has decided yet whether its preconditions hold. Nothing can change meanwhile.
    Proposed,
    /// They hold, and this is the next piece to be applied.
    Applying(u32),
}

impl Head {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![FORMAT];
        bytes.put_u64_le(self.id.0);
        bytes.put_u32_le(self.parts);
        match self.stage {
            Stage::Proposed => bytes.put_u8(0),
            Stage::Applying(piece) => {
                bytes.put_u8(1);
                bytes.put_u32_le(piece);
            }
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Error> {
        let corrupt = || Error::Corrupt {
            cause: "the pending key in etcd has an unknown form".to_owned(),
        };
        Self::try_decode(bytes).ok_or_else(corrupt)
    }

    fn try_decode(mut bytes: &[u8]) -> Option<Self> {
        if bytes.try_get_u8().ok()? != FORMAT {
            return None;
        }
        let id = RedoId(bytes.try_get_u64_le().ok()?);
        let parts = bytes.try_get_u32_le().ok()?;
        let stage = match bytes.try_get_u8().ok()? {
            0 => Stage::Proposed,
            1 => Stage::Applying(bytes.try_get_u32_le().ok()?),
            _ => return None,
        };
        bytes.is_empty().then_some(Self { id, parts, stage })
    }
}

/// How a large batch ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Committed,
    /// The first precondition that did not hold.
    Failed(u32),
}

impl Outcome {
    pub(crate) fn encode(self) -> Vec<u8> {
        match self {
            Self::Committed => vec![0],
            Self::Failed(index) => [&[1], &index.to_le_bytes()[..]].concat(),
        }
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Error> {
        match bytes {
            [0] => Ok(Self::Committed),
            [1, a, b, c, d] => Ok(Self::Failed(u32::from_le_bytes([*a, *b, *c, *d]))),
            _ => Err(Error::Corrupt {
                cause: "an outcome in etcd has an unknown form".to_owned(),
            }),
        }
    }
}

fn take(record: &mut Bytes) -> Option<Bytes> {
    let count = usize::try_from(record.try_get_u32_le().ok()?).ok()?;
    (count <= record.len()).then(|| record.split_to(count))
}

fn checksum(bytes: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    digest.update(bytes);
    u32::try_from(digest.finalize()).expect("a 32-bit checksum fits 32 bits")
}

fn u32_of(length: usize) -> u32 {
    u32::try_from(length).expect("a checked batch is smaller than 4 GiB")
}

/// etcd takes 128 operations by default; the piece's own bookkeeping needs a few.
const PIECE_OPERATIONS_MAX: usize = 100;
/// etcd takes requests of 1.5 MiB by default; the largest entry alone is a little over 1 MiB.
const PIECE_BYTES_MAX: usize = 1 << 20;
const MAGIC: u32 = u32::from_le_bytes(*b"REDO");
const FORMAT: u8 = 1;
const ABSENT: u8 = 0;
const AT_REVISION: u8 = 1;
const VALUE_EQUALS: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn batch() -> Batch {
        let mut batch = Batch::new();
        batch
            .require_absent("a")
            .require_revision("b", Revision(7))
            .require_value("c", "d");
        for number in 0..230 {
            batch
                .put(format!("k/{number:03}"), "v")
                .delete_range(KeyRange::new("x", "y"));
        }
        batch
            .put("k/100", vec![1; 1 << 20])
            .put("k/101", vec![2; 1 << 20])
            .delete("k/102");
        batch
    }

    #[test]
    fn a_record_decodes_to_its_batch_and_damage_is_seen() {
        let batch = batch();
        let record = Redo::encode(&batch);
        let redo = Redo::decode(record.clone(), Revision(3)).unwrap();
        assert_eq!(redo.preconditions, batch.preconditions());
        assert_eq!(redo.commit.revision, Revision(3));
        assert_eq!(redo.commit.changes.len(), batch.changes().len());
        for at in (0..record.len()).step_by(10_007) {
            let mut damaged = record.to_vec();
            damaged[at] ^= 1;
            assert!(Redo::decode(damaged.into(), Revision(3)).is_err());
            assert!(Redo::decode(record.slice(..at), Revision(3)).is_err());
        }
    }

    #[test]
    fn pieces_are_everything_in_order_and_fit_a_transaction() {
        let redo = Redo::decode(Redo::encode(&batch()), Revision(1)).unwrap();
        let (mut ranges, mut changes) = (Vec::new(), Vec::new());
        for piece in redo.pieces() {
            match piece {
                Piece::RangeDeletes(piece) => {
                    assert!(changes.is_empty() && piece.len() <= PIECE_OPERATIONS_MAX);
                    ranges.extend_from_slice(piece);
                }
                Piece::Changes(piece) => {
                    let bytes: usize = piece
                        .iter()
                        .map(|(key, value)| key.len() + value.as_ref().map_or(0, Bytes::len))
                        .sum();
                    assert!(piece.len() <= PIECE_OPERATIONS_MAX);
                    assert!(bytes <= PIECE_BYTES_MAX || piece.len() == 1);
                    changes.extend_from_slice(piece);
                }
            }
        }
        assert_eq!(
            (ranges, changes),
            (redo.commit.range_deletes, redo.commit.changes)
        );
    }

    #[test]
    fn heads_and_outcomes_decode_to_what_was_encoded() {
        for stage in [Stage::Proposed, Stage::Applying(9)] {
            let head = Head {
                id: RedoId(5),
                parts: 3,
                stage,
            };
            let bytes = head.encode();
            assert_eq!(Head::decode(&bytes), Ok(head));
            assert!(Head::decode(&bytes[1..]).is_err() && Head::decode(&[]).is_err());
        }
        for outcome in [Outcome::Committed, Outcome::Failed(301)] {
            assert_eq!(Outcome::decode(&outcome.encode()), Ok(outcome));
        }
        assert!(Outcome::decode(b"?").is_err());
    }
}
