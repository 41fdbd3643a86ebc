//! Extended attributes, and what the mount shows and takes under `hither.*`.

use bytes::Bytes;
use hither_client::{FsError, SetAttributes};
use hither_proto::ids::{ClassId, InodeId};
use hither_proto::meta::Caller;
use hither_proto::status::Errno;

use super::Server;
use crate::transport::Answer;

impl Server {
    pub(super) async fn getxattr(&self, ino: InodeId, name: &Bytes) -> Result<Answer, FsError> {
        if let Some(own) = name.strip_prefix(b"hither.") {
            return self.own(ino, own).await;
        }
        if is_unsupported(name) {
            return Err(Errno::EOPNOTSUPP.into());
        }
        let inode = self.client.attributes(ino).await?.inode;
        let found = inode.xattrs.into_iter().find(|xattr| xattr.name == *name);
        found
            .map(|xattr| Answer::Xattr(xattr.value))
            .ok_or_else(|| Errno::ENODATA.into())
    }

    /// What the mount knows: as JSON, for the command line.
    async fn own(&self, ino: InodeId, name: &[u8]) -> Result<Answer, FsError> {
        let json = |value: serde_json::Result<Vec<u8>>| {
            value
                .map(|v| Answer::Xattr(v.into()))
                .map_err(|_| FsError::from(Errno::EIO))
        };
        let text = |text: String| Ok(Answer::Xattr(text.into()));
        match name {
            b"where" => json(serde_json::to_vec(
                &self.client.places(ino, 0, PLACES).await?,
            )),
            [b'w', b'h', b'e', b'r', b'e', b'.', first @ ..] => {
                let first = std::str::from_utf8(first).ok().and_then(|n| n.parse().ok());
                let first = first.ok_or(Errno::ENODATA)?;
                json(serde_json::to_vec(
                    &self.client.places(ino, first, PLACES).await?,
                ))
            }
            b"locality" => json(serde_json::to_vec(&self.client.locality())),
            b"managers" => text(self.client.config().managers.join(",")),
            b"class" => {
                let class = self.client.attributes(ino).await?.inode.class;
                let map = self.client.map();
                let known = map.class(ClassId(class)).map(|class| class.name.clone());
                text(known.unwrap_or_else(|| class.to_string()))
            }
            b"quota.bytes" => text(
                self.client
                    .attributes(ino)
                    .await?
                    .inode
                    .quota_bytes
                    .to_string(),
            ),
            b"quota.inodes" => text(
                self.client
                    .attributes(ino)
                    .await?
                    .inode
                    .quota_inodes
                    .to_string(),
            ),
            b"quota.used" => {
                let space = self.client.space(ino).await?;
                text(format!("{} {}", space.used_bytes, space.used_inodes))
            }
            _ => Err(Errno::ENODATA.into()),
        }
    }

    pub(super) async fn setxattr(
        &self,
        ino: InodeId,
        name: &Bytes,
        value: Bytes,
        flags: u32,
        caller: Caller,
    ) -> Result<Answer, FsError> {
        if let Some(own) = name.strip_prefix(b"hither.") {
            return self.set_own(ino, own, &value, caller).await;
        }
        if is_unsupported(name) {
            return Err(Errno::EOPNOTSUPP.into());
        }
        self.client.set_xattr(ino, name, value, flags).await?;
        Ok(Answer::Done)
    }

    async fn set_own(
        &self,
        ino: InodeId,
        name: &[u8],
        value: &[u8],
        caller: Caller,
    ) -> Result<Answer, FsError> {
        if caller.uid != 0 {
            return Err(Errno::EPERM.into());
        }
        let text = std::str::from_utf8(value).map_err(|_| Errno::EINVAL)?;
        let number = || text.parse::<u64>().map_err(|_| Errno::EINVAL);
        let mut set = SetAttributes::default();
        match name {
            b"class" => {
                let map = self.client.map();
                let (id, _) = map.class_named(text).ok_or(Errno::ENOENT)?;
                set.class = Some(id.0);
            }
            b"quota.bytes" => set.quota_bytes = Some(number()?),
            b"quota.inodes" => set.quota_inodes = Some(number()?),
            _ => return Err(Errno::EOPNOTSUPP.into()),
        }
        self.client.set_attributes(ino, set, caller).await?;
        Ok(Answer::Done)
    }

    pub(super) async fn listxattr(&self, ino: InodeId) -> Result<Answer, FsError> {
        let inode = self.client.attributes(ino).await?.inode;
        let mut list = Vec::new();
        for xattr in inode.xattrs {
            list.extend_from_slice(&xattr.name);
            list.push(0);
        }
        Ok(Answer::Xattr(list.into()))
    }

    pub(super) async fn removexattr(&self, ino: InodeId, name: &Bytes) -> Result<Answer, FsError> {
        self.client.remove_xattr(ino, name).await?;
        Ok(Answer::Done)
    }
}

/// Access control lists are not kept yet; saying so lets programs fall back to the mode.
fn is_unsupported(name: &[u8]) -> bool {
    name.starts_with(b"system.posix_acl_")
}

/// Pieces of a file described in one attribute: what the kernel passes is bounded.
const PLACES: u32 = 32;
