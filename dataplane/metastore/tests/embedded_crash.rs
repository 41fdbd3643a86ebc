//! Loss of power at every step of the embedded store, log and engine alike: what is found again
//! is the state after some commit, and that commit is no older than the last acknowledged one.

#![allow(clippy::unwrap_used, reason = "a failed helper fails its test")]

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::executor::block_on;
use futures::future::join_all;
use hither_log::crash::CrashDisk;
use hither_metastore::{Batch, EmbeddedOptions, EmbeddedStore, Error, KeyRange, MetaStore};

type State = BTreeMap<Vec<u8>, Vec<u8>>;

/// The states after each commit that was sent, and how far they were acknowledged.
#[derive(Clone, Default)]
struct Model {
    /// `states[0]` is the state that the store was opened with.
    states: Vec<State>,
    acknowledged: usize,
}

impl Model {
    /// Checks what an open has found, and begins anew from there.
    fn check(&mut self, store: &EmbeddedStore, context: &str) {
        let found: State = block_on(store.scan(&KeyRange::all(), 0))
            .unwrap()
            .entries
            .into_iter()
            .map(|entry| (entry.key.to_vec(), entry.versioned.value.to_vec()))
            .collect();
        if !self.states.is_empty() {
            let at = self
                .states
                .iter()
                .rposition(|state| *state == found)
                .unwrap_or_else(|| {
                    panic!(
                        "{context}: a state that never was: {:?}",
                        found.get(&b"last"[..])
                    )
                });
            assert!(
                at >= self.acknowledged,
                "{context}: {at} < {}",
                self.acknowledged
            );
        }
        *self = Self {
            states: vec![found],
            acknowledged: 0,
        };
    }
}

fn options() -> EmbeddedOptions {
    EmbeddedOptions {
        log_segment_bytes: 16 << 10,
        log_segments_max: 3,
        checkpoint_bytes: 3 << 10,
        memory_bytes_max: 32 << 10,
        cache_bytes: 64 << 10,
        history_bytes_max: 8 << 10,
    }
}

/// The number `number` of a run; every commit leads to a state that no other leads to.
fn batch(round: u64, number: u64) -> Batch {
    let mut batch = Batch::new();
    let value = format!("{round}.{number}");
    batch.put("last", value.clone());
    batch.put(
        format!("k/{:02}", (number * 7 + round) % 23),
        value.repeat(20),
    );
    if number.is_multiple_of(5) {
        batch.delete(format!("k/{:02}", (number + round) % 23));
    }
    if number % 11 == 10 {
        batch.delete_range(KeyRange::new(format!("k/{:02}", number % 20), "k/20"));
        batch.put("k/15", value);
    }
    batch
}

fn apply(state: &State, batch: &Batch) -> State {
    let mut state = state.clone();
    for range in batch.range_deletes() {
        state.retain(|key, _| !range.contains(key));
    }
    for (key, value) in batch.changes() {
        match value {
            Some(value) => drop(state.insert(key.to_vec(), value.to_vec())),
            None => drop(state.remove(&key[..])),
        }
    }
    state
}

/// Opens the store, checks it, and commits in groups of four at once until the disk stops.
fn live(disk: &CrashDisk, model: &mut Model, round: u64, count: u64) -> Result<(), Error> {
    let store = EmbeddedStore::open(&disk.root(), options())?;
    model.check(&store, &format!("round {round}"));
    for group in 0..count.div_ceil(4) {
        let batches: Vec<_> = (0..4)
            .map(|number| batch(round, group * 4 + number))
            .collect();
        for batch in &batches {
            let next = apply(model.states.last().unwrap(), batch);
            model.states.push(next);
        }
        let first = model.states.len() - batches.len();
        let outcomes = block_on(join_all(
            batches.into_iter().map(|batch| store.commit(batch)),
        ));
        for (index, outcome) in outcomes.into_iter().enumerate() {
            outcome?;
            model.acknowledged = first + index;
        }
        if group % 6 == 5 {
            store.checkpoint()?;
        }
    }
    Ok(())
}

fn is_storage(outcome: &Result<(), Error>) -> bool {
    matches!(
        outcome,
        Ok(()) | Err(Error::Failed { .. } | Error::Unknown { .. })
    )
}

#[test]
fn every_step_survives_a_loss_of_power() {
    let dry = CrashDisk::new();
    live(&dry, &mut Model::default(), 0, 60).unwrap();
    let steps = dry.steps() + 10;
    for stop in 1..=steps {
        let disk = CrashDisk::new();
        disk.stop_at(stop);
        let mut before = Model::default();
        let outcome = live(&disk, &mut before, 0, 60);
        assert!(is_storage(&outcome), "stop {stop}: {outcome:?}");
        for seed in 0..2 {
            let mut model = before.clone();
            let after = disk.power_loss(seed * 10_000 + stop);
            let context = format!("stop {stop} seed {seed}");
            let store = EmbeddedStore::open(&after.root(), options())
                .unwrap_or_else(|error| panic!("{context}: {error}"));
            model.check(&store, &context);
            drop(store);
            live(&after, &mut model, 1, 8).unwrap_or_else(|e| panic!("{context}: {e}"));
        }
    }
}

#[test]
fn many_losses_in_a_row_lose_nothing_acknowledged() {
    for seed in 0..25 {
        let mut disk = CrashDisk::new();
        let mut model = Model::default();
        for round in 0..12 {
            disk.stop_at(5 + (seed * 31 + round * 57) % 211);
            let outcome = live(&disk, &mut model, round, 60);
            assert!(
                is_storage(&outcome),
                "seed {seed} round {round}: {outcome:?}"
            );
            disk = if (seed + round) % 4 == 0 {
                disk.process_death()
            } else {
                disk.power_loss(seed * 100 + round)
            };
        }
        live(&disk, &mut model, 99, 8).unwrap();
    }
}

#[test]
fn a_failing_device_loses_nothing_acknowledged() {
    let dry = CrashDisk::new();
    live(&dry, &mut Model::default(), 0, 60).unwrap();
    for fail in 1..=dry.steps() {
        let disk = CrashDisk::new();
        disk.fail_at(fail);
        let mut model = Model::default();
        let outcome = live(&disk, &mut model, 0, 60);
        assert!(is_storage(&outcome), "fail {fail}: {outcome:?}");
        let disk = disk.process_death();
        live(&disk, &mut model, 1, 8).unwrap_or_else(|e| panic!("fail {fail}: {e}"));
        let disk = disk.power_loss(fail);
        live(&disk, &mut model, 2, 8).unwrap_or_else(|e| panic!("fail {fail}: {e}"));
    }
}

#[test]
fn a_failed_store_answers_everybody_and_goes_on_reading() {
    let disk = CrashDisk::new();
    let store = Arc::new(EmbeddedStore::open(&disk.root(), options()).unwrap());
    block_on(store.commit(batch(0, 0))).unwrap();
    disk.stop_at(disk.steps() + 1);
    let lost = block_on(store.commit(batch(0, 1)));
    assert!(matches!(lost, Err(Error::Unknown { .. })), "{lost:?}");
    let refused = block_on(store.commit(batch(0, 2)));
    assert!(matches!(refused, Err(Error::Failed { .. })), "{refused:?}");
    let found = store.try_get(b"last").unwrap().unwrap().unwrap();
    assert_eq!(&found.value[..], b"0.0");
}

#[test]
fn missing_parts_are_corruption_and_a_second_opening_is_refused() {
    let filled = || {
        let disk = CrashDisk::new();
        let store = EmbeddedStore::open(&disk.root(), options()).unwrap();
        block_on(store.commit(batch(0, 0))).unwrap();
        (disk, store)
    };
    let (disk, store) = filled();
    assert!(matches!(
        EmbeddedStore::open(&disk.root(), options()),
        Err(Error::InUse)
    ));
    drop(store);
    disk.root().remove("store.redb").unwrap();
    let refused = EmbeddedStore::open(&disk.root(), options()).map(drop);
    assert!(matches!(refused, Err(Error::Corrupt { .. })), "{refused:?}");

    let (disk, store) = filled();
    drop(store);
    let log = disk.root().subdir("log").unwrap();
    for entry in log.list().unwrap() {
        log.remove(&entry.name).unwrap();
    }
    let refused = EmbeddedStore::open(&disk.root(), options()).map(drop);
    assert!(matches!(refused, Err(Error::Corrupt { .. })), "{refused:?}");

    // A log that is older than the checkpoint.
    let (disk, store) = filled();
    drop(store);
    let old: Vec<_> = [
        "log/control",
        "log/segment-00000000",
        "log/segment-00000001",
    ]
    .map(|name| (name, disk.content(name).unwrap()))
    .into();
    let store = EmbeddedStore::open(&disk.root(), options()).unwrap();
    block_on(store.commit(batch(0, 1))).unwrap();
    store.checkpoint().unwrap();
    drop(store);
    for (name, content) in old {
        disk.damage(name, |bytes| bytes.copy_from_slice(&content))
            .unwrap();
    }
    let refused = EmbeddedStore::open(&disk.root(), options()).map(drop);
    assert!(matches!(refused, Err(Error::Corrupt { .. })), "{refused:?}");
}

#[test]
fn numbers_are_never_given_twice_even_to_commits_that_change_nothing() {
    let disk = CrashDisk::new();
    let mut last = None;
    for _ in 0..4 {
        let store = EmbeddedStore::open(&disk.root(), options()).unwrap();
        for _ in 0..3 {
            let revision = block_on(store.commit(Batch::new())).unwrap();
            assert!(Some(revision) > last);
            last = Some(revision);
            store.checkpoint().unwrap();
        }
    }
}
