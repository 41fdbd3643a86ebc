//! flock and byte-range locks.

use hither_proto::ids::InodeId;
use hither_proto::meta::{Reply, SetLock, TestLock, request::Op};
use hither_proto::stored::HeldLock;

use crate::claim::Holder;
use crate::client::Client;
use crate::error::FsError;
use crate::session::How;

impl Client {
    /// Takes or gives up a lock. With `wait`, waits as long as another holds it; dropping the
    /// future ends the wait.
    ///
    /// # Errors
    /// `EAGAIN` when another holds it and `wait` is false.
    pub async fn set_lock(
        &self,
        ino: InodeId,
        lock: HeldLock,
        unlock: bool,
        wait: bool,
    ) -> Result<(), FsError> {
        let inner = &self.inner;
        let hint = inner.cache.hint(ino);
        let op = SetLock {
            ino: ino.0,
            hint,
            lock: Some(lock),
            unlock,
            wait,
        };
        let how = How {
            changes: !wait,
            endless: wait,
            ..How::default()
        };
        inner.ask(ino, Op::SetLock(op), how).await.map(|_| ())
    }

    /// A lock that stands in the way of this one.
    ///
    /// # Errors
    /// What the metadata server says.
    pub async fn test_lock(
        &self,
        ino: InodeId,
        lock: HeldLock,
    ) -> Result<Option<HeldLock>, FsError> {
        Ok(self.ask_lock(ino, lock).await?.conflict)
    }

    /// Who has a lock in the way of this one.
    pub(crate) async fn holder(
        &self,
        ino: InodeId,
        lock: HeldLock,
    ) -> Result<Option<Holder>, FsError> {
        let reply = self.ask_lock(ino, lock).await?;
        Ok(reply.conflict.map(|held| Holder {
            session: held.session,
            host: reply.conflict_host,
            mount_point: reply.conflict_mount_point,
        }))
    }

    async fn ask_lock(&self, ino: InodeId, lock: HeldLock) -> Result<Reply, FsError> {
        let inner = &self.inner;
        let op = TestLock {
            ino: ino.0,
            hint: inner.cache.hint(ino),
            lock: Some(lock),
        };
        inner.ask(ino, Op::TestLock(op), How::default()).await
    }
}
