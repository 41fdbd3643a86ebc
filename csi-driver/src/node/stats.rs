//! Use of a volume, asked from its mount without waiting for it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedMutexGuard, Semaphore, SemaphorePermit};

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
    let turn = ASKED.turn(&record.handle).await?;
    let place: PathBuf = place.to_owned();
    let (tell, told) = tokio::sync::oneshot::channel();
    // A thread of its own: a mount that does not answer keeps it, and nothing else.
    let started = std::thread::Builder::new()
        .name("stats".into())
        .spawn(move || {
            let _turn = turn;
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
const ASKED_MAX: usize = 64;
/// The mounts of this node.
static ASKED: Asked = Asked::new();

/// Who is being asked: each volume once, so that one that does not answer takes no place of others.
struct Asked {
    volumes: Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>,
    room: Semaphore,
}

/// The right to ask a mount.
struct Turn<'a> {
    _room: SemaphorePermit<'a>,
    _volume: OwnedMutexGuard<()>,
}

impl Asked {
    const fn new() -> Self {
        Self {
            volumes: Mutex::new(BTreeMap::new()),
            room: Semaphore::const_new(ASKED_MAX),
        }
    }

    async fn turn(&self, volume: &str) -> Result<Turn<'_>, Refusal> {
        let one = {
            let mut volumes = self.volumes.lock();
            // Those that nobody asks or waits for.
            volumes.retain(|_, one| Arc::strong_count(one) > 1);
            Arc::clone(volumes.entry(volume.to_owned()).or_default())
        };
        let silent = |_| Refusal::TooSlow("the mount does not answer who asked before".into());
        let volume = tokio::time::timeout(PATIENCE, one.lock_owned()).await;
        let volume = volume.map_err(silent)?;
        let many = |_| Refusal::Busy("too many mounts of this node do not answer".into());
        Ok(Turn {
            _room: self.room.try_acquire().map_err(many)?,
            _volume: volume,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_mount_that_does_not_answer_is_asked_once() {
        let asked = Asked::new();
        let stuck = asked.turn("stuck").await.unwrap();
        for _ in 0..2 * ASKED_MAX {
            let again = asked.turn("stuck").await.map(|_| ());
            assert!(matches!(again, Err(Refusal::TooSlow(_))));
        }
        assert_eq!(asked.room.available_permits(), ASKED_MAX - 1);
        assert!(asked.turn("other").await.is_ok());
        drop(stuck);
        // Two pods have it: who comes second waits a moment.
        let first = asked.turn("stuck").await.unwrap();
        let second = asked.turn("stuck");
        let answered = async move {
            tokio::time::sleep(PATIENCE / 2).await;
            drop(first);
        };
        assert!(tokio::join!(second, answered).0.is_ok());
        assert!(asked.volumes.lock().len() <= 2);
    }
}
