//! Recalls: asking a session to give something back, and what its answer means.

use std::collections::BTreeMap;
use std::time::Duration;

use hither_proto::ids::{InodeId, SessionId};
use hither_proto::meta::{Recall, RecallReply};

use super::event::Effect;
use super::lease::Wanted;
use super::run::{Blocker, Core, Work};

/// A recall that is not answered yet.
#[derive(Debug)]
pub(crate) struct PendingRecall {
    wanted: Wanted,
    /// The holder has answered; its report is being taken in.
    answered: bool,
    /// It is on its way, and the shell will say what came of it.
    sent: bool,
    /// When it is sent again; with every attempt later.
    next: Duration,
    pause: Duration,
    first_sent: Duration,
    /// Last sign that the holder is at it: it has reported or reserved something of the file.
    progress: Duration,
}

impl Core {
    /// Sends a recall, or joins one that is under way; its number.
    pub(crate) fn recall(&mut self, wanted: Wanted) -> u64 {
        let same = self
            .recalls
            .iter()
            .find(|(_, pending)| pending.wanted == wanted);
        if let Some((id, _)) = same {
            return *id;
        }
        let id = self.next_recall;
        self.next_recall += 1;
        if !wanted.recall.report_only {
            self.leases.of_mut(InodeId(wanted.recall.ino)).recalling += 1;
        }
        self.effects
            .push(Effect::Recall(id, wanted.session, wanted.recall.clone()));
        self.recalls.insert(
            id,
            PendingRecall {
                wanted,
                answered: false,
                sent: true,
                next: self.now,
                pause: RESEND_PAUSE_MIN,
                first_sent: self.now,
                progress: self.now,
            },
        );
        id
    }

    /// Asks back leases that keep `over` inodes too many in memory, and those that sessions hold
    /// beyond their bound.
    pub(crate) fn recall_for_room(&mut self, over: usize) {
        if over == 0 && !self.leases.has_surplus() {
            return;
        }
        let mut asked: BTreeMap<SessionId, usize> = BTreeMap::new();
        for pending in self.recalls.values() {
            *asked.entry(pending.wanted.session).or_default() += 1;
        }
        let most = SESSION_RECALLS_MAX;
        // Sessions that are asked for all they may be do not keep others from being asked.
        let more = |asked: &BTreeMap<SessionId, usize>| {
            let asked = asked.values().filter(|asked| **asked < most);
            ROOM_RECALLS_MAX.saturating_sub(asked.sum())
        };
        let count = over.min(more(&asked));
        for wanted in self.leases.for_room(count, most, &mut asked) {
            self.recall(wanted);
        }
        let count = more(&asked);
        for wanted in self.leases.surplus(count, most, &asked) {
            self.recall(wanted);
        }
    }

    /// Takes in what came of a recall. One that was not answered is sent again later, and when the
    /// holder comes back.
    pub(crate) fn recall_answered(&mut self, id: u64, answer: Option<RecallReply>) {
        let Some(pending) = self.recalls.get_mut(&id) else {
            return;
        };
        if pending.answered {
            return;
        }
        let Some(answer) = answer else {
            pending.sent = false;
            pending.next = self.now + pending.pause;
            pending.pause = (pending.pause * 2).min(RESEND_PAUSE_MAX);
            self.effects.push(Effect::WakeAt(pending.next));
            return;
        };
        if answer.pages {
            let (ino, session) = (InodeId(pending.wanted.recall.ino), pending.wanted.session);
            self.keep_turn(ino, session);
        }
        let Some(pending) = self.recalls.get_mut(&id) else {
            return;
        };
        if let Some(report) = answer.report {
            // What the report is about may have to be loaded first: the recall ends after that.
            pending.answered = true;
            let session = pending.wanted.session;
            self.spawn(Work::RecallReport {
                recall: id,
                session,
                report: Box::new(report),
                open: answer.open,
            });
        } else {
            self.finish_recall(id, answer.open);
        }
    }

    /// What the recall asked for is given back. A session that is being evicted gives nothing back any
    /// more, whatever it says: it has dropped what it wrote, and its files are sealed first.
    pub(crate) fn finish_recall(&mut self, id: u64, open: bool) {
        let of = self.recalls.get(&id).map(|pending| pending.wanted.session);
        let session = of.and_then(|session| self.sessions.get(&session));
        if session.is_none_or(|session| session.evicting) {
            return;
        }
        let Some(pending) = self.recalls.remove(&id) else {
            return;
        };
        let session = pending.wanted.session;
        let recall = pending.wanted.recall;
        self.end_recall(&recall);
        self.release_recalled_data(session, &recall, open);
        if let Some(given) = self.leases.given_back(session, &recall, open) {
            let askers = self.waiters.get(&Blocker::Recall(id)).into_iter().flatten();
            for asker in askers {
                if let Some(task) = self.tasks.get_mut(asker) {
                    task.given_back.push(given.clone());
                }
            }
        }
        let ino = InodeId(recall.ino);
        let orphan = self
            .sessions
            .get(&session)
            .is_some_and(|session| session.orphans.contains(&ino));
        if recall.unlinked && !open && orphan {
            // It was taken to hold the inode open, and does not.
            self.spawn(Work::RemoveOrphan { ino, session });
        }
        self.wake(&Blocker::Recall(id));
        self.wake(&Blocker::Inode(ino));
    }

    pub(crate) fn end_recall(&mut self, recall: &Recall) {
        if !recall.report_only {
            let leases = self.leases.of_mut(InodeId(recall.ino));
            leases.recalling = leases.recalling.saturating_sub(1);
        }
    }

    /// Sends everything that is recalled from the session again, over its new connection.
    pub(crate) fn resend_recalls(&mut self, session: SessionId) {
        for (id, pending) in &mut self.recalls {
            if pending.wanted.session == session && !pending.answered {
                pending.sent = true;
                self.effects
                    .push(Effect::Recall(*id, session, pending.wanted.recall.clone()));
            }
        }
    }

    /// Sends what was not answered again, and ends sessions that keep what others wait for.
    pub(crate) fn look_after_recalls(&mut self) {
        let now = self.now;
        let mut stubborn = Vec::new();
        for (id, pending) in &mut self.recalls {
            let session = pending.wanted.session;
            let recall = &pending.wanted.recall;
            if pending.answered {
                continue;
            }
            let stuck = now >= pending.progress + PATIENCE || now >= pending.first_sent + TOTAL_MAX;
            if stuck {
                tracing::warn!(
                    session = session.0,
                    ino = recall.ino,
                    waited_s = (now - pending.first_sent).as_secs(),
                    "a recall is not answered although the session is renewed: evicting"
                );
                stubborn.push(session);
            } else if !pending.sent && now >= pending.next {
                pending.sent = true;
                self.effects
                    .push(Effect::Recall(*id, session, recall.clone()));
            }
        }
        for session in stubborn {
            self.evict_session(session);
            self.effects.push(Effect::Disconnect(session));
        }
    }

    /// The session works on giving the file back.
    pub(crate) fn note_progress(&mut self, session: SessionId, ino: InodeId) {
        let now = self.now;
        for pending in self.recalls.values_mut() {
            if pending.wanted.session == session && pending.wanted.recall.ino == ino.0 {
                pending.progress = now;
            }
        }
    }

    pub(crate) fn end_recalls_of(&mut self, session: SessionId) {
        let ids: Vec<u64> = self
            .recalls
            .iter()
            .filter(|(_, pending)| pending.wanted.session == session)
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            if let Some(pending) = self.recalls.remove(&id) {
                self.end_recall(&pending.wanted.recall);
                self.wake(&Blocker::Recall(id));
                self.wake(&Blocker::Inode(InodeId(pending.wanted.recall.ino)));
                self.leases.prune(InodeId(pending.wanted.recall.ino));
            }
        }
    }
}

/// Recalls under way up to which leases are asked back for room, beside those of sessions that have
/// reached their own bound.
const ROOM_RECALLS_MAX: usize = 1024;
/// Recalls under way with one session up to which more are asked back from it for room.
const SESSION_RECALLS_MAX: usize = 128;
/// First and longest pause before a recall that was not answered is sent again.
const RESEND_PAUSE_MIN: Duration = Duration::from_millis(100);
const RESEND_PAUSE_MAX: Duration = Duration::from_secs(2);
/// A session that is renewed and shows no progress with a recall is evicted after this time: six
/// times the default time a client waits for anything.
const PATIENCE: Duration = Duration::from_secs(180);
/// Time after which a recall is over whatever its holder does.
const TOTAL_MAX: Duration = Duration::from_secs(1800);
