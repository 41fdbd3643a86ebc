//! Files across the death of a rank or of a writer: references, cuts, seals.

use hither_proto::ids::{CHUNK_SIZE, ChunkId, GroupId, InodeId, LeaseId, ROOT, SessionId};
use hither_proto::meta::{AllocChunks, RecallReply, Setattr, WriteReport, request::Op};
use hither_proto::stored::ChunkRef;

use super::data::{acquire, freed, open_new, report};
use super::world::{World, exclusive};
use crate::core::{Effect, SealChunk};

/// A file with the pieces up to `end` from 1020 on, all in the store; its number, lease, chunks.
fn large_file(world: &mut World, s: SessionId, end: u32) -> (u64, u64, Vec<ChunkRef>) {
    let (ino, lease, _) = open_new(world, s, "large");
    let alloc = Op::AllocChunks(AllocChunks {
        ino,
        hint: None,
        lease,
        indices: (1020..end).collect(),
    });
    let chunks = world.ask(s, alloc).unwrap().chunks;
    let size = u64::from(end) * CHUNK_SIZE;
    let written = Op::WriteReport(report(ino, lease, size, chunks.clone()));
    world.ask(s, written).unwrap();
    let written = |chunk: &ChunkRef| ChunkRef {
        written: true,
        ..*chunk
    };
    (ino, lease, chunks.iter().map(written).collect())
}

/// A report in the answer to a recall used to start an empty page of references where the page in
/// the store had not been read: all others of the page were gone.
#[test]
fn a_report_in_a_recall_keeps_the_references_a_successor_has_not_read() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, chunks) = large_file(&mut world, a, 1040);
    world.crash();
    world.come_back(a, vec![exclusive(ino, lease)], vec![ino]);
    world.come_back(b, vec![], vec![]);
    let answer = report(ino, lease, 1040 * CHUNK_SIZE, vec![chunks[15]]);
    world.on_recall = Box::new(move |_, recall| {
        let report = (recall.data_lease != 0).then(|| answer.clone());
        Some(RecallReply {
            report,
            ..RecallReply::default()
        })
    });
    let seen = world.ask(b, acquire(ino, false)).unwrap();
    assert_eq!(
        seen.chunks.len(),
        8 + usize::from(seen.chunks.len() > 8) * 12
    );
    world.crash();
    for s in [a, b] {
        world.come_back(s, vec![], vec![]);
    }
    let refs = Op::ChunkRefs(hither_proto::meta::ChunkRefs {
        ino,
        index: 1000,
        limit: 100,
        ..Default::default()
    });
    assert_eq!(world.ask(b, refs).unwrap().chunks, chunks);
}

fn cut(ino: u64, size: u64) -> Op {
    Op::Setattr(Setattr {
        ino,
        size: Some(size),
        ..Setattr::default()
    })
}

/// Carries out the trim that has to be waiting; where it cuts.
fn trim_next(world: &mut World) -> u32 {
    let Some(Effect::Trim(_, seal)) = world.data_effects.front() else {
        panic!("no trim: {:?}", world.data_effects)
    };
    let at = seal.length_max;
    let event = world.data_next().unwrap();
    world.event(event);
    at
}

/// The resent truncate found the size it wanted and left the old bytes on the servers.
#[test]
fn a_cut_left_by_a_predecessor_is_finished_before_the_file_grows() {
    for wanted in [100, 5000] {
        let mut world = World::new();
        let a = world.session("a");
        let (ino, lease, chunk) = open_new(&mut world, a, "f");
        world
            .ask(a, Op::WriteReport(report(ino, lease, 10_000, vec![chunk])))
            .unwrap();
        world.hold_data = true;
        world.send(a, cut(ino, 100));
        world.settle();
        world.crash();
        world.come_back(a, vec![], vec![]);
        let again = world.send(a, cut(ino, wanted));
        world.settle();
        assert_eq!(world.take(again), None);
        assert_eq!(trim_next(&mut world), 100);
        world.settle();
        let size = world.result(again).unwrap().inode.unwrap().size;
        assert_eq!((size, world.data_effects.len()), (wanted, 0));
    }
}

/// A cut of a chunk that was only reserved: nobody knows it after a failover, and every lease
/// waited for a trim that never came.
#[test]
fn a_cut_left_by_a_predecessor_without_a_chunk_holds_nobody_up() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, ..) = open_new(&mut world, a, "f");
    world.hold_data = true;
    world.send(a, cut(ino, 5000));
    world.settle();
    world.crash();
    world.come_back(a, vec![], vec![]);
    world.come_back(b, vec![], vec![]);
    assert_eq!(world.lookup(b, ROOT.0, "f"), Some(ino));
    world.ask(b, acquire(ino, false)).unwrap();
}

/// A file of which the cut chunk stands in a page that is not in memory.
#[test]
fn a_cut_left_by_a_predecessor_finds_its_chunk_in_a_page() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, ..) = large_file(&mut world, a, 1040);
    world.hold_data = true;
    world.send(a, cut(ino, 1030 * CHUNK_SIZE + 7));
    world.settle();
    world.crash();
    world.come_back(a, vec![], vec![]);
    world.come_back(b, vec![], vec![]);
    let read = world.send(b, acquire(ino, false));
    world.settle();
    assert_eq!(trim_next(&mut world), 7);
    world.settle();
    world.result(read).unwrap();
}

/// A chunk as a chunkserver lists it: it does not know which piece of the file it is.
fn listed(ino: u64, chunk: &ChunkRef) -> (InodeId, SealChunk) {
    let seal = SealChunk {
        chunk: ChunkId(chunk.chunk),
        group: GroupId(chunk.group),
        index: None,
        lease: LeaseId(0),
        length_max: u32::MAX,
    };
    (InodeId(ino), seal)
}

/// The chunk was known as reserved for piece 3, and listed by the servers: it was sealed twice,
/// and linked twice or freed although linked.
#[test]
fn a_dead_writers_chunk_is_sealed_once_and_linked_where_it_was_reserved() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, first) = open_new(&mut world, a, "f");
    world
        .ask(
            a,
            Op::WriteReport(report(ino, lease, 4 * CHUNK_SIZE, vec![])),
        )
        .unwrap();
    let alloc = Op::AllocChunks(AllocChunks {
        ino,
        hint: None,
        lease,
        indices: vec![3],
    });
    let third = world.ask(a, alloc).unwrap().chunks[0];
    world
        .open_chunks
        .insert(a, vec![listed(ino, &third), listed(ino, &first)]);
    world.lose(a, &[b]);
    let seen = world.ask(b, acquire(ino, false)).unwrap().chunks;
    let places: Vec<(u32, u64)> = seen.iter().map(|c| (c.index, c.chunk)).collect();
    assert_eq!(places, vec![(0, first.chunk), (3, third.chunk)]);
    assert_eq!(freed(&world), 0);
}

/// After a failover nobody knows the place of a dead writer's chunk: it is freed, not linked.
#[test]
fn a_dead_writers_chunk_without_a_place_is_freed() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    world
        .ask(
            a,
            Op::WriteReport(report(ino, lease, 4 * CHUNK_SIZE, vec![])),
        )
        .unwrap();
    world.crash();
    world.come_back(a, vec![exclusive(ino, lease)], vec![ino]);
    world.come_back(b, vec![], vec![]);
    world.lookup(b, ROOT.0, "f");
    world.open_chunks.insert(a, vec![listed(ino, &chunk)]);
    world.lose(a, &[b]);
    assert_eq!(world.ask(b, acquire(ino, false)).unwrap().chunks, vec![]);
    assert_eq!(freed(&world), 1);
}

/// Servers list a chunk of a writer that had released the file before another took it.
#[test]
fn the_death_of_a_former_writer_does_not_seal_the_file_under_the_present_one() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    let released = WriteReport {
        release: true,
        ..report(ino, lease, 100, vec![chunk])
    };
    world.ask(a, Op::WriteReport(released)).unwrap();
    open_new(&mut world, a, "other");
    let lease = world.ask(b, acquire(ino, true)).unwrap().data_lease;
    world.open_chunks.insert(a, vec![listed(ino, &chunk)]);
    world.hold_data = true;
    world.lose(a, &[b]);
    let event = world.data_next().unwrap();
    world.event(event);
    assert!(
        !matches!(world.data_effects.front(), Some(Effect::Seal(of, _)) if of.0 == ino),
        "sealed under the writer"
    );
    world
        .ask(b, Op::WriteReport(report(ino, lease, 200, vec![chunk])))
        .unwrap();
}

/// The first seal that ended opened the file to others while the second was under way, which then
/// was refused by the members for its lower lease id, and went on for ever.
#[test]
fn a_file_is_given_to_nobody_before_the_last_of_its_seals_is_done() {
    let mut world = World::new();
    let (a, b, c) = (world.session("a"), world.session("b"), world.session("c"));
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    let released = WriteReport {
        release: true,
        ..report(ino, lease, 100, vec![chunk])
    };
    world.ask(a, Op::WriteReport(released)).unwrap();
    open_new(&mut world, a, "other");
    world.ask(b, acquire(ino, true)).unwrap();
    world.hold_data = true;
    world.lose(b, &[a, c]);
    let fenced = world.data_next().unwrap();
    world.event(fenced);
    // Servers still list what the former writer had open, which dies before the file is sealed.
    world.open_chunks.insert(a, vec![listed(ino, &chunk)]);
    world.lose(a, &[c]);
    world.data_effects.rotate_left(1);
    let fenced = world.data_next().unwrap();
    world.event(fenced);
    let seals = |world: &World| {
        let of_file = |effect: &&Effect| matches!(effect, Effect::Seal(of, _) if of.0 == ino);
        world.data_effects.iter().filter(of_file).count()
    };
    let waiting = world.send(c, acquire(ino, true));
    let mut done = 0;
    while seals(&world) > 0 {
        assert_eq!(seals(&world), 1, "one at a time");
        assert_eq!(world.take(waiting), None, "after {done}");
        done += usize::from(
            matches!(world.data_effects.front(), Some(Effect::Seal(of, _)) if of.0 == ino),
        );
        let event = world.data_next().unwrap();
        world.event(event);
        world.settle();
    }
    assert_eq!(done, 2);
    world.result(waiting).unwrap();
}

/// A mount whose session is evicted drops what it wrote and acknowledges the recall: the file was
/// given to others before its chunks were sealed.
#[test]
fn what_an_evicted_session_gives_back_is_sealed_first() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    let written = Op::WriteReport(report(ino, lease, 100, vec![chunk]));
    world.ask(a, written).unwrap();
    world.hold_data = true;
    let token = world.token();
    world.event(crate::core::Event::Evict(token, a));
    let reading = world.send(b, acquire(ino, false));
    world.settle();
    assert_eq!(world.take(reading), None, "before the fence");
    while let Some(event) = world.data_next() {
        assert_eq!(world.take(reading), None, "before {event:?}");
        world.event(event);
        world.settle();
    }
    world.result(reading).unwrap();
}

/// The second seal of a file freed the chunk that the first one was about to link: the file referred
/// for ever to a chunk that was deleted.
#[test]
fn a_chunk_that_one_seal_links_is_not_freed_by_the_next() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    let size = Op::WriteReport(report(ino, lease, 5000, vec![]));
    world.ask(a, size).unwrap();
    open_new(&mut world, a, "other");
    world.hold_data = true;
    let torn = WriteReport {
        release: true,
        torn: vec![chunk],
        ..report(ino, lease, 5000, vec![])
    };
    world.ask(a, Op::WriteReport(torn)).unwrap();
    world.open_chunks.insert(a, vec![listed(ino, &chunk)]);
    world.lose(a, &[b]);
    // A member is away: the session is fenced before the file is sealed.
    world.data_effects.rotate_left(1);
    while let Some(event) = world.data_next() {
        world.event(event);
        world.settle();
    }
    let key = crate::keys::free_chunk(GroupId(chunk.group), ChunkId(chunk.chunk));
    assert!(!world.store.contains_key(&key), "freed although linked");
    let seen = world.ask(b, acquire(ino, false)).unwrap().chunks;
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].chunk, chunk.chunk);
}

/// What had moved to another rank was taken for a file nobody can reach: its chunks were freed.
#[test]
fn a_file_of_another_rank_is_not_sealed_away() {
    use hither_proto::fragment::Fragment;
    use hither_proto::ids::{Epoch, RankId};

    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    let report = Op::WriteReport(report(ino, lease, 100, vec![chunk]));
    world.ask(a, report).unwrap();
    let table = |rank| vec![(ROOT, Fragment::WHOLE, RankId(rank), Epoch(1))];
    world.event(crate::core::Event::Subtrees(table(1)));
    world.open_chunks.insert(a, vec![listed(ino, &chunk)]);
    world.lose(a, &[b]);
    world.settle();
    assert_eq!(freed(&world), 0);
    world.event(crate::core::Event::Subtrees(table(0)));
    world.settle();
    assert_eq!(freed(&world), 0);
    let seen = world.ask(b, acquire(ino, false)).unwrap().chunks;
    assert_eq!(seen.len(), 1);
}

/// Members refuse a lease id below one they know: the cut of a writer that died was refused for
/// ever once the file had been sealed.
#[test]
fn a_dead_writers_file_is_sealed_after_the_cut_that_is_under_way() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    let written = Op::WriteReport(report(ino, lease, 10_000, vec![chunk]));
    world.ask(a, written).unwrap();
    world.hold_data = true;
    world.send(a, cut(ino, 100));
    world.open_chunks.insert(a, vec![listed(ino, &chunk)]);
    world.lose(a, &[b]);
    let kinds = |world: &World| -> Vec<&'static str> {
        let kind = |effect: &Effect| match effect {
            Effect::Trim(..) => "trim",
            Effect::Seal(..) => "seal",
            _ => "fence",
        };
        world.data_effects.iter().map(kind).collect()
    };
    assert_eq!(kinds(&world), ["trim", "fence"]);
    world.data_effects.rotate_left(1);
    let fenced = world.data_next().unwrap();
    world.event(fenced);
    assert_eq!(kinds(&world), ["trim"]);
    trim_next(&mut world);
    assert_eq!(kinds(&world), ["seal"]);
}

/// Answered early, a cut would be carried out anew by a successor, behind later writes.
#[test]
fn a_cut_is_answered_only_when_it_is_in_the_store() {
    let mut world = World::new();
    let a = world.session("a");
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    world
        .ask(a, Op::WriteReport(report(ino, lease, 10_000, vec![chunk])))
        .unwrap();
    world.hold_commits = true;
    let answer = world.send(a, cut(ino, 100));
    assert_eq!(world.take(answer), None);
    world.hold_commits = false;
    while let Some(event) = world.commit_next() {
        world.event(event);
    }
    world.settle();
    world.result(answer).unwrap();
}

/// A truncate that was sent again while its cut was under way got no answer at all.
#[test]
fn a_cut_sent_again_is_answered_once_it_is_done() {
    let mut world = World::new();
    let a = world.session("a");
    let (ino, lease, chunk) = open_new(&mut world, a, "f");
    world
        .ask(a, Op::WriteReport(report(ino, lease, 10_000, vec![chunk])))
        .unwrap();
    world.hold_data = true;
    let first = world.send_numbered(a, 50, false, cut(ino, 100));
    let again = world.send_numbered(a, 50, false, cut(ino, 100));
    trim_next(&mut world);
    world.settle();
    assert_eq!(world.take(first), None);
    assert_eq!(world.result(again).unwrap().inode.unwrap().size, 100);
}

/// A recall that was lost was never sent again, and its holder kept the file for ever.
#[test]
fn a_recall_that_is_not_answered_is_sent_again() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let (ino, ..) = open_new(&mut world, a, "f");
    let mut lost = 2;
    world.on_recall = Box::new(move |_, _| {
        lost -= 1;
        (lost < 0).then(RecallReply::default)
    });
    let read = world.send(b, acquire(ino, false));
    assert_eq!(world.take(read), None);
    for _ in 0..5 {
        world.now += std::time::Duration::from_millis(200);
        world.event(crate::core::Event::Tick);
    }
    world.result(read).unwrap();
    assert_eq!(world.recalls.len(), 3);
}

/// A holder that is renewed and does nothing loses its session; one that makes progress does not.
#[test]
fn a_holder_that_makes_no_progress_is_evicted() {
    for busy in [true, false] {
        let mut world = World::new();
        let (a, b) = (world.session("a"), world.session("b"));
        let (ino, lease, chunk) = open_new(&mut world, a, "f");
        world.on_recall = Box::new(|_, _| None);
        let read = world.send(b, acquire(ino, false));
        for size in 0..30 {
            world.now += std::time::Duration::from_secs(10);
            for s in [a, b] {
                let token = world.token();
                world.event(crate::core::Event::SessionRenew(token, s, 0));
            }
            if busy {
                let op = Op::WriteReport(report(ino, lease, size, vec![chunk]));
                world.ask(a, op).unwrap();
            }
            world.event(crate::core::Event::Tick);
        }
        assert_eq!(world.take(read).is_none(), busy);
    }
}

/// The holder sends what it has written as a request of its own, then acknowledges.
#[test]
fn a_report_sent_before_the_acknowledgement_ends_the_lease() {
    for (downgrade, wants_all) in [(false, true), (true, false), (true, true)] {
        let mut world = World::new();
        let (a, b) = (world.session("a"), world.session("b"));
        let (ino, lease, chunk) = open_new(&mut world, a, "f");
        world.on_recall = Box::new(|_, _| None);
        let taken = world.send(b, acquire(ino, wants_all));
        let done = Op::WriteReport(WriteReport {
            release: true,
            downgrade,
            ..report(ino, lease, 77, vec![chunk])
        });
        let sent = world.send_numbered(a, 50, false, done.clone());
        world.result(sent).unwrap();
        assert_eq!(world.take(taken), None, "not acknowledged yet");
        world.on_recall = Box::new(|_, _| Some(RecallReply::default()));
        world.now += std::time::Duration::from_millis(200);
        world.event(crate::core::Event::Tick);
        world.settle();
        let reply = world.result(taken).unwrap();
        assert_eq!(reply.inode.unwrap().size, 77);
        assert_eq!((reply.data_exclusive, reply.chunks.len()), (wants_all, 1));
        // Sent again, it is answered and changes nothing.
        let again = world.send_numbered(a, 50, false, done);
        world.settle();
        world.result(again).unwrap();
        world.crash();
        world.come_back(b, vec![], vec![]);
        assert!(world.resume(a));
        let replayed = WriteReport {
            release: true,
            ..report(ino, lease, 5, vec![])
        };
        let again = world.send_numbered(a, 50, true, Op::WriteReport(replayed));
        world.result(again).unwrap();
        world.reclaim(a, vec![], vec![], true);
        world.settle();
        let seen = world.ask(b, acquire(ino, false)).unwrap();
        assert_eq!((seen.inode.unwrap().size, seen.chunks.len()), (77, 1));
    }
}
