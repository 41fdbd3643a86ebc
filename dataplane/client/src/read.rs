//! Reading: the near copy first, the next one in the same attempt, never the near one only.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::future::{BoxFuture, FutureExt as _, Shared, join_all};
use futures::stream::{FuturesUnordered, StreamExt as _};
use hither_clustermap::ClusterView;
use hither_net::NetError;
use hither_proto::checksum::pieces_match;
use hither_proto::chunk::{Read, ReadReply, Target};
use hither_proto::ids::{CHUNK_SIZE, Epoch, GroupId};
use hither_proto::kind::Kind;
use hither_proto::status::{Errno, Status};
use hither_proto::stored::ChunkRef;
use tokio::time::Instant;

use crate::client::Inner;
use crate::counters::locality_of;
use crate::error::FsError;
use crate::file::{File, Lease, OpenFile};
use crate::servers::Candidate;

/// Sequential reading of one descriptor.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    /// Where the next read of the stream begins.
    next: u64,
    /// Reads in a row.
    run: u32,
    /// Read ahead, by offset.
    ahead: Vec<Ahead>,
}

type Fetched = Result<Bytes, FsError>;

struct Ahead {
    range: Range<u64>,
    generation: u64,
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
        open: &OpenFile,
        offset: u64,
        length: u32,
    ) -> Result<Bytes, FsError> {
        let file = &open.file;
        let deadline = self.deadline();
        self.need_shared(file, deadline).await?;
        let (size, generation) = {
            let data = file.data.lock();
            (data.size, data.generation)
        };
        let end = size.min(offset.saturating_add(u64::from(length)));
        if offset >= end {
            tracing::debug!(ino = %file.ino, offset, size, "a read behind the end");
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
        self.read_range(file, range, deadline).await
    }

    /// Notes the read in its stream, starts to read ahead, and gives what was read ahead of it.
    fn follow_stream(
        self: &Arc<Self>,
        open: &OpenFile,
        range: &Range<u64>,
        size: u64,
        generation: u64,
    ) -> Option<BoxFuture<'static, Fetched>> {
        let mut stream = open.stream.lock();
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
                let bytes = self.read_soon(&open.file, from..to);
                stream.ahead.push(Ahead {
                    range: from..to,
                    generation,
                    bytes,
                });
                from = to;
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
        let task = tokio::spawn(async move {
            let deadline = inner.deadline();
            inner.read_range(&file, range, deadline).await
        });
        async move {
            task.await
                .unwrap_or_else(|_| Err(FsError::new(Errno::EIO, "the read was given up")))
        }
        .boxed()
        .shared()
    }

    /// Reads a range that lies inside the file, under a lease.
    async fn read_range(
        &self,
        file: &File,
        range: Range<u64>,
        deadline: Instant,
    ) -> Result<Bytes, FsError> {
        let overlay = {
            let data = file.data.lock();
            if data.dirty.is_empty() && data.in_flight.is_empty() {
                Vec::new()
            } else {
                // What is dirty is newer than what is on its way.
                let mut parts = data.in_flight.within(&range);
                parts.extend(data.dirty.within(&range));
                parts
            }
        };
        let pieces = pieces_of(&range);
        let (first, last) = (piece_index(range.start), piece_index(range.end - 1));
        self.need_refs(file, first, last).await?;
        let base = if let [(index, within)] = &pieces[..] {
            self.read_piece(file, *index, within.clone(), deadline)
                .await?
        } else {
            let parts = pieces
                .iter()
                .map(|(index, within)| self.read_piece(file, *index, within.clone(), deadline));
            let mut whole = BytesMut::with_capacity(length_of(&range));
            for part in join_all(parts).await {
                whole.extend_from_slice(&part?);
            }
            whole.freeze()
        };
        if overlay.is_empty() {
            return Ok(base);
        }
        let mut whole = BytesMut::from(&base[..]);
        for (offset, bytes) in overlay {
            let at = usize::try_from(offset - range.start).unwrap_or(usize::MAX);
            whole[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(whole.freeze())
    }

    /// Reads part of one chunk; what no copy holds is zeros.
    async fn read_piece(
        &self,
        file: &File,
        index: u32,
        within: Range<u32>,
        deadline: Instant,
    ) -> Result<Bytes, FsError> {
        let length = (within.end - within.start) as usize;
        let mut absent = 0;
        loop {
            let (chunk, lease, floor) = {
                let data = file.data.lock();
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

    /// Tries all in-sync members, nearest first, in one attempt; a slow one is overtaken.
    async fn read_any(
        &self,
        map: &Arc<ClusterView>,
        group: GroupId,
        request: &Read,
    ) -> Result<Bytes, Exhausted> {
        let list = self.servers.read_list(map, group);
        let mut tries = FuturesUnordered::new();
        let mut left = list.iter();
        let mut started = 0;
        let mut absent = 0;
        let mut hedge_of = None;
        let mut failed = false;
        let begun = Instant::now();
        loop {
            if tries.is_empty() {
                let Some(next) = left.next() else { break };
                tries.push(self.read_from(map, next, request, started));
                started += 1;
            }
            let newest = list.get(started - 1);
            let patience =
                newest.and_then(|server| self.patience(server, left.as_slice().first(), hedge_of));
            let done = match patience {
                Some(patience) => tokio::time::timeout(patience, tries.next()).await.ok(),
                None => Some(tries.next().await),
            };
            let Some(done) = done else {
                // Slow: the next one is asked too, the first answer wins.
                let Some(next) = left.next() else { continue };
                if let Some(slow) = newest {
                    tracing::debug!(slow = %slow.id, next = %next.id, "a slow read is hedged");
                    self.servers.hedged(slow.id);
                    hedge_of = Some(started);
                }
                tries.push(self.read_from(map, next, request, started));
                started += 1;
                continue;
            };
            match done {
                Some((at, Ok(bytes))) => {
                    if hedge_of == Some(at) {
                        self.counters.add(|report| report.hedge_wins += 1);
                        self.overtaken(list.get(at.wrapping_sub(1)), begun);
                    } else if failed {
                        self.counters.add(|report| report.failovers += 1);
                    }
                    return Ok(bytes);
                }
                Some((_, Err(TryFailed::Absent))) => {
                    absent += 1;
                    failed = true;
                }
                Some((_, Err(TryFailed::Other))) => failed = true,
                // The list itself is old: a silent server on it is not waited for.
                Some((_, Err(TryFailed::Stale))) => return Err(Exhausted::Failed),
                None => {}
            }
        }
        let all_absent = !list.is_empty() && absent == list.len();
        Err(if all_absent {
            Exhausted::Absent
        } else {
            Exhausted::Failed
        })
    }

    /// Time a server has before the next one is asked as well; `None`: as long as it takes.
    ///
    /// A server that is as near is asked after the tracked 95th percentile. One that is farther
    /// costs money: it is asked only when the near one is far slower than it ever is.
    fn patience(
        &self,
        server: &Candidate,
        next: Option<&Candidate>,
        hedged: Option<usize>,
    ) -> Option<Duration> {
        let next = next?;
        if hedged.is_some() {
            return Some(OVERTAKE);
        }
        let usual = self.servers.hedge_after(server.id).unwrap_or(OVERTAKE);
        let patience = if next.farness > server.farness {
            (usual * FAR_PATIENCE).max(FAR_PATIENCE_MIN)
        } else {
            usual
        };
        Some(patience.min(OVERTAKE))
    }

    /// A server lost a race. One that is far slower than it usually is loses its place for a
    /// while, so that not every read has to wait for it first.
    fn overtaken(&self, slow: Option<&Candidate>, begun: Instant) {
        if let Some(slow) = slow
            && begun.elapsed() >= FAR_PATIENCE_MIN
        {
            self.servers.spilled(slow.id);
        }
    }

    async fn read_from(
        &self,
        map: &ClusterView,
        server: &Candidate,
        request: &Read,
        at: usize,
    ) -> (usize, Result<Bytes, TryFailed>) {
        let begun = Instant::now();
        let _in_flight = self.servers.begin(server.id);
        // A read that is overtaken is dropped, and a server that says nothing must not stay first:
        // whoever drops this future before an answer has waited long enough to doubt the server.
        let doubt = Doubt {
            inner: self,
            server,
            begun,
            answered: false,
        };
        let sent = self
            .servers
            .pool
            .call(&server.address, Kind::CHUNK_READ, request, &[], TRY_TIMEOUT)
            .await;
        let result = self.check_read(map, server, request, begun, sent);
        doubt.end();
        (at, result)
    }

    fn check_read(
        &self,
        map: &ClusterView,
        server: &Candidate,
        request: &Read,
        begun: Instant,
        sent: Result<hither_net::Reply, NetError>,
    ) -> Result<Bytes, TryFailed> {
        match sent {
            Ok(reply) => {
                let sums = reply.decode::<ReadReply>().map_err(|_| TryFailed::Other)?;
                let bytes = reply.payload();
                if !pieces_match(request.offset, bytes, &sums.checksums)
                    || bytes.len() > request.length as usize
                {
                    tracing::warn!(id = %server.id, "bytes do not match their checksums");
                    self.servers.suspect(server.id, &server.address);
                    return Err(TryFailed::Other);
                }
                self.servers.answered(server.id, begun.elapsed());
                if let Some(known) = map.server(server.id) {
                    let locality = locality_of(&self.config, known);
                    self.counters
                        .read(locality, server.id.0, bytes.len() as u64);
                }
                Ok(bytes.clone())
            }
            Err(NetError::Refused {
                status: Status::NO_SUCH_CHUNK,
                ..
            }) => Err(TryFailed::Absent),
            Err(NetError::Refused {
                status: Status::BUSY,
                ..
            }) => {
                self.servers.spilled(server.id);
                Err(TryFailed::Other)
            }
            Err(NetError::Refused {
                status: status @ (Status::STALE_EPOCH | Status::NOT_MINE | Status::RETRY),
                ..
            }) => {
                tracing::debug!(id = %server.id, %status, "a read was refused");
                Err(TryFailed::Stale)
            }
            Err(error) => {
                tracing::debug!(id = %server.id, %error, "a read failed");
                self.servers.suspect(server.id, &server.address);
                Err(TryFailed::Other)
            }
        }
    }
}

/// Why one server did not answer a read.
enum TryFailed {
    Absent,
    Other,
    /// The map the list was made from is not the server's.
    Stale,
}

/// Why no server of the list answered.
enum Exhausted {
    Absent,
    Failed,
}

/// A server that was still silent when another had answered, after long enough a time.
struct Doubt<'a> {
    inner: &'a Inner,
    server: &'a Candidate,
    begun: Instant,
    answered: bool,
}

impl Doubt<'_> {
    fn end(mut self) {
        self.answered = true;
    }
}

impl Drop for Doubt<'_> {
    fn drop(&mut self) {
        if !self.answered && self.begun.elapsed() >= DOUBT {
            self.inner
                .servers
                .suspect(self.server.id, &self.server.address);
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
/// Time one server has at most to answer a read.
const TRY_TIMEOUT: Duration = Duration::from_secs(10);
/// A server that has not answered for this long is overtaken whatever the hedging budget says.
const OVERTAKE: Duration = Duration::from_millis(300);
/// How much slower than usual a server has to be before a farther one is asked, and the least.
const FAR_PATIENCE: u32 = 4;
const FAR_PATIENCE_MIN: Duration = Duration::from_millis(100);
/// Silence after which a server is a suspect.
const DOUBT: Duration = Duration::from_millis(250);
/// Time to fetch a newer map.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between attempts on the whole list.
const PAUSE: Duration = Duration::from_millis(20);
/// Attempts on a chunk that all members say they do not have.
const ABSENT_ATTEMPTS: u32 = 20;

#[cfg(test)]
mod tests {
    use super::*;

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
