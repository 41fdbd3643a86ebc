//! Making the kernel forget. Runs on a thread that serves no request.
//!
//! Invalidating an entry needs the parent's inode lock, which the kernel holds during its own
//! creates there; so names are invalidated by raising the mount's epoch (kernel 6.16), which takes
//! no lock. Older kernels get names for a second at most, which is then waited out.

use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::time::Duration;

use bytes::Bytes;
use fuser::{INodeNo, Notifier};
use futures::future::BoxFuture;
use hither_client::KernelCaches;
use hither_proto::ids::InodeId;
use parking_lot::Mutex;
use tokio::sync::oneshot;

/// The kernel's caches of one mount.
#[derive(Debug, Default)]
pub(crate) struct Kernel {
    requests: Mutex<Option<mpsc::Sender<Forget>>>,
    /// Names may be kept for long: the kernel knows epochs.
    knows_epochs: std::sync::atomic::AtomicBool,
    root: std::sync::atomic::AtomicU64,
}

struct Forget {
    what: What,
    done: oneshot::Sender<()>,
}

enum What {
    Names,
    Attributes(InodeId),
    Pages(InodeId),
}

impl Kernel {
    /// Starts the thread, once the mount stands.
    pub(crate) fn attach(&self, notifier: Notifier, device: OwnedFd, root: InodeId) {
        use std::sync::atomic::Ordering;
        let knows = raise_epoch(&device);
        self.knows_epochs.store(knows, Ordering::Release);
        self.root.store(root.0, Ordering::Release);
        let (requests, inbox) = mpsc::channel();
        let thread = std::thread::Builder::new().name("fuse-notify".into());
        let spawned = thread.spawn(move || run(&inbox, &notifier, &device, root));
        match spawned {
            Ok(_) => *self.requests.lock() = Some(requests),
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

    fn forget(&self, what: What) -> BoxFuture<'static, ()> {
        let (done, waiting) = oneshot::channel();
        let sent = match &*self.requests.lock() {
            Some(requests) => requests.send(Forget { what, done }).is_ok(),
            None => false,
        };
        Box::pin(async move {
            if sent {
                // A thread that has ended had nothing left to invalidate.
                let _ = waiting.await;
            }
        })
    }
}

impl KernelCaches for Kernel {
    fn forget_inode(&self, ino: InodeId, data: bool) -> BoxFuture<'static, ()> {
        self.forget(if data {
            What::Pages(ino)
        } else {
            What::Attributes(ino)
        })
    }

    fn forget_entries(&self, _: InodeId, _: &Bytes) -> BoxFuture<'static, ()> {
        if self.knows_epochs.load(std::sync::atomic::Ordering::Acquire) {
            return self.forget(What::Names);
        }
        Box::pin(tokio::time::sleep(OLD_KERNEL_VALID))
    }
}

fn run(inbox: &mpsc::Receiver<Forget>, notifier: &Notifier, device: &OwnedFd, root: InodeId) {
    while let Ok(first) = inbox.recv() {
        let mut names = Vec::new();
        let mut next = Some(first);
        while let Some(Forget { what, done }) = next {
            match what {
                // Any number of names is forgotten with one epoch.
                What::Names => names.push(done),
                What::Attributes(ino) => {
                    invalidate(notifier, outward(ino, root), -1);
                    let _ = done.send(());
                }
                What::Pages(ino) => {
                    invalidate(notifier, outward(ino, root), 0);
                    let _ = done.send(());
                }
            }
            next = inbox.try_recv().ok();
        }
        if !names.is_empty() {
            raise_epoch(device);
            for done in names {
                // Whoever waited may have given up.
                let _ = done.send(());
            }
        }
    }
}

fn outward(ino: InodeId, root: InodeId) -> INodeNo {
    INodeNo(if ino == root { 1 } else { ino.0 })
}

fn invalidate(notifier: &Notifier, ino: INodeNo, offset: i64) {
    if let Err(error) = notifier.inval_inode(ino, offset, 0) {
        // The kernel does not know the inode: it keeps nothing of it.
        tracing::trace!(ino = ino.0, %error, "nothing to invalidate");
    }
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
