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
use super::run::{Core, TaskId, Work};
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
    pub(crate) fn restored(state: &SessionState, now: Duration) -> Self {
        Self {
            host: state.host.clone(),
            mount_point: state.mount_point.clone(),
            zone: state.zone.clone(),
            renewed: now,
            replies: state
                .replies
                .iter()
                .map(|stored| {
                    let kept = KeptReply {
                        stored: *stored,
                        ..KeptReply::default()
                    };
                    (RequestNumber(stored.number), kept)
                })
                .collect(),
            orphans: state.orphans.iter().map(|ino| InodeId(*ino)).collect(),
            ..Self::default()
        }
    }

    pub(crate) fn state(&self, session: SessionId) -> SessionState {
        SessionState {
            session: session.0,
            host: self.host.clone(),
            mount_point: self.mount_point.clone(),
            zone: self.zone.clone(),
            replies: self.replies.values().map(|kept| kept.stored).collect(),
            orphans: self.orphans.iter().map(|ino| ino.0).collect(),
        }
    }

    /// Forgets results below the lowest number the client still awaits.
    pub(crate) fn acknowledge(&mut self, below: u64) {
        if below > self.acked_below {
            self.acked_below = below;
            self.replies = self.replies.split_off(&RequestNumber(below));
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
        self.open.sessions.insert(id);
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
        let running: Vec<TaskId> = session.running.values().copied().collect();
        for task in running {
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
            self.leases.of_mut(ino).sealing = true;
            self.spawn(Work::Seal {
                ino,
                chunks: chunks.into_values().collect(),
            });
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
            self.open.raw.insert(keys::session(id), None);
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

    /// Encodes the sessions a batch changes.
    pub(crate) fn session_writes(&self, ids: &BTreeSet<SessionId>) -> Vec<(Bytes, Option<Bytes>)> {
        ids.iter()
            .filter_map(|id| {
                let state = self.sessions.get(id)?.state(*id);
                Some((keys::session(*id), Some(state.encode_to_vec().into())))
            })
            .collect()
    }
}

pub(crate) fn no_session() -> Refusal {
    Refusal::status(Status::NO_SESSION, "the session is unknown or was evicted")
}
