//! The fillings of a server: one for each group in which it lacks something, begun and ended as the
//! map says.

use std::collections::BTreeMap;
use std::sync::Arc;

use hither_chunkstore::Error;
use hither_proto::ids::{ChunkId, ChunkserverId, Epoch, GroupId};
use hither_proto::map::{Member, MemberState};
use hither_proto::status::Status;
use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

use crate::authority::{Mandate, Need};
use crate::fill::{Fill, NO_SOURCE, Trouble, has_partial, is_partial};
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

    /// Fillings that are complete, for the manager. One in which a copy is being taken over again is
    /// not: nobody but its source could complete that.
    pub(crate) fn caught_up(&self, inner: &Inner) -> Vec<Mandate> {
        let groups = self.groups.lock();
        groups
            .values()
            .filter(|fill| !fill.mends && fill.is_caught_up())
            .map(|fill| fill.mandate)
            .filter(|mandate| !has_partial(inner, mandate))
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

    /// Makes a copy ready for a change that `source`, whose copy is final, has made already. A
    /// complete copy is the caller's alone for as long as what is returned is kept; one that lacks
    /// bytes is taken over whole, with the change, and stable.
    ///
    /// A complete copy is not taken over too: it would be incomplete for a while, and the manager
    /// may be making this member in-sync at the same time.
    pub(crate) async fn follow_change(
        &self,
        inner: &Arc<Inner>,
        mandate: Mandate,
        chunk: ChunkId,
        source: ChunkserverId,
    ) -> Result<Followed, Refusal> {
        let fill = self.at(inner, mandate)?;
        let alone = fill.alone(chunk).await;
        let held = inner.disk(mandate.disk)?.entry(chunk);
        let whole = held.is_some_and(|entry| entry.exists() && !entry.is_partial());
        if whole && !fill.lacks(chunk) {
            return Ok(Followed::Complete(alone));
        }
        taken(fill.take_from(inner, chunk, source, true).await)?;
        let (sender, receiver) = tokio::sync::oneshot::channel();
        inner.disk(mandate.disk)?.flush(&[chunk], move |outcome| {
            // Whoever asked for it may be gone.
            let _ = sender.send(outcome);
        });
        receiver.await.unwrap_or(Err(Error::Closed))?;
        Ok(Followed::TakenOver)
    }

    /// Completes a copy of an in-sync member that is partial still, before it is changed: what is
    /// fetched for it comes from copies that may not have the change yet.
    pub(crate) async fn complete(
        &self,
        inner: &Arc<Inner>,
        mandate: Mandate,
        chunk: ChunkId,
    ) -> Result<(), Refusal> {
        if !is_partial(inner, &mandate, chunk) {
            return Ok(());
        }
        let fill = self.at(inner, mandate)?;
        let taken_over = match fill.sources(inner) {
            Ok(sources) => fill.take_over(inner, chunk, &sources).await,
            Err(trouble) => Err(trouble),
        };
        taken(taken_over)
    }

    /// Keeps a copy from being taken over for as long as what is returned is kept; `None` for one
    /// that lacks nothing.
    pub(crate) async fn alone(
        &self,
        inner: &Arc<Inner>,
        mandate: Mandate,
        chunk: ChunkId,
    ) -> Result<Option<OwnedMutexGuard<()>>, Refusal> {
        if !is_partial(inner, &mandate, chunk) {
            return Ok(None);
        }
        let fill = self.at(inner, mandate)?;
        Ok(Some(fill.alone(chunk).await))
    }

    /// The filling of the mandate's epoch. An in-sync member's begins when it is needed, should its
    /// copies have become partial after the epoch was taken note of.
    fn at(&self, inner: &Arc<Inner>, mandate: Mandate) -> Result<Arc<Fill>, Refusal> {
        let mut groups = self.groups.lock();
        let found = groups.get(&mandate.group).map(|fill| fill.mandate.epoch);
        match found {
            Some(epoch) if epoch == mandate.epoch => {}
            Some(epoch) if epoch > mandate.epoch => {
                return Err(Refusal::retry("the group has moved on"));
            }
            _ if mandate.filling => {
                return Err(Refusal::retry("the filling has not begun yet"));
            }
            _ => {
                let before = groups.remove(&mandate.group);
                groups.insert(mandate.group, Fill::start(inner, mandate, before));
            }
        }
        let fill = groups.get(&mandate.group).cloned();
        fill.ok_or_else(|| Refusal::retry("the filling has not begun yet"))
    }
}

/// Outcome of [`Fills::follow_change`].
pub(crate) enum Followed {
    /// The copy is the source's, with the change.
    TakenOver,
    /// The copy is complete and still lacks the change.
    Complete(OwnedMutexGuard<()>),
}

fn taken(outcome: Result<(), Trouble>) -> Result<(), Refusal> {
    match outcome {
        Ok(()) => Ok(()),
        Err(Trouble::Cancelled) => Err(Refusal::retry("the group has moved on")),
        Err(Trouble::NoSource) => Err(Refusal::new(Status::TOO_FEW_COPIES, NO_SOURCE)),
        Err(trouble) => Err(Refusal::retry(trouble.to_string())),
    }
}
