//! Sessions: their life, the results kept for resent requests, what becomes of what they held.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use hither_proto::ids::{BatchNumber, ChunkId, InodeId, RequestNumber, SessionId};
use hither_proto::meta::{SessionInfo, SessionOpen, SessionOpenReply};
use hither_proto::status::Status;
use hither_proto::stored::SessionState;
use prost::Message;

use super::event::{Answer, Counter, Effect, Refusal, SealChunk, Token};
use super::lease::Data;
use super::requests::KeptReply;
use super::run::{Core, Task, TaskId, Work};
use crate::keys;

/// A client's session.
#[derive(Debug, Default)]
pub(crate) struct Session {
    pub(crate) host: String,
    pub(crate) mount_point: String,
    pub(crate) zone: String,
    /// Time of the last sign of life.
    pub(crate) renewed: Duration,
    /// Results of changing requests the client may resend.
    pub(crate) replies: BTreeMap<RequestNumber, KeptReply>,
    /// Pages of kept results that differ from what is stored.
    pub(crate) dirty_pages: BTreeSet<u64>,
    /// What is stored beside the results differs.
    pub(crate) dirty: bool,
    /// Numbers below were answered, and the client knows: they never come again.
    pub(crate) acked_below: u64,
    /// Requests that are being carried out.
    pub(crate) running: BTreeMap<RequestNumber, TaskId>,
    /// Unlinked inodes the session holds open.
    pub(crate) orphans: BTreeSet<InodeId>,
    /// Last batch with a change of the session.
    pub(crate) last_batch: BatchNumber,
    /// It ran out and is being fenced: nothing is served any more.
    pub(crate) evicting: bool,
}

impl Session {
    /// Takes in a stored part: the session itself, or a page of its results.
    pub(crate) fn restore(&mut self, state: &SessionState) {
        for stored in &state.replies {
            let kept = KeptReply {
                stored: *stored,
                ..KeptReply::default()
            };
            self.replies.insert(RequestNumber(stored.number), kept);
        }
        if state.page_plus_one != 0 {
            return;
        }
        self.host.clone_from(&state.host);
        self.mount_point.clone_from(&state.mount_point);
        self.zone.clone_from(&state.zone);
        self.orphans = state.orphans.iter().map(|ino| InodeId(*ino)).collect();
        // Results that stand in the record itself move to pages with the next change.
        let pages = state.replies.iter().map(|stored| page_of(stored.number));
        self.dirty_pages.extend(pages);
    }

    fn state(&self, session: SessionId) -> SessionState {
        SessionState {
            session: session.0,
            host: self.host.clone(),
            mount_point: self.mount_point.clone(),
            zone: self.zone.clone(),
            orphans: self.orphans.iter().map(|ino| ino.0).collect(),
            ..SessionState::default()
        }
    }

    /// A page of results; `None`: there are none.
    fn page(&self, session: SessionId, page: u64) -> Option<SessionState> {
        let first = page * PAGE_REPLIES;
        let numbers = RequestNumber(first)..RequestNumber(first.saturating_add(PAGE_REPLIES));
        let replies: Vec<_> = self
            .replies
            .range(numbers)
            .map(|(_, kept)| kept.stored)
            .collect();
        (!replies.is_empty()).then(|| SessionState {
            session: session.0,
            replies,
            page_plus_one: page + 1,
            ..SessionState::default()
        })
    }

    /// Forgets results below the lowest number the client still awaits.
    pub(crate) fn acknowledge(&mut self, below: u64) {
        if below > self.acked_below {
            self.acked_below = below;
            let kept = self.replies.split_off(&RequestNumber(below));
            // Only whole pages are taken out of the store: what remains of others does no harm.
            let first_kept = page_of(below);
            let gone = std::mem::replace(&mut self.replies, kept);
            let gone = gone.keys().map(|number| page_of(number.0));
            self.dirty_pages
                .extend(gone.filter(|page| *page < first_kept));
        }
    }
}

/// Something that has to happen before an ended session may be forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum EndStep {
    /// What it wrote of the file is sealed.
    Seal(InodeId),
    /// The unlinked inode it held open is looked after.
    Orphan(InodeId),
}

impl Core {
    pub(crate) fn open_session(&mut self, token: Token, open: SessionOpen) {
        let asked = SessionId(open.session);
        let known = self
            .sessions
            .get(&asked)
            .is_some_and(|session| !session.evicting);
        if known {
            return self.resume_session(token, asked, &open);
        }
        if asked.0 != 0 {
            // It was evicted (or another cluster's): the client must know that all it held is gone.
            return self.answer(
                token,
                Answer::Opened(SessionOpenReply {
                    resumed: false,
                    ..self.opened(asked, false)
                }),
            );
        }
        let Some(number) = self.numbers.take(Counter::Session) else {
            return self.refuse(
                token,
                Refusal::status(Status::RETRY, "the server is starting"),
            );
        };
        self.reserve_numbers();
        let id = SessionId(number);
        self.sessions.insert(
            id,
            Session {
                host: open.host,
                mount_point: open.mount_point,
                zone: open.zone,
                renewed: self.now,
                ..Session::default()
            },
        );
        // A session is known to a successor before its client hears of it.
        self.touch_session(id);
        let reply = self.opened(id, false);
        self.answer_after(self.open.number, token, Answer::Opened(reply));
    }

    fn resume_session(&mut self, token: Token, id: SessionId, open: &SessionOpen) {
        let now = self.now;
        if let Some(session) = self.sessions.get_mut(&id) {
            session.renewed = now;
            session.acknowledge(open.ack_below);
        }
        let reclaim = self.note_return(id);
        let reply = self.opened(id, reclaim);
        self.answer(
            token,
            Answer::Opened(SessionOpenReply {
                resumed: true,
                ..reply
            }),
        );
        self.effects.push(Effect::Safe(id, self.committed));
        self.resend_recalls(id);
    }

    fn opened(&self, session: SessionId, reclaim: bool) -> SessionOpenReply {
        SessionOpenReply {
            session: session.0,
            lease_ms: u32::try_from(self.options.session_lease.as_millis()).unwrap_or(u32::MAX),
            resumed: false,
            reclaim,
            epoch: self.options.epoch.0,
            root: hither_proto::ids::ROOT.0,
        }
    }

    pub(crate) fn renew_session(&mut self, token: Token, id: SessionId, ack_below: u64) {
        let now = self.now;
        match self
            .sessions
            .get_mut(&id)
            .filter(|session| !session.evicting)
        {
            Some(session) => {
                session.renewed = now;
                session.acknowledge(ack_below);
                self.answer(token, Answer::Done);
            }
            None => self.refuse(token, no_session()),
        }
    }

    /// A session that has given everything back goes at once; one that has not is evicted.
    pub(crate) fn close_session(&mut self, token: Token, id: SessionId) {
        if !self.sessions.contains_key(&id) {
            return self.answer(token, Answer::Done);
        }
        self.evict_session(id);
        self.answer_after(self.open.number, token, Answer::Done);
    }

    /// Starts to end a session: it is served no more, and fenced before anything it held is given
    /// to others.
    pub(crate) fn evict_session(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        if std::mem::replace(&mut session.evicting, true) {
            return;
        }
        // Also those without a number: a lock or a lease given now would be held for ever.
        let of_session = |task: &Task| {
            let request = task.work.request();
            request.is_some_and(|request| request.session == id.0)
        };
        let tasks: Vec<TaskId> = self
            .tasks
            .iter()
            .filter(|(_, task)| of_session(task))
            .map(|(task, _)| *task)
            .collect();
        for task in tasks {
            self.drop_task(task, &no_session());
        }
        let held_exclusive = self
            .leases
            .inodes_of(id)
            .into_iter()
            .filter_map(|ino| self.leases.of(ino))
            .any(|leases| matches!(&leases.data, Data::Exclusive(held) if held.session == id));
        // After a failover nobody knows what a session that never came back has written.
        let unknown = self.is_missing(id);
        if held_exclusive || unknown {
            self.effects.push(Effect::Fence(id));
        } else {
            self.session_fenced(id, Vec::new());
        }
    }

    pub(crate) fn session_fenced(&mut self, id: SessionId, open: Vec<(InodeId, SealChunk)>) {
        let Some(session) = self.sessions.remove(&id) else {
            return;
        };
        // By chunk: what was reserved is known with its place, what servers list is not.
        let mut to_seal: BTreeMap<InodeId, BTreeMap<ChunkId, SealChunk>> = BTreeMap::new();
        for (ino, exclusive) in self.leases.forget_session(id) {
            let seals = to_seal.entry(ino).or_default();
            for chunk in exclusive.reserved {
                seals.insert(ChunkId(chunk.chunk), super::ops::seal_of(&chunk));
            }
        }
        for (ino, chunk) in open {
            let another_writes = self
                .leases
                .of(ino)
                .is_some_and(|leases| matches!(leases.data, Data::Exclusive(_)));
            // Whoever has got the lease since has got it sealed or cleanly released.
            if !another_writes {
                let seals = to_seal.entry(ino).or_default();
                seals.entry(chunk.chunk).or_insert(chunk);
            }
        }
        self.end_recalls_of(id);
        self.unlock_session(id);
        let steps: BTreeSet<EndStep> = to_seal
            .keys()
            .map(|ino| EndStep::Seal(*ino))
            .chain(session.orphans.iter().map(|ino| EndStep::Orphan(*ino)))
            .collect();
        self.ending.insert(id, steps);
        for (ino, chunks) in to_seal {
            self.begin_seal(ino, chunks.into_values().collect());
        }
        for ino in session.orphans {
            self.spawn(Work::RemoveOrphan { ino, session: id });
        }
        self.open.sessions.remove(&id);
        self.end_sessions(None);
        self.recovered(id);
    }

    /// A step of the end of sessions is done. The record of a session stays until all are: a
    /// successor would otherwise not know that there is something to be done.
    pub(crate) fn end_sessions(&mut self, done: Option<EndStep>) {
        let ended: Vec<SessionId> = self
            .ending
            .iter_mut()
            .filter_map(|(id, steps)| {
                if let Some(done) = done {
                    steps.remove(&done);
                }
                steps.is_empty().then_some(*id)
            })
            .collect();
        for id in ended {
            self.ending.remove(&id);
            let (from, to) = keys::session_range(id);
            self.open.delete_range(from, to);
        }
    }

    /// Ends sessions whose lease has run out.
    pub(crate) fn expire_sessions(&mut self) {
        let deadline = self.options.session_lease;
        let expired: Vec<SessionId> = self
            .sessions
            .iter()
            .filter(|(_, session)| !session.evicting && session.renewed + deadline < self.now)
            .map(|(id, _)| *id)
            .collect();
        for id in expired {
            tracing::info!(session = id.0, "session not renewed: evicting");
            self.evict_session(id);
            self.effects.push(Effect::Disconnect(id));
        }
    }

    /// Time of the next expiry.
    pub(crate) fn next_expiry(&self) -> Option<Duration> {
        let renewed = self
            .sessions
            .values()
            .filter(|s| !s.evicting)
            .map(|s| s.renewed)
            .min()?;
        Some(renewed + self.options.session_lease)
    }

    pub(crate) fn list_sessions(&mut self, token: Token) {
        let list = self
            .sessions
            .iter()
            .map(|(id, session)| {
                let (leases, exclusive_leases) = self.leases.counts(*id);
                let idle = self.now.saturating_sub(session.renewed);
                SessionInfo {
                    session: id.0,
                    host: session.host.clone(),
                    mount_point: session.mount_point.clone(),
                    zone: session.zone.clone(),
                    leases,
                    exclusive_leases,
                    orphans: session.orphans.len() as u64,
                    locks: self.locks.count_of(*id),
                    idle_ms: u64::try_from(idle.as_millis()).unwrap_or(u64::MAX),
                }
            })
            .collect();
        self.answer(token, Answer::Sessions(list));
    }

    /// Notes that what is stored of a session beside its results has changed.
    pub(crate) fn touch_session(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            let new = !std::mem::replace(&mut session.dirty, true);
            let bytes = SESSION_BYTES + session.orphans.len() * ORPHAN_BYTES;
            let bytes = if new { bytes } else { ORPHAN_BYTES };
            self.open.touch_session(id, bytes);
        }
    }

    /// Encodes what a batch changes of sessions.
    pub(crate) fn session_writes(
        &mut self,
        ids: &BTreeSet<SessionId>,
    ) -> Vec<(Bytes, Option<Bytes>)> {
        let mut writes = Vec::new();
        for id in ids {
            let Some(session) = self.sessions.get_mut(id) else {
                continue;
            };
            if std::mem::take(&mut session.dirty) {
                let state = session.state(*id).encode_to_vec();
                writes.push((keys::session(*id), Some(state.into())));
            }
            for page in std::mem::take(&mut session.dirty_pages) {
                let value = session.page(*id, page).map(|page| page.encode_to_vec());
                writes.push((keys::session_page(*id, page), value.map(Bytes::from)));
            }
        }
        writes
    }
}

/// Page of results a request's number stands in.
pub(crate) fn page_of(number: u64) -> u64 {
    number / PAGE_REPLIES
}

/// Results in a page.
const PAGE_REPLIES: u64 = 1024;
/// Bytes of a page of results, about.
pub(crate) const PAGE_BYTES: usize = 24 << 10;
/// Bytes of a session's record without its orphans, and of one of those, about.
const SESSION_BYTES: usize = 300;
const ORPHAN_BYTES: usize = 10;
/// Results kept of one session. Its changes wait beyond: its client has to acknowledge some.
pub(crate) const REPLIES_MAX: usize = 200_000;
/// Unlinked inodes one session may hold open: its record must fit into a value of the store.
pub(crate) const ORPHANS_MAX: usize = 65_536;
pub(crate) fn no_session() -> Refusal {
    Refusal::status(Status::NO_SESSION, "the session is unknown or was evicted")
}
