//! Which segment files are in use, which may be filled next, and where the next record goes.
//!
//! Pure bookkeeping: the files are touched by the flusher, the housekeeper and recovery.

use std::collections::VecDeque;
use std::fmt;

use crate::format::{Lsn, SegmentUse};

/// Number of a segment file; part of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SegmentIndex(pub(crate) u32);

impl SegmentIndex {
    /// Parses the name of a segment file.
    pub(crate) fn from_file_name(name: &str) -> Option<Self> {
        let digits = name.strip_prefix(SEGMENT_PREFIX)?;
        let index = Self(u32::from_str_radix(digits, 16).ok()?);
        // Only the one spelling that `Display` writes.
        (index.to_string() == name).then_some(index)
    }

    fn next(self) -> Option<Self> {
        self.0.checked_add(1).map(Self)
    }
}

impl fmt::Display for SegmentIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SEGMENT_PREFIX}{:08x}", self.0)
    }
}

/// A segment that holds records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LiveSegment {
    pub(crate) index: SegmentIndex,
    pub(crate) segment_use: SegmentUse,
    /// Its first record.
    pub(crate) first: Lsn,
}

/// What to do before a record can be placed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// It goes into the current segment.
    Here,
    /// A new current segment was begun; it goes to its start.
    Rolled,
    /// The housekeeper is making room, or has just been asked to.
    Preparing,
    /// Room comes with the next flush, which frees released segments.
    AfterFlush,
    /// Nothing helps but a release.
    None,
}

/// The segments of one log.
#[derive(Debug)]
pub(crate) struct Segments {
    pub(crate) segment_bytes: u64,
    /// Those that hold records, oldest first; records go to the last one.
    live: VecDeque<LiveSegment>,
    /// Where the next record goes in the last live segment.
    position: u64,
    last_use: SegmentUse,
    /// Ready to be filled.
    free: VecDeque<SegmentIndex>,
    /// No longer needed, but the control file does not say so yet: filling one before it does
    /// would make the log look damaged after a crash.
    releasing: Vec<SegmentIndex>,
    /// How many are being made free by the housekeeper.
    in_release: u32,
    /// The file that is being made, or has to be.
    creating: Option<SegmentIndex>,
    /// How many files exist.
    count: u32,
    /// What the next file is called; `None` if there is no number left.
    next_index: Option<SegmentIndex>,
    count_max: u32,
}

impl Segments {
    pub(crate) fn new(
        segment_bytes: u64,
        count_max: u32,
        live: Vec<LiveSegment>,
        position: u64,
        free: Vec<SegmentIndex>,
    ) -> Self {
        let count = u32::try_from(live.len() + free.len()).unwrap_or(u32::MAX);
        let indexes = live
            .iter()
            .map(|segment| segment.index)
            .chain(free.iter().copied());
        let next_index = indexes
            .max()
            .map_or(Some(SegmentIndex(0)), SegmentIndex::next);
        let last_use = live
            .last()
            .map_or(SegmentUse(0), |segment| segment.segment_use);
        Self {
            segment_bytes,
            // Without a current segment the position says that nothing fits.
            position: if live.is_empty() {
                segment_bytes
            } else {
                position
            },
            live: live.into(),
            last_use,
            free: free.into(),
            releasing: Vec::new(),
            in_release: 0,
            creating: None,
            count,
            next_index,
            count_max: count_max.max(count),
        }
    }

    /// Makes room for a record of `record_bytes`, whose number would be `next`.
    /// The record fits an empty segment.
    pub(crate) fn make_room(&mut self, record_bytes: u64, next: Lsn, needed: Lsn) -> Room {
        assert!(
            record_bytes <= self.segment_bytes,
            "no segment can hold the record"
        );
        if self.position + record_bytes <= self.segment_bytes {
            return Room::Here;
        }
        if let Some(index) = self.free.pop_front() {
            self.last_use = SegmentUse(self.last_use.0.wrapping_add(1));
            self.live.push_back(LiveSegment {
                index,
                segment_use: self.last_use,
                first: next,
            });
            self.position = 0;
            self.want_spare();
            return Room::Rolled;
        }
        if self.creating.is_some() || !self.releasing.is_empty() || self.in_release > 0 {
            return Room::Preparing;
        }
        if self.want_spare() {
            return Room::Preparing;
        }
        match self.live.get(1) {
            Some(second) if second.first <= needed => Room::AfterFlush,
            _ => Room::None,
        }
    }

    /// Takes `record_bytes` of the current segment; returns that segment and the offset.
    pub(crate) fn place(&mut self, record_bytes: u64) -> (LiveSegment, u64) {
        let offset = self.position;
        self.position += record_bytes;
        assert!(
            self.position <= self.segment_bytes,
            "a record crosses the end of its segment"
        );
        let current = self
            .live
            .back()
            .expect("a record is placed only after room was made");
        (*current, offset)
    }

    /// Gives up segments whose records are all before `needed`. `durable` guards the start of the
    /// one that becomes the oldest: recovery has to find it. Says whether there was any.
    pub(crate) fn reclaim(&mut self, needed: Lsn, durable: Lsn) -> bool {
        let before = self.releasing.len();
        while self
            .live
            .get(1)
            .is_some_and(|second| second.first <= needed.min(durable))
        {
            self.releasing
                .extend(self.live.pop_front().map(|segment| segment.index));
        }
        self.releasing.len() > before
    }

    /// Asks for one more file when none is ready and the bound allows it; says whether it did.
    pub(crate) fn want_spare(&mut self) -> bool {
        let wanted = self.free.is_empty()
            && self.releasing.is_empty()
            && self.in_release == 0
            && self.creating.is_none()
            && self.count < self.count_max;
        if wanted {
            self.creating = self.next_index;
        }
        self.creating.is_some()
    }

    /// The segments that become free once the control file is written; none when there are none.
    pub(crate) fn take_releasing(&mut self) -> Vec<SegmentIndex> {
        let taken = std::mem::take(&mut self.releasing);
        self.in_release = u32::try_from(taken.len()).unwrap_or(u32::MAX);
        taken
    }

    pub(crate) fn released(&mut self, segments: &[SegmentIndex]) {
        self.in_release = 0;
        self.free.extend(segments);
    }

    pub(crate) fn to_create(&self) -> Option<SegmentIndex> {
        self.creating
    }

    pub(crate) fn created(&mut self, index: SegmentIndex) {
        self.creating = None;
        self.next_index = index.next();
        self.count += 1;
        self.free.push_back(index);
    }

    /// No room on the disk: the log stays as large as it is.
    pub(crate) fn creation_failed(&mut self) {
        self.creating = None;
        self.count_max = self.count;
    }

    pub(crate) fn bytes_in_use(&self) -> u64 {
        match self.live.len() as u64 {
            0 => 0,
            count => (count - 1) * self.segment_bytes + self.position,
        }
    }

    /// Bytes of the files that exist.
    pub(crate) fn bytes_made(&self) -> u64 {
        u64::from(self.count) * self.segment_bytes
    }

    pub(crate) fn bytes_bound(&self) -> u64 {
        u64::from(self.count_max) * self.segment_bytes
    }
}

const SEGMENT_PREFIX: &str = "segment-";

#[cfg(test)]
mod tests {
    use super::*;

    fn empty(count_max: u32, free: u32) -> Segments {
        let free = (0..free).map(SegmentIndex).collect();
        Segments::new(8192, count_max, Vec::new(), 0, free)
    }

    #[test]
    fn names_parse_back_and_only_in_one_spelling() {
        assert_eq!(SegmentIndex(0xab).to_string(), "segment-000000ab");
        assert_eq!(
            SegmentIndex::from_file_name("segment-000000ab"),
            Some(SegmentIndex(0xab))
        );
        for name in [
            "segment-000000AB",
            "segment-ab",
            "segment-",
            "control",
            "segment-+00000ab",
        ] {
            assert_eq!(SegmentIndex::from_file_name(name), None, "{name}");
        }
    }

    #[test]
    fn a_full_log_rolls_only_after_a_release_that_the_control_file_knows() {
        let mut segments = empty(2, 2);
        assert_eq!(segments.make_room(8192, Lsn(1), Lsn(1)), Room::Rolled);
        assert_eq!(segments.place(8192).1, 0);
        assert_eq!(segments.make_room(8192, Lsn(2), Lsn(1)), Room::Rolled);
        segments.place(8192);
        assert_eq!(segments.make_room(8, Lsn(3), Lsn(1)), Room::None);
        assert_eq!(segments.bytes_in_use(), segments.bytes_bound());
        // Record 2 is not durable yet, so its segment cannot become the oldest.
        assert!(!segments.reclaim(Lsn(2), Lsn(1)));
        assert_eq!(segments.make_room(8, Lsn(3), Lsn(2)), Room::AfterFlush);
        assert!(segments.reclaim(Lsn(2), Lsn(2)));
        assert_eq!(segments.make_room(8, Lsn(3), Lsn(2)), Room::Preparing);
        let taken = segments.take_releasing();
        assert_eq!(taken, [SegmentIndex(0)]);
        assert_eq!(segments.make_room(8, Lsn(3), Lsn(2)), Room::Preparing);
        segments.released(&taken);
        assert_eq!(segments.make_room(8, Lsn(3), Lsn(2)), Room::Rolled);
        let (current, offset) = segments.place(8);
        assert_eq!(
            (current.index, current.segment_use, offset),
            (SegmentIndex(0), SegmentUse(3), 0)
        );
    }

    #[test]
    fn a_log_grows_to_its_bound_and_stops_when_the_disk_is_full() {
        let mut segments = empty(4, 1);
        assert_eq!(segments.make_room(8192, Lsn(1), Lsn(1)), Room::Rolled);
        segments.place(8192);
        assert_eq!(segments.to_create(), Some(SegmentIndex(1)));
        assert_eq!(segments.make_room(8, Lsn(2), Lsn(1)), Room::Preparing);
        segments.created(SegmentIndex(1));
        assert_eq!(segments.make_room(8192, Lsn(2), Lsn(1)), Room::Rolled);
        segments.place(8192);
        segments.creation_failed();
        assert_eq!(segments.make_room(8, Lsn(3), Lsn(1)), Room::None);
        assert_eq!(segments.bytes_bound(), 2 * 8192);
    }
}
