//! Files across the death of a rank or of a writer: references, cuts, seals.

use hither_proto::ids::{CHUNK_SIZE, SessionId};
use hither_proto::meta::{AllocChunks, RecallReply, request::Op};
use hither_proto::stored::ChunkRef;

use super::data::{acquire, open_new, report};
use super::world::{World, exclusive};

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
