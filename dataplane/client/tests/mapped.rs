//! Mapped pages that the kernel writes back.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use bytes::Bytes;
use futures::FutureExt as _;
use hither_proto::status::Errno;

use support::{Cluster, soon};

const PAGE: usize = 4096;

/// The file as another mount left it.
async fn stored(cluster: &Cluster, length: usize) {
    let open = cluster.open().await;
    let client = &cluster.client;
    client
        .write(&open, 0, vec![1; length].into())
        .await
        .unwrap();
    soon("fsync", client.fsync(&open)).await.unwrap();
    soon("the recall", cluster.metadata.recall()).await.unwrap();
    cluster.metadata.set(|state| state.exclusive = false);
}

/// Were it to wait, the kernel could not forget the page, and another mount not have the lease.
#[tokio::test]
async fn a_page_is_taken_without_a_lease_and_read_from_then_on() {
    let cluster = Cluster::start(1).await;
    stored(&cluster, 3 * PAGE).await;
    let (client, open) = (&cluster.client, cluster.open().await);
    let page = Bytes::from(vec![2; PAGE]);
    let taken = client.write_back(&open, PAGE as u64, page).now_or_never();
    taken.expect("it waits for something").unwrap();
    let read = soon("the read", client.read(&open, 0, 3 * 4096)).await;
    let read = read.unwrap();
    assert_eq!(read[PAGE - 1..PAGE + 1], [1, 2]);
    assert_eq!(read[2 * PAGE - 1..2 * PAGE + 1], [2, 1]);
    soon("fsync", client.fsync(&open)).await.unwrap();
    let durable = cluster.chunks.durable(1);
    assert_eq!(durable[PAGE..2 * PAGE], vec![2; PAGE]);
    assert_eq!(durable[..PAGE], vec![1; PAGE]);
}

/// A page is whole, the file may end inside of it, or have been cut before it.
#[tokio::test]
async fn a_page_makes_no_file_longer() {
    let cluster = Cluster::start(1).await;
    stored(&cluster, PAGE + 10).await;
    let (client, open) = (&cluster.client, cluster.open().await);
    for at in [1, 5] {
        let page = Bytes::from(vec![3; PAGE]);
        client
            .write_back(&open, at * PAGE as u64, page)
            .await
            .unwrap();
    }
    soon("fsync", client.fsync(&open)).await.unwrap();
    let report = cluster.metadata.get(|state| state.reports.last().cloned());
    assert_eq!(report.unwrap().size, PAGE as u64 + 10);
    assert_eq!(cluster.chunks.durable(1).len(), PAGE + 10);
}

/// What a close has returned after, others see.
#[tokio::test]
async fn a_close_waits_until_pages_are_under_the_lease() {
    let cluster = Cluster::start(1).await;
    stored(&cluster, PAGE).await;
    let (client, open) = (&cluster.client, cluster.open().await);
    let page = Bytes::from(vec![4; PAGE]);
    client.write_back(&open, 0, page).await.unwrap();
    soon("flush", client.flush(&open)).await.unwrap();
    assert!(cluster.metadata.get(|state| state.exclusive));
    soon("the recall", cluster.metadata.recall()).await.unwrap();
    assert_eq!(cluster.chunks.durable(1), vec![4; PAGE]);
}

/// A session that ended takes pages along, and that is told.
#[tokio::test]
async fn pages_that_are_lost_with_the_session_are_told() {
    let cluster = Cluster::start(1).await;
    stored(&cluster, PAGE).await;
    let (client, open) = (&cluster.client, cluster.open().await);
    cluster.metadata.forget_session();
    let page = Bytes::from(vec![5; PAGE]);
    client.write_back(&open, 0, page).await.unwrap();
    let told = soon("fsync", client.fsync(&open)).await;
    assert_eq!(told.unwrap_err().errno, Errno::EIO);
    soon("fsync", client.fsync(&open)).await.unwrap();
}

/// A mount whose server is away keeps no more pages than there is room for.
#[tokio::test]
async fn pages_that_wait_have_a_bound() {
    let cluster = Cluster::start(1).await;
    stored(&cluster, PAGE).await;
    let (client, open) = (&cluster.client, cluster.open().await);
    cluster.metadata.forget_session();
    // All of the default bound of 64 MiB.
    for at in 0..64 {
        let page = Bytes::from(vec![6; 1 << 20]);
        let taken = client.write_back(&open, at << 20, page).now_or_never();
        taken.expect("there is room").unwrap();
    }
    let page = Bytes::from(vec![6; PAGE]);
    let more = client.write_back(&open, 64 << 20, page);
    assert!(more.now_or_never().is_none(), "no more room");
}
