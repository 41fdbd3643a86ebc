//! Names and attributes.

use bytes::Bytes;
use hither_client::{FsError, SetAttributes};
use hither_proto::ids::InodeId;
use hither_proto::meta::{Caller, Create};
use hither_proto::status::Errno;

use super::Server;
use crate::transport::Answer;

impl Server {
    pub(super) async fn lookup(&self, parent: InodeId, name: &Bytes) -> Result<Answer, FsError> {
        // The kernel resolves these itself; only an export by file handle asks.
        let found = match &name[..] {
            b"." => return self.dot(parent).await,
            _ => self.client.lookup(parent, name).await?,
        };
        Ok(Answer::Entry(self.entry(found)))
    }

    async fn dot(&self, ino: InodeId) -> Result<Answer, FsError> {
        let attributes = self.client.attributes(ino).await?;
        Ok(Answer::Entry(crate::front::short_lived(attributes.inode)))
    }

    pub(super) async fn getattr(&self, ino: InodeId) -> Result<Answer, FsError> {
        let attributes = self.client.attributes(ino).await?;
        Ok(Answer::Attributes(attributes.inode, attributes.valid))
    }

    pub(super) async fn setattr(
        &self,
        ino: InodeId,
        set: SetAttributes,
        caller: Caller,
    ) -> Result<Answer, FsError> {
        let attributes = self.client.set_attributes(ino, set, caller).await?;
        Ok(Answer::Attributes(attributes.inode, attributes.valid))
    }

    pub(super) async fn readlink(&self, ino: InodeId) -> Result<Answer, FsError> {
        let attributes = self.client.attributes(ino).await?;
        if attributes.inode.symlink.is_empty() {
            return Err(Errno::EINVAL.into());
        }
        Ok(Answer::Data(attributes.inode.symlink))
    }

    pub(super) async fn make(
        &self,
        parent: InodeId,
        name: Bytes,
        mode: u32,
        rdev: u32,
        target: Bytes,
        caller: Caller,
    ) -> Result<Answer, FsError> {
        let request = Create {
            parent: parent.0,
            name,
            mode,
            uid: caller.uid,
            gid: caller.gid,
            rdev,
            symlink: target,
            exclusive: true,
            open_for_write: false,
        };
        let created = self.client.create(request, caller).await?;
        Ok(Answer::Entry(self.entry(created.found)))
    }
}
