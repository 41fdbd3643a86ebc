//! Reading: the near copy first, the next one in the same attempt, never the near one only.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::future::{BoxFuture, FutureExt as _, Shared, join_all};
use hither_proto::chunk::{Read, Target};
use hither_proto::ids::{CHUNK_SIZE, Epoch, GroupId};
use hither_proto::status::Errno;
use hither_proto::stored::ChunkRef;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use crate::attempt::Exhausted;
use crate::budget::Loan;
use crate::client::Inner;
use crate::error::FsError;
use crate::file::{File, Lease, OpenFile};
use crate::lease::lease_gone;

/// Sequential reading of one descriptor.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    /// Where the next read of the stream begins.
    next: u64,
    /// Reads in a row.
    run: u32,
    /// Read ahead, by offset.
    ahead: Vec<Ahead>,
    /// Read since the last [`rest`](Self::rest).
    active: bool,
    /// Known to the client's tidying.
    listed: bool,
}

impl Stream {
    /// Called now and then: what an idle descriptor has read ahead makes room for others.
    pub(crate) fn rest(&mut self) {
        if !std::mem::take(&mut self.active) {
            self.ahead.clear();
        }
    }
}

type Fetched = Result<Bytes, FsError>;

struct Ahead {
    range: Range<u64>,
    generation: u64,
    /// Its share of what may be read ahead, of this client and of all.
    _room: (OwnedSemaphorePermit, Loan),
    bytes: Shared<BoxFuture<'static, Fetched>>,
}

impl std::fmt::Debug for Ahead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ahead({:?})", self.range)
    }
}

impl Inner {
    /// Bytes of the file from `offset` on, as many as there are up to `length`.
    pub(crate) async fn read(
        self: &Arc<Self>,
        open: &Arc<OpenFile>,
        offset: u64,
        length: u32,
    ) -> Result<Bytes, FsError> {
        let file = &open.file;
        let deadline = self.deadline();
        loop {
            let held = self.hold(file, false, deadline).await?;
            file.read_begins();
            let done = self.read_held(open, offset, length, deadline).await;
            drop(held);
            let gone = match &done {
                // What was read under a lease that has lapsed meanwhile may be old.
                Ok(_) => !self.is_valid(file.ino),
                Err(error) => *error == lease_gone(),
            };
            if !gone {
                return done;
            }
            if Instant::now() >= deadline {
                return Err(crate::session::timed_out("the metadata server"));
            }
        }
    }

    /// Reads under a lease that is held.
    async fn read_held(
        self: &Arc<Self>,
        open: &Arc<OpenFile>,
        offset: u64,
        length: u32,
        deadline: Instant,
    ) -> Result<Bytes, FsError> {
        let file = &open.file;
        let (size, generation, tenure) = {
            let data = file.data.lock();
            (data.size, data.generation, data.tenure)
        };
        let end = size.min(offset.saturating_add(u64::from(length)));
        if offset >= end {
            return Ok(Bytes::new());
        }
        let range = offset..end;
        let ahead = self.follow_stream(open, &range, size, generation);
        if let Some(bytes) = ahead {
            match bytes.await {
                Ok(bytes) => {
                    self.counters
                        .add(|r| r.memory_read_bytes += bytes.len() as u64);
                    return Ok(bytes);
                }
                // What failed ahead of time is read again now.
                Err(error) => tracing::debug!(%error, "read-ahead failed"),
            }
        }
        self.read_range(file, tenure, range, deadline).await
    }

    /// Notes the read in its stream, starts to read ahead, and gives what was read ahead of it.
    fn follow_stream(
        self: &Arc<Self>,
        open: &Arc<OpenFile>,
        range: &Range<u64>,
        size: u64,
        generation: u64,
    ) -> Option<BoxFuture<'static, Fetched>> {
        let mut stream = open.stream.lock();
        stream.active = true;
        let sequential = range.start == stream.next || range.start == 0;
        stream.run = if sequential { stream.run + 1 } else { 0 };
        stream.next = range.end;
        if !sequential || self.config.read_ahead_bytes_max == 0 {
            stream.ahead.clear();
            return None;
        }
        stream
            .ahead
            .retain(|a| a.generation == generation && a.range.end > range.start);
        let found = cover(&stream.ahead, range);
        if stream.run >= STREAM_READS {
            let last = stream
                .ahead
                .last()
                .map_or(range.end, |ahead| ahead.range.end);
            let mut from = last.max(range.end);
            let until = size.min(range.end + STREAM_BYTES);
            while from < until {
                let to = until.min((from / AHEAD_BYTES + 1) * AHEAD_BYTES);
                let wanted = u32::try_from(to - from).unwrap_or(u32::MAX);
                // Others read ahead as much as all together may.
                let Ok(room) = Arc::clone(&self.ahead).try_acquire_many_owned(wanted) else {
                    break;
                };
                let Some(loan) = self.account.lend(wanted as usize) else {
                    break;
                };
                let bytes = self.read_soon(&open.file, from..to);
                stream.ahead.push(Ahead {
                    range: from..to,
                    generation,
                    _room: (room, loan),
                    bytes,
                });
                from = to;
            }
            if !std::mem::replace(&mut stream.listed, true) {
                self.streams.lock().push(Arc::downgrade(open));
            }
        }
        found
    }

    fn read_soon(
        self: &Arc<Self>,
        file: &Arc<File>,
        range: Range<u64>,
    ) -> Shared<BoxFuture<'static, Fetched>> {
        let (inner, file) = (Arc::clone(self), Arc::clone(file));
        let tenure = file.data.lock().tenure;
        let task = tokio::spawn(async move {
            let deadline = inner.deadline();
            inner.read_range(&file, tenure, range, deadline).await
        });
        async move {
            task.await
                .unwrap_or_else(|_| Err(FsError::new(Errno::EIO, "the read was given up")))
        }
        .boxed()
        .shared()
    }

    /// Reads a range that lies inside the file, under the lease of this tenure.
    async fn read_range(
        &self,
        file: &File,
        tenure: u64,
        range: Range<u64>,
        deadline: Instant,
    ) -> Result<Bytes, FsError> {
        let own = file.data.lock().own(&range);
        if let [(offset, bytes)] = &own[..]
            && *offset == range.start
            && bytes.len() == length_of(&range)
        {
            let length = bytes.len() as u64;
            self.counters.add(|r| r.memory_read_bytes += length);
            return Ok(bytes.clone());
        }
        let pieces = pieces_of(&range);
        let (first, last) = (piece_index(range.start), piece_index(range.end - 1));
        self.need_refs(file, tenure, first, last).await?;
        let base = if let [(index, within)] = &pieces[..] {
            self.read_piece(file, tenure, *index, within.clone(), deadline)
                .await?
        } else {
            let parts = pieces.iter().map(|(index, within)| {
                self.read_piece(file, tenure, *index, within.clone(), deadline)
            });
            let mut whole = BytesMut::with_capacity(length_of(&range));
            for part in join_all(parts).await {
                whole.extend_from_slice(&part?);
            }
            whole.freeze()
        };
        if own.is_empty() {
            return Ok(base);
        }
        let mut whole = BytesMut::from(&base[..]);
        for (offset, bytes) in own {
            let at = usize::try_from(offset - range.start).unwrap_or(usize::MAX);
            whole[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(whole.freeze())
    }

    /// Reads part of one chunk; what no copy holds is zeros.
    async fn read_piece(
        &self,
        file: &File,
        tenure: u64,
        index: u32,
        within: Range<u32>,
        deadline: Instant,
    ) -> Result<Bytes, FsError> {
        let length = (within.end - within.start) as usize;
        let mut absent = 0;
        loop {
            let (chunk, lease, floor) = {
                let data = file.data.lock();
                // No lease is no hole.
                if data.tenure != tenure || data.lease == Lease::None {
                    return Err(lease_gone());
                }
                let written =
                    |chunk: &&ChunkRef| chunk.written || data.unreported.contains(&chunk.index);
                let Some(chunk) = data.refs.get(&index).filter(written) else {
                    return Ok(zeros(length));
                };
                let lease = match data.lease {
                    Lease::Exclusive(lease) => lease.0,
                    Lease::Shared | Lease::None => 0,
                };
                (
                    *chunk,
                    lease,
                    data.floors.get(&chunk.group).copied().unwrap_or_default(),
                )
            };
            let group = GroupId(chunk.group);
            let map = self.map_with(group, Epoch(floor), deadline).await?;
            let epoch = map.epoch(group).ok_or(Errno::EIO)?;
            let request = Read {
                target: Some(Target {
                    chunk: chunk.chunk,
                    group: group.0,
                    epoch: epoch.0,
                    lease,
                    ..Target::default()
                }),
                offset: within.start,
                length: within.end - within.start,
            };
            match self.read_any(&map, group, &request).await {
                Ok(bytes) => return Ok(padded(bytes, length)),
                Err(Exhausted::Absent) => {
                    // No member has it: never zeros. Members that died before it was stable get it
                    // again from us; or the map is old; look a few times.
                    if file.data.lock().unsynced.contains_key(&index) {
                        Box::pin(self.flush_stable(file)).await?;
                    }
                    absent += 1;
                    if absent >= ABSENT_ATTEMPTS {
                        return Err(FsError::new(
                            Errno::EIO,
                            format!("chunk {} is on none of its servers", chunk.chunk),
                        ));
                    }
                }
                Err(Exhausted::Failed) => {}
            }
            if Instant::now() >= deadline {
                return Err(crate::session::timed_out("the chunk's servers"));
            }
            let version = map.version();
            if self.link.refresh(REFRESH_TIMEOUT).await.is_err() {
                self.wait_for_map(version, PAUSE).await;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// What was read ahead of a range, if all of it was.
fn cover(ahead: &[Ahead], range: &Range<u64>) -> Option<BoxFuture<'static, Fetched>> {
    let mut parts = Vec::new();
    let mut at = range.start;
    for piece in ahead {
        if piece.range.start <= at && at < piece.range.end {
            let to = piece.range.end.min(range.end);
            let from = usize::try_from(at - piece.range.start).ok()?;
            let until = usize::try_from(to - piece.range.start).ok()?;
            parts.push((piece.bytes.clone(), from..until));
            at = to;
        }
        if at >= range.end {
            break;
        }
    }
    if at < range.end {
        return None;
    }
    Some(
        async move {
            if let [(only, within)] = &parts[..] {
                let bytes = only.clone().await?;
                return cut(&bytes, within);
            }
            let mut whole = BytesMut::new();
            for (bytes, within) in parts {
                whole.extend_from_slice(&cut(&bytes.await?, &within)?);
            }
            Ok(whole.freeze())
        }
        .boxed(),
    )
}

fn cut(bytes: &Bytes, within: &Range<usize>) -> Fetched {
    if within.end > bytes.len() {
        return Err(FsError::new(
            Errno::EIO,
            "less was read ahead than asked for",
        ));
    }
    Ok(bytes.slice(within.clone()))
}

/// The pieces of the file a range touches: chunk index and range inside the chunk.
fn pieces_of(range: &Range<u64>) -> Vec<(u32, Range<u32>)> {
    let mut pieces = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let index = piece_index(at);
        let start = at % CHUNK_SIZE;
        let end = CHUNK_SIZE.min(start + (range.end - at));
        let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        pieces.push((index, narrow(start)..narrow(end)));
        at += end - start;
    }
    pieces
}

fn piece_index(offset: u64) -> u32 {
    u32::try_from(offset / CHUNK_SIZE).unwrap_or(u32::MAX)
}

fn length_of(range: &Range<u64>) -> usize {
    usize::try_from(range.end - range.start).unwrap_or(usize::MAX)
}

/// A copy that is shorter than the file reads as zeros behind its end.
fn padded(bytes: Bytes, length: usize) -> Bytes {
    if bytes.len() >= length {
        return bytes;
    }
    let mut whole = BytesMut::with_capacity(length);
    whole.extend_from_slice(&bytes);
    whole.resize(length, 0);
    whole.freeze()
}

fn zeros(length: usize) -> Bytes {
    BytesMut::zeroed(length).freeze()
}

/// Sequential reads after which a stream is read ahead.
const STREAM_READS: u32 = 3;
/// Bytes read ahead of a stream, and in one request.
const STREAM_BYTES: u64 = 8 << 20;
const AHEAD_BYTES: u64 = 1 << 20;
/// Time to fetch a newer map.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between attempts on the whole list.
const PAUSE: Duration = Duration::from_millis(20);
/// Attempts on a chunk that all members say they do not have.
const ABSENT_ATTEMPTS: u32 = 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Account;

    #[test]
    fn ranges_are_cut_at_chunks() {
        let end = CHUNK_SIZE;
        assert_eq!(pieces_of(&(10..20)), vec![(0, 10..20)]);
        let chunk = u32::try_from(CHUNK_SIZE).unwrap();
        assert_eq!(
            pieces_of(&(end - 5..end + 7)),
            vec![(0, chunk - 5..chunk), (1, 0..7)]
        );
        assert_eq!(pieces_of(&(end..end * 2)), vec![(1, 0..chunk)]);
    }

    #[test]
    fn what_was_read_ahead_covers_a_range_or_does_not() {
        let piece = |start: u64, text: &'static str| Ahead {
            range: start..start + text.len() as u64,
            generation: 0,
            _room: (
                Arc::new(tokio::sync::Semaphore::new(1))
                    .try_acquire_owned()
                    .unwrap(),
                Account::of(None).lend(text.len()).unwrap(),
            ),
            bytes: async move { Ok(Bytes::from_static(text.as_bytes())) }
                .boxed()
                .shared(),
        };
        let ahead = vec![piece(0, "abcd"), piece(4, "efgh")];
        let bytes =
            |range: Range<u64>| cover(&ahead, &range).map(|f| f.now_or_never().unwrap().unwrap());
        assert_eq!(bytes(1..3).unwrap(), "bc");
        assert_eq!(bytes(2..7).unwrap(), "cdefg");
        assert_eq!(bytes(6..9), None);
    }
}
