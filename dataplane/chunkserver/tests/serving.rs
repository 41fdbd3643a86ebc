//! Several chunkservers and a manager in one process: writes, reads, epochs, the metadata side.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use bytes::Bytes;
use hither_chunkserver::{ChunkServer, StartError};
use hither_proto::checksum::piece_checksums;
use hither_proto::chunk::{
    Close, Delete, Fence, FenceReply, List, ListReply, Seal, SealReply, Settle, StatusReply, Trim,
    Write,
};
use hither_proto::common::Empty;
use hither_proto::kind::Kind;
use hither_proto::map::MemberState::{Filling, InSync, Lagging};
use hither_proto::status::Status;

use support::{Cluster, GROUP, Put, pattern, put, refused, same};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disks_of_another_cluster_are_refused() {
    let mut cluster = Cluster::start(1).await;
    cluster.stop_server(1).await;
    cluster
        .manager
        .change(|map| map.cluster_id = Bytes::from_static(b"another cluster!"));
    let refused = ChunkServer::start(cluster.config(1)).await.unwrap_err();
    assert!(
        matches!(
            refused,
            StartError::Store(hither_chunkstore::Error::ForeignCluster { .. })
        ),
        "{refused}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chain_writes_in_the_order_the_client_gives_and_all_members_read_the_same() {
    let cluster = Cluster::start(3).await;
    let applied = cluster
        .write(&[2, 3, 1], put(1, 1, 1, 0, 1 << 20))
        .await
        .unwrap();
    let order: Vec<u64> = applied.acks.iter().map(|ack| ack.server).collect();
    assert_eq!(order, [2, 3, 1]);
    for ack in &applied.acks {
        assert_eq!(ack.boot_id, cluster.servers[&ack.server].boot_id().0);
    }
    let small = Put {
        sync: true,
        ..put(1, 1, 2, 5000, 3000)
    };
    cluster.write(&[2, 3, 1], small).await.unwrap();
    let mut expected = pattern(1, 1, 0, 1 << 20);
    expected[5000..8000].copy_from_slice(&pattern(1, 2, 5000, 3000));
    for id in 1..=3 {
        same(&cluster.content(id, 1).await.unwrap(), &expected);
        let recent = cluster.servers[&id].recent_writes();
        let behind = [1, 2, 0]
            .iter()
            .position(|n| *n == usize::try_from(id).unwrap() % 3)
            .unwrap();
        assert_eq!(recent.len(), 2);
        assert_eq!(recent[0].head, id == 2, "{behind}");
        assert_eq!(
            recent[0].behind,
            [0, 2, 1][usize::try_from(id).unwrap() - 1]
        );
    }
    let flushed = cluster.flush(&[1, 2, 3], &[1, 99]).await.unwrap();
    assert_eq!(flushed.acks.len(), 3);
    let (bytes, reply) = cluster.read(3, 1, (1 << 20) - 10, 100).await.unwrap();
    assert_eq!(
        (bytes.len(), reply.copy_length, reply.repaired),
        (10, 1 << 20, false)
    );
    let status: StatusReply = cluster
        .call(1, Kind::CHUNK_STATUS, &Empty {})
        .await
        .unwrap()
        .decode()
        .unwrap();
    assert_eq!((status.writes, status.chunks), (2, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_in_flight_together_end_in_the_order_they_were_sent() {
    let cluster = Cluster::start(3).await;
    let address = cluster.address(1);
    let connection = cluster.pool.get(&address, support::WAIT).await.unwrap();
    let mut calls = Vec::new();
    for version in 0..60u64 {
        let length = if version % 5 == 0 { 200_000 } else { 4000 };
        let bytes: Bytes = pattern(1, version, 0, length).into();
        let write = Write {
            target: Some(cluster.target(1, 1)),
            checksums: piece_checksums(0, &bytes),
            chain_number: 1,
            rest: cluster.hops(&[2, 3]),
            may_create: true,
            ..Write::default()
        };
        let connection = std::sync::Arc::clone(&connection);
        let mut call = Box::pin(async move {
            connection
                .call(Kind::CHUNK_WRITE, &write, &[bytes], support::WAIT)
                .await
        });
        // Polled once, it is sent; it may even be answered by then.
        match futures::poll!(call.as_mut()) {
            std::task::Poll::Ready(answer) => drop(answer.unwrap()),
            std::task::Poll::Pending => calls.push(call),
        }
    }
    for call in calls {
        call.await.unwrap();
    }
    let mut expected = pattern(1, 55, 0, 200_000);
    expected[..4000].copy_from_slice(&pattern(1, 59, 0, 4000));
    for id in 1..=3 {
        same(&cluster.content(id, 1).await.unwrap(), &expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_link_is_named() {
    let mut cluster = Cluster::start(3).await;
    cluster
        .write(&[1, 2, 3], put(1, 1, 1, 0, 100))
        .await
        .unwrap();
    cluster.stop_server(3).await;
    let (status, failure) = refused(cluster.write(&[1, 2, 3], put(1, 1, 2, 0, 100)).await);
    assert_eq!(
        (status, failure.link_from, failure.link_to),
        (Status::BROKEN_LINK, 2, 3)
    );
    let (status, failure) = refused(cluster.flush(&[2, 3, 1], &[1]).await);
    assert_eq!(
        (status, failure.link_from, failure.link_to),
        (Status::BROKEN_LINK, 2, 3)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn epochs_older_and_newer_than_the_map() {
    let cluster = Cluster::start(2).await;
    cluster.write(&[1, 2], put(1, 1, 1, 0, 100)).await.unwrap();
    let mut old = Write {
        target: Some(cluster.target(1, 1)),
        checksums: piece_checksums(0, b"x"),
        chain_number: 1,
        rest: cluster.hops(&[2]),
        ..Write::default()
    };
    cluster.manager.silent(true);
    let epoch = cluster.manager.set_group(&[(1, InSync), (2, InSync)], 1);
    // The servers have not heard of it; this write makes them fetch the map.
    cluster.write(&[1, 2], put(1, 1, 2, 0, 100)).await.unwrap();
    let (status, failure) = refused(cluster.send(1, &old, Bytes::from_static(b"x")).await);
    assert_eq!((status, failure.epoch), (Status::STALE_EPOCH, epoch));
    // One that nobody has heard of.
    old.target.as_mut().unwrap().epoch = epoch + 5;
    let (status, _) = refused(cluster.send(1, &old, Bytes::from_static(b"x")).await);
    assert_eq!(status, Status::RETRY);
    same(
        &cluster.content(1, 1).await.unwrap(),
        &pattern(1, 2, 0, 100),
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_may_not_serve_says_so_and_absence_is_never_zeros() {
    let mut cluster = Cluster::start(3).await;
    let outsider = cluster.start_server(4).await;
    cluster
        .manager
        .set_group(&[(1, InSync), (2, Filling), (3, Lagging)], 1);
    cluster.manager.promotes(false);
    cluster.write(&[1, 2], put(1, 1, 1, 0, 100)).await.unwrap();
    assert_eq!(
        refused(cluster.read(1, 2, 0, 10).await).0,
        Status::NO_SUCH_CHUNK
    );
    for id in [2, 3, outsider] {
        assert_eq!(
            refused(cluster.read(id, 1, 0, 10).await).0,
            Status::NOT_MINE,
            "{id}"
        );
    }
    let list = List {
        group: GROUP,
        epoch: cluster.manager.epoch(),
        from: 0,
        limit: 10,
    };
    assert_eq!(
        refused(cluster.call(2, Kind::CHUNK_LIST, &list).await).0,
        Status::NOT_MINE
    );
    // A chain that leaves a member out, or begins with one that may not.
    assert_eq!(
        refused(cluster.write(&[1], put(1, 1, 1, 0, 100)).await).0,
        Status::STALE_EPOCH
    );
    assert_eq!(
        refused(cluster.write(&[3, 1, 2], put(1, 1, 1, 0, 100)).await).0,
        Status::NOT_MINE
    );
    let no_create = Write {
        target: Some(cluster.target(9, 1)),
        checksums: piece_checksums(0, b"x"),
        rest: cluster.hops(&[2]),
        ..Write::default()
    };
    assert_eq!(
        refused(cluster.send(1, &no_create, Bytes::from_static(b"x")).await).0,
        Status::NO_SUCH_CHUNK
    );
    cluster.manager.set_group(&[(1, InSync), (2, Lagging)], 2);
    assert_eq!(
        refused(cluster.write(&[1], put(1, 1, 1, 0, 100)).await).0,
        Status::TOO_FEW_COPIES
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_bytes_are_refused_on_the_way_in() {
    let cluster = Cluster::start(1).await;
    let mut write = Write {
        target: Some(cluster.target(1, 1)),
        checksums: piece_checksums(0, b"abc"),
        may_create: true,
        ..Write::default()
    };
    assert_eq!(
        refused(cluster.send(1, &write, Bytes::from_static(b"abd")).await).0,
        Status::BAD_CHECKSUM
    );
    write.offset = u32::MAX;
    assert_eq!(
        refused(cluster.send(1, &write, Bytes::from_static(b"abc")).await).0,
        Status::BAD_REQUEST
    );
    assert_eq!(
        refused(cluster.read(1, 1, 0, 9 << 20).await).0,
        Status::BAD_REQUEST
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_block_is_repaired_from_another_member_and_the_reader_does_not_see_it() {
    let cluster = Cluster::start(2).await;
    let bytes = put(1, 1, 1, 0, 300_000);
    cluster.write(&[1, 2], bytes.clone()).await.unwrap();
    cluster.flush(&[1, 2], &[1]).await.unwrap();
    let path = cluster.disk(1).join("chunks/01/0000000000000001");
    for at in [17, 70_000, 299_999] {
        damage(&path, at);
    }
    let (found, reply) = cluster.read(1, 1, 60_000, 100_000).await.unwrap();
    same(&found, &bytes.bytes[60_000..160_000]);
    assert!(reply.repaired);
    let (_, reply) = cluster.read(1, 1, 60_000, 100_000).await.unwrap();
    assert!(!reply.repaired);
    same(&cluster.content(1, 1).await.unwrap(), &bytes.bytes);
    assert_eq!(cluster.servers[&1].counters().repaired_blocks, 3);
    // A short piece in a damaged block: it is repaired, and the writer sends again.
    damage(&path, 40_000);
    let over = put(1, 1, 2, 40_050, 70_000);
    assert_eq!(
        refused(cluster.write(&[1, 2], over.clone()).await).0,
        Status::RETRY
    );
    cluster.write(&[1, 2], over.clone()).await.unwrap();
    let mut expected = bytes.bytes.to_vec();
    expected[40_050..110_050].copy_from_slice(&over.bytes);
    for id in [1, 2] {
        same(&cluster.content(id, 1).await.unwrap(), &expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decay_that_nobody_reads_is_found_and_repaired() {
    let mut cluster = Cluster::adjusted(2, |config| config.scrub_days = 0).await;
    let bytes = put(1, 1, 1, 0, 300_000);
    cluster.write(&[1, 2], bytes.clone()).await.unwrap();
    cluster.flush(&[1, 2], &[1]).await.unwrap();
    cluster.stop_server(1).await;
    let path = cluster.disk(1).join("chunks/01/0000000000000001");
    damage(&path, 5000);
    damage(&path, 250_000);
    cluster.adjust = |config| config.scrub_days = 1;
    cluster.start_server(1).await;
    let wait = async {
        while cluster.servers[&1].counters().repaired_blocks < 2 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(support::WAIT, wait).await.unwrap();
    let (found, reply) = cluster.read(1, 1, 0, 300_000).await.unwrap();
    same(&found, &bytes.bytes);
    assert!(!reply.repaired);
}

/// Flips a bit of a copy's data in its file.
fn damage(path: &std::path::Path, at: u64) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut byte = [0];
    let at = (128 << 10) + at;
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_much_at_once_is_refused() {
    let cluster = Cluster::adjusted(1, |config| config.request_bytes_max = 3 << 20).await;
    let bytes = put(1, 1, 1, 0, 1 << 20);
    cluster.write(&[1], bytes.clone()).await.unwrap();
    let reads = (0..40).map(|_| cluster.read(1, 1, 0, 1 << 20));
    let outcomes = futures::future::join_all(reads).await;
    let (good, bad): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    for (found, _) in good.into_iter().map(Result::unwrap) {
        same(&found, &bytes.bytes);
    }
    assert!(!bad.is_empty());
    let refusals = bad.len() as u64;
    for outcome in bad {
        assert_eq!(refused(outcome).0, Status::BUSY);
    }
    assert_eq!(cluster.servers[&1].counters().busy, refusals);
    // And later it works again.
    cluster.read(1, 1, 0, 1 << 20).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fenced_session_is_refused_and_what_it_left_open_is_sealed_and_settled() {
    let cluster = Cluster::start(2).await;
    let of = |session, lease, version, length| Put {
        session,
        ..put(1, lease, version, 0, length)
    };
    cluster.write(&[1, 2], of(5, 1, 1, 100_000)).await.unwrap();
    // The second member has bytes that the first has not: its head died.
    let ahead: Bytes = pattern(1, 2, 8192, 5000).into();
    let only_tail = Write {
        target: Some(cluster.target(1, 1)),
        offset: 8192,
        checksums: piece_checksums(8192, &ahead),
        chain_number: 2,
        rest: cluster.hops(&[1]),
        session: 5,
        ..Write::default()
    };
    cluster.send(2, &only_tail, ahead.clone()).await.unwrap();
    let disk = cluster.servers[&1]
        .store()
        .disk(hither_proto::ids::DiskIndex(0))
        .unwrap()
        .clone();
    let old: Bytes = pattern(1, 1, 8192, 4096).into();
    let op = hither_chunkstore::WriteOp {
        chunk: hither_proto::ids::ChunkId(1),
        group: hither_proto::ids::GroupId(GROUP),
        inode: hither_proto::ids::InodeId(101),
        lease: hither_proto::ids::LeaseId(1),
        chain: hither_proto::ids::ChainNumber(2),
        offset: 8192,
        checksums: piece_checksums(8192, &old),
        payload: old,
        may_create: false,
        session: hither_proto::ids::SessionId(5),
        epoch: hither_proto::ids::Epoch(cluster.manager.epoch()),
        sync: false,
        filling: false,
    };
    disk.write_wait(op).unwrap();

    for id in [1, 2] {
        let reply = cluster
            .call(id, Kind::FENCE_SESSION, &Fence { session: 5 })
            .await
            .unwrap();
        let open = reply.decode::<FenceReply>().unwrap().open;
        assert_eq!(
            (open.len(), open[0].chunk, open[0].group, open[0].inode),
            (1, 1, GROUP, 101)
        );
    }
    assert_eq!(
        refused(cluster.write(&[1, 2], of(5, 1, 3, 10)).await).0,
        Status::NO_SESSION
    );
    cluster
        .write(
            &[1, 2],
            Put {
                chunk: 2,
                ..of(6, 1, 3, 10)
            },
        )
        .await
        .unwrap();

    let seal = Seal {
        target: Some(cluster.target(1, 9)),
    };
    let mut sealed = Vec::new();
    for id in [1, 2] {
        let reply: SealReply = cluster
            .call(id, Kind::CHUNK_SEAL, &seal)
            .await
            .unwrap()
            .decode()
            .unwrap();
        assert_eq!(
            (reply.exists, reply.copy_length, reply.lease_before),
            (true, 100_000, 1)
        );
        sealed.push(reply.touched);
    }
    let differing: Vec<u32> = sealed[0]
        .iter()
        .zip(&sealed[1])
        .filter(|(a, b)| a != b)
        .map(|(a, _)| a.block)
        .collect();
    assert_eq!(differing, [2]);
    assert_eq!(
        refused(cluster.write(&[1, 2], of(6, 8, 3, 10)).await).0,
        Status::STALE_LEASE
    );
    for id in [1, 2] {
        let settle = Settle {
            target: Some(cluster.target(1, 9)),
            source: cluster.hops(&[2]).pop(),
            blocks: if id == 1 { differing.clone() } else { vec![] },
            length: 90_000,
        };
        cluster.call(id, Kind::CHUNK_SETTLE, &settle).await.unwrap();
    }
    let one = cluster.content(1, 1).await.unwrap();
    assert_eq!(one.len(), 90_000);
    same(&one, &cluster.content(2, 1).await.unwrap());
    same(&one[8192..13_192], &ahead);
    // Nothing is open any more.
    let reply: SealReply = cluster
        .call(
            1,
            Kind::CHUNK_SEAL,
            &Seal {
                target: Some(cluster.target(1, 10)),
            },
        )
        .await
        .unwrap()
        .decode()
        .unwrap();
    assert!(reply.touched.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settling_brings_a_missing_copy() {
    let cluster = Cluster::start(2).await;
    cluster.manager.set_group(&[(1, InSync)], 1);
    let bytes = put(3, 1, 1, 0, 3_000_000);
    cluster.write(&[1], bytes.clone()).await.unwrap();
    cluster.manager.set_group(&[(1, InSync), (2, InSync)], 1);
    let settle = Settle {
        target: Some(cluster.target(3, 5)),
        source: cluster.hops(&[1]).pop(),
        blocks: (0..3_000_000u32.div_ceil(4096)).collect(),
        length: 3_000_000,
    };
    cluster.call(2, Kind::CHUNK_SETTLE, &settle).await.unwrap();
    same(&cluster.content(2, 3).await.unwrap(), &bytes.bytes);
    let list = List {
        group: GROUP,
        epoch: cluster.manager.epoch(),
        from: 0,
        limit: 10,
    };
    let listed: ListReply = cluster
        .call(2, Kind::CHUNK_LIST, &list)
        .await
        .unwrap()
        .decode()
        .unwrap();
    let copy = &listed.copies[0];
    assert_eq!(
        (copy.chunk, copy.lease, copy.inode, copy.open),
        (3, 5, 103, false)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trims_closes_and_deletes() {
    let cluster = Cluster::start(1).await;
    let bytes = put(1, 1, 1, 0, 100_000);
    cluster.write(&[1], bytes.clone()).await.unwrap();
    let trim = |lease, offset, length| Trim {
        target: Some(cluster.target(1, lease)),
        offset,
        length,
    };
    cluster
        .call(1, Kind::CHUNK_TRIM, &trim(2, 50_000, 0))
        .await
        .unwrap();
    cluster
        .call(1, Kind::CHUNK_TRIM, &trim(3, 10, 20))
        .await
        .unwrap();
    let mut expected = bytes.bytes[..50_000].to_vec();
    expected[10..30].fill(0);
    same(&cluster.content(1, 1).await.unwrap(), &expected);
    assert_eq!(
        refused(cluster.call(1, Kind::CHUNK_TRIM, &trim(1, 0, 0)).await).0,
        Status::STALE_LEASE
    );
    let epoch = cluster.manager.epoch();
    let close = Close {
        group: GROUP,
        epoch,
        chunks: vec![1],
        lease: 3,
        ..Close::default()
    };
    cluster.call(1, Kind::CHUNK_CLOSE, &close).await.unwrap();
    let fence: FenceReply = cluster
        .call(1, Kind::FENCE_SESSION, &Fence { session: 5 })
        .await
        .unwrap()
        .decode()
        .unwrap();
    assert!(fence.open.is_empty());
    let delete = Delete {
        group: GROUP,
        epoch,
        chunks: vec![1, 77],
    };
    cluster.call(1, Kind::CHUNK_DELETE, &delete).await.unwrap();
    cluster.call(1, Kind::CHUNK_DELETE, &delete).await.unwrap();
    assert_eq!(
        refused(cluster.read(1, 1, 0, 10).await).0,
        Status::NO_SUCH_CHUNK
    );
    let late = Put {
        session: 9,
        ..put(1, 9, 1, 0, 10)
    };
    assert_eq!(
        refused(cluster.write(&[1], late).await).0,
        Status::NO_SUCH_CHUNK
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_is_there_after_a_clean_restart() {
    let mut cluster = Cluster::start(1).await;
    let bytes = put(1, 1, 1, 0, 1_000_000);
    cluster.write(&[1], bytes.clone()).await.unwrap();
    cluster.write(&[1], put(2, 1, 1, 0, 100)).await.unwrap();
    let boot = cluster.servers[&1].boot_id();
    cluster.stop_server(1).await;
    assert_eq!(cluster.start_server(1).await, 1, "the id is on the disk");
    assert_ne!(cluster.servers[&1].boot_id(), boot);
    same(&cluster.content(1, 1).await.unwrap(), &bytes.bytes);
    same(
        &cluster.content(1, 2).await.unwrap(),
        &pattern(2, 1, 0, 100),
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_process_of_the_same_id_stops() {
    let mut cluster = Cluster::start(1).await;
    cluster.manager.declare_duplicate(1);
    let why = tokio::time::timeout(support::WAIT, cluster.servers[&1].stopped())
        .await
        .unwrap();
    assert!(matches!(why, StartError::Duplicate(id) if id.0 == 1));
    assert_eq!(refused(cluster.read(1, 1, 0, 10).await).0, Status::RETRY);
    cluster
        .servers
        .remove(&1)
        .unwrap()
        .shutdown()
        .await
        .unwrap();
    let again = ChunkServer::start(cluster.config(1)).await;
    assert!(matches!(again, Err(StartError::Duplicate(_))), "{again:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn labels_change_while_it_runs() {
    let cluster = Cluster::adjusted(1, |config| config.labels = vec!["A".into()]).await;
    cluster
        .manager
        .until(|map| map.chunkservers[0].labels == ["A"])
        .await;
    cluster.servers[&1].set_labels(vec!["B".into(), "disk=ssd".into()]);
    cluster
        .manager
        .until(|map| map.chunkservers[0].labels == ["B", "disk=ssd"])
        .await;
    let map = cluster.manager.map();
    assert_eq!(map.chunkservers[0].zone, "zone1");
    assert!(map.chunkservers[0].disks[0].total_bytes > 0);
}
