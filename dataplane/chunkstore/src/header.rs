//! The header of a copy's file (`docs/formats/chunk.md`).

use hither_proto::checksum::crc32c;
use hither_proto::ids::{ChunkId, GroupId, InodeId};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Whose bytes a file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) chunk: ChunkId,
    pub(crate) group: GroupId,
    pub(crate) inode: InodeId,
}

impl Header {
    /// The first block of the file.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut raw = Raw {
            magic: MAGIC,
            checksum: 0.into(),
            version: VERSION.into(),
            chunk: self.chunk.0.into(),
            inode: self.inode.0.into(),
            group: self.group.0.into(),
            data_offset: DATA_OFFSET_FIELD.into(),
        };
        raw.checksum = crc32c(&raw.as_bytes()[12..]).into();
        let mut bytes = raw.as_bytes().to_vec();
        bytes.resize(HEADER_BYTES, 0);
        bytes
    }

    /// `None` unless the bytes are an intact header of a version this build reads.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (raw, _) = Raw::read_from_prefix(bytes).ok()?;
        let sound = raw.magic == MAGIC
            && raw.checksum.get() == crc32c(&raw.as_bytes()[12..])
            && raw.version.get() == VERSION
            && raw.data_offset.get() == DATA_OFFSET_FIELD;
        sound.then(|| Self {
            chunk: ChunkId(raw.chunk.get()),
            group: GroupId(raw.group.get()),
            inode: InodeId(raw.inode.get()),
        })
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    checksum: U32,
    version: U32,
    chunk: U64,
    inode: U64,
    group: U32,
    data_offset: U32,
}

/// Bytes of the file before the checksum table.
pub(crate) const HEADER_BYTES: usize = 4096;
const MAGIC: [u8; 8] = *b"HITHCHNK";
const VERSION: u32 = 1;
const DATA_OFFSET_FIELD: u32 = 128 << 10;

const _: () = assert!(
    size_of::<Raw>() == 40,
    "the header's size is part of the format"
);
const _: () = assert!(
    DATA_OFFSET_FIELD as u64 == crate::geometry::DATA_OFFSET,
    "one data offset"
);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn round_trip_and_flipped_bits(chunk: u64, group: u32, inode: u64, bit in 0usize..320) {
            let header = Header { chunk: ChunkId(chunk), group: GroupId(group), inode: InodeId(inode) };
            let mut bytes = header.encode();
            prop_assert_eq!(bytes.len(), HEADER_BYTES);
            prop_assert_eq!(Header::decode(&bytes), Some(header));
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(Header::decode(&bytes), None);
        }

        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = Header::decode(&bytes);
        }
    }
}
