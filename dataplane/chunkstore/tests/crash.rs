//! Loss of power at every step: what was acknowledged as stable is there bit for bit, nothing is
//! reported as damaged that was only torn, open marks and deletions survive.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use hither_chunkstore::{Disk, Error, StoreOptions, TrimOp, WriteOp};
use hither_log::crash::CrashDisk;
use hither_proto::ids::{ChainNumber, ChunkId, Epoch, LeaseId};

use support::{GROUP, content, open_with, options, pattern, synced, write};

/// What a byte may be after a loss: the value that is stable, or any that was written since.
#[derive(Debug, Default, Clone)]
struct Copy {
    allowed: Vec<Vec<u8>>,
    /// Highest (lease, chain) acknowledged as stable.
    marked: bool,
    delete: Delete,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Delete {
    #[default]
    No,
    Begun,
    Done,
}

impl Copy {
    fn written(&mut self, offset: usize, bytes: &[u8]) {
        if self.allowed.len() < offset + bytes.len() {
            self.allowed.resize(offset + bytes.len(), vec![0]);
        }
        for (allowed, byte) in self.allowed[offset..].iter_mut().zip(bytes) {
            allowed.push(*byte);
        }
    }

    fn zeroed(&mut self, offset: usize, length: usize) {
        let end = if length == 0 {
            usize::MAX
        } else {
            offset + length
        };
        for allowed in self.allowed.iter_mut().take(end).skip(offset) {
            allowed.push(0);
        }
    }

    /// The newest values of a range are stable.
    fn stable(&mut self, offset: usize, length: usize) {
        for allowed in self.allowed.iter_mut().skip(offset).take(length) {
            *allowed = allowed.split_off(allowed.len() - 1);
        }
    }
}

#[derive(Debug, Clone)]
struct Model {
    copies: BTreeMap<u64, Copy>,
    lease: u64,
    /// The chunks in use; one that was deleted is replaced by a new one.
    chunks: [u64; 3],
    next_chunk: u64,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            copies: BTreeMap::new(),
            lease: 1,
            chunks: [1, 2, 3],
            next_chunk: 4,
        }
    }
}

#[derive(Clone, Copy)]
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn small(&mut self, bound: u32) -> u32 {
        u32::try_from(self.below(u64::from(bound))).unwrap()
    }
}

/// Runs until all operations are done or the disk stops.
fn live(disk: &Disk, model: &mut Model, random: &mut Random, operations: u64) -> Result<(), Error> {
    for _ in 0..operations {
        let slot = usize::try_from(random.below(3)).unwrap();
        let chunk = model.chunks[slot];
        model.lease += random.below(2);
        let lease = model.lease;
        match random.below(14) {
            0..=6 => {
                let aligned = random.below(2) == 0;
                let far = if random.below(5) == 0 {
                    150_000
                } else {
                    50_000
                };
                let offset = random.small(far);
                let offset = if aligned {
                    offset / 4096 * 4096
                } else {
                    offset
                };
                let length = match random.below(3) {
                    0 => 1 + random.small(5000),
                    1 => 4096 * (1 + random.small(4)),
                    _ => 65_536 + random.small(20_000),
                } as usize;
                let sync = random.below(3) == 0;
                let bytes = pattern(chunk, random.below(1000), offset, length);
                let op = WriteOp {
                    chain: ChainNumber(1),
                    ..write(chunk, lease, offset, bytes.clone())
                };
                let copy = model.copies.entry(chunk).or_default();
                copy.written(offset as usize, &bytes);
                match disk.write_wait(if sync { synced(op) } else { op }) {
                    Err(Error::Deleted(_)) if copy.delete != Delete::No => {
                        for allowed in &mut copy.allowed {
                            allowed.clear();
                        }
                        copy.allowed.clear();
                        continue;
                    }
                    other => other?,
                }
                if sync {
                    copy.stable(offset as usize, length);
                    copy.marked = true;
                }
            }
            7 => {
                let (offset, length) = (
                    random.small(60_000),
                    [0, random.small(40_000)][usize::try_from(random.below(2)).unwrap()],
                );
                let copy = model.copies.entry(chunk).or_default();
                if copy.delete != Delete::No {
                    continue;
                }
                copy.zeroed(offset as usize, length as usize);
                model.lease += 1;
                disk.trim(&TrimOp {
                    chunk: ChunkId(chunk),
                    group: GROUP,
                    lease: LeaseId(model.lease),
                    epoch: Epoch(1),
                    offset,
                    length,
                })?;
                copy.stable(
                    offset as usize,
                    if length == 0 {
                        usize::MAX
                    } else {
                        length as usize
                    },
                );
            }
            8 | 9 => {
                disk.flush_wait(&[ChunkId(chunk)])?;
                let copy = model.copies.entry(chunk).or_default();
                copy.stable(0, usize::MAX);
                copy.marked = disk
                    .entry(ChunkId(chunk))
                    .is_some_and(|entry| entry.open.is_some());
            }
            10 => disk.tidy()?,
            11 => disk.checkpoint()?,
            12 => {
                let copy = model.copies.entry(chunk).or_default();
                copy.delete = Delete::Begun;
                disk.delete(&[ChunkId(chunk)])?;
                copy.delete = Delete::Done;
                copy.allowed.clear();
                model.chunks[slot] = model.next_chunk;
                model.next_chunk += 1;
            }
            _ => match random.below(2) {
                0 => {
                    let copy = model.copies.entry(chunk).or_default();
                    copy.marked = false;
                    disk.close_marks(&[ChunkId(chunk)], LeaseId(lease))?;
                    copy.stable(0, usize::MAX);
                }
                _ => {
                    model.lease += 1;
                    match disk.seal(ChunkId(chunk), GROUP, LeaseId(model.lease)) {
                        Err(Error::Deleted(_)) => {}
                        other => drop(other?),
                    }
                }
            },
        }
    }
    Ok(())
}

/// Compares what is there with what may be, and takes it as the newest.
fn check(disk: &Disk, model: &mut Model, context: &str) {
    for (chunk, copy) in &mut model.copies {
        let found = content(disk, *chunk);
        if copy.delete == Delete::Done {
            assert_eq!(found, Err(Error::NoSuchChunk(ChunkId(*chunk))), "{context}");
            let late = disk.write_wait(write(*chunk, 10_000, 0, vec![1]));
            assert_eq!(late, Err(Error::Deleted(ChunkId(*chunk))), "{context}");
            continue;
        }
        let found = match found {
            Ok(bytes) => bytes,
            Err(Error::NoSuchChunk(_)) => bytes::Bytes::new(),
            Err(error) => panic!("{context}: chunk {chunk}: {error}"),
        };
        if copy.delete == Delete::Begun {
            // It may have been freed, or have been lost before and not be freed.
            let sealed = disk.seal(ChunkId(*chunk), GROUP, LeaseId(model.lease));
            let freed = sealed == Err(Error::Deleted(ChunkId(*chunk)));
            if freed {
                copy.delete = Delete::Done;
                copy.allowed.clear();
                continue;
            }
            copy.delete = Delete::No;
        }
        assert!(
            found.len() <= copy.allowed.len(),
            "{context}: chunk {chunk} is too long: {}",
            found.len()
        );
        for (at, allowed) in copy.allowed.iter_mut().enumerate() {
            let byte = found.get(at).copied().unwrap_or(0);
            assert!(
                allowed.contains(&byte),
                "{context}: chunk {chunk} byte {at}: {byte} is none of {allowed:?}, length {}",
                found.len()
            );
            allowed.push(byte);
        }
        let open = disk
            .entry(ChunkId(*chunk))
            .is_some_and(|entry| entry.open.is_some());
        assert!(
            open || !copy.marked,
            "{context}: the open mark of chunk {chunk} is lost"
        );
    }
    for chunk in &mut model.chunks {
        let gone = |copy: &Copy| copy.delete == Delete::Done;
        if model.copies.get(chunk).is_some_and(gone) {
            *chunk = model.next_chunk;
            model.next_chunk += 1;
        }
    }
}

fn run(seed: u64, operations: u64, stop: Option<u64>) -> (CrashDisk, Model) {
    run_with(seed, operations, stop, &options())
}

fn run_with(
    seed: u64,
    operations: u64,
    stop: Option<u64>,
    options: &StoreOptions,
) -> (CrashDisk, Model) {
    let memory = CrashDisk::new();
    let mut model = Model::default();
    if let Some(stop) = stop {
        memory.stop_at(stop);
    }
    if let Ok((_store, disk)) = open_with(&memory, options) {
        let outcome = live(&disk, &mut model, &mut Random(seed), operations);
        assert!(
            matches!(outcome, Ok(()) | Err(Error::DiskFailed { .. })),
            "{outcome:?}"
        );
    }
    (memory, model)
}

fn survives(memory: &CrashDisk, model: &Model, seed: u64, context: &str) {
    let after = memory.power_loss(seed);
    let mut model = model.clone();
    let (store, disk) =
        open_with(&after, &options()).unwrap_or_else(|error| panic!("{context}: {error}"));
    check(&disk, &mut model, context);
    // It goes on, and is found again.
    let mut random = Random(seed);
    live(&disk, &mut model, &mut random, 6).unwrap();
    disk.tidy().unwrap();
    store.close().unwrap();
    drop((store, disk));
    let (_store, disk) = open_with(&after, &options()).unwrap();
    check(&disk, &mut model, &format!("{context}, again"));
}

#[test]
fn every_step_survives_a_loss_of_power() {
    for seed in 0..SEEDS {
        let (dry, _) = run(seed, OPERATIONS, None);
        let steps = dry.steps() + 4;
        let first = formatting_steps();
        for stop in (first + seed % STRIDE..=steps).step_by(usize::try_from(STRIDE).unwrap()) {
            let (memory, model) = run(seed, OPERATIONS, Some(stop));
            for loss in 0..2 {
                survives(
                    &memory,
                    &model,
                    loss * 1000 + stop,
                    &format!("seed {seed} stop {stop} loss {loss}"),
                );
            }
        }
    }
}

/// Data of a write whose record was lost lies behind the end of the copy: it must not show when the
/// copy grows over it.
#[test]
fn bytes_behind_the_end_do_not_come_back() {
    let mut reached = 0;
    for seed in 0..20 {
        let memory = CrashDisk::new();
        let (store, disk) = open_with(&memory, &options()).unwrap();
        // Marks the regions ahead, so that the next write need not wait for its record.
        disk.write_wait(write(1, 1, 0, pattern(1, 1, 0, 100_000)))
            .unwrap();
        disk.write_wait(write(1, 1, 300_000, pattern(1, 2, 300_000, 100_000)))
            .unwrap();
        let after = memory.power_loss(seed);
        let file = after
            .content("chunks/01/0000000000000001")
            .unwrap_or_default();
        let behind = file.get((128 << 10) + 300_000..).unwrap_or_default();
        reached += usize::from(behind.iter().any(|byte| *byte != 0));
        drop((store, disk));
        let (_store, disk) = open_with(&after, &options()).unwrap();
        assert_eq!(disk.entry(ChunkId(1)).unwrap().length, 100_000);
        disk.write_wait(write(1, 1, 500_000, vec![9; 10])).unwrap();
        let found = content(&disk, 1).unwrap();
        assert!(
            found[100_000..500_000].iter().all(|byte| *byte == 0),
            "seed {seed}"
        );
    }
    assert!(reached > 0);
}

/// Numbers of records that were lost are given again: the index must not know of lost ones.
#[test]
fn a_checkpoint_knows_of_no_record_that_can_be_lost() {
    for seed in 0..10 {
        let memory = CrashDisk::new();
        let (store, disk) = open_with(&memory, &options()).unwrap();
        disk.write_wait(write(1, 1, 0, vec![1; 100])).unwrap();
        disk.checkpoint().unwrap();
        let memory = memory.power_loss(seed);
        drop((store, disk));
        let (store, disk) = open_with(&memory, &options()).unwrap();
        let later = pattern(1, 1, 0, 5000);
        disk.write_wait(synced(write(1, 1, 0, later.clone())))
            .unwrap();
        let memory = memory.power_loss(seed);
        drop((store, disk));
        let (_store, disk) = open_with(&memory, &options()).unwrap();
        assert_eq!(content(&disk, 1).unwrap()[..], later[..], "seed {seed}");
    }
}

/// The background work moves bytes and writes checkpoints while writes go on.
#[test]
fn the_background_work_survives_a_loss_of_power() {
    let busy = StoreOptions {
        tick: Some(std::time::Duration::from_micros(100)),
        ..options()
    };
    for seed in 100..100 + SEEDS {
        let (dry, _) = run_with(seed, OPERATIONS, None, &busy);
        for stop in (formatting_steps() + seed % STRIDE..=dry.steps() + 10).step_by(19) {
            let (memory, model) = run_with(seed, OPERATIONS, Some(stop), &busy);
            survives(&memory, &model, stop, &format!("seed {seed} stop {stop}"));
        }
    }
}

/// Others flush, move and checkpoint the same chunks while the writer writes.
#[test]
fn work_at_the_same_time_survives_a_loss_of_power() {
    for seed in 200..200 + 4 * SEEDS {
        let memory = CrashDisk::new();
        let mut model = Model::default();
        let (_store, disk) = open_with(&memory, &options()).unwrap();
        memory.stop_at(memory.steps() + 60 + seed * 37 % 400);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut round = 0;
                while !done.load(Ordering::Relaxed) {
                    round += 1;
                    let chunks: Vec<ChunkId> = (1..8).map(ChunkId).collect();
                    let outcome = match round % 4 {
                        0 => disk.tidy(),
                        1 => disk.checkpoint(),
                        _ => disk.flush_wait(&chunks),
                    };
                    if outcome.is_err() {
                        return;
                    }
                }
            });
            let outcome = live(&disk, &mut model, &mut Random(seed), 10 * OPERATIONS);
            done.store(true, Ordering::Relaxed);
            assert!(
                matches!(outcome, Ok(()) | Err(Error::DiskFailed { .. })),
                "{outcome:?}"
            );
        });
        for loss in 0..3 {
            survives(
                &memory,
                &model,
                seed + loss * 1000,
                &format!("seed {seed} loss {loss}"),
            );
        }
    }
}

/// A bad device fails one step; then the process is killed, and after a while the power goes.
#[test]
fn a_step_that_fails_loses_nothing_acknowledged() {
    for seed in 10..10 + SEEDS {
        let (dry, _) = run(seed, OPERATIONS, None);
        let first = formatting_steps() + seed % STRIDE;
        for fail in (first..=dry.steps()).step_by(usize::try_from(STRIDE).unwrap()) {
            let memory = CrashDisk::new();
            let mut model = Model::default();
            memory.fail_at(fail);
            let context = format!("seed {seed} fail {fail}");
            if let Ok((_store, disk)) = open_with(&memory, &options()) {
                let outcome = live(&disk, &mut model, &mut Random(seed), OPERATIONS);
                assert!(
                    matches!(outcome, Ok(()) | Err(Error::DiskFailed { .. })),
                    "{context}: {outcome:?}"
                );
            }
            let memory = memory.process_death();
            {
                let (_store, disk) = open_with(&memory, &options())
                    .unwrap_or_else(|error| panic!("{context}: {error}"));
                check(&disk, &mut model, &context);
                live(&disk, &mut model, &mut Random(fail), 10).unwrap();
            }
            survives(&memory, &model, fail, &context);
        }
    }
}

/// Steps that making a disk takes.
fn formatting_steps() -> u64 {
    let dry = CrashDisk::new();
    drop(open_with(&dry, &options()).unwrap());
    dry.steps()
}

#[test]
fn formatting_can_be_interrupted_anywhere() {
    let dry = CrashDisk::new();
    drop(open_with(&dry, &options()).unwrap());
    for stop in 1..=dry.steps() + 2 {
        let memory = CrashDisk::new();
        memory.stop_at(stop);
        let _ = open_with(&memory, &options());
        let after = memory.power_loss(stop);
        let (_store, disk) =
            open_with(&after, &options()).unwrap_or_else(|error| panic!("stop {stop}: {error}"));
        disk.write_wait(write(1, 1, 0, vec![1; 100])).unwrap();
    }
}

#[test]
fn many_losses_in_a_row() {
    for seed in 0..12 {
        let mut memory = CrashDisk::new();
        let mut model = Model::default();
        let mut random = Random(seed);
        drop(open_with(&memory, &options()).unwrap());
        for round in 0..8 {
            memory.stop_at(memory.steps() + 20 + random.below(120));
            let context = format!("seed {seed} round {round}");
            if let Ok((_store, disk)) = open_with(&memory, &options()) {
                let outcome = live(&disk, &mut model, &mut random, 25);
                assert!(
                    matches!(outcome, Ok(()) | Err(Error::DiskFailed { .. })),
                    "{context}: {outcome:?}"
                );
            }
            memory = match random.below(3) {
                0 => memory.process_death(),
                _ => memory.power_loss(seed * 100 + round),
            };
            let (store, disk) =
                open_with(&memory, &options()).unwrap_or_else(|error| panic!("{context}: {error}"));
            check(&disk, &mut model, &context);
            drop((store, disk));
        }
    }
}

/// A killed run had made the file and synced neither it nor its directory. The next one settled the
/// copy, so that a later flush had nothing to do: the file was gone after a loss of power.
#[test]
fn a_copy_that_was_settled_keeps_its_file() {
    for seed in 0..12 {
        let memory = CrashDisk::new();
        let (store, disk) = open_with(&memory, &options()).unwrap();
        let bytes = pattern(4, 1, 0, 80_000);
        disk.write_wait(write(4, 1, 0, bytes.clone())).unwrap();
        let memory = memory.process_death();
        drop((store, disk));
        let (store, disk) = open_with(&memory, &options()).unwrap();
        assert_eq!(content(&disk, 4).unwrap(), bytes);
        drop((store, disk));
        let (store, disk) = open_with(&memory, &options()).unwrap();
        disk.flush_wait(&[ChunkId(4)]).unwrap();
        let after = memory.power_loss(seed);
        drop((store, disk));
        let (_store, disk) = open_with(&after, &options()).unwrap();
        let found = content(&disk, 4).unwrap();
        assert!(found == bytes, "seed {seed}: other bytes");
    }
}

/// A loss of power leaves of a new file its start, or nothing. Nothing of the copy was acknowledged
/// as stable: it is what is left, now and later, and not damaged.
#[test]
fn a_new_file_that_a_loss_of_power_cut_short_is_no_damage() {
    let path = "chunks/04/0000000000000004";
    let mut short = 0;
    for seed in 0..60 {
        let memory = CrashDisk::new();
        let (store, disk) = open_with(&memory, &options()).unwrap();
        disk.write_wait(write(4, 1, 0, pattern(4, 1, 0, 80_000)))
            .unwrap();
        let memory = memory.power_loss(seed);
        drop((store, disk));
        let left = memory.content(path);
        short += usize::from(left.is_ok_and(|bytes| bytes.len() < 128 << 10));
        let (store, disk) = open_with(&memory, &options()).unwrap();
        let found = content(&disk, 4).unwrap();
        store.close().unwrap();
        let memory = memory.power_loss(seed);
        drop((store, disk));
        let (_store, disk) = open_with(&memory, &options()).unwrap();
        let again = content(&disk, 4).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert!(again == found, "seed {seed}: other bytes");
    }
    assert!(short > 5, "{short}");
}

/// A file that was cut short by somebody else is made anew with bad blocks: a loss of power at any
/// step of that leaves no zeros, and none after it takes what was repaired.
#[test]
fn a_file_that_is_made_anew_survives_a_loss_of_power() {
    let bytes = pattern(4, 1, 0, 80_000);
    let memory = CrashDisk::new();
    let (store, disk) = open_with(&memory, &options()).unwrap();
    disk.write_wait(write(4, 1, 0, bytes.clone())).unwrap();
    store.close().unwrap();
    drop((store, disk));
    let name = "0000000000000004";
    let before = memory.process_death();
    for way in ["short", "missing"] {
        let memory = before.process_death();
        let dir = memory
            .root()
            .subdir("chunks")
            .unwrap()
            .subdir("04")
            .unwrap();
        match way {
            "short" => {
                let file = dir.open(name).unwrap();
                file.set_len(5000).unwrap();
                file.sync_data().unwrap();
            }
            _ => {
                dir.remove(name).unwrap();
                dir.sync_dir().unwrap();
            }
        }
        for stop in 1..30 {
            for seed in 0..8 {
                let what = format!("{way}, stop {stop}, seed {seed}");
                let memory = memory.process_death();
                let (store, disk) = open_with(&memory, &options()).unwrap();
                memory.stop_at(memory.steps() + stop);
                drop(content(&disk, 4));
                // A member that has the bytes repairs it.
                let repaired = disk
                    .write_wait(synced(write(4, 2, 0, bytes.clone())))
                    .is_ok();
                let after = memory.power_loss(seed);
                drop((store, disk));
                let (_store, disk) = open_with(&after, &options()).unwrap();
                match content(&disk, 4) {
                    Ok(found) => assert!(found == bytes, "{what}: other bytes"),
                    Err(Error::BadBlock { .. }) if !repaired => {}
                    Err(error) => panic!("{what}: {error}"),
                }
            }
        }
    }
}

/// Runs; each has other operations and looks at other steps.
const SEEDS: u64 = 3;
const OPERATIONS: u64 = 40;
const STRIDE: u64 = 11;
