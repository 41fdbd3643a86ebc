//! File data: leases, reports, cuts and seals.

use bytes::Bytes;
use hither_proto::ids::{CHUNK_SIZE, InodeId, ROOT, SessionId};
use hither_proto::meta::{
    Acquire, AllocChunks, Create, GiveBack, RecallReply, Setattr, Unlink, UnusedLease, WriteReport,
    request::Op,
};
use hither_proto::status::{Errno, Status};
use hither_proto::stored::ChunkRef;

use super::world::{CLASS, World, getattr, unlink};
use crate::core::event::GroupChoice;
use crate::core::run::Stop;
use crate::core::{Effect, Event};

pub(super) fn open_new(world: &mut World, s: SessionId, name: &str) -> (u64, u64, ChunkRef) {
    let create = Create {
        parent: ROOT.0,
        name: Bytes::copy_from_slice(name.as_bytes()),
        mode: 0o100_644,
        exclusive: true,
        open_for_write: true,
        ..Create::default()
    };
    let reply = world.ask(s, Op::Create(create)).unwrap();
    assert!(reply.data_exclusive);
    (reply.inode.unwrap().ino, reply.data_lease, reply.chunks[0])
}

pub(super) fn report(ino: u64, lease: u64, size: u64, written: Vec<ChunkRef>) -> WriteReport {
    WriteReport {
        ino,
        lease,
        size,
        mtime: 7,
        written,
        ..WriteReport::default()
    }
}

pub(super) fn acquire(ino: u64, exclusive: bool) -> Op {
    Op::Acquire(Acquire {
        ino,
        hint: None,
        exclusive,
    })
}

pub(super) fn freed(world: &World) -> usize {
    world
        .store
        .keys()
        .filter(|key| key.starts_with(b"q/"))
        .count()
}

#[test]
fn a_reader_hears_that_it_waited_for_a_writer() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    assert!(!world.ask(a, acquire(ino, false)).unwrap().behind_writer);
    let answer = WriteReport {
        release: true,
        ..report(ino, lease, 5000, vec![chunk])
    };
    world.on_recall = Box::new(move |_, recall| {
        let report = (recall.data_lease != 0).then(|| answer.clone());
        Some(RecallReply {
            report,
            ..RecallReply::default()
        })
    });
    assert!(world.ask(b, acquire(ino, false)).unwrap().behind_writer);
    assert!(!world.ask(b, acquire(ino, false)).unwrap().behind_writer);
}

#[test]
fn create_gives_a_lease_and_a_chunk_and_a_reader_takes_it_over() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    let answer = report(ino, lease, 5000, vec![chunk]);
    world.on_recall = Box::new(move |_, recall| {
        let report = (recall.data_lease != 0).then(|| answer.clone());
        Some(RecallReply {
            report,
            ..RecallReply::default()
        })
    });
    // stat asks the writer, whose lease stays.
    let seen = world.ask(b, getattr(ino)).unwrap();
    assert_eq!(seen.inode.unwrap().size, 5000);
    assert!(!seen.attributes_leased);
    assert!(world.recalls.last().unwrap().1.report_only);
    // A reader gets what the writer has given back.
    let read = world.ask(b, acquire(ino, false)).unwrap();
    assert_eq!(
        read.chunks.iter().map(|c| c.chunk).collect::<Vec<_>>(),
        vec![chunk.chunk]
    );
    assert!(!read.data_exclusive && read.inode.unwrap().size == 5000);
    assert!(world.recalls.last().unwrap().1.keep_shared);
    // The writer reads on under a shared lease, which is taken back before anybody writes.
    world.recalls.clear();
    world.on_recall = Box::new(|_, _| Some(RecallReply::default()));
    world.ask(b, acquire(ino, true)).unwrap();
    let asked: Vec<_> = world
        .recalls
        .iter()
        .filter(|(_, r)| r.data_lease != 0)
        .map(|(s, _)| *s)
        .collect();
    assert_eq!(asked, vec![a]);
    // The writer's lease is gone: what it reports now is refused.
    let late = world.ask(a, Op::WriteReport(report(ino, lease, 9, vec![])));
    assert_eq!(late, Err(Status::STALE_LEASE));
    // A later exclusive lease has a higher id.
    let again = world.ask(a, acquire(ino, true)).unwrap();
    assert!(again.data_lease > lease);
}

#[test]
fn chunks_are_reserved_once_and_freed_when_never_written() {
    let mut world = World::new();
    let s = world.session("a");
    let (ino, lease, first) = open_new(&mut world, s, "f");
    let alloc = Op::AllocChunks(AllocChunks {
        ino,
        hint: None,
        lease,
        indices: vec![0, 1, 20],
    });
    let given = world.ask(s, alloc.clone()).unwrap().chunks;
    assert_eq!(given[0], first);
    assert_eq!(
        world.ask(s, alloc).unwrap().chunks,
        given,
        "asked again, the same"
    );
    let size = 20 * CHUNK_SIZE + 1;
    let done = WriteReport {
        release: true,
        ..report(ino, lease, size, vec![given[0], given[2]])
    };
    world.ask(s, Op::WriteReport(done)).unwrap();
    assert_eq!(freed(&world), 1, "the chunk that was never written");
    let read = world.ask(s, acquire(ino, false)).unwrap();
    assert_eq!(
        read.chunks.iter().map(|c| c.index).collect::<Vec<_>>(),
        vec![0, 20]
    );
    world.ask(s, unlink(ROOT.0, "f", false)).unwrap();
    // The request did not name the inode: the session may hold it open.
    let close = hither_proto::meta::CloseInode { ino };
    world.ask(s, Op::CloseInode(close)).unwrap();
    assert_eq!(freed(&world), 3);
    assert!(
        world.store.keys().all(|key| !key.starts_with(b"c/")),
        "no page left"
    );
}

#[test]
fn a_cut_is_trimmed_before_anybody_reads_or_extends() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    world
        .ask(a, Op::WriteReport(report(ino, lease, 10_000, vec![chunk])))
        .unwrap();
    world.hold_data = true;
    let cut = Setattr {
        ino,
        size: Some(100),
        lease,
        ..Setattr::default()
    };
    let cut = world.send(a, Op::Setattr(cut));
    let read = world.send(b, acquire(ino, false));
    world.settle();
    assert_eq!((world.take(cut), world.take(read)), (None, None));
    let Some(Effect::Trim(_, seal)) = world.data_effects.front() else {
        panic!("no trim")
    };
    assert!(seal.lease.0 > lease && seal.length_max == 100);
    let trimmed_under = seal.lease.0;
    world.hold_data = false;
    let event = world.data_next().unwrap();
    world.event(event);
    world.settle();
    let reply = world.result(cut).unwrap();
    assert_eq!(reply.inode.unwrap().size, 100);
    assert_eq!(
        reply.data_lease, trimmed_under,
        "the writer goes on under the trim's lease"
    );
    world.result(read).unwrap();
}

#[test]
fn a_cut_to_nothing_frees_the_chunks_at_once() {
    let mut world = World::new();
    let a = world.session("a");
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    world
        .ask(a, Op::WriteReport(report(ino, lease, 10_000, vec![chunk])))
        .unwrap();
    let cut = Setattr {
        ino,
        size: Some(0),
        lease,
        ..Setattr::default()
    };
    world.ask(a, Op::Setattr(cut)).unwrap();
    assert!(world.data_effects.is_empty());
    assert_eq!(freed(&world), 1);
}

#[test]
fn a_lost_writer_is_fenced_and_sealed_before_a_reader_gets_in() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    world
        .ask(a, Op::WriteReport(report(ino, lease, 3000, vec![chunk])))
        .unwrap();
    world.on_recall = Box::new(|_, _| None);
    world.hold_data = true;
    let read = world.send(b, acquire(ino, false));
    for _ in 0..20 {
        world.now += std::time::Duration::from_secs(1);
        let renew = world.token();
        world.event(Event::SessionRenew(renew, b, 0));
        world.event(Event::Tick);
    }
    assert_eq!(world.data_effects.front(), Some(&Effect::Fence(a)));
    assert_eq!(world.disconnected, [a], "it hears of it at once");
    assert_eq!(world.take(read), None);
    let event = world.data_next().unwrap();
    world.event(event);
    let Some(Effect::Seal(_, seals)) = world.data_effects.front() else {
        panic!("no seal")
    };
    assert_eq!(seals.len(), 1);
    assert_eq!((seals[0].chunk.0, seals[0].length_max), (chunk.chunk, 3000));
    assert!(seals[0].lease.0 > lease);
    assert_eq!(world.take(read), None);
    let event = world.data_next().unwrap();
    world.event(event);
    world.settle();
    assert_eq!(world.result(read).unwrap().chunks[0].chunk, chunk.chunk);
}

/// A write that some members refused: nobody reads before all members agree.
#[test]
fn a_torn_chunk_is_sealed_when_its_writer_gives_the_lease_back() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    world.hold_data = true;
    let torn = WriteReport {
        release: true,
        torn: vec![chunk],
        ..report(ino, lease, 3000, vec![chunk])
    };
    world.ask(a, Op::WriteReport(torn)).unwrap();
    let read = world.send(b, acquire(ino, false));
    world.settle();
    assert_eq!(world.take(read), None);
    let Some(Effect::Seal(_, seals)) = world.data_effects.front() else {
        panic!("no seal")
    };
    assert_eq!((seals.len(), seals[0].chunk.0), (1, chunk.chunk));
    assert!(seals[0].lease.0 > lease);
    let event = world.data_next().unwrap();
    world.event(event);
    world.settle();
    assert_eq!(world.result(read).unwrap().chunks[0].chunk, chunk.chunk);
    assert_eq!(freed(&world), 0);
}

/// The rank dies before the members agree: its successor has them do so first.
#[test]
fn a_torn_chunk_is_sealed_by_a_successor() {
    let mut world = World::new();
    let a = world.session("a");
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    world.hold_data = true;
    let torn = WriteReport {
        release: true,
        torn: vec![chunk],
        ..report(ino, lease, 3000, vec![chunk])
    };
    world.ask(a, Op::WriteReport(torn)).unwrap();
    world.settle();
    world.data_effects.clear();
    world.crash();
    assert!(world.resume(a));
    world.reclaim(a, vec![], vec![], true);
    let b = world.session("b");
    let read = world.send(b, acquire(ino, false));
    world.settle();
    assert_eq!(world.take(read), None);
    let Some(Effect::Seal(_, seals)) = world.data_effects.front() else {
        panic!("no seal")
    };
    assert_eq!((seals.len(), seals[0].chunk.0), (1, chunk.chunk));
    let event = world.data_next().unwrap();
    world.event(event);
    world.settle();
    assert_eq!(world.result(read).unwrap().chunks[0].chunk, chunk.chunk);
    // Once: the next reader waits for nothing.
    world.ask(b, acquire(ino, true)).unwrap();
}

/// A writer reports and gives its lease back before it acknowledges the recall.
#[test]
fn a_recalled_lease_may_be_given_back_by_a_report() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    world.on_recall = Box::new(|_, _| None);
    let read = world.send(b, acquire(ino, false));
    world.settle();
    assert_eq!(world.take(read), None);
    let back = WriteReport {
        release: true,
        downgrade: true,
        ..report(ino, lease, 3000, vec![chunk])
    };
    world.ask(a, Op::WriteReport(back)).unwrap();
    assert_eq!(world.take(read), None, "the recall stands");
    world.answer_recalls();
    world.settle();
    let seen = world.result(read).unwrap();
    assert_eq!((seen.inode.unwrap().size, seen.chunks.len()), (3000, 1));
    assert_eq!(freed(&world), 0);
    world.on_recall = Box::new(|_, _| Some(RecallReply::default()));
    world.recalls.clear();
    world.ask(b, acquire(ino, true)).unwrap();
    assert!(world.recalls.iter().any(|(s, _)| *s == a), "it reads on");
}

/// What was stored through a mapping before another wrote must not lie over what that wrote.
#[test]
fn pages_from_before_a_recall_are_stored_first() {
    for pages in [false, true] {
        let mut world = World::new();
        let (a, b) = (world.session("a"), world.session("b"));
        let (ino, lease, chunk) = open_new(&mut world, a, "f");
        let back = WriteReport {
            release: true,
            ..report(ino, lease, 3000, vec![chunk])
        };
        world.ask(a, Op::WriteReport(back)).unwrap();
        for session in [a, b] {
            world.ask(session, acquire(ino, false)).unwrap();
        }
        // What it reads under it gives back at once, what it writes under never.
        world.on_recall = Box::new(move |session, recall| {
            let at_once = recall.data_lease == 0 || (session == b && recall.data_lease == 1);
            at_once.then(RecallReply::default)
        });
        let writes = world.send(b, acquire(ino, true));
        let stores = world.send(a, acquire(ino, true));
        world.answer_recalls_with(&RecallReply {
            pages,
            ..RecallReply::default()
        });
        world.settle();
        let [first, second] = if pages {
            [stores, writes]
        } else {
            [writes, stores]
        };
        assert!(world.result(first).unwrap().data_exclusive);
        assert_eq!(world.take(second), None);
    }
}

/// The end of a turn that was taken ended the next one, and an older page lay over what was written.
#[test]
fn a_turn_that_was_taken_ends_no_later_one() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let ino = InodeId(77);
    let pass = |world: &mut World, millis| {
        world.now += std::time::Duration::from_millis(millis);
        world.event(Event::Tick);
    };
    world.core.keep_turn(ino, a);
    world.core.end_turn(ino, a);
    pass(&mut world, 900);
    world.core.keep_turn(ino, a);
    pass(&mut world, 200);
    assert!(world.core.need_turn(b, ino).is_err());
    assert!(world.core.need_turn(a, ino).is_ok());
    pass(&mut world, 1000);
    assert!(world.core.need_turn(b, ino).is_ok());
}

#[test]
fn bad_requests_are_refused_by_name() {
    let mut world = World::new();
    let a = world.session("a");
    assert_eq!(
        world.ask(a, acquire(ROOT.0, true)),
        Err(Errno::EINVAL.into())
    );
    assert_eq!(
        world.ask(a, acquire(999_999_999, true)),
        Err(Errno::ESTALE.into())
    );
    let (ino, ..) = open_new(&mut world, a, "f");
    let huge = Setattr {
        ino,
        size: Some(u64::MAX),
        ..Setattr::default()
    };
    assert_eq!(world.ask(a, Op::Setattr(huge)), Err(Errno::EFBIG.into()));
}

#[test]
fn a_lease_nobody_used_goes_without_a_trace() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, _) = open_new(&mut world, a, "one");
    let (other, other_lease, _) = open_new(&mut world, a, "two");
    let give_back = |lease| {
        Op::GiveBack(GiveBack {
            leases: vec![UnusedLease { ino, lease }],
        })
    };
    world.ask(b, give_back(lease)).unwrap();
    world.ask(a, give_back(other_lease)).unwrap();
    assert!(
        world.holds_exclusive(a, ino),
        "neither of them is its lease"
    );
    world.ask(a, give_back(lease)).unwrap();
    assert!(!world.holds_exclusive(a, ino));

    let Op::Unlink(unlink) = unlink(ROOT.0, "two", false) else {
        unreachable!()
    };
    let reply = world.ask(
        a,
        Op::Unlink(Unlink {
            expect_ino: other,
            unused_lease: other_lease,
            ..unlink
        }),
    );
    assert!(reply.unwrap().gone);
    world.settle();
    let to_free = world.store.keys().filter(|key| key.starts_with(b"q/"));
    assert_eq!(to_free.count(), 0, "what was reserved exists nowhere");
    assert!(world.recalls.is_empty());
}

/// Writers waited for their whole time where no disk had room.
#[test]
fn a_class_without_room_is_no_space_and_not_a_wait() {
    let mut world = World::new();
    let groups = GroupChoice {
        full: std::collections::BTreeSet::from([CLASS]),
        by_class: std::collections::BTreeMap::from([(CLASS, Vec::new())]),
        default_class: CLASS,
        ..GroupChoice::default()
    };
    world.event(Event::Groups(Box::new(groups)));
    let none = world.core.new_chunk(CLASS, InodeId(100), 0);
    assert!(matches!(none, Err(Stop::Refuse(refusal)) if refusal.status == Errno::ENOSPC.into()));
}
