//! Bytes of a copy that are in the log and not in place yet.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use hither_log::Lsn;
use hither_proto::checksum::crc32c;
use smallvec::SmallVec;

use crate::geometry::{BLOCK, BLOCK_LEN, blocks_of, part_in_block, within};

/// Blocks of one copy that lie over what is in place.
#[derive(Debug, Default)]
pub(crate) struct Overlay {
    blocks: BTreeMap<u32, OverBlock>,
}

/// One block of an overlay.
#[derive(Debug, Clone)]
pub(crate) struct OverBlock {
    content: Content,
    /// Records of the oldest and of the newest bytes.
    first: Lsn,
    last: Lsn,
}

#[derive(Debug, Clone)]
enum Content {
    Whole {
        bytes: Bytes,
        checksum: u32,
    },
    Part {
        bytes: Box<[u8]>,
        /// What of the bytes counts: sorted, apart from each other.
        valid: SmallVec<[Range<usize>; 2]>,
    },
}

impl OverBlock {
    /// The whole block and its checksum, if nothing below shows through.
    pub(crate) fn whole(&self) -> Option<(&Bytes, u32)> {
        match &self.content {
            Content::Whole { bytes, checksum } => Some((bytes, *checksum)),
            Content::Part { .. } => None,
        }
    }

    /// Record of the newest bytes.
    pub(crate) fn last(&self) -> Lsn {
        self.last
    }

    /// Lays the block over what is below.
    pub(crate) fn lay_over(&self, below: &mut [u8]) {
        match &self.content {
            Content::Whole { bytes, .. } => below.copy_from_slice(bytes),
            Content::Part { bytes, valid } => {
                for range in valid {
                    below[range.clone()].copy_from_slice(&bytes[range.clone()]);
                }
            }
        }
    }

    fn put(&mut self, at: Range<usize>, data: &[u8], lsn: Lsn) {
        self.last = lsn;
        match &mut self.content {
            Content::Whole { bytes, .. } => {
                let mut patched = bytes.to_vec();
                patched[at].copy_from_slice(data);
                self.content = whole(patched.into());
            }
            Content::Part { bytes, valid } => {
                bytes[at.clone()].copy_from_slice(data);
                add(valid, at);
                if valid.len() == 1 && valid.contains(&(0..BLOCK_LEN)) {
                    self.content = whole(Bytes::from(std::mem::take(bytes)));
                }
            }
        }
    }

    /// Takes bytes away; `false` when none are left.
    fn cut(&mut self, at: &Range<usize>) -> bool {
        if let Content::Whole { bytes, .. } = &self.content {
            self.content = Content::Part {
                bytes: bytes.to_vec().into(),
                valid: SmallVec::from_iter(std::iter::once(0..BLOCK_LEN)),
            };
        }
        let Content::Part { valid, .. } = &mut self.content else {
            return true;
        };
        let kept = valid.iter().flat_map(|range| {
            [
                range.start..range.end.min(at.start),
                range.start.max(at.end)..range.end,
            ]
        });
        *valid = kept.filter(|range| !range.is_empty()).collect();
        !valid.is_empty()
    }
}

fn whole(bytes: Bytes) -> Content {
    let checksum = crc32c(&bytes);
    Content::Whole { bytes, checksum }
}

fn add(valid: &mut SmallVec<[Range<usize>; 2]>, new: Range<usize>) {
    let mut joined = new;
    valid.retain(|range| {
        let touches = range.start <= joined.end && joined.start <= range.end;
        if touches {
            joined = joined.start.min(range.start)..joined.end.max(range.end);
        }
        !touches
    });
    let at = valid.partition_point(|range| range.start < joined.start);
    valid.insert(at, joined);
}

impl Overlay {
    /// Whether nothing lies over what is in place.
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Memory used, about.
    pub(crate) fn bytes(&self) -> usize {
        self.blocks.len() * BLOCK_COST
    }

    /// Record of the oldest bytes.
    pub(crate) fn first(&self) -> Option<Lsn> {
        self.blocks.values().map(|block| block.first).min()
    }

    /// The block, if anything of it lies here.
    pub(crate) fn get(&self, block: u32) -> Option<&OverBlock> {
        self.blocks.get(&block)
    }

    /// The blocks in a range.
    pub(crate) fn range(&self, blocks: Range<u32>) -> impl Iterator<Item = (u32, &OverBlock)> {
        let found = (!blocks.is_empty()).then(|| self.blocks.range(blocks));
        found
            .into_iter()
            .flatten()
            .map(|(number, block)| (*number, block))
    }

    /// Lays `data` at `offset`, written by record `lsn`; `checksums` are those of its pieces.
    /// The data is kept, not copied, where it fills a block.
    pub(crate) fn put(&mut self, offset: u32, data: &Bytes, checksums: &[u32], lsn: Lsn) {
        let range = offset..offset + crate::geometry::len32(data);
        for (number, checksum) in blocks_of(&range).zip(checksums) {
            let part = part_in_block(&range, number);
            let slice = within(&part, offset);
            let at = within(&part, number * BLOCK);
            if at == (0..BLOCK_LEN) {
                let content = Content::Whole {
                    bytes: data.slice(slice),
                    checksum: *checksum,
                };
                self.blocks.insert(
                    number,
                    OverBlock {
                        content,
                        first: lsn,
                        last: lsn,
                    },
                );
                continue;
            }
            let block = self.blocks.entry(number).or_insert_with(|| OverBlock {
                content: Content::Part {
                    bytes: vec![0; BLOCK_LEN].into(),
                    valid: SmallVec::new(),
                },
                first: lsn,
                last: lsn,
            });
            block.put(at, &data[slice], lsn);
        }
    }

    /// Takes a range of bytes away.
    pub(crate) fn cut(&mut self, range: &Range<u32>) {
        let touched: Vec<u32> = self
            .range(blocks_of(range))
            .map(|(number, _)| number)
            .collect();
        for number in touched {
            let at = within(&part_in_block(range, number), number * BLOCK);
            let empty = at == (0..BLOCK_LEN)
                || self
                    .blocks
                    .get_mut(&number)
                    .is_some_and(|block| !block.cut(&at));
            if empty {
                self.blocks.remove(&number);
            }
        }
    }

    /// Whether a block has bytes of a record up to `lsn` and of a later one too.
    pub(crate) fn is_torn_by(&self, lsn: Lsn) -> bool {
        let mut blocks = self.blocks.values();
        blocks.any(|block| block.first <= lsn && lsn < block.last)
    }

    /// All bytes of records up to `upto` are stable in place: forgets the blocks that have no
    /// newer ones. Of the others the old bytes stay, but are not needed from the log any more.
    pub(crate) fn moved(&mut self, upto: Lsn) {
        self.forget(upto);
        for block in self.blocks.values_mut() {
            block.first = block.first.max(upto.next());
        }
    }

    /// Forgets the blocks that have no bytes of records after `upto`.
    pub(crate) fn forget(&mut self, upto: Lsn) {
        self.blocks.retain(|_, block| block.last > upto);
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.blocks.clear();
    }
}

/// Memory of one block with its place in the map.
const BLOCK_COST: usize = BLOCK_LEN + 128;

#[cfg(test)]
mod tests {
    use hither_proto::checksum::piece_checksums;
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Op {
        Put(u32, Vec<u8>),
        Cut(u32, u32),
        Moved(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0u32..20_000, prop::collection::vec(any::<u8>(), 1..9_000)).prop_map(|(at, data)| Op::Put(at, data)),
            2 => (0u32..20_000, 0u32..9_000).prop_map(|(at, length)| Op::Cut(at, length)),
            1 => (0u64..30).prop_map(Op::Moved),
        ]
    }

    proptest! {
        #[test]
        fn as_an_array_of_bytes(ops in prop::collection::vec(op(), 0..25)) {
            let mut overlay = Overlay::default();
            // Byte and record that wrote it.
            let mut model: Vec<Option<(u8, u64)>> = vec![None; 32 << 10];
            for (lsn, op) in ops.into_iter().enumerate() {
                let lsn = lsn as u64 + 1;
                match op {
                    Op::Put(at, data) => {
                        overlay.put(at, &data.clone().into(), &piece_checksums(at, &data), Lsn(lsn));
                        for (n, byte) in data.into_iter().enumerate() {
                            model[at as usize + n] = Some((byte, lsn));
                        }
                    }
                    Op::Cut(at, length) => {
                        overlay.cut(&(at..at + length));
                        model[at as usize..(at + length) as usize].fill(None);
                    }
                    Op::Moved(upto) => {
                        let gone: Vec<u32> = overlay.range(0..100).filter(|(_, block)| block.last <= Lsn(upto)).map(|(n, _)| n).collect();
                        overlay.moved(Lsn(upto));
                        for number in gone {
                            model[number as usize * BLOCK_LEN..][..BLOCK_LEN].fill(None);
                        }
                    }
                }
                for number in 0..8u32 {
                    let bytes = &model[number as usize * BLOCK_LEN..][..BLOCK_LEN];
                    let block = overlay.get(number);
                    prop_assert_eq!(block.is_some(), bytes.iter().any(Option::is_some));
                    let Some(block) = block else { continue };
                    let mut shown = vec![0xee; BLOCK_LEN];
                    block.lay_over(&mut shown);
                    let expected: Vec<u8> = bytes.iter().map(|byte| byte.map_or(0xee, |(byte, _)| byte)).collect();
                    prop_assert_eq!(&shown, &expected);
                    if let Some((_, checksum)) = block.whole() {
                        prop_assert_eq!(checksum, crc32c(&shown));
                    }
                    let newest = bytes.iter().flatten().map(|(_, lsn)| *lsn).max();
                    prop_assert!(Some(block.last.0) >= newest && block.first <= block.last);
                }
            }
        }
    }
}
