//! Taking one copy over from another member.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hither_chunkstore::{BaseCopy, Error};
use hither_proto::ids::{ChunkId, ChunkserverId, Epoch, InodeId, LeaseId};
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

use super::{Fill, Trouble, is_partial, refused};
use crate::counters::add;
use crate::fetch::{Place, copy_of, fetch_checksums, fetch_range};
use crate::server::Inner;

impl Fill {
    /// Takes one copy over, from the first of the sources that has it whole.
    pub(crate) async fn take_over(
        &self,
        inner: &Arc<Inner>,
        chunk: ChunkId,
        sources: &[ChunkserverId],
    ) -> Result<(), Trouble> {
        let _one = self.alone(chunk).await;
        let mut trouble = Trouble::NoSource;
        for source in sources {
            match self.take_from_patiently(inner, chunk, *source).await {
                Ok(()) => return Ok(()),
                Err(Trouble::Cancelled) => return Err(Trouble::Cancelled),
                Err(cause) => {
                    tracing::debug!(%chunk, %source, %cause, "a copy is not taken over from there");
                    if !matches!(cause, Trouble::Partial(_)) {
                        trouble = cause;
                    }
                }
            }
        }
        Err(trouble)
    }

    /// Begins again with a copy that became shorter, a few times.
    async fn take_from_patiently(
        &self,
        inner: &Arc<Inner>,
        chunk: ChunkId,
        source: ChunkserverId,
    ) -> Result<(), Trouble> {
        for _ in 0..SHORTER_MAX {
            match self.take_from(inner, chunk, source, false).await {
                Err(Trouble::Shorter(_)) => {}
                done => return done,
            }
        }
        Err(Trouble::Shorter(chunk))
    }

    /// Waits until nobody else takes this copy over or changes it while it may be taken over.
    pub(crate) async fn alone(&self, chunk: ChunkId) -> OwnedMutexGuard<()> {
        let lock = {
            let mut chunks = self.chunks.lock();
            chunks.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(chunks.entry(chunk).or_default())
        };
        lock.lock_owned().await
    }

    /// Takes a copy over from one member, for the one that is [`Fill::alone`] with it. `afresh`:
    /// whatever is here counts for nothing.
    pub(crate) async fn take_from(
        &self,
        inner: &Arc<Inner>,
        chunk: ChunkId,
        source: ChunkserverId,
        afresh: bool,
    ) -> Result<(), Trouble> {
        self.check()?;
        if self.mends && !is_partial(inner, &self.mandate, chunk) {
            // Completed meanwhile, and perhaps changed since, here before there.
            return Ok(());
        }
        let (group, epoch) = (self.mandate.group, self.mandate.epoch);
        let place = self.place(source);
        let Some(copy) = copy_of(inner, place, chunk).await? else {
            return self.without_base(inner, chunk, afresh).await;
        };
        if copy.partial {
            return Err(Trouble::Partial(chunk));
        }
        let inode = InodeId(copy.inode);
        // Of a copy that was here before, most is usually as it was.
        let held = inner.disk(self.mandate.disk).map_err(refused)?.entry(chunk);
        let held_length = held.map_or(0, |entry| entry.length);
        let begun = inner
            .on_disk(self.mandate.disk, move |disk| {
                if afresh {
                    disk.refill_begin(chunk, group, inode, epoch)
                } else {
                    disk.fill_begin(chunk, group, inode, epoch)
                }
            })
            .await;
        match begun {
            // Freed meanwhile.
            Err(Error::Deleted(_)) => return Ok(()),
            other => other?,
        }
        let mut at = 0;
        while at < copy.length {
            self.check()?;
            let length = FETCH_BYTES.min(copy.length - at);
            let same =
                at + length <= held_length && self.is_same(inner, place, chunk, at, length).await?;
            if !same {
                self.take_range(inner, place, chunk, at, length).await?;
            }
            at += length;
        }
        let base = BaseCopy {
            lease: LeaseId(copy.lease),
            length: copy.length,
            inode,
            changed_epoch: Epoch(copy.changed_epoch),
            open: copy.open,
        };
        let ended = inner
            .on_disk(self.mandate.disk, move |disk| {
                disk.fill_end(chunk, &base, epoch)
            })
            .await;
        match ended {
            Err(Error::NoSuchChunk(_)) => Ok(()),
            other => Ok(other?),
        }
    }

    /// Whether a range is here as the other member has it, by the checksums of its blocks.
    async fn is_same(
        &self,
        inner: &Arc<Inner>,
        place: Place,
        chunk: ChunkId,
        offset: u32,
        length: u32,
    ) -> Result<bool, Trouble> {
        let sums = fetch_checksums(inner, place, chunk, offset, length).await?;
        let epoch = self.mandate.epoch;
        let same = inner
            .on_disk(self.mandate.disk, move |disk| {
                disk.has_base(chunk, offset..offset + length, &sums, epoch)
            })
            .await;
        match same {
            Err(Error::NoSuchChunk(_)) => Ok(false),
            other => Ok(other?),
        }
    }

    async fn take_range(
        &self,
        inner: &Arc<Inner>,
        place: Place,
        chunk: ChunkId,
        offset: u32,
        length: u32,
    ) -> Result<(), Trouble> {
        inner.fills.throttle.take(length).await;
        let fetched = fetch_range(inner, place, chunk, offset, length).await?;
        let bytes = fetched.bytes;
        add(&inner.counts.filled_bytes, bytes.len() as u64);
        self.bytes_done
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if bytes.len() < length as usize {
            return Err(Trouble::Shorter(chunk));
        }
        let epoch = self.mandate.epoch;
        let put = inner
            .on_disk(self.mandate.disk, move |disk| {
                disk.fill_base(chunk, offset, &bytes, epoch)
            })
            .await;
        match put {
            Err(Error::NoSuchChunk(_)) => Ok(()),
            other => Ok(other?),
        }
    }

    /// The other member has no such copy: what is here came along the chain and is all there is,
    /// or it is gone.
    async fn without_base(
        &self,
        inner: &Arc<Inner>,
        chunk: ChunkId,
        afresh: bool,
    ) -> Result<(), Trouble> {
        let disk = inner.disk(self.mandate.disk).map_err(refused)?;
        let Some(entry) = disk.entry(chunk) else {
            return Ok(());
        };
        let epoch = self.mandate.epoch;
        if afresh || entry.changed_epoch < epoch {
            inner
                .on_disk(self.mandate.disk, move |disk| disk.discard(chunk))
                .await?;
            return Ok(());
        }
        if !entry.is_partial() {
            return Ok(());
        }
        // A write reaches this tail of the chain before its head has applied it, so the head may
        // have the copy a moment later. If it has not for so long, it refused the write.
        let now = Instant::now();
        let since = *self.absent_since.lock().entry(chunk).or_insert(now);
        if now.duration_since(since) < ABSENT_WAIT {
            return Err(Trouble::Later(format!(
                "chunk {chunk} is not at its other members yet"
            )));
        }
        inner
            .on_disk(self.mandate.disk, move |disk| disk.discard(chunk))
            .await?;
        Ok(())
    }
}

/// How often one copy is taken over again because it became shorter meanwhile.
const SHORTER_MAX: u32 = 4;
/// Bytes fetched at once.
const FETCH_BYTES: u32 = 1 << 20;
/// Time after which a copy that only this member has is taken for one that was refused elsewhere.
const ABSENT_WAIT: Duration = Duration::from_secs(10);
