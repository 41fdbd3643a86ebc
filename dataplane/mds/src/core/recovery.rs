//! After a takeover: known sessions come back, say what they hold, then resend what may be lost.
//!
//! First everybody states leases and open inodes, so that a resent change finds them; then changes
//! are resent; then all others are served. The grace bounds the first two steps: what a session that
//! is missing then may hold (descriptors, write leases, locks) stays protected until it comes back
//! or is evicted, and changes it resends later run as ordinary ones.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use hither_proto::ids::{InodeId, SessionId};
use hither_proto::meta::{HeldLease, Recall, Reclaim};
use hither_proto::status::Status;

use super::batch::Object;
use super::event::{Answer, Effect, Refusal, Token};
use super::lease::{Data, Exclusive, Wanted};
use super::run::{Blocker, Core, Stop, Work};
use super::session::no_session;
use hither_proto::ids::LeaseId;

/// How far it has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// Leases and open inodes are stated.
    Stating,
    /// Changes are resent.
    Replaying,
    /// Everybody is served; some session is still missing.
    Serving,
}

/// After a takeover: who has not come back yet.
#[derive(Debug)]
pub(crate) struct Recovery {
    /// Known sessions that have not stated and resent everything.
    pub(crate) missing: BTreeSet<SessionId>,
    /// Of these, the ones that have not stated everything they hold.
    unstated: BTreeSet<SessionId>,
    /// Of the missing, the ones that are back and at it.
    returned: BTreeSet<SessionId>,
    /// Inodes the missing have said they hold open.
    open: BTreeMap<SessionId, BTreeSet<InodeId>>,
    stage: Stage,
    grace_ends: Duration,
    /// Nobody who is back holds everybody up longer than this.
    patience_ends: Duration,
    /// Lowest inode number of this process's own: a missing session holds nothing above.
    first_ino: Option<u64>,
    /// Changed since everybody is served: what a late session has cached of these is void.
    changed: BTreeSet<InodeId>,
}

impl Recovery {
    /// Waits for these sessions; `None` when there are none.
    pub(crate) fn of(
        missing: BTreeSet<SessionId>,
        now: Duration,
        grace: Duration,
        session_lease: Duration,
    ) -> Option<Self> {
        (!missing.is_empty()).then(|| Self {
            unstated: missing.clone(),
            missing,
            returned: BTreeSet::new(),
            open: BTreeMap::new(),
            stage: Stage::Stating,
            grace_ends: now + grace,
            patience_ends: now + session_lease,
            first_ino: None,
            changed: BTreeSet::new(),
        })
    }

    /// Whether the inode was there before the takeover.
    fn is_old(&self, ino: InodeId) -> bool {
        self.first_ino.is_none_or(|first| ino.0 < first)
    }
}

impl Core {
    /// What a request has to wait for, if anything.
    pub(crate) fn recovery_blocker(&mut self, session: SessionId, replay: bool) -> Option<Blocker> {
        if replay {
            // It has nothing more to state.
            self.stated(session);
        }
        let stage = self.recovery.as_ref()?.stage;
        match (stage, replay) {
            (Stage::Stating, true) => Some(Blocker::Stated),
            (Stage::Stating | Stage::Replaying, false) => Some(Blocker::Recovered),
            (Stage::Replaying, true) | (Stage::Serving, _) => None,
        }
    }

    /// Whether the session has still to state what it holds; notes that it is back.
    pub(crate) fn note_return(&mut self, id: SessionId) -> bool {
        let Some(recovery) = &mut self.recovery else {
            return false;
        };
        let missing = recovery.missing.contains(&id);
        if missing {
            recovery.returned.insert(id);
        }
        missing
    }

    pub(crate) fn is_missing(&self, id: SessionId) -> bool {
        let recovery = self.recovery.as_ref();
        recovery.is_some_and(|recovery| recovery.missing.contains(&id))
    }

    pub(crate) fn reclaim(&mut self, token: Token, id: SessionId, reclaim: Reclaim) {
        let session = self.sessions.get_mut(&id);
        let Some(session) = session.filter(|session| !session.evicting) else {
            return self.refuse(token, no_session());
        };
        session.renewed = self.now;
        if !self.note_return(id) {
            let text = "nothing is being re-stated now: drop caches and go on";
            return self.refuse(token, Refusal::status(Status::BAD_REQUEST, text));
        }
        for lease in &reclaim.leases {
            self.reclaim_lease(id, lease);
        }
        for ino in reclaim.open {
            let ino = InodeId(ino);
            let leases = self.leases.of_mut(ino);
            if !leases.open.contains(&id) {
                leases.open.push(id);
            }
            if let Some(recovery) = &mut self.recovery {
                recovery.open.entry(id).or_default().insert(ino);
            }
        }
        if reclaim.done {
            self.stated(id);
            self.recovered(id);
        }
        self.answer(token, Answer::Done);
    }

    fn reclaim_lease(&mut self, id: SessionId, lease: &HeldLease) {
        let ino = InodeId(lease.ino);
        if lease.entries {
            self.leases.restate_entries(ino, id);
        }
        let known = self.leases.of(ino);
        if lease.attributes && !known.is_some_and(|leases| leases.attributes.contains(&id)) {
            self.leases.note_attributes(ino, id);
        }
        let leases = self.leases.of_mut(ino);
        if lease.exclusive {
            let foreign = matches!(&leases.data, Data::Exclusive(held) if held.session != id);
            if foreign {
                tracing::error!(session = %id, %ino, "two sessions claim a file for themselves");
            } else {
                leases.data = Data::Exclusive(Exclusive {
                    session: id,
                    lease: LeaseId(lease.data_lease),
                    reserved: Vec::new(),
                });
            }
        } else if lease.data_lease != 0 {
            match &mut leases.data {
                Data::Shared(holders) if !holders.contains(&id) => holders.push(id),
                Data::None => leases.data = Data::Shared(std::iter::once(id).collect()),
                Data::Shared(_) | Data::Exclusive(_) => {}
            }
        }
        self.leases.prune(ino);
        let changed = self
            .recovery
            .as_ref()
            .is_some_and(|recovery| recovery.changed.contains(&ino));
        if changed && (lease.attributes || lease.entries) {
            let recall = Recall {
                ino: ino.0,
                attributes: lease.attributes,
                entries: lease.entries,
                ..Recall::default()
            };
            self.recall(Wanted {
                session: id,
                recall,
            });
        }
    }

    /// The session has stated everything it holds.
    fn stated(&mut self, id: SessionId) {
        let Some(recovery) = &mut self.recovery else {
            return;
        };
        if !recovery.unstated.remove(&id) {
            return;
        }
        let open = recovery.open.remove(&id).unwrap_or_default();
        let orphans = self
            .sessions
            .get(&id)
            .map(|session| session.orphans.clone());
        for ino in orphans.unwrap_or_default() {
            if open.contains(&ino) {
                // It may not know that the inode has lost its last name.
                let recall = Recall {
                    ino: ino.0,
                    attributes: true,
                    unlinked: true,
                    ..Recall::default()
                };
                self.recall(Wanted {
                    session: id,
                    recall,
                });
            } else {
                self.spawn(Work::RemoveOrphan { ino, session: id });
            }
        }
        self.advance_recovery();
    }

    /// `id` is back with everything (or gone).
    pub(crate) fn recovered(&mut self, id: SessionId) {
        if let Some(recovery) = &mut self.recovery {
            recovery.missing.remove(&id);
            recovery.unstated.remove(&id);
            recovery.returned.remove(&id);
            recovery.open.remove(&id);
            self.advance_recovery();
        }
    }

    /// Goes on to the next stage when nobody has to be waited for any more.
    pub(crate) fn advance_recovery(&mut self) {
        let Some(recovery) = &mut self.recovery else {
            return;
        };
        let patient = self.now < recovery.patience_ends;
        let grace = self.now < recovery.grace_ends;
        let waits = |for_whom: &BTreeSet<SessionId>, returned: &BTreeSet<SessionId>| {
            let back = for_whom.intersection(returned).next().is_some();
            !for_whom.is_empty() && (grace || (patient && back))
        };
        if recovery.stage == Stage::Stating && !waits(&recovery.unstated, &recovery.returned) {
            recovery.stage = Stage::Replaying;
            self.wake(&Blocker::Stated);
            return self.advance_recovery();
        }
        if recovery.stage == Stage::Replaying && !waits(&recovery.missing, &recovery.returned) {
            recovery.stage = Stage::Serving;
            self.wake(&Blocker::Recovered);
            return self.advance_recovery();
        }
        if recovery.stage == Stage::Serving {
            let first = recovery.first_ino.unwrap_or(u64::MAX);
            let all_back = recovery.missing.is_empty();
            self.leases.unsure_below = (!all_back).then_some(InodeId(first));
            if all_back {
                self.recovery = None;
                self.wake(&Blocker::Returned);
                self.spawn(Work::SweepStrays);
            }
        } else {
            let ends = recovery.grace_ends.max(self.now + RECHECK);
            self.effects.push(Effect::WakeAt(ends));
        }
    }

    /// Numbers from here on are this process's own.
    pub(crate) fn note_first_ino(&mut self, first: u64) {
        if let Some(recovery) = &mut self.recovery {
            recovery.first_ino.get_or_insert(first);
        }
    }

    /// Notes a change a late session does not know of.
    pub(crate) fn note_change(&mut self, object: &Object) {
        if let Some(recovery) = &mut self.recovery
            && recovery.stage == Stage::Serving
        {
            let (Object::Entry(ino, _) | Object::Head(ino) | Object::Inode(ino)) = object;
            recovery.changed.insert(*ino);
        }
    }

    /// Whether a predecessor has given the number out.
    pub(crate) fn is_before_takeover(&self, ino: InodeId) -> bool {
        let recovery = self.recovery.as_ref();
        recovery.is_some_and(|recovery| recovery.is_old(ino))
    }

    /// Sessions that may hold a descriptor of the inode and have not said so yet.
    pub(crate) fn possible_holders(&self, ino: InodeId) -> Vec<SessionId> {
        match &self.recovery {
            Some(recovery) if recovery.is_old(ino) => recovery.unstated.iter().copied().collect(),
            _ => Vec::new(),
        }
    }

    /// Makes sure that no missing session may hold a data lease that stands in the way.
    pub(crate) fn need_known_holders(&self, ino: InodeId, exclusive: bool) -> Result<(), Stop> {
        let Some(recovery) = &self.recovery else {
            return Ok(());
        };
        let known = match self.leases.of(ino).map(|leases| &leases.data) {
            // Beside a writer there is nobody; beside a reader no writer.
            Some(Data::Exclusive(_)) => true,
            Some(Data::Shared(_)) => !exclusive,
            Some(Data::None) | None => false,
        };
        if known || recovery.stage < Stage::Serving || !recovery.is_old(ino) {
            return Ok(());
        }
        Err(Stop::Block(Blocker::Returned))
    }
}

/// Pause between looks at sessions that are back and not done.
const RECHECK: Duration = Duration::from_millis(100);
