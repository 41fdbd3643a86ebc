//! Numbers out of blocks that were reserved in the store.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use super::event::Counter;

/// Blocks of cluster-wide counters.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    blocks: BTreeMap<Counter, VecDeque<Range<u64>>>,
    asked: BTreeMap<Counter, bool>,
}

impl Numbers {
    /// Adds a reserved block.
    pub(crate) fn add(&mut self, counter: Counter, block: Range<u64>) {
        self.asked.insert(counter, false);
        self.blocks.entry(counter).or_default().push_back(block);
    }

    /// Takes the next number; `None` while no block is there.
    pub(crate) fn take(&mut self, counter: Counter) -> Option<u64> {
        let blocks = self.blocks.get_mut(&counter)?;
        loop {
            let first = blocks.front_mut()?;
            if let Some(number) = first.next() {
                return Some(number);
            }
            blocks.pop_front();
        }
    }

    /// Numbers left.
    pub(crate) fn left(&self, counter: Counter) -> u64 {
        self.blocks
            .get(&counter)
            .into_iter()
            .flatten()
            .map(|block| block.end - block.start)
            .sum()
    }

    /// Whether a further block should be reserved now; says so once per block.
    pub(crate) fn wants(&mut self, counter: Counter) -> bool {
        let low = self.left(counter) < LOW_WATER;
        let asked = self.asked.entry(counter).or_default();
        low && !std::mem::replace(asked, true)
    }
}

impl Counter {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Chunk, Self::Inode, Self::Lease, Self::Session];

    /// Name in the store's key `n/<name>`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Chunk => "chunk",
            Self::Inode => "inode",
            Self::Lease => "lease",
            Self::Session => "session",
        }
    }

    /// Numbers reserved at a time.
    #[must_use]
    pub fn block(self) -> u64 {
        match self {
            Self::Session => 1 << 10,
            Self::Chunk | Self::Inode | Self::Lease => 1 << 20,
        }
    }
}

/// Below this many numbers the next block is reserved.
const LOW_WATER: u64 = 1 << 9;
