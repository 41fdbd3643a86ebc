//! Inodes, directories and entries in memory.
//!
//! The cache is the newest state; the store lags behind by the batches not yet committed. What is
//! in a batch is never evicted.

use std::collections::BTreeMap;

use bytes::Bytes;
use hither_proto::ids::{InodeId, NameHash};
use hither_proto::stored::{BackPointer, ChunkPage, ChunkRef, Dentry, FragmentHead, Inode};

use super::node::Node;

/// Position of an entry in its directory.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct EntryKey {
    /// Hash of the name.
    pub hash: NameHash,
    /// The name.
    pub name: Bytes,
}

impl EntryKey {
    /// The position of a name.
    #[must_use]
    pub fn of(name: &Bytes) -> Self {
        Self {
            hash: NameHash::of(name),
            name: name.clone(),
        }
    }

    /// The position with a name of its own, to be kept: one that was decoded holds on to all of
    /// the message it was in.
    #[must_use]
    pub(crate) fn kept(&self) -> Self {
        Self {
            hash: self.hash,
            name: Bytes::copy_from_slice(&self.name),
        }
    }
}

/// Something to be read from the store.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum LoadKey {
    /// Where an inode's primary entry is.
    BackPointer(InodeId),
    /// All entries of a directory from a position on, a page at a time.
    Directory(InodeId, Option<EntryKey>),
    /// One entry.
    Entry(InodeId, EntryKey),
    /// Head of a directory.
    Head(InodeId),
    /// A page of chunk references.
    Page(InodeId, u32),
}

/// What a load found.
#[derive(Clone, PartialEq, Debug)]
pub enum Loaded {
    /// A back-pointer, if there is one.
    BackPointer(Option<BackPointer>),
    /// Entries in order, and whether more follow.
    Directory(Vec<(EntryKey, Dentry)>, bool),
    /// An entry, if there is one.
    Entry(Option<Dentry>),
    /// A head, if there is one.
    Head(Option<FragmentHead>),
    /// A page; empty when there is none.
    Page(ChunkPage),
    /// The store could not be read; whoever waits is asked to try again.
    Failed,
}

/// What a name stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Target {
    /// Its inode is here.
    Primary(InodeId),
    /// A further name; the inode's primary entry is elsewhere.
    Remote(InodeId, u32),
}

impl Target {
    pub(crate) fn ino(self) -> InodeId {
        match self {
            Self::Primary(ino) | Self::Remote(ino, _) => ino,
        }
    }
}

/// An inode in memory with the place of its primary entry.
#[derive(Debug)]
pub(crate) struct InodeSlot {
    pub(crate) inode: Node,
    pub(crate) parent: InodeId,
    pub(crate) key: EntryKey,
    used: bool,
}

/// A directory in memory.
#[derive(Debug, Default)]
pub(crate) struct Dir {
    pub(crate) head: FragmentHead,
    /// `None`: known to be absent.
    pub(crate) entries: BTreeMap<EntryKey, Option<Target>>,
    /// Every entry of the directory is in `entries`.
    pub(crate) complete: bool,
    /// A range of positions of which every entry is in `entries`.
    pub(crate) covered: Option<Covered>,
}

/// Positions after `after` (`None`: from the first) up to and with `to` (`None`: to the last).
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Covered {
    pub(crate) after: Option<EntryKey>,
    pub(crate) to: Option<EntryKey>,
}

impl Dir {
    /// How far the entries after `after` are known: `None` not at all, `Some(None)` to the end.
    pub(crate) fn known_to(&self, after: Option<&EntryKey>) -> Option<Option<&EntryKey>> {
        if self.complete {
            return Some(None);
        }
        let covered = self.covered.as_ref()?;
        let begins = covered.after.as_ref() <= after;
        let ends = covered
            .to
            .as_ref()
            .is_none_or(|to| after.is_none_or(|after| after < to));
        (begins && ends).then_some(covered.to.as_ref())
    }

    /// Takes in a page that was read after `after`; `more` says whether anything follows.
    pub(crate) fn cover(&mut self, after: Option<EntryKey>, last: Option<EntryKey>, more: bool) {
        let to = if more { last } else { None };
        let joined = match self.covered.take() {
            Some(old) if old.to.is_some() && old.to == after => Covered {
                after: old.after,
                to,
            },
            _ => Covered { after, to },
        };
        self.complete |= joined.after.is_none() && joined.to.is_none();
        self.covered = Some(joined);
    }
}

/// All of it.
#[derive(Debug, Default)]
pub(crate) struct Cache {
    pub(crate) inodes: BTreeMap<InodeId, Box<InodeSlot>>,
    pub(crate) dirs: BTreeMap<InodeId, Dir>,
    pub(crate) pages: BTreeMap<(InodeId, u32), Vec<ChunkRef>>,
    /// Back-pointers that were read to find an inode; a few, dropped at any time.
    pub(crate) back_pointers: BTreeMap<InodeId, Option<(InodeId, EntryKey)>>,
    hand: InodeId,
    /// Names known to be absent, about: those in memory because somebody looked for them.
    absent: usize,
    /// Loads on their way, with the number of forgets when they were asked for.
    loading: BTreeMap<LoadKey, u64>,
    /// Inodes of which something was forgotten while loads were on their way, and when.
    forgotten: BTreeMap<InodeId, u64>,
    forgets: u64,
}

impl LoadKey {
    fn ino(&self) -> InodeId {
        let (Self::BackPointer(ino)
        | Self::Directory(ino, _)
        | Self::Entry(ino, _)
        | Self::Head(ino)
        | Self::Page(ino, _)) = self;
        *ino
    }
}

impl Cache {
    /// Notes that a load was asked for.
    pub(crate) fn begin_load(&mut self, key: &LoadKey) {
        self.loading.insert(key.clone(), self.forgets);
    }

    /// Whether what a load has brought may be taken in. What was forgotten since it was asked for
    /// may have been newer than what it read: then it has to be read again.
    pub(crate) fn end_load(&mut self, key: &LoadKey) -> bool {
        let Some(asked) = self.loading.remove(key) else {
            return true;
        };
        let forgotten = self.forgotten.get(&key.ino());
        let fresh = forgotten.is_none_or(|forgotten| *forgotten <= asked);
        if self.loading.is_empty() {
            self.forgotten.clear();
        }
        fresh
    }

    /// Notes that something of the inode (or of its entries) is forgotten: the store knows it.
    pub(crate) fn forget(&mut self, ino: InodeId) {
        if !self.loading.is_empty() {
            self.forgets += 1;
            self.forgotten.insert(ino, self.forgets);
        }
    }

    /// Drops the marks of absent names when there are too many, but for those `keep` is true for.
    pub(crate) fn drop_absent(&mut self, keep: impl Fn(InodeId, &EntryKey) -> bool) {
        if self.absent <= ABSENT_MAX {
            return;
        }
        self.absent = 0;
        let mut changed = Vec::new();
        for (dir, directory) in &mut self.dirs {
            let before = directory.entries.len();
            directory
                .entries
                .retain(|key, target| target.is_some() || keep(*dir, key));
            if directory.entries.len() != before {
                changed.push(*dir);
            }
        }
        for dir in changed {
            self.forget(dir);
        }
    }

    pub(crate) fn inode(&mut self, ino: InodeId) -> Option<&mut InodeSlot> {
        let slot = self.inodes.get_mut(&ino)?;
        slot.used = true;
        Some(slot)
    }

    pub(crate) fn insert_inode(&mut self, parent: InodeId, key: EntryKey, inode: Inode) {
        let ino = InodeId(inode.ino);
        let slot = InodeSlot {
            inode: inode.into(),
            parent,
            key,
            used: true,
        };
        self.inodes.insert(ino, Box::new(slot));
    }

    /// Puts a loaded entry where nothing newer stands.
    pub(crate) fn install(&mut self, dir: InodeId, key: &EntryKey, dentry: Option<Dentry>) {
        use hither_proto::stored::dentry::Target as Stored;
        let Some(directory) = self.dirs.get_mut(&dir) else {
            return;
        };
        if directory.entries.contains_key(key) {
            return;
        }
        let key = key.kept();
        let target = match dentry.and_then(|dentry| dentry.target) {
            Some(Stored::Primary(inode)) => {
                let ino = InodeId(inode.ino);
                self.inodes.entry(ino).or_insert_with(|| {
                    Box::new(InodeSlot {
                        inode: inode.into(),
                        parent: dir,
                        key: key.clone(),
                        used: true,
                    })
                });
                Some(Target::Primary(ino))
            }
            Some(Stored::Remote(remote)) => {
                Some(Target::Remote(InodeId(remote.ino), remote.r#type))
            }
            None => {
                self.absent += 1;
                None
            }
        };
        directory.entries.insert(key, target);
    }

    /// Drops up to `count` inodes for which `keep` is false, oldest use first, as a clock does.
    ///
    /// A directory whose children are in memory stays: they are found through it.
    pub(crate) fn evict(&mut self, count: usize, keep: impl Fn(&Self, InodeId) -> bool) {
        let mut dropped = 0;
        let mut looked = 0;
        let bound = 2 * self.inodes.len();
        while dropped < count && looked < bound {
            looked += 1;
            let next = self.inodes.range(self.hand..).next().map(|(ino, _)| *ino);
            let Some(ino) = next else {
                self.hand = InodeId(0);
                continue;
            };
            self.hand = InodeId(ino.0 + 1);
            let slot = self.inodes.get_mut(&ino).expect("just found");
            if std::mem::take(&mut slot.used) || keep(self, ino) {
                continue;
            }
            dropped += usize::from(self.drop_inode(ino));
        }
        if self.back_pointers.len() > BACK_POINTERS_MAX {
            self.back_pointers.clear();
        }
    }

    fn drop_inode(&mut self, ino: InodeId) -> bool {
        if let Some(dir) = self.dirs.get(&ino) {
            if dir
                .entries
                .values()
                .flatten()
                .any(|t| matches!(t, Target::Primary(_)))
            {
                return false;
            }
            self.dirs.remove(&ino);
        }
        let Some(slot) = self.inodes.remove(&ino) else {
            return false;
        };
        self.forget(ino);
        self.forget(slot.parent);
        if let Some(parent) = self.dirs.get_mut(&slot.parent) {
            parent.entries.remove(&slot.key);
            parent.complete = false;
            parent.covered = None;
        }
        let pages: Vec<_> = self
            .pages
            .range((ino, 0)..=(ino, u32::MAX))
            .map(|(key, _)| *key)
            .collect();
        for key in pages {
            self.pages.remove(&key);
        }
        true
    }
}

/// Names known to be absent that are kept, about.
const ABSENT_MAX: usize = 100_000;
/// Back-pointers kept at most.
const BACK_POINTERS_MAX: usize = 10_000;
