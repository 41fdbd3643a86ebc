//! The core's state, and how requests run, stop, wait and run again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use hither_proto::fragment::Fragment;
use hither_proto::ids::{
    BatchNumber, ChunkId, Epoch, GroupId, InodeId, RankId, RequestNumber, SessionId,
};
use hither_proto::meta::{Reply, Request, WriteReport, request::Op};
use hither_proto::status::Errno;
use hither_proto::stored::{LockTable, SessionState};
use smallvec::SmallVec;

use super::Options;
use super::batch::Batch;
use super::cache::{Cache, EntryKey, LoadKey};
use super::event::{Answer, Counter, Effect, Event, GroupChoice, Refusal, SealChunk, Token};
use super::ids::Numbers;
use super::lease::{GivenName, LeaseTable, Wanted};
use super::locks::Locks;
use super::recalls::PendingRecall;
use super::recovery::Recovery;
use super::requests::KeptReply;
use super::session::{EndStep, Session, no_session};
use super::turns::Turn;

pub(crate) type TaskId = u64;

/// What a task does.
#[derive(Debug)]
pub(crate) enum Work {
    /// A client's request.
    Request(Box<Request>),
    /// A request that was carried out before; only its answer is wanted.
    Again(Box<Request>, KeptReply),
    /// Seal the chunks of a file whose writer is gone.
    Seal {
        ino: InodeId,
        chunks: Vec<SealChunk>,
    },
    /// Take in what a writer has reported in its answer to a recall, then end the recall.
    RecallReport {
        recall: u64,
        session: SessionId,
        report: Box<WriteReport>,
        open: bool,
    },
    /// Look for unlinked inodes nobody holds open.
    SweepStrays,
    /// Remove an unlinked inode a gone session held open.
    RemoveOrphan { ino: InodeId, session: SessionId },
}

impl Work {
    /// The client's request behind it, if there is one.
    pub(crate) fn request(&self) -> Option<&Request> {
        match self {
            Self::Request(request) | Self::Again(request, _) => Some(request),
            Self::Seal { .. }
            | Self::RecallReport { .. }
            | Self::SweepStrays
            | Self::RemoveOrphan { .. } => None,
        }
    }

    /// Whether it may add to the open batch. Little of what has no number does.
    fn may_change(&self) -> bool {
        match self {
            Self::Request(request) => {
                request.number != 0
                    || matches!(request.op, Some(Op::SetLock(_) | Op::CloseInode(_)))
            }
            Self::Again(..) => false,
            Self::Seal { .. }
            | Self::RecallReport { .. }
            | Self::SweepStrays
            | Self::RemoveOrphan { .. } => true,
        }
    }
}

/// Something that is carried out, possibly in several attempts.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) token: Option<Token>,
    pub(crate) work: Work,
    /// Blockers not resolved yet.
    pub(crate) waits: usize,
    /// Files whose writer has just reported: asked once per task.
    pub(crate) fresh: SmallVec<[InodeId; 2]>,
    /// Names that were given back for this task: not asked for again.
    pub(crate) given_back: Vec<GivenName>,
    /// It has waited for another session's data.
    pub(crate) behind_writer: bool,
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
    /// The sessions of before are back or out of time.
    Recovered,
    /// Another rank has authority: until the table of subtrees changes.
    Authority,
    /// The metadata store failed: after a pause.
    Pause,
    /// The open batch is full: until the next one is open.
    Room,
    /// No session of before is missing any more.
    Returned,
    /// The sessions of before have stated what they hold, or are out of time.
    Stated,
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
    /// The request is one of before a takeover, resent.
    pub(crate) replay: bool,
    /// Batch of another session that the answer depends on.
    pub(crate) depends: BatchNumber,
    /// The attempt has changed something.
    pub(crate) changed: bool,
    pub(crate) fresh: SmallVec<[InodeId; 2]>,
    pub(crate) given_back: Vec<GivenName>,
    /// Another session had to write back first.
    pub(crate) behind_writer: bool,
}

impl Attempt {
    /// An attempt without a request behind it.
    pub(crate) fn of_session(session: SessionId) -> Self {
        Self {
            session,
            token: None,
            now: 0,
            replay_ino: 0,
            replay: false,
            depends: BatchNumber(0),
            changed: false,
            fresh: SmallVec::new(),
            given_back: Vec::new(),
            behind_writer: false,
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

/// The deterministic core of one rank.
#[derive(Debug)]
pub struct Core {
    pub(crate) options: Options,
    pub(crate) now: Duration,
    pub(crate) cache: Cache,
    pub(crate) leases: LeaseTable,
    pub(crate) locks: Locks,
    pub(crate) sessions: BTreeMap<SessionId, Session>,
    /// Sessions that are gone, with what is still to be done about them.
    pub(crate) ending: BTreeMap<SessionId, BTreeSet<EndStep>>,
    pub(crate) recovery: Option<Recovery>,
    pub(crate) numbers: Numbers,
    pub(crate) groups: GroupChoice,
    /// Lowest epoch a lease may be given with, by group.
    pub(crate) group_floor: BTreeMap<GroupId, Epoch>,
    pub(crate) subtrees: BTreeMap<(InodeId, Fragment), (RankId, Epoch)>,
    pub(crate) open: Batch,
    pub(crate) flight: Option<Batch>,
    pub(crate) committed: BatchNumber,
    pub(crate) commit_due: Option<Duration>,
    pub(crate) authority: Vec<(Bytes, Bytes)>,
    pub(crate) tasks: BTreeMap<TaskId, Task>,
    /// When tasks of the system that met a failing store go on.
    pub(crate) pause_ends: Option<Duration>,
    /// Turns kept for sessions that have something to store, in the order in which they end.
    pub(crate) turns: VecDeque<Turn>,
    pub(crate) next_task: TaskId,
    pub(crate) waiters: BTreeMap<Blocker, Vec<TaskId>>,
    pub(crate) ready: VecDeque<TaskId>,
    pub(crate) recalls: BTreeMap<u64, PendingRecall>,
    pub(crate) next_recall: u64,
    pub(crate) held_answers: BTreeMap<BatchNumber, Vec<(Token, Answer)>>,
    pub(crate) trim_answers: BTreeMap<InodeId, Vec<(Attempt, Reply, RequestNumber)>>,
    /// What is to be sealed of a file once the seal that is under way is done.
    pub(crate) next_seals: BTreeMap<InodeId, BTreeMap<ChunkId, SealChunk>>,
    pub(crate) effects: Vec<Effect>,
    pub(crate) requests: u64,
}

/// What a rank finds in the store when it starts.
#[derive(Debug, Default)]
pub struct Restored {
    /// Sessions that were open: one part each, and pages of their results.
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
    /// A core that serves what was restored. Sessions that were open have the grace to come back;
    /// until they have (or it has passed), nobody else is served.
    #[must_use]
    pub fn new(options: Options, restored: Restored, now: Duration) -> Self {
        let mut sessions: BTreeMap<SessionId, Session> = BTreeMap::new();
        for state in &restored.sessions {
            let session = sessions.entry(SessionId(state.session)).or_default();
            session.renewed = now;
            session.restore(state);
        }
        let missing: BTreeSet<SessionId> = sessions.keys().copied().collect();
        let committed = restored.last_batch;
        let (grace, lease) = (options.replay_grace, options.session_lease);
        let recovery = Recovery::of(missing, now, grace, lease);
        let leases = LeaseTable::new(options.session_inodes_max);
        let mut core = Self {
            options,
            now,
            cache: Cache::default(),
            leases,
            locks: Locks::restored(restored.locks),
            sessions,
            ending: BTreeMap::new(),
            recovery,
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
            pause_ends: None,
            turns: VecDeque::new(),
            next_task: 1,
            waiters: BTreeMap::new(),
            ready: VecDeque::new(),
            recalls: BTreeMap::new(),
            next_recall: 1,
            held_answers: BTreeMap::new(),
            trim_answers: BTreeMap::new(),
            next_seals: BTreeMap::new(),
            effects: Vec::new(),
            requests: 0,
        };
        core.set_subtrees(restored.subtrees);
        core.drop_ownerless_locks();
        core.reserve_numbers();
        if core.recovery.is_none() {
            core.spawn(Work::SweepStrays);
        }
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
            Event::Gone(tokens) => self.requesters_gone(&tokens),
            Event::Loaded(key, loaded) => self.loaded(&key, *loaded),
            Event::Committed(batch, outcome) => self.batch_committed(batch, outcome),
            Event::Reserved(counter, block) => {
                if counter == Counter::Inode {
                    self.note_first_ino(block.start);
                }
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
                self.effects.push(Effect::Disconnect(session));
                self.answer_after(self.open.number, token, Answer::Done);
            }
            Event::List(token) => self.list_sessions(token),
            Event::Deposed => self.effects.push(Effect::Stop),
            Event::Tick => self.tick(),
        }
        loop {
            self.run_ready();
            self.start_commit();
            if self.ready.is_empty() {
                break;
            }
        }
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

    pub(crate) fn set_subtrees(&mut self, subtrees: Vec<(InodeId, Fragment, RankId, Epoch)>) {
        self.subtrees = subtrees
            .into_iter()
            .map(|(dir, fragment, rank, epoch)| ((dir, fragment), (rank, epoch)))
            .collect();
        self.wake(&Blocker::Authority);
    }

    pub(crate) fn run_ready(&mut self) {
        while let Some(id) = self.ready.pop_front() {
            if let Some(task) = self.tasks.remove(&id) {
                self.run(id, task);
            }
        }
    }

    pub(crate) fn run(&mut self, id: TaskId, mut task: Task) {
        if self.open.is_full() && task.work.may_change() {
            self.tasks.insert(id, task);
            return self.park(id, vec![Blocker::Room]);
        }
        let (session, now, replay, replay_ino) = match &task.work {
            Work::Request(r) | Work::Again(r, _) => {
                (SessionId(r.session), r.now, r.replay, r.replay_ino)
            }
            Work::RecallReport { session, .. } => (*session, 0, false, 0),
            Work::Seal { .. } | Work::RemoveOrphan { .. } | Work::SweepStrays => {
                (SessionId(0), 0, false, 0)
            }
        };
        let mut attempt = Attempt {
            session,
            token: task.token,
            now,
            replay_ino,
            replay,
            depends: BatchNumber(0),
            changed: false,
            fresh: std::mem::take(&mut task.fresh),
            given_back: std::mem::take(&mut task.given_back),
            behind_writer: task.behind_writer,
        };
        let served = |id: SessionId| self.sessions.get(&id).is_some_and(|s| !s.evicting);
        if task.work.request().is_some() && !served(session) {
            return self.finish(&task, &attempt, Err(no_session()));
        }
        let result = match &task.work {
            Work::Request(request) => self.operation(&mut attempt, request),
            Work::Again(request, kept) => self.again(&mut attempt, request, kept),
            Work::Seal { ino, chunks } => self.seal(&mut attempt, *ino, chunks),
            Work::RecallReport {
                recall,
                report,
                open,
                ..
            } => self.report_in_recall(&mut attempt, *recall, report, *open),
            Work::SweepStrays => self.sweep_strays(&mut attempt),
            Work::RemoveOrphan { ino, session } => self.remove_orphan(&mut attempt, *ino, *session),
        };
        task.fresh = std::mem::take(&mut attempt.fresh);
        task.given_back = std::mem::take(&mut attempt.given_back);
        task.behind_writer = attempt.behind_writer;
        match result {
            Ok(reply) => self.finish(&task, &attempt, Ok(reply)),
            Err(Stop::Refuse(refusal)) => self.finish(&task, &attempt, Err(refusal)),
            Err(Stop::Later) => {}
            Err(Stop::Load(keys)) => {
                let blockers = keys.iter().cloned().map(Blocker::Load).collect();
                for key in keys {
                    if !self.waiters.contains_key(&Blocker::Load(key.clone())) {
                        self.cache.begin_load(&key);
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

    pub(crate) fn reserve_numbers(&mut self) {
        for counter in Counter::ALL {
            if self.numbers.wants(counter) {
                self.effects.push(Effect::Reserve(counter));
            }
        }
    }

    /// Drops what is too much in memory, and asks for leases back that keep it there.
    fn make_room(&mut self) {
        let in_batch = |dir: InodeId, key: &EntryKey| {
            let flight = self.flight.as_ref();
            self.open.touches_entry(dir, key) || flight.is_some_and(|b| b.touches_entry(dir, key))
        };
        let mut cache = std::mem::take(&mut self.cache);
        cache.drop_absent(in_batch);
        let max = self.options.cached_inodes_max;
        let over = cache.inodes.len().saturating_sub(max);
        if over > 0 {
            cache.evict(over, |cache, ino| {
                self.is_dirty(ino)
                    || self.leases.holds_any(ino)
                    || cache
                        .inodes
                        .get(&ino)
                        .is_some_and(|slot| in_batch(slot.parent, &slot.key))
            });
        }
        self.cache = cache;
        let over = self.cache.inodes.len().saturating_sub(max);
        self.recall_for_room(over);
    }

    pub(crate) fn tick(&mut self) {
        if self.pause_ends.is_some_and(|ends| ends <= self.now) {
            self.pause_ends = None;
            self.wake(&Blocker::Pause);
        }
        self.expire_turns();
        self.expire_sessions();
        self.look_after_recalls();
        self.advance_recovery();
        self.make_room();
        if let Some(expiry) = self.next_expiry() {
            self.effects
                .push(Effect::WakeAt(expiry + Duration::from_millis(1)));
        }
    }
}
