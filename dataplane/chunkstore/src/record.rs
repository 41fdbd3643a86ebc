//! Records in the log of a disk (`docs/formats/disk.md`).
//!
//! Every record about one chunk carries the chunk's whole entry as it is after the change, so
//! replay never has to work a state out.

use std::io::IoSlice;

use bytes::Bytes;
use hither_log::{Lsn, RecordKind};
use hither_proto::ids::ChunkId;

use crate::entry::{ENTRY_BYTES, Entry};
use crate::geometry::{BLOCK, CHUNK_BYTES, blocks_of};

/// The entry changed, nothing else.
pub(crate) const STATE: RecordKind = RecordKind(1);
/// Bytes were written; they are in the record.
pub(crate) const WRITE: RecordKind = RecordKind(2);
/// Bytes are to be dropped.
pub(crate) const TRIM: RecordKind = RecordKind(3);
/// Written bytes up to a record are stable in place.
pub(crate) const IN_PLACE: RecordKind = RecordKind(4);
/// A trim is stable in place.
pub(crate) const TRIMMED: RecordKind = RecordKind(5);
/// Chunks were freed.
pub(crate) const DELETE: RecordKind = RecordKind(6);

/// Bytes in front of what is particular to a kind.
const PREFIX_BYTES: usize = 8 + ENTRY_BYTES;

/// A record as recovery reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Record {
    /// About one chunk.
    Chunk {
        chunk: ChunkId,
        entry: Entry,
        change: Change,
    },
    /// Chunks were freed.
    Delete(Vec<ChunkId>),
}

/// What a record says besides the entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    State,
    Write {
        offset: u32,
        checksums: Vec<u32>,
        data: Bytes,
    },
    Trim {
        offset: u32,
        /// 0: to the end.
        length: u32,
    },
    InPlace {
        upto: Lsn,
    },
    Trimmed {
        lsn: Lsn,
    },
}

/// What stands before the data of a record.
pub(crate) struct Head {
    bytes: Vec<u8>,
}

impl Head {
    fn new(chunk: ChunkId, entry: &Entry) -> Self {
        let mut bytes = Vec::with_capacity(PREFIX_BYTES + 32);
        bytes.extend_from_slice(&chunk.0.to_le_bytes());
        bytes.extend_from_slice(&entry.encode());
        Self { bytes }
    }

    fn number(mut self, number: u64) -> Self {
        self.bytes.extend_from_slice(&number.to_le_bytes());
        self
    }

    fn half(mut self, number: u32) -> Self {
        self.bytes.extend_from_slice(&number.to_le_bytes());
        self
    }

    /// Head of a [`STATE`] record.
    pub(crate) fn state(chunk: ChunkId, entry: &Entry) -> Self {
        Self::new(chunk, entry)
    }

    /// Head of a [`WRITE`] record; the data follows.
    pub(crate) fn write(
        chunk: ChunkId,
        entry: &Entry,
        offset: u32,
        length: u32,
        checksums: &[u32],
    ) -> Self {
        let mut head = Self::new(chunk, entry).half(offset).half(length);
        for checksum in checksums {
            head = head.half(*checksum);
        }
        head
    }

    /// Head of a [`TRIM`] record.
    pub(crate) fn trim(chunk: ChunkId, entry: &Entry, offset: u32, length: u32) -> Self {
        Self::new(chunk, entry).half(offset).half(length)
    }

    /// Head of an [`IN_PLACE`] or a [`TRIMMED`] record.
    pub(crate) fn upto(chunk: ChunkId, entry: &Entry, lsn: Lsn) -> Self {
        Self::new(chunk, entry).number(lsn.0)
    }

    /// Head of a [`DELETE`] record.
    pub(crate) fn delete(chunks: &[ChunkId]) -> Self {
        let bytes = chunks
            .iter()
            .flat_map(|chunk| chunk.0.to_le_bytes())
            .collect();
        Self { bytes }
    }

    /// The bytes.
    pub(crate) fn slice(&self) -> IoSlice<'_> {
        IoSlice::new(&self.bytes)
    }
}

/// Decodes a record; `None` for one that no build of this format wrote.
pub(crate) fn decode(kind: RecordKind, payload: &Bytes) -> Option<Record> {
    if kind == DELETE {
        let (chunks, rest) = payload.as_chunks::<8>();
        let ids = chunks
            .iter()
            .map(|bytes| ChunkId(u64::from_le_bytes(*bytes)));
        return rest.is_empty().then(|| Record::Delete(ids.collect()));
    }
    let mut reader = Reader {
        bytes: payload,
        at: 0,
    };
    let chunk = ChunkId(reader.number()?);
    let entry = Entry::decode(reader.take(ENTRY_BYTES)?)?;
    let change = match kind {
        STATE => Change::State,
        WRITE => write(&mut reader, payload)?,
        TRIM => {
            let (offset, length) = (reader.half()?, reader.half()?);
            if offset.checked_add(length)? > CHUNK_BYTES {
                return None;
            }
            Change::Trim { offset, length }
        }
        IN_PLACE => Change::InPlace {
            upto: Lsn(reader.number()?),
        },
        TRIMMED => Change::Trimmed {
            lsn: Lsn(reader.number()?),
        },
        _ => return None,
    };
    (reader.at == payload.len()).then_some(Record::Chunk {
        chunk,
        entry,
        change,
    })
}

fn write(reader: &mut Reader<'_>, payload: &Bytes) -> Option<Change> {
    let (offset, length) = (reader.half()?, reader.half()?);
    let end = offset.checked_add(length)?;
    if end > CHUNK_BYTES || length == 0 {
        return None;
    }
    let count = blocks_of(&(offset..end)).len();
    debug_assert!(count <= length.div_ceil(BLOCK) as usize + 1);
    let checksums = reader.take(count * 4)?;
    let (checksums, _) = checksums.as_chunks::<4>();
    let checksums = checksums.iter().map(|bytes| u32::from_le_bytes(*bytes));
    let data = reader.take(length as usize)?;
    Some(Change::Write {
        offset,
        checksums: checksums.collect(),
        data: payload.slice_ref(data),
    })
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, size: usize) -> Option<&'a [u8]> {
        let taken = self.bytes.get(self.at..self.at.checked_add(size)?)?;
        self.at += size;
        Some(taken)
    }

    fn number(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn half(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use hither_proto::checksum::piece_checksums;
    use proptest::prelude::*;

    use super::*;

    fn joined(head: &Head, data: &[u8]) -> Bytes {
        [&head.bytes, data].concat().into()
    }

    proptest! {
        #[test]
        fn writes_round_trip(chunk: u64, offset in 0u32..CHUNK_BYTES - 20_000, data in prop::collection::vec(any::<u8>(), 1..20_000)) {
            let (chunk, entry) = (ChunkId(chunk), Entry { length: 7, ..Entry::default() });
            let checksums = piece_checksums(offset, &data);
            let length = u32::try_from(data.len()).unwrap();
            let head = Head::write(chunk, &entry, offset, length, &checksums);
            let change = Change::Write { offset, checksums, data: data.clone().into() };
            prop_assert_eq!(decode(WRITE, &joined(&head, &data)), Some(Record::Chunk { chunk, entry, change }));
        }

        #[test]
        fn random_bytes_never_panic(kind in 0u16..9, bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = decode(RecordKind(kind), &bytes.into());
        }
    }

    #[test]
    fn others_round_trip() {
        let (chunk, entry) = (ChunkId(9), Entry::default());
        let cases = [
            (STATE, Head::state(chunk, &entry), Change::State),
            (
                TRIM,
                Head::trim(chunk, &entry, 3, 4),
                Change::Trim {
                    offset: 3,
                    length: 4,
                },
            ),
            (
                IN_PLACE,
                Head::upto(chunk, &entry, Lsn(8)),
                Change::InPlace { upto: Lsn(8) },
            ),
            (
                TRIMMED,
                Head::upto(chunk, &entry, Lsn(8)),
                Change::Trimmed { lsn: Lsn(8) },
            ),
        ];
        for (kind, head, change) in cases {
            let found = decode(kind, &joined(&head, b""));
            assert_eq!(
                found,
                Some(Record::Chunk {
                    chunk,
                    entry,
                    change
                })
            );
            assert_eq!(decode(kind, &joined(&head, b"x")), None);
        }
        let ids = vec![ChunkId(1), ChunkId(u64::MAX)];
        let head = Head::delete(&ids);
        assert_eq!(
            decode(DELETE, &joined(&head, b"")),
            Some(Record::Delete(ids))
        );
    }
}
