//! Measures two chunkservers in this process over loopback: writes along the chain and reads, with
//! one and with many requests under way.
//!
//! `cargo run --release -p hither-chunkserver --example chain_bench`

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[path = "../tests/support/mod.rs"]
mod support;

use support::{Cluster, Put, put};

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let cluster = Cluster::adjusted(2, |config| {
        config.log_segment_bytes = 32 << 20;
        config.log_segments_max = 8;
    })
    .await;
    let cluster = Arc::new(cluster);
    for (in_flight, length, sync) in [
        (1, 4096, true),
        (8, 4096, true),
        (32, 4096, true),
        (8, 4096, false),
        (1, 1 << 20, false),
        (8, 1 << 20, false),
    ] {
        let cluster = Arc::clone(&cluster);
        let done = run(in_flight, move |worker, count| {
            let cluster = Arc::clone(&cluster);
            async move {
                let pieces = (64 << 20) / length;
                let at = u32::try_from(count.wrapping_mul(7919) % pieces).unwrap_or(0);
                let length = usize::try_from(length).unwrap_or(0);
                let offset = at * u32::try_from(length).unwrap_or(0);
                let write = Put {
                    sync,
                    bytes: PAYLOAD
                        .get_or_init(|| vec![0xa5; 1 << 20].into())
                        .slice(..length),
                    ..put(worker + 1, 1, 1, offset, 0)
                };
                cluster
                    .write(&[1, 2], write)
                    .await
                    .expect("the write works");
            }
        })
        .await;
        let how = if sync { "synced write" } else { "write" };
        done.print(
            &format!(
                "{in_flight:2} in flight, {:4} KiB {how}, 2 copies",
                length >> 10
            ),
            length,
        );
    }
    for (in_flight, length) in [(1, 4096), (32, 4096), (1, 1 << 20), (8, 1 << 20)] {
        let cluster = Arc::clone(&cluster);
        let done = run(in_flight, move |worker, count| {
            let cluster = Arc::clone(&cluster);
            async move {
                let pieces = (64 << 20) / length;
                let at = u32::try_from(count.wrapping_mul(7919) % pieces).unwrap_or(0);
                let offset = at * u32::try_from(length).unwrap_or(0);
                let chunk = worker % 8 + 1;
                let read = cluster.read(1, chunk, offset, u32::try_from(length).unwrap_or(0));
                read.await.expect("the read works");
            }
        })
        .await;
        done.print(
            &format!("{in_flight:2} in flight, {:4} KiB read", length >> 10),
            length,
        );
    }
    println!("{:?}", cluster.servers[&1].counters());
}

static PAYLOAD: std::sync::OnceLock<bytes::Bytes> = std::sync::OnceLock::new();

struct Done {
    count: u64,
    time: Duration,
    in_flight: u64,
}

impl Done {
    #[allow(
        clippy::cast_precision_loss,
        reason = "a benchmark prints rounded numbers"
    )]
    fn print(&self, what: &str, bytes: u64) {
        let rate = self.count as f64 / self.time.as_secs_f64();
        let micros = 1e6 * self.in_flight as f64 / rate;
        let megabytes = rate * bytes as f64 / 1e6;
        println!("{what:44} {rate:9.0}/s {micros:8.1} us {megabytes:7.0} MB/s");
    }
}

#[allow(clippy::disallowed_methods, reason = "a benchmark measures real time")]
async fn run<F: Future<Output = ()> + Send + 'static>(
    in_flight: u64,
    work: impl Fn(u64, u64) -> F + Clone + Send + 'static,
) -> Done {
    let start = Instant::now();
    let total = Arc::new(AtomicU64::new(0));
    let workers: Vec<_> = (0..in_flight)
        .map(|worker| {
            let (work, total) = (work.clone(), Arc::clone(&total));
            tokio::spawn(async move {
                let mut count = 0;
                while start.elapsed() < RUN_TIME {
                    work(worker, count).await;
                    count += 1;
                }
                total.fetch_add(count, Ordering::Relaxed);
            })
        })
        .collect();
    for worker in workers {
        worker.await.expect("no worker panics");
    }
    Done {
        count: total.load(Ordering::Relaxed),
        time: start.elapsed(),
        in_flight,
    }
}

const RUN_TIME: Duration = Duration::from_secs(3);
