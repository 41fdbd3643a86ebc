//! Random operations on one file through two mounts, against a model in memory.
#![cfg(feature = "live")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;

use hither_e2e::{Cluster, pattern};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// Largest file of the run: more than one chunk, with holes.
const SIZE_MAX: u64 = 70 << 20;
const STEPS: usize = 600;

#[test]
fn two_mounts_agree_with_a_model() {
    let seed = std::env::var("SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(20_261_130);
    println!("seed {seed} (SEED=… runs another)");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let mounts = [
        cluster.mount("a", "preflabels=zone=a"),
        cluster.mount("b", "preflabels=zone=b"),
    ];
    File::create(mounts[0].join("f")).unwrap();
    let open = |at: &std::path::PathBuf| {
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(at.join("f"))
            .unwrap()
    };
    let mut files = [open(&mounts[0]), open(&mounts[1])];
    let mut model: Vec<u8> = Vec::new();
    for step in 0..STEPS {
        let who = rng.random_range(0..2);
        let file = &files[who];
        // Mostly near the start, now and then over the border of two chunks.
        let offset = if rng.random_bool(0.05) {
            (64 << 20) - rng.random_range(0..200_000)
        } else {
            rng.random_range(0..400_000)
        };
        let length = rng.random_range(1..100_000usize);
        let before = model.len();
        match rng.random_range(0..10) {
            0..=3 => {
                let data = pattern(step as u64 + 1, offset, length);
                println!("{step}: {who} writes {length} at {offset} (size {before})");
                file.write_all_at(&data, offset).unwrap();
                let end = usize::try_from(offset).unwrap() + length;
                if model.len() < end {
                    model.resize(end, 0);
                }
                model[end - length..end].copy_from_slice(&data);
            }
            4 => {
                let size = rng.random_range(0..SIZE_MAX.min(offset * 2 + 1));
                println!("{step}: {who} cuts to {size} (was {before})");
                file.set_len(size).unwrap();
                model.resize(usize::try_from(size).unwrap(), 0);
            }
            5 => {
                println!("{step}: {who} syncs");
                file.sync_all().unwrap();
            }
            6 if rng.random_bool(0.2) => files[who] = open(&mounts[who]),
            _ => {
                println!("{step}: {who} reads {length} at {offset} (size {before})");
                let mut seen = vec![1; length];
                let got = file.read_at(&mut seen, offset).unwrap();
                let from = usize::try_from(offset).unwrap().min(model.len());
                let expected = &model[from..(from + length).min(model.len())];
                assert_eq!(
                    got,
                    expected.len(),
                    "step {step}: length at {offset}, size now {:?}",
                    file.metadata()
                );
                let wrong = seen[..got].iter().zip(expected).position(|(a, b)| a != b);
                assert_eq!(wrong, None, "step {step}: byte at {offset} + that differs");
            }
        }
        let size = files[1 - who].metadata().unwrap().len();
        assert_eq!(
            size,
            model.len() as u64,
            "step {step}: size as the other mount sees it"
        );
    }
    for (name, at) in ["a", "b"].iter().zip(&mounts) {
        assert!(
            std::fs::read(at.join("f")).unwrap() == model,
            "the whole file through {name}"
        );
    }
}

/// Two mounts append records to one file at the same time, and each makes its own stable now and
/// then: every record is there once, and nobody gets an error.
#[test]
fn two_mounts_append_to_one_file() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let mounts = [
        cluster.mount("a", "preflabels=zone=a"),
        cluster.mount("b", "preflabels=zone=b"),
    ];
    std::thread::scope(|scope| {
        for (writer, mount) in mounts.iter().enumerate() {
            scope.spawn(move || {
                let mut file = OpenOptions::new()
                    .append(true)
                    .create(true)
                    .open(mount.join("log"))
                    .unwrap();
                for n in 0..APPENDS {
                    let record = format!("{:<599}\n", format!("{writer} {n}"));
                    file.write_all(record.as_bytes()).unwrap();
                    if n % 5 == 0 {
                        file.sync_all().unwrap();
                    }
                }
            });
        }
    });
    let mut seen: Vec<String> = std::fs::read_to_string(mounts[1].join("log"))
        .unwrap()
        .lines()
        .map(|line| line.trim_end().to_owned())
        .collect();
    seen.sort_unstable();
    let mut expected: Vec<String> = (0..2)
        .flat_map(|writer| (0..APPENDS).map(move |n| format!("{writer} {n}")))
        .collect();
    expected.sort_unstable();
    assert!(seen == expected, "{} records", seen.len());
}

/// Records each mount appends.
const APPENDS: usize = 2000;
