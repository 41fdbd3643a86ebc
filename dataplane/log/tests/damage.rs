//! Damage to flushed records is told from a torn tail, and no bytes make the log panic.

#![allow(clippy::unwrap_used, reason = "a failed helper fails its test")]

use std::io::IoSlice;

use hither_log::crash::CrashDisk;
use hither_log::{Error, Log, LogId, LogOptions, Lsn, RecordKind};
use proptest::prelude::*;

fn options() -> LogOptions {
    LogOptions {
        segment_bytes: 8192,
        segments_max: 4,
        ..LogOptions::new(LogId(7))
    }
}

/// Ten records of 1000 bytes, each flushed alone; seven fit a segment.
fn filled(close: bool) -> CrashDisk {
    let disk = CrashDisk::new();
    let (log, _) = Log::open(disk.root(), &options()).unwrap();
    for number in 0..10u8 {
        let lsn = log
            .append(RecordKind(1), &[IoSlice::new(&[number; 1000])])
            .unwrap();
        log.flush_blocking(lsn).unwrap();
    }
    if close {
        drop(log);
        disk
    } else {
        // Before the log notes in its control file how far it has come.
        disk.power_loss(1)
    }
}

fn open(disk: &CrashDisk) -> Result<Vec<Lsn>, Error> {
    let (_log, found) = Log::open(disk.root(), &options())?;
    found
        .map(|record| record.map(|record| record.lsn))
        .collect()
}

#[test]
fn a_damaged_record_before_a_flushed_one_is_corruption_wherever_it_is() {
    for (segment, offset) in [(0, 3 * 1040), (0, 0), (0, 6 * 1040), (1, 0)] {
        let disk = filled(false);
        let name = format!("segment-{segment:08x}");
        disk.damage(&name, |bytes| bytes[offset + 50] ^= 1).unwrap();
        match open(&disk) {
            Err(Error::Corrupt {
                file,
                offset: found,
                ..
            }) => {
                // A damaged first record is reported where the record before it ends.
                let end = (format!("segment-{:08x}", 0), 7 * 1040);
                let place = if segment == 1 {
                    end
                } else {
                    (name, offset as u64)
                };
                assert_eq!((file, found), place);
            }
            other => panic!("{segment} {offset}: {other:?}"),
        }
    }
}

#[test]
fn after_a_clean_close_even_the_last_record_cannot_vanish() {
    let disk = filled(true);
    disk.damage("segment-00000001", |bytes| bytes[2 * 1040 + 1] ^= 1)
        .unwrap();
    assert!(matches!(open(&disk), Err(Error::Corrupt { .. })));
}

#[test]
fn a_torn_last_record_ends_the_log() {
    let disk = filled(false);
    disk.damage("segment-00000001", |bytes| bytes[2 * 1040 + 500..].fill(0))
        .unwrap();
    assert_eq!(open(&disk).unwrap().len(), 9);
    assert_eq!(open(&disk).unwrap().len(), 9);
}

#[test]
fn a_damaged_control_slot_falls_back_to_the_other_and_two_are_corruption() {
    let disk = filled(true);
    disk.damage("control", |bytes| bytes[20] ^= 1).unwrap();
    assert_eq!(open(&disk).unwrap().len(), 10);
    let disk = filled(true);
    disk.damage("control", |bytes| bytes.fill(0)).unwrap();
    assert!(matches!(open(&disk), Err(Error::Corrupt { .. })));
}

#[test]
fn a_lost_segment_file_is_corruption() {
    for name in ["segment-00000000", "segment-00000001"] {
        let disk = filled(true);
        disk.root().remove(name).unwrap();
        assert!(matches!(open(&disk), Err(Error::Corrupt { .. })), "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn random_bytes_are_an_error_or_a_log_but_never_a_panic(
        file in prop::sample::select(vec!["segment-00000000", "segment-00000001", "control"]),
        at in any::<prop::sample::Index>(),
        bytes in proptest::collection::vec(any::<u8>(), 1..600),
    ) {
        let disk = filled(false);
        disk.damage(file, |content| {
            let start = at.index(content.len());
            let end = (start + bytes.len()).min(content.len());
            content[start..end].copy_from_slice(&bytes[..end - start]);
        }).unwrap();
        match open(&disk) {
            // One hit can take the last record and the only one that could have proved it.
            Ok(found) => prop_assert!(found.len() >= 8, "{found:?}"),
            Err(Error::Corrupt { .. }) => {}
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}

/// Twelve records of 1024 bytes each on disk, from one flush; eight fit a segment.
fn one_batch() -> CrashDisk {
    let disk = CrashDisk::new();
    let (log, _) = Log::open(disk.root(), &options()).unwrap();
    for number in 0..12u8 {
        log.append(RecordKind(1), &[IoSlice::new(&[number; 984])])
            .unwrap();
    }
    log.flush_blocking(Lsn(12)).unwrap();
    disk.power_loss(1)
}

/// Appends and flushes records one by one, loses power, and says which records are found then.
fn go_on(disk: &CrashDisk, found_before: usize, count: usize) -> Vec<Lsn> {
    let (log, found) = Log::open(disk.root(), &options()).unwrap();
    assert_eq!(found.count(), found_before);
    for _ in 0..count {
        let lsn = log
            .append(RecordKind(2), &[IoSlice::new(&[77; 984])])
            .unwrap();
        log.flush_blocking(lsn).unwrap();
    }
    open(&disk.power_loss(2)).unwrap()
}

#[test]
fn records_behind_a_torn_one_do_not_follow_its_successor() {
    // The first record of the batch was lost, those behind it were not. Four records fill the
    // first page, so nothing overwrites the old fifth, which has the right place and number.
    let disk = one_batch();
    disk.damage("segment-00000000", |bytes| bytes[..1024].fill(0))
        .unwrap();
    assert_eq!(go_on(&disk, 0, 4), [1, 2, 3, 4].map(Lsn));
}

#[test]
fn a_segment_behind_a_torn_record_does_not_follow_its_successor() {
    let disk = one_batch();
    disk.damage("segment-00000000", |bytes| bytes[7 * 1024..].fill(0))
        .unwrap();
    assert_eq!(go_on(&disk, 7, 1), [1, 2, 3, 4, 5, 6, 7, 8].map(Lsn));
}
