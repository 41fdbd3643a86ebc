//! A rank dies and a successor goes on; authority moves.

use std::collections::BTreeMap;

use bytes::Bytes;
use hither_proto::fragment::Fragment;
use hither_proto::ids::{Epoch, InodeId, ROOT, RankId};
use hither_proto::meta::{HeldLease, Reclaim, SessionOpen, request::Op};
use hither_proto::status::{Errno, Status};

use super::world::{World, create, lookup, unlink};
use crate::core::{Answer, Commit, CommitOutcome, Event};
use crate::keys;

const FILE: u32 = 0o100_644;
const DIR: u32 = 0o040_755;

#[test]
fn early_changes_are_resent_and_done_once() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let kept = world.send_numbered(a, 1, false, create(ROOT.0, "kept", FILE));
    let kept_ino = world.result(kept).unwrap().inode.unwrap().ino;
    world.settle();
    world.hold_commits = true;
    let lost = world.send_numbered(a, 2, false, create(ROOT.0, "lost", FILE));
    let lost_ino = world.result(lost).unwrap().inode.unwrap().ino;
    let gone = world.send_numbered(a, 3, false, unlink(ROOT.0, "kept", false));
    world.result(gone).unwrap();
    world.crash();

    // Nobody is served before the others are back.
    let waiting = world.send(b, lookup(ROOT.0, "lost"));
    let token = world.token();
    let resume = SessionOpen {
        session: a.0,
        ack_below: 1,
        ..SessionOpen::default()
    };
    world.event(Event::SessionOpen(token, resume));
    let Some(Answer::Opened(opened)) = world.take(token) else {
        panic!("not resumed")
    };
    assert!(opened.resumed && opened.reclaim);
    world.come_back(b, vec![], vec![]);
    // The first create is in the store: its result is known. The others are carried out anew,
    // in order, with the number the client has already seen.
    let again = world.send_numbered(a, 1, true, create(ROOT.0, "kept", FILE));
    world.result(again).unwrap();
    let token = world.token();
    let mut request = hither_proto::meta::Request {
        session: a.0,
        number: 2,
        replay: true,
        replay_ino: lost_ino,
        op: Some(create(ROOT.0, "lost", FILE)),
        ..Default::default()
    };
    world.event(Event::Request(token, Box::new(request.clone())));
    assert_eq!(world.result(token).unwrap().inode.unwrap().ino, lost_ino);
    let token = world.token();
    request = hither_proto::meta::Request {
        number: 3,
        replay_ino: 0,
        op: Some(unlink(ROOT.0, "kept", false)),
        ..request
    };
    world.event(Event::Request(token, Box::new(request)));
    world.result(token).unwrap();
    world.reclaim(a, vec![], vec![], true);
    world.settle();
    assert_eq!(world.result(waiting).unwrap().inode.unwrap().ino, lost_ino);
    assert_eq!(world.lookup(b, ROOT.0, "kept"), None);
    assert_ne!(kept_ino, lost_ino);
}

#[test]
fn what_is_re_stated_is_protected_and_later_numbers_are_higher() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let ino = world.create(a, ROOT.0, "f", FILE);
    world.crash();
    for session in [a, b] {
        let token = world.token();
        let resume = SessionOpen {
            session: session.0,
            ..SessionOpen::default()
        };
        world.event(Event::SessionOpen(token, resume));
        let lease = HeldLease {
            ino,
            attributes: true,
            ..HeldLease::default()
        };
        let leases = if session == a { vec![lease] } else { vec![] };
        let token = world.token();
        let reclaim = Reclaim {
            leases,
            done: true,
            ..Reclaim::default()
        };
        world.event(Event::Reclaim(token, session, reclaim));
    }
    world.recalls.clear();
    world.lookup(b, ROOT.0, "f");
    let chmod = hither_proto::meta::Setattr {
        ino,
        mode: Some(0o600),
        ..Default::default()
    };
    world.ask(b, Op::Setattr(chmod)).unwrap();
    assert_eq!(
        world.recalls.iter().map(|(s, _)| *s).collect::<Vec<_>>(),
        vec![a]
    );
    assert!(world.create(b, ROOT.0, "g", FILE) > ino);
}

#[test]
fn a_session_that_does_not_come_back_holds_up_what_it_may_write_and_nothing_else() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let ino = world.create(a, ROOT.0, "f", FILE);
    world.crash();
    world.hold_data = true;
    world.come_back(b, vec![], vec![]);
    let name = world.send(b, lookup(ROOT.0, "f"));
    assert_eq!(world.take(name), None);
    world.now += std::time::Duration::from_secs(1);
    world.event(Event::Tick);
    let reply = world.result(name).unwrap();
    assert_eq!(reply.inode.unwrap().ino, ino);
    assert!(!reply.attributes_leased, "somebody may be writing the file");
    let write = world.send(b, super::data::acquire(ino, true));
    // What is new nobody else can hold.
    let new = world.create(b, ROOT.0, "g", FILE);
    world.ask(b, super::data::acquire(new, true)).unwrap();
    world.lose(a, &[b]);
    assert_eq!(
        world.data_effects.front(),
        Some(&crate::core::Effect::Fence(a))
    );
    assert_eq!(world.take(write), None);
    let event = world.data_next().unwrap();
    world.event(event);
    world.settle();
    assert!(world.result(write).is_ok());
    assert!(
        !world.resume(a),
        "an evicted client hears that everything it held is gone"
    );
}

/// Removes `f`, which the caller does not hold open.
fn remove(ino: u64) -> Op {
    Op::Unlink(hither_proto::meta::Unlink {
        parent: ROOT.0,
        name: Bytes::from_static(b"f"),
        expect_ino: ino,
        ..Default::default()
    })
}

/// Two sessions, a file one of them has open, and the other's unlink in the batch that is lost.
fn lost_unlink() -> (World, [hither_proto::ids::SessionId; 2], u64) {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let ino = world.create(a, ROOT.0, "f", FILE);
    world.lookup(b, ROOT.0, "f");
    world.hold_commits = true;
    world.on_recall = Box::new(|_, _| {
        Some(hither_proto::meta::RecallReply {
            pages: false,
            open: true,
            report: None,
        })
    });
    let gone = world.send_numbered(a, 50, false, remove(ino));
    world.result(gone).unwrap();
    world.crash();
    (world, [a, b], ino)
}

fn close(ino: u64) -> Op {
    Op::CloseInode(hither_proto::meta::CloseInode { ino })
}

/// The unlink was resent before the other session had said that it has the file open.
#[test]
fn a_resent_unlink_waits_until_everybody_has_said_what_is_open() {
    let (mut world, [a, b], ino) = lost_unlink();
    assert!(world.resume(a));
    let again = world.send_numbered(a, 50, true, remove(ino));
    assert_eq!(world.take(again), None);
    world.come_back(b, vec![], vec![ino]);
    world.result(again).unwrap();
    world.reclaim(a, vec![], vec![], true);
    world.settle();
    assert_eq!(world.lookup(a, ROOT.0, "f"), None);
    world.ask(b, super::world::getattr(ino)).unwrap();
    world.ask(b, close(ino)).unwrap();
    let gone = world.ask(b, super::world::getattr(ino));
    assert_eq!(gone, Err(Errno::ESTALE.into()));
}

/// A session that is late may hold the file: it is kept until that session has said so.
#[test]
fn a_missing_session_is_taken_to_hold_what_is_unlinked() {
    for holds in [true, false] {
        let (mut world, [a, b], ino) = lost_unlink();
        assert!(world.resume(a));
        let again = world.send_numbered(a, 50, true, remove(ino));
        world.now += std::time::Duration::from_secs(2);
        world.event(Event::Tick);
        world.result(again).unwrap();
        world.reclaim(a, vec![], vec![], true);
        world.settle();
        world.ask(a, super::world::getattr(ino)).unwrap();
        world.recalls.clear();
        world.come_back(b, vec![], if holds { vec![ino] } else { vec![] });
        world.settle();
        let told = world.recalls.iter().any(|(s, r)| *s == b && r.unlinked);
        assert_eq!(told, holds);
        if holds {
            world.ask(b, super::world::getattr(ino)).unwrap();
            world.ask(b, close(ino)).unwrap();
        }
        let gone = world.ask(b, super::world::getattr(ino));
        assert_eq!(gone, Err(Errno::ESTALE.into()));
    }
}

/// What a late session has cached may have changed since the grace ended.
#[test]
fn a_late_session_loses_what_has_changed_meanwhile() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let changed = world.create(a, ROOT.0, "changed", FILE);
    let same = world.create(a, ROOT.0, "same", FILE);
    world.crash();
    world.come_back(a, vec![], vec![]);
    world.now += std::time::Duration::from_secs(2);
    world.event(Event::Tick);
    world.lookup(a, ROOT.0, "changed");
    let chmod = hither_proto::meta::Setattr {
        ino: changed,
        mode: Some(0o600),
        ..Default::default()
    };
    world.ask(a, Op::Setattr(chmod)).unwrap();
    world.recalls.clear();
    let held = |ino| HeldLease {
        ino,
        attributes: true,
        ..HeldLease::default()
    };
    world.come_back(b, vec![held(changed), held(same)], vec![]);
    let told: Vec<_> = world.recalls.iter().map(|(s, r)| (*s, r.ino)).collect();
    assert_eq!(told, vec![(b, changed)]);
}

/// The report gave the lease back, and was in the batch that was lost: the client was told that
/// its lease is stale, and gave up all its files.
#[test]
fn a_resent_report_counts_although_its_lease_is_given_back() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, chunk) = super::data::open_new(&mut world, a, "f");
    world.hold_commits = true;
    let done = Op::WriteReport(hither_proto::meta::WriteReport {
        release: true,
        hint: Some(hither_proto::meta::Hint {
            parent: ROOT.0,
            name: Bytes::from_static(b"f"),
        }),
        ..super::data::report(ino, lease, 77, vec![chunk])
    });
    let first = world.send_numbered(a, 50, false, done.clone());
    world.result(first).unwrap();
    world.crash();
    assert!(world.resume(a));
    world.come_back(b, vec![], vec![]);
    let again = world.send_numbered(a, 50, true, done);
    world.result(again).unwrap();
    world.reclaim(a, vec![], vec![], true);
    let seen = world.ask(b, super::data::acquire(ino, false)).unwrap();
    assert_eq!(seen.inode.unwrap().size, 77);
    assert_eq!(seen.chunks.len(), 1);
}

/// A directory whose authority moved: the old owner says who has it, never "not found".
#[test]
fn a_moved_subtree_is_not_mine_never_not_found() {
    let mut world = World::new();
    let s = world.session("a");
    let dir = world.create(s, ROOT.0, "moved", DIR);
    let below = world.create(s, dir, "below", DIR);
    let ino = world.create(s, below, "f", FILE);
    let table = vec![
        (ROOT, Fragment::WHOLE, RankId(0), Epoch(1)),
        (InodeId(dir), Fragment::WHOLE, RankId(1), Epoch(2)),
    ];
    let store = world.store.clone();
    world.event(Event::Subtrees(table.clone()));
    let mut other = World::on(store, RankId(1), table);
    other.now += std::time::Duration::from_secs(16);
    other.event(Event::Tick);
    let t = other.session("a");

    for op in [
        lookup(below, "f"),
        lookup(below, "absent"),
        create(below, "g", FILE),
        unlink(dir, "below", true),
        super::world::getattr(ino),
    ] {
        assert_eq!(world.ask(s, op), Err(Status::NOT_MINE));
    }
    assert_eq!(
        world.lookup(s, ROOT.0, "moved"),
        Some(dir),
        "the name itself is still rank 0's"
    );
    assert_eq!(other.lookup(t, below, "f"), Some(ino));
    assert_eq!(other.lookup(t, below, "absent"), None);
    assert_eq!(
        other.ask(t, lookup(ROOT.0, "absent")),
        Err(Status::NOT_MINE)
    );
    other.create(t, below, "g", FILE);
}

#[test]
fn a_fenced_rank_writes_nothing_and_stops() {
    let mut world = World::new();
    let s = world.session("a");
    let root = keys::subtree(ROOT, Fragment::WHOLE);
    world.store.insert(root, Bytes::from_static(b"another's"));
    let before: BTreeMap<_, _> = world.store.clone();
    let safe = world.send(s, create(ROOT.0, "f", FILE));
    world.settle();
    assert!(world.stopped);
    assert_eq!(world.store, before);
    // The early answer was given; a barrier would not have been.
    assert!(world.take(safe).is_some());
    let barrier = world.send(s, Op::Barrier(hither_proto::meta::Barrier {}));
    world.settle();
    assert_eq!(world.take(barrier), None);
    assert_eq!(Status::from(Errno::ENOENT).errno(), Some(Errno::ENOENT));
}

/// A holder's session ended, and the rank died before the inode was removed.
#[test]
fn what_a_gone_session_leaves_to_be_done_is_done_by_a_successor() {
    for store_fails in [false, true] {
        let (mut world, [a, b], ino) = lost_unlink();
        assert!(world.resume(a));
        world.come_back(b, vec![], vec![ino]);
        let again = world.send_numbered(a, 50, true, remove(ino));
        world.result(again).unwrap();
        world.reclaim(a, vec![], vec![], true);
        world.settle();
        // The removal needs a load; one that failed was the end of it.
        world.crash();
        world.come_back(a, vec![], vec![]);
        world.failing_loads = u32::from(store_fails);
        world.now += std::time::Duration::from_secs(2);
        world.event(Event::Tick);
        world.lose(b, &[a]);
        world.settle();
        let left: Vec<_> = world
            .store
            .keys()
            .filter(|key| key.starts_with(b"p/") && key[2..] == ino.to_be_bytes())
            .collect();
        assert!(left.is_empty(), "the stray is still there");
        assert!(!world.store.contains_key(&keys::session(b)));
    }
}

/// The record of a dead writer was deleted while its file was still to be sealed.
#[test]
fn a_dead_writers_record_stays_until_its_file_is_sealed() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, chunk) = super::data::open_new(&mut world, a, "f");
    let report = super::data::report(ino, lease, 77, vec![chunk]);
    world.ask(a, Op::WriteReport(report)).unwrap();
    world.hold_data = true;
    world.lose(a, &[b]);
    let event = world.data_next().unwrap();
    world.event(event);
    world.settle();
    assert!(world.store.contains_key(&keys::session(a)));
    let event = world.data_next().unwrap();
    world.event(event);
    world.settle();
    assert!(!world.store.contains_key(&keys::session(a)));
}

/// The store may carry out an attempt whose outcome nobody waited for long after the next batches.
#[test]
fn a_batch_that_comes_late_changes_nothing() {
    let mut world = World::new();
    let a = world.session("a");
    world.settle();
    world.hold_commits = true;
    world.send(a, create(ROOT.0, "x", FILE));
    world.settle();
    let first = world.held_commits.front().unwrap();
    let late = Commit {
        batch: first.batch,
        unchanged: first.unchanged.clone(),
        writes: first.writes.clone(),
        delete_ranges: first.delete_ranges.clone(),
    };
    world.hold_commits = false;
    let done = world.commit_next().unwrap();
    world.event(done);
    world.ask(a, unlink(ROOT.0, "x", false)).unwrap();
    let before = world.store.clone();
    world.held_commits.push_back(Box::new(late));
    let outcome = world.commit_next();
    assert!(matches!(
        outcome,
        Some(Event::Committed(_, CommitOutcome::Fenced))
    ));
    assert_eq!(world.store, before);
    // The rank itself goes on.
    world.ask(a, create(ROOT.0, "y", FILE)).unwrap();
}

fn numbered(world: &mut World, request: &hither_proto::meta::Request) -> crate::core::Token {
    let token = world.token();
    world.event(Event::Request(token, Box::new(request.clone())));
    token
}

/// The first answer was lost on its way: the second one says the same, and comes no sooner.
#[test]
fn a_request_sent_again_is_answered_as_the_first_time() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    world.hold_commits = true;
    let request = hither_proto::meta::Request {
        session: a.0,
        number: 50,
        safe: true,
        op: Some(create(ROOT.0, "f", FILE)),
        ..Default::default()
    };
    numbered(&mut world, &request);
    let again = numbered(&mut world, &request);
    assert_eq!(world.take(again), None, "answered before it is safe");
    world.hold_commits = false;
    while let Some(event) = world.commit_next() {
        world.event(event);
    }
    let ino = world.result(again).unwrap().inode.unwrap().ino;

    // A successor has to read the inode before it can answer.
    world.crash();
    world.come_back(b, vec![], vec![]);
    assert!(world.resume(a));
    let request = hither_proto::meta::Request {
        replay: true,
        ..request
    };
    let again = numbered(&mut world, &request);
    assert_eq!(world.result(again).unwrap().inode.unwrap().ino, ino);
    world.reclaim(a, vec![], vec![], true);

    let op = unlink(ROOT.0, "f", false);
    let first = world.send_numbered(a, 51, false, op.clone());
    world.settle();
    let first = world.result(first).unwrap();
    assert!(first.orphaned);
    world.crash();
    world.come_back(b, vec![], vec![]);
    assert!(world.resume(a));
    let again = world.send_numbered(a, 51, true, op);
    let again = world.result(again).unwrap();
    assert_eq!((again.orphaned, again.other_ino), (true, ino));
    // The create is known too, though its file is gone.
    let again = numbered(&mut world, &request);
    assert_eq!(world.result(again).unwrap().inode.unwrap().ino, ino);
}

/// A copy of a request that arrives after its answer was acknowledged is not carried out again.
#[test]
fn a_late_copy_of_an_acknowledged_request_is_refused() {
    let mut world = World::new();
    let a = world.session("a");
    let first = world.send_numbered(a, 1, false, unlink(ROOT.0, "f", false));
    assert_eq!(world.result(first), Err(Errno::ENOENT.into()));
    let request = hither_proto::meta::Request {
        session: a.0,
        number: 2,
        ack_below: 2,
        op: Some(create(ROOT.0, "f", FILE)),
        ..Default::default()
    };
    numbered(&mut world, &request);
    let late = world.send_numbered(a, 1, false, unlink(ROOT.0, "f", false));
    assert_eq!(world.result(late), Err(Status::BAD_REQUEST));
    assert!(world.lookup(a, ROOT.0, "f").is_some());
}

/// What was refused only for now is carried out when it is sent again.
#[test]
fn a_request_refused_for_now_is_carried_out_when_it_comes_again() {
    let mut world = World::new();
    let a = world.session("a");
    world.crash();
    world.come_back(a, vec![], vec![]);
    world.failing_loads = 1;
    let first = world.send_numbered(a, 50, false, create(ROOT.0, "f", FILE));
    assert_eq!(world.result(first), Err(Status::RETRY));
    let again = world.send_numbered(a, 50, false, create(ROOT.0, "f", FILE));
    world.result(again).unwrap();
}
