//! A store in memory, clients that answer recalls, and time that only tests move.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use hither_proto::fragment::Fragment;
use hither_proto::ids::{BatchNumber, Epoch, GroupId, InodeId, ROOT, RankId, SessionId};
use hither_proto::meta::{
    Create, Getattr, HeldLease, Lookup, Readdir, Recall, RecallReply, Reclaim, Reply, Request,
    SessionOpen, Unlink, request::Op,
};
use hither_proto::status::Status;
use hither_proto::stored::{
    BackPointer, ChunkPage, Dentry, FragmentHead, LockTable, RankState, SessionState,
};
use prost::Message;

use crate::core::run::Restored;
use crate::core::{
    Answer, CommitOutcome, Core, Counter, Effect, EntryKey, Event, LoadKey, Loaded, Options,
    SealChunk, Token,
};
use crate::keys;

pub(super) const CLASS: u32 = 1;

/// What a client does when something is recalled from it.
pub(super) type OnRecall = Box<dyn FnMut(SessionId, &Recall) -> Option<RecallReply>>;

pub(super) struct World {
    pub(super) core: Core,
    pub(super) store: BTreeMap<Bytes, Bytes>,
    pub(super) now: Duration,
    answers: BTreeMap<Token, Answer>,
    next_token: u64,
    next_number: u64,
    pub(super) on_recall: OnRecall,
    pub(super) recalls: Vec<(SessionId, Recall)>,
    /// Recalls that got no answer yet.
    unanswered: Vec<u64>,
    /// Commits wait here while the store is held.
    pub(super) held_commits: VecDeque<Box<crate::core::Commit>>,
    pub(super) hold_commits: bool,
    pub(super) hold_data: bool,
    /// Seals, trims and fences nobody carried out yet.
    pub(super) data_effects: VecDeque<Effect>,
    /// What the chunkservers will list as open when a session is fenced.
    pub(super) open_chunks: BTreeMap<SessionId, Vec<(InodeId, SealChunk)>>,
    /// Loads that have been read and have not arrived.
    pub(super) held_loads: Vec<Event>,
    pub(super) hold_loads: bool,
    /// Bytes of the largest batch so far.
    pub(super) largest_commit: usize,
    /// So many of the next loads fail.
    pub(super) failing_loads: u32,
    pub(super) stopped: bool,
    /// Sessions whose connections were closed.
    pub(super) disconnected: Vec<SessionId>,
    rank: RankId,
}

impl World {
    pub(super) fn new() -> Self {
        let mut store = BTreeMap::new();
        for (key, value) in Core::bootstrap_writes(CLASS, 1) {
            store.insert(key, value);
        }
        store.insert(
            keys::subtree(ROOT, Fragment::WHOLE),
            Bytes::from_static(b"mine"),
        );
        Self::on(store, RankId(0), Vec::new())
    }

    /// A rank that starts on what a store holds.
    pub(super) fn on(
        store: BTreeMap<Bytes, Bytes>,
        rank: RankId,
        subtrees: Vec<(InodeId, Fragment, RankId, Epoch)>,
    ) -> Self {
        let now = Duration::from_secs(100);
        let mut store = store;
        let core = start(&mut store, rank, subtrees, now);
        let mut world = Self {
            core,
            store,
            now,
            answers: BTreeMap::new(),
            next_token: 1,
            next_number: 1000,
            on_recall: Box::new(|_, _| Some(RecallReply::default())),
            recalls: Vec::new(),
            unanswered: Vec::new(),
            held_commits: VecDeque::new(),
            hold_commits: false,
            hold_data: false,
            data_effects: VecDeque::new(),
            open_chunks: BTreeMap::new(),
            held_loads: Vec::new(),
            hold_loads: false,
            largest_commit: 0,
            failing_loads: 0,
            stopped: false,
            disconnected: Vec::new(),
            rank,
        };
        world.event(Event::Tick);
        world
    }

    /// The process dies and a successor starts on what the store holds.
    pub(super) fn crash(&mut self) {
        self.held_commits.clear();
        self.hold_commits = false;
        self.data_effects.clear();
        self.answers.clear();
        self.core = start(&mut self.store, self.rank, Vec::new(), self.now);
        self.event(Event::Tick);
    }

    /// Acknowledges every recall that got no answer.
    pub(super) fn answer_recalls(&mut self) {
        self.answer_recalls_with(&RecallReply::default());
    }

    /// The same, with this.
    pub(super) fn answer_recalls_with(&mut self, reply: &RecallReply) {
        for id in std::mem::take(&mut self.unanswered) {
            self.event(Event::RecallAnswered(id, Some(reply.clone())));
        }
    }

    pub(super) fn event(&mut self, event: Event) {
        let mut todo: VecDeque<Effect> = self.core.handle(event, self.now).into();
        while let Some(effect) = todo.pop_front() {
            for event in self.carry_out(effect) {
                todo.extend(self.core.handle(event, self.now));
            }
        }
    }

    fn carry_out(&mut self, effect: Effect) -> Vec<Event> {
        match effect {
            Effect::Answer(token, answer) => {
                assert!(
                    self.answers.insert(token, answer).is_none(),
                    "answered twice"
                );
            }
            Effect::Load(key) => {
                let fails = self.failing_loads > 0;
                self.failing_loads -= u32::from(fails);
                let loaded = if fails {
                    Loaded::Failed
                } else {
                    self.load(&key)
                };
                let event = Event::Loaded(key, Box::new(loaded));
                if self.hold_loads {
                    self.held_loads.push(event);
                    return Vec::new();
                }
                return vec![event];
            }
            Effect::Commit(commit) => {
                self.held_commits.push_back(commit);
                if !self.hold_commits {
                    return self.commit_next().into_iter().collect();
                }
            }
            Effect::Reserve(counter) => {
                let block = self.reserve(counter);
                return vec![Event::Reserved(counter, block)];
            }
            Effect::Recall(id, session, recall) => {
                let answer = (self.on_recall)(session, &recall);
                if answer.is_none() {
                    self.unanswered.push(id);
                }
                self.recalls.push((session, recall));
                return vec![Event::RecallAnswered(id, answer)];
            }
            Effect::Stop => self.stopped = true,
            Effect::Disconnect(session) => self.disconnected.push(session),
            Effect::Trim(..) | Effect::Seal(..) | Effect::Fence(_) => {
                self.data_effects.push_back(effect);
                if !self.hold_data {
                    return self.data_next().into_iter().collect();
                }
            }
            Effect::Safe(..) | Effect::FreeChunks | Effect::WakeAt(_) => {}
        }
        Vec::new()
    }

    /// Applies the oldest held commit to the store.
    pub(super) fn commit_next(&mut self) -> Option<Event> {
        let commit = self.held_commits.pop_front()?;
        let (mut bytes, mut largest) = (0, 0);
        for (key, value) in &commit.writes {
            let value = value.as_ref().map_or(0, Bytes::len);
            bytes += key.len() + value;
            largest = largest.max(value);
        }
        self.largest_commit = self.largest_commit.max(bytes);
        assert!(bytes < hither_metastore::BATCH_BYTES_MAX, "batch: {bytes}");
        assert!(largest < 1 << 20, "value: {largest}");
        let stands = commit
            .unchanged
            .iter()
            .all(|(key, value)| self.store.get(key) == Some(value));
        if !stands {
            return Some(Event::Committed(commit.batch, CommitOutcome::Fenced));
        }
        for (from, to) in &commit.delete_ranges {
            let gone: Vec<Bytes> = self
                .store
                .range(from.clone()..to.clone())
                .map(|(key, _)| key.clone())
                .collect();
            for key in gone {
                self.store.remove(&key);
            }
        }
        for (key, value) in commit.writes {
            match value {
                Some(value) => self.store.insert(key, value),
                None => self.store.remove(&key),
            };
        }
        Some(Event::Committed(commit.batch, CommitOutcome::Done))
    }

    /// Carries out the oldest held seal, trim or fence as chunkservers would.
    pub(super) fn data_next(&mut self) -> Option<Event> {
        match self.data_effects.pop_front()? {
            Effect::Trim(ino, chunk) => Some(Event::Trimmed(ino, chunk.group, Epoch(1))),
            Effect::Seal(ino, chunks) => {
                let done = chunks
                    .into_iter()
                    .map(|chunk| (chunk, true, Epoch(1)))
                    .collect();
                Some(Event::Sealed(ino, done))
            }
            Effect::Fence(session) => {
                let open = self.open_chunks.remove(&session).unwrap_or_default();
                Some(Event::Fenced(session, open))
            }
            other => panic!("not a data effect: {other:?}"),
        }
    }

    fn reserve(&mut self, counter: Counter) -> Range<u64> {
        let key = keys::counter(counter.name());
        let next = self.store.get(&key).map_or(1000, |value| {
            u64::from_be_bytes(value[..].try_into().unwrap())
        });
        let end = next + counter.block();
        self.store
            .insert(key, Bytes::copy_from_slice(&end.to_be_bytes()));
        next..end
    }

    fn load(&self, key: &LoadKey) -> Loaded {
        fn decode<M: Message + Default>(value: Option<&Bytes>) -> Option<M> {
            value.map(|value| M::decode(value.clone()).unwrap())
        }
        match key {
            LoadKey::Entry(dir, entry) => Loaded::Entry(decode::<Dentry>(
                self.store.get(&keys::dentry(*dir, entry.hash, &entry.name)),
            )),
            LoadKey::Head(dir) => Loaded::Head(decode::<FragmentHead>(
                self.store.get(&keys::fragment_head(*dir, Fragment::WHOLE)),
            )),
            LoadKey::BackPointer(ino) => Loaded::BackPointer(decode::<BackPointer>(
                self.store.get(&keys::back_pointer(*ino)),
            )),
            LoadKey::Page(ino, page) => Loaded::Page(
                decode::<ChunkPage>(self.store.get(&keys::chunk_page(*ino, *page)))
                    .unwrap_or_default(),
            ),
            LoadKey::Directory(dir, after) => self.load_page(*dir, after.as_ref()),
        }
    }

    fn load_page(&self, dir: InodeId, after: Option<&EntryKey>) -> Loaded {
        let from = match after {
            Some(after) => keys::dentry(dir, after.hash, &after.name),
            None => keys::dentry(dir, hither_proto::ids::NameHash(0), b""),
        };
        let mut found: Vec<(EntryKey, Dentry)> = self
            .store
            .range(from.clone()..keys::dentry_end(dir))
            .filter(|(key, _)| after.is_none() || **key != from)
            .take(4)
            .map(|(key, value)| {
                let (_, hash, name) = keys::parse_dentry(key).unwrap();
                (
                    EntryKey { hash, name },
                    Dentry::decode(value.clone()).unwrap(),
                )
            })
            .collect();
        let more = found.len() > 3;
        found.truncate(3);
        Loaded::Directory(found, more)
    }

    // ---- as a client

    pub(super) fn token(&mut self) -> Token {
        self.next_token += 1;
        Token(self.next_token)
    }

    pub(super) fn session(&mut self, host: &str) -> SessionId {
        let token = self.token();
        let open = SessionOpen {
            host: host.into(),
            ..SessionOpen::default()
        };
        self.event(Event::SessionOpen(token, open));
        match self.answers.remove(&token) {
            Some(Answer::Opened(reply)) => SessionId(reply.session),
            other => panic!("no session: {other:?}"),
        }
    }

    /// Goes on with a session after a crash; whether the rank knew it.
    pub(super) fn resume(&mut self, session: SessionId) -> bool {
        let token = self.token();
        let open = SessionOpen {
            session: session.0,
            ..SessionOpen::default()
        };
        self.event(Event::SessionOpen(token, open));
        match self.answers.remove(&token) {
            Some(Answer::Opened(reply)) => reply.resumed,
            other => panic!("no session: {other:?}"),
        }
    }

    /// Re-states leases and open inodes.
    pub(super) fn reclaim(
        &mut self,
        session: SessionId,
        leases: Vec<HeldLease>,
        open: Vec<u64>,
        done: bool,
    ) {
        let token = self.token();
        let reclaim = Reclaim {
            leases,
            open,
            done,
            ..Reclaim::default()
        };
        self.event(Event::Reclaim(token, session, reclaim));
        assert_eq!(self.answers.remove(&token), Some(Answer::Done));
    }

    /// Goes on after a crash with nothing to resend.
    pub(super) fn come_back(&mut self, session: SessionId, leases: Vec<HeldLease>, open: Vec<u64>) {
        assert!(self.resume(session));
        self.reclaim(session, leases, open, true);
    }

    /// The session dies; all others stay alive until it is evicted.
    pub(super) fn lose(&mut self, lost: SessionId, others: &[SessionId]) {
        for _ in 0..20 {
            self.now += Duration::from_secs(1);
            for other in others {
                let token = self.token();
                self.event(Event::SessionRenew(token, *other, 0));
                assert_eq!(self.answers.remove(&token), Some(Answer::Done), "of {lost}");
            }
            self.event(Event::Tick);
        }
    }

    /// Sends; the answer may be there already or come later.
    pub(super) fn send(&mut self, session: SessionId, op: Op) -> Token {
        let number = self.next_number;
        self.next_number += 1;
        self.send_numbered(session, number, false, op)
    }

    pub(super) fn send_numbered(
        &mut self,
        session: SessionId,
        number: u64,
        replay: bool,
        op: Op,
    ) -> Token {
        let token = self.token();
        let now = i64::try_from(self.now.as_nanos()).unwrap();
        let request = Request {
            session: session.0,
            number,
            replay,
            now,
            op: Some(op),
            ..Request::default()
        };
        self.event(Event::Request(token, Box::new(request)));
        token
    }

    pub(super) fn take(&mut self, token: Token) -> Option<Answer> {
        self.answers.remove(&token)
    }

    /// Sends, lets batches commit, and takes the reply.
    pub(super) fn ask(&mut self, session: SessionId, op: Op) -> Result<Reply, Status> {
        let token = self.send(session, op);
        self.settle();
        self.result(token)
    }

    pub(super) fn result(&mut self, token: Token) -> Result<Reply, Status> {
        match self.take(token) {
            Some(Answer::Reply(reply)) => Ok(*reply),
            Some(Answer::Refused(refusal)) => Err(refusal.status),
            other => panic!("no reply: {other:?}"),
        }
    }

    /// Lets open batches become due and commit.
    pub(super) fn settle(&mut self) {
        for _ in 0..3 {
            self.now += Duration::from_millis(10);
            self.event(Event::Tick);
        }
    }

    pub(super) fn create(&mut self, session: SessionId, dir: u64, name: &str, mode: u32) -> u64 {
        self.ask(session, create(dir, name, mode))
            .unwrap()
            .inode
            .unwrap()
            .ino
    }

    pub(super) fn lookup(&mut self, session: SessionId, dir: u64, name: &str) -> Option<u64> {
        let reply = self.ask(session, lookup(dir, name)).unwrap();
        reply.inode.map(|inode| inode.ino)
    }

    /// Whether the session may write the file.
    pub(super) fn holds_exclusive(&self, session: SessionId, ino: u64) -> bool {
        let leases = self.core.leases.of(InodeId(ino));
        leases.is_some_and(|leases| {
            matches!(&leases.data, crate::core::lease::Data::Exclusive(held) if held.session == session)
        })
    }

    /// Whether the session is told of changes of the inode's attributes.
    pub(super) fn leases_attributes(&self, session: SessionId, ino: u64) -> bool {
        let leases = self.core.leases.of(InodeId(ino));
        leases.is_some_and(|leases| leases.attributes.contains(&session))
    }

    pub(super) fn names(&mut self, session: SessionId, dir: u64) -> BTreeSet<String> {
        let mut all = BTreeSet::new();
        let mut page = Readdir {
            dir,
            start: true,
            limit: 2,
            ..Readdir::default()
        };
        loop {
            let reply = self.ask(session, Op::Readdir(page.clone())).unwrap();
            for entry in &reply.entries {
                let name = String::from_utf8(entry.name.to_vec()).unwrap();
                assert!(all.insert(name), "listed twice");
            }
            if reply.end {
                return all;
            }
            let last = reply.entries.last().unwrap();
            page.start = false;
            page.after_hash = last.hash;
            page.after_name = last.name.clone();
        }
    }
}

fn start(
    store: &mut BTreeMap<Bytes, Bytes>,
    rank: RankId,
    subtrees: Vec<(InodeId, Fragment, RankId, Epoch)>,
    now: Duration,
) -> Core {
    let sessions = store
        .range(Bytes::from_static(b"o/")..keys::prefix_end(b"o/"))
        .map(|(_, value)| SessionState::decode(value.clone()).unwrap())
        .collect();
    let last_batch = store
        .get(&keys::rank_state(rank))
        .map_or(0, |value| RankState::decode(value.clone()).unwrap().batch);
    let state = RankState {
        batch: last_batch,
        epoch: 1,
    };
    store.insert(keys::rank_state(rank), state.encode_to_vec().into());
    let root = keys::subtree(ROOT, Fragment::WHOLE);
    let groups = crate::core::event::GroupChoice {
        by_class: BTreeMap::from([(CLASS, vec![GroupId(1), GroupId(2)])]),
        epochs: BTreeMap::from([(GroupId(1), Epoch(1)), (GroupId(2), Epoch(1))]),
        full: BTreeSet::new(),
        default_class: CLASS,
        total_bytes: 1 << 40,
        free_bytes: 1 << 39,
    };
    Core::new(
        Options {
            rank,
            epoch: Epoch(1),
            session_lease: Duration::from_secs(15),
            replay_grace: Duration::from_secs(1),
            early_answers: true,
            batch_delay: Duration::from_millis(5),
            cached_inodes_max: 1000,
            session_inodes_max: 400,
        },
        Restored {
            sessions,
            locks: store
                .range(Bytes::from_static(b"l/")..keys::prefix_end(b"l/"))
                .map(|(key, value)| {
                    let ino = InodeId(keys::parse_number(key).unwrap());
                    (ino, LockTable::decode(value.clone()).unwrap())
                })
                .collect(),
            last_batch: BatchNumber(last_batch),
            authority: store
                .get(&root)
                .map(|value| (root.clone(), value.clone()))
                .into_iter()
                .collect(),
            subtrees,
            groups,
        },
        now,
    )
}

pub(super) fn create(dir: u64, name: &str, mode: u32) -> Op {
    Op::Create(Create {
        parent: dir,
        name: Bytes::copy_from_slice(name.as_bytes()),
        mode,
        exclusive: true,
        ..Create::default()
    })
}

pub(super) fn lookup(dir: u64, name: &str) -> Op {
    Op::Lookup(Lookup {
        parent: dir,
        name: Bytes::copy_from_slice(name.as_bytes()),
    })
}

/// An exclusive data lease as a client re-states it.
pub(super) fn exclusive(ino: u64, lease: u64) -> HeldLease {
    HeldLease {
        ino,
        data_lease: lease,
        exclusive: true,
        ..HeldLease::default()
    }
}

pub(super) fn getattr(ino: u64) -> Op {
    Op::Getattr(Getattr { ino, hint: None })
}

pub(super) fn unlink(dir: u64, name: &str, directory: bool) -> Op {
    Op::Unlink(Unlink {
        parent: dir,
        name: Bytes::copy_from_slice(name.as_bytes()),
        directory,
        ..Unlink::default()
    })
}
