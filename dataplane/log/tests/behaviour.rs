//! The log on a real directory and under many threads.

#![allow(clippy::unwrap_used, reason = "a failed helper fails its test")]

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::mpsc;

use hither_log::{Error, Log, LogDir, LogId, LogOptions, Lsn, RealDir, RecordKind};

fn options() -> LogOptions {
    LogOptions {
        segment_bytes: 64 << 10,
        segments_max: 8,
        ..LogOptions::new(LogId(42))
    }
}

fn real() -> (tempfile::TempDir, Arc<dyn LogDir>) {
    let temp = tempfile::tempdir().unwrap();
    let dir = Arc::new(RealDir::open(temp.path().join("a/log")).unwrap());
    (temp, dir)
}

#[test]
fn records_of_many_threads_are_all_found_in_order() {
    let (_temp, dir) = real();
    let (log, found) = Log::open(Arc::clone(&dir), &options()).unwrap();
    assert_eq!(found.count(), 0);
    std::thread::scope(|scope| {
        for thread in 0..8u16 {
            let log = &log;
            scope.spawn(move || {
                for count in 0..100u32 {
                    let bytes = count.to_le_bytes();
                    let parts = [IoSlice::new(&bytes), IoSlice::new(&[7; 300])];
                    let lsn = log.append(RecordKind(thread), &parts).unwrap();
                    assert!(log.flush_blocking(lsn).unwrap() >= lsn);
                }
            });
        }
    });
    drop(log);
    let (_log, found) = Log::open(dir, &options()).unwrap();
    let mut next = [0u32; 8];
    for (index, record) in found.enumerate() {
        let record = record.unwrap();
        assert_eq!(record.lsn.0, index as u64 + 1);
        let next = &mut next[usize::from(record.kind.0)];
        assert_eq!(record.payload[..4], next.to_le_bytes());
        *next += 1;
    }
    assert_eq!(next, [100; 8]);
}

#[test]
fn a_full_log_takes_records_again_after_a_release() {
    let (_temp, dir) = real();
    let (log, _) = Log::open(Arc::clone(&dir), &options()).unwrap();
    let mut released = 0;
    for _ in 0..3000u32 {
        match log.append(RecordKind(0), &[IoSlice::new(&[1; 1000])]) {
            Ok(_) => {}
            Err(Error::Full { bytes_bound }) => {
                assert_eq!(bytes_bound, 8 * (64 << 10));
                let last = log.next_lsn().previous();
                log.flush_blocking(last).unwrap();
                log.release(last);
                released += 1;
            }
            Err(error) => panic!("{error}"),
        }
        assert!(log.bytes_in_use() <= log.bytes_bound());
    }
    assert!(released >= 4, "{released}");
    let last = log.next_lsn().previous();
    drop(log);
    let (_log, found) = Log::open(dir, &options()).unwrap();
    assert_eq!(found.last_lsn(), last);
    assert!(found.map(Result::unwrap).count() <= 8 * 64);
}

#[test]
fn a_released_record_is_not_found_after_a_clean_close() {
    let (_temp, dir) = real();
    let (log, _) = Log::open(Arc::clone(&dir), &options()).unwrap();
    for _ in 0..10 {
        log.append(RecordKind(0), &[]).unwrap();
    }
    log.flush_blocking(Lsn(10)).unwrap();
    log.release(Lsn(8));
    drop(log);
    let (log, found) = Log::open(Arc::clone(&dir), &options()).unwrap();
    assert_eq!(
        found
            .map(|record| record.unwrap().lsn.0)
            .collect::<Vec<_>>(),
        [8, 9, 10]
    );
    // Everything may be released, even what is still to come.
    log.release(Lsn(1000));
    drop(log);
    let (log, found) = Log::open(Arc::clone(&dir), &options()).unwrap();
    assert_eq!(found.count(), 0);
    assert_eq!(log.append(RecordKind(0), &[]).unwrap(), Lsn(11));
}

#[test]
fn a_flushed_payload_can_be_read_in_place() {
    let (_temp, dir) = real();
    let (log, _) = Log::open(Arc::clone(&dir), &options()).unwrap();
    let placed = log
        .append_placed(RecordKind(0), &[IoSlice::new(b"0123456789")])
        .unwrap();
    log.flush_blocking(placed.lsn).unwrap();
    let mut bytes = [0; 4];
    log.read(placed.place, 3, &mut bytes).unwrap();
    assert_eq!(&bytes, b"3456");
    drop(log);
    let (_log, mut found) = Log::open(dir, &options()).unwrap();
    assert_eq!(found.next().unwrap().unwrap().place, placed.place);
}

#[test]
fn a_caller_that_must_not_wait_is_told_that_the_buffer_is_full() {
    let (_temp, dir) = real();
    let options = LogOptions {
        buffer_bytes_max: 1 << 20,
        segments_max: 64,
        ..options()
    };
    let (log, _) = Log::open(dir, &options).unwrap();
    let busy = (0..10_000).find_map(|_| {
        log.try_append(RecordKind(0), &[IoSlice::new(&[1; 60_000])])
            .err()
    });
    assert!(
        matches!(busy, Some(Error::Busy | Error::Full { .. })),
        "{busy:?}"
    );
}

#[test]
fn callbacks_come_after_a_flush_and_on_close() {
    let (_temp, dir) = real();
    let (log, _) = Log::open(dir, &options()).unwrap();
    let (sender, receiver) = mpsc::channel();
    for count in 1..=50u64 {
        let lsn = log
            .append(RecordKind(0), &[IoSlice::new(&[1; 100])])
            .unwrap();
        let sender = sender.clone();
        log.flush(lsn, move |result| {
            sender.send((count, result.unwrap())).unwrap();
        });
    }
    log.close();
    drop(sender);
    assert!(matches!(log.append(RecordKind(0), &[]), Err(Error::Closed)));
    let mut seen: Vec<_> = receiver.iter().collect();
    seen.sort_unstable();
    assert_eq!(seen.len(), 50);
    assert!(seen.iter().all(|(count, durable)| durable.0 >= *count));
}

#[test]
fn a_log_may_be_dropped_in_its_own_callback() {
    let (_temp, dir) = real();
    let (log, _) = Log::open(dir, &options()).unwrap();
    let log = Arc::new(log);
    let lsn = log.append(RecordKind(0), &[]).unwrap();
    let (sender, receiver) = mpsc::channel();
    let (own, held) = mpsc::channel::<Arc<Log>>();
    log.flush(lsn, move |result| {
        drop(held.recv().unwrap());
        sender.send(result).unwrap();
    });
    own.send(log).unwrap();
    assert_eq!(receiver.recv().unwrap().unwrap(), lsn);
}

#[test]
fn wrong_use_is_refused() {
    let (_temp, dir) = real();
    let (log, _) = Log::open(Arc::clone(&dir), &options()).unwrap();
    assert!(matches!(
        Log::open(Arc::clone(&dir), &options()),
        Err(Error::Locked)
    ));
    let large = vec![0; log.payload_bytes_max() + 1];
    let refused = log.append(RecordKind(0), &[IoSlice::new(&large)]);
    assert!(matches!(refused, Err(Error::TooLarge { .. })));
    log.append(RecordKind(0), &[IoSlice::new(&large[1..])])
        .unwrap();
    assert!(matches!(
        log.flush_blocking(Lsn(2)),
        Err(Error::NotAppended { lsn: Lsn(2) })
    ));
    drop(log);
    let foreign = LogOptions {
        id: LogId(43),
        ..options()
    };
    assert!(matches!(
        Log::open(Arc::clone(&dir), &foreign),
        Err(Error::ForeignLog { .. })
    ));
    let odd = LogOptions {
        segment_bytes: 10_000,
        ..options()
    };
    assert!(matches!(Log::open(dir, &odd), Err(Error::Options { .. })));
}

#[test]
fn real_files_do_what_the_trait_says() {
    let (_temp, dir) = real();
    let file = dir.create("a").unwrap();
    assert!(dir.create("a").is_err() && dir.open("b").is_err());
    file.write_at(&[5; 8192], 0).unwrap();
    file.punch_hole(0, 4096).unwrap();
    file.sync_data().unwrap();
    let mut bytes = [9; 8192];
    file.read_at(&mut bytes, 0).unwrap();
    assert!(bytes[..4096] == [0; 4096] && bytes[4096..] == [5; 4096]);
    assert!(file.read_at(&mut [0; 2], 8191).is_err());
    file.set_len(10).unwrap();
    assert_eq!(file.size().unwrap(), 10);
    assert!(file.descriptor().is_some());
    dir.rename("a", "b").unwrap();
    dir.subdir("d").unwrap().create("c").unwrap();
    dir.sync_dir().unwrap();
    let names: Vec<_> = dir
        .list()
        .unwrap()
        .into_iter()
        .map(|e| (e.name, e.is_dir))
        .collect();
    assert_eq!(names, [("b".to_owned(), false), ("d".to_owned(), true)]);
    dir.remove("b").unwrap();
}

/// Asking for room that no segment has began a segment each time. The numbers of the segments then
/// had a gap, at which the log ended when it was opened.
#[test]
fn asking_for_more_room_than_a_segment_has_loses_no_records() {
    let (_temp, dir) = real();
    let (log, _) = Log::open(Arc::clone(&dir), &options()).unwrap();
    let put = |byte| {
        let lsn = log
            .append(RecordKind(0), &[IoSlice::new(&[byte; 100])])
            .unwrap();
        log.flush_blocking(lsn).unwrap();
    };
    put(1);
    let (sender, asked) = mpsc::channel();
    for _ in 0..3 {
        let sender = sender.clone();
        log.when_room(64 << 10, move || sender.send(()).unwrap());
        asked.recv().unwrap();
    }
    put(2);
    put(3);
    assert!(log.bytes_in_use() < 64 << 10);
    drop(log);
    let (_log, found) = Log::open(dir, &options()).unwrap();
    let bytes: Vec<u8> = found.map(|record| record.unwrap().payload[0]).collect();
    assert_eq!(bytes, [1, 2, 3]);
}
