//! Answers the kernel's requests with a client of the cluster.

mod data;
mod directories;
mod first;
mod locks;
mod names;
mod xattrs;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hither_client::{Attributes, Client, Found, FsError, OpenFile};
use hither_proto::status::Errno;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::notify::Kernel;
use crate::transport::{Answer, Entry, FuseServer, Op, ReplyHandle, Request};
use directories::OpenDir;
use locks::WaitingLocks;

/// Serves one mount.
pub(crate) struct Server {
    pub(crate) client: Client,
    pub(crate) kernel: Arc<Kernel>,
    pub(crate) read_only: bool,
    runtime: Handle,
    files: Mutex<BTreeMap<u64, Arc<OpenFile>>>,
    dirs: Mutex<BTreeMap<u64, Arc<OpenDir>>>,
    next_handle: AtomicU64,
    waiting: WaitingLocks,
}

/// The serving part of a mount, shared by all its requests.
#[derive(Clone)]
pub(crate) struct Shared(Arc<Server>);

impl std::ops::Deref for Shared {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.0
    }
}

impl Shared {
    pub(crate) fn new(
        client: Client,
        kernel: Arc<Kernel>,
        read_only: bool,
        runtime: Handle,
    ) -> Self {
        Self(Arc::new(Server {
            client,
            kernel,
            read_only,
            runtime,
            files: Mutex::default(),
            dirs: Mutex::default(),
            next_handle: AtomicU64::new(1),
            waiting: WaitingLocks::default(),
        }))
    }
}

impl FuseServer for Shared {
    fn request(&self, request: Request, reply: ReplyHandle) {
        let server = self.clone();
        let work = async move {
            let answer = server.answer(request).await;
            reply(answer.map_err(|error| {
                if error.errno == Errno::EIO || error.errno == Errno::ETIMEDOUT {
                    tracing::warn!(errno = %error.errno, reason = error.reason, "request failed");
                }
                error.errno
            }));
        };
        first::run(&self.runtime, Box::pin(work));
    }
}

impl Server {
    async fn answer(&self, request: Request) -> Result<Answer, FsError> {
        let Request { caller, op } = request;
        if self.read_only && changes(&op) {
            return Err(Errno::EROFS.into());
        }
        let gives_back = matches!(op, Op::Release { .. } | Op::Releasedir { .. });
        if self.client.is_over() && !gives_back {
            return Err(FsError::new(
                Errno::ENOTCONN,
                "the claim of this mount is over",
            ));
        }
        match op {
            Op::Lookup { parent, name } => self.lookup(parent, &name).await,
            Op::Getattr { ino } => self.getattr(ino).await,
            Op::Setattr { ino, set } => self.setattr(ino, set, caller).await,
            Op::Readlink { ino } => self.readlink(ino).await,
            Op::Make {
                parent,
                name,
                mode,
                rdev,
                target,
            } => self.make(parent, name, mode, rdev, target, caller).await,
            Op::Create {
                parent,
                name,
                mode,
                flags,
            } => self.create(parent, name, mode, flags, caller).await,
            Op::Unlink {
                parent,
                name,
                directory,
            } => self
                .client
                .unlink(parent, &name, directory, caller)
                .await
                .map(|()| Answer::Done),
            Op::Rename {
                parent,
                name,
                new_parent,
                new_name,
                flags,
            } => {
                let (from, to) = ((parent, &name), (new_parent, &new_name));
                self.client
                    .rename(from, to, flags, caller)
                    .await
                    .map(|()| Answer::Done)
            }
            Op::Link {
                ino,
                new_parent,
                new_name,
            } => {
                let found = self.client.link(ino, new_parent, &new_name, caller).await?;
                Ok(Answer::Entry(self.entry(found)))
            }
            Op::Open { ino, flags } => self.open(ino, flags).await,
            Op::Read {
                handle,
                offset,
                size,
            } => {
                let open = self.file(handle)?;
                self.client
                    .read(&open, offset, size)
                    .await
                    .map(Answer::Data)
            }
            Op::Write {
                handle,
                offset,
                data,
                from_cache,
            } => self.write(handle, offset, data, from_cache).await,
            Op::Flush { ino, handle, owner } => self.flush(ino, handle, owner).await,
            Op::Release {
                ino,
                handle,
                flock_owner,
            } => self.release(ino, handle, flock_owner).await,
            Op::Fsync { handle } => {
                let open = self.file(handle)?;
                self.client.fsync(&open).await.map(|()| Answer::Done)
            }
            Op::Opendir { ino } => Ok(self.opendir(ino)),
            Op::Readdir {
                ino,
                handle,
                offset,
                plus,
            } => self.readdir(ino, handle, offset, plus).await,
            Op::Releasedir { handle } => {
                self.dirs.lock().remove(&handle);
                Ok(Answer::Done)
            }
            Op::Fsyncdir { ino } => self.client.fsync_dir(ino).await.map(|()| Answer::Done),
            Op::Statfs { ino } => self.client.space(ino).await.map(Answer::Space),
            Op::Setxattr {
                ino,
                name,
                value,
                flags,
            } => self.setxattr(ino, &name, value, flags, caller).await,
            Op::Getxattr { ino, name } => self.getxattr(ino, &name).await,
            Op::Listxattr { ino } => self.listxattr(ino).await,
            Op::Removexattr { ino, name } => self.removexattr(ino, &name).await,
            Op::Getlk { ino, lock } => self.getlk(ino, lock).await,
            Op::Setlk { ino, lock, sleep } => self.setlk(ino, lock, sleep).await,
            Op::Fallocate {
                handle,
                offset,
                length,
                mode,
                ..
            } => self.fallocate(handle, offset, length, mode).await,
        }
    }

    fn handle(&self) -> u64 {
        self.next_handle.fetch_add(1, Ordering::Relaxed)
    }

    fn file(&self, handle: u64) -> Result<Arc<OpenFile>, FsError> {
        self.files
            .lock()
            .get(&handle)
            .cloned()
            .ok_or_else(|| Errno::EBADF.into())
    }

    fn entry(&self, found: Found) -> Entry {
        let Attributes { inode, valid } = found.attributes;
        let entry_valid = self.kernel.name_valid(found.entry_valid);
        Entry {
            inode,
            entry_valid,
            attributes_valid: valid,
        }
    }
}

/// What a read-only mount refuses.
fn changes(op: &Op) -> bool {
    match op {
        Op::Setattr { .. }
        | Op::Make { .. }
        | Op::Create { .. }
        | Op::Unlink { .. }
        | Op::Rename { .. }
        | Op::Link { .. }
        | Op::Write { .. }
        | Op::Setxattr { .. }
        | Op::Removexattr { .. }
        | Op::Fallocate { .. } => true,
        Op::Open { flags, .. } => flags & O_ACCMODE != 0,
        _ => false,
    }
}

/// Access mode bits of open(2).
const O_ACCMODE: i32 = 3;
