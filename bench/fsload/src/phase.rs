//! The phases: who does what to which file, and how long it took.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use crate::args::{Args, Kind};

/// What a phase took.
#[derive(Debug)]
pub(crate) struct Measured {
    /// Operations done by all threads (entries, for `readdir`).
    pub(crate) operations: usize,
    pub(crate) elapsed: Duration,
    /// Nanoseconds of each call, sorted.
    pub(crate) sorted_ns: Vec<u64>,
    /// Whether the time limit ended it.
    pub(crate) cut_short: bool,
}

/// The files of all threads, and how many there are by now.
#[derive(Debug)]
pub(crate) struct Files<'a> {
    args: &'a Args,
    /// Files each thread has made, under the name `letter` says.
    made: Vec<usize>,
    letter: char,
}

/// What one thread did in one phase.
#[derive(Debug, Default)]
struct Share {
    calls_ns: Vec<u64>,
    operations: usize,
    cut_short: bool,
}

impl<'a> Files<'a> {
    pub(crate) fn new(args: &'a Args) -> Self {
        Self {
            args,
            made: vec![0; args.threads],
            letter: 'f',
        }
    }

    /// Runs a phase with all threads.
    pub(crate) fn measure(&mut self, kind: Kind) -> Result<Measured, String> {
        if kind == Kind::Create {
            self.make_directories()?;
        }
        let threads = self.args.threads;
        let ready = Barrier::new(threads + 1);
        let this = &*self;
        let (elapsed, shares) = thread::scope(|scope| {
            let running: Vec<_> = (0..threads)
                .map(|thread| {
                    let ready = &ready;
                    scope.spawn(move || {
                        ready.wait();
                        this.share(kind, thread)
                    })
                })
                .collect();
            ready.wait();
            let started = Instant::now();
            let shares: Vec<_> = running
                .into_iter()
                .map(thread::ScopedJoinHandle::join)
                .collect();
            (started.elapsed(), shares)
        });
        let mut all = Vec::with_capacity(threads);
        for share in shares {
            all.push(share.map_err(|_| "a thread panicked".to_owned())??);
        }
        self.remember(kind, &all);
        Ok(sum(elapsed, all))
    }

    fn make_directories(&self) -> Result<(), String> {
        for thread in 0..self.args.threads {
            let dir = self.directory(thread);
            fs::create_dir_all(&dir).map_err(|error| failed("mkdir", &dir, &error))?;
        }
        Ok(())
    }

    fn remember(&mut self, kind: Kind, shares: &[Share]) {
        match kind {
            Kind::Create => {
                self.made = shares.iter().map(|share| share.operations).collect();
            }
            Kind::Rename => {
                // A phase that was cut short leaves files under both names: the rest is forgotten,
                // whoever called removes the directory.
                self.made = shares.iter().map(|share| share.operations).collect();
                self.letter = 'g';
            }
            _ => {}
        }
    }

    fn share(&self, kind: Kind, thread: usize) -> Result<Share, String> {
        let made = self.made[thread];
        let neighbour = (thread + 1) % self.args.threads;
        let mut draw = Draw::new(thread);
        match kind {
            Kind::Create => self.each(self.args.files, |i| {
                let path = self.path(thread, i);
                create(&path).map_err(|error| failed("create", &path, &error))
            }),
            Kind::Write => self.each(made.div_ceil(10), |i| {
                let path = self.path(thread, i);
                write(&path).map_err(|error| failed("write", &path, &error))
            }),
            Kind::Stat => self.each(self.made[neighbour], |i| {
                let path = self.path(neighbour, i);
                stat(&path).map_err(|error| failed("stat", &path, &error))
            }),
            Kind::Sample => self.each(self.args.files, |_| {
                let path = self.args.dir.join(format!("f{}", draw.below(self.args.of)));
                stat(&path).map_err(|error| failed("stat", &path, &error))
            }),
            Kind::Readdir => self.each(3, |_| {
                let dir = self.directory(thread);
                list(&dir).map_err(|error| failed("readdir", &dir, &error))
            }),
            Kind::Rename => self.each(made, |i| {
                let (from, to) = (self.path(thread, i), self.path_as('g', thread, i));
                fs::rename(&from, &to)
                    .map(|()| 1)
                    .map_err(|error| failed("rename", &from, &error))
            }),
            Kind::Unlink => self.each(made, |i| {
                let path = self.path(thread, i);
                fs::remove_file(&path)
                    .map(|()| 1)
                    .map_err(|error| failed("unlink", &path, &error))
            }),
        }
    }

    /// Calls `call` for 0..count, until the limit.
    fn each(
        &self,
        count: usize,
        mut call: impl FnMut(usize) -> Result<usize, String>,
    ) -> Result<Share, String> {
        let mut share = Share {
            calls_ns: Vec::with_capacity(count),
            ..Share::default()
        };
        let started = Instant::now();
        let mut before = Duration::ZERO;
        for i in 0..count {
            share.operations += call(i)?;
            let after = started.elapsed();
            share.calls_ns.push(nanoseconds(after - before));
            before = after;
            if after > self.args.limit && i + 1 < count {
                share.cut_short = true;
                break;
            }
        }
        Ok(share)
    }

    fn directory(&self, thread: usize) -> PathBuf {
        if self.args.flat {
            self.args.dir.clone()
        } else {
            self.args.dir.join(format!("t{thread}"))
        }
    }

    fn path(&self, thread: usize, i: usize) -> PathBuf {
        self.path_as(self.letter, thread, i)
    }

    fn path_as(&self, letter: char, thread: usize, i: usize) -> PathBuf {
        let number = if self.args.flat {
            self.args.first + thread * self.args.files + i
        } else {
            self.args.first + i
        };
        self.directory(thread).join(format!("{letter}{number}"))
    }
}

fn create(path: &Path) -> io::Result<usize> {
    OpenOptions::new().write(true).create_new(true).open(path)?;
    Ok(1)
}

fn write(path: &Path) -> io::Result<usize> {
    let file = OpenOptions::new().write(true).open(path)?;
    file.write_all_at(&[0x5a; 4096], 0)?;
    file.sync_all()?;
    Ok(1)
}

fn stat(path: &Path) -> io::Result<usize> {
    fs::symlink_metadata(path)?;
    Ok(1)
}

fn list(dir: &Path) -> io::Result<usize> {
    let mut entries = 0;
    for entry in fs::read_dir(dir)? {
        entry?;
        entries += 1;
    }
    Ok(entries)
}

fn failed(what: &str, path: &Path, error: &io::Error) -> String {
    format!("{what} {}: {error}", path.display())
}

fn sum(elapsed: Duration, shares: Vec<Share>) -> Measured {
    let operations = shares.iter().map(|share| share.operations).sum();
    let cut_short = shares.iter().any(|share| share.cut_short);
    let mut sorted_ns: Vec<u64> = shares
        .into_iter()
        .flat_map(|share| share.calls_ns)
        .collect();
    sorted_ns.sort_unstable();
    Measured {
        operations,
        elapsed,
        sorted_ns,
        cut_short,
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Numbers in no order, the same ones in every run.
#[derive(Debug)]
struct Draw(u64);

impl Draw {
    fn new(thread: usize) -> Self {
        Self(0x9e37_79b9_7f4a_7c15 ^ (thread as u64 + 1).wrapping_mul(0xd134_2543_de82_ef95))
    }

    /// A number below `bound` (0 when `bound` is 0).
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % (bound.max(1) as u64)) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(text: &str, dir: &Path) -> Args {
        let words = std::iter::once(dir.display().to_string())
            .chain(text.split_whitespace().map(str::to_owned));
        Args::parse(words).expect("valid arguments")
    }

    #[test]
    fn a_round_counts_every_operation_and_leaves_nothing() {
        let dir = std::env::temp_dir().join(format!("fsload-{}", std::process::id()));
        let args = args("--threads 3 --files 25 create", &dir);
        let mut files = Files::new(&args);
        let mut done = |kind| files.measure(kind).expect("phase").operations;
        assert_eq!(done(Kind::Create), 75);
        assert_eq!(done(Kind::Write), 9);
        assert_eq!(done(Kind::Stat), 75);
        assert_eq!(done(Kind::Readdir), 225);
        assert_eq!(done(Kind::Rename), 75);
        assert_eq!(done(Kind::Stat), 75);
        assert_eq!(done(Kind::Unlink), 75);
        assert_eq!(done(Kind::Readdir), 0);
        fs::remove_dir_all(&dir).expect("remove");
    }

    #[test]
    fn an_error_names_the_file() {
        let dir = std::env::temp_dir().join(format!("fsload-error-{}", std::process::id()));
        let args = args("--files 1 --flat create", &dir);
        let mut files = Files::new(&args);
        files.measure(Kind::Create).expect("first");
        let error = files.measure(Kind::Create).expect_err("exists");
        assert!(error.contains("/f0"), "{error}");
        fs::remove_dir_all(&dir).expect("remove");
    }

    #[test]
    fn draws_stay_below_their_bound() {
        let mut draw = Draw::new(0);
        assert!((0..1000).all(|_| draw.below(7) < 7));
        assert_eq!(draw.below(0), 0);
    }
}
