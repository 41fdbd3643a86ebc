//! Recalls: asking a session to give something back, and what its answer means.

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
            },
        );
        id
    }

    pub(crate) fn recall_answered(&mut self, id: u64, answer: Option<RecallReply>) {
        // Unanswered: the holder gets it again when it comes back, or loses its session.
        let Some(answer) = answer else { return };
        let Some(pending) = self.recalls.get_mut(&id) else {
            return;
        };
        if pending.answered {
            return;
        }
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

    /// What the recall asked for is given back.
    pub(crate) fn finish_recall(&mut self, id: u64, open: bool) {
        let Some(pending) = self.recalls.remove(&id) else {
            return;
        };
        let session = pending.wanted.session;
        let recall = pending.wanted.recall;
        self.end_recall(&recall);
        self.release_recalled_data(session, &recall, open);
        self.leases.given_back(session, &recall, open);
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
        self.wake(&Blocker::Inode(InodeId(recall.ino)));
    }

    pub(crate) fn end_recall(&mut self, recall: &Recall) {
        if !recall.report_only {
            let leases = self.leases.of_mut(InodeId(recall.ino));
            leases.recalling = leases.recalling.saturating_sub(1);
        }
    }

    pub(crate) fn resend_recalls(&mut self, session: SessionId) {
        for (id, pending) in &self.recalls {
            if pending.wanted.session == session && !pending.answered {
                self.effects
                    .push(Effect::Recall(*id, session, pending.wanted.recall.clone()));
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
