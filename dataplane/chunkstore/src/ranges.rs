//! A set of bytes as ranges.

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of bytes of a chunk; neighbours are joined.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Ranges {
    /// End by start.
    ranges: BTreeMap<u32, u32>,
}

impl Ranges {
    /// Adds a range.
    pub(crate) fn add(&mut self, range: &Range<u32>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        let touching: Vec<(u32, u32)> = self
            .ranges
            .range(..=end)
            .rev()
            .take_while(|&(_, &its_end)| its_end >= start)
            .map(|(&its_start, &its_end)| (its_start, its_end))
            .collect();
        for (its_start, its_end) in touching {
            self.ranges.remove(&its_start);
            start = start.min(its_start);
            end = end.max(its_end);
        }
        self.ranges.insert(start, end);
    }

    /// The parts of `range` that are not in the set, in order.
    pub(crate) fn gaps(&self, range: &Range<u32>) -> Vec<Range<u32>> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        let first = self
            .ranges
            .range(..=range.start)
            .next_back()
            .map_or(range.start, |(&start, _)| start);
        for (&start, &end) in self.ranges.range(first..range.end) {
            if start > at {
                gaps.push(at..start);
            }
            at = at.max(end);
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    /// How many ranges the set is made of.
    pub(crate) fn count(&self) -> usize {
        self.ranges.len()
    }

    /// One past the highest byte in the set.
    pub(crate) fn end(&self) -> u32 {
        self.ranges.last_key_value().map_or(0, |(_, &end)| end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn as_a_set_of_bytes(adds in prop::collection::vec((0u32..200, 0u32..40), 0..30), from in 0u32..200, length in 0u32..60) {
            let mut set = Ranges::default();
            let mut model = [false; 300];
            for (start, length) in adds {
                set.add(&(start..start + length));
                for byte in start..start + length {
                    model[byte as usize] = true;
                }
            }
            let range = from..from + length;
            let mut in_gaps = vec![false; 300];
            let mut last = None;
            for gap in set.gaps(&range) {
                prop_assert!(!gap.is_empty() && gap.start >= range.start && gap.end <= range.end);
                prop_assert!(last < Some(gap.start));
                last = Some(gap.end);
                for byte in gap {
                    in_gaps[byte as usize] = true;
                }
            }
            for byte in range {
                prop_assert_eq!(in_gaps[byte as usize], !model[byte as usize]);
            }
            let runs = model.windows(2).filter(|pair| !pair[0] && pair[1]).count() + usize::from(model[0]);
            prop_assert_eq!(set.count(), runs);
            prop_assert_eq!(set.end() as usize, model.iter().rposition(|&set| set).map_or(0, |at| at + 1));
        }
    }
}
