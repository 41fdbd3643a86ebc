//! Checksum-verified load on mounts while something happens to their cluster.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::{eventually, pattern};

/// Writes files, fsyncs and reads them back until told to stop; each is verified.
fn work(mount: &Path, worker: u64, stop: &AtomicBool, done: &AtomicU64) {
    let base = mount.join(format!("w{worker}"));
    fs::create_dir_all(&base).expect("a directory");
    let mut n = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let path = base.join(format!("f{}", n % 40));
        let size = 500 + usize::try_from(n * 7919 % 200_000).unwrap_or(0);
        let id = worker << 32 | n;
        let mut file = fs::File::create(&path).expect("create");
        file.write_all(&pattern(id, 0, size)).expect("write");
        file.sync_all().expect("fsync");
        drop(file);
        assert!(
            fs::read(&path).expect("read") == pattern(id, 0, size),
            "{} differs",
            path.display()
        );
        n += 1;
        done.fetch_add(1, Ordering::Relaxed);
    }
}

/// Runs the load on all mounts while `fault` happens; it is given a function that waits until so
/// many more files have been written and verified.
///
/// # Panics
/// When an operation of the load fails or it does not go on.
pub fn under_load(mounts: &[PathBuf], fault: impl FnOnce(&dyn Fn(u64))) {
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        // Whatever happens here, the workers end: a scope waits for them.
        let _stops = StopAtEnd(&stop);
        let workers: Vec<_> = mounts
            .iter()
            .zip(1u64..)
            .map(|(mount, n)| {
                let (stop, done) = (&stop, &done);
                scope.spawn(move || work(mount, n, stop, done))
            })
            .collect();
        let more = |count: u64| {
            let from = done.load(Ordering::Relaxed);
            eventually(GOES_ON_IN, "the load goes on", || {
                let ended = workers.iter().any(|worker| worker.is_finished());
                assert!(!ended, "the load has failed");
                done.load(Ordering::Relaxed) >= from + count
            });
        };
        more(20);
        fault(&more);
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.join().expect("every operation succeeds");
        }
    });
}

struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Files written without fsync: answered early, perhaps in no store yet.
#[derive(Debug)]
pub struct Early {
    name: String,
}

impl Early {
    /// Writes them through a mount.
    ///
    /// # Panics
    /// When one cannot be written.
    #[must_use]
    pub fn write(mount: &Path, name: &str) -> Self {
        for n in 0..EARLY_FILES {
            let path = mount.join(format!("{name}-{n}"));
            fs::write(path, pattern(n, 0, 100)).expect("written");
        }
        Self {
            name: name.to_owned(),
        }
    }

    /// Reads them through another mount.
    ///
    /// # Panics
    /// When one is not there or differs.
    pub fn verify(&self, mount: &Path) {
        for n in 0..EARLY_FILES {
            let path = mount.join(format!("{}-{n}", self.name));
            let seen = fs::read(&path);
            let seen = seen.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(seen == pattern(n, 0, 100), "{} differs", path.display());
        }
    }
}

/// Files of one [`Early`].
const EARLY_FILES: u64 = 50;
/// Longest wait for the load: longer than any fault takes to be overcome.
const GOES_ON_IN: Duration = Duration::from_secs(60);
