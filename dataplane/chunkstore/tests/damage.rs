//! Files of a disk that are damaged: the disk is left out by name, or its copies are as they were,
//! or blocks are named as bad. Never other bytes, never a panic.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use hither_chunkstore::{Error, StoreOptions};
use hither_log::crash::CrashDisk;
use hither_proto::ids::ChunkId;

use support::{content, open_with, options, pattern, write};

const PAGE: usize = 4096;
/// Ways of [`damage_page`].
const WAYS: usize = 4;

/// What every chunk holds; `None`: it was deleted.
type State = BTreeMap<u64, Option<Vec<u8>>>;

fn small() -> StoreOptions {
    StoreOptions {
        threads: 1,
        ..options()
    }
}

/// A disk whose index was written several times, left closed or as by a killed process.
fn filled(closed: bool) -> (CrashDisk, State) {
    let memory = CrashDisk::new();
    let (store, disk) = open_with(&memory, &small()).unwrap();
    let mut state = State::new();
    for round in 0..4u64 {
        for chunk in round * 5..round * 5 + 40 {
            let length = usize::try_from(chunk * 97 % 4000 + round * 3000 + 1).unwrap();
            let bytes = pattern(chunk, round, 0, length);
            disk.write_wait(write(chunk, round + 1, 0, bytes.clone()))
                .unwrap();
            state.insert(chunk, Some(bytes));
        }
        disk.delete(&[ChunkId(round * 5)]).unwrap();
        state.insert(round * 5, None);
        disk.tidy().unwrap();
    }
    // Only in the log.
    for chunk in [30, 60] {
        let bytes = pattern(chunk, 9, 0, 15_000);
        disk.write_wait(support::synced(write(chunk, 20, 0, bytes.clone())))
            .unwrap();
        state.insert(chunk, Some(bytes));
    }
    let after = if closed {
        store.close().unwrap();
        memory.clone()
    } else {
        memory.process_death()
    };
    drop((store, disk));
    (after, state)
}

enum Found {
    Refused(String),
    Read { bad: usize },
}

/// Opens a damaged disk and compares everything in it.
fn look(memory: &CrashDisk, expected: &State, what: &str) -> Found {
    let looked = catch_unwind(AssertUnwindSafe(|| {
        let disk = match open_with(memory, &small()) {
            Ok((_store, disk)) => disk,
            Err(error) => return Found::Refused(error.to_string()),
        };
        let mut bad = 0;
        for (chunk, bytes) in expected {
            match (content(&disk, *chunk), bytes) {
                (Ok(found), Some(bytes)) if found == *bytes => {}
                (Err(Error::NoSuchChunk(_) | Error::Deleted(_)), None) => {}
                (Err(Error::BadBlock { .. }), Some(_)) => bad += 1,
                (found, _) => panic!(
                    "{what}: chunk {chunk}: {:?}",
                    found.map(|found| found.len())
                ),
            }
        }
        disk.close().unwrap();
        Found::Read { bad }
    }));
    looked.unwrap_or_else(|_| panic!("{what}: a panic"))
}

#[track_caller]
fn refused_for(found: Found, file: &str, what: &str) -> bool {
    match found {
        Found::Refused(text) => {
            assert!(text.contains(file), "{what}: {text}");
            true
        }
        Found::Read { bad } => {
            assert_eq!(bad, 0, "{what}");
            false
        }
    }
}

#[test]
fn a_damaged_index_is_named_or_was_not_in_use() {
    for closed in [true, false] {
        let (whole, state) = filled(closed);
        let size = whole.content("index").unwrap().len();
        let mut count = 0;
        for page in 0..size / PAGE {
            let range = page * PAGE..(page + 1) * PAGE;
            for way in 0..WAYS {
                let memory = whole.process_death();
                let mut name = "";
                memory
                    .damage("index", |bytes| {
                        name = damage_page(&mut bytes[range.clone()], way, page);
                    })
                    .unwrap();
                let what = format!("closed {closed}, page {page}: {name}");
                let found = look(&memory, &state, &what);
                count += usize::from(refused_for(found, "index", &what));
            }
        }
        assert!(count > 10, "{count} of {} pages", size / PAGE);
    }
}

#[test]
fn a_header_of_the_index_with_any_flipped_bit_is_named_or_was_not_needed() {
    for closed in [true, false] {
        let (whole, state) = filled(closed);
        for at in (usize::from(closed)..320).step_by(3) {
            let memory = whole.process_death();
            memory
                .damage("index", |bytes| bytes[at] ^= 1 << (at % 8))
                .unwrap();
            let what = format!("closed {closed}, byte {at}");
            refused_for(look(&memory, &state, &what), "index", &what);
        }
    }
}

#[test]
fn an_index_that_ends_early_is_named() {
    let (whole, state) = filled(true);
    let size = whole.content("index").unwrap().len();
    let mut ends: Vec<usize> = (0..size / PAGE).map(|page| page * PAGE).collect();
    ends.extend([1, 8, 63, 64, 319, 320, 5000, size - 1]);
    for end in ends {
        let memory = whole.process_death();
        let file = memory.root().open("index").unwrap();
        file.set_len(end as u64).unwrap();
        drop(file);
        let what = format!("ends at {end}");
        refused_for(look(&memory, &state, &what), "index", &what);
    }
}

/// All ways for a page at the start of a file and for one that is in use, for others one in turn:
/// each way takes much time.
fn ways(page: usize, in_use: bool) -> std::ops::Range<usize> {
    if page < 2 || in_use {
        0..WAYS
    } else {
        page % WAYS..page % WAYS + 1
    }
}

/// The ways a page of a file may be damaged.
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
fn a_damaged_log_is_named_or_was_not_in_use() {
    let (whole, state) = filled(true);
    let log = whole.root().subdir("log").unwrap();
    let names: Vec<String> = log
        .list()
        .unwrap()
        .into_iter()
        .map(|entry| entry.name)
        .collect();
    let mut count = 0;
    for name in names.iter().filter(|name| *name != "lock") {
        let path = format!("log/{name}");
        let size = whole.content(&path).unwrap().len();
        for page in 0..size.div_ceil(PAGE) {
            let range = page * PAGE..(page * PAGE + PAGE).min(size);
            for way in ways(page, false) {
                let memory = whole.process_death();
                let mut name = "";
                memory
                    .damage(&path, |bytes| {
                        name = damage_page(&mut bytes[range.clone()], way, page);
                    })
                    .unwrap();
                let what = format!("{path}, page {page}: {name}");
                count += usize::from(refused_for(look(&memory, &state, &what), "log", &what));
            }
        }
        for end in [0, 1, 100, size / 2, size - 1] {
            let memory = whole.process_death();
            let dir = memory.root().subdir("log").unwrap();
            dir.open(name).unwrap().set_len(end as u64).unwrap();
            let what = format!("{path} ends at {end}");
            refused_for(look(&memory, &state, &what), "log", &what);
        }
        let memory = whole.process_death();
        memory.root().subdir("log").unwrap().remove(name).unwrap();
        let what = format!("{path} is missing");
        refused_for(look(&memory, &state, &what), "log", &what);
    }
    assert!(count > 3, "{count}");
}

#[test]
fn damage_to_files_of_copies_is_named_block_by_block() {
    let (whole, state) = filled(true);
    let mut found_bad = 0;
    for chunk in [7u64, 30, 41] {
        let (dir, name) = (format!("{:02x}", chunk & 0xff), format!("{chunk:016x}"));
        let path = format!("chunks/{dir}/{name}");
        let content = whole.content(&path).unwrap();
        let size = content.len();
        for page in 0..size.div_ceil(PAGE) {
            let range = page * PAGE..(page * PAGE + PAGE).min(size);
            let in_use = content[range.clone()].iter().any(|byte| *byte != 0);
            for way in ways(page, in_use) {
                let memory = whole.process_death();
                let mut name = "";
                memory
                    .damage(&path, |bytes| {
                        name = damage_page(&mut bytes[range.clone()], way, page);
                    })
                    .unwrap();
                let what = format!("{path}, page {page}: {name}");
                found_bad += bad_copies(look(&memory, &state, &what), &what);
            }
        }
        for end in [0, 1, 4096, size / 2, size - 1] {
            let memory = whole.process_death();
            let dir = memory.root().subdir("chunks").unwrap().subdir(&dir);
            let file = dir.unwrap().open(&name).unwrap();
            file.set_len(end as u64).unwrap();
            let what = format!("{path} ends at {end}");
            found_bad += bad_copies(look(&memory, &state, &what), &what);
        }
        let memory = whole.process_death();
        let from = memory.root().subdir("chunks").unwrap().subdir(&dir);
        from.unwrap().remove(&name).unwrap();
        let what = format!("{path} is missing");
        found_bad += bad_copies(look(&memory, &state, &what), &what);
    }
    assert!(found_bad > 10, "{found_bad}");
}

/// At most the copy whose file was damaged is bad.
#[track_caller]
fn bad_copies(found: Found, what: &str) -> usize {
    match found {
        Found::Read { bad } if bad <= 1 => bad,
        Found::Read { bad } => panic!("{what}: {bad} bad copies"),
        Found::Refused(text) => panic!("{what}: {text}"),
    }
}

/// A directory where a file should be, and the other way round.
#[test]
fn a_thing_of_the_wrong_kind_is_named() {
    use hither_chunkstore::{Medium, Store};
    let open = |path: &std::path::Path| {
        let store = Store::open(
            vec![Medium::real(path).unwrap()],
            Some(support::cluster()),
            &small(),
        )?;
        let failed = store.states().into_iter().find_map(|state| {
            let failure = state.failure?;
            Some(format!("{}: {failure}", state.path))
        });
        match failed {
            Some(cause) => Err(Error::BadRequest(cause.leak())),
            None => Ok(store),
        }
    };
    for name in [
        "identity",
        "lock",
        "index",
        "log",
        "log/control",
        "log/segment-00000000",
        "chunks",
        "chunks/07",
    ] {
        let temp = tempfile::tempdir().unwrap();
        let store = open(temp.path()).unwrap();
        let disk = store.disks().next().unwrap();
        disk.write_wait(support::synced(write(7, 1, 0, pattern(7, 1, 0, 100_000))))
            .unwrap();
        store.close().unwrap();
        drop(store);
        let path = temp.path().join(name);
        if path.is_dir() {
            std::fs::remove_dir_all(&path).unwrap();
            std::fs::write(&path, b"a file").unwrap();
        } else {
            std::fs::remove_file(&path).unwrap();
            std::fs::create_dir(&path).unwrap();
        }
        let opened = catch_unwind(AssertUnwindSafe(|| open(temp.path()).map(drop)));
        let error = opened
            .unwrap_or_else(|_| panic!("{name}: a panic"))
            .expect_err(name);
        let text = error.to_string();
        assert!(
            text.contains(&temp.path().display().to_string()),
            "{name}: {text}"
        );
    }
}
