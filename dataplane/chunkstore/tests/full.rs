//! A full disk: a clear error, nothing lost, and service again once there is room.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hither_chunkstore::{Error, Medium, Store};
use hither_log::crash::CrashDisk;
use hither_log::{DirEntry, LogDir, LogFile};
use hither_proto::ids::{ChunkId, DiskIndex};

use support::{Room, cluster, content, options, pattern, same, synced, write};

/// What kinds of files have no room to grow.
#[derive(Debug, Default)]
struct Full {
    copies: AtomicBool,
    index: AtomicBool,
    log: AtomicBool,
}

/// A directory on a disk that can be full.
#[derive(Debug)]
struct FullDir {
    below: Arc<dyn LogDir>,
    full: Arc<Full>,
    path: String,
}

#[derive(Debug)]
struct FullFile {
    below: Arc<dyn LogFile>,
    full: Arc<Full>,
    path: String,
}

impl FullFile {
    fn is_full(&self) -> bool {
        let full = &self.full;
        let flag = if self.path.starts_with("chunks/") {
            &full.copies
        } else if self.path.starts_with("log/") {
            &full.log
        } else {
            &full.index
        };
        flag.load(Ordering::Relaxed)
    }

    fn check(&self, end: u64) -> io::Result<()> {
        if self.is_full() && end > self.below.size()? {
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    }
}

impl LogFile for FullFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.below.read_at(buffer, offset)
    }
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        let half = data.len() / 2;
        if self.check(offset + data.len() as u64).is_err() {
            // As a file system would: what fits is written.
            if self.check(offset + half as u64).is_ok() {
                self.below.write_at(&data[..half], offset)?;
            }
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.below.write_at(data, offset)
    }
    fn size(&self) -> io::Result<u64> {
        self.below.size()
    }
    fn set_len(&self, size_bytes: u64) -> io::Result<()> {
        self.check(size_bytes)?;
        self.below.set_len(size_bytes)
    }
    fn punch_hole(&self, offset: u64, size_bytes: u64) -> io::Result<()> {
        self.below.punch_hole(offset, size_bytes)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.below.sync_data()
    }
    fn try_lock(&self) -> io::Result<bool> {
        self.below.try_lock()
    }
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.below.descriptor()
    }
}

impl FullDir {
    fn file(&self, name: &str, below: Arc<dyn LogFile>) -> Arc<dyn LogFile> {
        Arc::new(FullFile {
            below,
            full: Arc::clone(&self.full),
            path: format!("{}{name}", self.path),
        })
    }
}

impl LogDir for FullDir {
    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        Ok(self.file(name, self.below.create(name)?))
    }
    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        Ok(self.file(name, self.below.open(name)?))
    }
    fn list(&self) -> io::Result<Vec<DirEntry>> {
        self.below.list()
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.below.remove(name)
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.below.rename(from, to)
    }
    fn subdir(&self, name: &str) -> io::Result<Arc<dyn LogDir>> {
        Ok(Arc::new(Self {
            below: self.below.subdir(name)?,
            full: Arc::clone(&self.full),
            path: format!("{}{name}/", self.path),
        }))
    }
    fn sync_dir(&self) -> io::Result<()> {
        self.below.sync_dir()
    }
}

fn open(memory: &CrashDisk) -> (Store, hither_chunkstore::Disk, Arc<Full>) {
    let full = Arc::new(Full::default());
    let medium = Medium {
        path: "memory".into(),
        dir: Arc::new(FullDir {
            below: memory.root(),
            full: Arc::clone(&full),
            path: String::new(),
        }),
        probe: Arc::new(Room(AtomicU64::new(1 << 40))),
    };
    let store = Store::open(vec![medium], Some(cluster()), &options()).unwrap();
    let disk = store.disk(DiskIndex(0)).unwrap().clone();
    (store, disk, full)
}

#[test]
fn a_large_write_without_room_is_refused_and_the_copy_stays_readable() {
    let memory = CrashDisk::new();
    let (store, disk, full) = open(&memory);
    let good = pattern(1, 1, 0, 100_000);
    disk.write_wait(synced(write(1, 1, 0, good.clone())))
        .unwrap();
    full.copies.store(true, Ordering::Relaxed);
    let refused = disk.write_wait(write(1, 1, 150_000, pattern(1, 2, 150_000, 300_000)));
    assert_eq!(refused, Err(Error::NoSpace(DiskIndex(0))));
    let refused = disk.write_wait(write(2, 1, 0, pattern(2, 2, 0, 300_000)));
    assert_eq!(refused, Err(Error::NoSpace(DiskIndex(0))));
    same(&content(&disk, 1).unwrap()[..100_000], &good);
    assert_eq!(disk.failure(), None);
    full.copies.store(false, Ordering::Relaxed);
    let new = pattern(1, 3, 150_000, 300_000);
    disk.write_wait(synced(write(1, 1, 150_000, new.clone())))
        .unwrap();
    let all = content(&disk, 1).unwrap();
    same(&all[..100_000], &good);
    same(&all[100_000..150_000], &[0; 50_000]);
    same(&all[150_000..], &new);
    drop((store, disk));
    let (_store, disk, _) = open(&memory.power_loss(1));
    same(&content(&disk, 1).unwrap(), &all);
}

/// Small synced writes until one is refused; the number taken.
fn fill_up(disk: &hither_chunkstore::Disk, from: u64) -> u64 {
    for number in from..from + 4000 {
        let offset = u32::try_from(number).unwrap() * 4096;
        match disk.write_wait(synced(write(1, 1, offset, pattern(1, 1, offset, 4096)))) {
            Ok(()) => {}
            Err(error) => {
                assert_eq!(error, Error::NoSpace(DiskIndex(0)));
                return number;
            }
        }
    }
    panic!("the log has no end");
}

fn check_small(disk: &hither_chunkstore::Disk, count: u64) {
    let bytes = content(disk, 1).unwrap();
    let length = usize::try_from(count).unwrap() * 4096;
    same(&bytes[..length], &pattern(1, 1, 0, length));
}

#[test]
fn when_nothing_can_move_in_place_the_log_takes_what_fits_and_loses_none_of_it() {
    let memory = CrashDisk::new();
    let (store, disk, full) = open(&memory);
    full.copies.store(true, Ordering::Relaxed);
    let count = fill_up(&disk, 0);
    assert!(count > 100, "{count}");
    assert_eq!(disk.failure(), None);
    check_small(&disk, count);
    drop((store, disk));
    let (_store, disk, full) = open(&memory.power_loss(7));
    check_small(&disk, count);
    full.copies.store(true, Ordering::Relaxed);
    assert_eq!(fill_up(&disk, count), count);
    full.copies.store(false, Ordering::Relaxed);
    disk.tidy().unwrap();
    check_small(&disk, count);
    disk.write_wait(synced(write(1, 1, 0, pattern(1, 1, 0, 4096))))
        .unwrap();
}

#[test]
fn when_the_index_cannot_grow_nothing_is_lost_and_it_goes_on_later() {
    let memory = CrashDisk::new();
    let (store, disk, full) = open(&memory);
    full.index.store(true, Ordering::Relaxed);
    let mut made = 0;
    let refused = (1..20_000u64).find_map(|chunk| {
        let outcome = disk.write_wait(synced(write(chunk, 1, 0, pattern(chunk, 1, 0, 100))));
        made += u64::from(outcome.is_ok());
        if chunk % 500 == 0 {
            // Fails once the index cannot grow.
            let _ = disk.tidy();
        }
        outcome.err()
    });
    assert_eq!(refused, Some(Error::NoSpace(DiskIndex(0))));
    assert_eq!(disk.failure(), None);
    let check = |disk: &hither_chunkstore::Disk| {
        for chunk in [1, made / 2, made] {
            same(&content(disk, chunk).unwrap(), &pattern(chunk, 1, 0, 100));
        }
    };
    check(&disk);
    full.index.store(false, Ordering::Relaxed);
    disk.tidy().unwrap();
    disk.write_wait(synced(write(30_000, 1, 0, vec![1])))
        .unwrap();
    drop((store, disk));
    let (_store, disk, _) = open(&memory.power_loss(3));
    check(&disk);
    assert!(disk.entry(ChunkId(30_000)).is_some());
}

#[test]
fn a_log_that_cannot_grow_goes_round_in_what_it_has() {
    let memory = CrashDisk::new();
    let (_store, disk, full) = open(&memory);
    full.log.store(true, Ordering::Relaxed);
    for number in 0..600u32 {
        let offset = number * 4096;
        disk.write_wait(synced(write(1, 1, offset, pattern(1, 1, offset, 4096))))
            .unwrap();
    }
    check_small(&disk, 600);
    assert_eq!(disk.failure(), None);
}
