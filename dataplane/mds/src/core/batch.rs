//! Batches: what has changed and is not in the store yet.
//!
//! One batch is open, at most one is on its way. A batch knows which objects it touches and for
//! whom, so that answers to *other* sessions that depend on them wait for its commit.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use hither_proto::fragment::Fragment;
use hither_proto::ids::{BatchNumber, InodeId, SessionId};
use hither_proto::stored::dentry::Target as Stored;
use hither_proto::stored::{BackPointer, ChunkPage, Dentry, Remote};
use prost::Message;

use super::cache::{Cache, EntryKey, Target};
use super::node::Node;
use crate::keys;

/// A commit for the store: one atomic batch.
#[derive(Debug, PartialEq, Default)]
pub struct Commit {
    /// Number of the batch.
    pub batch: BatchNumber,
    /// Key and value that must stand for the commit to happen: authority.
    pub unchanged: Vec<(Bytes, Bytes)>,
    /// Keys with their new values; `None` deletes.
    pub writes: BTreeMap<Bytes, Option<Bytes>>,
    /// Ranges to delete, end excluded; no write lies inside one.
    pub delete_ranges: Vec<(Bytes, Bytes)>,
}

/// Something other sessions can see.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Object {
    Entry(InodeId, EntryKey),
    Head(InodeId),
    Inode(InodeId),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TouchedBy {
    One(SessionId),
    Many,
}

#[derive(Clone, Copy, Debug)]
struct Touched {
    by: TouchedBy,
    bytes: usize,
}

/// What one batch changes.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) number: BatchNumber,
    touched: BTreeMap<Object, Touched>,
    /// Heads whose recursive statistics alone changed: nobody waits for those.
    statistics: BTreeSet<InodeId>,
    /// Further writes, by key.
    raw: BTreeMap<Bytes, Option<Bytes>>,
    ranges: Vec<(Bytes, Bytes)>,
    pages: BTreeSet<(InodeId, u32)>,
    pub(crate) sessions: BTreeSet<SessionId>,
    /// Files whose lock tables changed.
    pub(crate) locks: BTreeSet<InodeId>,
    /// Somebody waits for the commit.
    pub(crate) awaited: bool,
    /// About what the batch will take in the store.
    bytes: usize,
}

impl Batch {
    pub(crate) fn new(number: BatchNumber) -> Self {
        Self {
            number,
            ..Self::default()
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.touched.is_empty()
            && self.raw.is_empty()
            && self.ranges.is_empty()
            && self.sessions.is_empty()
            && self.pages.is_empty()
            && self.locks.is_empty()
    }

    /// Notes a change of an object that takes about `bytes` in the store.
    pub(crate) fn touch(&mut self, object: Object, by: SessionId, bytes: usize) {
        let by = TouchedBy::One(by);
        let touched = self
            .touched
            .entry(object)
            .or_insert(Touched { by, bytes: 0 });
        if touched.by != by {
            touched.by = TouchedBy::Many;
        }
        self.bytes += bytes.saturating_sub(touched.bytes);
        touched.bytes = touched.bytes.max(bytes);
    }

    /// Writes a key that no object stands for.
    pub(crate) fn put_raw(&mut self, key: Bytes, value: Option<Bytes>) {
        let size = |value: &Option<Bytes>| value.as_ref().map_or(0, Bytes::len);
        let (key_bytes, bytes) = (key.len(), size(&value));
        match self.raw.insert(key, value) {
            Some(old) => self.bytes += bytes.saturating_sub(size(&old)),
            None => self.bytes += key_bytes + bytes,
        }
    }

    /// Deletes a range of keys of which the batch writes none.
    pub(crate) fn delete_range(&mut self, from: Bytes, to: Bytes) {
        self.bytes += from.len() + to.len();
        self.ranges.push((from, to));
    }

    /// Writes a page of `count` references.
    pub(crate) fn touch_page(&mut self, page: (InodeId, u32), count: usize) {
        let new = self.pages.insert(page);
        self.bytes += if new {
            count * REFERENCE_BYTES
        } else {
            REFERENCE_BYTES
        };
    }

    /// Writes the statistics of a directory.
    pub(crate) fn touch_statistics(&mut self, dir: InodeId) {
        if self.statistics.insert(dir) {
            self.bytes += HEAD_BYTES;
        }
    }

    /// Writes the lock table of a file.
    pub(crate) fn touch_locks(&mut self, ino: InodeId) {
        if self.locks.insert(ino) {
            self.bytes += LOCKS_BYTES;
        }
    }

    /// Writes the record of a session, of which about `bytes` are new.
    pub(crate) fn touch_session(&mut self, session: SessionId, bytes: usize) {
        self.sessions.insert(session);
        self.bytes += bytes;
    }

    /// Takes nothing more.
    pub(crate) fn close(&mut self) {
        self.bytes = self.bytes.max(BATCH_BYTES_SOFT);
    }

    /// Whether nothing more should be added: what one more operation can add still fits into the
    /// store's largest batch.
    pub(crate) fn is_full(&self) -> bool {
        self.bytes >= BATCH_BYTES_SOFT || self.touched.len() + self.raw.len() >= BATCH_CHANGES_SOFT
    }

    /// Whether somebody other than `reader` touched the object in this batch.
    pub(crate) fn is_foreign(&self, object: &Object, reader: SessionId) -> bool {
        self.touched
            .get(object)
            .is_some_and(|touched| touched.by != TouchedBy::One(reader))
    }

    pub(crate) fn touches_inode(&self, ino: InodeId) -> bool {
        self.touched.contains_key(&Object::Inode(ino))
            || self.touched.contains_key(&Object::Head(ino))
            || self.statistics.contains(&ino)
            || self
                .pages
                .range((ino, 0)..=(ino, u32::MAX))
                .next()
                .is_some()
    }

    pub(crate) fn touches_entry(&self, dir: InodeId, key: &EntryKey) -> bool {
        // The common case is that nothing of the directory is touched at all.
        self.touched.contains_key(&Object::Entry(dir, key.clone()))
    }

    /// Pages of references the batch changes.
    pub(crate) fn pages(&self) -> impl Iterator<Item = &(InodeId, u32)> {
        self.pages.iter()
    }

    pub(crate) fn touches_page(&self, page: &(InodeId, u32)) -> bool {
        self.pages.contains(page)
    }

    /// Entries the batch changes.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (InodeId, &EntryKey)> {
        self.touched.keys().filter_map(|object| match object {
            Object::Entry(dir, key) => Some((*dir, key)),
            Object::Head(_) | Object::Inode(_) => None,
        })
    }

    /// Encodes the batch from the cache as it stands.
    pub(crate) fn freeze(&self, cache: &Cache) -> Commit {
        let mut writes = self.raw.clone();
        let mut dirs: BTreeSet<InodeId> = self.statistics.clone();
        for object in self.touched.keys() {
            match object {
                Object::Entry(dir, key) => {
                    let value = encode_entry(cache, *dir, key);
                    writes.insert(keys::dentry(*dir, key.hash, &key.name), value);
                }
                Object::Head(dir) => {
                    dirs.insert(*dir);
                }
                Object::Inode(ino) => {
                    if let Some(slot) = cache.inodes.get(ino) {
                        let key = keys::dentry(slot.parent, slot.key.hash, &slot.key.name);
                        writes.insert(key, encode_entry(cache, slot.parent, &slot.key));
                    }
                }
            }
        }
        for dir in dirs {
            if let Some(directory) = cache.dirs.get(&dir) {
                let value = directory.head.encode_to_vec().into();
                writes.insert(keys::fragment_head(dir, Fragment::WHOLE), Some(value));
            }
        }
        for (ino, page) in &self.pages {
            let value = cache
                .pages
                .get(&(*ino, *page))
                .filter(|refs| !refs.is_empty());
            let value = value.map(|refs| {
                Bytes::from(
                    ChunkPage {
                        chunks: refs.clone(),
                    }
                    .encode_to_vec(),
                )
            });
            writes.insert(keys::chunk_page(*ino, *page), value);
        }
        Commit {
            batch: self.number,
            unchanged: Vec::new(),
            writes,
            delete_ranges: self.ranges.clone(),
        }
    }
}

/// Encodes a back-pointer.
pub(crate) fn back_pointer(parent: InodeId, key: &EntryKey) -> Bytes {
    BackPointer {
        parent: parent.0,
        name: key.name.clone(),
    }
    .encode_to_vec()
    .into()
}

fn encode_entry(cache: &Cache, dir: InodeId, key: &EntryKey) -> Option<Bytes> {
    let target = (*cache.dirs.get(&dir)?.entries.get(key)?)?;
    let stored = match target {
        Target::Primary(ino) => Stored::Primary(cache.inodes.get(&ino)?.inode.stored()),
        Target::Remote(ino, kind) => Stored::Remote(Remote {
            ino: ino.0,
            r#type: kind,
        }),
    };
    Some(
        Dentry {
            target: Some(stored),
        }
        .encode_to_vec()
        .into(),
    )
}

/// Bytes an inode takes in the store, about.
pub(crate) fn inode_bytes(inode: &Node, name: usize) -> usize {
    let rare = inode.rare();
    let xattrs: usize = rare
        .xattrs
        .iter()
        .map(|xattr| xattr.name.len() + xattr.value.len() + 16)
        .sum();
    INODE_BYTES + name + rare.symlink.len() + inode.chunks.len() * REFERENCE_BYTES + xattrs
}

/// Bytes of an entry without its name and inode, of an inode without names and lists, of a head.
pub(crate) const ENTRY_BYTES: usize = 48;
const INODE_BYTES: usize = 200;
pub(crate) const HEAD_BYTES: usize = 100;
/// Bytes of a lock table: few are larger, and the largest is half a megabyte.
const LOCKS_BYTES: usize = 16 << 10;
/// Bytes of a chunk reference.
const REFERENCE_BYTES: usize = 32;
/// A batch of this size is closed: the store takes four times as much.
const BATCH_BYTES_SOFT: usize = 2 << 20;
/// A batch of this many changes is closed.
const BATCH_CHANGES_SOFT: usize = 16_384;
/// What one operation may add to a batch: together with what was in it, the store still takes it.
pub(crate) const OPERATION_BYTES_MAX: usize = 4 << 20;
const _: () = assert!(
    BATCH_BYTES_SOFT + OPERATION_BYTES_MAX < hither_metastore::BATCH_BYTES_MAX,
    "an operation that is begun must fit"
);
