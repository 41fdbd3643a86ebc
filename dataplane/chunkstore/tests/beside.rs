//! What happens beside a sync or between two attempts, step by step.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hither_chunkstore::{Disk, Error, Medium, Store, TrimOp};
use hither_log::crash::CrashDisk;
use hither_log::{DirEntry, LogDir, LogFile};
use hither_proto::ids::{ChunkId, DiskIndex, Epoch, LeaseId};
use parking_lot::Mutex;

use support::{GROUP, Room, cluster, content, open_with, options, pattern, same, write};

type Hook = Box<dyn FnOnce() + Send>;

/// What is done to the files of copies.
#[derive(Default)]
struct Faults {
    /// Called once, when a file was synced and nobody knows yet.
    after_sync: Mutex<Option<Hook>>,
    /// Files cannot be cut: no space for the file system's own records.
    no_cut: AtomicBool,
    /// The file of this name cannot grow.
    no_growth: Mutex<Option<String>>,
}

impl std::fmt::Debug for Faults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Faults")
    }
}

#[derive(Debug)]
struct FaultyDir {
    below: Arc<dyn LogDir>,
    faults: Arc<Faults>,
    copies: bool,
}

#[derive(Debug)]
struct FaultyFile {
    below: Arc<dyn LogFile>,
    faults: Arc<Faults>,
    name: String,
}

impl LogFile for FaultyFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.below.read_at(buffer, offset)
    }
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        let grows = offset + data.len() as u64 > self.below.size()?;
        if grows && self.faults.no_growth.lock().as_ref() == Some(&self.name) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.below.write_at(data, offset)
    }
    fn size(&self) -> io::Result<u64> {
        self.below.size()
    }
    fn set_len(&self, size_bytes: u64) -> io::Result<()> {
        if self.faults.no_cut.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.below.set_len(size_bytes)
    }
    fn punch_hole(&self, offset: u64, size_bytes: u64) -> io::Result<()> {
        self.below.punch_hole(offset, size_bytes)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.below.sync_data()?;
        let hook = self.faults.after_sync.lock().take();
        if let Some(hook) = hook {
            hook();
        }
        Ok(())
    }
    fn drop_cache(&self) -> io::Result<()> {
        self.below.drop_cache()
    }
    fn try_lock(&self) -> io::Result<bool> {
        self.below.try_lock()
    }
}

impl FaultyDir {
    fn file(&self, name: &str, below: Arc<dyn LogFile>) -> Arc<dyn LogFile> {
        if !self.copies {
            return below;
        }
        Arc::new(FaultyFile {
            below,
            faults: Arc::clone(&self.faults),
            name: name.to_owned(),
        })
    }
}

impl LogDir for FaultyDir {
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
            faults: Arc::clone(&self.faults),
            copies: self.copies || name == "chunks",
        }))
    }
    fn sync_dir(&self) -> io::Result<()> {
        self.below.sync_dir()
    }
}

fn open_faulty(memory: &CrashDisk) -> (Store, Disk, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    let medium = Medium {
        path: "memory".into(),
        dir: Arc::new(FaultyDir {
            below: memory.root(),
            faults: Arc::clone(&faults),
            copies: false,
        }),
        probe: Arc::new(Room(AtomicU64::new(1 << 40))),
    };
    let store = Store::open(vec![medium], Some(cluster()), &options()).unwrap();
    let disk = store.disk(DiskIndex(0)).unwrap().clone();
    (store, disk, faults)
}

#[test]
fn a_write_beside_a_sync_is_not_taken_for_stable() {
    let mut torn = 0;
    for seed in 0..20 {
        let memory = CrashDisk::new();
        let (store, disk, faults) = open_faulty(&memory);
        let first = pattern(1, 1, 0, 100_000);
        disk.write_wait(write(1, 1, 0, first.clone())).unwrap();
        let beside = disk.clone();
        *faults.after_sync.lock() = Some(Box::new(move || {
            // In the part of the file that was just synced, and behind.
            std::thread::spawn(move || {
                let late = pattern(1, 2, 50_000, 150_000);
                beside.write_wait(write(1, 1, 50_000, late)).unwrap();
            })
            .join()
            .unwrap();
        }));
        disk.flush_wait(&[ChunkId(1)]).unwrap();
        // Everything there is a record of is durable, the late bytes are not.
        disk.checkpoint().unwrap();
        let memory = memory.power_loss(seed);
        drop((store, disk));
        let (_store, disk) = open_with(&memory, &options()).unwrap();
        let found = content(&disk, 1).unwrap();
        same(&found[..50_000], &first[..50_000]);
        torn += disk.counters().torn_blocks;
    }
    assert!(torn > 0);
}

fn trim() -> TrimOp {
    TrimOp {
        chunk: ChunkId(1),
        group: GROUP,
        lease: LeaseId(2),
        epoch: Epoch(3),
        offset: 70_000,
        length: 0,
    }
}

#[test]
fn a_trim_that_failed_is_remembered_until_it_is_done() {
    let memory = CrashDisk::new();
    let (store, disk, faults) = open_faulty(&memory);
    let bytes = pattern(1, 1, 0, 200_000);
    disk.write_wait(write(1, 1, 0, bytes.clone())).unwrap();
    disk.flush_wait(&[ChunkId(1)]).unwrap();
    faults.no_cut.store(true, Ordering::Relaxed);
    assert_eq!(disk.trim(&trim()), Err(Error::NoSpace(DiskIndex(0))));
    // The log lets go of what it may, and notes that when it is closed.
    disk.checkpoint().unwrap();
    store.close().unwrap();
    drop((store, disk));
    let (_store, disk) = open_with(&memory, &options()).unwrap();
    disk.write_wait(write(1, 3, 150_000, vec![9; 10])).unwrap();
    let found = content(&disk, 1).unwrap();
    same(&found[..70_000], &bytes[..70_000]);
    assert!(found[70_000..150_000].iter().all(|byte| *byte == 0));
}

#[test]
fn a_trim_that_failed_does_not_hold_the_log_for_ever() {
    let memory = CrashDisk::new();
    let (_store, disk, faults) = open_faulty(&memory);
    disk.write_wait(write(1, 1, 0, pattern(1, 1, 0, 200_000)))
        .unwrap();
    faults.no_cut.store(true, Ordering::Relaxed);
    assert!(disk.trim(&trim()).is_err());
    let fill = |from: u32| {
        (from..from + 600)
            .try_for_each(|number| disk.write_wait(write(2, 1, number * 4096, vec![5; 4096])))
    };
    assert_eq!(fill(0), Err(Error::NoSpace(DiskIndex(0))));
    faults.no_cut.store(false, Ordering::Relaxed);
    fill(600).unwrap();
}

#[test]
fn an_index_that_could_not_be_synced_is_not_trusted_from_memory() {
    let run = |fail_after: Option<u64>| {
        let memory = CrashDisk::new();
        let (_store, disk) = open_with(&memory, &options()).unwrap();
        for chunk in 1..150 {
            disk.write_wait(write(chunk, 1, 0, vec![1; 100])).unwrap();
        }
        disk.flush_all().unwrap();
        let before = memory.steps();
        if let Some(steps) = fail_after {
            memory.fail_at(before + steps);
        }
        let outcome = disk.checkpoint();
        let steps = memory.steps() - before;
        assert_eq!(
            outcome.is_err(),
            fail_after.is_some_and(|after| after <= steps)
        );
        (memory, steps)
    };
    let (_, steps) = run(None);
    for step in 1..=steps {
        let (memory, _) = run(Some(step));
        // The process is started anew; memory still has what the device has not.
        let memory = memory.process_death();
        let (store, disk) = open_with(&memory, &options()).unwrap();
        disk.write_wait(write(777, 1, 0, vec![1; 100])).unwrap();
        disk.checkpoint().unwrap();
        drop((store, disk));
        for seed in 0..5 {
            let (_store, disk) = open_with(&memory.power_loss(seed), &options())
                .unwrap_or_else(|error| panic!("step {step} seed {seed}: {error}"));
            for chunk in 1..150 {
                same(&content(&disk, chunk).unwrap(), &[1; 100]);
            }
        }
    }
}

/// A copy without room for its bytes ended the pass: the copies that were to be synced with it had
/// been taken for synced, and were answered as stable without a sync.
#[test]
fn a_copy_without_room_stops_no_other() {
    for seed in 0..20 {
        let memory = CrashDisk::new();
        let (store, disk, faults) = open_faulty(&memory);
        let large = pattern(1, 1, 0, 100_000);
        for chunk in [1, 3] {
            disk.write_wait(write(chunk, 1, 0, large.clone())).unwrap();
            disk.write_wait(write(chunk, 1, 200_000, pattern(1, 1, 200_000, 100)))
                .unwrap();
        }
        disk.write_wait(write(2, 1, 0, vec![5; 100])).unwrap();
        *faults.no_growth.lock() = Some(format!("{:016x}", 2));
        assert_eq!(disk.tidy(), Err(Error::NoSpace(DiskIndex(0))));
        assert_eq!(
            disk.counters().overlay_bytes,
            4096 + 128,
            "only chunk 2 is left"
        );
        disk.flush_wait(&[ChunkId(1), ChunkId(2), ChunkId(3)])
            .unwrap();
        drop((store, disk));
        let (_store, disk) = open_with(&memory.power_loss(seed), &options()).unwrap();
        for chunk in [1, 3] {
            let found = content(&disk, chunk).unwrap();
            same(&found[..100_000], &large);
            same(&found[200_000..], &pattern(1, 1, 200_000, 100));
        }
        same(&content(&disk, 2).unwrap(), &[5; 100]);
    }
}
