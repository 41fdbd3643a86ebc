//! Who caches what, and recalls.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use hither_proto::ids::{InodeId, LeaseId, SessionId};
use hither_proto::meta::Recall;
use hither_proto::stored::ChunkRef;
use smallvec::SmallVec;

use super::held::HeldTable;

/// Data lease of a file.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) enum Data {
    #[default]
    None,
    Shared(SmallVec<[SessionId; 2]>),
    Exclusive(Exclusive),
}

/// An exclusive data lease.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Exclusive {
    pub(crate) session: SessionId,
    pub(crate) lease: LeaseId,
    /// References given out under the lease and not reported as written yet.
    pub(crate) reserved: Vec<ChunkRef>,
}

/// A lease on a directory's entries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EntriesHeld {
    pub(crate) session: SessionId,
    /// Recalls of single names since the session last looked.
    conflicts: u32,
    /// When it was last given, in order: a name that was given back may be known again since.
    given: u64,
}

impl EntriesHeld {
    fn new(session: SessionId, given: u64) -> Self {
        Self {
            session,
            conflicts: 0,
            given,
        }
    }
}

/// A name a session has given back, for the task that asked for it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GivenName {
    session: SessionId,
    dir: InodeId,
    name: Bytes,
    given: u64,
}

/// Leases on one inode.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    /// Sessions that cache the attributes.
    pub(crate) attributes: SmallVec<[SessionId; 2]>,
    /// Sessions that cache entries of the directory.
    pub(crate) entries: Vec<EntriesHeld>,
    pub(crate) data: Data,
    /// Sessions known to hold a descriptor although they hold no lease.
    pub(crate) open: SmallVec<[SessionId; 1]>,
    /// Recalls under way: nothing new is given meanwhile.
    pub(crate) recalling: u32,
    /// Sessions that have pages to store from before they gave the file back: they come first.
    pub(crate) pages: SmallVec<[SessionId; 1]>,
    /// An exclusive lease ended uncleanly and chunks are being sealed, or will be: nothing is given
    /// until all is done.
    pub(crate) sealing: bool,
    /// A trim is under way.
    pub(crate) trimming: bool,
}

impl Leases {
    fn is_unused(&self) -> bool {
        self.attributes.is_empty()
            && self.entries.is_empty()
            && self.data == Data::None
            && self.open.is_empty()
            && self.recalling == 0
            && self.pages.is_empty()
            && !self.sealing
            && !self.trimming
    }

    /// Whether the session caches attributes or entries of the inode.
    fn caches(&self, session: SessionId) -> bool {
        self.attributes.contains(&session)
            || self.entries.iter().any(|held| held.session == session)
    }

    /// Whether the session has the file open, or may write it.
    fn uses(&self, session: SessionId) -> bool {
        self.open.contains(&session)
            || matches!(&self.data, Data::Exclusive(held) if held.session == session)
    }

    /// Whether the session holds anything that keeps it informed of the inode.
    pub(crate) fn informs(&self, session: SessionId) -> bool {
        self.attributes.contains(&session)
            || self.open.contains(&session)
            || match &self.data {
                Data::None => false,
                Data::Shared(holders) => holders.contains(&session),
                Data::Exclusive(exclusive) => exclusive.session == session,
            }
    }
}

/// Every inode a client knows has one.
const _: () = assert!(size_of::<Leases>() <= 152);

/// One thing to be given back by one session.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Wanted {
    pub(crate) session: SessionId,
    pub(crate) recall: Recall,
}

/// All leases of a rank.
#[derive(Debug, Default)]
pub(crate) struct LeaseTable {
    by_inode: BTreeMap<InodeId, Box<Leases>>,
    /// Where the search for leases to be asked back goes on.
    room_hand: InodeId,
    /// Leases on entries given so far.
    given: u64,
    /// While a session of before a takeover is missing: below, an unknown writer may be about.
    pub(crate) unsure_below: Option<InodeId>,
    /// What each session holds, oldest first.
    held: HeldTable,
}

impl LeaseTable {
    /// A table in which sessions hold leases on so many inodes at most.
    pub(crate) fn new(session_inodes_max: usize) -> Self {
        Self {
            held: HeldTable::new(session_inodes_max),
            ..Self::default()
        }
    }

    pub(crate) fn of(&self, ino: InodeId) -> Option<&Leases> {
        self.by_inode.get(&ino).map(AsRef::as_ref)
    }

    pub(crate) fn of_mut(&mut self, ino: InodeId) -> &mut Leases {
        self.by_inode.entry(ino).or_default()
    }

    pub(crate) fn prune(&mut self, ino: InodeId) {
        if self
            .by_inode
            .get(&ino)
            .is_some_and(|leases| leases.is_unused())
        {
            self.by_inode.remove(&ino);
        }
    }

    /// Forgets all leases on an inode that is gone; recalls and seals under way still end.
    pub(crate) fn clear(&mut self, ino: InodeId) {
        if let Some(leases) = self.by_inode.get_mut(&ino) {
            let attributes = leases.attributes.iter().copied();
            let entries = leases.entries.iter().map(|held| held.session);
            let caching: BTreeSet<SessionId> = attributes.chain(entries).collect();
            for session in caching {
                self.held.note_given_back(session, ino);
            }
            **leases = Leases {
                recalling: leases.recalling,
                sealing: leases.sealing,
                ..Leases::default()
            };
        }
        self.prune(ino);
    }

    pub(crate) fn holds_any(&self, ino: InodeId) -> bool {
        self.by_inode.contains_key(&ino)
    }

    pub(crate) fn inodes_of(&self, session: SessionId) -> Vec<InodeId> {
        self.by_inode
            .iter()
            .filter(|(_, leases)| {
                leases.informs(session) || leases.entries.iter().any(|held| held.session == session)
            })
            .map(|(ino, _)| *ino)
            .collect()
    }

    /// Gives the attributes lease unless somebody writes the file or a recall is under way.
    pub(crate) fn give_attributes(&mut self, ino: InodeId, session: SessionId) -> bool {
        if self.unsure_below.is_some_and(|below| ino < below) {
            return false;
        }
        let leases = self.of_mut(ino);
        let foreign_writer = matches!(&leases.data, Data::Exclusive(e) if e.session != session);
        let refused = leases.recalling > 0 || leases.sealing || foreign_writer;
        let new = !leases.attributes.contains(&session);
        if refused || (new && self.held.is_behind(session)) {
            self.prune(ino);
            return false;
        }
        if new {
            self.note_attributes(ino, session);
        }
        true
    }

    /// The session has the attributes lease from now on.
    pub(crate) fn note_attributes(&mut self, ino: InodeId, session: SessionId) {
        let leases = self.of_mut(ino);
        let known = leases.entries.iter().any(|held| held.session == session);
        leases.attributes.push(session);
        if !known {
            self.held.note(session, ino);
        }
    }

    /// Takes over a lease on entries that a predecessor had given.
    pub(crate) fn restate_entries(&mut self, dir: InodeId, session: SessionId) {
        let leases = self.of_mut(dir);
        if !leases.entries.iter().any(|held| held.session == session) {
            let known = leases.attributes.contains(&session);
            leases.entries.push(EntriesHeld::new(session, 0));
            if !known {
                self.held.note(session, dir);
            }
        }
    }

    /// Gives the lease on a directory's entries unless a recall is under way.
    pub(crate) fn give_entries(&mut self, dir: InodeId, session: SessionId) -> bool {
        self.given += 1;
        let given = self.given;
        let behind = self.held.is_behind(session);
        let leases = self.of_mut(dir);
        let known = leases.attributes.contains(&session);
        if leases.recalling > 0 || (behind && !known) {
            self.prune(dir);
            return false;
        }
        match leases
            .entries
            .iter_mut()
            .find(|held| held.session == session)
        {
            Some(held) => {
                held.conflicts = 0;
                held.given = given;
            }
            None => {
                leases.entries.push(EntriesHeld::new(session, given));
                if !known {
                    self.held.note(session, dir);
                }
            }
        }
        true
    }

    /// Leases that only keep an inode in memory, to be asked back: up to `count`, each time the next
    /// ones. Left out is what a session holds of which `asked_max` are asked already.
    pub(crate) fn for_room(
        &mut self,
        count: usize,
        asked_max: usize,
        asked: &mut BTreeMap<SessionId, usize>,
    ) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        if count == 0 {
            return wanted;
        }
        let mut looked = 0;
        let begin = self.room_hand;
        let after = self.by_inode.range(begin..);
        for (ino, leases) in after.chain(self.by_inode.range(..begin)) {
            looked += 1;
            if wanted.len() >= count || looked > ROOM_LOOK_MAX {
                break;
            }
            self.room_hand = InodeId(ino.0 + 1);
            let plain = leases.entries.is_empty()
                && leases.data == Data::None
                && leases.open.is_empty()
                && leases.recalling == 0
                && !leases.sealing
                && !leases.trimming;
            let is_slow = |session| asked.get(session).is_some_and(|asked| *asked >= asked_max);
            if plain && !leases.attributes.iter().any(is_slow) {
                for session in &leases.attributes {
                    *asked.entry(*session).or_default() += 1;
                }
                wanted.extend(leases.attributes.iter().map(|session| Wanted {
                    session: *session,
                    recall: Recall {
                        ino: ino.0,
                        attributes: true,
                        ..Recall::default()
                    },
                }));
            }
        }
        wanted
    }

    /// Whether a session holds more than its bound.
    pub(crate) fn has_surplus(&self) -> bool {
        self.held.has_surplus()
    }

    /// What sessions hold beyond their bound, oldest first, to be asked back: up to `count`, and of
    /// each session until `asked_max` are. Files that are open or written are left to their sessions.
    pub(crate) fn surplus(
        &mut self,
        count: usize,
        asked_max: usize,
        asked: &BTreeMap<SessionId, usize>,
    ) -> Vec<Wanted> {
        let mut held = std::mem::take(&mut self.held);
        let of_session = |session| asked.get(&session).copied().unwrap_or_default();
        let wanted = held.ask_back(count, asked_max, of_session, |session, ino| {
            let leases = self.of(ino);
            leases.is_none_or(|leases| leases.recalling > 0 || leases.uses(session))
        });
        self.held = held;
        let mut recalls = Vec::with_capacity(wanted.len());
        for (session, ino) in wanted {
            let Some(leases) = self.of(ino) else { continue };
            let shared = matches!(&leases.data, Data::Shared(of) if of.contains(&session));
            recalls.push(Wanted {
                session,
                recall: Recall {
                    ino: ino.0,
                    attributes: leases.attributes.contains(&session),
                    entries: leases.entries.iter().any(|held| held.session == session),
                    data_lease: u64::from(shared),
                    ..Recall::default()
                },
            });
        }
        recalls
    }

    /// What must be given back before attributes of `ino` change for `session`.
    pub(crate) fn attribute_holders(
        &self,
        ino: InodeId,
        session: SessionId,
        unlinked: bool,
    ) -> Vec<Wanted> {
        let Some(leases) = self.of(ino) else {
            return Vec::new();
        };
        let mut holders: Vec<SessionId> = leases.attributes.to_vec();
        if unlinked {
            match &leases.data {
                Data::None => {}
                Data::Shared(shared) => holders.extend(shared),
                Data::Exclusive(exclusive) => holders.push(exclusive.session),
            }
        }
        holders.sort_unstable();
        holders.dedup();
        holders.retain(|holder| *holder != session && !(unlinked && leases.open.contains(holder)));
        holders
            .into_iter()
            .map(|session| Wanted {
                session,
                recall: Recall {
                    ino: ino.0,
                    attributes: true,
                    unlinked,
                    ..Recall::default()
                },
            })
            .collect()
    }

    /// What must be given back before the entry `name` of `dir` changes for `session`.
    pub(crate) fn entry_holders(
        &self,
        dir: InodeId,
        name: &Bytes,
        session: SessionId,
        given_back: &[GivenName],
    ) -> Vec<Wanted> {
        let Some(leases) = self.of(dir) else {
            return Vec::new();
        };
        leases
            .entries
            .iter()
            .filter(|held| {
                let given = GivenName {
                    session: held.session,
                    dir,
                    name: name.clone(),
                    given: held.given,
                };
                held.session != session && !given_back.contains(&given)
            })
            .map(|held| {
                // A holder that looks no more loses the whole directory, so that later changes
                // need no recall.
                let whole = held.conflicts >= NAME_RECALLS_MAX;
                let name = if whole { Bytes::new() } else { name.clone() };
                Wanted {
                    session: held.session,
                    recall: Recall {
                        ino: dir.0,
                        entries: true,
                        name,
                        ..Recall::default()
                    },
                }
            })
            .collect()
    }

    /// What must be given back before `session` may read (or write) the file's data.
    pub(crate) fn data_holders(
        &self,
        ino: InodeId,
        session: SessionId,
        exclusive: bool,
    ) -> Vec<Wanted> {
        let Some(leases) = self.of(ino) else {
            return Vec::new();
        };
        let recall = |holder: SessionId, lease: LeaseId, keep_shared: bool| Wanted {
            session: holder,
            recall: Recall {
                ino: ino.0,
                data_lease: lease.0.max(1),
                keep_shared,
                ..Recall::default()
            },
        };
        match &leases.data {
            Data::Exclusive(held) if held.session != session => {
                vec![recall(held.session, held.lease, !exclusive)]
            }
            Data::Shared(holders) if exclusive => holders
                .iter()
                .filter(|holder| **holder != session)
                .map(|holder| recall(*holder, LeaseId(0), false))
                .collect(),
            _ => Vec::new(),
        }
    }

    /// Notes what an acknowledged recall has given back; a single name is for whoever asked to
    /// remember.
    pub(crate) fn given_back(
        &mut self,
        session: SessionId,
        recall: &Recall,
        open: bool,
    ) -> Option<GivenName> {
        let mut given = None;
        let ino = InodeId(recall.ino);
        let leases = self.of_mut(ino);
        let cached = leases.caches(session);
        if recall.attributes {
            leases.attributes.retain(|holder| *holder != session);
        }
        if recall.entries {
            if recall.name.is_empty() {
                leases.entries.retain(|held| held.session != session);
            } else if let Some(held) = leases.entries.iter_mut().find(|h| h.session == session) {
                held.conflicts += 1;
                given = Some(GivenName {
                    session,
                    dir: ino,
                    name: recall.name.clone(),
                    given: held.given,
                });
            }
        }
        let shared = recall.data_lease != 0 && !recall.keep_shared && !recall.report_only;
        if let Data::Shared(holders) = &mut leases.data
            && shared
        {
            holders.retain(|holder| *holder != session);
            if holders.is_empty() {
                leases.data = Data::None;
            }
        }
        if open && !leases.open.contains(&session) {
            leases.open.push(session);
        }
        if cached && !leases.caches(session) {
            self.held.note_given_back(session, ino);
        }
        self.prune(ino);
        given
    }

    /// Forgets everything a session holds; returns the files it held exclusively.
    pub(crate) fn forget_session(&mut self, session: SessionId) -> Vec<(InodeId, Exclusive)> {
        let mut exclusive = Vec::new();
        self.held.forget(session);
        for ino in self.inodes_of(session) {
            let leases = self.of_mut(ino);
            leases.attributes.retain(|holder| *holder != session);
            leases.entries.retain(|held| held.session != session);
            leases.open.retain(|holder| *holder != session);
            match &mut leases.data {
                Data::Shared(holders) => {
                    holders.retain(|holder| *holder != session);
                    if holders.is_empty() {
                        leases.data = Data::None;
                    }
                }
                Data::Exclusive(held) if held.session == session => {
                    exclusive.push((ino, held.clone()));
                    leases.data = Data::None;
                }
                Data::Exclusive(_) | Data::None => {}
            }
            self.prune(ino);
        }
        exclusive
    }

    /// Counts of a session, for people: all inodes, exclusively held files.
    pub(crate) fn counts(&self, session: SessionId) -> (u64, u64) {
        let mut all = 0;
        let mut exclusive = 0;
        for ino in self.inodes_of(session) {
            all += 1;
            let held = self.of(ino).map(|leases| &leases.data);
            exclusive +=
                u64::from(matches!(held, Some(Data::Exclusive(e)) if e.session == session));
        }
        (all, exclusive)
    }
}

/// Recalls of single names of a directory after which a holder that did not look again loses it.
const NAME_RECALLS_MAX: u32 = 16;
/// Inodes looked at in one search for leases to be asked back.
const ROOM_LOOK_MAX: usize = 100_000;
