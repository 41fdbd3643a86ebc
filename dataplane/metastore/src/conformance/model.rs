//! Random batches, compared with a map.

use std::collections::BTreeMap;

use super::{Harness, Random, all};
use crate::batch::Batch;
use crate::error::Error;
use crate::store::MetaStore;
use crate::types::{KeyRange, Revision, Versioned};

/// Hundreds of small random batches do what they do to a map.
pub async fn random_batches<H: Harness>(harness: &H) {
    let store = harness.store().await;
    let mut model: BTreeMap<Vec<u8>, Versioned> = BTreeMap::new();
    let mut random = Random(0x68_6974_6865_7221);
    let mut failures = 0;
    for step in 0..300 {
        let batch = random_batch(&mut random, &model, step);
        let expected = batch
            .preconditions()
            .iter()
            .position(|precondition| !precondition.holds(model.get(&precondition.key()[..])));
        match (store.commit(batch.clone()).await, expected) {
            (Ok(revision), None) => apply(&mut model, &batch, revision),
            (Err(Error::PreconditionFailed { index }), Some(expected)) => {
                assert_eq!(index, expected, "step {step}: {batch:?}");
                failures += 1;
            }
            (outcome, expected) => panic!("step {step}: {outcome:?}, not {expected:?}: {batch:?}"),
        }
        if step % 10 == 0 || step > 290 {
            let found = all(&store).await;
            let found: Vec<_> = found
                .into_iter()
                .map(|entry| (entry.key.to_vec(), entry.versioned))
                .collect();
            let expected: Vec<_> = model.clone().into_iter().collect();
            assert_eq!(found, expected, "step {step}: {batch:?}");
        }
    }
    assert!((20..280).contains(&failures), "{failures} batches failed");
}

fn random_batch(random: &mut Random, model: &BTreeMap<Vec<u8>, Versioned>, step: u32) -> Batch {
    let mut batch = Batch::new();
    for _ in 0..random.below(3) {
        let key = random_key(random);
        match (model.get(&key), random.below(6)) {
            // Mostly what holds, now and then what does not.
            (_, 0) | (None, 1..=4) => batch.require_absent(key),
            (Some(now), 1 | 2) => batch.require_revision(key, now.revision),
            (Some(now), 3 | 4) => batch.require_value(key, now.value.clone()),
            _ => batch.require_value(key, "unlikely"),
        };
    }
    for _ in 0..random.below(3) / 2 {
        let range = KeyRange {
            start: random_key(random).into(),
            end: None,
        };
        let end = random_key(random);
        batch.delete_range(KeyRange {
            end: Some(end.into()),
            ..range
        });
    }
    for _ in 0..random.below(5) {
        let key = random_key(random);
        if random.below(4) == 0 {
            batch.delete(key);
        } else {
            batch.put(key, format!("value {step}"));
        }
    }
    batch
}

fn random_key(random: &mut Random) -> Vec<u8> {
    let length = 1 + random.below(2);
    (0..length)
        .map(|_| b"abcdef\xff"[usize::try_from(random.below(7)).unwrap_or(0)])
        .collect()
}

fn apply(model: &mut BTreeMap<Vec<u8>, Versioned>, batch: &Batch, revision: Revision) {
    for range in batch.range_deletes() {
        model.retain(|key, _| !range.contains(key));
    }
    for (key, value) in batch.changes() {
        match value {
            Some(value) => {
                let versioned = Versioned {
                    value: value.clone(),
                    revision,
                };
                model.insert(key.to_vec(), versioned);
            }
            None => {
                model.remove(&key[..]);
            }
        }
    }
}
