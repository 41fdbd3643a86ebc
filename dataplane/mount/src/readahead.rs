//! The kernel's read-ahead of a mount.
//!
//! What a FUSE server says when it is mounted only lowers it: the kernel's own 128 KiB stay the
//! most, and every read of a stream comes as many small requests. The mount's entry in sysfs
//! takes more, from whoever may write there.

use std::io;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

/// Sets the read-ahead of what is mounted at `directory`.
///
/// # Errors
/// What the system says, `PermissionDenied` for all but root; the mount works all the same.
pub(crate) fn widen(directory: &Path, bytes: u32) -> io::Result<()> {
    // What the kernel knows already: nobody answers its questions at this moment.
    let known = statx(
        CWD,
        directory,
        AtFlags::STATX_DONT_SYNC,
        StatxFlags::empty(),
    )?;
    let device = format!("{}:{}", known.stx_dev_major, known.stx_dev_minor);
    std::fs::write(
        format!("/sys/class/bdi/{device}/read_ahead_kb"),
        (bytes / 1024).to_string(),
    )
}
