//! The thread that writes what has gathered and syncs it once for everybody who waits.

use std::sync::Arc;

use crate::error::Error;
use crate::format::Lsn;
use crate::segments::SegmentIndex;
use crate::state::{Extent, Shared, State};

/// Runs until the log is closed or poisoned. While one batch is synced the next one gathers.
pub(crate) fn run(shared: &Shared) {
    loop {
        let (batch, last) = {
            let mut state = shared.state.lock();
            while !has_work(shared, &state) {
                if state.closing || state.poison.is_some() {
                    return;
                }
                shared.flush_work.wait(&mut state);
            }
            match state.take_batch() {
                Some(taken) => taken,
                None => continue,
            }
        };
        match write_and_sync(shared, &batch) {
            Ok(()) => acknowledge(shared, batch, last),
            Err(error) => {
                // Pages that could not be written may be gone from the cache, so that no later
                // sync would tell: only opening the log again finds out what is there.
                tracing::error!(%error, "log flush failed, the log takes nothing more");
                shared.poison(error);
                return;
            }
        }
    }
}

fn has_work(shared: &Shared, state: &State) -> bool {
    let wanted = state.flush_wanted > state.durable
        || state.gathered_bytes >= shared.buffer_bytes_max / 2
        || state.closing;
    wanted && state.gathered_bytes > 0 && state.poison.is_none()
}

fn write_and_sync(shared: &Shared, batch: &[Extent]) -> Result<(), Error> {
    let mut last_synced: Option<SegmentIndex> = None;
    for extent in batch {
        let file = shared.file(extent.index)?;
        let io = |error| Error::io("write", &extent.index.to_string(), error);
        file.write_at(&extent.bytes, extent.offset).map_err(io)?;
    }
    for extent in batch {
        // Extents of one segment are neighbours.
        if last_synced != Some(extent.index) {
            let io = |error| Error::io("sync", &extent.index.to_string(), error);
            shared.file(extent.index)?.sync_data().map_err(io)?;
            last_synced = Some(extent.index);
        }
    }
    Ok(())
}

fn acknowledge(shared: &Shared, batch: Vec<Extent>, last: Lsn) {
    let mut ready = Vec::new();
    {
        let mut state = shared.state.lock();
        state.durable = last;
        state.recycle(batch);
        let needed = state.needed();
        if state.segments.reclaim(needed, last) {
            shared.house_work.notify_one();
        }
        ready.extend(state.waiters.extract_if(.., |(lsn, _)| *lsn <= last));
    }
    shared.room_has_changed();
    for (_, callback) in ready {
        callback(Ok(last));
    }
}

/// Starts the thread.
pub(crate) fn spawn(shared: &Arc<Shared>) -> Result<std::thread::JoinHandle<()>, Error> {
    let shared = Arc::clone(shared);
    std::thread::Builder::new()
        .name("log-flusher".to_owned())
        .spawn(move || run(&shared))
        .map_err(|error| Error::io("start a thread for", "flusher", error))
}
