//! The last commits, for those who watch.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::codec::{Commit, changes_within};
use crate::types::{KeyRange, Revision};
use crate::watch::{Change, Watch, WatchItem};

/// Commits kept in memory, the oldest given up first when they take more than a bound.
#[derive(Debug)]
pub(crate) struct History {
    state: Mutex<State>,
    bytes_max: usize,
    /// The last commit, for waiting; the sender goes when the store is closed.
    signal: Mutex<Option<watch::Sender<Revision>>>,
}

#[derive(Debug)]
struct State {
    commits: VecDeque<Arc<Commit>>,
    memory_bytes: usize,
    /// The last commit that is not kept.
    forgotten: Revision,
}

impl History {
    /// A history that starts after the commit `forgotten`.
    pub(crate) fn new(bytes_max: usize, forgotten: Revision) -> Self {
        let state = State {
            commits: VecDeque::new(),
            memory_bytes: 0,
            forgotten,
        };
        let signal = Mutex::new(Some(watch::Sender::new(forgotten)));
        Self {
            state: Mutex::new(state),
            bytes_max,
            signal,
        }
    }

    /// Adds the next commit. [`History::announce`] tells watchers later.
    pub(crate) fn push(&self, commit: Arc<Commit>) {
        let mut state = self.state.lock();
        state.memory_bytes += commit.memory_bytes();
        state.commits.push_back(commit);
        while state.memory_bytes > self.bytes_max {
            let Some(oldest) = state.commits.pop_front() else {
                break;
            };
            state.memory_bytes -= oldest.memory_bytes();
            state.forgotten = oldest.revision;
        }
    }

    pub(crate) fn announce(&self, last: Revision) {
        if let Some(signal) = &*self.signal.lock() {
            signal.send_replace(last);
        }
    }

    /// Ends all watches.
    pub(crate) fn close(&self) {
        self.signal.lock().take();
    }

    pub(crate) fn watch(self: &Arc<Self>, prefix: &[u8], after: Revision) -> Watch {
        let receiver = self.signal.lock().as_ref().map(watch::Sender::subscribe);
        let follower = receiver.map(|receiver| Follower {
            history: Arc::clone(self),
            prefix: KeyRange::prefix(Bytes::copy_from_slice(prefix)),
            after,
            receiver,
        });
        let items = futures::stream::unfold(follower, |follower| async {
            let mut follower = follower?;
            let item = follower.next().await?;
            let rest = (item != WatchItem::Compacted).then_some(follower);
            Some((Ok(item), rest))
        });
        Watch::new(items.boxed())
    }

    /// The first commit after `after` that touches `range`, with what it changes there; and the
    /// last commit looked at.
    fn find(&self, range: &KeyRange, after: Revision) -> Found {
        let state = self.state.lock();
        if after < state.forgotten {
            return Found::Forgotten;
        }
        let start = state
            .commits
            .partition_point(|commit| commit.revision <= after);
        for commit in state.commits.iter().skip(start) {
            let changes = changes_within(commit, range);
            if !changes.is_empty() {
                return Found::Commit(commit.revision, changes);
            }
        }
        Found::Nothing(
            state
                .commits
                .back()
                .map_or(after, |last| last.revision.max(after)),
        )
    }
}

enum Found {
    Commit(Revision, Vec<Change>),
    /// Nothing up to this commit.
    Nothing(Revision),
    Forgotten,
}

struct Follower {
    history: Arc<History>,
    prefix: KeyRange,
    after: Revision,
    receiver: watch::Receiver<Revision>,
}

impl Follower {
    async fn next(&mut self) -> Option<WatchItem> {
        loop {
            // Before looking, so that a commit that comes while we look wakes us.
            self.receiver.mark_unchanged();
            match self.history.find(&self.prefix, self.after) {
                Found::Commit(revision, changes) => {
                    self.after = revision;
                    return Some(WatchItem::Commit { revision, changes });
                }
                Found::Nothing(seen) => self.after = seen,
                Found::Forgotten => return Some(WatchItem::Compacted),
            }
            self.receiver.changed().await.ok()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn commit(revision: u64, key: &'static str) -> Arc<Commit> {
        Arc::new(Commit {
            revision: Revision(revision),
            range_deletes: vec![],
            changes: vec![(Bytes::from(key), Some(Bytes::from("v")))],
        })
    }

    #[test]
    fn a_watch_that_falls_behind_is_told_so() {
        let history = Arc::new(History::new(commit(1, "a").memory_bytes() * 2, Revision(0)));
        let mut watch = history.watch(b"a", Revision(0));
        for revision in 1..=3 {
            history.push(commit(revision, "a"));
        }
        history.announce(Revision(3));
        assert_eq!(
            watch.next().now_or_never(),
            Some(Some(Ok(WatchItem::Compacted)))
        );
        assert_eq!(watch.next().now_or_never(), Some(None));
        let mut watch = history.watch(b"a", Revision(1));
        for revision in [2, 3].map(Revision) {
            let item = watch.next().now_or_never();
            assert!(
                matches!(item, Some(Some(Ok(WatchItem::Commit { revision: found, .. })))
                if found == revision)
            );
        }
        assert_eq!(watch.next().now_or_never(), None);
        history.close();
        assert_eq!(watch.next().now_or_never(), Some(None));
    }

    #[test]
    fn a_watch_sees_its_prefix_only() {
        let history = Arc::new(History::new(1 << 20, Revision(0)));
        history.push(commit(1, "a"));
        history.push(commit(2, "b"));
        history.push(Arc::new(Commit {
            revision: Revision(3),
            range_deletes: vec![KeyRange::all()],
            changes: vec![],
        }));
        let mut watch = history.watch(b"b", Revision(0));
        let mut next = || watch.next().now_or_never().flatten().unwrap().unwrap();
        assert!(matches!(
            next(),
            WatchItem::Commit {
                revision: Revision(2),
                ..
            }
        ));
        let range = KeyRange::prefix("b");
        let changes = vec![Change::RangeDeleted { range }];
        assert_eq!(
            next(),
            WatchItem::Commit {
                revision: Revision(3),
                changes
            }
        );
    }
}
