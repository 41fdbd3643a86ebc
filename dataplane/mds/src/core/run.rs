//! The core's state, and how requests run, stop, wait and run again.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use hither_proto::fragment::Fragment;
use hither_proto::ids::{BatchNumber, Epoch, GroupId, InodeId, RankId, RequestNumber, SessionId};
use hither_proto::meta::{Recall, RecallReply, Reply, Request};
use hither_proto::status::{Errno, Status};
use hither_proto::stored::{LockTable, RankState, SessionState, StoredReply};
use prost::Message;
use smallvec::SmallVec;

use super::Options;
use super::batch::{Batch, Object};
use super::cache::{Cache, EntryKey, LoadKey, Loaded};
use super::event::{
    Answer, CommitOutcome, Counter, Effect, Event, GroupChoice, Refusal, SealChunk, Token,
};
use super::ids::Numbers;
use super::lease::{LeaseTable, Wanted};
use super::locks::Locks;
use super::session::{Recovery, Session, no_session};
use crate::keys;

pub(crate) type TaskId = u64;

/// What a task does.
#[derive(Debug)]
pub(crate) enum Work {
    /// A client's request.
    Request(Box<Request>),
    /// Seal the chunks of a file whose writer is gone.
    Seal {
        ino: InodeId,
        chunks: Vec<SealChunk>,
    },
    /// Remove an unlinked inode a gone session held open.
    RemoveOrphan { ino: InodeId, session: SessionId },
}

/// Something that is carried out, possibly in several attempts.
#[derive(Debug)]
pub(crate) struct Task {
    token: Option<Token>,
    work: Work,
    /// Blockers not resolved yet.
    waits: usize,
    /// Files whose writer has just reported: asked once per task.
    fresh: SmallVec<[InodeId; 2]>,
}

/// What a parked task waits for.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Blocker {
    /// A seal or trim of the inode, or recalls on it.
    Inode(InodeId),
    Load(LoadKey),
    Lock(InodeId),
    Numbers,
    Recall(u64),
    Recovered,
}

/// Why a request cannot go on now, or at all.
#[derive(Debug)]
pub(crate) enum Stop {
    /// Final.
    Refuse(Refusal),
    /// After these loads.
    Load(Vec<LoadKey>),
    /// After these recalls.
    Recall(Vec<Wanted>),
    /// After that.
    Block(Blocker),
    /// The answer comes by another way (a trim).
    Later,
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Self::Refuse(Refusal::errno(errno))
    }
}

/// What one attempt of a request collects.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) session: SessionId,
    pub(crate) token: Option<Token>,
    pub(crate) now: i64,
    pub(crate) replay_ino: u64,
    /// Batch of another session that the answer depends on.
    pub(crate) depends: BatchNumber,
    /// The attempt has changed something.
    pub(crate) changed: bool,
    pub(crate) fresh: SmallVec<[InodeId; 2]>,
}

impl Attempt {
    /// An attempt without a request behind it.
    pub(crate) fn of_session(session: SessionId) -> Self {
        Self {
            session,
            token: None,
            now: 0,
            replay_ino: 0,
            depends: BatchNumber(0),
            changed: false,
            fresh: SmallVec::new(),
        }
    }

    /// What is kept of an attempt whose answer comes later.
    pub(crate) fn waiting(attempt: &Self) -> Self {
        Self {
            token: attempt.token,
            depends: attempt.depends,
            ..Self::of_session(attempt.session)
        }
    }
}

#[derive(Debug)]
struct PendingRecall {
    wanted: Wanted,
}

/// The deterministic core of one rank.
#[derive(Debug)]
pub struct Core {
    pub(crate) options: Options,
    pub(crate) now: Duration,
    pub(crate) cache: Cache,
    pub(crate) leases: LeaseTable,
    pub(crate) locks: Locks,
    pub(crate) sessions: BTreeMap<SessionId, Session>,
    pub(crate) recovery: Option<Recovery>,
    pub(crate) numbers: Numbers,
    pub(crate) groups: GroupChoice,
    /// Lowest epoch a lease may be given with, by group.
    pub(crate) group_floor: BTreeMap<GroupId, Epoch>,
    pub(crate) subtrees: BTreeMap<(InodeId, Fragment), (RankId, Epoch)>,
    pub(crate) open: Batch,
    flight: Option<Batch>,
    pub(crate) committed: BatchNumber,
    commit_due: Option<Duration>,
    authority: Vec<(Bytes, Bytes)>,
    tasks: BTreeMap<TaskId, Task>,
    next_task: TaskId,
    waiters: BTreeMap<Blocker, Vec<TaskId>>,
    ready: std::collections::VecDeque<TaskId>,
    recalls: BTreeMap<u64, PendingRecall>,
    next_recall: u64,
    held_answers: BTreeMap<BatchNumber, Vec<(Token, Answer)>>,
    pub(crate) trim_answers: BTreeMap<InodeId, Vec<(Attempt, Reply, RequestNumber)>>,
    pub(crate) effects: Vec<Effect>,
    requests: u64,
}

/// What a rank finds in the store when it starts.
#[derive(Debug, Default)]
pub struct Restored {
    /// Sessions that were open.
    pub sessions: Vec<SessionState>,
    /// Locks that were held.
    pub locks: Vec<(InodeId, LockTable)>,
    /// Number of the rank's last batch.
    pub last_batch: BatchNumber,
    /// `s/` keys of the rank's subtrees with their values: the precondition of every commit.
    pub authority: Vec<(Bytes, Bytes)>,
    /// All subtrees.
    pub subtrees: Vec<(InodeId, Fragment, RankId, Epoch)>,
    /// Placement groups.
    pub groups: GroupChoice,
}

impl Core {
    /// A core that serves what was restored. Sessions that were open have the session lease to
    /// come back; until they have (or it has passed), nobody else is served.
    #[must_use]
    pub fn new(options: Options, restored: Restored, now: Duration) -> Self {
        let sessions: BTreeMap<SessionId, Session> = restored
            .sessions
            .iter()
            .map(|state| (SessionId(state.session), Session::restored(state, now)))
            .collect();
        let missing: std::collections::BTreeSet<SessionId> = sessions.keys().copied().collect();
        let committed = restored.last_batch;
        let mut core = Self {
            options,
            now,
            cache: Cache::default(),
            leases: LeaseTable::default(),
            locks: Locks::restored(restored.locks),
            sessions,
            recovery: (!missing.is_empty()).then_some(Recovery { missing }),
            numbers: Numbers::default(),
            groups: restored.groups,
            group_floor: BTreeMap::new(),
            subtrees: BTreeMap::new(),
            open: Batch::new(BatchNumber(committed.0 + 1)),
            flight: None,
            committed,
            commit_due: None,
            authority: restored.authority,
            tasks: BTreeMap::new(),
            next_task: 1,
            waiters: BTreeMap::new(),
            ready: std::collections::VecDeque::new(),
            recalls: BTreeMap::new(),
            next_recall: 1,
            held_answers: BTreeMap::new(),
            trim_answers: BTreeMap::new(),
            effects: Vec::new(),
            requests: 0,
        };
        core.set_subtrees(restored.subtrees);
        core.reserve_numbers();
        core
    }

    /// Takes an event in; `now` is monotonic. Returns what is to be done, in order.
    pub fn handle(&mut self, event: Event, now: Duration) -> Vec<Effect> {
        self.now = now;
        match event {
            Event::SessionOpen(token, open) => self.open_session(token, open),
            Event::SessionRenew(token, id, ack) => self.renew_session(token, id, ack),
            Event::SessionClose(token, id) => self.close_session(token, id),
            Event::Reclaim(token, id, reclaim) => self.reclaim(token, id, reclaim),
            Event::Request(token, request) => self.request(token, request),
            Event::Cancel(token) => self.cancel(token),
            Event::Loaded(key, loaded) => self.loaded(&key, *loaded),
            Event::Committed(batch, outcome) => self.batch_committed(batch, outcome),
            Event::Reserved(counter, block) => {
                self.numbers.add(counter, block);
                self.wake(&Blocker::Numbers);
            }
            Event::RecallAnswered(id, answer) => self.recall_answered(id, answer),
            Event::Trimmed(ino, group, epoch) => self.trimmed(ino, group, epoch),
            Event::Sealed(ino, chunks) => self.sealed(ino, &chunks),
            Event::Fenced(session, open) => self.session_fenced(session, open),
            Event::Groups(groups) => self.groups = *groups,
            Event::Subtrees(subtrees) => self.set_subtrees(subtrees),
            Event::Evict(token, session) => {
                self.evict_session(session);
                self.answer_after(self.open.number, token, Answer::Done);
            }
            Event::List(token) => self.list_sessions(token),
            Event::Tick => self.tick(),
        }
        self.run_ready();
        self.start_commit();
        std::mem::take(&mut self.effects)
    }

    /// Inodes in memory.
    #[must_use]
    pub fn cached_inodes(&self) -> usize {
        self.cache.inodes.len()
    }

    /// Requests seen, tasks that wait.
    #[must_use]
    pub fn counters(&self) -> (u64, usize) {
        (self.requests, self.tasks.len())
    }

    /// Whether everything that was answered is in the store.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.nothing_open()
    }

    fn set_subtrees(&mut self, subtrees: Vec<(InodeId, Fragment, RankId, Epoch)>) {
        self.subtrees = subtrees
            .into_iter()
            .map(|(dir, fragment, rank, epoch)| ((dir, fragment), (rank, epoch)))
            .collect();
    }

    // ---- requests

    fn request(&mut self, token: Token, request: Box<Request>) {
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
                }
                return;
            }
            if let Some(stored) = session.replies.get(&number).cloned() {
                return self.answer_again(token, id, &stored);
            }
        }
        let waits_for_recovery = self.recovery.is_some() && !request.replay;
        let task = self.spawn_idle(Some(token), Work::Request(request));
        if number.0 != 0
            && let Some(session) = self.sessions.get_mut(&id)
        {
            session.running.insert(number, task);
        }
        if waits_for_recovery {
            self.park(task, vec![Blocker::Recovered]);
        } else {
            self.ready.push_back(task);
        }
    }

    /// The answer to a resent request, from what was kept of the first one.
    fn answer_again(&mut self, token: Token, session: SessionId, stored: &StoredReply) {
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

    pub(crate) fn spawn(&mut self, work: Work) {
        let task = self.spawn_idle(None, work);
        self.ready.push_back(task);
    }

    fn spawn_idle(&mut self, token: Option<Token>, work: Work) -> TaskId {
        let id = self.next_task;
        self.next_task += 1;
        self.tasks.insert(
            id,
            Task {
                token,
                work,
                waits: 0,
                fresh: SmallVec::new(),
            },
        );
        id
    }

    fn park(&mut self, task: TaskId, blockers: Vec<Blocker>) {
        if let Some(parked) = self.tasks.get_mut(&task) {
            parked.waits = blockers.len();
        }
        for blocker in blockers {
            self.waiters.entry(blocker).or_default().push(task);
        }
    }

    /// Everyone who waits for `blocker` waits for one thing less.
    pub(crate) fn wake(&mut self, blocker: &Blocker) {
        for task in self.waiters.remove(blocker).unwrap_or_default() {
            if let Some(parked) = self.tasks.get_mut(&task) {
                parked.waits = parked.waits.saturating_sub(1);
                if parked.waits == 0 {
                    self.ready.push_back(task);
                }
            }
        }
    }

    /// Ends a parked task with a refusal.
    pub(crate) fn drop_task(&mut self, id: TaskId, refusal: &Refusal) {
        let Some(task) = self.tasks.remove(&id) else {
            return;
        };
        if let Work::Request(request) = &task.work
            && let Some(session) = self.sessions.get_mut(&SessionId(request.session))
        {
            session.running.remove(&RequestNumber(request.number));
        }
        if let Some(token) = task.token {
            self.refuse(token, refusal.clone());
        }
    }

    /// Only waits for locks can be given up: everything else is short.
    fn cancel(&mut self, token: Token) {
        let waiting: Vec<TaskId> = self
            .waiters
            .iter()
            .filter(|(blocker, _)| matches!(blocker, Blocker::Lock(_)))
            .flat_map(|(_, tasks)| tasks.iter().copied())
            .filter(|id| {
                self.tasks
                    .get(id)
                    .is_some_and(|task| task.token == Some(token))
            })
            .collect();
        for task in waiting {
            self.drop_task(task, &Refusal::errno(Errno::EINTR));
        }
    }

    fn run_ready(&mut self) {
        while let Some(id) = self.ready.pop_front() {
            if let Some(task) = self.tasks.remove(&id) {
                self.run(id, task);
            }
        }
    }

    fn run(&mut self, id: TaskId, mut task: Task) {
        let (session, now, replay_ino) = match &task.work {
            Work::Request(r) => (SessionId(r.session), r.now, r.replay_ino),
            Work::Seal { .. } | Work::RemoveOrphan { .. } => (SessionId(0), 0, 0),
        };
        let mut attempt = Attempt {
            session,
            token: task.token,
            now,
            replay_ino,
            depends: BatchNumber(0),
            changed: false,
            fresh: std::mem::take(&mut task.fresh),
        };
        let result = match &task.work {
            Work::Request(request) => self.operation(&mut attempt, request),
            Work::Seal { ino, chunks } => self.seal(&mut attempt, *ino, chunks),
            Work::RemoveOrphan { ino, session } => self.remove_orphan(&mut attempt, *ino, *session),
        };
        task.fresh = std::mem::take(&mut attempt.fresh);
        match result {
            Ok(reply) => self.finish(task, &attempt, Ok(reply)),
            Err(Stop::Refuse(refusal)) => self.finish(task, &attempt, Err(refusal)),
            Err(Stop::Later) => {}
            Err(Stop::Load(keys)) => {
                let blockers = keys.iter().cloned().map(Blocker::Load).collect();
                for key in keys {
                    if !self.waiters.contains_key(&Blocker::Load(key.clone())) {
                        self.effects.push(Effect::Load(key));
                    }
                }
                self.tasks.insert(id, task);
                self.park(id, blockers);
            }
            Err(Stop::Recall(wanted)) => {
                for wish in &wanted {
                    if wish.recall.report_only {
                        task.fresh.push(InodeId(wish.recall.ino));
                    }
                }
                let blockers = wanted
                    .into_iter()
                    .map(|wish| Blocker::Recall(self.recall(wish)))
                    .collect();
                self.tasks.insert(id, task);
                self.park(id, blockers);
            }
            Err(Stop::Block(blocker)) => {
                self.tasks.insert(id, task);
                self.park(id, vec![blocker]);
            }
        }
    }

    fn finish(&mut self, task: Task, attempt: &Attempt, result: Result<Reply, Refusal>) {
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

    // ---- loads

    fn loaded(&mut self, key: &LoadKey, loaded: Loaded) {
        match (key, loaded) {
            (LoadKey::Entry(dir, entry), Loaded::Entry(dentry)) => {
                self.cache.install(*dir, entry, dentry);
            }
            (LoadKey::Head(dir), Loaded::Head(head)) => {
                self.cache
                    .dirs
                    .entry(*dir)
                    .or_insert_with(|| super::cache::Dir {
                        head: head.unwrap_or_default(),
                        ..super::cache::Dir::default()
                    });
            }
            (LoadKey::BackPointer(ino), Loaded::BackPointer(found)) => {
                let place = found.map(|p| (InodeId(p.parent), EntryKey::of(&p.name)));
                self.cache.back_pointers.insert(*ino, place);
            }
            (LoadKey::Page(ino, page), Loaded::Page(found)) => {
                self.cache
                    .pages
                    .entry((*ino, *page))
                    .or_insert(found.chunks);
            }
            (LoadKey::Directory(dir, after), Loaded::Directory(entries, more)) => {
                let last = entries.last().map(|(key, _)| key.clone());
                for (entry, dentry) in entries {
                    self.cache.install(*dir, &entry, Some(dentry));
                }
                if let Some(directory) = self.cache.dirs.get_mut(dir) {
                    directory.cover(after.clone(), last, more);
                }
            }
            (_, _) => {
                // The store failed: whoever waits is told to come again.
                let refusal = Refusal::status(Status::RETRY, "the metadata store does not answer");
                for task in self
                    .waiters
                    .remove(&Blocker::Load(key.clone()))
                    .unwrap_or_default()
                {
                    self.drop_task(task, &refusal);
                }
            }
        }
        self.wake(&Blocker::Load(key.clone()));
    }

    // ---- recalls

    /// Sends a recall, or joins one that is under way; its number.
    fn recall(&mut self, wanted: Wanted) -> u64 {
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
        self.recalls.insert(id, PendingRecall { wanted });
        id
    }

    fn recall_answered(&mut self, id: u64, answer: Option<RecallReply>) {
        // Unanswered: the holder gets it again when it comes back, or loses its session.
        let Some(answer) = answer else { return };
        let Some(pending) = self.recalls.remove(&id) else {
            return;
        };
        let session = pending.wanted.session;
        let recall = pending.wanted.recall;
        self.end_recall(&recall);
        if let Some(report) = answer.report {
            self.report_in_recall(session, &report);
        }
        self.release_recalled_data(session, &recall, answer.open);
        self.leases.given_back(session, &recall, answer.open);
        self.wake(&Blocker::Recall(id));
        self.wake(&Blocker::Inode(InodeId(recall.ino)));
    }

    fn end_recall(&mut self, recall: &Recall) {
        if !recall.report_only {
            let leases = self.leases.of_mut(InodeId(recall.ino));
            leases.recalling = leases.recalling.saturating_sub(1);
        }
    }

    pub(crate) fn resend_recalls(&mut self, session: SessionId) {
        for (id, pending) in &self.recalls {
            if pending.wanted.session == session {
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

    // ---- batches

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
        self.open.touch(object, attempt.session);
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

    fn start_commit(&mut self) {
        if self.flight.is_some() || self.open.is_empty() {
            return;
        }
        let due = *self
            .commit_due
            .get_or_insert(self.now + self.options.batch_delay);
        if !self.open.awaited && self.now < due {
            self.effects.push(Effect::WakeAt(due));
            return;
        }
        self.commit_due = None;
        let next = Batch::new(BatchNumber(self.open.number.0 + 1));
        let batch = std::mem::replace(&mut self.open, next);
        let mut commit = batch.freeze(&self.cache);
        commit.writes.extend(self.session_writes(&batch.sessions));
        let state = RankState {
            batch: batch.number.0,
            epoch: self.options.epoch.0,
        };
        commit.writes.insert(
            keys::rank_state(self.options.rank),
            Some(state.encode_to_vec().into()),
        );
        commit.unchanged = self.authority.clone();
        self.flight = Some(batch);
        self.effects.push(Effect::Commit(Box::new(commit)));
    }

    fn batch_committed(&mut self, number: BatchNumber, outcome: CommitOutcome) {
        if outcome == CommitOutcome::Fenced {
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

    /// A name that is gone from the store needs no mark any more where all names are in memory.
    fn forget_removed(&mut self, batch: &Batch) {
        for (dir, key) in batch.entries() {
            let Some(directory) = self.cache.dirs.get_mut(&dir) else {
                continue;
            };
            let gone = directory.entries.get(key).is_some_and(Option::is_none);
            if directory.complete && gone && !self.open.touches_entry(dir, key) {
                directory.entries.remove(key);
            }
        }
    }

    pub(crate) fn reserve_numbers(&mut self) {
        for counter in Counter::ALL {
            if self.numbers.wants(counter) {
                self.effects.push(Effect::Reserve(counter));
            }
        }
    }

    fn tick(&mut self) {
        self.expire_sessions();
        let over = self
            .cache
            .inodes
            .len()
            .saturating_sub(self.options.cached_inodes_max);
        if over > 0 {
            let mut cache = std::mem::take(&mut self.cache);
            cache.evict(over, |cache, ino| {
                self.is_dirty(ino)
                    || self.leases.holds_any(ino)
                    || cache.inodes.get(&ino).is_some_and(|slot| {
                        self.open.touches_entry(slot.parent, &slot.key)
                            || self
                                .flight
                                .as_ref()
                                .is_some_and(|b| b.touches_entry(slot.parent, &slot.key))
                    })
            });
            self.cache = cache;
        }
        if let Some(expiry) = self.next_expiry() {
            self.effects
                .push(Effect::WakeAt(expiry + Duration::from_millis(1)));
        }
    }
}
