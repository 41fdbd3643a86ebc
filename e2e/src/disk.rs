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

    /// Takes all space but so many bytes.
    ///
    /// # Panics
    /// When the disk cannot be filled.
    pub fn fill_up_to(&self, free_bytes: u64) {
        let space = rustix::fs::statvfs(&self.at).expect("the disk's space");
        let take = (space.f_bavail * space.f_frsize).saturating_sub(free_bytes);
        let filler = File::create(self.filler()).expect("a file that fills");
        let none = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(&filler, none, 0, take).expect("the space is there");
    }

    /// Takes all the space there is.
    ///
    /// # Panics
    /// When the disk cannot be filled.
    pub fn fill(&self) {
        let filler = File::options()
            .create(true)
            .append(true)
            .open(self.filler());
        let filler = filler.expect("a file that fills");
        let none = rustix::fs::FallocateFlags::empty();
        let mut at = filler.metadata().expect("its size").len();
        // Unwritten extents: quick, and nothing in the file behind the disk.
        let mut piece = 1u64 << 30;
        while piece >= PIECE_MIN {
            match rustix::fs::fallocate(&filler, none, at, piece) {
                Ok(()) => at += piece,
                Err(rustix::io::Errno::NOSPC) => piece /= 2,
                Err(error) => panic!("fill the disk: {error}"),
            }
        }
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

/// Smallest piece that is taken: a block of the file system.
const PIECE_MIN: u64 = 4096;
