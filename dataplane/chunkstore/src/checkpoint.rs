//! The durable index: the index in memory as of some record, in a redb database.
//!
//! The whole file is verified when it is opened: redb trusts what it reads, and panics over damage.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use hither_log::{LogDir, LogFile, Lsn};
use hither_proto::checksum::crc32c;
use hither_proto::ids::ChunkId;
use redb::{
    Database, Durability, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition,
};

use crate::entry::{ENTRY_BYTES, Entry};
use crate::index::{Changes, Index};

/// An open durable index.
pub(crate) struct Checkpoint {
    dir: Arc<dyn LogDir>,
    /// `None` after a commit that failed: what it left is found out by opening again.
    database: Option<Database>,
}

impl Checkpoint {
    /// Opens the index in `dir`, making an empty one when there is none.
    pub(crate) fn open(dir: &Arc<dyn LogDir>) -> Result<Self, String> {
        if !exists(dir.as_ref(), FILE).map_err(|error| error.to_string())? {
            create(dir.as_ref())?;
        }
        let database = reopen(dir.as_ref())?;
        let version = guarded(|| meta(&database, VERSION_KEY).map_err(|error| error.to_string()))?;
        if version != Some(VERSION) {
            return Err(damaged(&format!("it has format version {version:?}")));
        }
        Ok(Self {
            dir: Arc::clone(dir),
            database: Some(database),
        })
    }

    /// The record before which everything is in the index, if it says so.
    pub(crate) fn next(&self) -> Result<Option<Lsn>, String> {
        let database = self.database.as_ref().ok_or("the index is not open")?;
        let next = guarded(|| meta(database, NEXT_KEY).map_err(|error| error.to_string()))?;
        Ok(next.map(Lsn))
    }

    /// The whole index.
    pub(crate) fn load(&self) -> Result<Index, String> {
        let database = self.database.as_ref().ok_or("the index is not open")?;
        let (entries, deleted) = guarded(|| read(database).map_err(|error| error.to_string()))?;
        let entries = entries.into_iter().map(|(chunk, bytes)| {
            let entry =
                decode(&bytes).ok_or_else(|| damaged(&format!("the entry of chunk {chunk}")))?;
            Ok((chunk, entry))
        });
        Ok(Index::load(
            entries.collect::<Result<_, String>>()?,
            &deleted,
        ))
    }

    /// Makes the changes by the records before `next` durable, all or none. After a failure the same
    /// changes may be committed again.
    pub(crate) fn commit(&mut self, changes: &Changes, next: Lsn) -> io::Result<()> {
        let database = match self.database.take() {
            Some(database) => database,
            None => reopen(self.dir.as_ref()).map_err(io::Error::other)?,
        };
        let written = catch_unwind(AssertUnwindSafe(|| write(&database, changes, next)));
        let written = written.map_err(|_| io::Error::other(damaged(NO_SENSE)))?;
        written.map_err(|error| match error {
            redb::Error::Io(error) => error,
            other => io::Error::other(other.to_string()),
        })?;
        self.database = Some(database);
        Ok(())
    }
}

/// Carries out what redb may panic in when its file is damaged.
fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let done = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(NO_SENSE.into()));
    done.map_err(|cause| damaged(&cause))
}

fn damaged(cause: &str) -> String {
    format!("the file {FILE} is damaged: {cause}")
}

fn meta(database: &Database, key: &str) -> Result<Option<u64>, redb::Error> {
    let read = database.begin_read()?;
    let table = read.open_table(META)?;
    Ok(table.get(key)?.map(|value| value.value()))
}

fn read(database: &Database) -> Result<(RawEntries, Vec<(u64, ChunkId)>), redb::Error> {
    let read = database.begin_read()?;
    let mut entries = Vec::new();
    for item in read.open_table(ENTRIES)?.iter()? {
        let (chunk, value) = item?;
        entries.push((ChunkId(chunk.value()), value.value()));
    }
    let mut deleted = Vec::new();
    for item in read.open_table(DELETED)?.iter()? {
        let (number, chunk) = item?;
        deleted.push((number.value(), ChunkId(chunk.value())));
    }
    Ok((entries, deleted))
}

fn write(database: &Database, changes: &Changes, next: Lsn) -> Result<(), redb::Error> {
    let mut write = database.begin_write()?;
    write.set_durability(Durability::Immediate)?;
    write.set_quick_repair(true);
    {
        let mut entries = write.open_table(ENTRIES)?;
        for (chunk, entry) in &changes.entries {
            match entry {
                Some(entry) => entries.insert(chunk.0, encode(entry))?,
                None => entries.remove(chunk.0)?,
            };
        }
        let mut deleted = write.open_table(DELETED)?;
        for (number, chunk) in &changes.deleted {
            deleted.insert(number, chunk.0)?;
        }
        deleted.retain_in(..changes.deleted_from, |_, _| false)?;
        write.open_table(META)?.insert(NEXT_KEY, next.0)?;
    }
    write.commit()?;
    Ok(())
}

fn encode(entry: &Entry) -> Value {
    let mut value = [0; VALUE_BYTES];
    value[..ENTRY_BYTES].copy_from_slice(&entry.encode());
    let checksum = crc32c(&value[..ENTRY_BYTES]);
    value[ENTRY_BYTES..].copy_from_slice(&checksum.to_le_bytes());
    value
}

fn decode(value: &Value) -> Option<Entry> {
    let (entry, checksum) = value.split_at(ENTRY_BYTES);
    let intact = crc32c(entry).to_le_bytes() == checksum;
    let mut entry = Entry::decode(entry).filter(|_| intact)?;
    entry.suspect = entry.loose;
    Some(entry)
}

fn exists(dir: &dyn LogDir, name: &str) -> io::Result<bool> {
    Ok(dir.list()?.iter().any(|entry| entry.name == name))
}

/// Makes the database under another name, so that a file with the right one is always whole.
fn create(dir: &dyn LogDir) -> Result<(), String> {
    let file = (|| {
        if exists(dir, NEW_FILE)? {
            dir.remove(NEW_FILE)?;
        }
        dir.create(NEW_FILE)
    })();
    let database = database(file.map_err(|error| error.to_string())?)?;
    let made = (|| -> Result<(), redb::Error> {
        let write = database.begin_write()?;
        write.open_table(META)?.insert(VERSION_KEY, VERSION)?;
        write.open_table(ENTRIES)?;
        write.open_table(DELETED)?;
        write.commit()?;
        Ok(())
    })();
    made.map_err(|error| error.to_string())?;
    drop(database);
    dir.rename(NEW_FILE, FILE)
        .and_then(|()| dir.sync_dir())
        .map_err(|error| error.to_string())
}

fn reopen(dir: &dyn LogDir) -> Result<Database, String> {
    let file = dir
        .open(FILE)
        .map_err(|error| format!("open the file {FILE}: {error}"))?;
    if file.size().map_err(|error| error.to_string())? == 0 {
        // redb would make a new one of it.
        return Err(damaged("it is empty"));
    }
    // What an earlier run wrote and failed to sync is in memory, but the device may not have it.
    file.drop_cache().map_err(|error| error.to_string())?;
    database(file)
}

fn database(file: Arc<dyn LogFile>) -> Result<Database, String> {
    let open = || {
        redb::Builder::new()
            .set_cache_size(CACHE_BYTES)
            .set_check_integrity_on_open(true)
            .create_with_backend(Backend { file })
    };
    let opened = catch_unwind(AssertUnwindSafe(open)).map_err(|_| damaged(NO_SENSE))?;
    opened.map_err(|error| format!("open the file {FILE}: {error}"))
}

#[derive(Debug)]
struct Backend {
    file: Arc<dyn LogFile>,
}

impl StorageBackend for Backend {
    fn len(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_at(out, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_at(data, offset)
    }
}

type Value = [u8; VALUE_BYTES];
type RawEntries = Vec<(ChunkId, Value)>;

const VALUE_BYTES: usize = ENTRY_BYTES + 4;
const FILE: &str = "index";
const NEW_FILE: &str = "index.new";
const ENTRIES: TableDefinition<'static, u64, Value> = TableDefinition::new("entries");
const DELETED: TableDefinition<'static, u64, u64> = TableDefinition::new("deleted");
const META: TableDefinition<'static, &str, u64> = TableDefinition::new("meta");
const VERSION_KEY: &str = "version";
const VERSION: u64 = 1;
/// The record before which everything is in the index. Absent where an older build wrote last.
const NEXT_KEY: &str = "next record";
const NO_SENSE: &str = "the database makes no sense";
/// The database is read once, at start.
const CACHE_BYTES: usize = 8 << 20;
