//! Giving leases back: kernel caches first, then what is dirty, then the acknowledgement.

use std::sync::Arc;

use hither_net::Responder;
use hither_proto::ids::InodeId;
use hither_proto::meta::{HeldLease, Recall, RecallReply, Reply};
use hither_proto::status::Errno;

use crate::client::Inner;
use crate::error::FsError;
use crate::file::{File, Lease};
use crate::session::SessionOwner;

impl SessionOwner for Inner {
    fn recall(&self, recall: Recall, responder: Responder) {
        // On the reading task: replies that were sent before this recall are void from here on.
        let ino = InodeId(recall.ino);
        if recall.attributes {
            self.cache.recall_attributes(ino);
        }
        let mut names = false;
        if recall.entries {
            let name = (!recall.name.is_empty()).then_some(&recall.name);
            names = self.cache.recall_entries(ino, name);
        }
        if recall.data_lease != 0 && !recall.report_only {
            self.cache.note_recall(ino);
        }
        let Some(inner) = self.me.upgrade() else {
            return;
        };
        tokio::spawn(async move {
            inner.forget_in_kernel(&recall, names).await;
            let reply = inner.answer_recall(&recall).await;
            responder.ok(&reply);
        });
    }

    fn held(&self) -> (Vec<HeldLease>, Vec<u64>) {
        let mut held = self.cache.held();
        let mut open = Vec::new();
        for file in self.all_files() {
            if file.handles.lock().open > 0 {
                open.push(file.ino.0);
            }
            let (data_lease, exclusive) = match file.lease() {
                Lease::None => continue,
                Lease::Shared => (1, false),
                Lease::Exclusive(lease) => (lease.0, true),
            };
            let hint = self.cache.hint(file.ino);
            held.push(HeldLease {
                ino: file.ino.0,
                hint,
                data_lease,
                exclusive,
                ..HeldLease::default()
            });
        }
        (held, open)
    }

    fn replayed(&self, reply: &Reply) {
        let Some(inode) = reply.inode.as_ref().filter(|_| reply.data_exclusive) else {
            return;
        };
        if let Some(file) = self.known_file(InodeId(inode.ino)) {
            let mut data = file.data.lock();
            if let Lease::Exclusive(lease) = &mut data.lease {
                lease.0 = lease.0.max(reply.data_lease);
            }
        }
    }

    fn lost(&self) {
        let why = FsError::new(Errno::EIO, "the session was ended by the server");
        for file in self.all_files() {
            self.lose_file(&file, &why);
        }
        let inodes = self.cache.drop_all();
        let kernel = Arc::clone(&self.kernel);
        tokio::spawn(async move {
            for ino in inodes {
                kernel.forget_inode(ino, true).await;
            }
        });
    }
}

impl Inner {
    /// Drops what the kernel keeps of what is being recalled. The lease is held meanwhile.
    async fn forget_in_kernel(&self, recall: &Recall, names: bool) {
        let ino = InodeId(recall.ino);
        if names {
            self.kernel.forget_entries(ino, &recall.name).await;
        }
        let data = recall.data_lease != 0 && !recall.report_only && !recall.keep_shared;
        if recall.attributes || data {
            self.kernel.forget_inode(ino, data).await;
        }
    }

    async fn answer_recall(self: &Arc<Self>, recall: &Recall) -> RecallReply {
        let ino = InodeId(recall.ino);
        let Some(file) = self.known_file(ino) else {
            if recall.unlinked {
                self.cache.remove(ino);
            }
            return RecallReply::default();
        };
        let mut reply = RecallReply::default();
        {
            let mut handles = file.handles.lock();
            reply.open = handles.open > 0;
            handles.told |= reply.open;
            handles.orphaned |= reply.open && recall.unlinked;
        }
        if recall.unlinked && !reply.open {
            self.drop_file(&file);
            return reply;
        }
        if recall.data_lease != 0 {
            reply.report = if recall.report_only {
                self.report_only(&file).await
            } else {
                let to = if recall.keep_shared {
                    Lease::Shared
                } else {
                    Lease::None
                };
                // First without holding anybody up, then the rest with writers held off.
                self.flush_dirty(&file, false).await;
                let _alone = file.gate.write().await;
                self.give_back(&file, to).await
            };
        }
        reply
    }

    /// Size and times as they are now. Only what is applied counts as written.
    async fn report_only(&self, file: &File) -> Option<hither_proto::meta::WriteReport> {
        let hint = self.cache.hint(file.ino);
        let data = file.data.lock();
        let Lease::Exclusive(lease) = data.lease else {
            return None;
        };
        Some(data.report(file.ino, hint, lease))
    }
}
