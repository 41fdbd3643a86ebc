//! `fuser` behind our own view of a FUSE server.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use fuser::{
    FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, RenameFlags, TimeOrNow, WriteFlags,
};
use hither_client::SetAttributes;
use hither_proto::clock::WallNanos;
use hither_proto::ids::InodeId;
use hither_proto::meta::Caller;
use hither_proto::status::Errno;
use hither_proto::stored::Inode;

use tokio::sync::watch;

use crate::transport::{
    Answer, DirEntry, Entry, FuseServer, Lock, Op, Opened, ReplyHandle, Request,
};

/// Passes what `fuser` receives to a [`FuseServer`].
pub(crate) struct Front<S> {
    server: Arc<S>,
    /// Inode of the mounted directory: the kernel always calls it 1.
    root: InodeId,
    read_ahead_bytes: u32,
    end: Arc<End>,
}

/// The end of the kernel's connection.
#[derive(Debug)]
pub(crate) struct End {
    /// The session serves: from now on its end is the mount's.
    pub(crate) serving: AtomicBool,
    /// The transport has mounted, and unmounts at its end.
    pub(crate) unmounts: bool,
    pub(crate) tell: watch::Sender<bool>,
}

impl<S: FuseServer> Front<S> {
    pub(crate) fn new(server: Arc<S>, root: InodeId, read_ahead_bytes: u32, end: Arc<End>) -> Self {
        Self {
            server,
            root,
            read_ahead_bytes,
            end,
        }
    }

    fn ask(&self, request: &fuser::Request, op: Op, reply: ReplyHandle) {
        let caller = Caller {
            uid: request.uid(),
            gid: request.gid(),
            pid: request.pid(),
        };
        self.server.request(Request { caller, op }, reply);
    }

    fn inward(&self, ino: INodeNo) -> InodeId {
        if ino.0 == KERNEL_ROOT {
            self.root
        } else {
            InodeId(ino.0)
        }
    }

    fn outward(&self) -> impl Fn(InodeId) -> INodeNo + Send + 'static {
        let root = self.root;
        move |ino| {
            if ino == root {
                INodeNo(KERNEL_ROOT)
            } else {
                INodeNo(ino.0)
            }
        }
    }
}

/// Answers that carry nothing.
macro_rules! empty {
    ($reply:ident) => {
        Box::new(move |answer| match answer {
            Ok(_) => $reply.ok(),
            Err(error) => $reply.error(errno(error)),
        })
    };
}

/// Answers that carry an entry.
macro_rules! entry {
    ($self:ident, $reply:ident) => {{
        let outward = $self.outward();
        Box::new(move |answer| match answer {
            Ok(Answer::Entry(entry)) => {
                let attributes = attributes(&entry.inode, outward(InodeId(entry.inode.ino)));
                let (attr, name) = (&entry.attributes_valid, &entry.entry_valid);
                $reply.entry_with_ttls(attr, name, &attributes, Generation(0));
            }
            Ok(other) => $reply.error(unexpected(&other)),
            Err(error) => $reply.error(errno(error)),
        })
    }};
}

/// Answers that carry attributes.
macro_rules! attr {
    ($self:ident, $reply:ident) => {{
        let outward = $self.outward();
        Box::new(move |answer| match answer {
            Ok(Answer::Attributes(inode, valid)) => {
                $reply.attr(&valid, &attributes(&inode, outward(InodeId(inode.ino))));
            }
            Ok(other) => $reply.error(unexpected(&other)),
            Err(error) => $reply.error(errno(error)),
        })
    }};
}

/// Answers that carry bytes.
macro_rules! data {
    ($reply:ident) => {
        Box::new(move |answer| match answer {
            Ok(Answer::Data(bytes)) => $reply.data(&bytes),
            Ok(other) => $reply.error(unexpected(&other)),
            Err(error) => $reply.error(errno(error)),
        })
    };
}

/// Answers that carry a descriptor.
macro_rules! opened {
    ($reply:ident) => {
        Box::new(move |answer| match answer {
            Ok(Answer::Opened(opened)) => {
                $reply.opened(FileHandle(opened.handle), open_flags(&opened));
            }
            Ok(other) => $reply.error(unexpected(&other)),
            Err(error) => $reply.error(errno(error)),
        })
    };
}

/// Answers that carry an extended attribute: its size, or the value if it fits.
macro_rules! xattr {
    ($reply:ident, $size:ident) => {
        Box::new(move |answer| match answer {
            Ok(Answer::Xattr(value)) => {
                let length = u32::try_from(value.len()).unwrap_or(u32::MAX);
                if $size == 0 {
                    $reply.size(length);
                } else if length > $size {
                    $reply.error(errno(Errno::ERANGE));
                } else {
                    $reply.data(&value);
                }
            }
            Ok(other) => $reply.error(unexpected(&other)),
            Err(error) => $reply.error(errno(error)),
        })
    };
}

impl<S: FuseServer> Filesystem for Front<S> {
    fn destroy(&mut self) {
        if !self.end.serving.load(Ordering::Acquire) {
            return;
        }
        self.end.tell.send_replace(true);
        if !self.end.unmounts {
            return;
        }
        // What comes next in the transport (fuser 0.18) takes a connection that has ended for one
        // that stands, and unmounts the directory once more: whatever was mounted there before.
        // This thread has nothing left to do, and ends with the process.
        loop {
            std::thread::park();
        }
    }

    fn init(&mut self, _: &fuser::Request, config: &mut KernelConfig) -> io::Result<()> {
        // Never the kernel's write-back cache: it would keep its own size and times.
        let wanted = [
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_POSIX_LOCKS,
            InitFlags::FUSE_FLOCK_LOCKS,
            InitFlags::FUSE_EXPLICIT_INVAL_DATA,
            InitFlags::FUSE_CACHE_SYMLINKS,
        ];
        for flag in wanted {
            // A kernel without the feature works all the same, only slower.
            let _ = config.add_capabilities(flag);
        }
        // Out of range gives the nearest value the kernel takes.
        if let Err(nearest) = config.set_max_write(WRITE_BYTES) {
            let _ = config.set_max_write(nearest);
        }
        if let Err(nearest) = config.set_max_readahead(self.read_ahead_bytes) {
            let _ = config.set_max_readahead(nearest);
        }
        let _ = config.set_max_background(BACKGROUND);
        let _ = config.set_congestion_threshold(BACKGROUND / 4 * 3);
        Ok(())
    }

    fn lookup(&self, r: &fuser::Request, parent: INodeNo, name: &OsStr, reply: fuser::ReplyEntry) {
        let op = Op::Lookup {
            parent: self.inward(parent),
            name: bytes(name),
        };
        self.ask(r, op, entry!(self, reply));
    }

    fn getattr(
        &self,
        r: &fuser::Request,
        ino: INodeNo,
        _: Option<FileHandle>,
        reply: fuser::ReplyAttr,
    ) {
        self.ask(
            r,
            Op::Getattr {
                ino: self.inward(ino),
            },
            attr!(self, reply),
        );
    }

    fn setattr(
        &self,
        r: &fuser::Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        ctime: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<fuser::BsdFileFlags>,
        reply: fuser::ReplyAttr,
    ) {
        let set = SetAttributes {
            mode,
            uid,
            gid,
            size,
            atime: atime.map(time_or_now),
            mtime: mtime.map(time_or_now),
            ctime: ctime.map(nanos),
            ..SetAttributes::default()
        };
        self.ask(
            r,
            Op::Setattr {
                ino: self.inward(ino),
                set,
            },
            attr!(self, reply),
        );
    }

    fn readlink(&self, r: &fuser::Request, ino: INodeNo, reply: fuser::ReplyData) {
        self.ask(
            r,
            Op::Readlink {
                ino: self.inward(ino),
            },
            data!(reply),
        );
    }

    fn mknod(
        &self,
        r: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: fuser::ReplyEntry,
    ) {
        let (parent, name) = (self.inward(parent), bytes(name));
        let mode = mode & !(umask & 0o777);
        let op = Op::Make {
            parent,
            name,
            mode,
            rdev,
            target: Bytes::new(),
        };
        self.ask(r, op, entry!(self, reply));
    }

    fn mkdir(
        &self,
        r: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: fuser::ReplyEntry,
    ) {
        let (parent, name) = (self.inward(parent), bytes(name));
        let mode = S_IFDIR | (mode & 0o7777 & !(umask & 0o777));
        let op = Op::Make {
            parent,
            name,
            mode,
            rdev: 0,
            target: Bytes::new(),
        };
        self.ask(r, op, entry!(self, reply));
    }

    fn symlink(
        &self,
        r: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: fuser::ReplyEntry,
    ) {
        let (parent, name) = (self.inward(parent), bytes(name));
        let target = bytes(target.as_os_str());
        let op = Op::Make {
            parent,
            name,
            mode: S_IFLNK | 0o777,
            rdev: 0,
            target,
        };
        self.ask(r, op, entry!(self, reply));
    }

    fn create(
        &self,
        r: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: fuser::ReplyCreate,
    ) {
        let (parent, name) = (self.inward(parent), bytes(name));
        let mode = S_IFREG | (mode & 0o7777 & !(umask & 0o777));
        let outward = self.outward();
        let answer: ReplyHandle = Box::new(move |answer| match answer {
            Ok(Answer::Created(entry, opened)) => {
                let attributes = attributes(&entry.inode, outward(InodeId(entry.inode.ino)));
                let valid = entry.attributes_valid.min(entry.entry_valid);
                let handle = FileHandle(opened.handle);
                reply.created(
                    &valid,
                    &attributes,
                    Generation(0),
                    handle,
                    open_flags(&opened),
                );
            }
            Ok(other) => reply.error(unexpected(&other)),
            Err(error) => reply.error(errno(error)),
        });
        self.ask(
            r,
            Op::Create {
                parent,
                name,
                mode,
                flags,
            },
            answer,
        );
    }

    fn unlink(&self, r: &fuser::Request, parent: INodeNo, name: &OsStr, reply: fuser::ReplyEmpty) {
        let (parent, name) = (self.inward(parent), bytes(name));
        self.ask(
            r,
            Op::Unlink {
                parent,
                name,
                directory: false,
            },
            empty!(reply),
        );
    }

    fn rmdir(&self, r: &fuser::Request, parent: INodeNo, name: &OsStr, reply: fuser::ReplyEmpty) {
        let (parent, name) = (self.inward(parent), bytes(name));
        self.ask(
            r,
            Op::Unlink {
                parent,
                name,
                directory: true,
            },
            empty!(reply),
        );
    }

    fn rename(
        &self,
        r: &fuser::Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: fuser::ReplyEmpty,
    ) {
        let op = Op::Rename {
            parent: self.inward(parent),
            name: bytes(name),
            new_parent: self.inward(new_parent),
            new_name: bytes(new_name),
            flags: flags.bits(),
        };
        self.ask(r, op, empty!(reply));
    }

    fn link(
        &self,
        r: &fuser::Request,
        ino: INodeNo,
        new_parent: INodeNo,
        new_name: &OsStr,
        reply: fuser::ReplyEntry,
    ) {
        let (ino, new_parent) = (self.inward(ino), self.inward(new_parent));
        let op = Op::Link {
            ino,
            new_parent,
            new_name: bytes(new_name),
        };
        self.ask(r, op, entry!(self, reply));
    }

    fn open(&self, r: &fuser::Request, ino: INodeNo, flags: OpenFlags, reply: fuser::ReplyOpen) {
        self.ask(
            r,
            Op::Open {
                ino: self.inward(ino),
                flags: flags.0,
            },
            opened!(reply),
        );
    }

    fn read(
        &self,
        r: &fuser::Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: fuser::ReplyData,
    ) {
        self.ask(
            r,
            Op::Read {
                handle: handle.0,
                offset,
                size,
            },
            data!(reply),
        );
    }

    fn write(
        &self,
        r: &fuser::Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        flags: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: fuser::ReplyWrite,
    ) {
        let from_cache = flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let data = Bytes::copy_from_slice(data);
        let op = Op::Write {
            handle: handle.0,
            offset,
            data,
            from_cache,
        };
        let answer: ReplyHandle = Box::new(move |answer| match answer {
            Ok(Answer::Written(bytes)) => reply.written(bytes),
            Ok(other) => reply.error(unexpected(&other)),
            Err(error) => reply.error(errno(error)),
        });
        self.ask(r, op, answer);
    }

    fn flush(
        &self,
        r: &fuser::Request,
        ino: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        reply: fuser::ReplyEmpty,
    ) {
        let op = Op::Flush {
            ino: self.inward(ino),
            handle: handle.0,
            owner: owner.0,
        };
        self.ask(r, op, empty!(reply));
    }

    fn release(
        &self,
        r: &fuser::Request,
        ino: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        owner: Option<LockOwner>,
        _: bool,
        reply: fuser::ReplyEmpty,
    ) {
        let flock_owner = owner.map(|owner| owner.0);
        let op = Op::Release {
            ino: self.inward(ino),
            handle: handle.0,
            flock_owner,
        };
        self.ask(r, op, empty!(reply));
    }

    fn fsync(
        &self,
        r: &fuser::Request,
        _: INodeNo,
        handle: FileHandle,
        _: bool,
        reply: fuser::ReplyEmpty,
    ) {
        self.ask(r, Op::Fsync { handle: handle.0 }, empty!(reply));
    }

    fn ioctl(
        &self,
        _: &fuser::Request,
        _: INodeNo,
        _: FileHandle,
        _: fuser::IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: fuser::ReplyIoctl,
    ) {
        // Programs ask every file whether it is a terminal.
        reply.error(fuser::Errno::ENOTTY);
    }

    fn opendir(&self, r: &fuser::Request, ino: INodeNo, _: OpenFlags, reply: fuser::ReplyOpen) {
        self.ask(
            r,
            Op::Opendir {
                ino: self.inward(ino),
            },
            opened!(reply),
        );
    }

    fn readdir(
        &self,
        r: &fuser::Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: fuser::ReplyDirectory,
    ) {
        let outward = self.outward();
        let op = Op::Readdir {
            ino: self.inward(ino),
            handle: handle.0,
            offset,
            plus: false,
        };
        let answer: ReplyHandle = Box::new(move |answer| match answer {
            Ok(Answer::Listing(entries)) => {
                for entry in entries {
                    let name = OsStr::from_bytes(&entry.name);
                    if reply.add(outward(entry.ino), entry.offset, kind(entry.kind), name) {
                        break;
                    }
                }
                reply.ok();
            }
            Ok(other) => reply.error(unexpected(&other)),
            Err(error) => reply.error(errno(error)),
        });
        self.ask(r, op, answer);
    }

    fn readdirplus(
        &self,
        r: &fuser::Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: fuser::ReplyDirectoryPlus,
    ) {
        let outward = self.outward();
        let op = Op::Readdir {
            ino: self.inward(ino),
            handle: handle.0,
            offset,
            plus: true,
        };
        let answer: ReplyHandle = Box::new(move |answer| match answer {
            Ok(Answer::Listing(entries)) => {
                for listed in entries {
                    let DirEntry {
                        ino,
                        offset,
                        name,
                        entry: Some(entry),
                        ..
                    } = listed
                    else {
                        continue;
                    };
                    let valid = entry.entry_valid.min(entry.attributes_valid);
                    let attributes = attributes(&entry.inode, outward(ino));
                    let name = OsStr::from_bytes(&name);
                    let ino = outward(ino);
                    if reply.add(ino, offset, name, &valid, &attributes, Generation(0)) {
                        break;
                    }
                }
                reply.ok();
            }
            Ok(other) => reply.error(unexpected(&other)),
            Err(error) => reply.error(errno(error)),
        });
        self.ask(r, op, answer);
    }

    fn releasedir(
        &self,
        r: &fuser::Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        reply: fuser::ReplyEmpty,
    ) {
        self.ask(r, Op::Releasedir { handle: handle.0 }, empty!(reply));
    }

    fn fsyncdir(
        &self,
        r: &fuser::Request,
        ino: INodeNo,
        _: FileHandle,
        _: bool,
        reply: fuser::ReplyEmpty,
    ) {
        self.ask(
            r,
            Op::Fsyncdir {
                ino: self.inward(ino),
            },
            empty!(reply),
        );
    }

    fn statfs(&self, r: &fuser::Request, ino: INodeNo, reply: fuser::ReplyStatfs) {
        let answer: ReplyHandle = Box::new(move |answer| match answer {
            Ok(Answer::Space(space)) => {
                let blocks = |bytes: u64| bytes / u64::from(BLOCK_BYTES);
                let (total, free) = (blocks(space.total_bytes), blocks(space.free_bytes));
                let files = if space.total_inodes == 0 {
                    FILES
                } else {
                    space.total_inodes
                };
                let left = if space.total_inodes == 0 {
                    FILES
                } else {
                    space.free_inodes
                };
                reply.statfs(
                    total,
                    free,
                    free,
                    files,
                    left,
                    BLOCK_BYTES,
                    255,
                    BLOCK_BYTES,
                );
            }
            Ok(other) => reply.error(unexpected(&other)),
            Err(error) => reply.error(errno(error)),
        });
        self.ask(
            r,
            Op::Statfs {
                ino: self.inward(ino),
            },
            answer,
        );
    }

    fn setxattr(
        &self,
        r: &fuser::Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: fuser::ReplyEmpty,
    ) {
        let op = Op::Setxattr {
            ino: self.inward(ino),
            name: bytes(name),
            value: Bytes::copy_from_slice(value),
            flags: u32::try_from(flags).unwrap_or(0),
        };
        self.ask(r, op, empty!(reply));
    }

    fn getxattr(
        &self,
        r: &fuser::Request,
        ino: INodeNo,
        name: &OsStr,
        size: u32,
        reply: fuser::ReplyXattr,
    ) {
        let op = Op::Getxattr {
            ino: self.inward(ino),
            name: bytes(name),
        };
        self.ask(r, op, xattr!(reply, size));
    }

    fn listxattr(&self, r: &fuser::Request, ino: INodeNo, size: u32, reply: fuser::ReplyXattr) {
        self.ask(
            r,
            Op::Listxattr {
                ino: self.inward(ino),
            },
            xattr!(reply, size),
        );
    }

    fn removexattr(
        &self,
        r: &fuser::Request,
        ino: INodeNo,
        name: &OsStr,
        reply: fuser::ReplyEmpty,
    ) {
        let op = Op::Removexattr {
            ino: self.inward(ino),
            name: bytes(name),
        };
        self.ask(r, op, empty!(reply));
    }

    fn getlk(
        &self,
        r: &fuser::Request,
        ino: INodeNo,
        _: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        kind: i32,
        pid: u32,
        reply: fuser::ReplyLock,
    ) {
        let lock = Lock {
            owner: owner.0,
            start,
            end,
            kind,
            pid,
        };
        let answer: ReplyHandle = Box::new(move |answer| match answer {
            Ok(Answer::Lock(lock)) => reply.locked(lock.start, lock.end, lock.kind, lock.pid),
            Ok(other) => reply.error(unexpected(&other)),
            Err(error) => reply.error(errno(error)),
        });
        self.ask(
            r,
            Op::Getlk {
                ino: self.inward(ino),
                lock,
            },
            answer,
        );
    }

    fn setlk(
        &self,
        r: &fuser::Request,
        ino: INodeNo,
        _: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        kind: i32,
        pid: u32,
        sleep: bool,
        reply: fuser::ReplyEmpty,
    ) {
        let lock = Lock {
            owner: owner.0,
            start,
            end,
            kind,
            pid,
        };
        self.ask(
            r,
            Op::Setlk {
                ino: self.inward(ino),
                lock,
                sleep,
            },
            empty!(reply),
        );
    }

    fn fallocate(
        &self,
        r: &fuser::Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: fuser::ReplyEmpty,
    ) {
        let ino = self.inward(ino);
        let op = Op::Fallocate {
            ino,
            handle: handle.0,
            offset,
            length,
            mode,
        };
        self.ask(r, op, empty!(reply));
    }
}

fn bytes(text: &OsStr) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn errno(error: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(i32::from(error.0))
}

/// The server answered something the request did not ask for: a bug of ours, not the caller's.
fn unexpected(answer: &Answer) -> fuser::Errno {
    tracing::error!(?answer, "an answer that does not fit its request");
    fuser::Errno::EIO
}

fn open_flags(opened: &Opened) -> FopenFlags {
    let mut flags = FopenFlags::empty();
    if opened.direct {
        flags |= FopenFlags::FOPEN_DIRECT_IO;
    } else if opened.keep_cache {
        flags |= FopenFlags::FOPEN_KEEP_CACHE;
    }
    flags
}

fn attributes(inode: &Inode, ino: INodeNo) -> FileAttr {
    FileAttr {
        ino,
        size: inode.size,
        blocks: inode.size.div_ceil(512),
        atime: system_time(inode.atime),
        mtime: system_time(inode.mtime),
        ctime: system_time(inode.ctime),
        crtime: system_time(inode.btime),
        kind: kind(inode.mode),
        perm: u16::try_from(inode.mode & 0o7777).unwrap_or(0),
        nlink: inode.nlink,
        uid: inode.uid,
        gid: inode.gid,
        rdev: inode.rdev,
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

fn kind(mode: u32) -> FileType {
    match mode & 0o170_000 {
        S_IFDIR => FileType::Directory,
        S_IFLNK => FileType::Symlink,
        0o060_000 => FileType::BlockDevice,
        0o020_000 => FileType::CharDevice,
        0o010_000 => FileType::NamedPipe,
        0o140_000 => FileType::Socket,
        _ => FileType::RegularFile,
    }
}

fn system_time(nanos: i64) -> SystemTime {
    let distance = Duration::from_nanos(nanos.unsigned_abs());
    let time = if nanos >= 0 {
        SystemTime::UNIX_EPOCH.checked_add(distance)
    } else {
        SystemTime::UNIX_EPOCH.checked_sub(distance)
    };
    time.unwrap_or(SystemTime::UNIX_EPOCH)
}

fn nanos(time: SystemTime) -> i64 {
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_nanos()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_nanos()).map_or(i64::MIN, |n| -n),
    }
}

fn time_or_now(time: TimeOrNow) -> i64 {
    match time {
        TimeOrNow::SpecificTime(time) => nanos(time),
        TimeOrNow::Now => WallNanos::now().0,
    }
}

/// An entry of the kernel with no time to live, for `.` and `..`.
pub(crate) fn short_lived(inode: Inode) -> Entry {
    Entry {
        inode,
        entry_valid: Duration::ZERO,
        attributes_valid: Duration::ZERO,
    }
}

const KERNEL_ROOT: u64 = 1;
const S_IFREG: u32 = 0o100_000;
const S_IFDIR: u32 = 0o040_000;
const S_IFLNK: u32 = 0o120_000;
/// Bytes of one write request at most.
const WRITE_BYTES: u32 = 1 << 20;
/// Requests the kernel keeps in the background: those that wait for a lease must not keep back pages
/// that are written back so that another mount gets its own.
const BACKGROUND: u16 = 512;
/// Block size shown to programs.
const BLOCK_BYTES: u32 = 4096;
/// Inodes shown where no quota limits them.
const FILES: u64 = 1 << 40;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_and_after_the_epoch() {
        for n in [0, 1, -1, 1_700_000_000_123_456_789, -5_000_000_000] {
            assert_eq!(nanos(system_time(n)), n);
        }
    }
}
