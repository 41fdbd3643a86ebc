//! Changing attributes and size.

use hither_proto::ids::{CHUNK_SIZE, InodeId, LeaseId};
use hither_proto::meta::{Caller, Reply, Setattr, request::Op};
use hither_proto::status::Errno;
use hither_proto::stored::Inode;

use crate::cache::Attributes;
use crate::client::{Client, Inner};
use crate::error::FsError;
use crate::file::{Data, File, Lease};
use crate::session::How;

/// Attributes to be changed.
#[derive(Debug, Clone, Copy, Default)]
pub struct SetAttributes {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size: cuts or extends.
    pub size: Option<u64>,
    /// Access time, nanoseconds since 1970.
    pub atime: Option<i64>,
    /// Modification time.
    pub mtime: Option<i64>,
    /// Change time.
    pub ctime: Option<i64>,
    /// Storage class (administration).
    pub class: Option<u32>,
    /// Quota in bytes, 0 for none (administration).
    pub quota_bytes: Option<u64>,
    /// Quota in inodes, 0 for none (administration).
    pub quota_inodes: Option<u64>,
}

impl Client {
    /// Changes attributes.
    ///
    /// # Errors
    /// What the metadata server says; data that could not be written back first.
    pub async fn set_attributes(
        &self,
        ino: InodeId,
        set: SetAttributes,
        caller: Caller,
    ) -> Result<Attributes, FsError> {
        self.inner.set_attributes(ino, set, caller).await
    }
}

impl Inner {
    async fn set_attributes(
        &self,
        ino: InodeId,
        set: SetAttributes,
        caller: Caller,
    ) -> Result<Attributes, FsError> {
        let file = self.known_file(ino);
        let resize = set.size.is_some();
        let mut lease = 0;
        let mut _alone = None;
        let _cutting = file
            .as_ref()
            .filter(|_| resize)
            .map(|file| file.cut_begins());
        if let Some(file) = &file
            && (resize || set.mtime.is_some())
        {
            // Writers wait: what they have written is sent and told first.
            if let Err(error) = self.settle_mapped(file).await
                && error.errno == Errno::ETIMEDOUT
            {
                // What is lost is told at the next fsync: it is no reason to refuse this.
                return Err(error);
            }
            let alone = file.gate.write().await;
            lease = self.settle_before_change(file).await?;
            // Without the exclusive lease the server may have to recall this mount's own first.
            _alone = (lease != 0).then_some(alone);
        }
        let sent = self.cache.sent_at();
        let op = Setattr {
            ino: ino.0,
            hint: self.cache.hint(ino),
            mode: set.mode,
            uid: set.uid,
            gid: set.gid,
            size: set.size,
            atime: set.atime,
            mtime: set.mtime,
            ctime: set.ctime,
            lease,
            class: set.class,
            quota_bytes: set.quota_bytes,
            quota_inodes: set.quota_inodes,
        };
        let how = How {
            changes: true,
            caller,
            ..How::default()
        };
        let reply = self.ask(ino, Op::Setattr(op), how).await?;
        if let (Some(file), Some(inode)) = (&file, &reply.inode) {
            self.take_change(file, inode, &reply, resize);
        }
        self.take_changed(sent, &reply)
    }

    /// Sends what is dirty and reports it, so that a change of size or times has the last word.
    pub(crate) async fn settle_before_change(&self, file: &File) -> Result<u64, FsError> {
        match self.flush_dirty(file, false).await {
            // What no server takes is gone, and told at the next fsync: it is no reason to refuse this.
            Err(error) if error.errno == Errno::ETIMEDOUT => return Err(error),
            _ => {}
        }
        self.report(file, false).await?;
        Ok(match file.lease() {
            Lease::Exclusive(lease) => lease.0,
            Lease::None | Lease::Shared => 0,
        })
    }
}

impl Inner {
    /// Size and times were set by this client.
    fn take_change(&self, file: &File, inode: &Inode, reply: &Reply, resized: bool) {
        let mut data = file.data.lock();
        data.mtime = inode.mtime;
        data.generation += 1;
        if reply.data_lease != 0
            && let Lease::Exclusive(lease) = &mut data.lease
        {
            // A cut gives the lease a new id.
            *lease = LeaseId(reply.data_lease).max(*lease);
        }
        if !resized {
            return;
        }
        let size = inode.size;
        data.size = size;
        data.unreported_size = false;
        let keep = u32::try_from(size.div_ceil(CHUNK_SIZE)).unwrap_or(u32::MAX);
        data.refs.retain(|index, _| *index < keep);
        data.unreported.retain(|index| *index < keep);
        data.young.retain(|index| *index < keep);
        data.marked.retain(|index| *index < keep);
        let count = |data: &Data| -> usize { data.unsynced.values().map(|u| u.data.bytes()).sum() };
        self.cut_out_mapped(&mut data, size..u64::MAX);
        let (dirty, unsynced) = (data.dirty.bytes(), count(&data));
        data.dirty.truncate(size);
        for unsynced in data.unsynced.values_mut() {
            unsynced.data.truncate(size);
        }
        self.dirty_bytes.sub(dirty - data.dirty.bytes());
        self.unsynced_bytes.sub(unsynced - count(&data));
    }
}
