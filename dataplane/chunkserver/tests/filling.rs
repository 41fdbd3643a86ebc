//! Members that fill: empty ones, ones that were away, and what changes meanwhile.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hither_net::NetError;
use hither_proto::chunk::{Delete, Seal, Settle, Trim};
use hither_proto::ids::{ChunkId, DiskIndex, Epoch, GroupId, InodeId};
use hither_proto::kind::Kind;
use hither_proto::map::MemberState::{Filling, InSync, Lagging};
use hither_proto::status::Status;

use support::{Cluster, GROUP, pattern, put, same};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_member_fills_while_writes_go_on() {
    let mut cluster = Cluster::start(2).await;
    let mut expected = Vec::new();
    for chunk in 1..=12u64 {
        let length = usize::try_from(chunk).unwrap() * 150_000;
        cluster
            .write(&[1, 2], put(chunk, 1, 1, 0, length))
            .await
            .unwrap();
        expected.push(pattern(chunk, 1, 0, length));
    }
    assert_eq!(cluster.start_server(3).await, 3);
    let cluster = Arc::new(cluster);
    let stop = Arc::new(AtomicBool::new(false));
    let writer = {
        let (cluster, stop) = (Arc::clone(&cluster), Arc::clone(&stop));
        tokio::spawn(async move {
            let mut version = 2u64;
            while !stop.load(Ordering::Relaxed) || version < 40 {
                // New chunks too.
                let chunk = version * 7 % 15 + 1;
                let offset = u32::try_from(version * 37_003 % 140_000).unwrap();
                let length = usize::try_from(version * 7919 % 90_000).unwrap() + 1;
                let wanted = put(chunk, 1, version, offset, length);
                write_somehow(&cluster, &wanted).await;
                while expected.len() < usize::try_from(chunk).unwrap() {
                    expected.push(Vec::new());
                }
                let copy = &mut expected[usize::try_from(chunk).unwrap() - 1];
                let end = offset as usize + length;
                copy.resize(copy.len().max(end), 0);
                copy[offset as usize..end].copy_from_slice(&wanted.bytes);
                version += 1;
            }
            expected
        })
    };
    cluster
        .manager
        .set_group(&[(1, InSync), (2, InSync), (3, Filling)], 1);
    cluster.manager.until_in_sync(3).await;
    stop.store(true, Ordering::Relaxed);
    let expected = writer.await.unwrap();
    for (chunk, bytes) in (1u64..).zip(&expected) {
        for id in 1..=3 {
            let found = cluster.content(id, chunk).await;
            if bytes.is_empty() && found.is_err() {
                continue;
            }
            same(&found.unwrap(), bytes);
        }
    }
    let counters = cluster.servers[&3].counters();
    assert!(counters.filled_chunks >= 12, "{counters:?}");
}

/// Writes along the chain of the newest map until it is taken, with a higher chain number each time.
async fn write_somehow(cluster: &Cluster, wanted: &support::Put) {
    let taken = write_until_taken(cluster, wanted);
    tokio::time::timeout(support::WAIT, taken)
        .await
        .expect("the write is taken");
}

async fn write_until_taken(cluster: &Cluster, wanted: &support::Put) {
    for attempt in 1u32.. {
        let map = cluster.manager.map();
        let members = |state: i32| {
            map.groups[0]
                .members
                .iter()
                .filter(move |m| m.state == state)
                .map(|m| m.server)
        };
        let chain: Vec<u64> = members(InSync.into())
            .chain(members(Filling.into()))
            .collect();
        let mut write = hither_proto::chunk::Write {
            target: Some(cluster.target(wanted.chunk, wanted.lease)),
            offset: wanted.offset,
            checksums: hither_proto::checksum::piece_checksums(wanted.offset, &wanted.bytes),
            rest: cluster.hops(&chain[1..]),
            may_create: true,
            session: 5,
            inode: wanted.chunk + 100,
            ..hither_proto::chunk::Write::default()
        };
        write.chain_number = attempt.max(CHAIN.load(Ordering::Relaxed));
        match cluster.send(chain[0], &write, wanted.bytes.clone()).await {
            Ok(_) => return,
            Err(NetError::Refused {
                status: Status::STALE_EPOCH | Status::RETRY | Status::NOT_MINE,
                ..
            }) => {
                CHAIN.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => panic!("{error}"),
        }
        // The server answers as soon as it knows the map.
        tokio::task::yield_now().await;
    }
}

static CHAIN: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(1);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_was_away_takes_only_what_changed() {
    let mut cluster = Cluster::start(2).await;
    let epoch = cluster.manager.epoch();
    for chunk in 1..=6u64 {
        cluster
            .write(&[1, 2], put(chunk, chunk, 1, 0, 200_000))
            .await
            .unwrap();
    }
    for id in [1, 2] {
        for lease in 1..=6 {
            let close = hither_proto::chunk::Close {
                group: GROUP,
                epoch,
                chunks: vec![lease],
                lease,
                ..Default::default()
            };
            cluster.call(id, Kind::CHUNK_CLOSE, &close).await.unwrap();
        }
    }
    cluster.stop_server(2).await;
    cluster.manager.set_group(&[(1, InSync), (2, Lagging)], 1);
    cluster
        .write(&[1], put(2, 10, 2, 1000, 5000))
        .await
        .unwrap();
    cluster
        .write(&[1], put(9, 11, 1, 0, 100_000))
        .await
        .unwrap();
    let epoch = cluster.manager.epoch();
    cluster
        .call(
            1,
            Kind::CHUNK_DELETE,
            &Delete {
                group: GROUP,
                epoch,
                chunks: vec![3],
            },
        )
        .await
        .unwrap();
    let trim = Trim {
        target: Some(cluster.target(4, 12)),
        offset: 50_000,
        length: 0,
    };
    cluster.call(1, Kind::CHUNK_TRIM, &trim).await.unwrap();

    assert_eq!(cluster.start_server(2).await, 2);
    assert_eq!(
        support::refused(cluster.read(2, 1, 0, 10).await).0,
        Status::NOT_MINE
    );
    cluster.manager.set_group(&[(1, InSync), (2, Filling)], 1);
    cluster.manager.until_in_sync(2).await;
    for chunk in [1, 2, 4, 5, 6, 9] {
        same(
            &cluster.content(2, chunk).await.unwrap(),
            &cluster.content(1, chunk).await.unwrap(),
        );
    }
    assert_eq!(
        support::refused(cluster.read(2, 3, 0, 10).await).0,
        Status::NO_SUCH_CHUNK
    );
    assert_eq!(cluster.servers[&2].counters().filled_chunks, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_metadata_side_changes_reaches_filling_members_too() {
    let mut cluster = Cluster::start(1).await;
    cluster.manager.promotes(false);
    for chunk in 1..=4u64 {
        cluster
            .write(&[1], put(chunk, 1, 1, 0, 300_000))
            .await
            .unwrap();
    }
    assert_eq!(cluster.start_server(2).await, 2);
    cluster.manager.set_group(&[(1, InSync), (2, Filling)], 1);
    until_filled(&cluster, 2).await;
    let fetched = cluster.servers[&2].counters().filled_bytes;
    // Filled, but the manager has not made it in-sync yet.
    let trim = Trim {
        target: Some(cluster.target(1, 5)),
        offset: 100_000,
        length: 0,
    };
    cluster.call(1, Kind::CHUNK_TRIM, &trim).await.unwrap();
    let seal = Seal {
        target: Some(cluster.target(2, 5)),
    };
    cluster.call(1, Kind::CHUNK_SEAL, &seal).await.unwrap();
    let settle = Settle {
        target: Some(cluster.target(2, 5)),
        source: cluster.hops(&[1]).pop(),
        blocks: vec![],
        length: 200_000,
    };
    cluster.call(1, Kind::CHUNK_SETTLE, &settle).await.unwrap();
    let delete = Delete {
        group: GROUP,
        epoch: cluster.manager.epoch(),
        chunks: vec![3],
    };
    cluster.call(1, Kind::CHUNK_DELETE, &delete).await.unwrap();
    // No copy was given up to be taken over again: the manager may make it in-sync at any time.
    assert_eq!(cluster.servers[&2].counters().filled_bytes, fetched);
    // A late write under the old lease is refused by the tail as by the head.
    assert_eq!(
        support::refused(cluster.write(&[1, 2], put(1, 1, 2, 0, 10)).await).0,
        Status::STALE_LEASE
    );
    cluster.manager.set_group(&[(1, InSync), (2, InSync)], 1);
    same(
        &cluster.content(2, 1).await.unwrap(),
        &pattern(1, 1, 0, 100_000),
    );
    same(
        &cluster.content(2, 2).await.unwrap(),
        &pattern(2, 1, 0, 200_000),
    );
    assert_eq!(
        support::refused(cluster.read(2, 3, 0, 10).await).0,
        Status::NO_SUCH_CHUNK
    );
    same(
        &cluster.content(2, 4).await.unwrap(),
        &pattern(4, 1, 0, 300_000),
    );
}

async fn until_filled(cluster: &Cluster, id: u64) {
    let wait = async {
        loop {
            let progress = cluster.servers[&id].fill_progress();
            if progress.values().any(|progress| progress.caught_up) {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(support::WAIT, wait)
        .await
        .expect("the member fills");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_members_give_and_a_limit_is_kept() {
    let mut cluster = Cluster::adjusted(2, |config| config.fill_bytes_per_second = 20 << 20).await;
    for chunk in 1..=6u64 {
        cluster
            .write(&[1, 2], put(chunk, 1, 1, 0, 1 << 20))
            .await
            .unwrap();
    }
    assert_eq!(cluster.start_server(3).await, 3);
    let begun = tokio::time::Instant::now();
    cluster
        .manager
        .set_group(&[(1, InSync), (2, InSync), (3, Filling)], 1);
    cluster.manager.until_in_sync(3).await;
    // The first piece is free; five more take a twentieth of a second each.
    assert!(begun.elapsed().as_millis() >= 250, "{:?}", begun.elapsed());
    let fetched = |id: u64| {
        cluster.servers[&id]
            .store()
            .disk(DiskIndex(0))
            .unwrap()
            .counters()
            .reads
    };
    assert!(fetched(1) >= 3 && fetched(2) >= 3);
    for chunk in 1..=6u64 {
        same(
            &cluster.content(3, chunk).await.unwrap(),
            &pattern(chunk, 1, 0, 1 << 20),
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_in_sync_member_completes_a_copy_that_was_left_partial() {
    let cluster = Cluster::start(2).await;
    let bytes = put(1, 1, 1, 0, 2_500_000);
    cluster.write(&[1, 2], bytes.clone()).await.unwrap();
    // As when it became in-sync in the middle of taking the copy over.
    let disk = cluster.servers[&2]
        .store()
        .disk(DiskIndex(0))
        .unwrap()
        .clone();
    let (chunk, group) = (ChunkId(1), GroupId(GROUP));
    let epoch = Epoch(cluster.manager.epoch());
    disk.refill_begin(chunk, group, InodeId(101), epoch)
        .unwrap();
    assert_eq!(
        support::refused(cluster.read(2, 1, 0, 10).await).0,
        Status::NO_SUCH_CHUNK
    );
    cluster.manager.set_group(&[(1, InSync), (2, InSync)], 1);
    // Writes go on meanwhile.
    let over = put(1, 1, 2, 1_000_000, 100_000);
    cluster.write(&[2, 1], over.clone()).await.unwrap();
    let wait = async {
        while cluster.read(2, 1, 0, 10).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(support::WAIT, wait).await.unwrap();
    let mut expected = bytes.bytes.to_vec();
    expected[1_000_000..1_100_000].copy_from_slice(&over.bytes);
    for id in [1, 2] {
        same(&cluster.content(id, 1).await.unwrap(), &expected);
    }
}

/// A cut reaches the member that still completes its copy before it reaches the one it takes the
/// bytes from.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_is_being_completed_is_cut_only_then() {
    let cluster = Cluster::adjusted(2, |config| config.fill_bytes_per_second = 4 << 20).await;
    cluster
        .write(&[1, 2], put(1, 1, 1, 0, 3_000_000))
        .await
        .unwrap();
    let disk = cluster.servers[&2]
        .store()
        .disk(DiskIndex(0))
        .unwrap()
        .clone();
    disk.discard(ChunkId(1)).unwrap();
    disk.refill_begin(
        ChunkId(1),
        GroupId(GROUP),
        InodeId(101),
        Epoch(cluster.manager.epoch()),
    )
    .unwrap();
    cluster.manager.set_group(&[(1, InSync), (2, InSync)], 1);
    let trim = Trim {
        target: Some(cluster.target(1, 5)),
        offset: 1_000_001,
        length: 0,
    };
    let trimmed = async {
        // Asked again as the metadata side does.
        while let Err(error) = cluster.call(2, Kind::CHUNK_TRIM, &trim).await {
            let (status, ..) = support::refused(Err::<(), _>(error));
            assert!(matches!(status, Status::RETRY | Status::STALE_EPOCH));
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(support::WAIT, trimmed).await.unwrap();
    let wait = async {
        while cluster.read(2, 1, 0, 10).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(support::WAIT, wait).await.unwrap();
    cluster.call(1, Kind::CHUNK_TRIM, &trim).await.unwrap();
    let expected = pattern(1, 1, 0, 1_000_001);
    for id in [1, 2] {
        same(&cluster.content(id, 1).await.unwrap(), &expected);
    }
}

/// A member that was away holds a large copy with an open mark, of which little has changed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_copy_that_was_here_only_what_differs_is_fetched() {
    let mut cluster = Cluster::start(2).await;
    let mut expected = pattern(1, 1, 0, 8 << 20);
    for piece in 0..8u32 {
        let bytes = put(1, 1, 1, piece << 20, 1 << 20);
        cluster.write(&[1, 2], bytes).await.unwrap();
    }
    cluster.stop_server(2).await;
    cluster.manager.set_group(&[(1, InSync), (2, Lagging)], 1);
    for (offset, length) in [(5_000_000, 300), (8 << 20, 4000)] {
        let bytes = put(1, 1, 2, offset, length);
        expected.resize(expected.len().max(offset as usize + length), 0);
        expected[offset as usize..][..length].copy_from_slice(&bytes.bytes);
        cluster.write(&[1], bytes).await.unwrap();
    }
    assert_eq!(cluster.start_server(2).await, 2);
    cluster.manager.set_group(&[(1, InSync), (2, Filling)], 1);
    cluster.manager.until_in_sync(2).await;
    same(&cluster.content(2, 1).await.unwrap(), &expected);
    let counters = cluster.servers[&2].counters();
    assert_eq!(counters.filled_bytes, (1 << 20) + 4000, "{counters:?}");
}

/// As if the copy were being taken over, with nothing of it here yet.
fn make_partial(cluster: &Cluster, id: u64, chunk: u64) {
    let disk = cluster.servers[&id].store().disk(DiskIndex(0)).unwrap();
    let epoch = Epoch(cluster.manager.epoch());
    disk.discard(ChunkId(chunk)).unwrap();
    disk.refill_begin(ChunkId(chunk), GroupId(GROUP), InodeId(chunk + 100), epoch)
        .unwrap();
}

/// Asks until the answer is not that the server is not ready yet.
async fn settled(cluster: &Cluster, id: u64, kind: Kind, message: &impl prost::Message) -> Status {
    let wait = async {
        loop {
            match cluster.call(id, kind, message).await {
                Ok(_) => return Status::OK,
                Err(NetError::Refused { status, .. }) if status == Status::RETRY => {}
                Err(error) => return support::refused(Err::<(), _>(error)).0,
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(support::WAIT, wait)
        .await
        .expect("an answer that is final")
}

/// The member was made in-sync as a copy became partial again, and then lost all others. It told
/// everybody to try again later, for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partial_copy_that_nobody_else_has_is_reported_cut_and_freed() {
    let cluster = Cluster::start(2).await;
    for chunk in 1..=3u64 {
        let bytes = put(chunk, 1, 1, 0, 50_000);
        cluster.write(&[1, 2], bytes).await.unwrap();
    }
    cluster.manager.set_group(&[(2, InSync), (1, Lagging)], 1);
    // From here on it knows the epoch.
    cluster.write(&[2], put(9, 1, 1, 0, 100)).await.unwrap();
    for chunk in 1..=3u64 {
        make_partial(&cluster, 2, chunk);
    }
    let seal = Seal {
        target: Some(cluster.target(1, 5)),
    };
    let settle = Settle {
        target: Some(cluster.target(1, 5)),
        source: cluster.hops(&[2]).pop(),
        blocks: vec![],
        length: 50_000,
    };
    let trim = |chunk: u64, offset: u32| Trim {
        target: Some(cluster.target(chunk, 5)),
        offset,
        length: 0,
    };
    let lost = Status::TOO_FEW_COPIES;
    let found = settled(&cluster, 2, Kind::CHUNK_SEAL, &seal).await;
    assert_eq!(found, lost);
    let found = settled(&cluster, 2, Kind::CHUNK_SETTLE, &settle).await;
    assert_eq!(found, lost);
    let found = settled(&cluster, 2, Kind::CHUNK_TRIM, &trim(1, 100)).await;
    assert_eq!(found, lost);
    // Neither needs what is missing.
    let found = settled(&cluster, 2, Kind::CHUNK_TRIM, &trim(2, 0)).await;
    assert_eq!(found, Status::OK);
    assert_eq!(cluster.content(2, 2).await.unwrap(), b"");
    let delete = Delete {
        group: GROUP,
        epoch: cluster.manager.epoch(),
        chunks: vec![3],
    };
    let found = settled(&cluster, 2, Kind::CHUNK_DELETE, &delete).await;
    assert_eq!(found, Status::OK);
    // One that has the bytes comes back.
    cluster.manager.set_group(&[(1, InSync), (2, InSync)], 1);
    let seal = Seal {
        target: Some(cluster.target(1, 6)),
    };
    let found = settled(&cluster, 2, Kind::CHUNK_SEAL, &seal).await;
    assert_eq!(found, Status::OK);
    let bytes = cluster.content(2, 1).await.unwrap();
    same(&bytes, &pattern(1, 1, 0, 50_000));
    assert_eq!(cluster.content(2, 2).await.unwrap(), b"");
}

/// Between the last look for partial copies and the report one may be taken over again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_with_a_partial_copy_does_not_say_that_it_is_filled() {
    let mut cluster = Cluster::start(1).await;
    cluster.manager.promotes(false);
    let bytes = put(1, 1, 1, 0, 50_000);
    cluster.write(&[1], bytes).await.unwrap();
    assert_eq!(cluster.start_server(2).await, 2);
    cluster.manager.set_group(&[(1, InSync), (2, Filling)], 1);
    until_filled(&cluster, 2).await;
    make_partial(&cluster, 2, 1);
    cluster.manager.until_beat(2).await;
    cluster.manager.promotes(true);
    cluster.manager.until_beat(2).await;
    let state = cluster.manager.map().groups[0].members[1].state;
    assert_eq!(state, i32::from(Filling));
    let trim = Trim {
        target: Some(cluster.target(1, 5)),
        offset: 20_000,
        length: 0,
    };
    cluster.call(1, Kind::CHUNK_TRIM, &trim).await.unwrap();
    cluster.manager.until_in_sync(2).await;
    let bytes = cluster.content(2, 1).await.unwrap();
    same(&bytes, &pattern(1, 1, 0, 20_000));
}

/// A copy of which its source has nothing yet was taken over as an empty one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_is_taken_from_a_member_that_has_all_of_it() {
    let mut cluster = Cluster::adjusted(1, |config| {
        if config.zone == "zone2" {
            config.fill_bytes_per_second = 1;
        }
    })
    .await;
    cluster.write(&[1], put(9, 1, 1, 0, 1000)).await.unwrap();
    assert_eq!(cluster.start_server(2).await, 2);
    // The first bytes are free: from now on the server waits long before it takes more.
    cluster.manager.set_group(&[(1, InSync), (2, Filling)], 1);
    cluster.manager.until_in_sync(2).await;
    let bytes = put(5, 1, 1, 0, 50_000);
    cluster.write(&[1, 2], bytes).await.unwrap();
    make_partial(&cluster, 2, 5);
    assert_eq!(cluster.start_server(3).await, 3);
    cluster
        .manager
        .set_group(&[(2, InSync), (1, InSync), (3, Filling)], 1);
    cluster.manager.until_in_sync(3).await;
    let bytes = cluster.content(3, 5).await.unwrap();
    same(&bytes, &pattern(5, 1, 0, 50_000));
    let partial = support::refused(cluster.read(2, 5, 0, 10).await);
    assert_eq!(partial.0, Status::NO_SUCH_CHUNK);
}

/// One copy that was cut meanwhile had all others taken over again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_becomes_shorter_is_taken_over_again_alone() {
    let mut cluster = Cluster::adjusted(1, |config| {
        config.fill_bytes_per_second = 1 << 20;
        config.fill_parallel = 1;
    })
    .await;
    // Under leases that are not closed, so that each counts as changed whenever it is looked at.
    for (chunk, length) in [(1, 300_000), (2, 3_000_000), (3, 10_000), (4, 10_000)] {
        let bytes = put(chunk, 1, 1, 0, length);
        cluster.write(&[1], bytes).await.unwrap();
    }
    assert_eq!(cluster.start_server(2).await, 2);
    cluster.manager.set_group(&[(1, InSync), (2, Filling)], 1);
    let wait = async {
        let begun = |progress: &hither_chunkserver::FillProgress| progress.bytes_done > 1_000_000;
        while !cluster.servers[&2].fill_progress().values().any(begun) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(support::WAIT, wait).await.unwrap();
    let trim = Trim {
        target: Some(cluster.target(2, 5)),
        offset: 500_000,
        length: 0,
    };
    // Passed on to the member that fills, which follows when it has the copy.
    let found = settled(&cluster, 1, Kind::CHUNK_TRIM, &trim).await;
    assert!(
        [Status::OK, Status::STALE_EPOCH].contains(&found),
        "{found}"
    );
    cluster.manager.until_in_sync(2).await;
    assert_eq!(cluster.servers[&2].counters().filled_chunks, 4);
    for (chunk, length) in [(1, 300_000), (2, 500_000), (3, 10_000), (4, 10_000)] {
        let bytes = cluster.content(2, chunk).await.unwrap();
        same(&bytes, &pattern(chunk, 1, 0, length));
    }
}
