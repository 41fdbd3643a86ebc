//! Changing attributes and size; free space.

use hither_proto::ids::{CHUNK_SIZE, InodeId, RequestNumber};
use hither_proto::meta::{Reply, Setattr, Space, Statfs};
use hither_proto::status::Errno;

use super::{Outcome, TYPE_MASK, is_dir, is_regular};
use crate::core::batch::Object;
use crate::core::lease::Data;
use crate::core::run::{Attempt, Blocker, Core, Stop};

impl Core {
    pub(crate) fn setattr(
        &mut self,
        attempt: &mut Attempt,
        op: &Setattr,
        number: RequestNumber,
    ) -> Outcome {
        let ino = InodeId(op.ino);
        self.need_inode(attempt, ino, op.hint.as_ref())?;
        let mode = self.cache.inodes[&ino].inode.mode;
        if is_dir(mode) {
            self.need_dir(attempt, ino)?;
        }
        if op.size.is_some() {
            if is_dir(mode) {
                return Err(Errno::EISDIR.into());
            }
            if !is_regular(mode) {
                return Err(Errno::EINVAL.into());
            }
            self.need_known_holders(ino, true)?;
            self.need_refs(ino, 0, u32::MAX)?;
        }
        let mut wanted = self.leases.attribute_holders(ino, attempt.session, false);
        // Times set while another writes would be lost with its next report.
        if op.size.is_some() || op.mtime.is_some() {
            wanted.extend(
                self.leases
                    .data_holders(ino, attempt.session, op.size.is_some()),
            );
        }
        Self::need_recalls(wanted)?;
        let cut = match op.size {
            Some(size) => self.resize(attempt, ino, size)?,
            None => false,
        };
        self.set_plain(attempt, ino, op);
        let mut reply = self.reply_with(attempt, ino);
        self.tell_lease(attempt.session, ino, &mut reply);
        if cut {
            let waiting = Attempt::waiting(attempt);
            self.trim_answers
                .entry(ino)
                .or_default()
                .push((waiting, reply, number));
            return Err(Stop::Later);
        }
        Ok(reply)
    }

    fn set_plain(&mut self, attempt: &mut Attempt, ino: InodeId, op: &Setattr) {
        let slot = self
            .cache
            .inodes
            .get_mut(&ino)
            .expect("the caller has found it");
        let inode = &mut slot.inode;
        if let Some(mode) = op.mode {
            inode.mode = inode.mode & TYPE_MASK | mode & !TYPE_MASK;
        }
        inode.uid = op.uid.unwrap_or(inode.uid);
        inode.gid = op.gid.unwrap_or(inode.gid);
        inode.atime = op.atime.unwrap_or(inode.atime);
        inode.class = op.class.unwrap_or(inode.class);
        if let Some(limit) = op.quota_bytes {
            inode.rare_mut().quota_bytes = limit;
        }
        if let Some(limit) = op.quota_inodes {
            inode.rare_mut().quota_inodes = limit;
        }
        inode.ctime = op.ctime.unwrap_or(attempt.now);
        let mtime = op.mtime.or(op.size.map(|_| attempt.now));
        if let Some(mtime) = mtime {
            inode.mtime = mtime;
        }
        if let Some(dir) = self.cache.dirs.get_mut(&ino) {
            // The head carries the directory's own times: both say the same from now on.
            dir.head.ctime = inode.ctime;
            if let Some(mtime) = op.mtime {
                dir.head.mtime = mtime;
            }
            inode.mtime = dir.head.mtime;
            self.touch(attempt, Object::Head(ino));
        }
        self.touch(attempt, Object::Inode(ino));
    }

    /// Sets the size; true when copies have to be cut before the file may grow again.
    fn resize(&mut self, attempt: &mut Attempt, ino: InodeId, size: u64) -> Result<bool, Stop> {
        if self.leases.of(ino).is_some_and(|leases| leases.sealing) {
            return Err(Stop::Block(Blocker::Inode(ino)));
        }
        self.need_trimmed(ino)?;
        self.need_turn(attempt.session, ino)?;
        let slot = &self.cache.inodes[&ino];
        let (old, parent) = (slot.inode.size, slot.parent);
        if size > 0 {
            super::create::chunk_index(size - 1)?;
        }
        if size > old {
            self.need_quota(parent, size - old, 0)?;
        }
        let reserve_lease = self.numbers.left(crate::core::Counter::Lease) > 0;
        if !reserve_lease {
            return Err(Stop::Block(Blocker::Numbers));
        }
        let first_gone = u32::try_from(size.div_ceil(CHUNK_SIZE)).unwrap_or(u32::MAX);
        self.free_tail(attempt, ino, first_gone)?;
        let mut freed = self.remove_refs(attempt, ino, first_gone, u32::MAX);
        if let Data::Exclusive(held) = &mut self.leases.of_mut(ino).data {
            let (gone, kept) = std::mem::take(&mut held.reserved)
                .into_iter()
                .partition(|chunk| chunk.index >= first_gone);
            held.reserved = kept;
            freed.extend::<Vec<_>>(gone);
        }
        self.leases.prune(ino);
        self.free_chunks(ino, &freed);
        let slot = self.cache.inodes.get_mut(&ino).expect("needed above");
        slot.inode.size = size;
        slot.inode.data_version += 1;
        // A writer may have more on the servers than it has reported.
        let writing = matches!(
            self.leases.of(ino).map(|l| &l.data),
            Some(Data::Exclusive(held)) if held.session == attempt.session
        );
        let partial = !size.is_multiple_of(CHUNK_SIZE) && (size < old || writing);
        slot.inode.set_pending_trim(partial.then_some(size));
        self.touch(attempt, Object::Inode(ino));
        let signed = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        self.bump(parent, signed(size) - signed(old), 0);
        let cut = partial && self.start_trim(ino)?;
        if !cut && let Some(slot) = self.cache.inodes.get_mut(&ino) {
            slot.inode.set_pending_trim(None);
        }
        Ok(cut)
    }

    pub(crate) fn statfs(&mut self, attempt: &mut Attempt, op: &Statfs) -> Outcome {
        let ino = InodeId(op.ino);
        self.need_inode(attempt, ino, op.hint.as_ref())?;
        if is_dir(self.cache.inodes[&ino].inode.mode) {
            self.need_dir(attempt, ino)?;
        }
        Ok(Reply {
            space: Some(self.space(ino)),
            ..Reply::default()
        })
    }

    /// Space a file or directory has left: of the cluster, less what quotas above it leave.
    pub(crate) fn space(&self, ino: InodeId) -> Space {
        let mut space = Space {
            total_bytes: self.groups.total_bytes,
            free_bytes: self.groups.free_bytes,
            total_inodes: 0,
            free_inodes: 0,
            used_bytes: 0,
            used_inodes: 0,
            quota_bytes_left: Some(u64::MAX),
        };
        let used = |n: i64| u64::try_from(n).unwrap_or(0);
        let mut below = None;
        for at in self.up_from(ino) {
            let limits = self.cache.inodes[&at].inode.rare();
            let Some(dir) = self.cache.dirs.get(&at) else {
                continue;
            };
            below.get_or_insert((dir.head.recursive_bytes, dir.head.recursive_inodes));
            if limits.quota_bytes != 0 {
                let limit = limits.quota_bytes;
                let left = limit.saturating_sub(used(dir.head.recursive_bytes));
                space.free_bytes = space.free_bytes.min(left);
                space.quota_bytes_left = space.quota_bytes_left.map(|l| l.min(left));
                space.total_bytes = space.total_bytes.min(limit);
            }
            if limits.quota_inodes != 0 && space.total_inodes == 0 {
                let limit = limits.quota_inodes;
                space.total_inodes = limit;
                space.free_inodes = limit.saturating_sub(used(dir.head.recursive_inodes));
            }
        }
        if let Some((bytes, inodes)) = below {
            (space.used_bytes, space.used_inodes) = (used(bytes), used(inodes));
        }
        space
    }
}
