//! Measures commits of the embedded store: random keys of 40 bytes, values of 150 bytes.
//!
//! `cargo run --release -p hither-metastore --example embedded_bench [DIR]`

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hither_log::{LogDir, RealDir};
use hither_metastore::{Batch, EmbeddedOptions, EmbeddedStore, MetaStore};

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let path = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "embedded-bench.tmp".to_owned());
    println!("in flight  batch   commits/s      puts/s   p50 ms   p99 ms   max ms");
    for (in_flight, batch) in [(1, 1), (1, 64), (64, 1), (64, 64)] {
        run(&path, in_flight, batch).await;
    }
}

#[allow(clippy::disallowed_methods, reason = "a benchmark measures real time")]
async fn run(path: &str, in_flight: u64, batch: u64) {
    let dir: Arc<dyn LogDir> = Arc::new(RealDir::open(path).expect("the directory can be made"));
    let store = EmbeddedStore::open(&dir, EmbeddedOptions::default()).expect("the store opens");
    let store = Arc::new(store);
    let next = Arc::new(AtomicU64::new(1));
    let start = Instant::now();
    let tasks: Vec<_> = (0..in_flight)
        .map(|_| {
            let (store, next) = (Arc::clone(&store), Arc::clone(&next));
            tokio::spawn(async move {
                let mut times = Vec::new();
                while start.elapsed() < RUN_TIME {
                    let first = next.fetch_add(batch, Ordering::Relaxed);
                    let changes = random_batch(first, batch);
                    let sent = Instant::now();
                    store.commit(changes).await.expect("the commit works");
                    times.push(sent.elapsed());
                }
                times
            })
        })
        .collect();
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await.expect("no task panics"));
    }
    let seconds = start.elapsed().as_secs_f64();
    times.sort_unstable();
    let count = u32::try_from(times.len()).map_or(f64::NAN, f64::from);
    let rank = |part: usize| times[(times.len() - 1) * part / 100].as_secs_f64() * 1000.0;
    println!(
        "{in_flight:9} {batch:6} {:11.0} {:11.0} {:8.2} {:8.2} {:8.2}",
        count / seconds,
        count / seconds * f64::from(u32::try_from(batch).unwrap_or(0)),
        rank(50),
        rank(99),
        rank(100),
    );
    drop(store);
    std::fs::remove_dir_all(path).expect("the directory can be removed");
}

fn random_batch(first: u64, count: u64) -> Batch {
    let mut batch = Batch::new();
    for number in first..first + count {
        let mut key = Vec::with_capacity(40);
        for part in 0..5u64 {
            // The numbers of a Weyl sequence, mixed: spread evenly, never the same.
            let mut mixed = (number + part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            key.extend_from_slice(&(mixed ^ (mixed >> 27)).to_be_bytes());
        }
        batch.put(key, vec![number.to_le_bytes()[0]; 150]);
    }
    batch
}

const RUN_TIME: Duration = Duration::from_secs(10);
