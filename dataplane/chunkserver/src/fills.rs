//! The fillings of a server: one for each group in which it lacks something, begun and ended as the
//! map says.

use std::collections::BTreeMap;
use std::sync::Arc;

use hither_chunkstore::Error;
use hither_proto::ids::{ChunkId, ChunkserverId, Epoch, GroupId};
use hither_proto::map::{Member, MemberState};
use parking_lot::Mutex;

use crate::authority::{Mandate, Need};
use crate::fill::{Fill, Trouble, has_partial};
use crate::handler::Judged;
use crate::server::Inner;
use crate::status::Refusal;
use crate::throttle::Throttle;

/// How far the filling of a group is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FillProgress {
    /// Epoch it is for.
    pub epoch: u64,
    /// Copies to be fetched, as far as known.
    pub chunks: u64,
    /// Copies fetched.
    pub chunks_done: u64,
    /// Bytes fetched.
    pub bytes_done: u64,
    /// Everything is here: the manager is being told.
    pub caught_up: bool,
}

/// The fillings of this server, at most one per group.
pub(crate) struct Fills {
    groups: Mutex<BTreeMap<GroupId, Arc<Fill>>>,
    pub(crate) throttle: Throttle,
}

impl Fills {
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        Self {
            groups: Mutex::default(),
            throttle: Throttle::new(bytes_per_second),
        }
    }

    /// Whether the base of a chunk may be missing here, so that writes have to be kept apart.
    pub(crate) fn lacks(&self, group: GroupId, epoch: Epoch, chunk: ChunkId) -> bool {
        let groups = self.groups.lock();
        let at_epoch = |fill: &&Arc<Fill>| fill.mandate.epoch == epoch && !fill.mends;
        let Some(fill) = groups.get(&group).filter(at_epoch) else {
            return true;
        };
        fill.lacks(chunk)
    }

    /// What every filling has reached.
    pub(crate) fn progress(&self) -> BTreeMap<GroupId, FillProgress> {
        let groups = self.groups.lock();
        let progress = groups.iter().map(|(group, fill)| (*group, fill.progress()));
        progress.collect()
    }

    /// Fillings that are complete, for the manager.
    pub(crate) fn caught_up(&self) -> Vec<Mandate> {
        let groups = self.groups.lock();
        groups
            .values()
            .filter(|fill| !fill.mends && fill.is_caught_up())
            .map(|fill| fill.mandate)
            .collect()
    }

    /// Begins and ends fillings as the map says.
    pub(crate) fn follow(&self, inner: &Arc<Inner>) {
        let map = inner.link.map();
        let mine = |members: &[Member]| {
            members
                .iter()
                .find(|member| member.server == inner.me.0)
                .map(|member| member.state)
        };
        let serving = [MemberState::Filling, MemberState::InSync].map(i32::from);
        let wanted: BTreeMap<GroupId, Epoch> = map
            .groups()
            .filter(|(_, group)| mine(&group.members).is_some_and(|state| serving.contains(&state)))
            .map(|(id, group)| (id, Epoch(group.epoch)))
            .collect();
        let mut groups = self.groups.lock();
        let mut old = std::mem::take(&mut *groups);
        for (id, epoch) in wanted {
            let before = old.remove(&id);
            if let Some(same) = before.as_ref().filter(|old| old.mandate.epoch == epoch) {
                groups.insert(id, Arc::clone(same));
                continue;
            }
            let Judged::Granted(mandate) = inner.judge(id, epoch, Need::Chain) else {
                continue;
            };
            if mandate.filling || before.is_some() || has_partial(inner, &mandate) {
                groups.insert(id, Fill::start(inner, mandate, before));
            }
        }
        for gone in old.into_values() {
            gone.cancel();
        }
    }

    /// Lets all fillings end as soon as they notice.
    pub(crate) fn cancel(&self) {
        for fill in self.groups.lock().values() {
            fill.cancel();
        }
    }

    /// Ends all fillings.
    pub(crate) async fn close(&self) {
        let fills = std::mem::take(&mut *self.groups.lock());
        for fill in fills.into_values() {
            fill.end().await;
        }
    }

    /// Takes a copy over from `source`, whose copy is final. Stable when this returns.
    pub(crate) async fn refill(
        &self,
        inner: &Arc<Inner>,
        mandate: Mandate,
        chunk: ChunkId,
        source: ChunkserverId,
    ) -> Result<(), Refusal> {
        let fill = {
            let groups = self.groups.lock();
            let found = groups.get(&mandate.group);
            found
                .filter(|fill| fill.mandate.epoch == mandate.epoch)
                .cloned()
        };
        let Some(fill) = fill else {
            return Err(Refusal::retry("the filling has not begun yet"));
        };
        let filled = fill.take_over(inner, chunk, source, true).await;
        match filled {
            Ok(()) => {}
            Err(Trouble::Cancelled) => return Err(Refusal::retry("the group has moved on")),
            Err(Trouble::Later(text)) => return Err(Refusal::retry(text)),
        }
        let (sender, receiver) = tokio::sync::oneshot::channel();
        inner.disk(mandate.disk)?.flush(&[chunk], move |outcome| {
            // Whoever asked for it may be gone.
            let _ = sender.send(outcome);
        });
        receiver.await.unwrap_or(Err(Error::Closed))?;
        Ok(())
    }
}
