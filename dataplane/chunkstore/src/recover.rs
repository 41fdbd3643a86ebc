//! Opening a disk: the index as of the last checkpoint, and what the log says beyond it.

use std::collections::BTreeMap;
use std::sync::Arc;

use hither_log::{Log, LogDir, LogFile, LogOptions, Lsn, Recovered};
use hither_proto::ids::ChunkId;
use parking_lot::{Mutex, RwLock};

use crate::buffers::Buffers;
use crate::change::trimmed_range;
use crate::checkpoint::Checkpoint;
use crate::core::{Core, Counts, Keeper};
use crate::error::Error;
use crate::holds::{Holds, Reason};
use crate::identity::Identity;
use crate::index::Index;
use crate::live::Lives;
use crate::medium::Medium;
use crate::options::StoreOptions;
use crate::overlay::Overlay;
use crate::pool::Pool;
use crate::record::{Change, Record, decode};

/// What replay found of a chunk besides its entry.
#[derive(Default)]
struct Replayed {
    overlay: Overlay,
    trims: Vec<(Lsn, u32, u32)>,
}

#[derive(Default)]
struct Replay {
    index: Index,
    chunks: BTreeMap<ChunkId, Replayed>,
    freed: Vec<ChunkId>,
}

impl Replay {
    fn apply(&mut self, lsn: Lsn, record: Record, deleted_max: usize) {
        match record {
            Record::Delete(chunks) => {
                for chunk in chunks {
                    self.index.delete(chunk, deleted_max);
                    self.chunks.remove(&chunk);
                    self.freed.push(chunk);
                }
            }
            Record::Chunk { chunk, .. } if self.index.was_deleted(chunk) => {}
            Record::Chunk {
                chunk,
                mut entry,
                change,
            } => {
                let known = self.index.get(chunk);
                if known.is_none_or(|known| known.lsn < lsn) {
                    entry.lsn = lsn;
                    entry.suspect = entry.loose;
                    self.index.put(chunk, entry);
                }
                self.change(chunk, lsn, change);
            }
        }
    }

    fn change(&mut self, chunk: ChunkId, lsn: Lsn, change: Change) {
        let found = self.chunks.entry(chunk).or_default();
        match change {
            Change::State => {}
            Change::Write {
                offset,
                checksums,
                data,
            } => {
                // A slice would keep a whole segment of the log in memory.
                let data = bytes::Bytes::copy_from_slice(&data);
                found.overlay.put(offset, &data, &checksums, lsn);
            }
            Change::Trim { offset, length } => {
                found.overlay.cut(&trimmed_range(offset, length));
                found.trims.push((lsn, offset, length));
            }
            // What is left keeps its hold on the log until it is moved again: that costs nothing,
            // and this need not trust that the blocks with newer bytes had been moved too.
            Change::InPlace { upto } => found.overlay.forget(upto),
            Change::Trimmed { lsn } => found.trims.retain(|(trim, ..)| *trim > lsn),
        }
        if found.overlay.is_empty() && found.trims.is_empty() {
            self.chunks.remove(&chunk);
        }
    }
}

/// Opens the disk on `medium`, whose identity is known, or makes it new.
pub(crate) fn open(
    medium: &Medium,
    identity: Identity,
    lock: Arc<dyn LogFile>,
    options: &StoreOptions,
    fresh: bool,
) -> Result<Arc<Core>, Error> {
    let failed = |cause: String| Error::Unusable {
        path: medium.path.clone(),
        cause,
    };
    let names = medium.dir.list().map_err(|e| failed(e.to_string()))?;
    let has = |name: &str| names.iter().any(|entry| entry.name == name);
    if !fresh && !["index", "log", "chunks"].into_iter().all(has) {
        return Err(failed(
            "the index, the log or the chunks are missing".into(),
        ));
    }
    let dirs = chunk_dirs(medium.dir.as_ref()).map_err(|e| failed(e.to_string()))?;
    let checkpoint = Checkpoint::open(&medium.dir).map_err(failed)?;
    let mut replay = Replay {
        index: checkpoint.load().map_err(failed)?,
        ..Replay::default()
    };
    let log_dir = medium
        .dir
        .subdir("log")
        .map_err(|e| failed(e.to_string()))?;
    let log_options = LogOptions {
        segment_bytes: options.log_segment_bytes.max(SEGMENT_BYTES_MIN),
        segments_max: options.log_segments_max,
        ..LogOptions::new(identity.log)
    };
    let (log, records) =
        Log::open(log_dir, &log_options).map_err(|e| failed(format!("the log: {e}")))?;
    check_ages(checkpoint.next().map_err(failed)?, &records).map_err(failed)?;
    for record in records {
        let record = record.map_err(|e| failed(format!("the log: {e}")))?;
        let lsn = record.lsn;
        let record = decode(record.kind, &record.payload)
            .ok_or_else(|| failed(format!("record {lsn} of the log is not understood")))?;
        replay.apply(lsn, record, options.deleted_max);
    }
    let pool = |name| {
        let pool = Pool::start(name, options.threads, options.jobs_max);
        pool.map_err(|e| failed(e.to_string()))
    };
    let core = Core {
        index_number: identity.index,
        identity: Mutex::new(identity),
        medium: medium.clone(),
        options: options.clone(),
        log,
        index: Mutex::new(std::mem::take(&mut replay.index)),
        checkpoint: Mutex::new(checkpoint),
        lives: Lives::new(options.files_max),
        holds: Mutex::new(Holds::default()),
        free: crate::room::FreeBytes::default(),
        gate: RwLock::new(()),
        dirs,
        unsynced_dirs: Mutex::default(),
        failed: std::sync::OnceLock::new(),
        closed: std::sync::atomic::AtomicBool::new(false),
        pool: pool("disk")?,
        sync_pool: pool("disk-sync")?,
        buffers: Buffers::default(),
        keeper: Keeper::default(),
        counts: Counts::default(),
        _lock: lock,
    };
    adopt(&core, replay)?;
    core.space()?;
    Ok(Arc::new(core))
}

/// Between the index, which has what the records before `next` say, and the log nothing is missing.
/// A database that is damaged may show the transaction before its last.
fn check_ages(next: Option<Lsn>, records: &Recovered) -> Result<(), String> {
    let (first, last) = (records.needed_lsn(), records.last_lsn());
    match next {
        Some(next) if next < first => Err(format!(
            "the file index is damaged: it ends before record {next}, the log begins with {first}"
        )),
        Some(next) if last.next() < next => Err(format!(
            "the log is damaged: it ends with record {last}, the index has those before {next}"
        )),
        _ => Ok(()),
    }
}

/// Gives the disk what replay found.
fn adopt(core: &Core, replay: Replay) -> Result<(), Error> {
    for (chunk, found) in replay.chunks {
        let live = core.lives.get(chunk);
        let mut state = live.state.write();
        state.overlay = found.overlay;
        state.trims = found.trims;
        state.unsettled = true;
        core.hold_overlay(&live, &mut state, 0);
        let mut holds = core.holds.lock();
        for (lsn, ..) in &state.trims {
            holds.add(*lsn, Reason::Trim, chunk);
        }
    }
    for chunk in replay.freed {
        core.unlink(chunk)?;
    }
    Ok(())
}

fn chunk_dirs(dir: &dyn LogDir) -> std::io::Result<Vec<Arc<dyn LogDir>>> {
    let chunks = dir.subdir("chunks")?;
    (0..=u8::MAX)
        .map(|number| chunks.subdir(&format!("{number:02x}")))
        .collect()
}

/// The largest record has to fit a segment.
const SEGMENT_BYTES_MIN: u64 = 256 << 10;
