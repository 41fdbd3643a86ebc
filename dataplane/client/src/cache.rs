//! Attributes and entries under leases.
//!
//! What a reply says is kept only if nothing of the same inode was recalled since the request was
//! sent: replies are worked on after the connection's reading task has seen a later recall.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hither_proto::ids::{InodeId, ROOT};
use hither_proto::meta::{HeldLease, Hint};
use hither_proto::stored::Inode;
use parking_lot::Mutex;

use crate::entries::{Entries, Position, Target};

/// Attributes and how long the kernel may keep them.
#[derive(Debug, Clone)]
pub struct Attributes {
    /// The inode.
    pub inode: Inode,
    /// Zero: not at all.
    pub valid: Duration,
}

/// What is known of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Known {
    /// It stands for this inode.
    Is(InodeId),
    /// There is no such name.
    Absent,
    /// The server has to be asked.
    Unknown,
}

/// Moment of the recall clock at which a request was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SentAt(u64);

#[derive(Debug, Default)]
struct Node {
    inode: Option<Inode>,
    leased: bool,
    place: Option<(InodeId, Bytes)>,
    dir: Option<Box<Entries>>,
    /// Moment at which this mount itself changed the inode: what was read before is not kept.
    changed_at: u64,
    used: bool,
}

#[derive(Debug, Default)]
struct State {
    nodes: BTreeMap<InodeId, Node>,
    /// Directories with their entries, for a bound: at most how many they have.
    entries: usize,
    clock: u64,
    recalled: BTreeMap<InodeId, u64>,
    /// Everything was dropped at this moment.
    dropped: u64,
}

/// The cache of one mount.
#[derive(Debug)]
pub(crate) struct Cache {
    state: Mutex<State>,
    inodes_max: AtomicUsize,
}

impl Cache {
    pub(crate) fn new(inodes_max: usize) -> Self {
        Self {
            state: Mutex::default(),
            inodes_max: AtomicUsize::new(inodes_max),
        }
    }

    /// From now on keeps so many inodes, and forgets what is too many.
    pub(crate) fn keep_at_most(&self, inodes_max: usize) {
        self.inodes_max.store(inodes_max, Ordering::Relaxed);
        let mut state = self.state.lock();
        state.bound(inodes_max);
        state.bound_entries(inodes_max, ROOT);
    }

    fn inodes_max(&self) -> usize {
        self.inodes_max.load(Ordering::Relaxed)
    }

    /// To be taken before a request is sent.
    pub(crate) fn sent_at(&self) -> SentAt {
        SentAt(self.state.lock().clock)
    }

    /// Whether what a reply gives of this inode may be kept.
    pub(crate) fn still_good(&self, ino: InodeId, sent: SentAt) -> bool {
        self.state.lock().still_good(ino, sent)
    }

    /// Keeps an inode that was read; without a lease only its place.
    pub(crate) fn put_inode(
        &self,
        sent: SentAt,
        inode: &Inode,
        leased: bool,
        place: Option<(InodeId, &Bytes)>,
    ) {
        let mut state = self.state.lock();
        state.put(sent, inode, leased, place);
        state.bound(self.inodes_max());
    }

    /// Keeps an inode as a change of this mount has left it.
    pub(crate) fn put_changed(
        &self,
        sent: SentAt,
        inode: &Inode,
        leased: bool,
        place: Option<(InodeId, &Bytes)>,
    ) {
        let mut state = self.state.lock();
        let state = &mut *state;
        state.put(sent, inode, leased, place);
        state.clock += 1;
        if let Some(node) = state.nodes.get_mut(&InodeId(inode.ino)) {
            if node.changed_at > sent.0 {
                // Two changes at a time: nobody here knows which was the last.
                node.inode = None;
            }
            node.changed_at = state.clock;
        }
        state.bound(self.inodes_max());
    }

    /// Keeps an entry that was read, if the directory is leased.
    pub(crate) fn put_entry(
        &self,
        sent: SentAt,
        dir: InodeId,
        name: &Bytes,
        target: Option<Target>,
        leased: bool,
    ) {
        let mut state = self.state.lock();
        let good = leased && state.still_good(dir, sent);
        let entries = state.entries_of(dir);
        if !entries.takes(sent.0) {
            return;
        }
        if good {
            entries.learn(name, target);
            state.entries += 1;
            state.bound_entries(self.inodes_max(), dir);
        } else {
            entries.forget(name);
            // A listing under way must not count as complete without it.
            state.note_recall(dir);
        }
    }

    /// Keeps an entry this mount has made, if the directory is leased.
    pub(crate) fn put_made(
        &self,
        sent: SentAt,
        dir: InodeId,
        name: &Bytes,
        target: Target,
        leased: bool,
    ) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let good = leased && state.still_good(dir, sent);
        state.clock += 1;
        let clock = state.clock;
        let entries = state.entries_of(dir);
        if good {
            entries.learn(name, Some(target));
        } else {
            entries.forget(name);
        }
        entries.changed(clock);
        if !good {
            state.note_recall(dir);
        }
        state.entries += 1;
        state.bound_entries(self.inodes_max(), dir);
    }

    /// Keeps a page of a listing; with `complete` the listing began when `first` was sent, and
    /// this was its last page. False: it was not kept, and the listing cannot become complete.
    pub(crate) fn put_listed(
        &self,
        sent: SentAt,
        dir: InodeId,
        page: impl ExactSizeIterator<Item = (Position, Target)>,
        complete: Option<SentAt>,
    ) -> bool {
        let mut state = self.state.lock();
        if !state.still_good(dir, sent) || !state.entries_of(dir).takes(sent.0) {
            return false;
        }
        state.entries += page.len();
        let complete = complete.is_some_and(|first| state.still_good(dir, first));
        // Own changes since the first page are in it already.
        let entries = state.entries_of(dir);
        for (position, target) in page {
            entries.learn_listed(position, target);
        }
        if complete {
            entries.set_complete();
        }
        state.bound_entries(self.inodes_max(), dir);
        true
    }

    /// A directory without entries was made.
    pub(crate) fn put_empty(&self, sent: SentAt, dir: InodeId) {
        self.put_listed(sent, dir, std::iter::empty(), Some(sent));
    }

    /// What is known of a name.
    pub(crate) fn lookup(&self, dir: InodeId, name: &Bytes) -> Known {
        let state = self.state.lock();
        let entries = state.nodes.get(&dir).and_then(|node| node.dir.as_ref());
        match entries.and_then(|entries| entries.lookup(name)) {
            Some(Some(target)) => Known::Is(target.ino),
            Some(None) => Known::Absent,
            None => Known::Unknown,
        }
    }

    /// What is known to be under a name.
    pub(crate) fn target(&self, dir: InodeId, name: &Bytes) -> Option<Target> {
        let state = self.state.lock();
        state.nodes.get(&dir)?.dir.as_ref()?.lookup(name).flatten()
    }

    /// A page of the directory, if all of it is known.
    pub(crate) fn list(
        &self,
        dir: InodeId,
        after: Option<&Position>,
        limit: usize,
    ) -> Option<(Vec<(Position, Target)>, bool)> {
        let state = self.state.lock();
        state.nodes.get(&dir)?.dir.as_ref()?.list(after, limit)
    }

    /// Notes that a name had to be asked for; whether the whole directory should be fetched, which
    /// it never is with more than `most` entries. [`fetched`](Self::fetched) says that it was.
    pub(crate) fn count_miss(&self, dir: InodeId, most: u64) -> bool {
        let mut state = self.state.lock();
        let Some(node) = state.nodes.get_mut(&dir) else {
            return false;
        };
        // Without attributes nobody knows how large it is.
        let size = node.inode.as_ref().map_or(u64::MAX, |inode| inode.size);
        size <= most
            && node
                .dir
                .as_mut()
                .is_some_and(|entries| entries.count_miss(size))
    }

    /// Fetching the whole directory has ended.
    pub(crate) fn fetched(&self, dir: InodeId) {
        let mut state = self.state.lock();
        if let Some(entries) = state.nodes.get_mut(&dir).and_then(|node| node.dir.as_mut()) {
            entries.fetched();
        }
    }

    /// Attributes under a lease.
    pub(crate) fn attributes(&self, ino: InodeId) -> Option<Inode> {
        let mut state = self.state.lock();
        let node = state.nodes.get_mut(&ino)?;
        node.used = true;
        if node.leased {
            node.inode.clone()
        } else {
            None
        }
    }

    /// Whether the session is known to be told of changes of the inode.
    pub(crate) fn is_leased(&self, ino: InodeId) -> bool {
        self.state
            .lock()
            .nodes
            .get(&ino)
            .is_some_and(|node| node.leased)
    }

    /// Whether names of the directory may be kept by the kernel.
    pub(crate) fn entries_leased(&self, dir: InodeId) -> bool {
        let state = self.state.lock();
        state
            .nodes
            .get(&dir)
            .and_then(|node| node.dir.as_ref())
            .is_some_and(|dir| dir.is_leased())
    }

    /// Attributes changed by this client itself: the lease stays, the values have to be fetched.
    pub(crate) fn outdate(&self, ino: InodeId) {
        let mut state = self.state.lock();
        let state = &mut *state;
        if let Some(node) = state.nodes.get_mut(&ino) {
            state.clock += 1;
            node.changed_at = state.clock;
            node.inode = None;
        }
    }

    /// A name is gone or stands for something else; what else is known of the directory stays.
    pub(crate) fn set_entry(&self, dir: InodeId, name: &Bytes, target: Option<Target>) {
        let mut state = self.state.lock();
        let state = &mut *state;
        state.clock += 1;
        if let Some(entries) = state.nodes.get_mut(&dir).and_then(|node| node.dir.as_mut()) {
            entries.set(name, target, state.clock);
        }
        if let Some(target) = target
            && let Some(node) = state.nodes.get_mut(&target.ino)
        {
            node.place = Some((dir, name.clone()));
        }
    }

    /// Nothing is known of a name any more.
    pub(crate) fn forget_entry(&self, dir: InodeId, name: &Bytes) {
        let mut state = self.state.lock();
        let state = &mut *state;
        state.clock += 1;
        if let Some(entries) = state.nodes.get_mut(&dir).and_then(|node| node.dir.as_mut()) {
            entries.forget(name);
            entries.changed(state.clock);
            state.note_recall(dir);
        }
    }

    /// An inode is gone.
    pub(crate) fn remove(&self, ino: InodeId) {
        self.state.lock().nodes.remove(&ino);
    }

    /// Where the inode was last seen.
    pub(crate) fn hint(&self, ino: InodeId) -> Option<Hint> {
        let state = self.state.lock();
        let (parent, name) = state.nodes.get(&ino)?.place.as_ref()?;
        Some(Hint {
            parent: parent.0,
            name: name.clone(),
        })
    }

    /// The attributes' lease is taken back.
    pub(crate) fn recall_attributes(&self, ino: InodeId) {
        let mut state = self.state.lock();
        state.note_recall(ino);
        if let Some(node) = state.nodes.get_mut(&ino) {
            node.leased = false;
            node.inode = None;
        }
    }

    /// A name (or with `None` the whole directory) is taken back. Whether the kernel may know
    /// anything of it.
    pub(crate) fn recall_entries(&self, dir: InodeId, name: Option<&Bytes>) -> bool {
        let mut state = self.state.lock();
        state.note_recall(dir);
        let Some(entries) = state.nodes.get_mut(&dir).and_then(|node| node.dir.as_mut()) else {
            return false;
        };
        match name {
            Some(name) => {
                entries.forget(name);
                true
            }
            None => entries.give_back(),
        }
    }

    /// A data lease is taken back: a grant under way is void.
    pub(crate) fn note_recall(&self, ino: InodeId) {
        self.state.lock().note_recall(ino);
    }

    /// The session is gone: nothing is known any more but where things were. Returns all inodes.
    pub(crate) fn drop_all(&self) -> Vec<InodeId> {
        let mut state = self.state.lock();
        state.clock += 1;
        state.dropped = state.clock;
        for node in state.nodes.values_mut() {
            node.inode = None;
            node.leased = false;
            node.dir = None;
        }
        state.nodes.keys().copied().collect()
    }

    /// What has to be re-stated to a successor of the server. What is on its way is not kept: the
    /// successor does not know that it was given.
    pub(crate) fn held(&self) -> Vec<HeldLease> {
        let mut state = self.state.lock();
        state.clock += 1;
        state.dropped = state.clock;
        state
            .nodes
            .iter()
            .filter_map(|(ino, node)| {
                let entries = node.dir.as_ref().is_some_and(|dir| dir.is_leased());
                (node.leased || entries).then(|| HeldLease {
                    ino: ino.0,
                    attributes: node.leased,
                    entries,
                    ..HeldLease::default()
                })
            })
            .collect()
    }
}

impl State {
    fn put(&mut self, sent: SentAt, inode: &Inode, leased: bool, place: Option<(InodeId, &Bytes)>) {
        let ino = InodeId(inode.ino);
        let good = leased && self.still_good(ino, sent);
        let node = self.nodes.entry(ino).or_default();
        node.used = true;
        if let Some((parent, name)) = place {
            node.place = Some((parent, name.clone()));
        }
        if node.changed_at <= sent.0 {
            node.leased = good;
            node.inode = good.then(|| inode.clone());
        }
    }

    fn still_good(&self, ino: InodeId, sent: SentAt) -> bool {
        self.dropped <= sent.0 && self.recalled.get(&ino).is_none_or(|at| *at <= sent.0)
    }

    fn note_recall(&mut self, ino: InodeId) {
        self.clock += 1;
        let clock = self.clock;
        self.recalled.insert(ino, clock);
        if self.recalled.len() > RECALLED_MAX {
            // Without the details, everything that was sent before now counts as recalled.
            self.recalled.clear();
            self.dropped = clock;
        }
    }

    /// Forgets inodes that were not used since the last time, down to three quarters.
    fn bound(&mut self, inodes_max: usize) {
        if self.nodes.len() <= inodes_max {
            return;
        }
        let mut surplus = self.nodes.len() - inodes_max / 4 * 3;
        let mut gone = Vec::new();
        for (ino, node) in &mut self.nodes {
            if surplus == 0 {
                break;
            }
            if !std::mem::take(&mut node.used) && node.dir.is_none() {
                gone.push((*ino, node.place.take()));
                surplus -= 1;
            }
        }
        for (ino, place) in gone {
            self.nodes.remove(&ino);
            let Some((parent, name)) = place else {
                continue;
            };
            let dir = self
                .nodes
                .get_mut(&parent)
                .and_then(|node| node.dir.as_mut());
            if let Some(dir) = dir {
                dir.forget(&name);
                // A listing under way must not count as complete.
                self.note_recall(parent);
            }
        }
    }

    fn entries_of(&mut self, dir: InodeId) -> &mut Entries {
        let node = self.nodes.entry(dir).or_default();
        node.dir.get_or_insert_default().as_mut()
    }

    /// Forgets the entries of whole directories, `last` at last, while there are too many.
    fn bound_entries(&mut self, entries_max: usize, last: InodeId) {
        if self.entries <= entries_max {
            return;
        }
        let count = |node: &Node| node.dir.as_ref().map_or(0, |dir| dir.len());
        self.entries = self.nodes.values().map(count).sum();
        let mut dirs: Vec<InodeId> = self
            .nodes
            .iter()
            .filter(|(ino, node)| **ino != last && count(node) > 0)
            .map(|(ino, _)| *ino)
            .collect();
        dirs.push(last);
        for dir in dirs {
            if self.entries <= entries_max / 4 * 3 {
                break;
            }
            let Some(node) = self.nodes.get_mut(&dir) else {
                continue;
            };
            self.entries -= count(node);
            if let Some(entries) = &mut node.dir {
                entries.forget_all();
            }
            self.note_recall(dir);
        }
    }
}

/// Inodes whose last recall is remembered.
const RECALLED_MAX: usize = 10_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn target(ino: u64) -> Target {
        Target {
            ino: InodeId(ino),
            kind: 0o100_000,
        }
    }

    fn inode(ino: u64) -> Inode {
        Inode {
            ino,
            ..Inode::default()
        }
    }

    #[test]
    fn a_reply_older_than_a_recall_is_not_kept() {
        let cache = Cache::new(100);
        let sent = cache.sent_at();
        cache.recall_attributes(InodeId(5));
        cache.put_inode(sent, &inode(5), true, None);
        assert_eq!(cache.attributes(InodeId(5)), None);
        cache.put_inode(sent, &inode(6), true, None);
        assert!(
            cache.attributes(InodeId(6)).is_some(),
            "others are not touched"
        );
        cache.put_inode(cache.sent_at(), &inode(5), true, None);
        assert!(cache.attributes(InodeId(5)).is_some());
        cache.drop_all();
        assert_eq!(cache.attributes(InodeId(5)), None);
    }

    #[test]
    fn a_complete_directory_answers_misses_until_a_name_is_recalled() {
        let cache = Cache::new(100);
        let (dir, name) = (InodeId(2), Bytes::from_static(b"x"));
        assert_eq!(cache.lookup(dir, &name), Known::Unknown);
        cache.put_empty(cache.sent_at(), dir);
        assert_eq!(cache.lookup(dir, &name), Known::Absent);
        cache.set_entry(dir, &name, Some(target(9)));
        assert_eq!(cache.lookup(dir, &name), Known::Is(InodeId(9)));
        cache.recall_entries(dir, Some(&name));
        assert_eq!(cache.lookup(dir, &name), Known::Unknown);
        assert!(cache.recall_entries(dir, None), "the kernel knows names");
        assert!(!cache.recall_entries(dir, None), "given back already");
    }

    #[test]
    fn what_was_read_before_an_own_change_is_not_kept() {
        let cache = Cache::new(100);
        let (dir, name) = (InodeId(2), Bytes::from_static(b"x"));
        cache.put_empty(cache.sent_at(), dir);
        let read = cache.sent_at();
        let changed = cache.sent_at();
        let grown = Inode {
            size: 9,
            ..inode(5)
        };
        cache.put_changed(changed, &grown, true, None);
        cache.put_made(changed, dir, &name, target(5), true);
        cache.put_inode(read, &inode(5), true, None);
        cache.put_entry(read, dir, &name, None, true);
        assert_eq!(cache.attributes(InodeId(5)), Some(grown.clone()));
        assert_eq!(cache.lookup(dir, &name), Known::Is(InodeId(5)));
        cache.set_entry(dir, &name, None);
        let page = std::iter::once((Position::of(&name), target(5)));
        cache.put_listed(read, dir, page, Some(read));
        assert_eq!(
            cache.lookup(dir, &name),
            Known::Absent,
            "removed since it was listed"
        );
        cache.put_changed(changed, &inode(5), true, None);
        assert_eq!(
            cache.attributes(InodeId(5)),
            None,
            "which change was the last?"
        );
    }

    #[test]
    fn pages_make_a_whole_only_without_a_recall_between_them() {
        let cache = Cache::new(100);
        let (dir, names) = (
            InodeId(2),
            [Bytes::from_static(b"x"), Bytes::from_static(b"y")],
        );
        let page = |n: usize| std::iter::once((Position::of(&names[n]), target(n as u64)));
        let first = cache.sent_at();
        cache.put_listed(first, dir, page(0), None);
        cache.recall_entries(dir, Some(&names[0]));
        cache.put_listed(cache.sent_at(), dir, page(1), Some(first));
        assert_eq!(cache.list(dir, None, 10), None);
        assert_eq!(cache.lookup(dir, &names[0]), Known::Unknown);
        let first = cache.sent_at();
        cache.put_listed(first, dir, page(0), None);
        cache.put_listed(cache.sent_at(), dir, page(1), Some(first));
        let (listed, end) = cache.list(dir, None, 10).expect("all are known");
        assert_eq!((listed.len(), end), (2, true));
    }

    #[test]
    fn memory_is_bounded() {
        let cache = Cache::new(100);
        for ino in 10..1000 {
            let name = Bytes::from(ino.to_string());
            let place = Some((InodeId(2), &name));
            cache.put_entry(cache.sent_at(), InodeId(2), &name, Some(target(ino)), true);
            cache.put_inode(cache.sent_at(), &inode(ino), true, place);
        }
        assert!(cache.state.lock().nodes.len() <= 102);
        assert!(cache.attributes(InodeId(999)).is_some());
    }

    #[test]
    fn entries_are_bounded_and_what_is_dropped_is_not_taken_for_absent() {
        let cache = Cache::new(100);
        let name = |n: u64| Bytes::from(n.to_string());
        for dir in [2, 3] {
            cache.put_empty(cache.sent_at(), InodeId(dir));
            for n in 0..80 {
                cache.put_entry(
                    cache.sent_at(),
                    InodeId(dir),
                    &name(n),
                    Some(target(n)),
                    true,
                );
            }
        }
        assert_eq!(cache.lookup(InodeId(2), &name(1)), Known::Unknown);
        assert_eq!(cache.lookup(InodeId(3), &name(1)), Known::Is(InodeId(1)));
        assert_eq!(cache.lookup(InodeId(3), &name(99)), Known::Absent);
        assert!(
            cache.recall_entries(InodeId(2), None),
            "the kernel may still know names"
        );
    }
}
