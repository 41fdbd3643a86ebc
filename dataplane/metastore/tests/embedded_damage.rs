//! A damaged database is refused by name, or read as it was: never other content, never a panic,
//! and a refusal leaves the file as it is.

#![allow(clippy::unwrap_used, reason = "a failed helper fails its test")]

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use futures::executor::block_on;
use hither_log::crash::CrashDisk;
use hither_metastore::{Batch, EmbeddedOptions, EmbeddedStore, Error, KeyRange, MetaStore};

const FILE: &str = "store.redb";
const PAGE: usize = 4096;
/// Ways of [`damage_page`].
const WAYS: usize = 4;

type State = BTreeMap<Vec<u8>, Vec<u8>>;

fn options() -> EmbeddedOptions {
    EmbeddedOptions {
        log_segment_bytes: 64 << 10,
        log_segments_max: 3,
        cache_bytes: 1 << 20,
        ..EmbeddedOptions::default()
    }
}

fn state_of(store: &EmbeddedStore) -> Result<State, Error> {
    let entries = block_on(store.scan(&KeyRange::all(), 0))?.entries;
    Ok(entries
        .into_iter()
        .map(|entry| (entry.key.to_vec(), entry.versioned.value.to_vec()))
        .collect())
}

/// A store of a few dozen pages, left closed or as by a killed process, and what is in it.
fn filled(closed: bool) -> (CrashDisk, State) {
    let disk = CrashDisk::new();
    let store = EmbeddedStore::open(&disk.root(), options()).unwrap();
    for round in 0..6u32 {
        for part in 0..4u32 {
            let mut batch = Batch::new();
            for key in 0..25u32 {
                let number = part * 25 + key;
                let byte = u8::try_from((number * 7 + round) % 251).unwrap() + 1;
                let length = (number % 13 * 40 + 10) as usize;
                let key = format!("key {number:04}");
                batch.put(key.into_bytes(), vec![byte; length]);
            }
            block_on(store.commit(batch)).unwrap();
        }
        store.checkpoint().unwrap();
    }
    let state = state_of(&store).unwrap();
    if closed {
        drop(store);
        return (disk, state);
    }
    let after = disk.process_death();
    (after, state)
}

/// Opens a damaged store and says whether it was refused.
fn refused(disk: &CrashDisk, expected: &State, what: &str) -> bool {
    let before = disk.content(FILE).unwrap();
    let opened = catch_unwind(AssertUnwindSafe(|| {
        let store = EmbeddedStore::open(&disk.root(), options())?;
        state_of(&store)
    }));
    match opened.unwrap_or_else(|_| panic!("{what}: a panic")) {
        Ok(found) => {
            assert!(found == *expected, "{what}: other content");
            false
        }
        Err(Error::Corrupt { cause }) => {
            assert!(cause.contains(FILE), "{what}: {cause}");
            // redb notes in the header how long it finds the file.
            let after = disk.content(FILE).unwrap();
            let same = after.len() == before.len() && after.get(PAGE..) == before.get(PAGE..);
            assert!(same, "{what}: the file was changed");
            true
        }
        Err(other) => panic!("{what}: {other:?}"),
    }
}

/// Damages a page in one of several ways.
fn damage_page(bytes: &mut [u8], way: usize, page: usize) -> &'static str {
    match way {
        0 => {
            let at = (page * 997 + 64) % bytes.len();
            bytes[at] ^= 1 << (page % 8);
            "a flipped bit"
        }
        1 => {
            let at = page % 16;
            bytes[at] ^= 4;
            "a flipped bit at its start"
        }
        2 => {
            bytes.fill(0);
            "zeros"
        }
        _ => {
            for (number, byte) in bytes.iter_mut().enumerate() {
                *byte = u8::try_from((number * 31 + page * 17) % 256).unwrap();
            }
            "other bytes"
        }
    }
}

#[test]
fn a_damaged_page_is_refused_or_was_not_in_use() {
    for closed in [true, false] {
        let (whole, state) = filled(closed);
        let size = whole.content(FILE).unwrap().len();
        let mut count = 0;
        for page in 0..size / PAGE {
            let range = page * PAGE..(page + 1) * PAGE;
            for way in 0..WAYS {
                let disk = whole.process_death();
                let mut name = "";
                disk.damage(FILE, |bytes| {
                    name = damage_page(&mut bytes[range.clone()], way, page);
                })
                .unwrap();
                let what = format!("closed {closed}, page {page}: {name}");
                count += usize::from(refused(&disk, &state, &what));
            }
        }
        assert!(count > 40, "{count} of {} pages", size / PAGE);
    }
}

#[test]
fn a_header_with_any_flipped_bit_is_refused_or_was_not_needed() {
    let (whole, state) = filled(true);
    for at in 0..320 {
        let disk = whole.process_death();
        disk.damage(FILE, |bytes| bytes[at] ^= 1 << (at % 8))
            .unwrap();
        refused(&disk, &state, &format!("byte {at}"));
    }
}

#[test]
fn a_file_that_ends_early_is_refused() {
    for closed in [true, false] {
        let (whole, state) = filled(closed);
        let size = whole.content(FILE).unwrap().len();
        let mut ends: Vec<usize> = (0..size / PAGE).map(|page| page * PAGE).collect();
        ends.extend([1, 8, 63, 64, 319, 320, 5000, size - 1]);
        for end in ends {
            let disk = whole.process_death();
            let file = disk.root().open(FILE).unwrap();
            file.set_len(end as u64).unwrap();
            drop(file);
            refused(&disk, &state, &format!("closed {closed}, ends at {end}"));
        }
    }
}

/// What was verified when it was opened may be damaged later.
#[test]
fn damage_under_an_open_store_ends_in_an_error() {
    let (whole, _) = filled(true);
    let options = EmbeddedOptions {
        cache_bytes: 0,
        ..options()
    };
    let size = whole.content(FILE).unwrap().len();
    for seed in 0..8usize {
        let disk = whole.process_death();
        let store = EmbeddedStore::open(&disk.root(), options.clone()).unwrap();
        disk.damage(FILE, |bytes| {
            for (number, byte) in bytes[PAGE..size].iter_mut().enumerate() {
                *byte = u8::try_from((number * 31 + seed * 17) % 251).unwrap();
            }
        })
        .unwrap();
        let read = state_of(&store);
        assert!(
            matches!(read, Err(Error::Corrupt { .. })),
            "{seed}: {read:?}"
        );
        let found = block_on(store.get(b"key 0042"));
        assert!(
            matches!(found, Err(Error::Corrupt { .. })),
            "{seed}: {found:?}"
        );
        let mut batch = Batch::new();
        batch.put(&b"key 0042"[..], &b"new"[..]);
        block_on(store.commit(batch)).unwrap();
        let moved = store.checkpoint();
        assert!(
            matches!(moved, Err(Error::Corrupt { .. })),
            "{seed}: {moved:?}"
        );
        drop(store);
        let again = EmbeddedStore::open(&disk.root(), options.clone()).map(drop);
        assert!(
            matches!(again, Err(Error::Corrupt { .. })),
            "{seed}: {again:?}"
        );
    }
}
