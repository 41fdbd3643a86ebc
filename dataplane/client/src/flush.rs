//! Sending what is dirty along the chains, in large frames, over as many chains as it takes.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use hither_net::NetError;
use hither_proto::checksum::piece_checksums;
use hither_proto::chunk::{Applied, Hop, Target, Write};
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
use crate::file::{Data, File, Lease};
use crate::lease::lease_gone;
use crate::servers::Candidate;
use crate::write::FRAME_BYTES;

/// A run of bytes on its way to one chunk.
#[derive(Debug, Clone)]
struct Frame {
    /// Offset in the file.
    offset: u64,
    data: Bytes,
    /// Under which lease it was written.
    tenure: u64,
    /// Durable on all members before it is acknowledged.
    sync: bool,
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
    /// Sends everything that is dirty, several frames at a time.
    ///
    /// # Errors
    /// The first failure; it is kept for the file's descriptors as well.
    pub(crate) async fn flush_dirty(&self, file: &File, sync_small: bool) -> Result<(), FsError> {
        let _one = file.flushing.lock().await;
        let mut window = FuturesUnordered::new();
        let mut first = Ok(());
        // When nobody answers, what is on its way is waited for, and the rest stays dirty.
        let mut answered = true;
        loop {
            while answered && window.len() < WINDOW {
                let Some(frame) = self.next_frame(file, sync_small) else {
                    break;
                };
                window.push(self.send_frame(file, frame));
            }
            match window.next().await {
                Some(Ok(())) => {}
                Some(Err(error)) => {
                    answered &= error.errno != Errno::ETIMEDOUT;
                    first = first.and(Err(error));
                }
                None => return first,
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
            tenure: data.tenure,
            sync,
        })
    }

    /// Sends a frame. What nobody took in time is dirty again.
    async fn send_frame(&self, file: &File, frame: Frame) -> Result<(), FsError> {
        let result = self.write_frame(file, &frame).await;
        let bytes = frame.data.len();
        let sent = {
            let mut data = file.data.lock();
            self.dirty_bytes.sub(bytes);
            if data.tenure == frame.tenure {
                data.in_flight.remove(frame.range());
                self.settle_frame(&mut data, frame, result)
            } else {
                // Whoever ended the lease has taken care of what was written under it.
                result.map(|_| ())
            }
        };
        if let Err(error) = &sent {
            tracing::warn!(ino = %file.ino, %error, "written data could not be stored");
        }
        self.dirty_less.notify_waiters();
        sent
    }

    fn settle_frame(
        &self,
        data: &mut Data,
        frame: Frame,
        result: Result<Vec<(ChunkserverId, BootId)>, FsError>,
    ) -> Result<(), FsError> {
        let index = frame.index();
        let error = match result {
            Ok(boots) => {
                data.unreported.insert(index);
                data.marked.insert(index);
                self.note_applied(data, frame, &boots);
                return Ok(());
            }
            Err(error) => error,
        };
        if error.errno == Errno::ETIMEDOUT {
            let mut again = Extents::default();
            again.insert(frame.offset, frame.data);
            self.dirty_again(data, again);
        } else {
            // Some members may have it: they agree again when the lease ends.
            data.torn.insert(index);
        }
        data.errors.record(error.clone());
        Err(error)
    }

    /// Puts data back among what is dirty; what was written since is newer.
    pub(crate) fn dirty_again(&self, data: &mut Data, mut again: Extents) {
        again.subtract(&data.dirty);
        again.subtract(&data.in_flight);
        self.dirty_bytes.add(again.bytes());
        for (offset, bytes) in again.into_parts() {
            data.dirty.insert(offset, bytes);
        }
    }

    /// A frame is applied on all members: it is kept until a flush has covered it. A member that
    /// has restarted since it acknowledged earlier data may have lost that.
    fn note_applied(&self, data: &mut Data, frame: Frame, boots: &[(ChunkserverId, BootId)]) {
        let (index, range) = (frame.index(), frame.range());
        if frame.sync {
            data.young.remove(&index);
        }
        let unsynced = data.unsynced.entry(index).or_default();
        let before = unsynced.data.bytes();
        let restarted = unsynced.restarted(boots);
        let mut lost = Extents::default();
        if restarted {
            unsynced.boots.clear();
            std::mem::swap(&mut lost, &mut unsynced.data);
            lost.remove(range.clone());
        }
        if frame.sync {
            // Older bytes of the range must not be sent again over these.
            unsynced.data.remove(range);
        } else {
            unsynced.data.insert(frame.offset, frame.data);
            unsynced.boots.extend(boots.iter().copied());
        }
        let after = unsynced.data.bytes();
        self.unsynced_bytes.add(after);
        self.unsynced_bytes.sub(before);
        if restarted {
            tracing::info!(
                index,
                "a chunkserver restarted: unsynced data is sent again"
            );
            self.dirty_again(data, lost);
        }
    }

    /// Writes a frame to all in-sync members, over as many chains as it takes.
    async fn write_frame(
        &self,
        file: &File,
        frame: &Frame,
    ) -> Result<Vec<(ChunkserverId, BootId)>, FsError> {
        let deadline = self.deadline();
        let index = frame.index();
        self.need_chunks(file, frame.tenure, &[index]).await?;
        let offset = u32::try_from(frame.offset % CHUNK_SIZE).unwrap_or(u32::MAX);
        let mut write = Write {
            offset,
            checksums: piece_checksums(offset, &frame.data),
            inode: file.ino.0,
            sync: frame.sync,
            session: self.session_for(file.ino).id(),
            ..Write::default()
        };
        loop {
            let (chunk, lease, floor) = {
                let mut data = file.data.lock();
                let (Lease::Exclusive(lease), true) = (data.lease, data.tenure == frame.tenure)
                else {
                    return Err(lease_gone());
                };
                data.sent = true;
                let chunk = *data.refs.get(&index).ok_or(Errno::EIO)?;
                write.chain_number = data.chains.get(&index).copied().unwrap_or(1);
                write.may_create = data.young.contains(&index);
                (
                    chunk,
                    lease,
                    data.floors.get(&chunk.group).copied().unwrap_or_default(),
                )
            };
            let group = GroupId(chunk.group);
            let map = self.map_with(group, Epoch(floor), deadline).await?;
            let epoch = map.epoch(group).ok_or(Errno::EIO)?;
            let chain = self.servers.chain(&map, group);
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
                Err(Trouble::Overtaken { lease: known }) => {
                    overtaken(file, frame, known, deadline)?;
                    next_chain(file, index, write.chain_number);
                }
                Err(trouble) => {
                    self.overcome(trouble, &chunk, epoch, deadline).await?;
                    next_chain(file, index, write.chain_number);
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
        let call = self.servers.pool.call(
            &head.address,
            Kind::CHUNK_WRITE,
            write,
            std::slice::from_ref(payload),
            frame_timeout(write),
        );
        let target = write.target.clone().unwrap_or_default();
        let sent = tokio::select! {
            sent = call => sent,
            // A member was taken out of the group: nobody answers for it any more.
            () = self.group_moved(GroupId(target.group), Epoch(target.epoch)) => {
                return Err(Trouble::Stale);
            }
        };
        match sent {
            Ok(reply) => {
                if let Some(server) = map.server(head.id) {
                    let locality = locality_of(&self.servers.standpoint(), server);
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

    /// Waits until the map shows a newer epoch of the group.
    pub(crate) async fn group_moved(&self, group: GroupId, epoch: Epoch) {
        let mut map = self.link.watch();
        let newer = map.wait_for(|map| map.epoch(group).is_some_and(|now| now > epoch));
        if newer.await.is_err() {
            // The link has ended: there will be no newer one.
            std::future::pending::<()>().await;
        }
    }

    /// Does what can be done about a chain that failed; an error is final.
    pub(crate) async fn overcome(
        &self,
        trouble: Trouble,
        chunk: &ChunkRef,
        epoch: Epoch,
        deadline: Instant,
    ) -> Result<(), FsError> {
        if Instant::now() >= deadline {
            return Err(crate::session::timed_out("the chunk's servers"));
        }
        let version = self.link.map().version();
        match trouble {
            Trouble::Final(error) => return Err(error),
            Trouble::Overtaken { .. } => return Err(lease_gone()),
            Trouble::Broken { from, to, address } => {
                if from.0 == 0 {
                    self.servers.suspect(to, &address);
                    self.servers.pool.drop_connection(&address);
                }
                self.servers.link_broken((from, to));
                // With what other chunks have shown: the manager is to see all at once.
                let links = self.servers.broken_links();
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
                    ..ReportUnreachable::default()
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
    /// A member has seen a later lease, or a later chain under the same.
    Overtaken {
        /// Id of the lease it has seen.
        lease: u64,
    },
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
            Status::STALE_LEASE => Self::Overtaken {
                lease: failure.lease,
            },
            Status::BUSY | Status::TOO_FEW_COPIES => Self::Wait,
            Status::DISK_FAILED | Status::BAD_CHECKSUM => Self::Wait,
            status => Self::Final(FsError::of_status(status, failure.text)),
        }
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

/// A member has seen a later lease than the frame came with. A cut of this very file gives its
/// holder a new id, so it may be this mount's own.
fn overtaken(file: &File, frame: &Frame, known: u64, deadline: Instant) -> Result<(), FsError> {
    let data = file.data.lock();
    match data.lease {
        Lease::Exclusive(own) if data.tenure == frame.tenure && own.0 >= known => {
            if Instant::now() >= deadline {
                return Err(crate::session::timed_out("the chunk's servers"));
            }
            Ok(())
        }
        _ => Err(lease_gone()),
    }
}

/// Raises the chain number of a chunk above the one that did not get through.
fn next_chain(file: &File, index: u32, failed: u32) {
    let mut data = file.data.lock();
    let number = data.chains.entry(index).or_insert(1);
    *number = (*number).max(failed + 1);
}

/// Longer than the head of the chain waits for those behind it: it names the broken link.
fn frame_timeout(write: &Write) -> Duration {
    let members = u32::try_from(write.rest.len()).unwrap_or(0) + 1;
    let link = if write.sync {
        LINK_TIMEOUT * 2
    } else {
        LINK_TIMEOUT
    };
    link * members + LINK_TIMEOUT
}

fn raise_floor(file: &File, chunk: &ChunkRef, epoch: Epoch) {
    let mut data = file.data.lock();
    let floor = data.floors.entry(chunk.group).or_default();
    *floor = (*floor).max(epoch.0);
}

/// Frames below this size may go through the servers' logs and be stable at once.
const SYNC_BYTES: usize = 64 << 10;
/// Frames of one file on their way at the same time.
const WINDOW: usize = 8;
/// Time a chunkserver gives the next member of a chain, by default.
const LINK_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for a report to the manager.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait for the map that a report brings about.
const BROKEN_PAUSE: Duration = Duration::from_millis(700);
/// Pause before a chain is tried again whose members knew another epoch.
const STALE_PAUSE: Duration = Duration::from_millis(5);
