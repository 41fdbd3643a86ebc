//! Writes that failed here or behind here: other members may have applied them, or this one alone.
//!
//! The writer sends such a write again; once it has passed this member and all behind it, they have
//! the same bytes. What is left when the lease is closed has to be sealed.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use hither_chunkstore::{Doubt, Regions};
use hither_proto::ids::{ChunkId, Epoch, GroupId, LeaseId, SessionId};
use parking_lot::Mutex;

/// A write, as far as it matters when it fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attempt {
    pub(crate) chunk: ChunkId,
    pub(crate) group: GroupId,
    pub(crate) lease: LeaseId,
    pub(crate) session: SessionId,
    pub(crate) epoch: Epoch,
    pub(crate) range: Range<u32>,
}

/// The failed writes of all chunks that were not made good.
#[derive(Debug, Default)]
pub(crate) struct Doubts {
    chunks: Mutex<BTreeMap<ChunkId, Open>>,
    /// How many chunks there are, so that writes need not look when there are none.
    count: AtomicUsize,
}

#[derive(Debug)]
struct Open {
    /// The newest of the attempts.
    last: Attempt,
    ranges: Vec<Range<u32>>,
}

impl Doubts {
    /// A write failed.
    pub(crate) fn failed(&self, attempt: &Attempt) {
        let mut chunks = self.chunks.lock();
        let open = chunks.entry(attempt.chunk).or_insert_with(|| Open {
            last: attempt.clone(),
            ranges: Vec::new(),
        });
        if attempt.lease >= open.last.lease {
            open.last = attempt.clone();
        }
        open.ranges.push(attempt.range.clone());
        if open.ranges.len() > RANGES_MAX {
            let start = open.ranges.iter().map(|range| range.start).min();
            let end = open.ranges.iter().map(|range| range.end).max();
            let all = start.unwrap_or(0)..end.unwrap_or(u32::MAX);
            open.ranges.clear();
            open.ranges.push(all);
        }
        self.count.store(chunks.len(), Ordering::Release);
    }

    /// A write passed this member and all behind it.
    pub(crate) fn passed(&self, attempt: &Attempt) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut chunks = self.chunks.lock();
        let Some(open) = chunks.get_mut(&attempt.chunk) else {
            return;
        };
        let good = &attempt.range;
        let left = open.ranges.iter().flat_map(|range| {
            [
                range.start..range.end.min(good.start),
                range.start.max(good.end)..range.end,
            ]
        });
        open.ranges = left.filter(|range| !range.is_empty()).collect();
        if open.ranges.is_empty() {
            chunks.remove(&attempt.chunk);
            self.count.store(chunks.len(), Ordering::Release);
        }
    }

    /// Takes the doubts about these chunks under leases up to this one.
    pub(crate) fn take(&self, wanted: &[ChunkId], lease: LeaseId) -> Vec<Doubt> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let mut chunks = self.chunks.lock();
        let mut taken = Vec::new();
        for chunk in wanted {
            let due = |open: &Open| open.last.lease <= lease;
            if !chunks.get(chunk).is_some_and(due) {
                continue;
            }
            let Some(open) = chunks.remove(chunk) else {
                continue;
            };
            let regions = open.ranges.iter().map(Regions::of);
            taken.push(Doubt {
                chunk: *chunk,
                group: open.last.group,
                lease: open.last.lease,
                session: open.last.session,
                epoch: open.last.epoch,
                regions: regions.fold(Regions::NONE, Regions::with),
            });
        }
        self.count.store(chunks.len(), Ordering::Release);
        taken
    }

    /// Keeps doubts that could not be written down.
    pub(crate) fn put_back(&self, doubts: &[Doubt]) {
        for doubt in doubts {
            for range in doubt.regions.ranges() {
                self.failed(&Attempt {
                    chunk: doubt.chunk,
                    group: doubt.group,
                    lease: doubt.lease,
                    session: doubt.session,
                    epoch: doubt.epoch,
                    range,
                });
            }
        }
    }

    /// The doubts that are to be written down now because too many are kept: about one chunk, the
    /// one with the lowest id.
    pub(crate) fn overflow(&self) -> Option<Doubt> {
        if self.count.load(Ordering::Acquire) <= CHUNKS_MAX {
            return None;
        }
        let first = *self.chunks.lock().first_key_value()?.0;
        self.take(&[first], LeaseId(u64::MAX)).pop()
    }

    /// Forgets freed chunks.
    pub(crate) fn forget(&self, freed: &[ChunkId]) {
        self.take(freed, LeaseId(u64::MAX));
    }
}

/// Failed ranges that are told apart in one chunk; beyond, everything between counts as failed.
const RANGES_MAX: usize = 64;
/// Chunks with failed writes that are kept in memory; beyond, one is written down at once.
const CHUNKS_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(chunk: u64, lease: u64, range: Range<u32>) -> Attempt {
        Attempt {
            chunk: ChunkId(chunk),
            group: GroupId(1),
            lease: LeaseId(lease),
            session: SessionId(1),
            epoch: Epoch(1),
            range,
        }
    }

    #[test]
    fn what_passes_later_is_good_again() {
        let doubts = Doubts::default();
        doubts.failed(&attempt(1, 5, 1000..5000));
        doubts.failed(&attempt(2, 5, 0..10));
        doubts.passed(&attempt(1, 5, 0..3000));
        doubts.passed(&attempt(2, 6, 0..10));
        doubts.passed(&attempt(1, 5, 4000..9000));
        let both = [ChunkId(1), ChunkId(2)];
        assert_eq!(doubts.take(&both, LeaseId(4)), []);
        let taken = doubts.take(&both, LeaseId(5));
        assert_eq!(taken.len(), 1);
        assert_eq!((taken[0].chunk, taken[0].regions), (ChunkId(1), Regions(1)));
        assert_eq!(doubts.take(&both, LeaseId(5)), []);
    }

    #[test]
    fn many_failures_take_little_memory() {
        let doubts = Doubts::default();
        for number in 0..1000u32 {
            doubts.failed(&attempt(1, 5, number * 10..number * 10 + 5));
        }
        assert!(doubts.chunks.lock()[&ChunkId(1)].ranges.len() <= RANGES_MAX);
        for chunk in 0..CHUNKS_MAX as u64 + 3 {
            doubts.failed(&attempt(chunk, 5, 0..5));
        }
        let written = std::iter::from_fn(|| doubts.overflow()).count();
        assert_eq!(written, 3);
        doubts.forget(&[ChunkId(4000)]);
        assert_eq!(doubts.count.load(Ordering::Relaxed), CHUNKS_MAX - 1);
    }
}
