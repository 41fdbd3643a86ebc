//! Extended attributes. They are part of the inode; clients read them from there.

use hither_proto::ids::{InodeId, XATTR_VALUE_MAX};
use hither_proto::meta::{RemoveXattr, SetXattr};
use hither_proto::status::Errno;
use hither_proto::stored::Xattr;

use super::Outcome;
use crate::core::batch::Object;
use crate::core::run::{Attempt, Core};

const CREATE: u32 = 1;
const REPLACE: u32 = 2;
/// Bytes of all names and values of one inode.
const XATTRS_BYTES_MAX: usize = 128 << 10;

impl Core {
    pub(crate) fn set_xattr(&mut self, attempt: &mut Attempt, op: &SetXattr) -> Outcome {
        let ino = InodeId(op.ino);
        if op.name.is_empty() || op.name.len() > hither_proto::ids::NAME_MAX {
            return Err(Errno::ERANGE.into());
        }
        if op.value.len() > XATTR_VALUE_MAX {
            return Err(Errno::E2BIG.into());
        }
        self.need_inode(attempt, ino, op.hint.as_ref())?;
        let xattrs = &self.cache.inodes[&ino].inode.rare().xattrs;
        let at = xattrs.iter().position(|xattr| xattr.name == op.name);
        match (op.flags & (CREATE | REPLACE), at) {
            (CREATE, Some(_)) => return Err(Errno::EEXIST.into()),
            (REPLACE, None) => return Err(Errno::ENODATA.into()),
            _ => {}
        }
        let used: usize = xattrs.iter().map(|x| x.name.len() + x.value.len()).sum();
        if used + op.name.len() + op.value.len() > XATTRS_BYTES_MAX {
            return Err(Errno::ENOSPC.into());
        }
        Self::need_recalls(self.leases.attribute_holders(ino, attempt.session, false))?;
        let slot = self.cache.inodes.get_mut(&ino).expect("needed above");
        let xattr = Xattr {
            name: op.name.clone(),
            value: op.value.clone(),
        };
        match at {
            Some(at) => slot.inode.rare_mut().xattrs[at] = xattr,
            None => slot.inode.rare_mut().xattrs.push(xattr),
        }
        slot.inode.ctime = attempt.now;
        self.touch(attempt, Object::Inode(ino));
        self.touch_head(attempt, ino);
        Ok(self.reply_with(attempt, ino))
    }

    pub(crate) fn remove_xattr(&mut self, attempt: &mut Attempt, op: &RemoveXattr) -> Outcome {
        let ino = InodeId(op.ino);
        self.need_inode(attempt, ino, op.hint.as_ref())?;
        let xattrs = &self.cache.inodes[&ino].inode.rare().xattrs;
        let Some(at) = xattrs.iter().position(|xattr| xattr.name == op.name) else {
            return Err(Errno::ENODATA.into());
        };
        Self::need_recalls(self.leases.attribute_holders(ino, attempt.session, false))?;
        let slot = self.cache.inodes.get_mut(&ino).expect("needed above");
        slot.inode.rare_mut().xattrs.remove(at);
        slot.inode.ctime = attempt.now;
        self.touch(attempt, Object::Inode(ino));
        self.touch_head(attempt, ino);
        Ok(self.reply_with(attempt, ino))
    }

    /// A directory's change time is its head's.
    fn touch_head(&mut self, attempt: &mut Attempt, ino: InodeId) {
        if let Some(dir) = self.cache.dirs.get_mut(&ino) {
            dir.head.ctime = dir.head.ctime.max(attempt.now);
            self.touch(attempt, Object::Head(ino));
        }
    }
}
