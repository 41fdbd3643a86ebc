//! Writes that some members of a chain apply and others do not.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use hither_proto::chunk::{Close, Seal, SealReply, Settle, Write};
use hither_proto::kind::Kind;
use hither_proto::status::{Errno, Status};

use support::{Cluster, GROUP, Put, pattern, put, refused, same};

/// Server 2 takes no new copies.
async fn with_a_full_member() -> Cluster {
    Cluster::adjusted(3, |config| {
        if config.zone == "zone2" {
            config.floor_bytes = u64::MAX;
        }
    })
    .await
}

fn close(cluster: &Cluster, chunk: u64, lease: u64) -> Close {
    Close {
        group: GROUP,
        epoch: cluster.manager.epoch(),
        chunks: vec![chunk, 77],
        lease,
        ..Close::default()
    }
}

/// The writer gives up and closes its lease as if nothing had happened: the members that know of
/// the failure keep their marks until the copies are equal. They were closed before, and differed
/// for good, each with right checksums.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_with_a_failed_write_is_sealed_and_not_closed() {
    let cluster = with_a_full_member().await;
    let (status, _) = refused(cluster.write(&[1, 2, 3], put(1, 5, 1, 0, 9000)).await);
    assert_eq!(status, Errno::ENOSPC.into());
    same(
        &cluster.content(1, 1).await.unwrap(),
        &pattern(1, 1, 0, 9000),
    );
    assert!(cluster.content(2, 1).await.is_err());
    for id in [1, 2] {
        let (status, failure) = refused(
            cluster
                .call(id, Kind::CHUNK_CLOSE, &close(&cluster, 1, 5))
                .await,
        );
        assert_eq!((status, failure.chunks), (Status::NEEDS_SEAL, vec![1]));
    }
    // The tail cannot know.
    let closed = cluster
        .call(3, Kind::CHUNK_CLOSE, &close(&cluster, 1, 5))
        .await;
    closed.unwrap();

    let seal = Seal {
        target: Some(cluster.target(1, 9)),
    };
    let mut touched = Vec::new();
    for id in 1..=3 {
        let sealed = cluster.call(id, Kind::CHUNK_SEAL, &seal).await.unwrap();
        let sealed: SealReply = sealed.decode().unwrap();
        touched.push((sealed.exists, sealed.touched.len() >= 3));
    }
    assert_eq!(touched, [(true, true), (false, true), (true, false)]);
    for id in [1, 2, 3] {
        let settle = Settle {
            target: Some(cluster.target(1, 9)),
            source: cluster.hops(&[1]).pop(),
            blocks: vec![0, 1, 2],
            length: 9000,
        };
        cluster.call(id, Kind::CHUNK_SETTLE, &settle).await.unwrap();
        cluster
            .call(id, Kind::CHUNK_CLOSE, &close(&cluster, 1, 9))
            .await
            .unwrap();
        same(
            &cluster.content(id, 1).await.unwrap(),
            &pattern(1, 1, 0, 9000),
        );
        let disk = cluster.servers[&id].store().disks().next().unwrap();
        assert!(disk.open_chunks(None).is_empty(), "server {id}");
    }
}

/// A write that fails and passes when it is sent again leaves nothing to seal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_passes_later_leaves_no_doubt() {
    let cluster = Cluster::start(2).await;
    let write = |chain: u32, bytes: &Put| Write {
        target: Some(cluster.target(1, 5)),
        offset: bytes.offset,
        checksums: hither_proto::checksum::piece_checksums(bytes.offset, &bytes.bytes),
        chain_number: chain,
        rest: cluster.hops(&[2]),
        inode: 101,
        may_create: true,
        sync: false,
        session: 5,
    };
    let bytes = put(1, 5, 1, 0, 5000);
    // Server 2 has seen a newer chain, of which server 1 does not know yet.
    let other_way = Write {
        rest: cluster.hops(&[1]),
        ..write(7, &put(1, 5, 1, 6000, 100))
    };
    let of_other_way = pattern(1, 1, 6000, 100);
    cluster
        .send(2, &other_way, of_other_way.into())
        .await
        .unwrap();
    let (status, failure) = refused(
        cluster
            .send(1, &write(3, &bytes), bytes.bytes.clone())
            .await,
    );
    assert_eq!(status, Status::STALE_LEASE);
    assert_eq!(
        (failure.lease, failure.chain),
        (5, 7),
        "what the members have seen"
    );
    let refused_close = cluster
        .call(1, Kind::CHUNK_CLOSE, &close(&cluster, 1, 4))
        .await;
    refused_close.unwrap();
    cluster
        .send(1, &write(8, &bytes), bytes.bytes.clone())
        .await
        .unwrap();
    for id in [1, 2] {
        cluster
            .call(id, Kind::CHUNK_CLOSE, &close(&cluster, 1, 5))
            .await
            .unwrap();
        let disk = cluster.servers[&id].store().disks().next().unwrap();
        assert!(disk.open_chunks(None).is_empty(), "server {id}");
    }
}
