//! The file abstraction: what the log and the stores above it ask of a file system.

use std::fmt::Debug;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::{Advice, FallocateFlags};

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DirEntry {
    /// Name without any path.
    pub name: String,
    /// Whether it is a directory.
    pub is_dir: bool,
}

/// A directory. Names are single path components.
///
/// A change of the directory (create, remove, rename) is durable only after [`LogDir::sync_dir`].
pub trait LogDir: Debug + Send + Sync + 'static {
    /// Creates an empty file for reading and writing; fails with `AlreadyExists`.
    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>>;
    /// Opens an existing file for reading and writing; fails with `NotFound`.
    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>>;
    /// All entries, sorted by name.
    fn list(&self) -> io::Result<Vec<DirEntry>>;
    /// Removes a file. Open handles go on working.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Renames a file inside this directory, replacing the target at once if it exists.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Opens a directory below this one, creating it when it is missing.
    fn subdir(&self, name: &str) -> io::Result<Arc<dyn LogDir>>;
    /// Makes all earlier changes of this directory durable.
    fn sync_dir(&self) -> io::Result<()>;
}

/// An open file.
///
/// Writes are visible to readers at once and durable only after [`LogFile::sync_data`]. When a
/// sync fails, what was written since the last good one may be lost even if a later sync succeeds.
pub trait LogFile: Debug + Send + Sync + 'static {
    /// Fills `buffer` from `offset`; fails with `UnexpectedEof` when the file ends before.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all of `data` at `offset`, growing the file when needed.
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()>;
    /// Size in bytes.
    fn size(&self) -> io::Result<u64>;
    /// Cuts the file or grows it by a hole.
    fn set_len(&self, size_bytes: u64) -> io::Result<()>;
    /// Gives a range's blocks back; it reads as zeros and the size stays.
    fn punch_hole(&self, offset: u64, size_bytes: u64) -> io::Result<()>;
    /// Makes data and size durable.
    fn sync_data(&self) -> io::Result<()>;
    /// Forgets cached content that is not waiting to be written, so that later reads show what the
    /// device has. After a failed sync that may be less than what reads have shown.
    fn drop_cache(&self) -> io::Result<()> {
        Ok(())
    }
    /// Takes the exclusive lock of the file until this handle is dropped; `false` when another
    /// handle has it.
    fn try_lock(&self) -> io::Result<bool>;
    /// The descriptor, for handing it to another process; `None` where there is none.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A directory of the operating system.
#[derive(Debug, Clone)]
pub struct RealDir {
    path: PathBuf,
}

impl RealDir {
    /// Opens the directory at `path`, creating it and what is above it when missing.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        if !path.is_dir() {
            std::fs::create_dir_all(&path)?;
            if let Some(parent) = path
                .parent()
                .filter(|parent| !parent.as_os_str().is_empty())
            {
                File::open(parent)?.sync_all()?;
            }
        }
        Ok(Self { path })
    }

    fn open_with(&self, name: &str, options: &OpenOptions) -> io::Result<Arc<dyn LogFile>> {
        Ok(Arc::new(RealFile {
            file: options.open(self.path.join(name))?,
        }))
    }
}

impl LogDir for RealDir {
    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        self.open_with(
            name,
            OpenOptions::new().read(true).write(true).create_new(true),
        )
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        self.open_with(name, OpenOptions::new().read(true).write(true))
    }

    fn list(&self) -> io::Result<Vec<DirEntry>> {
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(&self.path)? {
            let entry = entry?;
            let is_dir = entry.file_type()?.is_dir();
            // A name that is not UTF-8 is none of ours.
            if let Ok(name) = entry.file_name().into_string() {
                entries.push(DirEntry { name, is_dir });
            }
        }
        entries.sort();
        Ok(entries)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        std::fs::remove_file(self.path.join(name))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.path.join(from), self.path.join(to))
    }

    fn subdir(&self, name: &str) -> io::Result<Arc<dyn LogDir>> {
        Ok(Arc::new(Self::open(self.path.join(name))?))
    }

    fn sync_dir(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }
}

#[derive(Debug)]
struct RealFile {
    file: File,
}

impl LogFile for RealFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn set_len(&self, size_bytes: u64) -> io::Result<()> {
        self.file.set_len(size_bytes)
    }

    fn punch_hole(&self, offset: u64, size_bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(
            &self.file, flags, offset, size_bytes,
        )?)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn drop_cache(&self) -> io::Result<()> {
        Ok(rustix::fs::fadvise(&self.file, 0, None, Advice::DontNeed)?)
    }

    fn try_lock(&self) -> io::Result<bool> {
        match self.file.try_lock() {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }
}
