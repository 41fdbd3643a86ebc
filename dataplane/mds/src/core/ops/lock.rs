//! Lock requests.

use hither_proto::ids::{InodeId, SessionId};
use hither_proto::meta::{Reply, SetLock, TestLock};
use hither_proto::status::Errno;
use hither_proto::stored::HeldLock;

use super::Outcome;
use crate::core::run::{Attempt, Blocker, Core, Stop};

impl Core {
    pub(crate) fn set_lock(&mut self, attempt: &mut Attempt, op: &SetLock) -> Outcome {
        let ino = InodeId(op.ino);
        let lock = own(attempt, op.lock.as_ref())?;
        if op.unlock {
            if self.locks.too_many(ino, &lock, false) {
                return Err(Errno::ENOLCK.into());
            }
            self.locks.set(ino, &lock, false);
        } else {
            self.need_inode(attempt, ino, op.hint.as_ref())?;
            if self.locks.conflict(ino, &lock).is_some() {
                if op.wait {
                    return Err(Stop::Block(Blocker::Lock(ino)));
                }
                return Err(Errno::EAGAIN.into());
            }
            if self.locks.too_many(ino, &lock, true) {
                return Err(Errno::ENOLCK.into());
            }
            self.locks.set(ino, &lock, true);
        }
        attempt.changed = true;
        self.store_locks(ino);
        // A lock that others respect must be known to a successor.
        attempt.depends = self.open.number;
        Ok(Reply::default())
    }

    pub(crate) fn test_lock(&mut self, attempt: &mut Attempt, op: &TestLock) -> Outcome {
        let ino = InodeId(op.ino);
        let lock = own(attempt, op.lock.as_ref())?;
        self.need_inode(attempt, ino, op.hint.as_ref())?;
        let conflict = self.locks.conflict(ino, &lock);
        let holder = conflict.and_then(|held| self.sessions.get(&SessionId(held.session)));
        Ok(Reply {
            conflict,
            conflict_host: holder.map(|holder| holder.host.clone()).unwrap_or_default(),
            conflict_mount_point: holder
                .map(|holder| holder.mount_point.clone())
                .unwrap_or_default(),
            ..Reply::default()
        })
    }
}

/// The lock as the session's own, whatever the message claims.
fn own(attempt: &Attempt, lock: Option<&HeldLock>) -> Result<HeldLock, Stop> {
    let lock = lock.ok_or(Errno::EINVAL)?;
    if lock.start > lock.end {
        return Err(Errno::EINVAL.into());
    }
    Ok(HeldLock {
        session: attempt.session.0,
        ..*lock
    })
}
