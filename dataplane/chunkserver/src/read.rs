//! Reading, and mending what turns out to be damaged on the way.

use std::sync::Arc;

use hither_chunkstore::{Disk, Error, ReadData};
use hither_proto::chunk::{Fetch, Read, ReadReply};
use hither_proto::frame::PAYLOAD_BYTES_MAX;
use hither_proto::ids::{CHECKSUM_BLOCK, CHUNK_SIZE, ChunkId};
use hither_proto::status::Status;

use crate::authority::Mandate;
use crate::counters::add;
use crate::fetch::{Place, fetch_range};
use crate::gate::Ticket;
use crate::operation::{Call, Parked};
use crate::server::Inner;
use crate::status::Refusal;

/// What is to be read.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    chunk: ChunkId,
    offset: u32,
    length: u32,
}

/// Serves a client's read: at once if the bytes are in memory, else on a thread of the disk.
pub(crate) fn read(inner: &Arc<Inner>, read: &Read, call: Call, mandate: Mandate) {
    let wanted = Wanted {
        chunk: ChunkId(read.target.as_ref().map_or(0, |target| target.chunk)),
        offset: read.offset,
        length: read.length,
    };
    let Some(disk) = checked(inner, &wanted, &mandate) else {
        return refuse(inner, &wanted, call);
    };
    if read.length <= INLINE_BYTES_MAX
        && let Some(outcome) = disk.try_read_cached(wanted.chunk, wanted.offset, wanted.length)
    {
        if outcome.is_ok() {
            add(&inner.counts.inline_reads, 1);
        }
        return answer(inner, wanted, call, mandate, outcome);
    }
    let inner = Arc::clone(inner);
    let submitted = disk.submit(move |disk| {
        let outcome = disk.read(wanted.chunk, wanted.offset, wanted.length);
        answer(&inner, wanted, call, mandate, outcome);
    });
    if let Err(error) = submitted {
        tracing::debug!(%error, "read not taken");
    }
}

/// Serves a member that repairs or fills: whatever this copy has.
pub(crate) fn fetch(
    inner: &Arc<Inner>,
    fetch: &Fetch,
    call: Call,
    mandate: Mandate,
    ticket: Ticket<Parked>,
) {
    let wanted = Wanted {
        chunk: ChunkId(fetch.chunk),
        offset: fetch.offset,
        length: fetch.length,
    };
    let Some(disk) = checked(inner, &wanted, &mandate) else {
        return refuse(inner, &wanted, call);
    };
    let checksums_only = fetch.checksums_only;
    let submitted = disk.submit(move |disk| {
        match disk.read(wanted.chunk, wanted.offset, wanted.length) {
            Ok(mut data) => {
                if checksums_only {
                    data.bytes = bytes::Bytes::new();
                }
                reply(call, data, false);
            }
            // Mended when a client reads it: the one that asks here has others to ask.
            Err(error) => Refusal::from(error).answer(call.responder),
        }
        drop(ticket);
    });
    if let Err(error) = submitted {
        tracing::debug!(%error, "fetch not taken");
    }
}

fn checked<'a>(inner: &'a Inner, wanted: &Wanted, mandate: &Mandate) -> Option<&'a Disk> {
    let inside = u64::from(wanted.offset) + u64::from(wanted.length) <= CHUNK_SIZE;
    inner
        .store
        .disk(mandate.disk)
        .filter(|_| inside && wanted.length <= PAYLOAD_BYTES_MAX)
}

fn refuse(inner: &Inner, wanted: &Wanted, call: Call) {
    let refusal = if u64::from(wanted.offset) + u64::from(wanted.length) > CHUNK_SIZE
        || wanted.length > PAYLOAD_BYTES_MAX
    {
        Refusal::new(
            Status::BAD_REQUEST,
            "the range is too long or not inside a chunk",
        )
    } else {
        inner.no_disk()
    };
    refusal.answer(call.responder);
}

fn answer(
    inner: &Arc<Inner>,
    wanted: Wanted,
    call: Call,
    mandate: Mandate,
    outcome: Result<ReadData, Error>,
) {
    match outcome {
        Ok(data) => {
            add(&inner.counts.reads, 1);
            add(&inner.counts.read_bytes, data.bytes.len() as u64);
            reply(call, data, false);
        }
        Err(Error::BadBlock { .. }) => {
            let for_task = Arc::clone(inner);
            inner.runtime.spawn(async move {
                match mend(&for_task, wanted, mandate).await {
                    Ok(data) => {
                        add(&for_task.counts.reads, 1);
                        add(&for_task.counts.read_bytes, data.bytes.len() as u64);
                        reply(call, data, true);
                    }
                    Err(refusal) => refusal.answer(call.responder),
                }
            });
        }
        Err(error) => Refusal::from(error).answer(call.responder),
    }
}

fn reply(call: Call, data: ReadData, repaired: bool) {
    let message = ReadReply {
        checksums: data.checksums,
        copy_length: data.copy_length,
        repaired,
    };
    call.responder.ok_with(&message, &[data.bytes]);
}

/// Takes the range from another in-sync member, mends the bad blocks with it, and reads again.
async fn mend(inner: &Arc<Inner>, wanted: Wanted, mandate: Mandate) -> Result<ReadData, Refusal> {
    let mut last = Refusal::new(
        Status::BAD_CHECKSUM,
        format!(
            "chunk {} is damaged and no other member has it",
            wanted.chunk
        ),
    );
    let others: Vec<_> = {
        let map = inner.link.map();
        map.in_sync(mandate.group)
            .filter(|id| *id != inner.me)
            .collect()
    };
    let start = wanted.offset / CHECKSUM_BLOCK * CHECKSUM_BLOCK;
    let end = (wanted.offset + wanted.length).next_multiple_of(CHECKSUM_BLOCK);
    for member in others {
        let place = Place {
            member,
            group: mandate.group,
            epoch: mandate.epoch,
        };
        let mut at = start;
        let mut whole = true;
        while at < end {
            let length = (end - at).min(MEND_BYTES);
            match fetch_range(inner, place, wanted.chunk, at, length).await {
                Ok(piece) => {
                    let mended = put_back(inner, mandate, wanted.chunk, at, length, piece.bytes);
                    match mended.await {
                        Ok(count) => add(&inner.counts.repaired_blocks, count),
                        Err(error) => return Err(error.into()),
                    }
                }
                Err(error) => {
                    tracing::warn!(%member, chunk = %wanted.chunk, %error, "no bytes to mend with");
                    whole = false;
                    break;
                }
            }
            at += length;
        }
        if !whole {
            continue;
        }
        let again = inner
            .on_disk(mandate.disk, move |disk| {
                disk.read(wanted.chunk, wanted.offset, wanted.length)
            })
            .await;
        match again {
            Ok(data) => {
                tracing::warn!(chunk = %wanted.chunk, %member, "damaged blocks were repaired");
                return Ok(data);
            }
            Err(error) => last = error.into(),
        }
    }
    Err(last)
}

/// Mends the bad blocks of a range; blocks that are sound stay as they are.
async fn put_back(
    inner: &Inner,
    mandate: Mandate,
    chunk: ChunkId,
    offset: u32,
    length: u32,
    bytes: bytes::Bytes,
) -> Result<u64, Error> {
    inner
        .on_disk(mandate.disk, move |disk| {
            let mut mended = 0;
            let first = offset / CHECKSUM_BLOCK;
            for number in 0..length.div_ceil(CHECKSUM_BLOCK) {
                let start = (number * CHECKSUM_BLOCK) as usize;
                let end = bytes.len().min(start + CHECKSUM_BLOCK as usize);
                let block = bytes.slice(start.min(end)..end);
                mended += u64::from(disk.repair_block(chunk, first + number, &block)?);
            }
            Ok(mended)
        })
        .await
}

/// Mends a block in which a short write could not be merged.
pub(crate) async fn mend_block(
    inner: &Arc<Inner>,
    mandate: Mandate,
    chunk: ChunkId,
    block: u32,
) -> Result<(), Refusal> {
    let wanted = Wanted {
        chunk,
        offset: block * CHECKSUM_BLOCK,
        length: CHECKSUM_BLOCK,
    };
    mend(inner, wanted, mandate).await.map(|_| ())
}

/// Reads up to this size are tried on the reading task first.
const INLINE_BYTES_MAX: u32 = 128 << 10;
/// Bytes taken from another member at once.
const MEND_BYTES: u32 = 1 << 20;
