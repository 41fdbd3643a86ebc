//! Finding the records of a log that was closed, killed or cut off from power.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;

use crate::dir::{LogDir, LogFile};
use crate::error::Error;
use crate::format::{
    CONTROL_FILE, CONTROL_SLOT_BYTES, CONTROL_SLOTS, Control, Header, Incarnation, LogId, Lsn,
    PAGE_BYTES, RECORD_ALIGN, RECORD_HEADER_BYTES, RecordKind, SegmentUse,
};
use crate::housekeeper::create_segment;
use crate::log::Place;
use crate::options::LogOptions;
use crate::segments::{LiveSegment, SegmentIndex};
use crate::state::{ControlFile, Extent};

/// A record found when the log was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its number.
    pub lsn: Lsn,
    /// What it means to its owner.
    pub kind: RecordKind,
    /// Its payload. A slice of the whole segment, which stays in memory as long as it.
    pub payload: Bytes,
    /// Where the payload is.
    pub place: Place,
}

/// The records of an opened log, oldest first, from the oldest that is still needed.
///
/// Reads one segment at a time. Must be read before the first [`Log::release`](crate::Log::release)
/// lets segments be filled again.
#[derive(Debug)]
pub struct Recovered {
    id: LogId,
    needed: Lsn,
    last: Lsn,
    segments: VecDeque<FoundSegment>,
    current: Option<(FoundSegment, Bytes)>,
    offset: usize,
}

impl Recovered {
    /// The last record of the log; the one before the first needed if there is none.
    #[must_use]
    pub fn last_lsn(&self) -> Lsn {
        self.last
    }

    /// The oldest record that is still needed: everything before it was released.
    #[must_use]
    pub fn needed_lsn(&self) -> Lsn {
        self.needed
    }

    fn read_next(&mut self) -> Result<Option<Record>, Error> {
        loop {
            if let Some((segment, bytes)) = &self.current {
                if self.offset < segment.end {
                    let record = self.decode(segment, bytes)?;
                    self.offset += crate::format::record_bytes(record.payload.len());
                    if record.lsn >= self.needed {
                        return Ok(Some(record));
                    }
                    continue;
                }
                self.current = None;
            }
            let Some(segment) = self.segments.pop_front() else {
                return Ok(None);
            };
            let mut bytes = vec![0; segment.end];
            read(&segment.file, segment.live.index, &mut bytes, 0)?;
            self.offset = 0;
            self.current = Some((segment, bytes.into()));
        }
    }

    fn decode(&self, segment: &FoundSegment, bytes: &Bytes) -> Result<Record, Error> {
        let rest = &bytes[self.offset..];
        // Recovery has seen this record intact a moment ago.
        let corrupt = || Error::Corrupt {
            file: segment.live.index.to_string(),
            offset: self.offset as u64,
            reason: "a record changed while it was read",
        };
        let header = Header::decode(rest, self.id).ok_or_else(corrupt)?;
        let payload = header.payload(rest).ok_or_else(corrupt)?;
        let offset = (self.offset + RECORD_HEADER_BYTES) as u64;
        Ok(Record {
            lsn: header.lsn,
            kind: header.kind,
            payload: bytes.slice_ref(payload),
            place: Place {
                index: segment.live.index,
                offset,
            },
        })
    }
}

impl Iterator for Recovered {
    type Item = Result<Record, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.read_next();
        if next.is_err() {
            self.segments.clear();
            self.current = None;
        }
        next.transpose()
    }
}

/// A log that is ready to take records.
pub(crate) struct Opened {
    pub(crate) control: ControlFile,
    pub(crate) files: BTreeMap<SegmentIndex, Arc<dyn LogFile>>,
    pub(crate) live: Vec<LiveSegment>,
    pub(crate) position: u64,
    pub(crate) free: Vec<SegmentIndex>,
    pub(crate) last: Lsn,
    /// The written part of the page where the next record goes.
    pub(crate) tail: Option<Extent>,
    pub(crate) records: Recovered,
}

/// Opens the log in `dir` and leaves it so that a record may be appended: everything found is
/// durable, nothing unflushed of an earlier opening can be mistaken for a record later on.
pub(crate) fn recover(dir: &dyn LogDir, options: &LogOptions) -> Result<Opened, Error> {
    let mut control = open_control(dir, options)?;
    let known = control.written;
    let mut segments = open_segments(dir, &known)?;
    // A process killed between creating a file and syncing the directory leaves entries that a
    // loss of power would still take, with everything flushed to them by then.
    dir.sync_dir()
        .map_err(|error| Error::io("sync", ".", error))?;
    let chain = walk(&segments, &known)?;
    check_end(&segments, &chain, &known)?;
    settle(&segments, &chain, &known)?;

    let incarnation = known.incarnation.max(chain.incarnation);
    let incarnation = Incarnation(incarnation.0.checked_add(1).ok_or(Error::Options {
        reason: "the log was opened too often",
    })?);
    control.write(Control {
        incarnation,
        durable: chain.last,
        ..known
    })?;

    let wanted = options.segments_initial.clamp(1, options.segments_max);
    for index in (0..wanted).map(SegmentIndex) {
        if let std::collections::btree_map::Entry::Vacant(vacant) = segments.entry(index) {
            let file = create_segment(dir, index, known.segment_bytes)?;
            vacant.insert(Segment { file, head: None });
        }
    }
    let is_live = |index: &SegmentIndex| chain.segments.iter().any(|s| s.live.index == *index);
    let free = segments
        .keys()
        .copied()
        .filter(|index| !is_live(index))
        .collect();
    let last_segment = chain.segments.last();
    Ok(Opened {
        tail: last_segment.map(read_tail).transpose()?,
        position: last_segment.map_or(0, |segment| segment.end as u64),
        files: segments
            .iter()
            .map(|(&index, s)| (index, Arc::clone(&s.file)))
            .collect(),
        live: chain.segments.iter().map(|segment| segment.live).collect(),
        free,
        last: chain.last,
        control,
        records: Recovered {
            id: options.id,
            needed: known.needed,
            last: chain.last,
            segments: chain.segments.into(),
            current: None,
            offset: 0,
        },
    })
}

/// A segment file and the record at its start, if there is one.
struct Segment {
    file: Arc<dyn LogFile>,
    head: Option<Header>,
}

/// A segment of the log's chain of records.
#[derive(Debug, Clone)]
struct FoundSegment {
    file: Arc<dyn LogFile>,
    live: LiveSegment,
    /// Where its last record ends.
    end: usize,
}

/// The unbroken run of records from the oldest needed on.
struct Chain {
    segments: Vec<FoundSegment>,
    last: Lsn,
    incarnation: Incarnation,
    /// What the records and the control file prove to be durable.
    durable: Lsn,
}

fn open_control(dir: &dyn LogDir, options: &LogOptions) -> Result<ControlFile, Error> {
    let io = |error| Error::io("open", CONTROL_FILE, error);
    let entries = dir.list().map_err(io)?;
    let exists = entries.iter().any(|entry| entry.name == CONTROL_FILE);
    let file = if exists {
        dir.open(CONTROL_FILE)
    } else {
        dir.create(CONTROL_FILE)
    };
    let file = file.map_err(io)?;
    if !file.try_lock().map_err(io)? {
        return Err(Error::Locked);
    }
    if let Some(written) = read_control(&file)? {
        if written.id != options.id {
            return Err(Error::ForeignLog {
                found: written.id,
                expected: options.id,
            });
        }
        return Ok(ControlFile { file, written });
    }
    // The control file is made durable before the first segment, so only an interrupted creation
    // leaves none of both.
    if entries
        .iter()
        .any(|entry| SegmentIndex::from_file_name(&entry.name).is_some())
    {
        let reason = "no intact slot, but there are segments";
        return Err(Error::Corrupt {
            file: CONTROL_FILE.to_owned(),
            offset: 0,
            reason,
        });
    }
    let written = Control {
        id: options.id,
        counter: 0,
        segment_bytes: options.segment_bytes,
        needed: Lsn(1),
        durable: Lsn(0),
        incarnation: Incarnation(0),
    };
    let mut bytes = written.encode().to_vec();
    bytes.resize(usize::try_from(CONTROL_SLOTS * PAGE_BYTES).unwrap_or(0), 0);
    file.write_at(&bytes, 0).map_err(io)?;
    file.sync_data().map_err(io)?;
    dir.sync_dir().map_err(io)?;
    Ok(ControlFile { file, written })
}

/// The newer of the two slots.
fn read_control(file: &Arc<dyn LogFile>) -> Result<Option<Control>, Error> {
    let io = |error| Error::io("read", CONTROL_FILE, error);
    let size_bytes = file.size().map_err(io)?;
    let mut newest: Option<Control> = None;
    for slot in 0..CONTROL_SLOTS {
        let offset = slot * PAGE_BYTES;
        let mut bytes = [0; CONTROL_SLOT_BYTES];
        if offset + bytes.len() as u64 > size_bytes {
            continue;
        }
        file.read_at(&mut bytes, offset).map_err(io)?;
        let found = Control::decode(&bytes);
        let found = found.map_err(|found| Error::UnsupportedVersion { found })?;
        if found.is_some_and(|found| newest.is_none_or(|newest| newest.counter < found.counter)) {
            newest = found;
        }
    }
    Ok(newest)
}

fn open_segments(
    dir: &dyn LogDir,
    control: &Control,
) -> Result<BTreeMap<SegmentIndex, Segment>, Error> {
    let entries = dir.list().map_err(|error| Error::io("list", ".", error))?;
    let mut segments = BTreeMap::new();
    for index in entries
        .iter()
        .filter_map(|entry| SegmentIndex::from_file_name(&entry.name))
    {
        let name = index.to_string();
        let file = dir
            .open(&name)
            .map_err(|error| Error::io("open", &name, error))?;
        let size_bytes = file
            .size()
            .map_err(|error| Error::io("open", &name, error))?;
        if size_bytes != control.segment_bytes {
            let reason = "the segment has another size than when it was made";
            return Err(Error::Corrupt {
                file: name,
                offset: size_bytes,
                reason,
            });
        }
        let head = read_head(&file, index, size_bytes, control.id)?;
        segments.insert(index, Segment { file, head });
    }
    Ok(segments)
}

/// The record at the start of a segment.
fn read_head(
    file: &Arc<dyn LogFile>,
    index: SegmentIndex,
    size_bytes: u64,
    id: LogId,
) -> Result<Option<Header>, Error> {
    // Most records are small: try with a page before reading everything.
    for part in [PAGE_BYTES.min(size_bytes), size_bytes] {
        let mut bytes = vec![0; usize::try_from(part).unwrap_or(0)];
        read(file, index, &mut bytes, 0)?;
        let head = Header::decode(&bytes, id);
        if head.is_some() || bytes.first().is_none_or(|&first| first == 0) {
            return Ok(head);
        }
    }
    Ok(None)
}

/// Follows the records from the segment that holds the oldest needed one.
fn walk(segments: &BTreeMap<SegmentIndex, Segment>, control: &Control) -> Result<Chain, Error> {
    let mut chain = Chain {
        segments: Vec::new(),
        last: control.needed.previous(),
        incarnation: Incarnation(0),
        durable: control.durable,
    };
    // The segment before which everything is released is never filled again before the control
    // file says so, and its first record is durable by then: it is here if anything is.
    let start = segments
        .iter()
        .filter_map(|(&index, segment)| Some((index, segment.head?)));
    let start = start.filter(|(_, head)| head.lsn <= control.needed);
    let mut next = start.max_by_key(|(_, head)| head.lsn);
    if let Some((_, head)) = next {
        chain.last = head.lsn.previous();
    }
    while let Some((index, head)) = next {
        walk_segment(&mut chain, index, &segments[&index].file, head, control)?;
        let wanted_use = SegmentUse(head.segment_use.0.wrapping_add(1));
        next = segments.iter().find_map(|(&index, segment)| {
            let follows = segment.head.filter(|head| {
                head.segment_use == wanted_use
                    && head.lsn == chain.last.next()
                    && head.incarnation >= chain.incarnation
            });
            Some((index, follows?))
        });
    }
    Ok(chain)
}

fn walk_segment(
    chain: &mut Chain,
    index: SegmentIndex,
    file: &Arc<dyn LogFile>,
    head: Header,
    control: &Control,
) -> Result<(), Error> {
    let bytes = read_segment(file, index, control)?;
    let mut end = 0;
    while let Some(header) = bytes
        .get(end..)
        .and_then(|rest| Header::decode(rest, control.id))
    {
        let follows = header.lsn == chain.last.next()
            && header.segment_use == head.segment_use
            && header.incarnation >= chain.incarnation;
        if !follows {
            break;
        }
        end += header.record_bytes();
        chain.last = header.lsn;
        chain.incarnation = header.incarnation;
        chain.durable = chain.durable.max(header.durable);
    }
    let live = LiveSegment {
        index,
        segment_use: head.segment_use,
        first: head.lsn,
    };
    chain.segments.push(FoundSegment {
        file: Arc::clone(file),
        live,
        end,
    });
    Ok(())
}

/// Tells a torn tail, which was never acknowledged, from damage: a later record, or the control
/// file, that knows the missing record to be durable proves the damage.
fn check_end(
    segments: &BTreeMap<SegmentIndex, Segment>,
    chain: &Chain,
    control: &Control,
) -> Result<(), Error> {
    let missing = chain.last.next();
    let (file, offset) = match chain.segments.last() {
        Some(segment) => (segment.live.index.to_string(), segment.end as u64),
        None => (SegmentIndex(0).to_string(), 0),
    };
    let corrupt = Error::Corrupt {
        file,
        offset,
        reason: "a record that was flushed is missing or damaged",
    };
    // A release never goes past the first record that is not durable.
    if chain.durable >= missing || control.needed > missing {
        return Err(corrupt);
    }
    for (index, segment) in segments {
        let found = chain
            .segments
            .iter()
            .find(|found| found.live.index == *index);
        let from = match (found, segment.head) {
            (Some(found), _) if found.live == chain.segments[chain.segments.len() - 1].live => {
                found.end
            }
            (Some(_), _) => continue,
            // Of an earlier use and released.
            (None, Some(head)) if head.lsn < missing => continue,
            (None, _) => 0,
        };
        let bytes = read_segment(&segment.file, *index, control)?;
        if proves(bytes.get(from..).unwrap_or(&[]), missing, control.id) {
            return Err(corrupt);
        }
    }
    Ok(())
}

/// Whether a record anywhere in `bytes` knows `missing` to be durable. The log's id is part of
/// every checksum, so payload that merely looks like a record does not count.
fn proves(bytes: &[u8], missing: Lsn, id: LogId) -> bool {
    (0..bytes.len()).step_by(RECORD_ALIGN).any(|offset| {
        Header::decode(&bytes[offset..], id).is_some_and(|header| header.durable >= missing)
    })
}

/// Writes the records that are not known to be durable once more and syncs them, and wipes the
/// starts of segments that follow the end of the chain but do not belong to it.
///
/// After a killed process such records may be in the page cache only, marked clean by a failed
/// sync: a sync alone would not save them.
fn settle(
    segments: &BTreeMap<SegmentIndex, Segment>,
    chain: &Chain,
    control: &Control,
) -> Result<(), Error> {
    for (index, segment) in segments {
        let stale = segment.head.is_some_and(|head| head.lsn > chain.last);
        if stale {
            let io = |error| Error::io("wipe", &index.to_string(), error);
            let zeros = [0; RECORD_HEADER_BYTES];
            segment.file.write_at(&zeros, 0).map_err(io)?;
            segment.file.sync_data().map_err(io)?;
        }
    }
    if chain.durable >= chain.last {
        return Ok(());
    }
    for found in &chain.segments {
        let bytes = read_segment(&found.file, found.live.index, control)?;
        let mut from = 0;
        while let Some(header) = Header::decode(&bytes[from..found.end], control.id) {
            if header.lsn > chain.durable {
                break;
            }
            from += header.record_bytes();
        }
        if from < found.end {
            let io = |error| Error::io("write", &found.live.index.to_string(), error);
            found
                .file
                .write_at(&bytes[from..found.end], from as u64)
                .map_err(io)?;
            found.file.sync_data().map_err(io)?;
        }
    }
    Ok(())
}

fn read_tail(segment: &FoundSegment) -> Result<Extent, Error> {
    let offset = segment.end as u64 / PAGE_BYTES * PAGE_BYTES;
    let mut bytes = vec![0; usize::try_from(segment.end as u64 - offset).unwrap_or(0)];
    read(&segment.file, segment.live.index, &mut bytes, offset)?;
    Ok(Extent {
        index: segment.live.index,
        offset,
        bytes,
    })
}

fn read_segment(
    file: &Arc<dyn LogFile>,
    index: SegmentIndex,
    control: &Control,
) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; usize::try_from(control.segment_bytes).unwrap_or(0)];
    read(file, index, &mut bytes, 0)?;
    Ok(bytes)
}

fn read(
    file: &Arc<dyn LogFile>,
    index: SegmentIndex,
    buffer: &mut [u8],
    offset: u64,
) -> Result<(), Error> {
    file.read_at(buffer, offset)
        .map_err(|error| Error::io("read", &index.to_string(), error))
}
