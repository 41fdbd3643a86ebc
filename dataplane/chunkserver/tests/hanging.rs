//! A disk that hangs.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::io;
use std::sync::Arc;

use hither_chunkserver::ChunkServer;
use hither_chunkstore::{Medium, Probe, Space};
use parking_lot::{Condvar, Mutex};

use support::Cluster;

/// Does not answer while it hangs.
#[derive(Debug, Default)]
struct Hanging {
    hangs: Mutex<bool>,
    released: Condvar,
}

impl Probe for Hanging {
    fn space(&self) -> io::Result<Space> {
        let mut hangs = self.hangs.lock();
        while *hangs {
            self.released.wait(&mut hangs);
        }
        Ok(Space {
            total_bytes: 1 << 40,
            free_bytes: 1 << 40,
        })
    }
}

/// The heartbeat asked the disks itself: one that hung silenced the server, with all its disks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_hangs_does_not_stop_the_heartbeat() {
    let cluster = Cluster::start(0).await;
    let config = cluster.config(1);
    let probe = Arc::new(Hanging::default());
    let medium = Medium {
        probe: Arc::clone(&probe) as _,
        ..Medium::real(&config.disks[0]).unwrap()
    };
    let server = ChunkServer::start_on(config, vec![medium]).await.unwrap();
    *probe.hangs.lock() = true;
    for label in ["slow=yes", "slow=still"] {
        server.set_labels(vec![label.to_owned()]);
        cluster
            .manager
            .until(|map| map.chunkservers[0].labels == [label])
            .await;
    }
    *probe.hangs.lock() = false;
    probe.released.notify_all();
    server.shutdown().await.unwrap();
}
