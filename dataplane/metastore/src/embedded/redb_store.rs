//! The engine for checkpoints: redb on a [`LogFile`].
//!
//! The whole file is verified when it is opened, since redb trusts what it reads later: damage
//! would be a panic, or a wrong value. What is damaged while it is open may still make redb panic,
//! which ends here.

use std::io::{self, ErrorKind};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::{BufMut, Bytes};
use hither_log::{LogDir, LogFile, Lsn};
use redb::{
    Database, Durability, ReadOnlyTable, ReadableDatabase, StorageBackend, TableDefinition,
};

use crate::embedded::identity::StoreState;
use crate::embedded::layer::Layer;
use crate::embedded::ordered::{Applied, Entries, OrderedSnapshot, OrderedStore};
use crate::error::Error;
use crate::types::{Entry, KeyRange, Revision, Versioned};

/// A redb database.
pub(crate) struct RedbStore {
    database: Database,
}

impl RedbStore {
    /// Opens the database, creating it if the store is new.
    pub(crate) fn open(
        dir: &dyn LogDir,
        cache_bytes: usize,
        state: StoreState,
    ) -> Result<Self, Error> {
        let entries = dir
            .list()
            .map_err(|error| failed("list the directory", &error))?;
        let exists = |name| entries.iter().any(|entry| entry.name == name);
        if !exists(FILE) {
            if state != StoreState::New {
                return Err(corrupt("it is missing"));
            }
            if exists(NEW_FILE) {
                dir.remove(NEW_FILE)
                    .map_err(|error| failed("remove an unfinished file", &error))?;
            }
            create(dir).map_err(|error| failed("create the database", &error))?;
        }
        let file = dir
            .open(FILE)
            .map_err(|error| failed("open the database", &error))?;
        if state != StoreState::Closed {
            // After a failed sync in an earlier process the page cache may show a checkpoint that
            // the device does not have.
            let settled = file.sync_data().and_then(|()| file.drop_cache());
            settled.map_err(|error| failed("settle the database", &error))?;
        }
        let size = file
            .size()
            .map_err(|error| failed("open the database", &error))?;
        if size == 0 {
            // redb would make a new one of it.
            return Err(corrupt("it is empty"));
        }
        warm(file.as_ref(), size).map_err(|error| failed("read the database", &error))?;
        guarded(|| {
            let database = redb::Builder::new()
                .set_cache_size(cache_bytes)
                .set_check_integrity_on_open(true)
                .create_with_backend(Backend { file })
                .map_err(storage)?;
            let store = Self { database };
            store.check_version()?;
            Ok(store)
        })
    }

    fn check_version(&self) -> Result<(), Error> {
        let found = self.meta(VERSION_KEY)?;
        if found == Some(FORMAT_VERSION) {
            return Ok(());
        }
        Err(corrupt(&format!("it has format version {found:?}")))
    }

    fn meta(&self, key: &str) -> Result<Option<u64>, Error> {
        let read = self.database.begin_read().map_err(storage)?;
        let table = read.open_table(META).map_err(storage)?;
        Ok(table.get(key).map_err(storage)?.map(|value| value.value()))
    }
}

/// Reads the file from its start to its end, which a device does faster than page by page in the
/// order in which they are verified.
fn warm(file: &dyn LogFile, size: u64) -> io::Result<()> {
    let mut piece = vec![0; WARM_LEN];
    for at in (0..size).step_by(WARM_LEN) {
        let length = usize::try_from(size - at).map_or(WARM_LEN, |left| left.min(WARM_LEN));
        file.read_at(&mut piece[..length], at)?;
    }
    Ok(())
}

/// Makes the database under another name, so that a file with the right one is always whole.
fn create(dir: &dyn LogDir) -> io::Result<()> {
    let file = dir.create(NEW_FILE)?;
    initialise(file).map_err(io::Error::other)?;
    dir.rename(NEW_FILE, FILE)?;
    dir.sync_dir()
}

fn initialise(file: Arc<dyn LogFile>) -> Result<(), redb::Error> {
    let database = redb::Builder::new().create_with_backend(Backend { file })?;
    let write = database.begin_write()?;
    write.open_table(DATA)?;
    write
        .open_table(META)?
        .insert(VERSION_KEY, FORMAT_VERSION)?;
    write.commit()?;
    Ok(())
}

impl OrderedStore for RedbStore {
    fn applied(&self) -> Result<Applied, Error> {
        let number = |key| guarded(|| Ok(self.meta(key)?.unwrap_or_default()));
        let (revision, lsn) = (number(REVISION_KEY)?, number(LSN_KEY)?);
        Ok(Applied {
            revision: Revision(revision),
            lsn: Lsn(lsn),
        })
    }

    fn apply(
        &self,
        layers: &[Arc<Layer>],
        applied: Applied,
        progress: &dyn Fn(usize),
    ) -> Result<(), Error> {
        guarded(|| self.write(layers, applied, progress))
    }

    fn snapshot(&self) -> Result<Arc<dyn OrderedSnapshot>, Error> {
        guarded(|| {
            let read = self.database.begin_read().map_err(storage)?;
            let data = read.open_table(DATA).map_err(storage)?;
            Ok(Arc::new(RedbSnapshot { data }) as Arc<dyn OrderedSnapshot>)
        })
    }
}

impl RedbStore {
    fn write(
        &self,
        layers: &[Arc<Layer>],
        applied: Applied,
        progress: &dyn Fn(usize),
    ) -> Result<(), Error> {
        let mut write = self.database.begin_write().map_err(storage)?;
        write
            .set_durability(Durability::Immediate)
            .map_err(storage)?;
        write.set_quick_repair(true);
        {
            let mut data = write.open_table(DATA).map_err(storage)?;
            let (mut bytes, mut count) = (Vec::new(), 0usize);
            for layer in layers {
                for range in layer.deleted().iter() {
                    data.retain_in::<&[u8], _>(range.bounds(), |_, _| false)
                        .map_err(storage)?;
                }
                for (key, cell) in layer.cells(&KeyRange::all()) {
                    count += 1;
                    if count.is_multiple_of(PROGRESS_CHANGES) {
                        progress(count);
                    }
                    match &cell.value {
                        Some(value) => {
                            bytes.clear();
                            bytes.put_u64_le(cell.revision.0);
                            bytes.put_slice(value);
                            data.insert(&key[..], &bytes[..]).map_err(storage)?;
                        }
                        None => {
                            data.remove(&key[..]).map_err(storage)?;
                        }
                    }
                }
            }
            let mut meta = write.open_table(META).map_err(storage)?;
            meta.insert(REVISION_KEY, applied.revision.0)
                .map_err(storage)?;
            meta.insert(LSN_KEY, applied.lsn.0).map_err(storage)?;
        }
        write.commit().map_err(storage)
    }
}

struct RedbSnapshot {
    data: ReadOnlyTable<&'static [u8], &'static [u8]>,
}

impl OrderedSnapshot for RedbSnapshot {
    fn get(&self, key: &[u8]) -> Result<Option<Versioned>, Error> {
        guarded(|| {
            let found = self.data.get_owned(key).map_err(storage)?;
            found.map(|value| decode(value.value())).transpose()
        })
    }

    fn range(&self, range: &KeyRange) -> Result<Entries, Error> {
        let mut found = guarded(|| {
            let found = self.data.range_owned::<&[u8]>(range.bounds());
            found.map_err(storage)
        })?;
        let mut next = move || {
            let Some(entry) = found.next() else {
                return Ok(None);
            };
            let (key, value) = entry.map_err(storage)?;
            let key = Bytes::copy_from_slice(key.value());
            let versioned = decode(value.value())?;
            Ok(Some(Entry { key, versioned }))
        };
        let mut ended = false;
        Ok(Box::new(std::iter::from_fn(move || {
            if ended {
                return None;
            }
            let entry = guarded(&mut next).transpose();
            ended = !matches!(entry, Some(Ok(_)));
            entry
        })))
    }
}

fn decode(bytes: &[u8]) -> Result<Versioned, Error> {
    let Some((revision, value)) = bytes.split_first_chunk() else {
        return Err(corrupt("a value has no revision"));
    };
    let revision = Revision(u64::from_le_bytes(*revision));
    Ok(Versioned {
        value: Bytes::copy_from_slice(value),
        revision,
    })
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

/// Carries out what redb may panic in when its file is damaged.
fn guarded<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    // A reader leaves nothing behind, and a store that failed to write writes no more.
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(corrupt("the database makes no sense")))
}

fn storage(error: impl Into<redb::Error>) -> Error {
    match error.into() {
        redb::Error::Corrupted(cause) => corrupt(&cause),
        redb::Error::Io(error)
            if matches!(
                error.kind(),
                ErrorKind::InvalidData | ErrorKind::UnexpectedEof
            ) =>
        {
            corrupt(&error.to_string())
        }
        other @ (redb::Error::TableDoesNotExist(_)
        | redb::Error::TableTypeMismatch { .. }
        | redb::Error::TypeDefinitionChanged { .. }
        | redb::Error::UpgradeRequired(_)) => corrupt(&other.to_string()),
        other => failed("use the database", &other),
    }
}

fn corrupt(cause: &str) -> Error {
    Error::Corrupt {
        cause: format!("{FILE}: {cause}"),
    }
}

fn failed(action: &str, error: &dyn std::error::Error) -> Error {
    Error::Failed {
        cause: format!("{action}: {error}"),
    }
}

const FILE: &str = "store.redb";
const NEW_FILE: &str = "store.redb.new";
/// Value: the revision (u64, little-endian) and the value.
const DATA: TableDefinition<'static, &[u8], &[u8]> = TableDefinition::new("data");
const META: TableDefinition<'static, &str, u64> = TableDefinition::new("meta");
const VERSION_KEY: &str = "version";
const REVISION_KEY: &str = "applied revision";
const LSN_KEY: &str = "applied record";
const FORMAT_VERSION: u64 = 1;
/// Bytes read at once ahead of the verification.
const WARM_LEN: usize = 1 << 20;
/// How often progress is told.
const PROGRESS_CHANGES: usize = 1024;
