//! A full disk: a clear error, nothing lost, and service again once there is room.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hither_chunkstore::{Disk, Error, Medium, Probe, Space, Store, StoreOptions};
use hither_log::crash::CrashDisk;
use hither_log::{DirEntry, LogDir, LogFile};
use hither_proto::ids::{ChunkId, DiskIndex};

use support::{cluster, content, options, pattern, same, synced, write};

/// What kinds of files have no room to grow.
#[derive(Debug, Default)]
struct Full {
    copies: AtomicBool,
    index: AtomicBool,
    log: AtomicBool,
    /// Bytes that all files may have together; 0: no limit.
    limit: AtomicU64,
    used: AtomicU64,
}

impl Full {
    fn take(&self, bytes: u64) -> io::Result<()> {
        let limit = self.limit.load(Ordering::Relaxed);
        if bytes == 0 {
            return Ok(());
        }
        let used = self.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if limit > 0 && used > limit {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    }

    fn free(&self) -> u64 {
        let (limit, used) = (&self.limit, &self.used);
        match limit.load(Ordering::Relaxed) {
            0 => 1 << 40,
            limit => limit.saturating_sub(used.load(Ordering::Relaxed)),
        }
    }
}

/// Room of a disk that can be full.
#[derive(Debug)]
struct Left(Arc<Full>);

impl Probe for Left {
    fn space(&self) -> io::Result<Space> {
        Ok(Space {
            total_bytes: 1 << 40,
            free_bytes: self.0.free(),
        })
    }
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
        let size = self.below.size()?;
        if self.is_full() && end > size {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.full.take(end.saturating_sub(size))
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
        let cut = self.below.size()?.saturating_sub(size_bytes);
        self.full.used.fetch_sub(cut, Ordering::Relaxed);
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
        let size = self.below.open(name)?.size()?;
        self.below.remove(name)?;
        self.full.used.fetch_sub(size, Ordering::Relaxed);
        Ok(())
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

fn open(memory: &CrashDisk) -> (Store, Disk, Arc<Full>) {
    open_with(memory, &options())
}

fn open_with(memory: &CrashDisk, options: &StoreOptions) -> (Store, Disk, Arc<Full>) {
    let full = Arc::new(Full::default());
    let medium = Medium {
        path: "memory".into(),
        dir: Arc::new(FullDir {
            below: memory.root(),
            full: Arc::clone(&full),
            path: String::new(),
        }),
        probe: Arc::new(Left(Arc::clone(&full))),
    };
    let store = Store::open(vec![medium], Some(cluster()), options).unwrap();
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
fn fill_up(disk: &Disk, from: u64) -> u64 {
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

fn check_small(disk: &Disk, count: u64) {
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
    let check = |disk: &Disk| {
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

/// Small synced writes to chunks 1 to 8 in turn until one is refused; how many each has taken.
fn fill_all(disk: &Disk) -> [u32; 8] {
    let mut counts = [0u32; 8];
    loop {
        for (chunk, count) in (1..).zip(&mut counts) {
            let offset = *count * 4096;
            let bytes = pattern(chunk, 1, offset, 4096);
            match disk.write_wait(synced(write(chunk, 1, offset, bytes))) {
                Ok(()) => *count += 1,
                Err(error) => {
                    assert_eq!(error, Error::NoSpace(DiskIndex(0)));
                    return counts;
                }
            }
        }
    }
}

fn check_all(disk: &Disk, chunks: std::ops::RangeInclusive<u64>, counts: &[u32; 8]) {
    for chunk in chunks {
        let length = counts[usize::try_from(chunk).unwrap() - 1] as usize * 4096;
        same(
            &content(disk, chunk).unwrap()[..length],
            &pattern(chunk, 1, 0, length),
        );
    }
}

/// The disk is full to the last byte, the log too: freeing needs room in the log, and that needed
/// room on the disk.
#[test]
fn a_disk_full_to_the_last_byte_takes_writes_again_once_chunks_are_freed() {
    for limit in [4_000_000, 4_200_000, 4_400_000, 4_700_001] {
        let memory = CrashDisk::new();
        let no_floor = StoreOptions {
            floor_bytes: 0,
            ..options()
        };
        let (store, disk, full) = open_with(&memory, &no_floor);
        full.limit.store(limit, Ordering::Relaxed);
        let counts = fill_all(&disk);
        assert!(counts[0] > 50, "{counts:?}");
        assert_eq!(disk.tidy(), Err(Error::NoSpace(DiskIndex(0))));
        disk.delete(&[ChunkId(1), ChunkId(2)]).unwrap();
        disk.delete(&[ChunkId(3), ChunkId(4)]).unwrap();
        for number in 0..10 {
            let op = write(5, 1, counts[4] * 4096 + number * 4096, vec![5; 4096]);
            disk.write_wait(synced(op)).unwrap();
        }
        disk.write_wait(synced(write(9, 1, 0, vec![6; 4096])))
            .unwrap();
        disk.tidy().unwrap();
        check_all(&disk, 5..=8, &counts);
        assert_eq!(disk.failure(), None);
        drop((store, disk));
        let (_store, disk, _) = open_with(&memory.power_loss(limit), &no_floor);
        check_all(&disk, 5..=8, &counts);
        assert_eq!(
            content(&disk, 1),
            Err(Error::NoSuchChunk(ChunkId(1))),
            "freed for good"
        );
    }
}

/// Copies do not grow below the floor, so what is in the log can always move.
#[test]
fn below_the_floor_copies_do_not_grow_and_what_is_logged_still_moves() {
    let memory = CrashDisk::new();
    // Growth ends at half of it; the log may still grow, which is to fit too.
    let options = StoreOptions {
        floor_bytes: 6 << 20,
        ..options()
    };
    let (_store, disk, full) = open_with(&memory, &options);
    full.limit.store(9_000_000, Ordering::Relaxed);
    disk.space().unwrap();
    let counts = fill_all(&disk);
    assert!(counts[0] > 50, "{counts:?}");
    disk.tidy().unwrap();
    assert!(full.free() > 0 && full.free() < 3 << 20);
    // What is there may be written for as long as one likes.
    for round in 0..200 {
        let offset = round % counts[0] * 4096;
        let bytes = pattern(1, 1, offset, 4096);
        disk.write_wait(synced(write(1, 1, offset, bytes))).unwrap();
    }
    let more = write(1, 1, counts[0] * 4096, vec![5; 100_000]);
    assert_eq!(disk.write_wait(more), Err(Error::NoSpace(DiskIndex(0))));
    disk.tidy().unwrap();
    check_all(&disk, 1..=8, &counts);
    let freed: Vec<ChunkId> = (2..=7).map(ChunkId).collect();
    disk.delete(&freed).unwrap();
    disk.write_wait(write(1, 1, counts[0] * 4096, vec![5; 100_000]))
        .unwrap();
}

/// A hole inside a copy has no room of its own.
#[test]
fn far_below_the_floor_holes_are_not_filled() {
    let memory = CrashDisk::new();
    let (_store, disk, full) = open(&memory);
    disk.write_wait(synced(write(1, 1, 0, vec![5; 4096])))
        .unwrap();
    disk.write_wait(synced(write(1, 1, 1 << 20, vec![5; 4096])))
        .unwrap();
    disk.tidy().unwrap();
    full.limit.store(1, Ordering::Relaxed);
    assert!(disk.is_full(&disk.space().unwrap()));
    let refused = disk.write_wait(write(1, 1, 8192, vec![5; 4096]));
    assert_eq!(refused, Err(Error::NoSpace(DiskIndex(0))));
    disk.write_wait(synced(write(1, 1, 100, vec![6; 3000])))
        .unwrap();
}
