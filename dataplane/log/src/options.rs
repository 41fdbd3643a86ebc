//! Settings of a log.

use crate::error::Error;
use crate::format::{LogId, PAGE_BYTES, RECORD_HEADER_BYTES};

/// Settings of one log. Sizes are fixed when the log is created; bounds may change at each open.
#[derive(Debug, Clone)]
pub struct LogOptions {
    /// Whose log this is: a number that the owner draws at random when it creates the log and
    /// keeps in its own identity file. A log with another id is refused.
    pub id: LogId,
    /// Size of one segment file: a multiple of 4 KiB, 8 KiB to 1 GiB. Taken from the log on disk
    /// when there is one. Default 64 MiB.
    pub segment_bytes: u64,
    /// How many segments are made when the log is opened. Default 2.
    pub segments_initial: u32,
    /// How many segments the log may grow to, at least 2. Default 16 (1 GiB).
    pub segments_max: u32,
    /// How many bytes of records may wait in memory for a flush; an append beyond it waits.
    /// Default 16 MiB.
    pub buffer_bytes_max: usize,
}

impl LogOptions {
    /// The defaults for the log of `id`.
    #[must_use]
    pub fn new(id: LogId) -> Self {
        Self {
            id,
            segment_bytes: 64 << 20,
            segments_initial: 2,
            segments_max: 16,
            buffer_bytes_max: 16 << 20,
        }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let reason = if !self.segment_bytes.is_multiple_of(PAGE_BYTES) {
            "segment_bytes is not a multiple of 4096"
        } else if !(2 * PAGE_BYTES..=1 << 30).contains(&self.segment_bytes) {
            "segment_bytes is not between 8 KiB and 1 GiB"
        } else if self.segments_max < 2 {
            "segments_max is less than 2"
        } else {
            return Ok(());
        };
        Err(Error::Options { reason })
    }
}

/// The largest payload of one record in a segment of `segment_bytes`.
pub(crate) fn payload_bytes_max(segment_bytes: u64) -> usize {
    usize::try_from(segment_bytes).map_or(0, |bytes| bytes - RECORD_HEADER_BYTES)
}
