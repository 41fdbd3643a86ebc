//! Giving leases back: kernel caches first, then what is dirty, then the acknowledgement.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hither_net::Responder;
use hither_proto::ids::InodeId;
use hither_proto::meta::{HeldLease, Recall, RecallReply, Reply, Request, request::Op};
use hither_proto::status::{Errno, Status};
use tokio::sync::oneshot;

use crate::client::Inner;
use crate::error::FsError;
use crate::file::{File, Lease};
use crate::session::SessionOwner;

impl SessionOwner for Inner {
    fn zone(&self) -> String {
        self.servers.standpoint().zone.clone()
    }

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
            match inner.answer_recall(&recall).await {
                Ok((reply, raced)) => {
                    responder.ok(&reply);
                    if raced {
                        inner.kernel.forget_pages(ino, ALL).await;
                    }
                }
                // Nothing was given back: the server asks again.
                Err(error) => {
                    tracing::warn!(%ino, %error, "a lease is given back later");
                    responder.fail(Status::RETRY, error.reason);
                }
            }
        });
    }

    fn held(&self) -> (Vec<HeldLease>, Vec<u64>) {
        let mut held = self.cache.held();
        let mut open = Vec::new();
        for file in self.all_files() {
            if file.handles.lock().open > 0 {
                open.push(file.ino.0);
            }
            file.restate();
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

    fn lost(&self, changes: &[Request]) -> bool {
        let goes_on = !self.ends_with_session.load(Ordering::Acquire);
        if !goes_on {
            tracing::error!("the session was ended, and with it the claim: everything fails now");
            self.end_with_session();
        }
        let why = FsError::new(Errno::EIO, "the session was ended by the server");
        for change in changes {
            self.change_lost(change, &why);
        }
        for file in self.all_files() {
            self.lose_file(&file, &why);
        }
        let inodes = self.cache.drop_all();
        let kernel = Arc::clone(&self.kernel);
        tokio::spawn(async move {
            for ino in inodes {
                kernel.forget_pages(ino, ALL).await;
            }
        });
        goes_on
    }

    fn change_lost(&self, change: &Request, why: &FsError) {
        for ino in touched(change) {
            let file = self.file(ino);
            self.lose_file(&file, why);
            self.forget_pages_soon(ino);
            file.data.lock().errors.record(why.clone());
        }
    }

    fn lapsed(&self) {
        let leased: Vec<InodeId> = self
            .all_files()
            .iter()
            .filter(|file| file.lease() != Lease::None)
            .map(|file| file.ino)
            .collect();
        let kernel = Arc::clone(&self.kernel);
        tokio::spawn(async move {
            for ino in leased {
                kernel.forget_pages(ino, ALL).await;
            }
        });
    }
}

/// Inodes and directories whose next fsync has to tell that a change was lost.
fn touched(change: &Request) -> Vec<InodeId> {
    let all = match &change.op {
        Some(Op::WriteReport(op)) => vec![op.ino],
        Some(Op::Setattr(op)) => vec![op.ino],
        Some(Op::SetXattr(op)) => vec![op.ino],
        Some(Op::RemoveXattr(op)) => vec![op.ino],
        Some(Op::PunchHole(op)) => vec![op.ino],
        Some(Op::Create(op)) => vec![op.parent, change.replay_ino],
        Some(Op::Unlink(op)) => vec![op.parent],
        Some(Op::Link(op)) => vec![op.ino, op.new_parent],
        Some(Op::Rename(op)) => vec![op.parent, op.new_parent],
        _ => Vec::new(),
    };
    let real = all.into_iter().filter(|ino| *ino != 0);
    real.map(InodeId).collect()
}

impl Inner {
    /// Drops what the kernel keeps of what is being recalled. The lease is held meanwhile.
    async fn forget_in_kernel(&self, recall: &Recall, names: bool) {
        let ino = InodeId(recall.ino);
        if names {
            self.kernel.forget_entries(ino, &recall.name).await;
        }
        if recall.attributes {
            self.kernel.forget_attributes(ino).await;
        }
    }

    /// A lease is gone without a recall: what was read under it is dropped from the kernel.
    pub(crate) fn forget_pages_soon(&self, ino: InodeId) {
        let forgotten = self.kernel.forget_pages(ino, ALL);
        tokio::spawn(forgotten);
    }

    /// The acknowledgement, and whether pages have to be forgotten once more after it.
    async fn answer_recall(
        self: &Arc<Self>,
        recall: &Recall,
    ) -> Result<(RecallReply, bool), FsError> {
        let ino = InodeId(recall.ino);
        let Some(file) = self.known_file(ino) else {
            if recall.unlinked {
                self.cache.remove(ino);
            }
            if recall.data_lease != 0 && !recall.report_only {
                // What was read under a lease that was forgotten may be in the kernel still.
                self.kernel.forget_pages(ino, ALL).await;
            }
            return Ok((RecallReply::default(), false));
        };
        let mut raced = false;
        let mut reply = RecallReply::default();
        {
            let mut handles = file.handles.lock();
            reply.open = handles.open > 0;
            handles.told |= reply.open;
            handles.orphaned |= reply.open && recall.unlinked;
        }
        if recall.unlinked && !reply.open {
            self.drop_file(&file);
            return Ok((reply, false));
        }
        if recall.data_lease != 0 && recall.report_only {
            reply.report = self.report_only(&file);
        } else if recall.data_lease != 0 {
            raced = self.give_back_recalled(&file, recall).await?;
            reply.pages = !file.data.lock().mapped.is_empty();
            if reply.pages {
                // The lease for them is asked for already: it should not be asked for too late.
                let asked = file.until(|data| data.asking || data.mapped.is_empty());
                let _ = tokio::time::timeout(ASKED, asked).await;
            }
        }
        Ok((reply, raced))
    }

    /// Gives a data lease back. Reads are served under it until the last step, and what they bring
    /// into the kernel's caches is forgotten again; true: some may be there still.
    async fn give_back_recalled(
        self: &Arc<Self>,
        file: &Arc<File>,
        recall: &Recall,
    ) -> Result<bool, FsError> {
        file.await_grant(recall.data_lease).await;
        let _recalled = file.recall_begins();
        let _until_done = self.report_progress(file);
        let to = if recall.keep_shared {
            Lease::Shared
        } else {
            Lease::None
        };
        let mut rounds = ROUNDS;
        let mut stuck = false;
        loop {
            rounds -= 1;
            let reads = file.reads_begun();
            if !recall.keep_shared && !stuck {
                // The kernel may keep a page until an operation is answered for which the exclusive
                // lease is needed: two mounts would wait for each other.
                stuck = tokio::select! {
                    () = self.forget_pages(file) => false,
                    () = file.wants_to_change_for(STUCK) => true,
                };
            }
            // Without holding anybody up; what fails is tried again, and then given up.
            if let Err(error) = self.flush_dirty(file, false).await {
                tracing::debug!(ino = %file.ino, %error, "not stored at the first attempt");
            }
            let _alone = file.gate.write().await;
            let raced = !recall.keep_shared && file.reads_begun() != reads;
            if raced && rounds > 0 && !stuck {
                continue;
            }
            file.data.lock().note_recall(recall.data_lease);
            self.give_back(file, to).await?;
            // A torn file keeps nothing, whatever was asked for.
            let unasked = recall.keep_shared && file.lease() == Lease::None;
            return Ok(raced || unasked || stuck);
        }
    }

    /// Reports from time to time what has been written meanwhile, until what it gives is dropped: a
    /// flush may take longer than the server waits for one that shows no progress. Where nothing was
    /// written there is nothing to report.
    fn report_progress(self: &Arc<Self>, file: &Arc<File>) -> oneshot::Sender<()> {
        let (inner, file) = (Arc::clone(self), Arc::clone(file));
        let (running, mut done) = oneshot::channel();
        tokio::spawn(async move {
            let pause = (inner.config.timeout / PROGRESS_PART).min(PROGRESS_MAX);
            // A report that was begun is always finished.
            while tokio::time::timeout(pause, &mut done).await.is_err() {
                if let Err(error) = inner.report(&file, false).await {
                    tracing::debug!(ino = %file.ino, %error, "progress is reported later");
                }
            }
        });
        running
    }

    /// Size and times as they are now. Only what is applied counts as written.
    fn report_only(&self, file: &File) -> Option<hither_proto::meta::WriteReport> {
        let hint = self.cache.hint(file.ino);
        let data = file.data.lock();
        let Lease::Exclusive(lease) = data.lease else {
            return None;
        };
        Some(data.report(file.ino, hint, lease))
    }
}

/// Time the kernel gets to forget a file that somebody here waits to change. What takes so long is a
/// cut that holds up the pages that are written back, while another mount does the same.
const STUCK: Duration = Duration::from_secs(1);
/// All pages of a file.
const ALL: Range<u64> = 0..u64::MAX;
/// Longest wait until the lease for mapped pages is asked for.
const ASKED: Duration = Duration::from_millis(100);
/// Attempts to find a moment without reads before a lease ends.
const ROUNDS: u32 = 3;
/// While a lease is being given back, progress is reported this often within the time an operation
/// may take: by default every ten seconds, where the server waits for 180.
const PROGRESS_PART: u32 = 3;
/// However long an operation may take: a third of the time for which the server waits.
const PROGRESS_MAX: Duration = Duration::from_secs(60);
