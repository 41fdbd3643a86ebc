//! Reads from the nearest copy while its server is slow, silent or gone.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::sync::Arc;

use hither_client::{Detour, LocalityReport, OpenFile, Standpoint};
use hither_proto::common::Failure;
use hither_proto::kind::Kind;
use hither_proto::status::Status;

use support::{Cluster, FILE, FRAME, soon};

/// A file that is on so many servers, and a client in the zone of the first.
async fn cluster(servers: usize) -> (Cluster, Arc<OpenFile>) {
    let standpoint = Standpoint {
        zone: "z1".into(),
        ..Standpoint::default()
    };
    let cluster = Cluster::start_at(servers, standpoint).await;
    let open = cluster.open().await;
    cluster.write_applied(&open, 0, 7).await;
    soon("fsync", cluster.client.fsync(&open)).await.unwrap();
    read(&cluster, &open).await;
    let report = cluster.client.locality();
    assert_eq!(reads(&report, 1), 1, "the near one is asked: {report:?}");
    (cluster, open)
}

async fn read(cluster: &Cluster, open: &Arc<OpenFile>) {
    let bytes = soon("a read", cluster.client.read(open, 4096, 100)).await;
    assert_eq!(bytes.unwrap(), vec![7; 100]);
}

fn reads(report: &LocalityReport, server: u64) -> u64 {
    report.by_server.get(&server).map_or(0, |t| t.reads)
}

/// A late answer is an answer: the server has its readers back with it, and was no suspect.
#[tokio::test]
async fn a_server_that_was_slow_for_a_moment_keeps_its_place() {
    let (cluster, open) = cluster(2).await;
    cluster.chunks.hold_at(1, Kind::CHUNK_READ);
    for _ in 0..3 {
        read(&cluster, &open).await;
    }
    let report = cluster.client.locality();
    let detours = |why| report.detours.get(&why).map_or(0, |t| t.reads);
    assert_eq!((detours(Detour::Slow), detours(Detour::Quiet)), (1, 2));
    assert_eq!((report.hedges, report.hedge_wins), (1, 1));
    // Longer than any silence of a server that is well.
    let before = cluster.chunks.count(Kind::PING);
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    cluster.chunks.release();
    soon("the near server is read from again", async {
        while reads(&cluster.client.locality(), 1) == 1 {
            read(&cluster, &open).await;
        }
    })
    .await;
    assert_eq!(cluster.client.locality().suspicions, 0);
    assert_eq!(cluster.chunks.count(Kind::PING), before, "no probe");
}

/// A server that says nothing at all becomes a suspect, and is asked by nobody but probes.
#[tokio::test]
async fn a_server_that_stays_silent_is_a_suspect() {
    let (cluster, open) = cluster(2).await;
    cluster.chunks.hold_at(1, Kind::CHUNK_READ);
    read(&cluster, &open).await;
    soon("the suspicion", async {
        while cluster.client.locality().suspicions == 0 {
            read(&cluster, &open).await;
        }
    })
    .await;
    let report = cluster.client.locality();
    assert_eq!((report.hedges, reads(&report, 1)), (1, 1));
    cluster.chunks.release();
    soon("the probe", async {
        while reads(&cluster.client.locality(), 1) == 1 {
            read(&cluster, &open).await;
        }
    })
    .await;
}

/// Servers in the order in which they are asked, and what is in flight there.
async fn order(cluster: &Cluster) -> Vec<(u64, u32)> {
    let places = cluster.client.places(FILE, 0, 1).await.unwrap();
    let servers = places[0].servers.iter();
    servers.map(|s| (s.server, s.in_flight)).collect()
}

/// The connection stays busy with writes: the server is not silent, one of its disks hangs.
#[tokio::test]
async fn a_disk_that_hangs_is_asked_last_while_its_server_writes() {
    let (cluster, open) = cluster(2).await;
    let busy = |report: &LocalityReport| report.detours.get(&Detour::Busy).map_or(0, |t| t.reads);
    cluster.chunks.hold_at(1, Kind::CHUNK_READ);
    let writes = async {
        loop {
            let bytes = vec![8; 4096].into();
            let client = &cluster.client;
            client.write(&open, FRAME as u64, bytes).await.unwrap();
            client.fsync(&open).await.unwrap();
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    let reads_on = soon("the disk is asked last", async {
        while busy(&cluster.client.locality()) == 0 {
            read(&cluster, &open).await;
        }
    });
    tokio::select! {
        () = writes => {}
        () = reads_on => {}
    }
    let report = cluster.client.locality();
    assert_eq!((report.suspicions, reads(&report, 1)), (0, 1), "{report:?}");
    cluster.chunks.release();
    soon("the disk is read from again", async {
        while reads(&cluster.client.locality(), 1) == 1 {
            read(&cluster, &open).await;
        }
    })
    .await;
}

/// The second is asked since the first is late, and refuses: the third is not kept waiting.
#[tokio::test]
async fn after_a_failure_the_next_is_asked_at_once() {
    let (cluster, open) = cluster(3).await;
    let second = order(&cluster).await[1].0;
    cluster.chunks.hold_at(1, Kind::CHUNK_READ);
    cluster.chunks.refuse(move |kind, server, _| {
        (kind == Kind::CHUNK_READ && server == second).then(|| (Status::BUSY, Failure::default()))
    });
    read(&cluster, &open).await;
    let report = cluster.client.locality();
    assert_eq!((report.spills, report.hedges), (1, 1), "{report:?}");
}

/// Only the first that was late is waited for; others are farther, and nobody wants their answer.
#[tokio::test]
async fn what_nobody_waits_for_is_cancelled() {
    let (cluster, open) = cluster(3).await;
    let second = order(&cluster).await[1].0;
    cluster.chunks.hold_at(1, Kind::CHUNK_READ);
    cluster.chunks.hold_at(second, Kind::CHUNK_READ);
    read(&cluster, &open).await;
    let in_flight = order(&cluster).await;
    let of = |server| in_flight.iter().find(|(id, _)| *id == server).unwrap().1;
    assert_eq!((of(1), of(second)), (1, 0), "{in_flight:?}");
}
