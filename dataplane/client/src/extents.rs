//! Byte ranges of a file with their contents; what was put last wins.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;

/// Disjoint ranges by offset.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct Extents {
    map: BTreeMap<u64, Bytes>,
    bytes: usize,
}

impl Extents {
    /// Bytes in all ranges.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Puts a range over whatever was there.
    pub(crate) fn insert(&mut self, offset: u64, data: Bytes) {
        if data.is_empty() {
            return;
        }
        self.remove(offset..offset + data.len() as u64);
        self.bytes += data.len();
        self.map.insert(offset, data);
    }

    /// Takes a range away, cutting what reaches over its ends.
    pub(crate) fn remove(&mut self, range: Range<u64>) {
        let before = self.map.range(..range.start).next_back();
        let first = match before {
            Some((offset, data)) if offset + data.len() as u64 > range.start => *offset,
            _ => range.start,
        };
        let hit: Vec<u64> = self
            .map
            .range(first..range.end)
            .map(|(offset, _)| *offset)
            .collect();
        for offset in hit {
            let Some(data) = self.map.remove(&offset) else {
                continue;
            };
            self.bytes -= data.len();
            let end = offset + data.len() as u64;
            if offset < range.start {
                self.keep(offset, data.slice(..index(range.start - offset)));
            }
            if end > range.end {
                self.keep(range.end, data.slice(index(range.end - offset)..));
            }
        }
    }

    fn keep(&mut self, offset: u64, data: Bytes) {
        self.bytes += data.len();
        self.map.insert(offset, data);
    }

    /// Drops everything from `size` on.
    pub(crate) fn truncate(&mut self, size: u64) {
        self.remove(size..u64::MAX);
    }

    /// Takes away whatever `other` has too.
    pub(crate) fn subtract(&mut self, other: &Self) {
        for (offset, data) in &other.map {
            self.remove(*offset..offset + data.len() as u64);
        }
    }

    /// All ranges, by offset.
    pub(crate) fn into_parts(self) -> impl Iterator<Item = (u64, Bytes)> {
        self.map.into_iter()
    }

    /// The parts inside a range, by offset.
    pub(crate) fn within(&self, range: &Range<u64>) -> Vec<(u64, Bytes)> {
        let before = self.map.range(..range.start).next_back();
        let first = match before {
            Some((offset, data)) if offset + data.len() as u64 > range.start => *offset,
            _ => range.start,
        };
        self.map
            .range(first..range.end.max(first))
            .filter_map(|(offset, data)| {
                let from = range.start.max(*offset);
                let to = range.end.min(offset + data.len() as u64);
                (from < to).then(|| (from, data.slice(index(from - offset)..index(to - offset))))
            })
            .collect()
    }

    /// Numbers of the pieces of `piece` bytes in which anything lies.
    pub(crate) fn chunks(&self, piece: u64) -> Vec<u32> {
        let mut all = Vec::new();
        for (offset, data) in &self.map {
            let last = (offset + data.len() as u64 - 1) / piece;
            all.extend((offset / piece..=last).filter_map(|n| u32::try_from(n).ok()));
        }
        all.dedup();
        all
    }

    /// Whether anything lies in the range.
    pub(crate) fn overlaps(&self, range: &Range<u64>) -> bool {
        !self.within(range).is_empty()
    }

    /// Takes the first contiguous run of at most `bytes_max` bytes that crosses no multiple of
    /// `boundary` and for which `free` holds; joined into one buffer.
    pub(crate) fn take_run(
        &mut self,
        bytes_max: u64,
        boundary: u64,
        free: impl Fn(&Range<u64>) -> bool,
    ) -> Option<(u64, Bytes)> {
        let mut start = None;
        for (offset, data) in &self.map {
            let end = offset + data.len() as u64;
            if free(&(*offset..end)) {
                start = Some(*offset);
                break;
            }
        }
        let start = start?;
        let limit = (start + bytes_max).min((start / boundary + 1) * boundary);
        let mut end = start;
        for (offset, data) in self.map.range(start..) {
            let to = (offset + data.len() as u64).min(limit);
            if *offset != end || to <= end || !free(&(*offset..to)) {
                break;
            }
            end = to;
        }
        let parts = self.within(&(start..end));
        self.remove(start..end);
        Some((start, join(parts)))
    }
}

fn join(parts: Vec<(u64, Bytes)>) -> Bytes {
    let mut parts = parts.into_iter();
    match (parts.next(), parts.next()) {
        (Some((_, only)), None) => only,
        (first, second) => {
            let all = first.into_iter().chain(second).chain(parts);
            let mut joined = Vec::new();
            for (_, part) in all {
                joined.extend_from_slice(&part);
            }
            joined.into()
        }
    }
}

/// A distance inside a buffer that is in memory.
fn index(distance: u64) -> usize {
    usize::try_from(distance).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against one byte per position.
        #[test]
        fn the_last_put_wins(steps in prop::collection::vec((0u64..200, 1usize..60, 0u8..4), 1..40)) {
            let mut extents = Extents::default();
            let mut model: BTreeMap<u64, u8> = BTreeMap::new();
            for (n, (offset, length, what)) in steps.into_iter().enumerate() {
                let mark = u8::try_from(n).unwrap();
                let end = offset + length as u64;
                match what {
                    0 => {
                        extents.remove(offset..end);
                        model.retain(|at, _| !(offset..end).contains(at));
                    }
                    1 => {
                        if let Some((start, data)) = extents.take_run(32, 64, |r| r.start >= offset) {
                            prop_assert!(start >= offset && data.len() <= 32);
                            prop_assert_eq!(start / 64, (start + data.len() as u64 - 1) / 64);
                            for (at, byte) in data.iter().enumerate() {
                                prop_assert_eq!(model.remove(&(start + at as u64)), Some(*byte));
                            }
                        } else {
                            prop_assert!(extents.map.keys().all(|at| *at < offset));
                        }
                    }
                    _ => {
                        extents.insert(offset, vec![mark; length].into());
                        model.extend((offset..end).map(|at| (at, mark)));
                    }
                }
                let flat: BTreeMap<u64, u8> = extents
                    .within(&(0..u64::MAX))
                    .into_iter()
                    .flat_map(|(at, data)| {
                        let bytes: Vec<u8> = data.to_vec();
                        bytes.into_iter().enumerate().map(move |(n, b)| (at + n as u64, b))
                    })
                    .collect();
                prop_assert_eq!(&flat, &model);
                prop_assert_eq!(extents.bytes(), model.len());
            }
        }
    }
}
