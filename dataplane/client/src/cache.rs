//! Attributes and entries under leases.
//!
//! What a reply says is kept only if nothing of the same inode was recalled since the request was
//! sent: replies are worked on after the connection's reading task has seen a later recall.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use hither_proto::ids::InodeId;
use hither_proto::meta::{HeldLease, Hint};
use hither_proto::stored::Inode;
use parking_lot::Mutex;

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
    dir: Option<DirNode>,
    used: bool,
}

#[derive(Debug, Default)]
struct DirNode {
    leased: bool,
    complete: bool,
    entries: BTreeMap<Bytes, Option<InodeId>>,
}

#[derive(Debug, Default)]
struct State {
    nodes: BTreeMap<InodeId, Node>,
    clock: u64,
    recalled: BTreeMap<InodeId, u64>,
    /// Everything was dropped at this moment.
    dropped: u64,
}

/// The cache of one mount.
#[derive(Debug)]
pub(crate) struct Cache {
    state: Mutex<State>,
    inodes_max: usize,
}

impl Cache {
    pub(crate) fn new(inodes_max: usize) -> Self {
        Self {
            state: Mutex::default(),
            inodes_max,
        }
    }

    /// To be taken before a request is sent.
    pub(crate) fn sent_at(&self) -> SentAt {
        SentAt(self.state.lock().clock)
    }

    /// Whether what a reply gives of this inode may be kept.
    pub(crate) fn still_good(&self, ino: InodeId, sent: SentAt) -> bool {
        self.state.lock().still_good(ino, sent)
    }

    /// Keeps an inode; without a lease only its place.
    pub(crate) fn put_inode(
        &self,
        sent: SentAt,
        inode: &Inode,
        leased: bool,
        place: Option<(InodeId, &Bytes)>,
    ) -> bool {
        let mut state = self.state.lock();
        let ino = InodeId(inode.ino);
        let good = leased && state.still_good(ino, sent);
        let node = state.nodes.entry(ino).or_default();
        node.used = true;
        if let Some((parent, name)) = place {
            node.place = Some((parent, name.clone()));
        }
        node.leased = good;
        node.inode = good.then(|| inode.clone());
        state.bound(self.inodes_max);
        good
    }

    /// Keeps an entry if the directory is leased.
    pub(crate) fn put_entry(
        &self,
        sent: SentAt,
        dir: InodeId,
        name: &Bytes,
        ino: Option<InodeId>,
        leased: bool,
    ) -> bool {
        let mut state = self.state.lock();
        let good = leased && state.still_good(dir, sent);
        let entries = state
            .nodes
            .entry(dir)
            .or_default()
            .dir
            .get_or_insert_default();
        if good {
            entries.leased = true;
            entries.entries.insert(name.clone(), ino);
        } else {
            entries.entries.remove(name);
            entries.complete = false;
        }
        good
    }

    /// A whole listing is known.
    pub(crate) fn put_complete(&self, sent: SentAt, dir: InodeId, leased: bool) {
        let mut state = self.state.lock();
        if leased && state.still_good(dir, sent) {
            let entries = state
                .nodes
                .entry(dir)
                .or_default()
                .dir
                .get_or_insert_default();
            entries.leased = true;
            entries.complete = true;
        }
    }

    /// What is known of a name.
    pub(crate) fn lookup(&self, dir: InodeId, name: &Bytes) -> Known {
        let state = self.state.lock();
        let Some(entries) = state.nodes.get(&dir).and_then(|node| node.dir.as_ref()) else {
            return Known::Unknown;
        };
        if !entries.leased {
            return Known::Unknown;
        }
        match entries.entries.get(name) {
            Some(Some(ino)) => Known::Is(*ino),
            Some(None) => Known::Absent,
            None if entries.complete => Known::Absent,
            None => Known::Unknown,
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
            .is_some_and(|dir| dir.leased)
    }

    /// Attributes changed by this client itself: the lease stays, the values have to be fetched.
    pub(crate) fn outdate(&self, ino: InodeId) {
        if let Some(node) = self.state.lock().nodes.get_mut(&ino) {
            node.inode = None;
        }
    }

    /// A name is gone or stands for something else; what else is known of the directory stays.
    pub(crate) fn set_entry(&self, dir: InodeId, name: &Bytes, ino: Option<InodeId>) {
        let mut state = self.state.lock();
        let known = state.nodes.get_mut(&dir).and_then(|node| node.dir.as_mut());
        if let Some(entries) = known
            && entries.leased
        {
            entries.entries.insert(name.clone(), ino);
        }
        if let Some(ino) = ino
            && let Some(node) = state.nodes.get_mut(&ino)
        {
            node.place = Some((dir, name.clone()));
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

    /// A name (or with `None` the whole directory) is taken back; the names that were known.
    pub(crate) fn recall_entries(&self, dir: InodeId, name: Option<&Bytes>) -> Vec<Bytes> {
        let mut state = self.state.lock();
        state.note_recall(dir);
        let Some(entries) = state.nodes.get_mut(&dir).and_then(|node| node.dir.as_mut()) else {
            return Vec::new();
        };
        match name {
            Some(name) => {
                entries.entries.remove(name);
                entries.complete = false;
                vec![name.clone()]
            }
            None => {
                entries.leased = false;
                entries.complete = false;
                std::mem::take(&mut entries.entries).into_keys().collect()
            }
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

    /// What has to be re-stated to a successor of the server.
    pub(crate) fn held(&self) -> Vec<HeldLease> {
        let state = self.state.lock();
        state
            .nodes
            .iter()
            .filter_map(|(ino, node)| {
                let entries = node.dir.as_ref().is_some_and(|dir| dir.leased);
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
                dir.entries.remove(&name);
                dir.complete = false;
            }
        }
    }
}

/// Inodes whose last recall is remembered.
const RECALLED_MAX: usize = 10_000;

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(!cache.put_inode(sent, &inode(5), true, None));
        assert_eq!(cache.attributes(InodeId(5)), None);
        assert!(
            cache.put_inode(sent, &inode(6), true, None),
            "others are not touched"
        );
        assert!(cache.put_inode(cache.sent_at(), &inode(5), true, None));
        assert!(cache.attributes(InodeId(5)).is_some());
        cache.drop_all();
        assert_eq!(cache.attributes(InodeId(5)), None);
    }

    #[test]
    fn a_complete_directory_answers_misses_until_a_name_is_recalled() {
        let cache = Cache::new(100);
        let (dir, name) = (InodeId(2), Bytes::from_static(b"x"));
        assert_eq!(cache.lookup(dir, &name), Known::Unknown);
        cache.put_complete(cache.sent_at(), dir, true);
        assert_eq!(cache.lookup(dir, &name), Known::Absent);
        cache.set_entry(dir, &name, Some(InodeId(9)));
        assert_eq!(cache.lookup(dir, &name), Known::Is(InodeId(9)));
        cache.recall_entries(dir, Some(&name));
        assert_eq!(cache.lookup(dir, &name), Known::Unknown);
        assert_eq!(cache.recall_entries(dir, None), Vec::<Bytes>::new());
    }

    #[test]
    fn memory_is_bounded() {
        let cache = Cache::new(100);
        for ino in 10..1000 {
            let name = Bytes::from(ino.to_string());
            let place = Some((InodeId(2), &name));
            cache.put_entry(cache.sent_at(), InodeId(2), &name, Some(InodeId(ino)), true);
            cache.put_inode(cache.sent_at(), &inode(ino), true, place);
        }
        assert!(cache.state.lock().nodes.len() <= 102);
        assert!(cache.attributes(InodeId(999)).is_some());
    }
}
