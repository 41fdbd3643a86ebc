//! fsync and release: data stable on all in-sync members, then size and times at the metadata
//! server, then those safe: in that order.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hither_proto::chunk::{Applied, Close, Flush};
use hither_proto::ids::{BootId, ChunkserverId, Epoch, GroupId};
use hither_proto::kind::Kind;
use hither_proto::meta::{WriteReport, request::Op};
use hither_proto::status::{Errno, Status};
use hither_proto::stored::ChunkRef;
use tokio::time::Instant;

use crate::client::Inner;
use crate::error::FsError;
use crate::file::{File, Lease};
use crate::session::How;
use crate::write::{Trouble, hops};

impl Inner {
    /// Everything written so far is on stable storage when this returns.
    pub(crate) async fn fsync(&self, file: &File) -> Result<(), FsError> {
        self.flush_stable(file).await?;
        if let Some(report) = file.report(self.cache.hint(file.ino)) {
            self.send_report(file, report, true).await?;
        } else {
            self.session_for(file.ino).barrier().await?;
        }
        file.take_error()
    }

    /// Sends what is dirty and makes what is applied stable.
    pub(crate) async fn flush_stable(&self, file: &File) -> Result<(), FsError> {
        self.flush_dirty(file, true).await;
        let deadline = self.deadline();
        while let Some(chunk) = self.next_unsynced(file) {
            self.flush_chunk(file, &chunk, deadline).await?;
        }
        file.take_error()
    }

    /// A chunk with applied data that no flush has covered.
    fn next_unsynced(&self, file: &File) -> Option<ChunkRef> {
        let mut data = file.data.lock();
        data.unsynced
            .retain(|_, unsynced| !unsynced.data.is_empty());
        loop {
            let index = data.unsynced.keys().next().copied()?;
            if let Some(chunk) = data.refs.get(&index) {
                return Some(*chunk);
            }
            // Cut off meanwhile: nothing of it counts.
            let gone = data.unsynced.remove(&index);
            let bytes = gone.map_or(0, |gone| gone.data.bytes());
            self.unsynced_bytes.fetch_sub(bytes, Ordering::AcqRel);
        }
    }

    /// Makes one chunk's applied data stable; a server that restarted meanwhile gets it again.
    async fn flush_chunk(
        &self,
        file: &File,
        chunk: &ChunkRef,
        deadline: Instant,
    ) -> Result<(), FsError> {
        // What is applied after this point is for the next flush.
        let taken = file.data.lock().unsynced.remove(&chunk.index);
        let Some(taken) = taken else { return Ok(()) };
        let bytes = taken.data.bytes();
        let flushed = self.flush_chain(file, chunk, deadline).await;
        self.unsynced_bytes.fetch_sub(bytes, Ordering::AcqRel);
        let restarted = match flushed {
            Ok(Some(acks)) => acks
                .iter()
                .any(|(server, boot)| taken.boots.get(server).is_some_and(|known| known != boot)),
            // A member lost the chunk altogether: it died before anything of it was stable.
            Ok(None) => true,
            Err(error) => {
                self.keep_unsynced(file, chunk.index, taken);
                return Err(error);
            }
        };
        if restarted {
            tracing::info!(ino = %file.ino, "a chunkserver restarted: sending unsynced data again");
            self.send_again(file, chunk.index, taken.data);
            self.flush_dirty(file, true).await;
        }
        Ok(())
    }

    /// A flush failed: what it was to cover is kept for the next one.
    fn keep_unsynced(&self, file: &File, index: u32, mut taken: crate::file::Unsynced) {
        let mut data = file.data.lock();
        let newer = data.unsynced.entry(index).or_default();
        taken.data.subtract(&newer.data);
        self.unsynced_bytes
            .fetch_add(taken.data.bytes(), Ordering::AcqRel);
        for (offset, bytes) in taken.data.into_parts() {
            newer.data.insert(offset, bytes);
        }
        for (server, boot) in taken.boots {
            // A boot id that differs from the newer one shows at the next flush.
            newer.boots.entry(server).or_insert(boot);
        }
    }

    /// Puts data that a restarted server may have lost back among what is dirty; what was written
    /// since is newer.
    fn send_again(&self, file: &File, index: u32, mut lost: crate::extents::Extents) {
        let mut data = file.data.lock();
        lost.subtract(&data.dirty);
        lost.subtract(&data.in_flight);
        if let Some(newer) = data.unsynced.get(&index) {
            lost.subtract(&newer.data);
        }
        self.dirty_bytes.fetch_add(lost.bytes(), Ordering::AcqRel);
        for (offset, bytes) in lost.into_parts() {
            data.dirty.insert(offset, bytes);
        }
        *data.chains.entry(index).or_insert(1) += 1;
    }

    async fn flush_chain(
        &self,
        file: &File,
        chunk: &ChunkRef,
        deadline: Instant,
    ) -> Result<Option<Vec<(ChunkserverId, BootId)>>, FsError> {
        let group = GroupId(chunk.group);
        let mut links = Vec::new();
        loop {
            let floor = file
                .data
                .lock()
                .floors
                .get(&chunk.group)
                .copied()
                .unwrap_or_default();
            let map = self.map_with(group, Epoch(floor), deadline).await?;
            let epoch = map.epoch(group).ok_or(Errno::EIO)?;
            let chain = self.servers.chain(&map, group);
            let Some((head, rest)) = chain.split_first() else {
                self.overcome(Trouble::Wait, chunk, epoch, &mut links, deadline)
                    .await?;
                continue;
            };
            let flush = Flush {
                group: group.0,
                epoch: epoch.0,
                chunks: vec![chunk.chunk],
                rest: hops(rest),
            };
            let sent = self
                .servers
                .pool
                .call(&head.address, Kind::CHUNK_FLUSH, &flush, &[], FLUSH_TIMEOUT)
                .await;
            match sent {
                Ok(reply) => {
                    let applied: Applied = reply.decode()?;
                    let acks = applied.acks.into_iter();
                    return Ok(Some(
                        acks.map(|a| (ChunkserverId(a.server), BootId(a.boot_id)))
                            .collect(),
                    ));
                }
                Err(error) if error.status() == Some(Status::NO_SUCH_CHUNK) => return Ok(None),
                Err(error) => {
                    let trouble = Trouble::of(head, error);
                    self.overcome(trouble, chunk, epoch, &mut links, deadline)
                        .await?;
                }
            }
        }
    }

    pub(crate) async fn send_report(
        &self,
        file: &File,
        report: WriteReport,
        safe: bool,
    ) -> Result<(), FsError> {
        let sent = self.cache.sent_at();
        let how = How {
            changes: true,
            safe,
            ..How::default()
        };
        match self
            .ask(file.ino, Op::WriteReport(report.clone()), how)
            .await
        {
            Ok(reply) => {
                file.reported(&report);
                if let Some(inode) = &reply.inode {
                    self.cache
                        .put_changed(sent, inode, reply.attributes_leased, None);
                }
                Ok(())
            }
            Err(error) => {
                if error.errno == Errno::ESTALE {
                    // What was written under the lost lease was sealed without us.
                    self.lose_file(file, &error);
                }
                Err(error)
            }
        }
    }

    /// The last descriptor is closed: what is dirty goes out in the background, and the lease is
    /// given back if the file was written.
    pub(crate) fn close_soon(self: &Arc<Self>, file: &Arc<File>) {
        let pending = {
            let data = file.data.lock();
            !data.dirty.is_empty() || !data.unreported.is_empty() || data.unreported_size
        };
        if !pending {
            return;
        }
        let (inner, file) = (Arc::clone(self), Arc::clone(file));
        tokio::spawn(async move {
            inner.flush_dirty(&file, false).await;
            if let Some(report) = file.report(inner.cache.hint(file.ino))
                && let Err(error) = inner.send_report(&file, report, false).await
            {
                tracing::error!(ino = %file.ino, %error, "size and times could not be reported");
            }
        });
    }

    /// Everything of the file is stable and reported; the lease becomes `to`. For recalls and the
    /// end of the mount. The gate is held by the caller. The report to be given, if any.
    pub(crate) async fn give_back(&self, file: &File, to: Lease) -> Option<WriteReport> {
        if let Err(error) = self.flush_stable(file).await {
            file.data.lock().error = Some(error);
        }
        let hint = self.cache.hint(file.ino);
        let (report, chunks) = {
            let mut data = file.data.lock();
            let Lease::Exclusive(lease) = data.lease else {
                data.drop_lease(to);
                return None;
            };
            let report = WriteReport {
                release: true,
                downgrade: to == Lease::Shared,
                ..data.report(file.ino, hint, lease)
            };
            let chunks: Vec<(ChunkRef, u64)> = data
                .refs
                .values()
                .filter(|chunk| {
                    data.chains.contains_key(&chunk.index) || data.unreported.contains(&chunk.index)
                })
                .map(|chunk| (*chunk, lease.0))
                .collect();
            for index in std::mem::take(&mut data.unreported) {
                if let Some(chunk) = data.refs.get_mut(&index) {
                    chunk.written = true;
                }
            }
            data.unreported_size = false;
            data.drop_lease(to);
            (report, chunks)
        };
        self.close_marks_soon(chunks);
        // What was cached under the attributes' lease is from before this mount wrote.
        self.cache.outdate(file.ino);
        Some(report)
    }

    /// Tells the members that a lease is over and everything flushed: open marks may go. If it is
    /// lost, a restart merely compares more.
    fn close_marks_soon(&self, chunks: Vec<(ChunkRef, u64)>) {
        if chunks.is_empty() {
            return;
        }
        let (servers, map) = (Arc::clone(&self.servers), self.link.map());
        tokio::spawn(async move {
            for (chunk, lease) in chunks {
                let group = GroupId(chunk.group);
                let Some(epoch) = map.epoch(group) else {
                    continue;
                };
                let close = Close {
                    group: group.0,
                    epoch: epoch.0,
                    chunks: vec![chunk.chunk],
                    lease,
                };
                for member in servers.chain(&map, group) {
                    let closed = servers
                        .pool
                        .call(
                            &member.address,
                            Kind::CHUNK_CLOSE,
                            &close,
                            &[],
                            FLUSH_TIMEOUT,
                        )
                        .await;
                    if let Err(error) = closed {
                        tracing::debug!(id = %member.id, %error, "an open mark stays");
                    }
                }
            }
        });
    }

    /// The lease was lost without us: what was not reported is gone, and the next fsync says so.
    pub(crate) fn lose_file(&self, file: &File, why: &FsError) {
        let mut data = file.data.lock();
        let pending = !data.dirty.is_empty()
            || !data.in_flight.is_empty()
            || !data.unsynced.is_empty()
            || !data.unreported.is_empty();
        self.dirty_bytes
            .fetch_sub(data.dirty.bytes(), Ordering::AcqRel);
        let unsynced: usize = data.unsynced.values().map(|u| u.data.bytes()).sum();
        self.unsynced_bytes.fetch_sub(unsynced, Ordering::AcqRel);
        data.dirty = crate::extents::Extents::default();
        data.unsynced.clear();
        data.unreported.clear();
        data.unreported_size = false;
        if pending {
            data.error = Some(FsError::of_status(Status::NO_SESSION, why.reason.clone()));
        }
        data.drop_lease(Lease::None);
        self.dirty_less.notify_waiters();
    }
}

/// Time a flush has for its whole chain.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);
