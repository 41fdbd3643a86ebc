//! Loss of power at every step of a log's life: what was acknowledged is there, in order, and
//! nothing is that an earlier opening left behind.

#![allow(clippy::unwrap_used, reason = "a failed helper fails its test")]

use std::collections::BTreeMap;
use std::io::IoSlice;

use hither_log::crash::CrashDisk;
use hither_log::{Error, Log, LogId, LogOptions, Lsn, RecordKind, Recovered};

/// What a run has appended and what it was told.
#[derive(Debug, Default, Clone)]
struct Model {
    /// Payload by number; numbers above the recovered end are given anew by a later round.
    appended: BTreeMap<u64, Vec<u8>>,
    acknowledged: u64,
    released: u64,
}

impl Model {
    /// Checks what an open has found and forgets what was lost.
    fn check(&mut self, records: Recovered, context: &str) {
        let last = records.last_lsn().0;
        assert!(
            last >= self.acknowledged,
            "{context}: {last} < {}",
            self.acknowledged
        );
        let mut expected = None;
        for record in records {
            let record = record.unwrap_or_else(|error| panic!("{context}: {error}"));
            let lsn = record.lsn.0;
            assert_eq!(*expected.get_or_insert(lsn), lsn, "{context}: a gap");
            expected = Some(lsn + 1);
            assert_eq!(record.kind, kind(lsn), "{context}");
            assert_eq!(
                Some(&record.payload[..]),
                self.appended.get(&lsn).map(|p| &p[..]),
                "{context}: record {lsn}"
            );
        }
        let first_needed = self.released.max(1);
        if let Some(next) = expected {
            assert_eq!(next, last + 1, "{context}: the end is missing");
        }
        let found_first = expected.map(|_| ()).is_some();
        assert!(
            found_first || last < first_needed || self.released > last,
            "{context}: empty"
        );
        self.appended.retain(|lsn, _| *lsn <= last);
        self.acknowledged = last;
    }
}

fn kind(lsn: u64) -> RecordKind {
    RecordKind(u16::try_from(lsn % 7).unwrap())
}

fn options() -> LogOptions {
    LogOptions {
        segment_bytes: 8192,
        segments_initial: 1,
        segments_max: 4,
        buffer_bytes_max: 8192,
        ..LogOptions::new(LogId(0x5eed))
    }
}

/// How a run uses the log.
#[derive(Debug, Clone, Copy)]
struct Habit {
    records: u64,
    /// Flush after so many records.
    flush_every: u64,
    /// All payloads have this size; `None` for all sizes.
    payload_bytes: Option<u64>,
}

impl Habit {
    fn mixed(records: u64) -> Self {
        Self {
            records,
            flush_every: 3,
            payload_bytes: None,
        }
    }
}

/// A payload that tells its record, its round, and each of its bytes apart.
fn payload(lsn: u64, round: u64, habit: Habit) -> Vec<u8> {
    let size = habit
        .payload_bytes
        .unwrap_or((lsn * 397 + round * 211) % 1900);
    (0..size)
        .map(|at| u8::try_from((lsn * 31 + round * 17 + at * 7) % 251).unwrap())
        .collect()
}

/// Opens the log, checks it, and appends, flushes and releases until the disk stops.
fn live(disk: &CrashDisk, model: &mut Model, round: u64, habit: Habit) -> Result<(), Error> {
    let (log, found) = Log::open(disk.root(), &options())?;
    model.check(found, &format!("round {round}"));
    for step in 0..habit.records {
        let lsn = log.next_lsn().0;
        let bytes = payload(lsn, round, habit);
        let (front, back) = bytes.split_at(bytes.len() / 3);
        model.appended.insert(lsn, bytes.clone());
        let parts = [IoSlice::new(front), IoSlice::new(back)];
        let given = match log.append(kind(lsn), &parts) {
            Err(Error::Full { .. }) => {
                model.appended.remove(&lsn);
                model.acknowledged = log.flush_blocking(Lsn(lsn - 1))?.0;
                model.released = lsn - 2;
                log.release(Lsn(lsn - 2));
                continue;
            }
            other => other?,
        };
        assert_eq!(given.0, lsn);
        if step % habit.flush_every == habit.flush_every - 1 {
            let durable = log.flush_blocking(given)?;
            model.acknowledged = model.acknowledged.max(durable.0);
        }
    }
    Ok(())
}

#[test]
fn every_step_survives_a_loss_of_power() {
    let dry = CrashDisk::new();
    live(&dry, &mut Model::default(), 0, Habit::mixed(60)).unwrap();
    // Threads make the number of steps vary a little.
    let steps = dry.steps() + 10;
    for stop in 1..=steps {
        let disk = CrashDisk::new();
        disk.stop_at(stop);
        let mut before = Model::default();
        let outcome = live(&disk, &mut before, 0, Habit::mixed(60));
        assert!(outcome.is_ok() || disk.steps() >= stop, "{outcome:?}");
        for seed in 0..4 {
            let mut model = before.clone();
            let after = disk.power_loss(seed * 1000 + stop);
            let context = format!("stop {stop} seed {seed}");
            let (log, found) = Log::open(after.root(), &options())
                .unwrap_or_else(|error| panic!("{context}: {error}"));
            model.check(found, &context);
            drop(log);
            // Again, and then the log goes on.
            live(&after, &mut model, 1, Habit::mixed(10)).unwrap();
            live(&after, &mut model, 2, Habit::mixed(0)).unwrap();
        }
    }
}

#[test]
fn many_losses_in_a_row_leave_nothing_stale() {
    for seed in 0..300 {
        let mut disk = CrashDisk::new();
        let mut model = Model::default();
        for round in 0..12 {
            // Equal sizes put what an earlier round left just where a later record could go;
            // rare flushes leave several segments at once.
            let habit = Habit {
                records: 30,
                flush_every: [1, 10, 2, 12][usize::try_from((seed + round) % 4).unwrap()],
                payload_bytes: [None, Some(984), Some(1960)][usize::try_from(seed % 3).unwrap()],
            };
            disk.stop_at(2 + (seed * 7 + round * 13) % 37);
            let outcome = live(&disk, &mut model, round, habit);
            assert!(
                outcome.is_ok() || is_io(&outcome),
                "seed {seed} round {round}: {outcome:?}"
            );
            disk = if (seed + round) % 3 == 0 {
                disk.process_death()
            } else {
                disk.power_loss(seed * 100 + round)
            };
        }
        live(&disk, &mut model, 99, Habit::mixed(5)).unwrap();
    }
}

fn is_io(outcome: &Result<(), Error>) -> bool {
    matches!(outcome, Err(Error::Io { .. } | Error::Poisoned { .. }))
}

#[test]
fn a_failing_device_poisons_the_log_and_loses_nothing_acknowledged() {
    let dry = CrashDisk::new();
    live(&dry, &mut Model::default(), 0, Habit::mixed(60)).unwrap();
    for fail in 1..=dry.steps() {
        let disk = CrashDisk::new();
        disk.fail_at(fail);
        let mut model = Model::default();
        let outcome = live(&disk, &mut model, 0, Habit::mixed(60));
        assert!(
            outcome.is_ok() || is_io(&outcome),
            "fail {fail}: {outcome:?}"
        );
        // The process goes, the page cache stays, and then the power goes too.
        let disk = disk.process_death();
        live(&disk, &mut model, 1, Habit::mixed(5)).unwrap();
        live(&disk.power_loss(fail), &mut model, 2, Habit::mixed(5)).unwrap();
    }
}

#[test]
fn after_a_failed_sync_everybody_gets_the_error() {
    let disk = CrashDisk::new();
    // With all segments made, nothing but the flush takes steps.
    let options = LogOptions {
        segments_initial: 4,
        ..options()
    };
    let (log, _) = Log::open(disk.root(), &options).unwrap();
    let first = log.append(RecordKind(1), &[IoSlice::new(b"x")]).unwrap();
    // The write of the batch is the next step, its sync the one after.
    disk.fail_at(disk.steps() + 2);
    assert!(matches!(
        log.flush_blocking(first),
        Err(Error::Poisoned { .. })
    ));
    assert!(matches!(
        log.append(RecordKind(1), &[]),
        Err(Error::Poisoned { .. })
    ));
    assert!(matches!(
        log.flush_blocking(first),
        Err(Error::Poisoned { .. })
    ));
    let (sender, receiver) = std::sync::mpsc::channel();
    log.flush(first, move |result| sender.send(result).unwrap());
    assert!(matches!(
        receiver.recv().unwrap(),
        Err(Error::Poisoned { .. })
    ));
}
