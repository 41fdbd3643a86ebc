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
    for session in [a, b] {
        let token = world.token();
        let resume = SessionOpen {
            session: session.0,
            ..SessionOpen::default()
        };
        world.event(Event::SessionOpen(token, resume));
        let token = world.token();
        world.event(Event::Reclaim(
            token,
            session,
            Reclaim {
                done: true,
                ..Reclaim::default()
            },
        ));
    }
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
fn a_session_that_does_not_come_back_is_fenced_before_others_go_on() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    world.crash();
    world.hold_data = true;
    let token = world.token();
    let resume = SessionOpen {
        session: b.0,
        ..SessionOpen::default()
    };
    world.event(Event::SessionOpen(token, resume));
    let token = world.token();
    world.event(Event::Reclaim(
        token,
        b,
        Reclaim {
            done: true,
            ..Reclaim::default()
        },
    ));
    let waiting = world.send(b, lookup(ROOT.0, "x"));
    for _ in 0..20 {
        world.now += std::time::Duration::from_secs(1);
        let renew = world.token();
        world.event(Event::SessionRenew(renew, b, 0));
        world.event(Event::Tick);
    }
    assert_eq!(
        world.data_effects.front(),
        Some(&crate::core::Effect::Fence(a))
    );
    assert_eq!(world.take(waiting), None);
    let event = world.data_next().unwrap();
    world.event(event);
    world.settle();
    assert!(world.result(waiting).is_ok());
    let token = world.token();
    let resume = SessionOpen {
        session: a.0,
        ..SessionOpen::default()
    };
    world.event(Event::SessionOpen(token, resume));
    let Some(Answer::Opened(opened)) = world.take(token) else {
        panic!("no answer")
    };
    assert!(
        !opened.resumed,
        "an evicted client hears that everything it held is gone"
    );
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
