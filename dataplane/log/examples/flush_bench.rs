//! Measures how many records a second become durable, with one and with many waiting threads.
//!
//! `cargo run --release -p hither-log --example flush_bench [DIR]`

use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hither_log::{Log, LogId, LogOptions, RealDir, RecordKind};

fn main() {
    let path = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "flush-bench.tmp".to_owned());
    for (threads, bytes) in [
        (1, 200),
        (8, 200),
        (64, 200),
        (1, 4096),
        (8, 4096),
        (8, 65_536),
    ] {
        let rate = run(&path, threads, bytes);
        println!("{threads:3} threads, {bytes:6} bytes: {rate:8.0} flushed records/s");
    }
}

#[allow(clippy::disallowed_methods, reason = "a benchmark measures real time")]
fn run(path: &str, threads: usize, bytes: usize) -> f64 {
    let dir = Arc::new(RealDir::open(path).expect("the directory can be made"));
    let options = LogOptions {
        segments_max: 4,
        ..LogOptions::new(LogId(1))
    };
    let (log, _) = Log::open(dir, &options).expect("the log opens");
    let payload = vec![0xa5; bytes];
    let start = Instant::now();
    let counts: u32 = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let mut count = 0;
                    while start.elapsed() < RUN_TIME {
                        let lsn = log.append(RecordKind(0), &[IoSlice::new(&payload)]);
                        let durable = log.flush_blocking(lsn.expect("there is room"));
                        log.release(durable.expect("the flush works"));
                        count += 1;
                    }
                    count
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().expect("no worker panics"))
            .sum()
    });
    let rate = f64::from(counts) / start.elapsed().as_secs_f64();
    drop(log);
    std::fs::remove_dir_all(path).expect("the directory can be removed");
    rate
}

const RUN_TIME: Duration = Duration::from_secs(3);
