//! Chunks that are in use: what is known of them besides their index entries.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use hither_log::Lsn;
use hither_proto::ids::{ChunkId, Epoch};
use parking_lot::{Mutex, RwLock};

use crate::entry::Regions;
use crate::error::Error;
use crate::file::ChunkFile;
use crate::overlay::Overlay;
use crate::ranges::Ranges;
use crate::write::WriteOp;

/// Called once with the outcome of an operation, from any thread; must be short.
pub(crate) type Done = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// A chunk in use.
///
/// Locks are taken in this order: `syncing`, `state`, then those of the disk.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) chunk: ChunkId,
    pub(crate) queue: Mutex<Queue>,
    /// Held while the file is made stable.
    pub(crate) syncing: Mutex<()>,
    pub(crate) state: RwLock<ChunkState>,
}

/// Writes and flushes of a chunk are carried out in the order in which they were submitted.
#[derive(Default)]
pub(crate) struct Queue {
    /// Somebody carries one out.
    pub(crate) busy: bool,
    pub(crate) waiting: VecDeque<Job>,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Queue({}, {})", self.busy, self.waiting.len())
    }
}

pub(crate) enum Job {
    Write(Box<WriteOp>, Done),
    Flush(Done),
}

/// What the lock of a chunk protects, together with the chunk's entry in the index.
#[derive(Debug, Default)]
pub(crate) struct ChunkState {
    pub(crate) file: Option<Arc<ChunkFile>>,
    /// There was no file when it was looked for; nobody but the holder of this lock makes one.
    pub(crate) no_file: bool,
    pub(crate) overlay: Overlay,
    /// The record under which the overlay holds the log.
    pub(crate) held: Option<Lsn>,
    /// Regions written in place since the last sync of the file began.
    pub(crate) dirty: Regions,
    /// The file was made or changed and its directory entry was not synced yet.
    pub(crate) unsynced_file: bool,
    /// The last run ended in the middle of something: look before use.
    pub(crate) unsettled: bool,
    /// Trims of the last run that may not have reached the file: record, offset, length.
    pub(crate) trims: Vec<(Lsn, u32, u32)>,
    /// While the base is fetched: what chain writes have written, which the base must not cover.
    pub(crate) written: Ranges,
    /// Epoch in which the copy is being filled and of these writes; 0 when it is not.
    pub(crate) fill_epoch: Epoch,
}

impl ChunkState {
    /// Keeps what chain writes of this epoch write apart from the base, and forgets what was
    /// written before.
    pub(crate) fn fill_in(&mut self, epoch: Epoch) {
        self.written = Ranges::default();
        self.fill_epoch = epoch;
    }

    /// The copy is complete, or gone.
    pub(crate) fn filled(&mut self) {
        self.fill_in(Epoch(0));
    }

    fn is_idle(&self) -> bool {
        self.overlay.is_empty()
            && self.dirty.is_empty()
            && !self.unsynced_file
            && !self.unsettled
            && self.trims.is_empty()
            && self.fill_epoch == Epoch(0)
    }
}

/// Chunks in use, by id. At most about `max` of those that hold nothing but an open file.
#[derive(Debug)]
pub(crate) struct Lives {
    shards: [Mutex<BTreeMap<ChunkId, Arc<Live>>>; SHARDS],
    max_per_shard: usize,
}

impl Lives {
    pub(crate) fn new(max: usize) -> Self {
        Self {
            shards: Default::default(),
            max_per_shard: (max / SHARDS).max(4),
        }
    }

    fn shard(&self, chunk: ChunkId) -> &Mutex<BTreeMap<ChunkId, Arc<Live>>> {
        let mixed = chunk.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> SHARD_SHIFT;
        let at = usize::try_from(mixed).unwrap_or(0);
        &self.shards[at % SHARDS]
    }

    /// The chunk, made live if it is not.
    pub(crate) fn get(&self, chunk: ChunkId) -> Arc<Live> {
        let mut shard = self.shard(chunk).lock();
        if let Some(live) = shard.get(&chunk) {
            return Arc::clone(live);
        }
        if shard.len() >= self.max_per_shard {
            evict(&mut shard, chunk, self.max_per_shard / 4);
        }
        let live = Arc::new(Live {
            chunk,
            queue: Mutex::default(),
            syncing: Mutex::new(()),
            state: RwLock::default(),
        });
        shard.insert(chunk, Arc::clone(&live));
        live
    }

    /// The chunk, if it is live.
    pub(crate) fn find(&self, chunk: ChunkId) -> Option<Arc<Live>> {
        self.shard(chunk).lock().get(&chunk).cloned()
    }

    /// All live chunks.
    pub(crate) fn all(&self) -> Vec<Arc<Live>> {
        let shards = self.shards.iter();
        shards
            .flat_map(|shard| shard.lock().values().cloned().collect::<Vec<_>>())
            .collect()
    }
}

/// Drops idle chunks, beginning behind `from`, until `wanted` are gone or all were seen.
fn evict(shard: &mut BTreeMap<ChunkId, Arc<Live>>, from: ChunkId, wanted: usize) {
    let order = shard.range(from..).chain(shard.range(..from));
    let idle = order.filter(|(_, live)| {
        Arc::strong_count(live) == 1 && live.state.try_read().is_some_and(|state| state.is_idle())
    });
    let gone: Vec<ChunkId> = idle.map(|(chunk, _)| *chunk).take(wanted.max(1)).collect();
    for chunk in gone {
        shard.remove(&chunk);
    }
}

const SHARDS: usize = 16;
const SHARD_SHIFT: u32 = 40;
