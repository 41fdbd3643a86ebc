//! Writing: into memory under an exclusive lease, then along the chain in large frames.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use hither_net::NetError;
use hither_proto::checksum::piece_checksums;
use hither_proto::chunk::{Applied, Hop, Target, Write};
use hither_proto::clock::WallNanos;
use hither_proto::common::Failure;
use hither_proto::ids::{BootId, CHUNK_SIZE, ChunkserverId, Epoch, GroupId};
use hither_proto::kind::Kind;
use hither_proto::manager::{BrokenLink, ReportUnreachable};
use hither_proto::status::{Errno, Status};
use hither_proto::stored::ChunkRef;
use tokio::time::Instant;

use crate::client::Inner;
use crate::counters::locality_of;
use crate::error::FsError;
use crate::extents::Extents;
use crate::file::{Data, File, Lease, OpenFile};
use crate::servers::Candidate;

/// A run of bytes on its way to one chunk.
#[derive(Debug, Clone)]
struct Frame {
    /// Offset in the file.
    offset: u64,
    data: Bytes,
    /// Durable on all members before it is acknowledged.
    sync: bool,
}

/// Data that is dirty now.
struct Written {
    offset: u64,
    /// A flusher is to be started.
    kick: bool,
}

impl Frame {
    fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.data.len() as u64
    }

    fn index(&self) -> u32 {
        u32::try_from(self.offset / CHUNK_SIZE).unwrap_or(u32::MAX)
    }
}

impl Inner {
    /// Writes at `offset`, or at the end for a descriptor that appends; where it was written.
    pub(crate) async fn write(
        self: &Arc<Self>,
        open: &OpenFile,
        offset: u64,
        data: Bytes,
    ) -> Result<u64, FsError> {
        let file = &open.file;
        let deadline = self.deadline();
        self.wait_for_memory(file, data.len(), deadline).await?;
        let gate = file.gate.read().await;
        let written = loop {
            self.need_exclusive(file, deadline).await?;
            // `None`: the lease was taken back between the two.
            if let Some(written) = self.put_dirty(open, offset, data.clone())? {
                break written;
            }
        };
        drop(gate);
        if written.kick {
            self.spawn_flusher(file);
        }
        if open.sync {
            self.fsync(file).await?;
        }
        Ok(written.offset)
    }

    /// Puts data among what is dirty, if the file's exclusive lease is held.
    fn put_dirty(
        &self,
        open: &OpenFile,
        offset: u64,
        data: Bytes,
    ) -> Result<Option<Written>, FsError> {
        let mut state = open.file.data.lock();
        if !matches!(state.lease, Lease::Exclusive(_)) {
            return Ok(None);
        }
        let offset = if open.append { state.size } else { offset };
        let end = offset.checked_add(data.len() as u64).ok_or(Errno::EFBIG)?;
        if end > FILE_BYTES_MAX {
            return Err(Errno::EFBIG.into());
        }
        if end > state.size && end > state.size_max {
            return Err(Errno::EDQUOT.into());
        }
        let before = state.dirty.bytes();
        state.dirty.insert(offset, data);
        let after = state.dirty.bytes();
        self.dirty_bytes.fetch_add(after, Ordering::AcqRel);
        self.dirty_bytes.fetch_sub(before, Ordering::AcqRel);
        state.size = state.size.max(end);
        state.mtime = WallNanos::now().0;
        state.unreported_size = true;
        state.generation += 1;
        let kick = after >= FRAME_BYTES && !state.flusher_runs;
        state.flusher_runs |= kick;
        Ok(Some(Written { offset, kick }))
    }

    /// Writers wait while too much is not on the servers yet.
    async fn wait_for_memory(
        self: &Arc<Self>,
        file: &Arc<File>,
        bytes: usize,
        deadline: Instant,
    ) -> Result<(), FsError> {
        loop {
            let less = self.dirty_less.notified();
            tokio::pin!(less);
            less.as_mut().enable();
            let waiting = self.dirty_bytes.load(Ordering::Acquire);
            if waiting == 0 || waiting + bytes <= self.config.dirty_bytes_max {
                return Ok(());
            }
            self.flush_all_soon(file);
            if tokio::time::timeout_at(deadline, less).await.is_err() {
                return Err(crate::session::timed_out("a chunkserver"));
            }
        }
    }

    fn flush_all_soon(self: &Arc<Self>, file: &Arc<File>) {
        let mut files = self.files_with_dirty_data();
        files.push(Arc::clone(file));
        for file in files {
            let start = {
                let mut data = file.data.lock();
                let start = !data.dirty.is_empty() && !data.flusher_runs;
                data.flusher_runs |= start;
                start
            };
            if start {
                self.spawn_flusher(&file);
            }
        }
    }

    fn spawn_flusher(self: &Arc<Self>, file: &Arc<File>) {
        let (inner, file) = (Arc::clone(self), Arc::clone(file));
        tokio::spawn(async move {
            inner.flush_dirty(&file, false).await;
            file.data.lock().flusher_runs = false;
        });
    }

    /// Sends everything that is dirty, several frames at a time; errors are kept in the file.
    pub(crate) async fn flush_dirty(&self, file: &File, sync_small: bool) {
        let _one = file.flushing.lock().await;
        let mut window = FuturesUnordered::new();
        // After a failure what is on its way is waited for, and the rest stays dirty.
        let mut sound = true;
        loop {
            while sound && window.len() < WINDOW {
                let Some(frame) = self.next_frame(file, sync_small) else {
                    break;
                };
                window.push(self.send_frame(file, frame));
            }
            match window.next().await {
                Some(sent) => sound &= sent,
                None => return,
            }
        }
    }

    fn next_frame(&self, file: &File, sync_small: bool) -> Option<Frame> {
        let mut data = file.data.lock();
        let (dirty, in_flight) = {
            let data = &mut *data;
            (&mut data.dirty, &data.in_flight)
        };
        let (offset, bytes) = dirty.take_run(FRAME_BYTES as u64, CHUNK_SIZE, |range| {
            !in_flight.overlaps(range)
        })?;
        data.in_flight.insert(offset, bytes.clone());
        let sync = sync_small && bytes.len() < SYNC_BYTES;
        Some(Frame {
            offset,
            data: bytes,
            sync,
        })
    }

    /// Sends a frame; false: it is dirty again, because nobody took it in time.
    async fn send_frame(&self, file: &File, frame: Frame) -> bool {
        let result = self.write_frame(file, &frame).await;
        let bytes = frame.data.len();
        let mut stays_dirty = 0;
        let sent = {
            let mut data = file.data.lock();
            data.in_flight.remove(frame.range());
            match result {
                Ok(boots) => {
                    data.unreported.insert(frame.index());
                    self.note_applied(&mut data, frame, boots);
                    true
                }
                Err(error) => {
                    tracing::warn!(ino = %file.ino, %error, "written data could not be stored");
                    if error.errno == Errno::ETIMEDOUT {
                        let mut again = Extents::default();
                        again.insert(frame.offset, frame.data);
                        again.subtract(&data.dirty);
                        stays_dirty = again.bytes();
                        for (offset, bytes) in again.into_parts() {
                            data.dirty.insert(offset, bytes);
                        }
                    }
                    data.error = Some(error);
                    false
                }
            }
        };
        self.dirty_bytes
            .fetch_sub(bytes - stays_dirty, Ordering::AcqRel);
        self.dirty_less.notify_waiters();
        sent
    }

    /// A frame is applied on all members: it is kept until a flush has covered it.
    fn note_applied(&self, data: &mut Data, frame: Frame, boots: Vec<(ChunkserverId, BootId)>) {
        let range = frame.range();
        let unsynced = data.unsynced.entry(frame.index()).or_default();
        let before = unsynced.data.bytes();
        if frame.sync {
            // Older bytes of the range must not be sent again over these.
            unsynced.data.remove(range);
        } else {
            unsynced.data.insert(frame.offset, frame.data);
            unsynced.boots.extend(boots);
        }
        let after = unsynced.data.bytes();
        self.unsynced_bytes.fetch_add(after, Ordering::AcqRel);
        self.unsynced_bytes.fetch_sub(before, Ordering::AcqRel);
    }

    /// Writes a frame to all in-sync members, over as many chains as it takes.
    async fn write_frame(
        &self,
        file: &File,
        frame: &Frame,
    ) -> Result<Vec<(ChunkserverId, BootId)>, FsError> {
        let deadline = self.deadline();
        let index = frame.index();
        self.need_chunks(file, &[index]).await?;
        let offset = u32::try_from(frame.offset % CHUNK_SIZE).unwrap_or(u32::MAX);
        let mut write = Write {
            offset,
            checksums: piece_checksums(offset, &frame.data),
            inode: file.ino.0,
            may_create: true,
            sync: frame.sync,
            session: self.session_for(file.ino).id(),
            ..Write::default()
        };
        let mut links = Vec::new();
        loop {
            let (chunk, lease, floor) = {
                let mut data = file.data.lock();
                let Lease::Exclusive(lease) = data.lease else {
                    return Err(FsError::of_status(Status::STALE_LEASE, "the lease is lost"));
                };
                data.sent = true;
                let chunk = *data.refs.get(&index).ok_or(Errno::EIO)?;
                write.chain_number = data.chains.get(&index).copied().unwrap_or(1);
                (
                    chunk,
                    lease,
                    data.floors.get(&chunk.group).copied().unwrap_or_default(),
                )
            };
            let group = GroupId(chunk.group);
            let map = self.map_with(group, Epoch(floor), deadline).await?;
            let epoch = map.epoch(group).ok_or(Errno::EIO)?;
            let chain = avoiding(self.servers.chain(&map, group), &links);
            let outcome = match chain.split_first() {
                None => Err(Trouble::Wait),
                Some((head, rest)) => {
                    write.target = Some(Target {
                        chunk: chunk.chunk,
                        group: group.0,
                        epoch: epoch.0,
                        lease: lease.0,
                        ..Target::default()
                    });
                    write.rest = hops(rest);
                    self.send_to(head, &write, &frame.data, &map).await
                }
            };
            match outcome {
                Ok(applied) => {
                    raise_floor(file, &chunk, epoch);
                    let acks = applied.acks.into_iter();
                    return Ok(acks
                        .map(|a| (ChunkserverId(a.server), BootId(a.boot_id)))
                        .collect());
                }
                Err(trouble) => {
                    self.overcome(trouble, &chunk, epoch, &mut links, deadline)
                        .await?;
                    let mut data = file.data.lock();
                    *data.chains.entry(index).or_insert(1) += 1;
                }
            }
        }
    }

    async fn send_to(
        &self,
        head: &Candidate,
        write: &Write,
        payload: &Bytes,
        map: &hither_clustermap::ClusterView,
    ) -> Result<Applied, Trouble> {
        let _in_flight = self.servers.begin(head.id);
        let sent = self
            .servers
            .pool
            .call(
                &head.address,
                Kind::CHUNK_WRITE,
                write,
                std::slice::from_ref(payload),
                FRAME_TIMEOUT,
            )
            .await;
        match sent {
            Ok(reply) => {
                if let Some(server) = map.server(head.id) {
                    let locality = locality_of(&self.config, server);
                    self.counters
                        .write(locality, head.id.0, payload.len() as u64);
                }
                reply
                    .decode::<Applied>()
                    .map_err(|e| Trouble::Final(e.into()))
            }
            Err(error) => Err(Trouble::of(head, error)),
        }
    }

    /// Does what can be done about a chain that failed; an error is final.
    pub(crate) async fn overcome(
        &self,
        trouble: Trouble,
        chunk: &ChunkRef,
        epoch: Epoch,
        links: &mut Vec<(ChunkserverId, ChunkserverId)>,
        deadline: Instant,
    ) -> Result<(), FsError> {
        if Instant::now() >= deadline {
            return Err(crate::session::timed_out("the chunk's servers"));
        }
        let version = self.link.map().version();
        match trouble {
            Trouble::Final(error) => return Err(error),
            Trouble::Broken { from, to, address } => {
                if from.0 == 0 {
                    self.servers.suspect(to, &address);
                    self.servers.pool.drop_connection(&address);
                }
                links.push((from, to));
                let report = ReportUnreachable {
                    from: from.0,
                    to: to.0,
                    group: chunk.group,
                    epoch: epoch.0,
                    links: links
                        .iter()
                        .map(|(from, to)| BrokenLink {
                            from: from.0,
                            to: to.0,
                        })
                        .collect(),
                };
                // Whether the manager heard of it or not, the next order is tried.
                let _ = self
                    .link
                    .call(Kind::REPORT_UNREACHABLE, &report, REPORT_TIMEOUT)
                    .await;
                self.wait_for_map(version, BROKEN_PAUSE).await;
            }
            Trouble::Stale => {
                // A newer map is on its way, or can be fetched.
                if self.link.refresh(REPORT_TIMEOUT).await.is_err() {
                    self.wait_for_map(version, BROKEN_PAUSE).await;
                }
                links.clear();
                tokio::time::sleep(STALE_PAUSE).await;
            }
            Trouble::Wait => self.wait_for_map(version, BROKEN_PAUSE).await,
        }
        Ok(())
    }

    pub(crate) async fn wait_for_map(
        &self,
        newer_than: hither_proto::ids::MapVersion,
        at_most: Duration,
    ) {
        let mut map = self.link.watch();
        let newer = map.wait_for(|map| map.version() > newer_than);
        // Out of time is as good: the caller looks again.
        let _ = tokio::time::timeout(at_most, newer).await;
    }
}

/// Why a chain did not take a frame.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// `from` (0: this client) does not reach `to`.
    Broken {
        from: ChunkserverId,
        to: ChunkserverId,
        address: String,
    },
    /// The map at hand is too old, or the members' is.
    Stale,
    /// Nothing to be done but wait.
    Wait,
    /// No chain will take it.
    Final(FsError),
}

impl Trouble {
    pub(crate) fn of(head: &Candidate, error: NetError) -> Self {
        let NetError::Refused { status, failure } = error else {
            return Self::Broken {
                from: ChunkserverId(0),
                to: head.id,
                address: head.address.clone(),
            };
        };
        match status {
            Status::BROKEN_LINK => {
                let Failure {
                    link_from, link_to, ..
                } = *failure;
                Self::Broken {
                    from: ChunkserverId(link_from),
                    to: ChunkserverId(link_to),
                    address: String::new(),
                }
            }
            Status::STALE_EPOCH | Status::NOT_MINE | Status::RETRY => Self::Stale,
            Status::BUSY | Status::TOO_FEW_COPIES => Self::Wait,
            Status::DISK_FAILED | Status::BAD_CHECKSUM => Self::Wait,
            status => Self::Final(FsError::of_status(status, failure.text)),
        }
    }
}

/// The chain in an order that uses no link known to be broken, if there is one; the wanted order
/// changes as little as possible.
fn avoiding(chain: Vec<Candidate>, broken: &[(ChunkserverId, ChunkserverId)]) -> Vec<Candidate> {
    fn extend(
        at: ChunkserverId,
        left: &mut Vec<Candidate>,
        done: &mut Vec<Candidate>,
        broken: &[(ChunkserverId, ChunkserverId)],
    ) -> bool {
        if left.is_empty() {
            return true;
        }
        for n in 0..left.len() {
            let next = left.remove(n);
            if !broken.contains(&(at, next.id)) {
                let id = next.id;
                done.push(next.clone());
                if extend(id, left, done, broken) {
                    return true;
                }
                done.pop();
            }
            left.insert(n, next);
        }
        false
    }
    let mut done = Vec::with_capacity(chain.len());
    let mut left = chain.clone();
    if extend(ChunkserverId(0), &mut left, &mut done, broken) {
        done
    } else {
        chain
    }
}

pub(crate) fn hops(rest: &[Candidate]) -> Vec<Hop> {
    rest.iter()
        .map(|c| Hop {
            server: c.id.0,
            address: c.address.clone(),
        })
        .collect()
}

fn raise_floor(file: &File, chunk: &ChunkRef, epoch: Epoch) {
    let mut data = file.data.lock();
    let floor = data.floors.entry(chunk.group).or_default();
    *floor = (*floor).max(epoch.0);
}

/// Largest file: 2^32 chunks.
const FILE_BYTES_MAX: u64 = CHUNK_SIZE << 32;
/// Bytes in one frame at most.
const FRAME_BYTES: usize = 1 << 20;
/// Frames below this size may go through the servers' logs and be stable at once.
const SYNC_BYTES: usize = 64 << 10;
/// Frames of one file on their way at the same time.
const WINDOW: usize = 8;
/// Time one frame has for its whole chain.
const FRAME_TIMEOUT: Duration = Duration::from_secs(3);
/// Time for a report to the manager.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait for the map that a report brings about.
const BROKEN_PAUSE: Duration = Duration::from_millis(700);
/// Pause before a chain is tried again whose members knew another epoch.
const STALE_PAUSE: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(ids: &[u64]) -> Vec<Candidate> {
        ids.iter()
            .map(|id| Candidate {
                id: ChunkserverId(*id),
                address: id.to_string(),
                farness: (0, 0),
            })
            .collect()
    }

    fn ids(chain: &[Candidate]) -> Vec<u64> {
        chain.iter().map(|c| c.id.0).collect()
    }

    #[test]
    fn broken_links_are_avoided_and_the_order_kept_otherwise() {
        let link = |from, to| (ChunkserverId(from), ChunkserverId(to));
        assert_eq!(ids(&avoiding(chain(&[1, 2, 3]), &[])), vec![1, 2, 3]);
        assert_eq!(
            ids(&avoiding(chain(&[1, 2, 3]), &[link(1, 2)])),
            vec![1, 3, 2]
        );
        assert_eq!(ids(&avoiding(chain(&[1, 2]), &[link(0, 1)])), vec![2, 1]);
        let none = [link(0, 1), link(2, 1)];
        assert_eq!(
            ids(&avoiding(chain(&[1, 2]), &none)),
            vec![1, 2],
            "no way: as wanted"
        );
    }
}
