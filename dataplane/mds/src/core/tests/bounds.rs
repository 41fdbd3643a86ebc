//! Bounds: of batches, of values, of what a session may keep.

use bytes::Bytes;
use hither_proto::ids::{ROOT, SessionId};
use hither_proto::meta::{SetLock, SetXattr, Setattr, Unlink, request::Op};
use hither_proto::status::Errno;
use hither_proto::stored::{HeldLock, LockTable};
use prost::Message;

use super::data::{open_new, report};
use super::world::{World, create};
use crate::core::Token;

const FILE: u32 = 0o100_644;

/// Lets all held commits happen, one after the other.
fn release(world: &mut World) {
    world.hold_commits = false;
    while let Some(event) = world.commit_next() {
        world.event(event);
    }
    world.settle();
}

/// `chown -R` over files with large attributes made a batch the store refuses, and the rank died.
#[test]
fn a_batch_is_closed_before_the_store_would_refuse_it() {
    let mut world = World::new();
    let s = world.session("a");
    let value = Bytes::from(vec![7; 60 << 10]);
    let files: Vec<u64> = (0..160)
        .map(|n| {
            let ino = world.create(s, ROOT.0, &format!("f{n}"), FILE);
            let op = SetXattr {
                ino,
                name: Bytes::from_static(b"user.large"),
                value: value.clone(),
                ..SetXattr::default()
            };
            world.ask(s, Op::SetXattr(op)).unwrap();
            ino
        })
        .collect();
    world.hold_commits = true;
    let chown = |ino: u64| {
        Op::Setattr(Setattr {
            ino,
            uid: Some(5),
            ..Setattr::default()
        })
    };
    let tokens: Vec<Token> = files.iter().map(|ino| world.send(s, chown(*ino))).collect();
    release(&mut world);
    for token in tokens {
        assert_eq!(world.result(token).unwrap().inode.unwrap().uid, 5);
    }
    let largest = world.largest_commit;
    assert!((1 << 20..3 << 20).contains(&largest), "{largest}");
}

fn lock(ino: u64, start: u64, end: u64, unlock: bool) -> SetLock {
    SetLock {
        ino,
        hint: None,
        lock: Some(HeldLock {
            owner: u64::MAX,
            exclusive: true,
            start,
            end,
            ..HeldLock::default()
        }),
        unlock,
        wait: false,
    }
}

/// So many locks on one file did not fit into a value, and the rank died.
#[test]
fn a_file_has_a_bounded_number_of_locks() {
    let mut world = World::new();
    let s = world.session("a");
    let ino = world.create(s, ROOT.0, "f", FILE);
    let table = LockTable {
        locks: (0..8191)
            .map(|n| HeldLock {
                session: s.0,
                ..lock(ino, 1000 + 2 * n, 1000 + 2 * n, false).lock.unwrap()
            })
            .collect(),
    };
    let key = crate::keys::locks(hither_proto::ids::InodeId(ino));
    world.store.insert(key, table.encode_to_vec().into());
    world.crash();
    world.come_back(s, vec![], vec![]);
    assert_eq!(world.lookup(s, ROOT.0, "f"), Some(ino));
    world.ask(s, Op::SetLock(lock(ino, 1, 3, false))).unwrap();
    let more = world.ask(s, Op::SetLock(lock(ino, 5, 5, false)));
    assert_eq!(more, Err(Errno::ENOLCK.into()));
    let split = world.ask(s, Op::SetLock(lock(ino, 2, 2, true)));
    assert_eq!(split, Err(Errno::ENOLCK.into()));
    // All of them go at once, and then there is room again.
    world
        .ask(s, Op::SetLock(lock(ino, 0, u64::MAX, true)))
        .unwrap();
    world.ask(s, Op::SetLock(lock(ino, 0, 0, false))).unwrap();
}

/// The results of one session did not fit into a value; they are kept in pages, and come back.
#[test]
fn a_session_keeps_many_results() {
    let mut world = World::new();
    let s = world.session("a");
    for n in 0..3000 {
        let op = create(ROOT.0, &format!("f{n}"), FILE);
        let token = world.send_numbered(s, 5000 + n, false, op);
        world.result(token).unwrap();
    }
    world.settle();
    let first = world.lookup(s, ROOT.0, "f0").unwrap();
    world.crash();
    assert!(world.resume(s));
    let op = create(ROOT.0, "f0", FILE);
    let again = world.send_numbered(s, 5000, true, op);
    assert_eq!(world.result(again).unwrap().inode.unwrap().ino, first);
    world.reclaim(s, vec![], vec![], true);
    // Acknowledged, they leave the store; so does the session with all its pages.
    let pages = |world: &World| {
        let session = crate::keys::session_range(s);
        world.store.range(session.0..session.1).count()
    };
    assert!(pages(&world) > 3);
    let acked = hither_proto::meta::Request {
        session: s.0,
        number: 8000,
        ack_below: 8000,
        op: Some(create(ROOT.0, "last", FILE)),
        ..Default::default()
    };
    let token = world.token();
    world.event(crate::core::Event::Request(token, Box::new(acked)));
    world.settle();
    assert_eq!(pages(&world), 2);
    let token = world.token();
    world.event(crate::core::Event::SessionClose(token, s));
    world.settle();
    assert_eq!(pages(&world), 0);
}

/// A file with more chunks than a batch frees goes piece by piece, also after a crash.
#[test]
fn a_file_of_very_many_chunks_is_removed_in_pieces() {
    for crash in [false, true] {
        let mut world = World::new();
        let s = world.session("a");
        let (ino, lease, _) = open_new(&mut world, s, "f");
        let count = 70_000;
        let chunks = (0..count).map(|index| hither_proto::stored::ChunkRef {
            index,
            chunk: 1_000_000 + u64::from(index),
            group: 1,
            written: true,
        });
        let chunks: Vec<_> = chunks.collect();
        let size = u64::from(count) * hither_proto::ids::CHUNK_SIZE;
        for part in chunks.chunks(10_000) {
            let op = Op::WriteReport(report(ino, lease, size, part.to_vec()));
            world.ask(s, op).unwrap();
        }
        let op = Op::WriteReport(hither_proto::meta::WriteReport {
            release: true,
            ..report(ino, lease, size, vec![])
        });
        world.ask(s, op).unwrap();
        let gone = Op::Unlink(Unlink {
            parent: ROOT.0,
            name: Bytes::from_static(b"f"),
            expect_ino: ino,
            ..Unlink::default()
        });
        world.hold_commits = crash;
        world.send(s, gone);
        if crash {
            // The first piece is in the store, and no more.
            world.now += std::time::Duration::from_secs(1);
            world.event(crate::core::Event::Tick);
            world.commit_next();
            world.crash();
            world.come_back(s, vec![], vec![]);
        }
        for _ in 0..5 {
            world.settle();
        }
        // The one that was reserved with the file, too.
        assert_eq!(super::data::freed(&world), count as usize + 1);
        assert!(world.store.keys().all(|key| !key.starts_with(b"c/")));
    }
}

/// Requests without a number were carried out after their session's end: a lock nobody has.
#[test]
fn what_a_gone_session_waited_for_is_not_given_to_it() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let ino = world.create(a, ROOT.0, "f", FILE);
    world.ask(a, Op::SetLock(lock(ino, 0, 9, false))).unwrap();
    let waiting = SetLock {
        wait: true,
        ..lock(ino, 0, 9, false)
    };
    let of_b = world.send_numbered(b, 0, false, Op::SetLock(waiting.clone()));
    let token = world.token();
    world.event(crate::core::Event::SessionClose(token, b));
    world.settle();
    assert_eq!(
        world.result(of_b),
        Err(hither_proto::status::Status::NO_SESSION)
    );
    // So it is when only the connection is gone.
    let c = world.session("c");
    let of_c = world.send_numbered(c, 0, false, Op::SetLock(waiting));
    world.event(crate::core::Event::Gone([of_c].into()));
    world.ask(a, Op::SetLock(lock(ino, 0, 9, true))).unwrap();
    world.ask(a, Op::SetLock(lock(ino, 0, 9, false))).unwrap();
}

/// A lock whose session is not in the store any more would be held for ever.
#[test]
fn a_successor_drops_locks_nobody_has() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let ino = world.create(a, ROOT.0, "f", FILE);
    world.ask(b, Op::SetLock(lock(ino, 0, 9, false))).unwrap();
    world.store.remove(&crate::keys::session(b));
    let pages = crate::keys::session_range(b);
    world
        .store
        .retain(|key, _| !(pages.0 <= *key && *key < pages.1));
    world.crash();
    world.come_back(a, vec![], vec![]);
    assert_eq!(world.lookup(a, ROOT.0, "f"), Some(ino));
    world.ask(a, Op::SetLock(lock(ino, 0, 9, false))).unwrap();
}

fn named(name: &'static str) -> Bytes {
    Bytes::from_static(name.as_bytes())
}

fn quota(ino: u64, bytes: u64) -> Op {
    Op::Setattr(Setattr {
        ino,
        quota_bytes: Some(bytes),
        ..Setattr::default()
    })
}

/// The writer of a new file did not hear how much room there is.
#[test]
fn a_created_file_comes_with_the_room_it_has() {
    let mut world = World::new();
    let s = world.session("a");
    world.ask(s, quota(ROOT.0, 1 << 20)).unwrap();
    let op = hither_proto::meta::Create {
        parent: ROOT.0,
        name: named("f"),
        mode: FILE,
        open_for_write: true,
        ..Default::default()
    };
    let reply = world.ask(s, Op::Create(op)).unwrap();
    assert_eq!(reply.space.unwrap().free_bytes, 1 << 20);
    let (ino, lease) = (reply.inode.unwrap().ino, reply.data_lease);
    let huge = Op::WriteReport(report(ino, lease, u64::MAX, vec![]));
    assert_eq!(world.ask(s, huge), Err(Errno::EFBIG.into()));
    let op = Op::WriteReport(report(ino, lease, 300_000, reply.chunks));
    world.ask(s, op).unwrap();
    let again = Op::Acquire(hither_proto::meta::Acquire {
        ino,
        exclusive: true,
        ..Default::default()
    });
    let left = world.ask(s, again).unwrap().space.unwrap().free_bytes;
    assert_eq!(left, (1 << 20) - 300_000);
}

/// At the byte limit `touch` failed.
#[test]
fn at_the_byte_limit_a_file_is_made_and_takes_no_data() {
    let mut world = World::new();
    let s = world.session("a");
    world.ask(s, quota(ROOT.0, 1000)).unwrap();
    let create = |name| {
        Op::Create(hither_proto::meta::Create {
            parent: ROOT.0,
            name: named(name),
            mode: FILE,
            open_for_write: true,
            ..Default::default()
        })
    };
    let reply = world.ask(s, create("full")).unwrap();
    let ino = reply.inode.unwrap().ino;
    let op = Op::WriteReport(report(ino, reply.data_lease, 1000, reply.chunks));
    world.ask(s, op).unwrap();
    let reply = world.ask(s, create("empty")).unwrap();
    assert_eq!(reply.space.unwrap().free_bytes, 0);
    let more = Op::AllocChunks(hither_proto::meta::AllocChunks {
        ino: reply.inode.unwrap().ino,
        lease: reply.data_lease,
        indices: vec![0],
        ..Default::default()
    });
    assert_eq!(world.ask(s, more), Err(Errno::EDQUOT.into()));
}

/// `ln f g; rm f` took the file's bytes out of all quotas for good.
#[test]
fn a_file_that_lost_its_first_name_counts_again_when_another_is_used() {
    let mut world = World::new();
    let s = world.session("a");
    world.ask(s, quota(ROOT.0, 1 << 20)).unwrap();
    let (ino, lease, chunk) = open_new(&mut world, s, "f");
    let op = Op::WriteReport(report(ino, lease, 300_000, vec![chunk]));
    world.ask(s, op).unwrap();
    let link = hither_proto::meta::Link {
        ino,
        new_parent: ROOT.0,
        new_name: named("g"),
        ..Default::default()
    };
    world.ask(s, Op::Link(link)).unwrap();
    let unlink = super::world::unlink(ROOT.0, "f", false);
    world.ask(s, unlink).unwrap();
    assert_eq!(world.lookup(s, ROOT.0, "g"), Some(ino));
    let statfs = Op::Statfs(hither_proto::meta::Statfs {
        ino: ROOT.0,
        hint: None,
    });
    let free = |world: &mut World| {
        let space = world.ask(s, statfs.clone()).unwrap().space;
        space.unwrap().free_bytes
    };
    assert_eq!(free(&mut world), (1 << 20) - 300_000);
    world.crash();
    world.come_back(s, vec![], vec![]);
    assert_eq!(world.lookup(s, ROOT.0, "g"), Some(ino));
    let op = Op::Unlink(Unlink {
        parent: ROOT.0,
        name: named("g"),
        expect_ino: ino,
        ..Unlink::default()
    });
    world.ask(s, op).unwrap();
    assert_eq!(free(&mut world), 1 << 20);
    assert_eq!(super::data::freed(&world), 1);
}

/// An exchange moved bytes past a quota.
#[test]
fn an_exchange_respects_quotas() {
    let mut world = World::new();
    let s = world.session("a");
    let dir = world.create(s, ROOT.0, "dir", 0o040_755);
    world.create(s, dir, "small", FILE);
    world.ask(s, quota(dir, 1000)).unwrap();
    let (ino, lease, chunk) = open_new(&mut world, s, "large");
    let op = Op::WriteReport(report(ino, lease, 300_000, vec![chunk]));
    world.ask(s, op).unwrap();
    let op = Op::Rename(hither_proto::meta::Rename {
        parent: ROOT.0,
        name: named("large"),
        new_parent: dir,
        new_name: named("small"),
        flags: 2,
        ..Default::default()
    });
    assert_eq!(world.ask(s, op.clone()), Err(Errno::EDQUOT.into()));
    world.ask(s, quota(dir, 1 << 20)).unwrap();
    world.ask(s, op).unwrap();
}

/// Leases kept every inode in memory, and nothing asked for them.
#[test]
fn leases_are_asked_back_for_room() {
    let mut world = World::new();
    let a = world.session("a");
    for n in 0..1300 {
        world.create(a, ROOT.0, &format!("f{n}"), FILE);
    }
    for _ in 0..10 {
        world.settle();
    }
    let left = world.core.cached_inodes();
    assert!(left <= 1000, "{left} inodes in memory");
    assert!(world.lookup(a, ROOT.0, "f17").is_some());
}

/// One session could hold leases without end: those it got first are asked back.
#[test]
fn a_session_holds_no_more_leases_than_its_bound() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let kept = world.create(b, ROOT.0, "kept", FILE);
    let open = open_new(&mut world, a, "open").0;
    let made: Vec<u64> = (0..440)
        .map(|n| world.create(a, ROOT.0, &format!("f{n}"), FILE))
        .collect();
    for _ in 0..10 {
        world.settle();
    }
    let leased = |world: &World, of: SessionId| {
        let held = made.iter().filter(|ino| world.leases_attributes(of, **ino));
        held.count()
    };
    assert!(leased(&world, a) <= 400, "{} leases", leased(&world, a));
    assert!(leased(&world, a) >= 300, "{} leases", leased(&world, a));
    assert!(!world.leases_attributes(a, made[0]), "the oldest go first");
    assert!(world.leases_attributes(a, made[439]));
    assert!(world.holds_exclusive(a, open), "what is written stays");
    assert!(world.leases_attributes(b, kept), "nobody else pays for it");
}

/// A directory was being read while a file was removed from it: the removed name came back.
#[test]
fn a_load_that_was_overtaken_is_done_again() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    for name in ["f", "g"] {
        world.create(a, ROOT.0, name, FILE);
    }
    world.crash();
    world.come_back(a, vec![], vec![]);
    world.come_back(b, vec![], vec![]);
    world.lookup(a, ROOT.0, "f");
    world.hold_loads = true;
    let list = Op::Readdir(hither_proto::meta::Readdir {
        dir: ROOT.0,
        start: true,
        limit: 10,
        ..Default::default()
    });
    let listing = world.send(b, list);
    assert_eq!(world.take(listing), None);
    let read = world.held_loads.pop().unwrap();
    world.hold_loads = false;
    world
        .ask(a, super::world::unlink(ROOT.0, "f", false))
        .unwrap();
    world.settle();
    world.event(read);
    world.settle();
    let names: Vec<_> = world.result(listing).unwrap().entries;
    let names: Vec<_> = names.iter().map(|entry| entry.name.clone()).collect();
    assert_eq!(names, vec!["g"]);
}
