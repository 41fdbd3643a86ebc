//! Decay is looked for in the background: every copy is read and verified once in so many days.

use std::sync::Arc;
use std::time::Duration;

use hither_chunkstore::Disk;
use hither_proto::ids::{ChunkId, DiskIndex};

use crate::authority::{Need, Verdict, judge};
use crate::counters::add;
use crate::read::mend_block;
use crate::server::Inner;

/// Verifies the copies of one disk, round and round.
pub(crate) async fn run(inner: Arc<Inner>, index: DiskIndex) {
    // Not always from the start, or a server that is restarted often would never see the end.
    let mut next = ChunkId(rand::random());
    loop {
        let Some(disk) = inner.store.disk(index).cloned() else {
            return;
        };
        let Some((chunk, _)) = disk.next_copy(next).or_else(|| disk.next_copy(ChunkId(0))) else {
            tokio::time::sleep(EMPTY_PAUSE).await;
            continue;
        };
        let pause = pause_after_piece(&disk, inner.config.scrub_days);
        if let Err(error) = scrub_copy(&inner, index, chunk, pause).await {
            tracing::debug!(%chunk, %error, "copy not verified");
            tokio::time::sleep(EMPTY_PAUSE).await;
        }
        next = ChunkId(chunk.0.wrapping_add(1));
    }
}

async fn scrub_copy(
    inner: &Arc<Inner>,
    index: DiskIndex,
    chunk: ChunkId,
    pause: Duration,
) -> Result<(), hither_chunkstore::Error> {
    let mut at = 0;
    loop {
        let scrubbed = inner
            .on_disk(index, move |disk| disk.scrub(chunk, at, PIECE_BYTES))
            .await?;
        for block in scrubbed.bad {
            mend(inner, index, chunk, block).await;
        }
        let end = at.saturating_add(PIECE_BYTES).min(scrubbed.copy_length);
        add(
            &inner.counts.scrubbed_bytes,
            u64::from(end.saturating_sub(at)),
        );
        tokio::time::sleep(pause).await;
        if end >= scrubbed.copy_length {
            return Ok(());
        }
        at = end;
    }
}

/// Mends a damaged block if this server is in-sync: otherwise it is going to be fetched anyway.
async fn mend(inner: &Arc<Inner>, index: DiskIndex, chunk: ChunkId, block: u32) {
    let Some(entry) = inner.store.disk(index).and_then(|disk| disk.entry(chunk)) else {
        return;
    };
    let map = inner.link.map();
    let Some(epoch) = map.epoch(entry.group) else {
        return;
    };
    if let Verdict::Granted(mandate) = judge(&map, inner.me, entry.group, epoch, Need::InSync)
        && let Err(refusal) = mend_block(inner, mandate, chunk, block).await
    {
        tracing::error!(%chunk, block, cause = refusal.failure.text, "damaged block not repaired");
    }
}

/// So that all of the disk is seen in the time given.
fn pause_after_piece(disk: &Disk, days: u32) -> Duration {
    let pieces = disk.copy_bytes() / u64::from(PIECE_BYTES) + 1;
    let time = DAY.saturating_mul(days.max(1));
    time.checked_div(u32::try_from(pieces).unwrap_or(u32::MAX))
        .unwrap_or(PAUSE_MAX)
        .min(PAUSE_MAX)
}

/// Bytes verified at once.
const PIECE_BYTES: u32 = 1 << 20;
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Longest pause between two pieces.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Pause of a disk without copies.
const EMPTY_PAUSE: Duration = Duration::from_secs(60);
