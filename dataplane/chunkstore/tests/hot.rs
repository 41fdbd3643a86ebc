//! Blocks that are written again and again while others move in place: bytes that are stable are
//! not given up by the log before they are in place.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use hither_chunkstore::{Disk, Medium, Store};
use hither_log::crash::CrashDisk;
use hither_log::{DirEntry, LogDir, LogFile};
use hither_proto::ids::{ChunkId, DiskIndex};
use parking_lot::Mutex;

use support::{cluster, content, medium, options, pattern, same, synced, write};

type Job = Box<dyn FnOnce() + Send>;

/// What is done once, right after the next sync of the log or of a copy.
#[derive(Default, Clone)]
struct After {
    log: Arc<Mutex<Option<Job>>>,
    copy: Arc<Mutex<Option<Job>>>,
}

impl std::fmt::Debug for After {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("After")
    }
}

/// A directory that tells when its files were synced.
#[derive(Debug)]
struct ToldDir {
    below: Arc<dyn LogDir>,
    after: After,
    path: String,
}

#[derive(Debug)]
struct ToldFile {
    below: Arc<dyn LogFile>,
    after: After,
    path: String,
}

impl LogFile for ToldFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.below.read_at(buffer, offset)
    }
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.below.write_at(data, offset)
    }
    fn size(&self) -> io::Result<u64> {
        self.below.size()
    }
    fn set_len(&self, size_bytes: u64) -> io::Result<()> {
        self.below.set_len(size_bytes)
    }
    fn punch_hole(&self, offset: u64, size_bytes: u64) -> io::Result<()> {
        self.below.punch_hole(offset, size_bytes)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.below.sync_data()?;
        let job = if self.path.starts_with("log/segment") {
            self.after.log.lock().take()
        } else if self.path.starts_with("chunks/") {
            self.after.copy.lock().take()
        } else {
            None
        };
        if let Some(job) = job {
            job();
        }
        Ok(())
    }
    fn try_lock(&self) -> io::Result<bool> {
        self.below.try_lock()
    }
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.below.descriptor()
    }
}

impl ToldDir {
    fn file(&self, name: &str, below: Arc<dyn LogFile>) -> Arc<dyn LogFile> {
        Arc::new(ToldFile {
            below,
            after: self.after.clone(),
            path: format!("{}{name}", self.path),
        })
    }
}

impl LogDir for ToldDir {
    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        // A segment keeps the path it was made under.
        let name_later = name.trim_end_matches(".new");
        Ok(self.file(name_later, self.below.create(name)?))
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
            after: self.after.clone(),
            path: format!("{}{name}/", self.path),
        }))
    }
    fn sync_dir(&self) -> io::Result<()> {
        self.below.sync_dir()
    }
}

fn open(memory: &CrashDisk) -> (Store, Disk, After) {
    let after = After::default();
    let told = Medium {
        dir: Arc::new(ToldDir {
            below: memory.root(),
            after: after.clone(),
            path: String::new(),
        }),
        ..medium(memory)
    };
    let store = Store::open(vec![told], Some(cluster()), &options()).unwrap();
    let disk = store.disk(DiskIndex(0)).unwrap().clone();
    (store, disk, after)
}

/// A write to the start of block 0 of chunk 1.
fn hit(disk: &Disk, version: u64) -> Job {
    let disk = disk.clone();
    Box::new(move || disk.write(write(1, 1, 0, pattern(1, version, 0, 100)), |_| {}))
}

/// Bytes [200, 300) of a block are stable, and its first bytes are written again between the flush
/// of the log and the look at what can move, in every pass. The block had lost its hold on the log
/// without having moved, as soon as another block of its chunk moved.
#[test]
fn a_block_that_is_hit_in_every_pass_moves_too() {
    for seed in 0..6 {
        let memory = CrashDisk::new();
        let (store, disk, after) = open(&memory);
        let kept = pattern(1, 1, 200, 100);
        disk.write_wait(synced(write(1, 1, 200, kept.clone())))
            .unwrap();
        let rounds = 14;
        for round in 0..rounds {
            let offset = 50_000 + round * 4096;
            disk.write_wait(write(1, 1, offset, vec![5; 4096])).unwrap();
            for number in 0..40 {
                disk.write_wait(write(2, 1, number * 4096, vec![9; 4096]))
                    .unwrap();
            }
            *after.log.lock() = Some(hit(&disk, u64::from(round)));
            disk.tidy().unwrap();
            assert!(after.log.lock().is_none(), "the pass has flushed the log");
        }
        disk.write_wait(synced(write(3, 1, 0, vec![1]))).unwrap();
        assert!(disk.counters().log_bytes <= 3 * (256 << 10));
        drop((store, disk));
        let (_store, disk, _) = open(&memory.power_loss(seed));
        let found = content(&disk, 1).unwrap();
        same(&found[200..300], &kept);
        same(&found[..100], &pattern(1, u64::from(rounds) - 1, 0, 100));
    }
}

/// The block is hit after its bytes went to the file and before that was noted.
#[test]
fn a_block_that_is_hit_while_it_moves_keeps_both() {
    for seed in 0..6 {
        let memory = CrashDisk::new();
        let (store, disk, after) = open(&memory);
        let kept = pattern(1, 1, 200, 100);
        disk.write_wait(synced(write(1, 1, 200, kept.clone())))
            .unwrap();
        *after.copy.lock() = Some(hit(&disk, 7));
        disk.tidy().unwrap();
        assert!(after.copy.lock().is_none(), "the pass has moved the block");
        for _ in 0..4 {
            for number in 0..60 {
                disk.write_wait(write(2, 1, number * 4096, vec![9; 4096]))
                    .unwrap();
            }
            disk.tidy().unwrap();
        }
        drop((store, disk));
        let (_store, disk, _) = open(&memory.power_loss(seed));
        let found = content(&disk, 1).unwrap();
        same(&found[200..300], &kept);
        same(&found[..100], &pattern(1, 7, 0, 100));
    }
}

/// A block of which a part is in the log is taken as it is after a crash. It may have been damaged
/// as well: only another member can tell, so the copy says that it is to be compared.
#[test]
fn damage_under_bytes_in_the_log_is_left_to_another_member_to_find() {
    for damaged in [false, true] {
        let memory = CrashDisk::new();
        let (_store, disk) = support::open(&memory);
        disk.write_wait(synced(write(1, 1, 0, pattern(1, 1, 0, 8192))))
            .unwrap();
        disk.tidy().unwrap();
        disk.write_wait(synced(write(1, 1, 1000, vec![7; 100])))
            .unwrap();
        let memory = memory.process_death();
        if damaged {
            let path = "chunks/01/0000000000000001";
            memory
                .damage(path, |bytes| bytes[(128 << 10) + 3000] ^= 1)
                .unwrap();
        }
        let (_store, disk) = support::open(&memory);
        let entry = disk.entry(ChunkId(1)).unwrap();
        assert!(disk.may_be_torn(ChunkId(1), &entry), "not looked at yet");
        content(&disk, 1).unwrap();
        let entry = disk.entry(ChunkId(1)).unwrap();
        assert_eq!(disk.may_be_torn(ChunkId(1), &entry), damaged);
    }
}
