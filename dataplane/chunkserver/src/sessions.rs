//! Sessions that are refused, and what each has under way.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use hither_proto::ids::SessionId;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Fenced sessions and the writes of all.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    state: Mutex<State>,
    done: Notify,
}

#[derive(Debug, Default)]
struct State {
    fenced: BTreeSet<SessionId>,
    /// In the order in which they were fenced.
    order: VecDeque<SessionId>,
    under_way: BTreeMap<SessionId, usize>,
}

/// A write under way.
#[derive(Debug)]
pub(crate) struct Writing {
    sessions: Arc<Sessions>,
    session: SessionId,
}

impl Sessions {
    /// Begins a write; `None` when the session is fenced.
    pub(crate) fn begin(self: &Arc<Self>, session: SessionId) -> Option<Writing> {
        let mut state = self.state.lock();
        if state.fenced.contains(&session) {
            return None;
        }
        *state.under_way.entry(session).or_default() += 1;
        drop(state);
        Some(Writing {
            sessions: Arc::clone(self),
            session,
        })
    }

    /// Refuses a session from now on, and waits until nothing of it is under way.
    pub(crate) async fn fence(&self, session: SessionId) {
        {
            let mut state = self.state.lock();
            if state.fenced.insert(session) {
                state.order.push_back(session);
            }
            if state.order.len() > FENCED_MAX
                && let Some(oldest) = state.order.pop_front()
            {
                // Its leases are long sealed: what it writes is refused for that.
                state.fenced.remove(&oldest);
            }
        }
        loop {
            let done = self.done.notified();
            tokio::pin!(done);
            done.as_mut().enable();
            if !self.state.lock().under_way.contains_key(&session) {
                return;
            }
            done.await;
        }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        let last = {
            let mut state = self.sessions.state.lock();
            let Some(count) = state.under_way.get_mut(&self.session) else {
                return;
            };
            *count -= 1;
            let last = *count == 0;
            if last {
                state.under_way.remove(&self.session);
            }
            last
        };
        if last {
            self.sessions.done.notify_waiters();
        }
    }
}

/// Fenced sessions that are remembered.
const FENCED_MAX: usize = 16_384;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_fence_waits_for_what_is_under_way_and_refuses_the_rest() {
        let sessions: Arc<Sessions> = Arc::default();
        let writing = sessions.begin(SessionId(1)).unwrap();
        let fence = {
            let sessions = Arc::clone(&sessions);
            tokio::spawn(async move { sessions.fence(SessionId(1)).await })
        };
        tokio::task::yield_now().await;
        assert!(!fence.is_finished());
        assert!(sessions.begin(SessionId(1)).is_none());
        assert!(sessions.begin(SessionId(2)).is_some());
        drop(writing);
        fence.await.unwrap();
    }
}
