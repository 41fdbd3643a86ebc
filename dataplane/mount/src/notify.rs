//! Making the kernel forget. Runs on threads that serve no request.
//!
//! Invalidating an entry needs the parent's inode lock, which the kernel holds during its own
//! creates there; so names are invalidated by raising the mount's epoch (kernel 6.16), which takes
//! no lock. Older kernels get names for a second at most, which is then waited out.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use bytes::Bytes;
use fuser::{INodeNo, Notifier};
use futures::future::BoxFuture;
use hither_client::KernelCaches;
use hither_proto::ids::InodeId;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::crew::Crew;

/// The kernel's caches of one mount.
#[derive(Debug, Default)]
pub(crate) struct Kernel {
    names: Mutex<Option<mpsc::Sender<Done>>>,
    attributes: Mutex<Option<mpsc::Sender<Forget>>>,
    /// Pages that are written back are waited for: one file must not hold up others.
    pages: Mutex<Option<Arc<Crew<Forget>>>>,
    /// Names may be kept for long: the kernel knows epochs.
    knows_epochs: std::sync::atomic::AtomicBool,
    root: std::sync::atomic::AtomicU64,
}

/// Told when the kernel has forgotten; whoever waited may have given up.
type Done = oneshot::Sender<()>;

#[derive(Debug)]
struct Forget {
    ino: InodeId,
    /// Pages with these bytes too.
    pages: Option<Range<u64>>,
    done: Done,
}

impl Kernel {
    /// Starts the threads, once the mount stands.
    pub(crate) fn attach(&self, notifier: Notifier, device: OwnedFd, root: InodeId) {
        use std::sync::atomic::Ordering;
        let knows = raise_epoch(&device);
        self.knows_epochs.store(knows, Ordering::Release);
        self.root.store(root.0, Ordering::Release);
        let (names, inbox) = mpsc::channel();
        if spawn("fuse-names", move || forget_names(&inbox, &device)) {
            *self.names.lock() = Some(names);
        }
        let (attributes, inbox) = mpsc::channel();
        let teller = Teller { notifier, root };
        let for_attributes = teller.clone();
        if spawn("fuse-attributes", move || {
            while let Ok(forget) = inbox.recv() {
                for_attributes.forget(forget);
            }
        }) {
            *self.attributes.lock() = Some(attributes);
        }
        match Crew::start("fuse-pages", move |forget| teller.forget(forget)) {
            Ok(crew) => *self.pages.lock() = Some(crew),
            Err(error) => tracing::error!(%error, "no thread for invalidations"),
        }
    }

    /// How long the kernel may keep a name.
    pub(crate) fn name_valid(&self, leased: Duration) -> Duration {
        if self.knows_epochs.load(std::sync::atomic::Ordering::Acquire) {
            leased
        } else {
            leased.min(OLD_KERNEL_VALID)
        }
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        if let Some(crew) = self.pages.lock().take() {
            crew.end();
        }
    }
}

/// Sends what is to be forgotten; the answer comes once that is so.
fn send<T>(
    to: &Mutex<Option<mpsc::Sender<T>>>,
    what: impl FnOnce(Done) -> T,
) -> BoxFuture<'static, ()> {
    let (done, waiting) = oneshot::channel();
    let sent = match &*to.lock() {
        Some(thread) => thread.send(what(done)).is_ok(),
        None => false,
    };
    Box::pin(async move {
        if sent {
            // A thread that has ended had nothing left to invalidate.
            let _ = waiting.await;
        }
    })
}

impl KernelCaches for Kernel {
    fn forget_attributes(&self, ino: InodeId) -> BoxFuture<'static, ()> {
        send(&self.attributes, |done| Forget {
            ino,
            pages: None,
            done,
        })
    }

    fn forget_pages(&self, ino: InodeId, bytes: Range<u64>) -> BoxFuture<'static, ()> {
        let (done, waiting) = oneshot::channel();
        if let Some(crew) = &*self.pages.lock() {
            let pages = Some(bytes);
            crew.send(Forget { ino, pages, done });
        }
        Box::pin(async move {
            // Before the mount stands there is nothing to forget.
            let _ = waiting.await;
        })
    }

    fn forget_entries(&self, _: InodeId, _: &Bytes) -> BoxFuture<'static, ()> {
        if self.knows_epochs.load(std::sync::atomic::Ordering::Acquire) {
            return send(&self.names, |done| done);
        }
        Box::pin(tokio::time::sleep(OLD_KERNEL_VALID))
    }
}

fn spawn(name: &str, thread: impl FnOnce() + Send + 'static) -> bool {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(thread);
    if let Err(error) = &spawned {
        tracing::error!(%error, name, "no thread for invalidations");
    }
    spawned.is_ok()
}

/// Any number of names is forgotten with one epoch.
fn forget_names(inbox: &mpsc::Receiver<Done>, device: &OwnedFd) {
    while let Ok(first) = inbox.recv() {
        let all: Vec<Done> = std::iter::once(first).chain(inbox.try_iter()).collect();
        raise_epoch(device);
        for done in all {
            let _ = done.send(());
        }
    }
}

/// Tells the kernel, and waits until it has forgotten.
#[derive(Debug, Clone)]
struct Teller {
    notifier: Notifier,
    root: InodeId,
}

impl Teller {
    fn forget(&self, Forget { ino, pages, done }: Forget) {
        let ino = INodeNo(if ino == self.root { 1 } else { ino.0 });
        let (offset, length) = match pages {
            None => (-1, 0),
            // The kernel takes nothing for everything.
            Some(bytes) => {
                let length = bytes.end - bytes.start;
                (signed(bytes.start), i64::try_from(length).unwrap_or(0))
            }
        };
        if let Err(error) = self.notifier.inval_inode(ino, offset, length) {
            // The kernel does not know the inode: it keeps nothing of it.
            tracing::trace!(ino = ino.0, %error, "nothing to invalidate");
        }
        let _ = done.send(());
    }
}

fn signed(offset: u64) -> i64 {
    i64::try_from(offset).unwrap_or(i64::MAX)
}

/// Sends `FUSE_NOTIFY_INC_EPOCH`; false where the kernel does not know it.
fn raise_epoch(device: &OwnedFd) -> bool {
    let mut message = [0; 16];
    message[..4].copy_from_slice(&16u32.to_le_bytes());
    message[4..8].copy_from_slice(&NOTIFY_INC_EPOCH.to_le_bytes());
    rustix::io::write(device, &message).is_ok()
}

/// Number of the notification in the FUSE protocol (7.44).
const NOTIFY_INC_EPOCH: i32 = 8;
/// Validity of names under kernels that know no epochs.
const OLD_KERNEL_VALID: Duration = Duration::from_secs(1);
