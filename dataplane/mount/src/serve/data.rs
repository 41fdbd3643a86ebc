//! Files: open, create, read, write, close.

use std::sync::Arc;

use bytes::Bytes;
use hither_client::{FsError, OpenFile, SetAttributes};
use hither_proto::ids::InodeId;
use hither_proto::meta::{Caller, Create};
use hither_proto::status::Errno;

use super::{O_ACCMODE, Server};
use crate::transport::{Answer, Lock, Opened};

const O_RDONLY: i32 = 0;
const O_WRONLY: i32 = 1;
const O_TRUNC: i32 = 0o1000;
const O_APPEND: i32 = 0o2000;
const O_EXCL: i32 = 0o200;
const O_SYNC: i32 = 0o4_010_000;
const O_DSYNC: i32 = 0o10_000;
const O_DIRECT: i32 = 0o40_000;

const FALLOC_KEEP_SIZE: i32 = 1;
const FALLOC_PUNCH_HOLE: i32 = 2;
const FALLOC_ZERO_RANGE: i32 = 16;

impl Server {
    pub(super) async fn open(&self, ino: InodeId, flags: i32) -> Result<Answer, FsError> {
        let open = self
            .client
            .open(ino, flags & O_APPEND != 0, syncs(flags))
            .await?;
        Ok(Answer::Opened(self.keep(open, flags)))
    }

    pub(super) async fn create(
        &self,
        parent: InodeId,
        name: Bytes,
        mode: u32,
        flags: i32,
        caller: Caller,
    ) -> Result<Answer, FsError> {
        let request = Create {
            parent: parent.0,
            name,
            mode,
            uid: caller.uid,
            gid: caller.gid,
            exclusive: flags & O_EXCL != 0,
            open_for_write: flags & O_ACCMODE != 0,
            ..Create::default()
        };
        let mut created = self.client.create(request, caller).await?;
        let inode = &created.found.attributes.inode;
        let ino = InodeId(inode.ino);
        if created.existed {
            // Another mount has just made it; the kernel takes it for new and checks nothing.
            if !may_open(inode.mode, inode.uid, flags, caller) {
                return Err(Errno::EACCES.into());
            }
            if flags & O_TRUNC != 0 {
                let empty = SetAttributes {
                    size: Some(0),
                    ..SetAttributes::default()
                };
                created.found.attributes = self.client.set_attributes(ino, empty, caller).await?;
            }
        }
        let open = self
            .client
            .open(ino, flags & O_APPEND != 0, syncs(flags))
            .await?;
        let opened = self.keep(open, flags);
        Ok(Answer::Created(self.entry(created.found), opened))
    }

    fn keep(&self, open: Arc<OpenFile>, flags: i32) -> Opened {
        let handle = self.handle();
        // At its own end of file only the daemon can append.
        let direct = open.append || flags & O_DIRECT != 0;
        self.files.lock().insert(handle, open);
        // Pages are dropped whenever the lease they were read under is taken back.
        Opened {
            handle,
            direct,
            keep_cache: true,
        }
    }

    pub(super) async fn write(
        &self,
        handle: u64,
        offset: u64,
        data: Bytes,
        from_cache: bool,
    ) -> Result<Answer, FsError> {
        let open = self.file(handle)?;
        let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
        if from_cache {
            self.client.write_back(&open, offset, data).await?;
        } else {
            self.client.write(&open, offset, data).await?;
        }
        Ok(Answer::Written(length))
    }

    pub(super) async fn flush(
        &self,
        ino: InodeId,
        handle: u64,
        owner: u64,
    ) -> Result<Answer, FsError> {
        self.unlock_owner(ino, owner, false).await?;
        let open = self.file(handle)?;
        self.client.flush(&open).await?;
        Ok(Answer::Done)
    }

    pub(super) async fn release(
        &self,
        ino: InodeId,
        handle: u64,
        flock_owner: Option<u64>,
    ) -> Result<Answer, FsError> {
        if let Some(owner) = flock_owner {
            self.unlock_owner(ino, owner, true).await?;
        }
        let open = self.files.lock().remove(&handle);
        if let Some(open) = open {
            self.client.release(&open);
        }
        Ok(Answer::Done)
    }

    /// Locks an owner took are given up when it closes; without any there is nothing to send.
    async fn unlock_owner(&self, ino: InodeId, owner: u64, flock: bool) -> Result<(), FsError> {
        if !self.waiting.forget_owner(ino, owner, flock) {
            return Ok(());
        }
        let lock = Lock {
            owner,
            start: 0,
            end: u64::MAX,
            kind: super::locks::F_UNLCK,
            pid: 0,
        };
        self.give_up(ino, lock).await
    }

    pub(super) async fn fallocate(
        &self,
        handle: u64,
        offset: u64,
        length: u64,
        mode: i32,
    ) -> Result<Answer, FsError> {
        let open = self.file(handle)?;
        let end = offset.checked_add(length).ok_or(Errno::EFBIG)?;
        let known = FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE | FALLOC_ZERO_RANGE;
        if mode & !known != 0 || length == 0 {
            return Err(Errno::EOPNOTSUPP.into());
        }
        if mode & FALLOC_PUNCH_HOLE != 0 && mode & FALLOC_KEEP_SIZE == 0 {
            return Err(Errno::EOPNOTSUPP.into());
        }
        if mode & (FALLOC_PUNCH_HOLE | FALLOC_ZERO_RANGE) != 0 {
            self.client.punch_hole(&open, offset, length).await?;
        }
        if mode & FALLOC_KEEP_SIZE == 0 {
            self.client.extend(&open, end).await?;
        }
        Ok(Answer::Done)
    }
}

/// Whether the mode lets the caller open a file. Which groups the caller is in is not known here, so
/// what the group may do counts for everybody but the owner.
fn may_open(mode: u32, owner: u32, flags: i32, caller: Caller) -> bool {
    if caller.uid == 0 {
        return true;
    }
    let bits = if caller.uid == owner {
        mode >> 6
    } else {
        mode >> 3 | mode
    };
    let wanted = match flags & O_ACCMODE {
        O_RDONLY => 4,
        O_WRONLY => 2,
        _ => 6,
    };
    bits & wanted == wanted
}

fn syncs(flags: i32) -> bool {
    flags & O_SYNC == O_SYNC || flags & O_DSYNC != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_checked_where_the_kernel_does_not() {
        let caller = |uid| Caller {
            uid,
            ..Caller::default()
        };
        assert!(may_open(0o600, 7, O_WRONLY, caller(7)));
        assert!(!may_open(0o600, 7, O_RDONLY, caller(8)));
        assert!(!may_open(0o400, 7, 2, caller(7)), "read and write");
        assert!(
            may_open(0o640, 7, O_RDONLY, caller(8)),
            "perhaps in the group"
        );
        assert!(!may_open(0o640, 7, O_WRONLY, caller(8)));
        assert!(may_open(0, 7, O_WRONLY, caller(0)));
    }
}
