//! Reads from the nearest copy while its server is slow, silent or gone.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::sync::Arc;

use hither_client::{Detour, LocalityReport, OpenFile, Standpoint};
use hither_proto::kind::Kind;

use support::{Cluster, soon};

/// A file that is on two servers, and a client in the zone of the first.
async fn cluster() -> (Cluster, Arc<OpenFile>) {
    let standpoint = Standpoint {
        zone: "z1".into(),
        ..Standpoint::default()
    };
    let cluster = Cluster::start_at(2, standpoint).await;
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
    let (cluster, open) = cluster().await;
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
    let (cluster, open) = cluster().await;
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
