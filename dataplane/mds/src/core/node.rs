//! An inode as it is kept in memory: what most inodes have in place, the rest beside it.

use bytes::Bytes;
use hither_proto::stored::{ChunkRef, Inode, Xattr};

/// An inode. The fields mean what those of [`Inode`] mean.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Node {
    pub(crate) ino: u64,
    pub(crate) size: u64,
    pub(crate) atime: i64,
    pub(crate) mtime: i64,
    pub(crate) ctime: i64,
    pub(crate) btime: i64,
    pub(crate) data_version: u64,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) nlink: u32,
    pub(crate) class: u32,
    pub(crate) back_pointer: bool,
    pub(crate) chunks: Vec<ChunkRef>,
    rare: Option<Box<Rare>>,
}

/// What few inodes have.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Rare {
    pub(crate) rdev: u32,
    pub(crate) paged_chunks: u32,
    pub(crate) quota_bytes: u64,
    pub(crate) quota_inodes: u64,
    pub(crate) pending_trim: Option<u64>,
    pub(crate) pending_seal: bool,
    pub(crate) symlink: Bytes,
    pub(crate) xattrs: Vec<Xattr>,
}

/// What most inodes have of it.
static NONE: Rare = Rare {
    rdev: 0,
    paged_chunks: 0,
    quota_bytes: 0,
    quota_inodes: 0,
    pending_trim: None,
    pending_seal: false,
    symlink: Bytes::new(),
    xattrs: Vec::new(),
};

impl Node {
    pub(crate) fn rare(&self) -> &Rare {
        self.rare.as_deref().unwrap_or(&NONE)
    }

    pub(crate) fn rare_mut(&mut self) -> &mut Rare {
        self.rare.get_or_insert_default()
    }

    /// Notes a cut that is to be finished, or that none is: most inodes need no room for that.
    pub(crate) fn set_pending_trim(&mut self, cut: Option<u64>) {
        if cut.is_none() && self.rare.is_none() {
            return;
        }
        self.rare_mut().pending_trim = cut;
        self.tidy_rare();
    }

    /// Notes that the file is to be sealed, or that it need not be.
    pub(crate) fn set_pending_seal(&mut self, pending: bool) {
        if pending || self.rare.is_some() {
            self.rare_mut().pending_seal = pending;
            self.tidy_rare();
        }
    }

    fn tidy_rare(&mut self) {
        if self.rare.as_deref() == Some(&NONE) {
            self.rare = None;
        }
    }

    /// As it is stored and sent.
    pub(crate) fn stored(&self) -> Inode {
        let rare = self.rare();
        Inode {
            ino: self.ino,
            mode: self.mode,
            uid: self.uid,
            gid: self.gid,
            nlink: self.nlink,
            rdev: rare.rdev,
            size: self.size,
            atime: self.atime,
            mtime: self.mtime,
            ctime: self.ctime,
            btime: self.btime,
            symlink: rare.symlink.clone(),
            class: self.class,
            chunks: self.chunks.clone(),
            paged_chunks: rare.paged_chunks,
            xattrs: rare.xattrs.clone(),
            back_pointer: self.back_pointer,
            quota_bytes: rare.quota_bytes,
            quota_inodes: rare.quota_inodes,
            pending_trim: rare.pending_trim,
            pending_seal: rare.pending_seal,
            data_version: self.data_version,
        }
    }
}

impl From<Inode> for Node {
    fn from(inode: Inode) -> Self {
        let own = |bytes: &Bytes| Bytes::copy_from_slice(bytes);
        let xattrs = inode.xattrs.iter().map(|xattr| Xattr {
            name: own(&xattr.name),
            value: own(&xattr.value),
        });
        let rare = Rare {
            rdev: inode.rdev,
            paged_chunks: inode.paged_chunks,
            quota_bytes: inode.quota_bytes,
            quota_inodes: inode.quota_inodes,
            pending_trim: inode.pending_trim,
            pending_seal: inode.pending_seal,
            // Of their own: what was decoded holds on to all of the message it was in.
            symlink: own(&inode.symlink),
            xattrs: xattrs.collect(),
        };
        Self {
            ino: inode.ino,
            size: inode.size,
            atime: inode.atime,
            mtime: inode.mtime,
            ctime: inode.ctime,
            btime: inode.btime,
            data_version: inode.data_version,
            mode: inode.mode,
            uid: inode.uid,
            gid: inode.gid,
            nlink: inode.nlink,
            class: inode.class,
            back_pointer: inode.back_pointer,
            chunks: inode.chunks,
            rare: (rare != NONE).then(|| Box::new(rare)),
        }
    }
}

/// Millions of them are in memory.
const _: () = assert!(size_of::<Node>() <= 112);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_an_inode_is_lost() {
        let plain = Inode {
            ino: 1,
            mode: 2,
            uid: 3,
            gid: 4,
            nlink: 5,
            size: 7,
            atime: -8,
            mtime: 9,
            ctime: 10,
            btime: 11,
            class: 13,
            chunks: vec![ChunkRef {
                index: 1,
                chunk: 2,
                group: 3,
                written: true,
            }],
            back_pointer: true,
            data_version: 21,
            ..Inode::default()
        };
        let node = Node::from(plain.clone());
        assert!(node.rare.is_none());
        assert_eq!(node.stored(), plain);
        let full = Inode {
            rdev: 6,
            symlink: Bytes::from_static(b"to"),
            paged_chunks: 15,
            xattrs: vec![Xattr {
                name: Bytes::from_static(b"n"),
                value: Bytes::from_static(b"v"),
            }],
            quota_bytes: 18,
            quota_inodes: 19,
            pending_trim: Some(0),
            pending_seal: true,
            ..plain
        };
        assert_eq!(Node::from(full.clone()).stored(), full);
    }
}
