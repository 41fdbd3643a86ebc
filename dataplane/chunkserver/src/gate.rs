//! Adopting epochs: requests of a new epoch begin after those of the old one are done, and
//! requests of a group that have to wait keep their order.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use hither_proto::ids::{Epoch, GroupId};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// What is under way in each group. `R` is a request that waits.
pub(crate) struct Gates<R> {
    shared: Arc<Shared<R>>,
}

struct Shared<R> {
    groups: Mutex<BTreeMap<GroupId, Gate<R>>>,
    /// A request of some group is done.
    done: Notify,
}

struct Gate<R> {
    epoch: Epoch,
    under_way: usize,
    waiting: VecDeque<R>,
    /// Somebody takes requests out of `waiting`.
    served: bool,
}

/// Outcome of [`Gates::enter`].
pub(crate) enum Entered<R> {
    /// Go on.
    In(Ticket<R>),
    /// Requests of an older epoch are under way.
    Draining,
    /// An even newer epoch was adopted.
    Stale(Epoch),
}

/// A request under way. Dropped when its effect on this server is complete.
pub(crate) struct Ticket<R> {
    shared: Arc<Shared<R>>,
    group: GroupId,
}

impl<R> Default for Gates<R> {
    fn default() -> Self {
        Self {
            shared: Arc::new(Shared {
                groups: Mutex::default(),
                done: Notify::new(),
            }),
        }
    }
}

impl<R> Gates<R> {
    /// Begins a request of this epoch.
    pub(crate) fn enter(&self, group: GroupId, epoch: Epoch) -> Entered<R> {
        let mut groups = self.shared.groups.lock();
        let gate = groups.entry(group).or_insert_with(|| Gate {
            epoch,
            under_way: 0,
            waiting: VecDeque::new(),
            served: false,
        });
        if epoch < gate.epoch {
            return Entered::Stale(gate.epoch);
        }
        if epoch > gate.epoch {
            if gate.under_way > 0 {
                return Entered::Draining;
            }
            gate.epoch = epoch;
        }
        gate.under_way += 1;
        Entered::In(Ticket {
            shared: Arc::clone(&self.shared),
            group,
        })
    }

    /// Whether requests of the group wait, so that a new one has to wait behind them.
    pub(crate) fn has_waiting(&self, group: GroupId) -> bool {
        let groups = self.shared.groups.lock();
        groups.get(&group).is_some_and(|gate| gate.served)
    }

    /// Lets a request wait behind the others of its group. `Ok(true)`: the caller has to start
    /// serving them; an error gives the request back because too many wait.
    pub(crate) fn park(&self, group: GroupId, request: R) -> Result<bool, R> {
        let mut groups = self.shared.groups.lock();
        let gate = groups.entry(group).or_insert_with(|| Gate {
            epoch: Epoch(0),
            under_way: 0,
            waiting: VecDeque::new(),
            served: false,
        });
        if gate.waiting.len() >= WAITING_MAX {
            return Err(request);
        }
        gate.waiting.push_back(request);
        Ok(!std::mem::replace(&mut gate.served, true))
    }

    /// The next request that waits; `None` ends the serving.
    pub(crate) fn next_waiting(&self, group: GroupId) -> Option<R> {
        let mut groups = self.shared.groups.lock();
        let gate = groups.get_mut(&group)?;
        let next = gate.waiting.pop_front();
        gate.served = next.is_some();
        if next.is_none() && gate.epoch == Epoch(0) && gate.under_way == 0 {
            // Nothing of it was ever served: the group may be one that only a sender knows.
            groups.remove(&group);
        }
        next
    }

    /// Waits until nothing older than this epoch is under way.
    pub(crate) async fn drained(&self, group: GroupId, epoch: Epoch) {
        loop {
            let done = self.shared.done.notified();
            tokio::pin!(done);
            done.as_mut().enable();
            {
                let groups = self.shared.groups.lock();
                let busy = groups
                    .get(&group)
                    .is_some_and(|gate| gate.epoch < epoch && gate.under_way > 0);
                if !busy {
                    return;
                }
            }
            done.await;
        }
    }

    /// Waits until nothing at all is under way.
    pub(crate) async fn idle(&self) {
        loop {
            let done = self.shared.done.notified();
            tokio::pin!(done);
            done.as_mut().enable();
            let busy = self
                .shared
                .groups
                .lock()
                .values()
                .any(|gate| gate.under_way > 0 || gate.served);
            if !busy {
                return;
            }
            done.await;
        }
    }
}

impl<R> Drop for Ticket<R> {
    fn drop(&mut self) {
        let last = {
            let mut groups = self.shared.groups.lock();
            groups.get_mut(&self.group).is_some_and(|gate| {
                gate.under_way -= 1;
                gate.under_way == 0
            })
        };
        if last {
            self.shared.done.notify_waiters();
        }
    }
}

/// Requests of one group that may wait; beyond, the answer is `BUSY`.
const WAITING_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: GroupId = GroupId(1);

    #[test]
    fn a_new_epoch_waits_for_the_old_one() {
        let gates: Gates<u32> = Gates::default();
        let Entered::In(first) = gates.enter(GROUP, Epoch(3)) else {
            panic!("the first epoch is adopted at once");
        };
        assert!(matches!(gates.enter(GROUP, Epoch(4)), Entered::Draining));
        let Entered::In(second) = gates.enter(GROUP, Epoch(3)) else {
            panic!("the old epoch goes on until the new one is adopted");
        };
        drop((first, second));
        assert!(matches!(gates.enter(GROUP, Epoch(4)), Entered::In(_)));
        assert!(matches!(
            gates.enter(GROUP, Epoch(3)),
            Entered::Stale(Epoch(4))
        ));
    }

    #[test]
    fn waiting_requests_keep_their_order() {
        let gates: Gates<u32> = Gates::default();
        assert!(!gates.has_waiting(GROUP));
        assert_eq!(gates.park(GROUP, 1), Ok(true));
        assert_eq!(gates.park(GROUP, 2), Ok(false));
        assert!(gates.has_waiting(GROUP));
        assert_eq!(gates.next_waiting(GROUP), Some(1));
        assert_eq!(gates.park(GROUP, 3), Ok(false));
        assert_eq!(gates.next_waiting(GROUP), Some(2));
        assert_eq!(gates.next_waiting(GROUP), Some(3));
        assert!(
            gates.has_waiting(GROUP),
            "the last one is still being served"
        );
        assert_eq!(gates.next_waiting(GROUP), None);
        assert!(!gates.has_waiting(GROUP));
    }

    #[tokio::test]
    async fn drained_and_idle_wake_up() {
        let gates: Arc<Gates<u32>> = Arc::default();
        let Entered::In(ticket) = gates.enter(GROUP, Epoch(3)) else {
            panic!("adopted at once");
        };
        let waiter = {
            let gates = Arc::clone(&gates);
            tokio::spawn(async move {
                gates.drained(GROUP, Epoch(4)).await;
                gates.idle().await;
            })
        };
        tokio::task::yield_now().await;
        assert!(!waiter.is_finished());
        drop(ticket);
        waiter.await.unwrap();
    }
}
