//! CRC32C of blocks.

use crc_fast::{CrcAlgorithm, Digest, checksum};

use crate::ids::CHECKSUM_BLOCK;

/// CRC32C (Castagnoli) of `bytes`.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    narrow(checksum(CrcAlgorithm::Crc32Iscsi, bytes))
}

/// CRC32C of the parts one after the other.
#[must_use]
pub fn crc32c_parts(parts: &[&[u8]]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    for part in parts {
        digest.update(part);
    }
    narrow(digest.finalize())
}

/// Checksums of `bytes` that start at `offset` of a chunk, cut at 4 KiB boundaries of the chunk.
///
/// The first and last piece may be shorter than a block. Empty for no bytes.
#[must_use]
pub fn piece_checksums(offset: u32, bytes: &[u8]) -> Vec<u32> {
    pieces(offset, bytes).map(crc32c).collect()
}

/// Whether `bytes` at `offset` carry exactly these piece checksums.
#[must_use]
pub fn pieces_match(offset: u32, bytes: &[u8], checksums: &[u32]) -> bool {
    let mut expected = checksums.iter();
    pieces(offset, bytes).all(|piece| expected.next() == Some(&crc32c(piece)))
        && expected.next().is_none()
}

/// Cuts `bytes` that start at `offset` of a chunk at its 4 KiB boundaries.
pub fn pieces(offset: u32, bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let block = CHECKSUM_BLOCK as usize;
    let first = (block - (offset as usize % block)).min(bytes.len());
    let (head, rest) = bytes.split_at(first);
    (!head.is_empty())
        .then_some(head)
        .into_iter()
        .chain(rest.chunks(block))
}

fn narrow(crc: u64) -> u32 {
    u32::try_from(crc).unwrap_or_else(|_| unreachable!("a CRC32 has 32 bits"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn castagnoli_check_value() {
        // The check value of CRC-32/ISCSI in the catalogue of parametrised CRC algorithms.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    proptest! {
        #[test]
        fn pieces_cover_everything_once(offset in 0u32..20_000, bytes in prop::collection::vec(any::<u8>(), 0..20_000)) {
            let cut: Vec<&[u8]> = pieces(offset, &bytes).collect();
            prop_assert_eq!(cut.concat(), bytes.clone());
            let mut at = offset;
            for (n, piece) in cut.iter().enumerate() {
                prop_assert!(!piece.is_empty());
                prop_assert!(n == 0 || at % CHECKSUM_BLOCK == 0);
                at += u32::try_from(piece.len()).unwrap();
            }
            let sums = piece_checksums(offset, &bytes);
            prop_assert!(pieces_match(offset, &bytes, &sums));
            if let Some(first) = bytes.first() {
                let mut other = bytes.clone();
                other[0] = first.wrapping_add(1);
                prop_assert!(!pieces_match(offset, &other, &sums));
            }
        }

        #[test]
        fn parts_equal_whole(a: Vec<u8>, b: Vec<u8>) {
            prop_assert_eq!(crc32c_parts(&[&a, &b]), crc32c(&[a, b].concat()));
        }
    }
}
