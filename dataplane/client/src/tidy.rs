//! What a client does now and then without being asked: stores what stays unsynced, reports, closes
//! open marks, gives back leases nobody uses.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::StreamExt as _;
use hither_clustermap::ClusterView;
use hither_proto::ids::{Epoch, GroupId, LeaseId, RankId};
use hither_proto::meta::{GiveBack, UnusedLease, request::Op};
use tokio::sync::{OwnedMutexGuard, OwnedRwLockWriteGuard};

use crate::client::Inner;
use crate::file::{File, Lease};
use crate::session::How;

/// Runs until the client is gone.
pub(crate) async fn tidy(weak: Weak<Inner>) {
    loop {
        tokio::time::sleep(TIDY).await;
        let Some(inner) = weak.upgrade() else { return };
        let much = inner.account.is_short()
            || inner.unsynced_bytes.get() > inner.config.unsynced_bytes_max / 2;
        let files = futures::stream::iter(inner.all_files());
        files
            .for_each_concurrent(TIDIED_AT_ONCE, |file| {
                let inner = Arc::clone(&inner);
                async move { inner.tidy_file(&file, much).await }
            })
            .await;
        let inodes_max = inner.account.inodes_max(inner.config.cached_inodes_max);
        inner.cache.keep_at_most(inodes_max);
        inner.forget_idle_streams();
        inner.close_idle_marks().await;
        inner.forget_idle_files().await;
    }
}

impl Inner {
    async fn tidy_file(self: &Arc<Self>, file: &Arc<File>, much: bool) {
        let open = file.handles.lock().open > 0;
        // Somebody else may keep the file for long: other files want to be looked after.
        self.fetch_for_mapped_soon(file);
        let (dirty, unsynced, report) = {
            let mut data = file.data.lock();
            // Whoever is at it already is not waited for: other files want to be looked after.
            let flushing = data.flusher_runs || file.flushing.try_lock().is_err();
            let dirty = !data.dirty.is_empty() && !flushing;
            let pending = !data.dirty.is_empty() || !data.in_flight.is_empty();
            let unsynced = !data.unsynced.is_empty() && (much || !open && !pending);
            let unreported = !data.unreported.is_empty() || data.unreported_size;
            data.ticks_unreported = if unreported {
                data.ticks_unreported + 1
            } else {
                0
            };
            data.ticks_idle = if open || pending || unreported {
                0
            } else {
                data.ticks_idle.saturating_add(1)
            };
            (dirty, unsynced, data.ticks_unreported >= REPORT_TICKS)
        };
        // Should this mount die, its files end where the last report says.
        if report && let Err(error) = self.report(file, false).await {
            tracing::debug!(ino = %file.ino, %error, "size and times are reported later");
        }
        if dirty && let Err(error) = self.flush_dirty(file, false).await {
            tracing::debug!(ino = %file.ino, %error, "kept for the next fsync or close");
        }
        if unsynced && let Err(error) = self.flush_stable(file).await {
            // It is kept, and tried again the next time.
            tracing::debug!(ino = %file.ino, %error, "data is not stable yet");
        }
    }

    /// Stops reading ahead for descriptors that have not been read since the last time.
    fn forget_idle_streams(&self) {
        self.streams.lock().retain(|stream| {
            let Some(open) = stream.upgrade() else {
                return false;
            };
            open.stream.lock().rest();
            true
        });
    }

    /// Open marks of files that nobody writes any more: all members have flushed, so a member that
    /// restarts need not compare their chunks.
    async fn close_idle_marks(&self) {
        let map = self.link.map();
        let mut groups: BTreeMap<GroupId, Vec<Arc<File>>> = BTreeMap::new();
        let mut count = 0;
        for file in self.all_files() {
            if count >= CLOSED_AT_ONCE {
                break;
            }
            let idle: BTreeSet<GroupId> = file.data.lock().idle_groups();
            count += usize::from(!idle.is_empty());
            for group in idle {
                groups.entry(group).or_default().push(Arc::clone(&file));
            }
        }
        for (group, files) in groups {
            if let Some(epoch) = map.epoch(group) {
                self.close_marks_of(&map, (group, epoch), &files).await;
            }
        }
    }

    /// Closes the marks of one group. The gates are held meanwhile, so nothing new is on its way to
    /// a member that has not closed its mark yet.
    async fn close_marks_of(
        &self,
        map: &ClusterView,
        (group, epoch): (GroupId, Epoch),
        files: &[Arc<File>],
    ) {
        let mut gates: Vec<OwnedRwLockWriteGuard<()>> = Vec::new();
        let mut marks = Vec::new();
        for file in files {
            let Ok(gate) = Arc::clone(&file.gate).try_write_owned() else {
                continue;
            };
            marks.extend(file.data.lock().take_idle_marks(group));
            gates.push(gate);
        }
        if marks.is_empty() {
            return;
        }
        let group = (group, epoch);
        let in_doubt = self.close_marks(map, group, &marks, CLOSE_TIMEOUT).await;
        for file in files.iter().filter(|_| !in_doubt.is_empty()) {
            file.data.lock().note_torn(&in_doubt);
        }
    }

    /// Keeps the number of files whose leases are held without need within bounds.
    async fn forget_idle_files(self: &Arc<Self>) {
        // As many as there is memory for, beside what is kept of names.
        let most = self.account.inodes_max(IDLE_FILES_MAX * 10) / 10;
        let surplus = self.file_count().saturating_sub(most);
        let mut left = surplus.saturating_sub(self.forget_unused_files(surplus).await);
        if left == 0 {
            return;
        }
        for file in self.all_files() {
            if left == 0 {
                return;
            }
            if file.handles.lock().open > 0 {
                continue;
            }
            let reads = file.reads_begun();
            if file.lease() != Lease::None {
                self.forget_pages(&file).await;
            }
            let _alone = file.gate.write().await;
            if file.reads_begun() != reads {
                // Read meanwhile: not idle, and in the kernel again.
                continue;
            }
            if let Err(error) = self.give_back(&file, Lease::None).await {
                tracing::debug!(ino = %file.ino, %error, "a lease could not be given back");
                continue;
            }
            self.forget_if_unused(&file);
            left -= 1;
        }
    }
}

impl Inner {
    /// Gives back, many at a time, leases under which nothing was done: those of files that were
    /// made, closed and left alone. How many files were forgotten.
    pub(crate) async fn forget_unused_files(&self, most: usize) -> usize {
        let (mut forgotten, mut answered) = (0, true);
        for files in self.all_files()[..].chunks(GIVEN_BACK_AT_A_TIME) {
            let room = most - forgotten;
            if room == 0 || !answered {
                break;
            }
            let mut by_rank: BTreeMap<RankId, GiveBack> = BTreeMap::new();
            // Nobody asks for a lease on them before the server has answered.
            let mut guards = Vec::new();
            let mut given = Vec::new();
            for file in files {
                if guards.len() == room {
                    break;
                }
                let Some((lease, guard)) = give_up_unused(file) else {
                    continue;
                };
                guards.push(guard);
                given.push(file.ino);
                let rank = self.rank_of_inode(file.ino);
                by_rank.entry(rank).or_default().leases.push(UnusedLease {
                    ino: file.ino.0,
                    lease: lease.0,
                });
            }
            for (rank, op) in by_rank {
                let asked = self.ask_rank(rank, Op::GiveBack(op), How::default()).await;
                if let Err(error) = asked {
                    // The server goes on holding them for us, and takes them back by a recall.
                    tracing::debug!(%error, "leases could not be given back");
                    answered = false;
                }
            }
            forgotten += given.len();
            drop(guards);
            self.forget_given_back(&given);
        }
        forgotten
    }
}

/// Takes the lease away from a file without descriptors if nothing was done under it; until the
/// guard is dropped nobody asks for another.
fn give_up_unused(file: &Arc<File>) -> Option<(LeaseId, OwnedMutexGuard<()>)> {
    let guard = Arc::clone(&file.acquiring).try_lock_owned().ok()?;
    let _alone = file.gate.try_write().ok()?;
    let handles = file.handles.lock();
    if handles.open > 0 {
        return None;
    }
    let mut data = file.data.lock();
    let lease = data.unused_lease()?;
    data.drop_lease(Lease::None);
    Some((lease, guard))
}

/// How often the client looks after itself.
const TIDY: Duration = Duration::from_secs(2);
/// Times a file is seen unreported before it is reported without being asked.
const REPORT_TICKS: u32 = 3;
/// Files looked after at the same time: one that waits for its servers holds up no other.
const TIDIED_AT_ONCE: usize = 16;
/// Times a file is seen idle before its open marks are closed, and files done at a time.
pub(crate) const IDLE_TICKS: u32 = 5;
const CLOSED_AT_ONCE: usize = 512;
/// Time a member has to close marks.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Files without descriptors whose leases are kept.
const IDLE_FILES_MAX: usize = 20_000;
/// Leases given back in one request.
const GIVEN_BACK_AT_A_TIME: usize = 4096;
