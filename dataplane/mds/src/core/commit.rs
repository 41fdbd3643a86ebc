//! Answers, and the batches they may have to wait for.

use hither_proto::ids::{BatchNumber, InodeId};
use hither_proto::stored::RankState;
use prost::Message;

use super::batch::{Batch, ENTRY_BYTES, HEAD_BYTES, Object, inode_bytes};
use super::event::{Answer, CommitOutcome, Effect, Refusal, Token};
use super::run::{Attempt, Blocker, Core};
use crate::keys;

impl Core {
    /// Notes that the answer of this attempt rests on the object.
    pub(crate) fn depend(&self, attempt: &mut Attempt, object: &Object) {
        for batch in [Some(&self.open), self.flight.as_ref()]
            .into_iter()
            .flatten()
        {
            if batch.is_foreign(object, attempt.session) {
                attempt.depends = attempt.depends.max(batch.number);
            }
        }
    }

    /// Notes that this attempt changes the object.
    pub(crate) fn touch(&mut self, attempt: &mut Attempt, object: Object) {
        attempt.changed = true;
        self.note_change(&object);
        let bytes = match &object {
            Object::Entry(_, key) => ENTRY_BYTES + key.name.len(),
            Object::Head(_) => HEAD_BYTES,
            Object::Inode(ino) => {
                let slot = self.cache.inodes.get(ino);
                slot.map_or(0, |slot| inode_bytes(&slot.inode, slot.key.name.len()))
            }
        };
        self.open.touch(object, attempt.session, bytes);
    }

    /// Whether everything is in the store.
    pub(crate) fn nothing_open(&self) -> bool {
        self.flight.is_none() && self.open.is_empty()
    }

    pub(crate) fn is_dirty(&self, ino: InodeId) -> bool {
        let batches = [Some(&self.open), self.flight.as_ref()];
        batches
            .into_iter()
            .flatten()
            .any(|batch| batch.touches_inode(ino))
    }

    pub(crate) fn answer(&mut self, token: Token, answer: Answer) {
        self.effects.push(Effect::Answer(token, answer));
    }

    pub(crate) fn refuse(&mut self, token: Token, refusal: Refusal) {
        self.answer(token, Answer::Refused(refusal));
    }

    /// Answers once `batch` is in the store; at once if it is.
    pub(crate) fn answer_after(&mut self, batch: BatchNumber, token: Token, answer: Answer) {
        if batch <= self.committed {
            return self.answer(token, answer);
        }
        if batch == self.open.number {
            if self.open.is_empty() {
                // Nothing to wait for: all there was is in the batch under way.
                let Some(flight) = &self.flight else {
                    return self.answer(token, answer);
                };
                let number = flight.number;
                self.held_answers
                    .entry(number)
                    .or_default()
                    .push((token, answer));
                return;
            }
            self.open.awaited = true;
        }
        self.held_answers
            .entry(batch)
            .or_default()
            .push((token, answer));
    }

    pub(crate) fn start_commit(&mut self) {
        if self.flight.is_some() || self.open.is_empty() {
            return;
        }
        let due = *self
            .commit_due
            .get_or_insert(self.now + self.options.batch_delay);
        if !self.open.awaited && !self.open.is_full() && self.now < due {
            self.effects.push(Effect::WakeAt(due));
            return;
        }
        self.commit_due = None;
        let next = Batch::new(BatchNumber(self.open.number.0 + 1));
        let batch = std::mem::replace(&mut self.open, next);
        // What waited for room goes into the next one.
        self.wake(&Blocker::Room);
        let mut commit = batch.freeze(&self.cache);
        commit.writes.extend(self.session_writes(&batch.sessions));
        commit.writes.extend(self.lock_writes(&batch.locks));
        let state = RankState {
            batch: batch.number.0,
            epoch: self.options.epoch.0,
        };
        commit.writes.insert(
            keys::rank_state(self.options.rank),
            Some(state.encode_to_vec().into()),
        );
        commit.unchanged = self.authority.clone();
        // An earlier attempt that the store carries out late must find itself too late.
        let before = RankState {
            batch: batch.number.0 - 1,
            ..state
        };
        commit.unchanged.push((
            keys::rank_state(self.options.rank),
            before.encode_to_vec().into(),
        ));
        self.flight = Some(batch);
        self.effects.push(Effect::Commit(Box::new(commit)));
    }

    pub(crate) fn batch_committed(&mut self, number: BatchNumber, outcome: CommitOutcome) {
        if outcome != CommitOutcome::Done {
            self.effects.push(Effect::Stop);
            return;
        }
        let Some(batch) = self.flight.take_if(|batch| batch.number == number) else {
            return;
        };
        self.committed = number;
        self.forget_removed(&batch);
        for session in &batch.sessions {
            self.effects.push(Effect::Safe(*session, number));
        }
        while let Some(entry) = self.held_answers.first_entry() {
            if *entry.key() > number {
                break;
            }
            for (token, answer) in entry.remove() {
                self.effects.push(Effect::Answer(token, answer));
            }
        }
        if self.held_answers.contains_key(&self.open.number) {
            self.open.awaited = true;
        }
    }

    /// What is gone from the store needs no mark in memory any more.
    pub(crate) fn forget_removed(&mut self, batch: &Batch) {
        for (dir, key) in batch.entries() {
            let Some(directory) = self.cache.dirs.get_mut(&dir) else {
                continue;
            };
            let gone = directory.entries.get(key).is_some_and(Option::is_none);
            if gone && !self.open.touches_entry(dir, key) {
                directory.entries.remove(key);
                self.cache.forget(dir);
            }
        }
        for page in batch.pages() {
            let empty = self.cache.pages.get(page).is_some_and(Vec::is_empty);
            if empty && !self.cache.inodes.contains_key(&page.0) && !self.open.touches_page(page) {
                self.cache.pages.remove(page);
            }
        }
    }
}
