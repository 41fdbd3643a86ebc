//! Use of a volume, asked from its mount without waiting for it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::decide::publish::source;
use crate::error::Refusal;
use crate::node::kernel;
use crate::node::mountinfo::at;
use crate::node::record::Record;
use crate::rpc::csi::VolumeUsage;
use crate::rpc::csi::volume_usage::Unit;

/// Use of a volume that is mounted at a place.
///
/// # Errors
/// `NotFound` when it is not mounted there, `TooSlow` when the mount does not answer in time.
pub async fn usage(record: &Record, place: &Path) -> Result<Vec<VolumeUsage>, Refusal> {
    let mounts = kernel::mounts()?;
    let is_ours = at(&mounts, place)
        .last()
        .is_some_and(|mount| mount.source == source(&record.handle));
    if !is_ours {
        return Err(Refusal::NotFound(format!(
            "{} is not mounted at {}",
            record.handle,
            place.display()
        )));
    }
    let permit = ASKING
        .try_acquire()
        .map_err(|_| Refusal::Busy("too many mounts of this node do not answer".into()))?;
    let place: PathBuf = place.to_owned();
    let (tell, told) = tokio::sync::oneshot::channel();
    // A thread of its own: a mount that does not answer keeps it, and nothing else.
    let started = std::thread::Builder::new()
        .name("stats".into())
        .spawn(move || {
            let _permit = permit;
            tell.send(ask(&place)).ok();
        });
    started.map_err(|error| Refusal::of_io("start a thread", &error))?;
    match tokio::time::timeout(PATIENCE, told).await {
        Ok(Ok(usage)) => usage,
        Ok(Err(_)) => Err(Refusal::Broken("the asking thread ended".into())),
        Err(_) => Err(Refusal::TooSlow("the mount does not answer".into())),
    }
}

fn ask(place: &Path) -> Result<Vec<VolumeUsage>, Refusal> {
    let refused = |errno: rustix::io::Errno| {
        Refusal::of_io(
            &format!("ask {}", place.display()),
            &std::io::Error::from(errno),
        )
    };
    let space = rustix::fs::statvfs(place).map_err(refused)?;
    let mut used = [0; 64];
    let length = rustix::fs::getxattr(place, USED, &mut used).map_err(refused)?;
    let used = String::from_utf8_lossy(used.get(..length).unwrap_or_default()).into_owned();
    let mut numbers = used.split(' ').map(|n| n.parse::<u64>().unwrap_or(0));
    let (bytes, inodes) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let mut usage = vec![VolumeUsage {
        available: signed(space.f_bavail.saturating_mul(space.f_frsize)),
        total: signed(space.f_blocks.saturating_mul(space.f_frsize)),
        used: signed(bytes),
        unit: Unit::Bytes.into(),
    }];
    // Without a quota there is no number of inodes to be used up.
    if space.f_files != 0 {
        usage.push(VolumeUsage {
            available: signed(space.f_favail),
            total: signed(space.f_files),
            used: signed(inodes),
            unit: Unit::Inodes.into(),
        });
    }
    Ok(usage)
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Attribute of a mount: bytes and inodes below a directory.
const USED: &str = "hither.quota.used";
/// Longest wait for a mount.
const PATIENCE: Duration = Duration::from_secs(2);
/// Mounts that may be asked, or not answer, at a time.
static ASKING: Semaphore = Semaphore::const_new(64);
