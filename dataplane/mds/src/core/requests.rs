//! Requests: how they come in, how they end, and what is kept for the case that they are resent.

use hither_proto::ids::{InodeId, RequestNumber, SessionId};
use hither_proto::meta::{Reply, Request};
use hither_proto::status::Errno;
use hither_proto::stored::StoredReply;

use super::event::{Answer, Refusal, Token};
use super::run::{Attempt, Core, Task, Work};
use super::session::no_session;

impl Core {
    pub(crate) fn request(&mut self, token: Token, request: Box<Request>) {
        self.requests += 1;
        let id = SessionId(request.session);
        let number = RequestNumber(request.number);
        let now = self.now;
        let Some(session) = self
            .sessions
            .get_mut(&id)
            .filter(|session| !session.evicting)
        else {
            return self.refuse(token, no_session());
        };
        session.renewed = now;
        session.acknowledge(request.ack_below);
        if number.0 != 0 {
            if let Some(task) = session.running.get(&number).copied() {
                // Resent while it runs: the newer requester gets the answer.
                if let Some(task) = self.tasks.get_mut(&task) {
                    task.token = Some(token);
                } else {
                    self.replace_trim_token(id, number, token);
                }
                return;
            }
            if let Some(stored) = session.replies.get(&number).cloned() {
                return self.answer_again(token, id, &stored);
            }
        }
        let blocker = self.recovery_blocker(id, request.replay);
        let task = self.spawn_idle(Some(token), Work::Request(request));
        if number.0 != 0
            && let Some(session) = self.sessions.get_mut(&id)
        {
            session.running.insert(number, task);
        }
        match blocker {
            Some(blocker) => self.park(task, vec![blocker]),
            None => self.ready.push_back(task),
        }
    }

    /// The answer to a resent request, from what was kept of the first one.
    pub(crate) fn answer_again(&mut self, token: Token, session: SessionId, stored: &StoredReply) {
        if stored.errno != 0 {
            let errno = Errno(u16::try_from(stored.errno).unwrap_or(Errno::EIO.0));
            return self.refuse(token, Refusal::errno(errno));
        }
        let ino = InodeId(stored.ino);
        let inode = self
            .cache
            .inodes
            .contains_key(&ino)
            .then(|| self.attributes_of(ino));
        let attributes_leased = inode.is_some() && self.leases.give_attributes(ino, session);
        let batch = self
            .sessions
            .get(&session)
            .map_or(0, |session| session.last_batch.0);
        let reply = Reply {
            batch,
            inode,
            attributes_leased,
            ..Reply::default()
        };
        self.answer(token, Answer::Reply(Box::new(reply)));
    }

    pub(crate) fn finish(&mut self, task: Task, attempt: &Attempt, result: Result<Reply, Refusal>) {
        let Work::Request(request) = task.work else {
            return;
        };
        let number = RequestNumber(request.number);
        self.record(attempt.session, number, &result);
        let Some(token) = task.token else { return };
        let mut wait_for = attempt.depends;
        let answer = match result {
            Ok(mut reply) => {
                if attempt.changed {
                    reply.batch = self.open.number.0;
                    let safe = request.safe || !self.options.early_answers;
                    if safe {
                        wait_for = self.open.number;
                    }
                }
                Answer::Reply(Box::new(reply))
            }
            Err(refusal) => Answer::Refused(refusal),
        };
        self.answer_after(wait_for, token, answer);
    }

    /// Keeps the result of a changing request for the case that it is sent again.
    pub(crate) fn record(
        &mut self,
        id: SessionId,
        number: RequestNumber,
        result: &Result<Reply, Refusal>,
    ) {
        if number.0 == 0 {
            return;
        }
        let batch = self.open.number;
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        session.running.remove(&number);
        let (errno, ino) = match result {
            Ok(reply) => (0, reply.inode.as_ref().map_or(0, |inode| inode.ino)),
            Err(refusal) => (u32::from(refusal.status.errno().unwrap_or(Errno::EIO).0), 0),
        };
        session.replies.insert(
            number,
            StoredReply {
                number: number.0,
                errno,
                ino,
            },
        );
        session.last_batch = batch;
        self.open.sessions.insert(id);
    }
}
