//! Sizes and offsets of a copy and of its file.

use std::ops::Range;

use hither_proto::ids::{CHECKSUM_BLOCK, CHUNK_SIZE};

/// Bytes of a block: what one checksum covers.
pub(crate) const BLOCK: u32 = CHECKSUM_BLOCK;
/// The same as a length in memory.
pub(crate) const BLOCK_LEN: usize = BLOCK as usize;
/// Bytes of the largest copy.
pub(crate) const CHUNK_BYTES: u32 = 64 << 20;
/// Blocks of the largest copy.
pub(crate) const BLOCKS_MAX: u32 = CHUNK_BYTES / BLOCK;
/// Where the checksum table begins in the file.
pub(crate) const TABLE_OFFSET: u64 = 4096;
/// Where the data begins in the file.
pub(crate) const DATA_OFFSET: u64 = 128 << 10;
/// Writes of at least this size go to their place, smaller ones to the log.
pub(crate) const LARGE_WRITE_BYTES: u32 = 64 << 10;
/// Checksum of a block of zeros.
pub(crate) const ZERO_CHECKSUM: u32 = 0x98f9_4189;

const _: () = assert!(CHUNK_BYTES as u64 == CHUNK_SIZE, "one size of chunk");
const _: () = assert!(
    TABLE_OFFSET + BLOCKS_MAX as u64 * 4 <= DATA_OFFSET,
    "the table ends before the data"
);

/// The block that holds byte `offset`.
pub(crate) fn block_of(offset: u32) -> u32 {
    offset / BLOCK
}

/// Blocks that a range of bytes touches.
pub(crate) fn blocks_of(range: &Range<u32>) -> Range<u32> {
    if range.is_empty() {
        return block_of(range.start)..block_of(range.start);
    }
    block_of(range.start)..block_of(range.end - 1) + 1
}

/// Bytes of a range of blocks.
pub(crate) fn bytes_of(blocks: &Range<u32>) -> Range<u32> {
    blocks.start * BLOCK..blocks.end * BLOCK
}

/// The part of `range` that lies in `block`.
pub(crate) fn part_in_block(range: &Range<u32>, block: u32) -> Range<u32> {
    range.start.max(block * BLOCK)..range.end.min((block + 1) * BLOCK)
}

/// The same range as indexes into a buffer whose first byte is byte `base` of the copy.
pub(crate) fn within(range: &Range<u32>, base: u32) -> Range<usize> {
    (range.start - base) as usize..(range.end - base) as usize
}

/// Length of a payload.
pub(crate) fn len32(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).expect("payloads are no longer than a chunk")
}

#[cfg(test)]
mod tests {
    use hither_proto::checksum::crc32c;

    use super::*;

    #[test]
    fn checksum_of_zeros() {
        assert_eq!(crc32c(&[0; BLOCK_LEN]), ZERO_CHECKSUM);
    }

    #[test]
    fn ranges() {
        assert_eq!(blocks_of(&(0..1)), 0..1);
        assert_eq!(blocks_of(&(4095..4097)), 0..2);
        assert_eq!(blocks_of(&(4096..8192)), 1..2);
        assert_eq!(blocks_of(&(5000..5000)), 1..1);
        assert_eq!(part_in_block(&(100..9000), 1), 4096..8192);
        assert_eq!(within(&(4100..4200), 4096), 4..104);
    }
}
