//! File data under faults that take a moment to happen.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use hither_client::SetAttributes;
use hither_proto::common::Failure;
use hither_proto::kind::Kind;
use hither_proto::meta::Caller;
use hither_proto::status::{Errno, Status};

use support::{Cluster, FILE, FRAME, soon};

const LATER: u64 = 8 << 20;

/// Two threads fsync, and the first one's flush takes long: the second has no less to wait for.
#[tokio::test]
async fn fsync_waits_for_a_flush_that_is_under_way() {
    let cluster = Cluster::start(1).await;
    let open = cluster.open().await;
    cluster.write_applied(&open, 0, 1).await;
    cluster.chunks.hold(Kind::CHUNK_FLUSH);
    let sync = || {
        let (client, open) = (cluster.client.clone(), Arc::clone(&open));
        tokio::spawn(async move { client.fsync(&open).await })
    };
    let first = sync();
    cluster.chunks.until_held().await;
    let mut second = sync();
    let early = tokio::time::timeout(Duration::from_millis(300), &mut second).await;
    assert!(early.is_err(), "answered before anything was stable");
    cluster.chunks.release();
    soon("both", first).await.unwrap().unwrap();
    soon("both", second).await.unwrap().unwrap();
    assert_eq!(cluster.chunks.durable(1), vec![1; FRAME]);
}

/// A server loses power between two writes it acknowledged; the second acknowledgement already
/// comes from the new process.
#[tokio::test]
async fn what_a_restarted_server_lost_is_sent_again() {
    let cluster = Cluster::start(1).await;
    let open = cluster.open().await;
    cluster.write_applied(&open, 0, 1).await;
    cluster.chunks.power_loss(1);
    cluster.write_applied(&open, LATER, 2).await;
    soon("fsync", cluster.client.fsync(&open)).await.unwrap();
    let durable = cluster.chunks.durable(1);
    assert!(durable[..FRAME].iter().all(|byte| *byte == 1));
    assert!(
        durable[usize::try_from(LATER).unwrap()..]
            .iter()
            .all(|byte| *byte == 2)
    );
}

/// Nobody may take the error of written data away from the descriptors it belongs to.
#[tokio::test]
async fn an_error_is_told_to_every_descriptor_and_to_nobody_else() {
    let cluster = Cluster::start(1).await;
    let (a, b) = (cluster.open().await, cluster.open().await);
    cluster.chunks.refuse(|kind, _, _| {
        (kind == Kind::CHUNK_WRITE).then(|| (Errno::ENOSPC.into(), Failure::default()))
    });
    let frame = vec![1; FRAME];
    cluster.client.write(&a, 0, frame.into()).await.unwrap();
    cluster
        .chunks
        .until(|state| {
            state
                .seen
                .iter()
                .any(|(kind, _, _)| *kind == Kind::CHUNK_WRITE)
        })
        .await;
    let times = SetAttributes {
        mtime: Some(5),
        ..SetAttributes::default()
    };
    cluster
        .client
        .set_attributes(FILE, times, Caller::default())
        .await
        .unwrap();
    for open in [&a, &b] {
        let error = cluster.client.fsync(open).await.unwrap_err();
        assert_eq!(error.errno, Errno::ENOSPC);
        cluster.client.fsync(open).await.unwrap();
    }
    // Some member may have taken it: all agree again before the next lease.
    soon("the recall", cluster.metadata.recall()).await.unwrap();
    let torn = cluster
        .metadata
        .get(|state| state.reports.last().unwrap().torn.len());
    assert_eq!(torn, 1);
}

/// What was written is reported in a request that is sent again, before the recall is answered.
#[tokio::test]
async fn a_recall_loses_nothing_when_its_connection_breaks() {
    let cluster = Cluster::start(1).await;
    let open = cluster.open().await;
    cluster.write_applied(&open, 0, 1).await;
    cluster.metadata.set(|state| state.break_at_report = true);
    let broken = soon("the recall", cluster.metadata.recall()).await;
    assert!(broken.is_err());
    cluster
        .metadata
        .until(|state| !state.reports.is_empty())
        .await;
    let again = soon("the recall", cluster.metadata.recall()).await.unwrap();
    assert_eq!(again.report, None);
    let (size, written, release) = cluster.metadata.get(|state| {
        let report = state.reports.last().unwrap();
        (state.inode.size, report.written.len(), report.release)
    });
    assert_eq!((size, written, release), (FRAME as u64, 1, true));
    assert_eq!(cluster.chunks.durable(1), vec![1; FRAME]);
}

/// An fsync that comes after the lease was given back waits until the report is in the store.
#[tokio::test]
async fn fsync_after_a_recall_waits_for_its_report() {
    let cluster = Cluster::start(1).await;
    let open = cluster.open().await;
    cluster.metadata.set(|state| state.early = true);
    cluster.write_applied(&open, 0, 1).await;
    soon("the recall", cluster.metadata.recall()).await.unwrap();
    soon("fsync", cluster.client.fsync(&open)).await.unwrap();
    assert_eq!(cluster.metadata.get(|state| state.barriers), 1);
}

/// The lease goes in the middle of a read: no lease is no hole.
#[tokio::test]
async fn a_read_whose_lease_is_lost_is_done_again() {
    let cluster = Cluster::start(1).await;
    let open = cluster.open().await;
    cluster.write_applied(&open, 0, 7).await;
    soon("fsync", cluster.client.fsync(&open)).await.unwrap();
    cluster.chunks.hold(Kind::CHUNK_READ);
    let read = {
        let (client, open) = (cluster.client.clone(), Arc::clone(&open));
        tokio::spawn(async move { client.read(&open, 0, 4096).await })
    };
    cluster.chunks.until_held().await;
    cluster.metadata.forget_session();
    cluster.metadata.until(|state| state.grants >= 1).await;
    cluster.chunks.release();
    let bytes = soon("the read", read).await.unwrap().unwrap();
    assert!(bytes.len() == 4096 && bytes.iter().all(|byte| *byte == 7));
}

/// Another mount wants the file all the time: this one gets its turn all the same.
#[tokio::test]
async fn a_lease_that_is_recalled_at_once_is_used_once() {
    let cluster = Cluster::start(1).await;
    let open = cluster.open().await;
    cluster.metadata.set(|state| state.greedy = true);
    for n in 0..5u8 {
        let data = vec![n + 1; 1000];
        let write = cluster
            .client
            .write(&open, u64::from(n) * 1000, data.into());
        soon("the write", write).await.unwrap();
    }
    cluster
        .metadata
        .until(|state| state.inode.size == 5000)
        .await;
    let grants = cluster.metadata.get(|state| state.grants);
    assert!(grants <= 5, "{grants} grants for five writes");
}

/// A frame that comes late over an old chain is refused because a newer chain of the same lease
/// was there: it is sent again.
#[tokio::test]
async fn a_frame_overtaken_by_its_own_chain_is_sent_again() {
    let cluster = Cluster::start(1).await;
    let open = cluster.open().await;
    let mut first = true;
    cluster.chunks.refuse(move |kind, _, _| {
        let refused = kind == Kind::CHUNK_WRITE && std::mem::take(&mut first);
        let failure = Failure {
            lease: 11,
            ..Failure::default()
        };
        refused.then_some((Status::STALE_LEASE, failure))
    });
    cluster
        .client
        .write(&open, 0, vec![3; 100].into())
        .await
        .unwrap();
    soon("fsync", cluster.client.fsync(&open)).await.unwrap();
    assert_eq!(cluster.chunks.durable(1), vec![3; 100]);
}

/// One server cannot reach another: a flush goes around the link as a write does.
#[tokio::test]
async fn a_flush_avoids_a_broken_link() {
    let cluster = Cluster::start(3).await;
    let open = cluster.open().await;
    cluster.chunks.refuse(|_, server, rest| {
        let mut chain: Vec<u64> = vec![server];
        chain.extend(rest.iter().map(|hop| hop.server));
        chain.windows(2).any(|link| link == [1, 2]).then(|| {
            let failure = Failure {
                link_from: 1,
                link_to: 2,
                ..Failure::default()
            };
            (Status::BROKEN_LINK, failure)
        })
    });
    cluster.write_applied(&open, 0, 1).await;
    soon("fsync", cluster.client.fsync(&open)).await.unwrap();
    for server in 1..=3 {
        assert_eq!(cluster.chunks.durable(server), vec![1; FRAME]);
    }
}

/// A server that starts or stops says "later": another copy answers in the same attempt.
#[tokio::test]
async fn a_read_goes_on_when_the_first_server_says_later() {
    let cluster = Cluster::start(2).await;
    let open = cluster.open().await;
    cluster.write_applied(&open, 0, 1).await;
    soon("fsync", cluster.client.fsync(&open)).await.unwrap();
    let mut silent = None;
    cluster.chunks.refuse(move |kind, server, _| {
        if kind != Kind::CHUNK_READ {
            return None;
        }
        // Whichever is asked first.
        (*silent.get_or_insert(server) == server).then(|| (Status::RETRY, Failure::default()))
    });
    for at in 0..10u64 {
        let read = cluster.client.read(&open, at * 4096, 4096);
        assert_eq!(soon("a read", read).await.unwrap().len(), 4096);
    }
    let asked = cluster.chunks.count(Kind::CHUNK_READ);
    assert!(asked <= 14, "{asked} requests for ten reads");
}

/// The session ends before a change that was answered is safe: the next fsync says so.
#[tokio::test]
async fn changes_lost_with_a_session_are_told() {
    let cluster = Cluster::start(1).await;
    let open = cluster.open().await;
    cluster.metadata.set(|state| state.early = true);
    cluster.write_applied(&open, 0, 1).await;
    soon("the recall", cluster.metadata.recall()).await.unwrap();
    // Reported and answered early, nothing is pending here.
    cluster.metadata.forget_session();
    let told = async {
        loop {
            if let Err(error) = cluster.client.fsync(&open).await {
                return error;
            }
            tokio::task::yield_now().await;
        }
    };
    assert_eq!(soon("an error", told).await.errno, Errno::EIO);
}

/// The session ends while changes wait for the connection: they are made in the next one, or told
/// that theirs has ended, and are never taken for requests nobody waits for any more.
#[tokio::test]
async fn changes_that_waited_for_a_new_session_are_its_own() {
    let cluster = Cluster::start(1).await;
    cluster.metadata.forget_session();
    let changes = (0..64).map(|turns| {
        let client = cluster.client.clone();
        tokio::spawn(async move {
            for _ in 0..turns {
                tokio::task::yield_now().await;
            }
            client.remove_xattr(FILE, &"user.a".into()).await
        })
    });
    let mut made = 0;
    for change in changes.collect::<Vec<_>>() {
        match soon("a change", change).await.unwrap() {
            Ok(()) => made += 1,
            Err(error) => assert_eq!(error.errno, Errno::EIO, "{error}"),
        }
    }
    assert!(made > 0);
}

/// A successor says that its batches up to a high number are in the store: what its predecessor had
/// answered and lost is sent again all the same.
#[tokio::test]
async fn what_a_successor_calls_safe_is_its_own() {
    let cluster = Cluster::start(1).await;
    let open = cluster.open().await;
    cluster.metadata.set(|state| state.early = true);
    cluster.write_applied(&open, 0, 1).await;
    soon("the recall", cluster.metadata.recall()).await.unwrap();
    cluster.metadata.take_over();
    cluster.metadata.until(|state| state.replays > 0).await;
    soon("fsync", cluster.client.fsync(&open)).await.unwrap();
}

/// Another mount takes the file between two fsyncs that go on at the same time: no report comes
/// after the one that gave the lease back.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_recall_during_fsync_is_no_error() {
    let cluster = Cluster::start(1).await;
    let open = cluster.open().await;
    for round in 0..300u64 {
        let frame = vec![1; 2000];
        let write = cluster.client.write(&open, round * 2000, frame.into());
        soon("the write", write).await.unwrap();
        let sync = || {
            let (client, open) = (cluster.client.clone(), Arc::clone(&open));
            tokio::spawn(async move { client.fsync(&open).await })
        };
        let (first, second) = (sync(), sync());
        let recall = cluster.metadata.recall();
        soon("the recall", recall).await.unwrap();
        soon("fsync", first).await.unwrap().unwrap();
        soon("fsync", second).await.unwrap().unwrap();
    }
    assert_eq!(cluster.metadata.get(|state| state.late_reports), 0);
}

/// The answer to an fsync waits for the store; a recall comes meanwhile, and is answered after it.
#[tokio::test]
async fn a_lease_is_given_back_after_the_reports_made_under_it() {
    let cluster = Cluster::start(1).await;
    let open = cluster.open().await;
    cluster.write_applied(&open, 0, 1).await;
    cluster.metadata.set(|state| state.hold_safe = true);
    let sync = {
        let (client, open) = (cluster.client.clone(), Arc::clone(&open));
        tokio::spawn(async move { client.fsync(&open).await })
    };
    cluster
        .metadata
        .until(|state| state.reports.len() == 1)
        .await;
    let metadata = Arc::clone(&cluster.metadata);
    let recall = tokio::spawn(async move { metadata.recall().await });
    cluster.metadata.release();
    soon("fsync", sync).await.unwrap().unwrap();
    soon("the recall", recall).await.unwrap().unwrap();
    let released = cluster
        .metadata
        .get(|state| state.reports.last().unwrap().release);
    assert!(released);
}

/// A flush that takes long says nothing until it is done: the server took the mount for stuck.
#[tokio::test]
async fn progress_is_reported_while_a_lease_is_being_given_back() {
    let cluster = Cluster::start(1).await;
    let open = cluster.open().await;
    cluster.write_applied(&open, 0, 1).await;
    cluster.chunks.hold(Kind::CHUNK_FLUSH);
    let metadata = Arc::clone(&cluster.metadata);
    let recall = tokio::spawn(async move { metadata.recall().await });
    cluster.chunks.until_held().await;
    let begun = tokio::time::Instant::now();
    cluster
        .metadata
        .until(|state| !state.reports.is_empty())
        .await;
    // The client's tidying looks at it too, but not as soon, and not while it waits for the flush.
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "within a third of the timeout"
    );
    let released = |cluster: &Cluster| -> Vec<bool> {
        cluster.metadata.get(|state| {
            let releases = state.reports.iter().map(|report| report.release);
            releases.collect()
        })
    };
    assert_eq!(released(&cluster), [false]);
    cluster.chunks.release();
    soon("the recall", recall).await.unwrap().unwrap();
    assert_eq!(released(&cluster).last(), Some(&true));
    assert_eq!(cluster.chunks.durable(1), vec![1; FRAME]);
}

/// A member says only when the lease is over that its copy may differ: nobody heard it.
#[tokio::test]
async fn copies_in_doubt_after_a_lease_are_sealed() {
    let cluster = Cluster::start(1).await;
    let open = cluster.open().await;
    cluster.write_applied(&open, 0, 1).await;
    let mut first = true;
    cluster.chunks.refuse(move |kind, _, _| {
        let refused = kind == Kind::CHUNK_CLOSE && std::mem::take(&mut first);
        let failure = Failure {
            chunks: vec![101],
            ..Failure::default()
        };
        refused.then_some((Status::NEEDS_SEAL, failure))
    });
    soon("the recall", cluster.metadata.recall()).await.unwrap();
    cluster
        .metadata
        .until(|state| state.reports.iter().any(|report| !report.torn.is_empty()))
        .await;
    let (torn, release) = cluster.metadata.get(|state| {
        let report = state.reports.last().unwrap();
        (report.torn[0].chunk, report.release)
    });
    assert_eq!((torn, release), (101, true));
}

#[tokio::test]
async fn reads_that_waited_for_another_mounts_write_back_are_counted() {
    let cluster = Cluster::start(1).await;
    let open = cluster.open().await;
    cluster.write_applied(&open, 0, 1).await;
    soon("the recall", cluster.metadata.recall()).await.unwrap();
    cluster.metadata.set(|state| state.behind_writer = true);
    let read = cluster.client.read(&open, 0, 100);
    assert_eq!(soon("the read", read).await.unwrap().len(), 100);
    let report = cluster.client.locality();
    assert_eq!(report.write_back_waits, 1);
    assert!(report.write_back_wait_us > 0);
}
