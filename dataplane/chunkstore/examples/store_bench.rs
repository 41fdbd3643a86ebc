//! Measures one disk: small synced writes with 1, 8 and 32 threads, large writes in place, cached
//! reads.
//!
//! `cargo run --release -p hither-chunkstore --example store_bench [DIR]`

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hither_chunkstore::{ClusterId, Disk, Medium, Store, StoreOptions, WriteOp};
use hither_proto::checksum::piece_checksums;
use hither_proto::ids::{
    ChainNumber, ChunkId, DiskIndex, Epoch, GroupId, InodeId, LeaseId, SessionId,
};

fn main() {
    let path = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "store-bench.tmp".to_owned());
    let medium = Medium::real(&path).expect("the directory can be made");
    let store = Store::open(
        vec![medium],
        ClusterId::new(b"bench"),
        &StoreOptions::default(),
    )
    .expect("the disk opens");
    let disk = store.disk(DiskIndex(0)).expect("there is one disk");
    for threads in [1, 8, 32] {
        small_synced(disk, threads);
    }
    new_chunks(disk, 8);
    large_in_place(disk, 1);
    large_in_place(disk, 4);
    reads(disk, 4096, 1);
    reads(disk, 4096, 2);
    reads(disk, 1 << 20, 1);
    reads(disk, 1 << 20, 2);
    println!("{:?}", disk.counters());
    store.close().expect("the disk closes");
    drop(store);
    std::fs::remove_dir_all(path).expect("the directory can be removed");
}

fn op(chunk: u64, offset: u32, payload: &Bytes, sync: bool) -> WriteOp {
    WriteOp {
        chunk: ChunkId(chunk),
        group: GroupId(1),
        inode: InodeId(chunk),
        lease: LeaseId(1),
        chain: ChainNumber(1),
        offset,
        payload: payload.clone(),
        checksums: piece_checksums(offset, payload),
        may_create: true,
        session: SessionId(1),
        epoch: Epoch(1),
        sync,
        filling: false,
    }
}

/// Each thread writes 4 KiB pieces into a chunk of its own, at random places.
fn small_synced(disk: &Disk, threads: u64) {
    let payload = Bytes::from(vec![0xa5; 4096]);
    let done = run(threads, |thread, count| {
        let offset = u32::try_from(count.wrapping_mul(2_654_435_761) % 16_384).unwrap_or(0) * 4096;
        disk.write_wait(op(thread + 1, offset, &payload, true))
            .expect("the write works");
    });
    done.print(&format!("{threads:2} threads, 4 KiB write + sync"), 4096);
}

/// Each thread makes chunk after chunk of one synced write, as small files do; long enough for the
/// background work to be the limit.
fn new_chunks(disk: &Disk, threads: u64) {
    let payload = Bytes::from(vec![0xa5; 4096]);
    let done = run_for(Duration::from_secs(15), threads, |thread, count| {
        let chunk = 1_000_000 * (thread + 1) + count;
        disk.write_wait(op(chunk, 0, &payload, true))
            .expect("the write works");
    });
    done.print(
        &format!("{threads:2} threads, new chunk of 4 KiB + sync"),
        4096,
    );
}

/// Each thread writes chunk after chunk, 1 MiB at a time, and flushes each.
fn large_in_place(disk: &Disk, threads: u64) {
    let payload = Bytes::from(vec![0x5a; 1 << 20]);
    let done = run(threads, |thread, count| {
        let chunk = 100 + thread * 8 + count / 64 % 8;
        let offset = u32::try_from(count % 64).unwrap_or(0) << 20;
        disk.write_wait(op(chunk, offset, &payload, false))
            .expect("the write works");
        if count % 64 == 63 {
            disk.flush_wait(&[ChunkId(chunk)]).expect("the flush works");
        }
    });
    done.print(
        &format!("{threads:2} threads, 1 MiB write in place"),
        1 << 20,
    );
}

fn reads(disk: &Disk, length: u32, threads: u64) {
    let per_chunk = (64 << 20) / length;
    let done = run(threads, |thread, count| {
        let at = u32::try_from((count * 7919 + thread * 31) % u64::from(per_chunk)).unwrap_or(0);
        let read = disk.try_read_cached(ChunkId(100), at * length, length);
        let data = read.unwrap_or_else(|| disk.read(ChunkId(100), at * length, length));
        assert_eq!(data.expect("the read works").bytes.len(), length as usize);
    });
    done.print(
        &format!("{threads:2} threads, {:4} KiB cached read", length >> 10),
        u64::from(length),
    );
}

struct Done {
    count: u64,
    time: Duration,
    threads: u64,
}

impl Done {
    #[allow(
        clippy::cast_precision_loss,
        reason = "a benchmark prints rounded numbers"
    )]
    fn print(&self, what: &str, bytes: u64) {
        let rate = self.count as f64 / self.time.as_secs_f64();
        let micros = 1e6 * self.threads as f64 / rate;
        let megabytes = rate * bytes as f64 / 1e6;
        println!("{what:36} {rate:10.0}/s {micros:8.1} us {megabytes:8.0} MB/s");
    }
}

fn run(threads: u64, work: impl Fn(u64, u64) + Sync) -> Done {
    run_for(RUN_TIME, threads, work)
}

#[allow(clippy::disallowed_methods, reason = "a benchmark measures real time")]
fn run_for(time: Duration, threads: u64, work: impl Fn(u64, u64) + Sync) -> Done {
    let start = Instant::now();
    let total = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (work, total) = (&work, &total);
            scope.spawn(move || {
                let mut count = 0;
                while start.elapsed() < time {
                    work(thread, count);
                    count += 1;
                }
                total.fetch_add(count, Ordering::Relaxed);
            });
        }
    });
    Done {
        count: total.into_inner(),
        time: start.elapsed(),
        threads,
    }
}

const RUN_TIME: Duration = Duration::from_secs(3);
