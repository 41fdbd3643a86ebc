//! A disk in memory that forgets what was not synced, for crash tests.
//!
//! A [`CrashDisk`] keeps for each file the durable image, the live image and the operations
//! between them. [`CrashDisk::power_loss`] makes the disk that a machine would find after a loss
//! of power: each 512-byte sector of each unsynced write independently survives, is lost or is
//! torn, in a way that a page cache could have produced (a sector holds what it held at some
//! moment, or the start of one such content and the end of another). Unsynced directory entries
//! may vanish one by one. [`CrashDisk::process_death`] keeps everything, synced or not.
//!
//! Steps (writes, syncs, changes of size and of directories) are counted;
//! [`CrashDisk::stop_at`] ends all service at a given step, so a test can enumerate every one, and
//! [`CrashDisk::fail_at`] makes a single step fail as a bad device would.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::dir::{DirEntry, LogDir, LogFile};

/// A disk in memory. Clones are the same disk.
#[derive(Debug, Clone, Default)]
pub struct CrashDisk {
    state: Arc<Mutex<DiskState>>,
}

impl CrashDisk {
    /// An empty disk.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The directory at the root of the disk.
    #[must_use]
    pub fn root(&self) -> Arc<dyn LogDir> {
        Arc::new(CrashDir {
            disk: self.clone(),
            path: String::new(),
        })
    }

    /// How many steps were done so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.state.lock().steps
    }

    /// Ends all service at step number `step` (the first is 1): that step fails but may have left
    /// a trace, everything later fails and leaves none.
    pub fn stop_at(&self, step: u64) {
        self.state.lock().stop_at = Some(step);
    }

    /// Makes step number `step` fail with an I/O error. A failed sync loses what it was to make
    /// durable, and later syncs do not bring it back.
    pub fn fail_at(&self, step: u64) {
        self.state.lock().fail_at = Some(step);
    }

    /// The disk as it could be found after a loss of power now; `seed` picks one of the ways.
    #[must_use]
    pub fn power_loss(&self, seed: u64) -> Self {
        let mut random = Random(seed);
        let state = self.state.lock();
        let mut entries = state.durable_entries.clone();
        for change in &state.entry_changes {
            if random.below(2) == 0 {
                change.apply(&mut entries);
            }
        }
        let files = state.files.iter().map(|(&number, file)| {
            let image = file.after_loss(&mut random);
            (
                number,
                FileState {
                    durable: image.clone(),
                    live: image,
                    ..FileState::default()
                },
            )
        });
        let files = files.collect();
        let after = DiskState {
            files,
            durable_entries: entries.clone(),
            live_entries: entries,
            next_file: state.next_file,
            ..DiskState::default()
        };
        Self {
            state: Arc::new(Mutex::new(after)),
        }
    }

    /// The disk as another process finds it when the one that used it was killed: nothing is
    /// lost, and what was not synced still is not.
    #[must_use]
    pub fn process_death(&self) -> Self {
        let mut after = self.state.lock().clone();
        after.steps = 0;
        after.stop_at = None;
        after.fail_at = None;
        for file in after.files.values_mut() {
            file.locked = false;
        }
        Self {
            state: Arc::new(Mutex::new(after)),
        }
    }

    /// Changes bytes of a file in both images, as a decaying medium would. `path` is relative to
    /// the root, with `/` between components; `change` gets the whole durable content.
    pub fn damage(&self, path: &str, change: impl FnOnce(&mut [u8])) -> io::Result<()> {
        let mut state = self.state.lock();
        let number = state.lookup(path)?;
        let file = state.file(number);
        change(&mut file.durable);
        file.live = file.durable.clone();
        file.pending.clear();
        Ok(())
    }

    /// The live content of a file.
    pub fn content(&self, path: &str) -> io::Result<Vec<u8>> {
        let mut state = self.state.lock();
        let number = state.lookup(path)?;
        Ok(state.file(number).live.clone())
    }
}

#[derive(Debug, Clone, Default)]
struct DiskState {
    files: BTreeMap<u64, FileState>,
    /// Full path to file number; `None` is a directory. Directories are durable at once: nothing
    /// here depends on one that vanishes.
    durable_entries: Entries,
    live_entries: Entries,
    entry_changes: Vec<EntryChange>,
    next_file: u64,
    steps: u64,
    stop_at: Option<u64>,
    fail_at: Option<u64>,
}

type Entries = BTreeMap<String, Option<u64>>;

/// What the caller of [`DiskState::step`] has to do.
#[derive(PartialEq)]
enum Step {
    Go,
    /// Take note of the operation as not synced, then fail.
    LastGasp,
    /// Fail as a bad device would.
    Fail,
}

impl DiskState {
    fn step(&mut self) -> io::Result<Step> {
        self.steps += 1;
        match self.stop_at {
            Some(stop) if self.steps > stop => return Err(stopped()),
            Some(stop) if self.steps == stop => return Ok(Step::LastGasp),
            _ => {}
        }
        if self.fail_at == Some(self.steps) {
            return Ok(Step::Fail);
        }
        Ok(Step::Go)
    }

    fn serving(&self) -> io::Result<()> {
        match self.stop_at {
            Some(stop) if self.steps >= stop => Err(stopped()),
            _ => Ok(()),
        }
    }

    fn lookup(&self, path: &str) -> io::Result<u64> {
        match self.live_entries.get(path) {
            Some(Some(number)) => Ok(*number),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn file(&mut self, number: u64) -> &mut FileState {
        self.files
            .get_mut(&number)
            .expect("files are never dropped from the disk")
    }

    fn change_entries(&mut self, change: EntryChange) -> io::Result<()> {
        let step = self.step()?;
        if step == Step::Fail {
            return Err(device_error());
        }
        change.apply(&mut self.live_entries);
        self.entry_changes.push(change);
        if step == Step::LastGasp {
            Err(stopped())
        } else {
            Ok(())
        }
    }
}

#[derive(Debug, Clone)]
enum EntryChange {
    Create(String, u64),
    Remove(String),
    /// From, to, and the file that is renamed.
    Rename(String, String, u64),
}

impl EntryChange {
    /// Applies the change where it still makes sense: an earlier one may have been lost.
    fn apply(&self, entries: &mut Entries) {
        match self {
            Self::Create(path, number) => {
                entries.insert(path.clone(), Some(*number));
            }
            Self::Remove(path) => {
                entries.remove(path);
            }
            Self::Rename(from, to, number) => {
                if entries.get(from) == Some(&Some(*number)) {
                    entries.remove(from);
                }
                entries.insert(to.clone(), Some(*number));
            }
        }
    }
}

#[derive(Debug, Clone, Default)]
struct FileState {
    durable: Vec<u8>,
    live: Vec<u8>,
    pending: Vec<FileChange>,
    locked: bool,
}

#[derive(Debug, Clone)]
enum FileChange {
    Write { offset: usize, data: Vec<u8> },
    Punch { offset: usize, size_bytes: usize },
    SetLen(usize),
}

impl FileChange {
    fn apply(&self, image: &mut Vec<u8>) {
        self.apply_size(image);
        match self {
            Self::Write { offset, data } => {
                image[*offset..*offset + data.len()].copy_from_slice(data);
            }
            Self::Punch { .. } => {
                let range = self.range(image.len());
                image[range].fill(0);
            }
            Self::SetLen(_) => {}
        }
    }

    fn apply_size(&self, image: &mut Vec<u8>) {
        match self {
            Self::Write { offset, data } if offset + data.len() > image.len() => {
                image.resize(offset + data.len(), 0);
            }
            Self::SetLen(size_bytes) => image.resize(*size_bytes, 0),
            _ => {}
        }
    }

    /// The bytes whose content changes, within an image of this size.
    fn range(&self, image_bytes: usize) -> std::ops::Range<usize> {
        let (start, size_bytes) = match self {
            Self::Write { offset, data } => (*offset, data.len()),
            Self::Punch { offset, size_bytes } => (*offset, *size_bytes),
            Self::SetLen(_) => (0, 0),
        };
        start.min(image_bytes)..start.saturating_add(size_bytes).min(image_bytes)
    }
}

impl FileState {
    fn change(&mut self, change: FileChange) {
        change.apply(&mut self.live);
        self.pending.push(change);
    }

    fn sync(&mut self) {
        for change in self.pending.drain(..) {
            change.apply(&mut self.durable);
        }
    }

    /// What a loss of power leaves. Sizes change in order (a journal keeps them so), data sectors
    /// independently of them and of each other.
    fn after_loss(&self, random: &mut Random) -> Vec<u8> {
        let mut found = self.durable.clone();
        let mut live = self.durable.clone();
        let sizes_kept = random.below(self.pending.len() + 1);
        for (index, change) in self.pending.iter().enumerate() {
            change.apply(&mut live);
            if index < sizes_kept {
                change.apply_size(&mut found);
            }
            let range = change.range(live.len().min(found.len()));
            if range.is_empty() {
                continue;
            }
            for sector in range.start / SECTOR_BYTES..=(range.end - 1) / SECTOR_BYTES {
                let start = sector * SECTOR_BYTES;
                let end = (start + SECTOR_BYTES).min(live.len()).min(found.len());
                let cut = match random.below(4) {
                    0 => start,
                    1 => start + random.below(end - start + 1),
                    _ => end,
                };
                found[start..cut].copy_from_slice(&live[start..cut]);
            }
        }
        found
    }
}

#[derive(Debug)]
struct CrashDir {
    disk: CrashDisk,
    /// Empty or ending in `/`.
    path: String,
}

impl CrashDir {
    fn path(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    fn handle(&self, number: u64) -> Arc<dyn LogFile> {
        Arc::new(CrashFile {
            disk: self.disk.clone(),
            number,
            holds_lock: Mutex::new(false),
        })
    }
}

impl LogDir for CrashDir {
    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        let path = self.path(name);
        let mut state = self.disk.state.lock();
        if state.live_entries.contains_key(&path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let number = state.next_file;
        state.next_file += 1;
        state.files.insert(number, FileState::default());
        state.change_entries(EntryChange::Create(path, number))?;
        Ok(self.handle(number))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        let state = self.disk.state.lock();
        state.serving()?;
        Ok(self.handle(state.lookup(&self.path(name))?))
    }

    fn list(&self) -> io::Result<Vec<DirEntry>> {
        let state = self.disk.state.lock();
        state.serving()?;
        let below = state.live_entries.iter().filter_map(|(path, number)| {
            let name = path.strip_prefix(&self.path)?;
            let here = !name.is_empty() && !name.contains('/');
            here.then(|| DirEntry {
                name: name.to_owned(),
                is_dir: number.is_none(),
            })
        });
        Ok(below.collect())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut state = self.disk.state.lock();
        state.lookup(&self.path(name))?;
        state.change_entries(EntryChange::Remove(self.path(name)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.disk.state.lock();
        let number = state.lookup(&self.path(from))?;
        state.change_entries(EntryChange::Rename(self.path(from), self.path(to), number))
    }

    fn subdir(&self, name: &str) -> io::Result<Arc<dyn LogDir>> {
        let mut state = self.disk.state.lock();
        state.serving()?;
        let path = self.path(name);
        state.live_entries.insert(path.clone(), None);
        state.durable_entries.insert(path.clone(), None);
        Ok(Arc::new(Self {
            disk: self.disk.clone(),
            path: path + "/",
        }))
    }

    fn sync_dir(&self) -> io::Result<()> {
        let mut state = self.disk.state.lock();
        match state.step()? {
            Step::Go => {}
            Step::LastGasp => return Err(stopped()),
            Step::Fail => return Err(device_error()),
        }
        let changes = std::mem::take(&mut state.entry_changes);
        for change in changes {
            let path = match &change {
                EntryChange::Create(path, _) | EntryChange::Remove(path) => path,
                EntryChange::Rename(_, to, _) => to,
            };
            let here = path
                .strip_prefix(&self.path)
                .is_some_and(|name| !name.contains('/'));
            if here {
                change.apply(&mut state.durable_entries);
            } else {
                state.entry_changes.push(change);
            }
        }
        Ok(())
    }
}

#[derive(Debug)]
struct CrashFile {
    disk: CrashDisk,
    number: u64,
    holds_lock: Mutex<bool>,
}

impl CrashFile {
    fn change(&self, change: FileChange) -> io::Result<()> {
        let mut state = self.disk.state.lock();
        let step = state.step()?;
        if step == Step::Fail {
            return Err(device_error());
        }
        state.file(self.number).change(change);
        if step == Step::LastGasp {
            Err(stopped())
        } else {
            Ok(())
        }
    }
}

impl LogFile for CrashFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut state = self.disk.state.lock();
        state.serving()?;
        let start = index(offset)?;
        let end = start.saturating_add(buffer.len());
        let live = &state.file(self.number).live;
        let found = live.get(start..end).ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(found);
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.change(FileChange::Write {
            offset: index(offset)?,
            data: data.to_vec(),
        })
    }

    fn size(&self) -> io::Result<u64> {
        let mut state = self.disk.state.lock();
        state.serving()?;
        Ok(state.file(self.number).live.len() as u64)
    }

    fn set_len(&self, size_bytes: u64) -> io::Result<()> {
        self.change(FileChange::SetLen(index(size_bytes)?))
    }

    fn punch_hole(&self, offset: u64, size_bytes: u64) -> io::Result<()> {
        let (offset, size_bytes) = (index(offset)?, index(size_bytes)?);
        self.change(FileChange::Punch { offset, size_bytes })
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.disk.state.lock();
        match state.step()? {
            Step::Go => {
                state.file(self.number).sync();
                Ok(())
            }
            Step::LastGasp => Err(stopped()),
            Step::Fail => {
                let mut random = Random(state.steps);
                let everything_lost = state.steps.is_multiple_of(2);
                let file = state.file(self.number);
                if !everything_lost {
                    file.durable = file.after_loss(&mut random);
                }
                // The kernel marks the pages clean: nobody will write them again.
                file.pending.clear();
                Err(device_error())
            }
        }
    }

    fn drop_cache(&self) -> io::Result<()> {
        let mut state = self.disk.state.lock();
        state.serving()?;
        let file = state.file(self.number);
        file.live = file.durable.clone();
        for change in &file.pending {
            change.apply(&mut file.live);
        }
        Ok(())
    }

    fn try_lock(&self) -> io::Result<bool> {
        let mut state = self.disk.state.lock();
        state.serving()?;
        let mut holds_lock = self.holds_lock.lock();
        let file = state.file(self.number);
        if file.locked && !*holds_lock {
            return Ok(false);
        }
        file.locked = true;
        *holds_lock = true;
        Ok(true)
    }
}

impl Drop for CrashFile {
    fn drop(&mut self) {
        if *self.holds_lock.lock() {
            self.disk.state.lock().file(self.number).locked = false;
        }
    }
}

/// The splitmix64 generator: enough for choosing faults, and the same on every machine.
#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).expect("the rest is below a usize")
    }
}

fn index(offset: u64) -> io::Result<usize> {
    usize::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn stopped() -> io::Error {
    io::Error::other("the disk has stopped")
}

fn device_error() -> io::Error {
    io::Error::other("injected device error")
}

const SECTOR_BYTES: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn synced_bytes_survive_and_unsynced_sectors_end_as_old_new_or_torn() {
        let mut outcomes = [false; 3];
        for seed in 0..200 {
            let disk = CrashDisk::new();
            let dir = disk.root();
            let file = dir.create("a").unwrap();
            file.write_at(&[1; 1024], 0).unwrap();
            file.sync_data().unwrap();
            dir.sync_dir().unwrap();
            file.write_at(&[2; 512], 512).unwrap();
            let after = disk.power_loss(seed).content("a").unwrap();
            assert_eq!(after[..512], [1; 512]);
            let new = after[512..].iter().filter(|&&byte| byte == 2).count();
            assert!(
                after[512..512 + new].iter().all(|&byte| byte == 2),
                "torn from the front"
            );
            outcomes[match new {
                0 => 0,
                512 => 2,
                _ => 1,
            }] = true;
        }
        assert_eq!(outcomes, [true; 3]);
    }

    #[test]
    fn unsynced_entries_may_vanish_and_synced_ones_stay() {
        let disk = CrashDisk::new();
        let dir = disk.root().subdir("d").unwrap();
        dir.create("kept").unwrap();
        dir.sync_dir().unwrap();
        dir.create("maybe").unwrap();
        let counts = (0..50).map(|seed| {
            disk.power_loss(seed)
                .root()
                .subdir("d")
                .unwrap()
                .list()
                .unwrap()
                .len()
        });
        let counts: Vec<_> = counts.collect();
        assert!(counts.contains(&1) && counts.contains(&2), "{counts:?}");
    }

    #[test]
    fn a_failed_sync_is_not_made_good_by_the_next() {
        let lost = (1..40).filter(|&writes| {
            let disk = CrashDisk::new();
            let file = disk.root().create("a").unwrap();
            disk.root().sync_dir().unwrap();
            for _ in 0..writes {
                file.write_at(&[7; 512], 0).unwrap();
            }
            disk.fail_at(disk.steps() + 1);
            assert!(file.sync_data().is_err());
            file.sync_data().unwrap();
            assert_eq!(file.size().unwrap(), 512);
            let after = disk.power_loss(1).content("a").unwrap();
            file.drop_cache().unwrap();
            assert_eq!(disk.content("a").unwrap(), after);
            disk.power_loss(1).content("a").unwrap() != [7; 512]
        });
        assert!(lost.count() > 0);
    }

    #[test]
    fn a_stopped_disk_serves_nothing_until_it_is_started_again() {
        let disk = CrashDisk::new();
        let file = disk.root().create("a").unwrap();
        disk.stop_at(disk.steps() + 1);
        assert!(file.write_at(b"x", 0).is_err());
        assert!(file.read_at(&mut [0], 0).is_err());
        assert!(file.sync_data().is_err());
        assert_eq!(disk.process_death().content("a").unwrap(), b"x");
    }

    #[test]
    fn a_lock_belongs_to_one_handle() {
        let disk = CrashDisk::new();
        let first = disk.root().create("a").unwrap();
        let second = disk.root().open("a").unwrap();
        assert!(first.try_lock().unwrap() && first.try_lock().unwrap());
        assert!(!second.try_lock().unwrap());
        drop(first);
        assert!(second.try_lock().unwrap());
    }
}
