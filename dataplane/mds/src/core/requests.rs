//! Requests: how they come in, how they end, and what is kept for the case that they are resent.

use hither_proto::ids::{BatchNumber, InodeId, RequestNumber, SessionId};
use hither_proto::meta::{Hint, Reply, Request, request::Op};
use hither_proto::status::{Errno, Status};
use hither_proto::stored::{Inode, StoredReply};

use super::event::{Answer, Refusal, Token};
use super::lease::Data;
use super::ops::is_dir;
use super::run::{Attempt, Core, Stop, Task, Work};
use super::session::{PAGE_BYTES, REPLIES_MAX, no_session, page_of};

/// The result of a request, for the case that it is sent again.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct KeptReply {
    pub(crate) stored: StoredReply,
    /// The batch that makes it safe; 0: it is in the store.
    pub(crate) batch: BatchNumber,
    /// The batch the answer waits for.
    pub(crate) wait_for: BatchNumber,
}

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
            if number.0 < session.acked_below {
                // It was answered, and the client has said so: a late copy of it.
                let text = "the request was answered before";
                return self.refuse(token, Refusal::status(Status::BAD_REQUEST, text));
            }
            if let Some(task) = session.running.get(&number).copied() {
                // Resent while it runs: the newer requester gets the answer.
                if let Some(task) = self.tasks.get_mut(&task) {
                    task.token = Some(token);
                } else {
                    self.replace_trim_token(id, number, token);
                }
                return;
            }
        }
        if number.0 != 0 && session.replies.len() >= REPLIES_MAX {
            let text = "too many results of this session are kept: acknowledge some";
            return self.refuse(token, Refusal::status(Status::BUSY, text));
        }
        let blocker = self.recovery_blocker(id, request.replay);
        let kept = self.sessions.get(&id).and_then(|s| s.replies.get(&number));
        if let Some(kept) = kept.copied() {
            let task = self.spawn_idle(Some(token), Work::Again(request, kept));
            return self.ready.push_back(task);
        }
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

    /// The answer to a resent request, from what was kept of the first one: as it would have come
    /// then, and when it would have come.
    pub(crate) fn again(
        &mut self,
        attempt: &mut Attempt,
        request: &Request,
        kept: &KeptReply,
    ) -> Result<Reply, Stop> {
        let wait_for = if request.safe {
            kept.batch
        } else {
            kept.wait_for
        };
        let stored = &kept.stored;
        let mut reply = Reply {
            batch: kept.batch.0,
            orphaned: stored.orphaned,
            other_ino: stored.other_ino,
            existed: stored.existed,
            ..Reply::default()
        };
        if stored.errno != 0 {
            attempt.depends = wait_for;
            let errno = Errno(u16::try_from(stored.errno).unwrap_or(Errno::EIO.0));
            return Err(errno.into());
        }
        let ino = InodeId(stored.ino);
        if ino.0 != 0 {
            match self.need_inode_of(attempt, request, ino) {
                Ok(()) => {
                    let with = self.reply_with(attempt, ino);
                    reply.inode = with.inode;
                    reply.attributes_leased = with.attributes_leased;
                    self.tell_lease(attempt.session, ino, &mut reply);
                }
                // Removed since, by somebody else.
                Err(Stop::Refuse(_)) => reply.inode = Some(inode_of_request(request, ino)),
                Err(stop) => return Err(stop),
            }
        }
        // Only now: loading the inode has noted batches of its own.
        attempt.depends = attempt.depends.max(wait_for);
        Ok(reply)
    }

    fn need_inode_of(
        &mut self,
        attempt: &mut Attempt,
        request: &Request,
        ino: InodeId,
    ) -> Result<(), Stop> {
        self.need_inode(attempt, ino, hint_of_request(request).as_ref())?;
        if self.cache.dirs.contains_key(&ino) || !is_dir(self.cache.inodes[&ino].inode.mode) {
            return Ok(());
        }
        self.need_dir(attempt, ino)
    }

    /// Says which exclusive lease the session holds, if it does.
    pub(crate) fn tell_lease(&self, session: SessionId, ino: InodeId, reply: &mut Reply) {
        if let Some(Data::Exclusive(held)) = self.leases.of(ino).map(|l| &l.data)
            && held.session == session
        {
            reply.data_lease = held.lease.0;
            reply.data_exclusive = true;
        }
    }

    pub(crate) fn finish(
        &mut self,
        task: &Task,
        attempt: &Attempt,
        result: Result<Reply, Refusal>,
    ) {
        let mut result = result;
        let mut wait_for = attempt.depends;
        match &task.work {
            Work::Request(request) => {
                if let Ok(reply) = &mut result
                    && attempt.changed
                {
                    reply.batch = self.open.number.0;
                    if request.safe || !self.options.early_answers {
                        wait_for = self.open.number;
                    }
                }
                let number = RequestNumber(request.number);
                self.record(attempt.session, number, &result, wait_for);
            }
            Work::Again(..) => {}
            Work::Seal { .. }
            | Work::RecallReport { .. }
            | Work::RemoveOrphan { .. }
            | Work::SweepStrays => return,
        }
        let Some(token) = task.token else { return };
        let answer = match result {
            Ok(reply) => Answer::Reply(Box::new(reply)),
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
        wait_for: BatchNumber,
    ) {
        if number.0 == 0 {
            return;
        }
        let batch = self.open.number;
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        session.running.remove(&number);
        let mut stored = StoredReply {
            number: number.0,
            ..StoredReply::default()
        };
        match result {
            Ok(reply) => {
                stored.ino = reply.inode.as_ref().map_or(0, |inode| inode.ino);
                stored.orphaned = reply.orphaned;
                stored.other_ino = reply.other_ino;
                stored.existed = reply.existed;
            }
            Err(refusal) => match refusal.status.errno() {
                Some(errno) => stored.errno = u32::from(errno.0),
                // To be sent again, here or elsewhere: it is not carried out yet.
                None => return,
            },
        }
        let kept = KeptReply {
            stored,
            batch,
            wait_for,
        };
        session.replies.insert(number, kept);
        session.last_batch = batch;
        let new_page = session.dirty_pages.insert(page_of(number.0));
        let bytes = if new_page { PAGE_BYTES } else { 0 };
        self.open.touch_session(id, bytes);
    }
}

/// Where the inode was when the request was carried out.
fn hint_of_request(request: &Request) -> Option<Hint> {
    let place = |parent: u64, name: &bytes::Bytes| {
        Some(Hint {
            parent,
            name: name.clone(),
        })
    };
    match request.op.as_ref()? {
        Op::Create(op) => place(op.parent, &op.name),
        Op::Rename(op) => place(op.new_parent, &op.new_name),
        Op::Setattr(op) => op.hint.clone(),
        Op::Link(op) => op.hint.clone(),
        Op::SetXattr(op) => op.hint.clone(),
        Op::RemoveXattr(op) => op.hint.clone(),
        Op::WriteReport(op) => op.hint.clone(),
        Op::PunchHole(op) => op.hint.clone(),
        _ => None,
    }
}

/// What can be said of an inode that is gone since the request was carried out.
fn inode_of_request(request: &Request, ino: InodeId) -> Inode {
    let mut inode = Inode {
        ino: ino.0,
        ctime: request.now,
        ..Inode::default()
    };
    if let Some(Op::Create(op)) = &request.op {
        (inode.mode, inode.uid, inode.gid) = (op.mode, op.uid, op.gid);
        inode.symlink = op.symlink.clone();
        (inode.mtime, inode.btime) = (request.now, request.now);
    }
    inode
}
