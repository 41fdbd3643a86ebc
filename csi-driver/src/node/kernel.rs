//! Mounts of this node, made and taken away. None of these calls waits for a file system.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, mount_remount, unmount};

use super::mountinfo::{self, Mount};
use crate::error::Refusal;

/// The mounts of this process's namespace.
///
/// # Errors
/// `Broken` when the table cannot be read.
pub fn mounts() -> Result<Vec<Mount>, Refusal> {
    let bytes = std::fs::read("/proc/self/mountinfo")
        .map_err(|error| Refusal::of_io("read the table of mounts", &error))?;
    Ok(mountinfo::parse(&String::from_utf8_lossy(&bytes)))
}

/// Mounts a new FUSE connection and answers its descriptor, which nobody serves yet.
///
/// # Errors
/// `Broken` when the kernel refuses.
pub fn mount_fuse(source: &str, at: &Path) -> Result<OwnedFd, Refusal> {
    let opened = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    let device = opened.map_err(|error| refused("open /dev/fuse", error))?;
    let data = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
        device.as_raw_fd()
    );
    let data = CString::new(data).map_err(|_| refused("mount", Errno::INVAL))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    mount(source, at, FS_TYPE, flags, Some(data.as_c_str()))
        .map_err(|error| refused(&format!("mount at {}", at.display()), error))?;
    Ok(device)
}

/// Shows what is at one place at another too.
///
/// # Errors
/// `Broken` when the kernel refuses.
pub fn bind(from: &Path, to: &Path) -> Result<(), Refusal> {
    mount_bind(from, to).map_err(|error| refused(&format!("bind at {}", to.display()), error))
}

/// Gives a bind mount its options.
///
/// # Errors
/// `Broken` when the kernel refuses.
pub fn set_options(at: &Path, options: &[String]) -> Result<(), Refusal> {
    let flags = MountFlags::BIND | flags(options);
    mount_remount(at, flags, "")
        .map_err(|error| refused(&format!("set the options at {}", at.display()), error))
}

/// Takes away all mounts at a place: at once out of sight, in the end when nobody uses them.
///
/// # Errors
/// `Broken` when the kernel refuses.
pub fn detach_all(at: &Path) -> Result<(), Refusal> {
    for _ in 0..STACK_MAX {
        if mountinfo::at(&mounts()?, at).is_empty() {
            return Ok(());
        }
        match unmount(at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
            Err(error) => return Err(refused(&format!("unmount {}", at.display()), error)),
        }
    }
    Err(Refusal::Busy(format!(
        "{} is mounted again and again",
        at.display()
    )))
}

/// Ends a FUSE connection, given the device number of its mount: whoever serves it is told, and
/// whoever uses it gets an error.
///
/// # Errors
/// `Broken` when the kernel refuses.
pub fn end_connection(device: &str) -> Result<(), Refusal> {
    let connections = Path::new("/sys/fs/fuse/connections");
    let minor = device.rsplit(':').next().unwrap_or_default();
    let abort = connections.join(minor).join("abort");
    if mountinfo::at(&mounts()?, connections).is_empty() {
        mount("fusectl", connections, "fusectl", MountFlags::empty(), None)
            .map_err(|error| refused("mount the kernel's list of FUSE connections", error))?;
    }
    match std::fs::write(&abort, "1") {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Refusal::of_io(
            &format!("end the connection of {device}"),
            &error,
        )),
        _ => Ok(()),
    }
}

/// Makes the directory a mount goes to, if it is not there.
///
/// # Errors
/// `Broken` when it cannot be made.
pub fn make_directory(at: &Path) -> Result<(), Refusal> {
    use std::os::unix::fs::DirBuilderExt as _;
    match std::fs::DirBuilder::new().mode(0o750).create(at) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(Refusal::of_io(&format!("make {}", at.display()), &error))
        }
        _ => Ok(()),
    }
}

/// Removes the directory a mount was at. What is in it stays: nothing of a volume is ever there.
///
/// # Errors
/// `Broken` when it cannot be removed.
pub fn remove_directory(at: &Path) -> Result<(), Refusal> {
    match std::fs::remove_dir(at) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Refusal::of_io(&format!("remove {}", at.display()), &error))
        }
        _ => Ok(()),
    }
}

/// Whether the machine can mount FUSE at all.
#[must_use]
pub fn has_fuse() -> bool {
    File::open("/dev/fuse").is_ok()
}

fn flags(options: &[String]) -> MountFlags {
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    for option in options {
        match option.as_str() {
            "ro" => flags |= MountFlags::RDONLY,
            "rw" => flags &= !MountFlags::RDONLY,
            "nosuid" => flags |= MountFlags::NOSUID,
            "suid" => flags &= !MountFlags::NOSUID,
            "nodev" => flags |= MountFlags::NODEV,
            "dev" => flags &= !MountFlags::NODEV,
            "noexec" => flags |= MountFlags::NOEXEC,
            "exec" => flags &= !MountFlags::NOEXEC,
            "noatime" => flags |= MountFlags::NOATIME,
            "nodiratime" => flags |= MountFlags::NODIRATIME,
            "relatime" => flags |= MountFlags::RELATIME,
            "atime" => flags &= !MountFlags::NOATIME,
            _ => {}
        }
    }
    flags
}

fn refused(doing: &str, errno: Errno) -> Refusal {
    Refusal::of_io(doing, &io::Error::from(errno))
}

/// Type of the mounts.
pub const FS_TYPE: &str = "fuse.hither";
/// Mounts at one place that are taken away; more means that somebody makes them meanwhile.
const STACK_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_option_wins() {
        let of =
            |options: &[&str]| flags(&options.iter().map(|o| (*o).to_owned()).collect::<Vec<_>>());
        assert!(of(&["ro"]).contains(MountFlags::RDONLY | MountFlags::NOSUID));
        assert!(!of(&["ro", "rw"]).contains(MountFlags::RDONLY));
        assert!(!of(&["suid"]).contains(MountFlags::NOSUID));
        assert!(of(&["noexec", "noatime"]).contains(MountFlags::NOEXEC | MountFlags::NOATIME));
    }
}
