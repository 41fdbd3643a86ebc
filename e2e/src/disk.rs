//! A small file system of its own for a chunkserver, which a test can fill.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run;

/// A file system in a file. Dropping it unmounts it.
#[derive(Debug)]
pub struct SmallDisk {
    at: PathBuf,
    mounted: bool,
}

impl SmallDisk {
    /// Makes a file system of so many bytes in `image` and mounts it.
    ///
    /// # Panics
    /// When the system does not let us.
    pub(crate) fn new(image: &Path, at: &Path, bytes: u64) -> Self {
        let file = File::create(image).expect("a file for the disk");
        file.set_len(bytes).expect("the file's size");
        std::fs::create_dir_all(at).expect("a mount point");
        run(Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(image));
        run(Command::new("mount")
            .args(["-o", "loop"])
            .arg(image)
            .arg(at));
        // Disks are directories of their own: an ext4 has a lost+found at its top.
        std::fs::remove_dir(at.join("lost+found")).expect("an empty disk");
        Self {
            at: at.to_owned(),
            mounted: true,
        }
    }

    /// Leaves so many bytes free.
    ///
    /// # Panics
    /// When the disk cannot be filled.
    pub fn fill(&self, free_bytes: u64) {
        let space = rustix::fs::statvfs(&self.at).expect("the disk's space");
        let free = space.f_bavail * space.f_frsize;
        let filler = File::create(self.filler()).expect("a file that fills");
        let take = free.saturating_sub(free_bytes);
        let none = rustix::fs::FallocateFlags::empty();
        // Metadata of the file system takes some too: the last bytes are taken as they come.
        for share in [100u64, 99, 98, 95] {
            if rustix::fs::fallocate(&filler, none, 0, take / 100 * share).is_ok() {
                return;
            }
        }
        panic!("the disk cannot be filled");
    }

    /// Gives the space back.
    ///
    /// # Panics
    /// When the disk was not filled.
    pub fn empty(&self) {
        std::fs::remove_file(self.filler()).expect("the file that fills goes");
    }

    fn filler(&self) -> PathBuf {
        self.at.join("filler")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if std::mem::take(&mut self.mounted) {
            // The loop device goes with its mount.
            let _ = Command::new("umount").arg(&self.at).output();
        }
    }
}
