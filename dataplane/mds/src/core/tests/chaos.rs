//! Seeded: several sessions work, the rank and clients die at random points, what is kept is checked.
//!
//! Three promises: what was answered as safe is never lost; what another session has seen never
//! vanishes by itself; a file that is open elsewhere keeps its data.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use hither_proto::ids::{ROOT, SessionId};
use hither_proto::meta::{Hint, Rename, Reply, Request, Unlink, WriteReport, request::Op};
use hither_proto::status::{Errno, Status};
use hither_proto::stored::ChunkRef;

use super::data::{acquire, report};
use super::world::{World, getattr, lookup};
use crate::core::{Answer, Event, Token};

/// Seeds run by the test, and steps of each.
const SEEDS: u64 = 100;
const STEPS: usize = 120;
const NAMES: u64 = 6;

/// A small generator (splitmix64): the same numbers for the same seed everywhere.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }
}

/// What a client keeps: requests that were answered early, open files, what it knows.
#[derive(Default)]
struct Client {
    session: SessionId,
    next: u64,
    /// Answered and not known to be safe, in order.
    early: BTreeMap<u64, (Request, u64)>,
    /// Open inodes with the data each is known to have, if any.
    open: BTreeMap<u64, Option<(u64, ChunkRef)>>,
}

struct Run {
    world: World,
    dice: Dice,
    clients: Vec<Client>,
    /// Names with their inodes as every client would see them now; one model for all, as all
    /// operations are answered before the next one begins.
    names: BTreeMap<String, u64>,
}

fn name_of(n: u64) -> String {
    format!("n{n}")
}

fn bytes_of(name: &str) -> Bytes {
    Bytes::copy_from_slice(name.as_bytes())
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut world = World::new();
        let clients = ["a", "b", "c"]
            .map(|host| Client {
                session: world.session(host),
                next: 1,
                ..Client::default()
            })
            .into();
        Self {
            world,
            dice: Dice(seed),
            clients,
            names: BTreeMap::new(),
        }
    }

    fn op(&mut self, who: usize, op: Op) -> Result<Reply, Status> {
        let client = &mut self.clients[who];
        let number = client.next;
        client.next += 1;
        let ack_below = client.early.keys().next().copied().unwrap_or(number);
        let request = Request {
            session: client.session.0,
            number,
            ack_below,
            op: Some(op),
            ..Request::default()
        };
        let reply = loop {
            let token = self.deliver(request.clone());
            match self.wait(token) {
                Answer::Reply(reply) => break *reply,
                // A load failed.
                Answer::Refused(refusal) if refusal.status == Status::RETRY => {}
                Answer::Refused(refusal) => return Err(refusal.status),
                other => panic!("{other:?}"),
            }
        };
        if reply.batch > self.world.core.committed.0 {
            let ino = reply.inode.as_ref().map_or(0, |inode| inode.ino);
            let early = &mut self.clients[who].early;
            early.insert(number, (request, ino));
        }
        Ok(reply)
    }

    fn deliver(&mut self, request: Request) -> Token {
        // What a recall asks for is answered from the clients' state at this moment.
        let open: BTreeMap<SessionId, BTreeSet<u64>> = self
            .clients
            .iter()
            .map(|client| (client.session, client.open.keys().copied().collect()))
            .collect();
        self.world.on_recall = Box::new(move |session, recall| {
            Some(hither_proto::meta::RecallReply {
                pages: false,
                open: open
                    .get(&session)
                    .is_some_and(|of| of.contains(&recall.ino)),
                report: None,
            })
        });
        let token = self.world.token();
        self.world.event(Event::Request(token, Box::new(request)));
        token
    }

    /// Lets held commits happen one after the other until the answer is there.
    fn wait(&mut self, token: Token) -> Answer {
        for _ in 0..200 {
            if let Some(answer) = self.world.take(token) {
                return answer;
            }
            self.commit();
        }
        panic!("no answer")
    }

    fn commit(&mut self) {
        self.world.now += std::time::Duration::from_millis(10);
        self.world.event(Event::Tick);
        if let Some(event) = self.world.commit_next() {
            self.world.event(event);
        }
        let committed = self.world.core.committed.0;
        let _ = committed;
    }

    fn step(&mut self) {
        let who = usize::try_from(self.dice.roll(self.clients.len() as u64)).unwrap();
        let (from, to) = (
            name_of(self.dice.roll(NAMES)),
            name_of(self.dice.roll(NAMES)),
        );
        match self.dice.roll(16) {
            0..4 => self.create(who, &from),
            4..7 => self.unlink(who, &from),
            7..9 => self.rename(who, &from, &to),
            9..12 => self.look(who, &from),
            12 => self.close(who),
            13 => self.commit(),
            14 => self.safe(who),
            _ => self.crash(),
        }
    }

    fn create(&mut self, who: usize, name: &str) {
        let op = hither_proto::meta::Create {
            parent: ROOT.0,
            name: bytes_of(name),
            mode: 0o100_644,
            exclusive: true,
            open_for_write: true,
            ..Default::default()
        };
        let made = self.op(who, Op::Create(op));
        if self.names.contains_key(name) {
            return assert_eq!(made.err(), Some(Errno::EEXIST.into()), "create {name}");
        }
        let made = made.unwrap();
        let ino = made.inode.unwrap().ino;
        self.names.insert(name.to_owned(), ino);
        let size = 1 + self.dice.roll(1 << 20);
        let done = WriteReport {
            release: true,
            hint: Some(Hint {
                parent: ROOT.0,
                name: bytes_of(name),
            }),
            ..report(ino, made.data_lease, size, made.chunks.clone())
        };
        self.op(who, Op::WriteReport(done)).unwrap();
        if self.dice.roll(2) == 0 {
            self.open(who, ino);
        }
    }

    fn open(&mut self, who: usize, ino: u64) {
        let opened = self.op(who, acquire(ino, false)).unwrap();
        let size = opened.inode.unwrap().size;
        let data = opened.chunks.first().map(|chunk| (size, *chunk));
        self.clients[who].open.insert(ino, data);
    }

    fn unlink(&mut self, who: usize, name: &str) {
        let ino = self.names.remove(name);
        let op = Unlink {
            parent: ROOT.0,
            name: bytes_of(name),
            expect_ino: ino.unwrap_or_default(),
            held_open: ino.is_some_and(|ino| self.clients[who].open.contains_key(&ino)),
            ..Unlink::default()
        };
        let gone = self.op(who, Op::Unlink(op));
        match ino {
            Some(_) => assert!(gone.is_ok(), "unlink {name}: {gone:?}"),
            None => assert_eq!(gone.err(), Some(Errno::ENOENT.into()), "unlink {name}"),
        }
    }

    fn rename(&mut self, who: usize, from: &str, to: &str) {
        let over = self.names.get(to).copied();
        let op = Rename {
            parent: ROOT.0,
            name: bytes_of(from),
            new_parent: ROOT.0,
            new_name: bytes_of(to),
            expect_ino: over.unwrap_or_default(),
            held_open: over.is_some_and(|ino| self.clients[who].open.contains_key(&ino)),
            ..Rename::default()
        };
        let moved = self.op(who, Op::Rename(op));
        match self.names.get(from).copied() {
            Some(ino) => {
                moved.unwrap();
                self.names.remove(from);
                self.names.insert(to.to_owned(), ino);
            }
            None => assert_eq!(moved.err(), Some(Errno::ENOENT.into()), "rename {from}"),
        }
    }

    fn look(&mut self, who: usize, name: &str) {
        let found = self.op(who, lookup(ROOT.0, name)).unwrap();
        let found = found.inode.map(|inode| inode.ino);
        assert_eq!(found, self.names.get(name).copied(), "lookup {name}");
        if let Some(ino) = found
            && self.dice.roll(3) == 0
        {
            self.open(who, ino);
        }
    }

    fn close(&mut self, who: usize) {
        let Some((ino, _)) = self.clients[who].open.pop_first() else {
            return;
        };
        let close = hither_proto::meta::CloseInode { ino };
        self.op(who, Op::CloseInode(close)).unwrap();
    }

    fn safe(&mut self, who: usize) {
        self.op(who, Op::Barrier(hither_proto::meta::Barrier {}))
            .unwrap();
        // Everything the session has changed is in the store: it is not resent any more.
        self.clients[who].early.clear();
    }

    /// The rank dies; everybody comes back, in any order, and resends what may be lost.
    fn crash(&mut self) {
        if self.dice.roll(2) == 0 {
            // The batch is in the store, and the rank never heard of it.
            let unheard = self.world.commit_next();
            drop(unheard);
        }
        self.world.crash();
        self.world.hold_commits = true;
        let mut tokens = Vec::new();
        let first = usize::try_from(self.dice.roll(self.clients.len() as u64)).unwrap();
        for n in 0..self.clients.len() {
            let who = (first + n) % self.clients.len();
            let client = &self.clients[who];
            let (session, open) = (client.session, client.open.keys().copied().collect());
            let early = client.early.iter();
            let early = early.map(|(number, (request, ino))| (*number, request.clone(), *ino));
            let mut early = early.collect::<Vec<_>>().into_iter();
            assert!(self.world.resume(session));
            self.world.reclaim(session, vec![], open, false);
            // One after the other in each session, as a client does; sessions as they come.
            match early.next() {
                Some(first) => {
                    let token = self.resend(&first);
                    tokens.push((who, token, first, early));
                }
                None => self.world.reclaim(session, vec![], vec![], true),
            }
        }
        for (who, mut token, mut now, mut early) in tokens {
            loop {
                let answer = self.wait(token);
                assert!(
                    matches!(answer, Answer::Reply(_)),
                    "resent by {who}: {now:?}: {answer:?}"
                );
                match early.next() {
                    Some(next) => {
                        token = self.resend(&next);
                        now = next;
                    }
                    None => break,
                }
            }
            let session = self.clients[who].session;
            self.world.reclaim(session, vec![], vec![], true);
        }
        self.world.failing_loads = u32::try_from(self.dice.roll(4)).unwrap();
        self.check();
    }

    fn resend(&mut self, (_, request, ino): &(u64, Request, u64)) -> Token {
        let mut request = request.clone();
        request.replay = true;
        if let Some(Op::Create(create)) = &mut request.op {
            request.replay_ino = *ino;
            create.open_for_write = false;
        }
        self.deliver(request)
    }

    /// Every name is there with its inode, and open files have their data.
    fn check(&mut self) {
        for n in 0..NAMES {
            let name = name_of(n);
            let found = self.op(0, lookup(ROOT.0, &name)).unwrap();
            let found = found.inode.map(|inode| inode.ino);
            assert_eq!(found, self.names.get(&name).copied(), "name {name}");
        }
        for who in 0..self.clients.len() {
            let open: Vec<_> = self.clients[who].open.clone().into_iter().collect();
            for (ino, data) in open {
                let inode = self.op(who, getattr(ino)).unwrap().inode.unwrap();
                let Some((size, chunk)) = data else { continue };
                assert_eq!(inode.size, size, "size of {ino}");
                assert_eq!(inode.chunks, vec![chunk], "chunks of {ino}");
                let free = crate::keys::free_chunk(
                    hither_proto::ids::GroupId(chunk.group),
                    hither_proto::ids::ChunkId(chunk.chunk),
                );
                assert!(!self.world.store.contains_key(&free), "open and freed");
            }
        }
    }
}

#[test]
fn nothing_that_counts_is_lost_whenever_the_rank_dies() {
    for seed in 0..SEEDS {
        let run = std::panic::catch_unwind(|| {
            let mut run = Run::new(seed);
            run.world.hold_commits = true;
            for _ in 0..STEPS {
                run.step();
            }
            run.crash();
        });
        assert!(run.is_ok(), "seed {seed}");
    }
}
