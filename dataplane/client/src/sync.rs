//! fsync and release: data stable on all in-sync members, then size and times at the metadata
//! server, then those safe: in that order.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hither_proto::chunk::{Applied, Flush};
use hither_proto::ids::{BootId, CHUNK_SIZE, ChunkserverId, Epoch, GroupId, LeaseId};
use hither_proto::kind::Kind;
use hither_proto::meta::{WriteReport, request::Op};
use hither_proto::status::{Errno, Status};
use hither_proto::stored::ChunkRef;
use tokio::time::Instant;

use crate::client::Inner;
use crate::error::FsError;
use crate::extents::Extents;
use crate::file::{Data, File, Lease, OpenFile};
use crate::flush::{Trouble, hops};
use crate::session::How;

impl Inner {
    /// Everything written so far is on stable storage when this returns. Tells the descriptor of
    /// errors since it last asked.
    pub(crate) async fn fsync(&self, open: &OpenFile) -> Result<(), FsError> {
        let safe = self.make_safe(&open.file).await;
        let told = open.told();
        safe.and(told)
    }

    /// Data stable, then size and times reported, then those in the store.
    pub(crate) async fn make_safe(&self, file: &File) -> Result<(), FsError> {
        self.settle_mapped(file).await?;
        self.flush_stable(file).await?;
        if self.report(file, true).await? {
            return Ok(());
        }
        self.session_for(file.ino).barrier().await
    }

    /// Tells the metadata server what it has not heard of; false: nothing.
    pub(crate) async fn report(&self, file: &File, safe: bool) -> Result<bool, FsError> {
        let _one = file.reporting.lock().await;
        match file.report(self.cache.hint(file.ino)) {
            Some(report) => self.send_report(file, report, safe).await.map(|()| true),
            None => Ok(false),
        }
    }

    /// Sends what is dirty and makes what is applied stable.
    pub(crate) async fn flush_stable(&self, file: &File) -> Result<(), FsError> {
        // Whoever finds nothing left to do must not overtake those who are at it.
        let _one = file.syncing.lock().await;
        let deadline = self.deadline();
        let mut sent = self.flush_dirty(file, true).await;
        // What is applied after this point is for the next flush.
        let mut todo: BTreeSet<u32> = {
            let mut data = file.data.lock();
            data.unsynced
                .retain(|_, unsynced| !unsynced.data.is_empty());
            data.unsynced.keys().copied().collect()
        };
        while let Some(index) = todo.pop_first() {
            if self.flush_chunk(file, index, deadline).await? {
                sent = sent.and(self.flush_dirty(file, true).await);
                todo.insert(index);
            }
            if !todo.is_empty() && Instant::now() >= deadline {
                return Err(crate::session::timed_out("the chunk's servers"));
            }
        }
        sent
    }

    /// Makes one chunk's applied data stable; true: a server has restarted meanwhile, and what it
    /// may have lost is dirty again.
    async fn flush_chunk(
        &self,
        file: &File,
        index: u32,
        deadline: Instant,
    ) -> Result<bool, FsError> {
        let (taken, chunk) = {
            let mut data = file.data.lock();
            let Some(taken) = data.unsynced.remove(&index) else {
                return Ok(false);
            };
            (taken, data.refs.get(&index).copied())
        };
        let bytes = taken.data.bytes();
        let Some(chunk) = chunk else {
            // Cut off meanwhile: nothing of it counts.
            self.unsynced_bytes.sub(bytes);
            return Ok(false);
        };
        let flushed = self.flush_chain(file, &chunk, deadline).await;
        self.unsynced_bytes.sub(bytes);
        let restarted = match flushed {
            Ok(Some(acks)) => taken.restarted(&acks),
            // A member lost the chunk altogether: it died before anything of it was stable.
            Ok(None) => true,
            Err(error) => {
                self.keep_unsynced(file, index, taken);
                return Err(error);
            }
        };
        if restarted {
            tracing::info!(ino = %file.ino, "a chunkserver restarted: sending unsynced data again");
            self.send_again(file, index, taken.data);
        } else {
            file.data.lock().young.remove(&index);
        }
        Ok(restarted)
    }

    /// A flush failed: what it was to cover is kept for the next one.
    fn keep_unsynced(&self, file: &File, index: u32, mut taken: crate::file::Unsynced) {
        let mut data = file.data.lock();
        let newer = data.unsynced.entry(index).or_default();
        taken.data.subtract(&newer.data);
        self.unsynced_bytes.add(taken.data.bytes());
        for (offset, bytes) in taken.data.into_parts() {
            newer.data.insert(offset, bytes);
        }
        // The older ids count: a server that has restarted since shows at the next flush.
        newer.boots.extend(taken.boots);
    }

    /// Puts data that a restarted server may have lost back among what is dirty; what was written
    /// since is newer.
    fn send_again(&self, file: &File, index: u32, mut lost: Extents) {
        let mut data = file.data.lock();
        if let Some(newer) = data.unsynced.get(&index) {
            lost.subtract(&newer.data);
        }
        self.dirty_again(&mut data, lost);
        *data.chains.entry(index).or_insert(1) += 1;
    }

    async fn flush_chain(
        &self,
        file: &File,
        chunk: &ChunkRef,
        deadline: Instant,
    ) -> Result<Option<Vec<(ChunkserverId, BootId)>>, FsError> {
        let group = GroupId(chunk.group);
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
                self.overcome(Trouble::Wait, chunk, epoch, deadline).await?;
                continue;
            };
            let flush = Flush {
                group: group.0,
                epoch: epoch.0,
                chunks: vec![chunk.chunk],
                rest: hops(rest),
            };
            let pool = &self.servers.pool;
            let call = pool.call(&head.address, Kind::CHUNK_FLUSH, &flush, &[], FLUSH_TIMEOUT);
            let sent = tokio::select! {
                sent = call => sent,
                // A member was taken out of the group: nobody answers for it any more.
                () = self.group_moved(group, epoch) => {
                    self.overcome(Trouble::Stale, chunk, epoch, deadline).await?;
                    continue;
                }
            };
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
                    self.overcome(trouble, chunk, epoch, deadline).await?;
                }
            }
        }
    }

    async fn send_report(
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
                    self.forget_pages_soon(file.ino);
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
            if let Err(error) = inner.flush_dirty(&file, false).await {
                tracing::debug!(ino = %file.ino, %error, "kept for the next fsync");
            }
            if let Err(error) = inner.report(&file, false).await {
                tracing::warn!(ino = %file.ino, %error, "size and times are reported later");
            }
        });
    }

    /// Makes everything of the file stable, reports it, and lets the lease become `to`. The gate is
    /// held alone by the caller. What cannot be stored is given up, and the next fsync says so.
    ///
    /// # Errors
    /// The metadata server did not take the report: the lease and everything under it is kept.
    pub(crate) async fn give_back(&self, file: &File, to: Lease) -> Result<(), FsError> {
        let flushed = self.flush_stable(file).await;
        let _one = file.reporting.lock().await;
        let mut to = to;
        let report = {
            let mut data = file.data.lock();
            let Lease::Exclusive(lease) = data.lease else {
                if to == Lease::None && data.lease != to {
                    data.drop_lease(to);
                }
                return Ok(());
            };
            if let Err(error) = flushed {
                self.give_up(&mut data, &error);
            }
            let torn = data.torn.iter().filter_map(|at| data.refs.get(at));
            if !data.torn.is_empty() {
                to = Lease::None;
            }
            WriteReport {
                release: true,
                downgrade: to == Lease::Shared,
                torn: torn.copied().collect(),
                ..data.report(file.ino, self.cache.hint(file.ino), lease)
            }
        };
        let lease = report.lease;
        self.send_report(file, report, false).await?;
        let marked: Vec<ChunkRef> = {
            let mut data = file.data.lock();
            if data.lease == Lease::None {
                // Lost while it was being given back.
                return Ok(());
            }
            let clean = |index: &u32| !data.torn.contains(index);
            let chunks = data.marked.iter().copied().filter(clean);
            let marked = chunks.filter_map(|at| data.refs.get(&at).copied());
            let marked = marked.collect();
            data.drop_lease(to);
            marked
        };
        self.close_marks_soon(file.ino, marked, LeaseId(lease));
        // What was cached under the attributes' lease is from before this mount wrote.
        self.cache.outdate(file.ino);
        Ok(())
    }

    /// Data that nobody took in time is given up: its chunks are sealed, and who wrote it is told.
    fn give_up(&self, data: &mut Data, why: &FsError) {
        tracing::error!(%why, "written data is given up");
        let chunks = data.dirty.chunks(CHUNK_SIZE);
        data.torn.extend(chunks);
        let chunks: Vec<u32> = data.unsynced.keys().copied().collect();
        data.torn.extend(chunks);
        self.drop_pending(data);
        data.errors
            .record(FsError::new(Errno::EIO, why.reason.clone()));
    }

    /// Forgets what is not stable on the servers.
    fn drop_pending(&self, data: &mut Data) {
        let unsynced: usize = data.unsynced.values().map(|u| u.data.bytes()).sum();
        self.unsynced_bytes.sub(unsynced);
        self.dirty_bytes.sub(data.dirty.bytes());
        data.dirty = Extents::default();
        // Whoever sent it takes it off the count.
        data.in_flight = Extents::default();
        data.unsynced.clear();
        self.dirty_less.notify_waiters();
    }

    /// The lease was lost without us: what was not reported is gone, and the next fsync says so.
    pub(crate) fn lose_file(&self, file: &File, why: &FsError) {
        let mut data = file.data.lock();
        let pending = !data.dirty.is_empty()
            || !data.in_flight.is_empty()
            || !data.unsynced.is_empty()
            || !data.unreported.is_empty();
        self.drop_pending(&mut data);
        let pending = self.drop_mapped(&mut data) || pending;
        data.unreported.clear();
        data.unreported_size = false;
        if pending {
            let lost = FsError::of_status(Status::NO_SESSION, why.reason.clone());
            data.errors.record(lost);
        }
        if data.lease != Lease::None {
            data.drop_lease(Lease::None);
        }
    }
}

/// Time a flush has for its whole chain.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);
