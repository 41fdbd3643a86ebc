//! Locks, and who in this mount holds any.

use std::collections::BTreeSet;

use hither_client::FsError;
use hither_proto::ids::InodeId;
use hither_proto::stored::HeldLock;
use parking_lot::Mutex;

use super::Server;
use crate::transport::{Answer, Lock};

pub(super) const F_RDLCK: i32 = 0;
pub(super) const F_WRLCK: i32 = 1;
pub(super) const F_UNLCK: i32 = 2;

/// Owners that have taken locks: the others need no request when they close.
#[derive(Debug, Default)]
pub(super) struct WaitingLocks {
    owners: Mutex<BTreeSet<(InodeId, u64)>>,
}

impl WaitingLocks {
    fn note(&self, ino: InodeId, owner: u64) {
        self.owners.lock().insert((ino, owner));
    }

    /// Whether the owner may hold locks; it is forgotten when it gives everything up for good.
    pub(super) fn forget_owner(&self, ino: InodeId, owner: u64, flock: bool) -> bool {
        let mut owners = self.owners.lock();
        if flock {
            owners.remove(&(ino, owner))
        } else {
            owners.contains(&(ino, owner))
        }
    }
}

impl Server {
    pub(super) async fn getlk(&self, ino: InodeId, lock: Lock) -> Result<Answer, FsError> {
        let conflict = self.client.test_lock(ino, held(&lock)).await?;
        Ok(Answer::Lock(match conflict {
            Some(other) => Lock {
                owner: other.owner,
                start: other.start,
                end: other.end,
                kind: if other.exclusive { F_WRLCK } else { F_RDLCK },
                pid: other.pid,
            },
            None => Lock {
                kind: F_UNLCK,
                ..lock
            },
        }))
    }

    pub(super) async fn setlk(
        &self,
        ino: InodeId,
        lock: Lock,
        sleep: bool,
    ) -> Result<Answer, FsError> {
        if lock.kind == F_UNLCK {
            self.give_up(ino, lock).await?;
        } else {
            self.waiting.note(ino, lock.owner);
            self.client.set_lock(ino, held(&lock), false, sleep).await?;
        }
        Ok(Answer::Done)
    }

    pub(super) async fn give_up(&self, ino: InodeId, lock: Lock) -> Result<(), FsError> {
        self.client.set_lock(ino, held(&lock), true, false).await
    }
}

/// The transport does not say whether flock(2) or fcntl(2) was called: an flock is a lock of the
/// whole range with an owner of its own, and the two see each other, as on NFS.
fn held(lock: &Lock) -> HeldLock {
    HeldLock {
        session: 0,
        owner: lock.owner,
        flock: false,
        exclusive: lock.kind == F_WRLCK,
        start: lock.start,
        end: lock.end,
        pid: lock.pid,
    }
}
