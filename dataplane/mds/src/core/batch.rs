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

/// What one batch changes.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) number: BatchNumber,
    touched: BTreeMap<Object, TouchedBy>,
    /// Heads whose recursive statistics alone changed: nobody waits for those.
    pub(crate) statistics: BTreeSet<InodeId>,
    /// Further writes, by key.
    pub(crate) raw: BTreeMap<Bytes, Option<Bytes>>,
    pub(crate) ranges: Vec<(Bytes, Bytes)>,
    pub(crate) pages: BTreeSet<(InodeId, u32)>,
    pub(crate) sessions: BTreeSet<SessionId>,
    /// Somebody waits for the commit.
    pub(crate) awaited: bool,
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
    }

    pub(crate) fn touch(&mut self, object: Object, by: SessionId) {
        self.touched
            .entry(object)
            .and_modify(|who| {
                if *who != TouchedBy::One(by) {
                    *who = TouchedBy::Many;
                }
            })
            .or_insert(TouchedBy::One(by));
    }

    /// Whether somebody other than `reader` touched the object in this batch.
    pub(crate) fn is_foreign(&self, object: &Object, reader: SessionId) -> bool {
        self.touched
            .get(object)
            .is_some_and(|who| *who != TouchedBy::One(reader))
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
