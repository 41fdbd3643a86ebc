//! A FUSE server as we see it: typed requests in, one reply handle out.

use std::time::Duration;

use bytes::Bytes;
use hither_proto::ids::InodeId;
use hither_proto::meta::Caller;
use hither_proto::status::Errno;
use hither_proto::stored::Inode;

/// A request of the kernel.
#[derive(Debug)]
pub struct Request {
    /// On whose behalf.
    pub caller: Caller,
    /// What is asked.
    pub op: Op,
}

/// What the kernel asks.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are those of the FUSE protocol")]
pub enum Op {
    /// Find a name.
    Lookup { parent: InodeId, name: Bytes },
    /// Read attributes.
    Getattr { ino: InodeId },
    /// Change attributes.
    Setattr {
        ino: InodeId,
        set: hither_client::SetAttributes,
    },
    /// Read a symbolic link.
    Readlink { ino: InodeId },
    /// Make anything but an open file.
    Make {
        parent: InodeId,
        name: Bytes,
        mode: u32,
        rdev: u32,
        target: Bytes,
    },
    /// Make a file and open it.
    Create {
        parent: InodeId,
        name: Bytes,
        mode: u32,
        flags: i32,
    },
    /// Remove a name.
    Unlink {
        parent: InodeId,
        name: Bytes,
        directory: bool,
    },
    /// Move a name.
    Rename {
        parent: InodeId,
        name: Bytes,
        new_parent: InodeId,
        new_name: Bytes,
        flags: u32,
    },
    /// Make a further name.
    Link {
        ino: InodeId,
        new_parent: InodeId,
        new_name: Bytes,
    },
    /// Open a file.
    Open { ino: InodeId, flags: i32 },
    /// Read.
    Read { handle: u64, offset: u64, size: u32 },
    /// Write.
    Write {
        handle: u64,
        offset: u64,
        data: Bytes,
        from_cache: bool,
    },
    /// A descriptor is closed; others may stay.
    Flush {
        ino: InodeId,
        handle: u64,
        owner: u64,
    },
    /// The last descriptor of an open is closed.
    Release {
        ino: InodeId,
        handle: u64,
        flock_owner: Option<u64>,
    },
    /// Make data stable.
    Fsync { handle: u64 },
    /// Open a directory.
    Opendir { ino: InodeId },
    /// List.
    Readdir {
        ino: InodeId,
        handle: u64,
        offset: u64,
        plus: bool,
    },
    /// Close a directory.
    Releasedir { handle: u64 },
    /// Make a directory stable.
    Fsyncdir { ino: InodeId },
    /// Space left.
    Statfs { ino: InodeId },
    /// Set an extended attribute.
    Setxattr {
        ino: InodeId,
        name: Bytes,
        value: Bytes,
        flags: u32,
    },
    /// Read one.
    Getxattr { ino: InodeId, name: Bytes },
    /// List them.
    Listxattr { ino: InodeId },
    /// Remove one.
    Removexattr { ino: InodeId, name: Bytes },
    /// Test a lock.
    Getlk { ino: InodeId, lock: Lock },
    /// Take or give up a lock.
    Setlk {
        ino: InodeId,
        lock: Lock,
        sleep: bool,
    },
    /// Reserve, extend or punch.
    Fallocate {
        ino: InodeId,
        handle: u64,
        offset: u64,
        length: u64,
        mode: i32,
    },
}

/// A lock as the kernel describes it.
#[derive(Debug, Clone, Copy)]
pub struct Lock {
    /// Who holds it, inside this mount.
    pub owner: u64,
    /// First byte.
    pub start: u64,
    /// Last byte.
    pub end: u64,
    /// `F_RDLCK` 0, `F_WRLCK` 1, `F_UNLCK` 2.
    pub kind: i32,
    /// Process.
    pub pid: u32,
}

/// An inode for the kernel.
#[derive(Debug)]
pub struct Entry {
    /// The inode.
    pub inode: Inode,
    /// How long the name is good.
    pub entry_valid: Duration,
    /// How long the attributes are good.
    pub attributes_valid: Duration,
}

/// An entry of a listing.
#[derive(Debug)]
pub struct DirEntry {
    /// Number of the inode.
    pub ino: InodeId,
    /// Position behind the entry.
    pub offset: u64,
    /// File type bits.
    pub kind: u32,
    /// Name.
    pub name: Bytes,
    /// With attributes, where they were asked for.
    pub entry: Option<Box<Entry>>,
}

/// What the kernel is answered.
#[derive(Debug)]
pub enum Answer {
    /// Nothing but success.
    Done,
    /// An inode under a name.
    Entry(Entry),
    /// Attributes and how long they are good.
    Attributes(Inode, Duration),
    /// Bytes.
    Data(Bytes),
    /// An open descriptor.
    Opened(Opened),
    /// A new file with its descriptor.
    Created(Entry, Opened),
    /// Bytes written.
    Written(u32),
    /// Entries; as many as fit are passed on.
    Listing(Vec<DirEntry>),
    /// Space.
    Space(hither_proto::meta::Space),
    /// Value or list of extended attributes.
    Xattr(Bytes),
    /// The lock in the way, or `F_UNLCK`.
    Lock(Lock),
}

/// A descriptor for the kernel.
#[derive(Debug, Clone, Copy)]
pub struct Opened {
    /// Its number.
    pub handle: u64,
    /// Reads and writes bypass the page cache.
    pub direct: bool,
    /// Pages read before are still good.
    pub keep_cache: bool,
}

/// Takes the one answer to a request, from any thread.
pub type ReplyHandle = Box<dyn FnOnce(Result<Answer, Errno>) + Send>;

/// Answers requests. Called on the transport's threads: must not block.
pub trait FuseServer: Send + Sync + 'static {
    /// A request; `reply` takes the answer, at any time.
    fn request(&self, request: Request, reply: ReplyHandle);
}
