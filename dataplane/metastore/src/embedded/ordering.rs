//! Commits that have a number but are not durable yet.

use std::collections::VecDeque;
use std::sync::Arc;

use hither_log::Lsn;
use tokio::sync::oneshot;

use crate::codec::Commit;
use crate::error::Error;
use crate::types::{Revision, Versioned};

/// A commit in the log's buffer, and who waits for it.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) commit: Arc<Commit>,
    pub(crate) lsn: Lsn,
    pub(crate) done: oneshot::Sender<Result<Revision, Error>>,
}

/// The order of commits: what the next batch is checked against and which number it gets.
#[derive(Debug)]
pub(crate) struct Ordering {
    pub(crate) next: Revision,
    pending: VecDeque<Pending>,
    /// Whether a flush callback is under way that will look at `pending`.
    pub(crate) flushing: bool,
    /// Set when the log or the checkpoint engine has failed.
    pub(crate) failed: Option<Error>,
}

impl Ordering {
    pub(crate) fn new(last: Revision) -> Self {
        Self {
            next: Revision(last.0 + 1),
            pending: VecDeque::new(),
            flushing: false,
            failed: None,
        }
    }

    /// What the pending commits make of a key; `None` if they do not touch it.
    pub(crate) fn lookup(&self, key: &[u8]) -> Option<Option<Versioned>> {
        let newest_first = self.pending.iter().rev();
        newest_first
            .map(|pending| pending.commit.lookup(key))
            .find_map(|found| found)
    }

    pub(crate) fn push(&mut self, pending: Pending) {
        let commit = &pending.commit;
        assert!(
            commit.revision == self.next,
            "commits are ordered by their numbers"
        );
        self.next = Revision(commit.revision.0 + 1);
        self.pending.push_back(pending);
    }

    /// The commits up to the log record `durable`, oldest first.
    pub(crate) fn durable(&self, durable: Lsn) -> impl Iterator<Item = &Pending> {
        self.pending
            .iter()
            .take_while(move |pending| pending.lsn <= durable)
    }

    /// Takes the oldest pending commit if it is in the log up to `durable`. The view must show it
    /// by now: batches are no longer checked against it here.
    pub(crate) fn pop(&mut self, durable: Lsn) -> Option<Pending> {
        if self.pending.front()?.lsn > durable {
            return None;
        }
        self.pending.pop_front()
    }

    /// The log record of the last pending commit.
    pub(crate) fn last_lsn(&self) -> Option<Lsn> {
        self.pending.back().map(|pending| pending.lsn)
    }

    /// Ends service: nobody knows which of the pending commits are durable.
    pub(crate) fn fail(&mut self, error: Error) -> Vec<Pending> {
        self.failed.get_or_insert(error);
        self.pending.drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::types::KeyRange;

    fn push(ordering: &mut Ordering, range_deletes: Vec<KeyRange>, puts: &[&'static str]) {
        let revision = ordering.next;
        let put = |key: &&'static str| (Bytes::from(*key), Some(Bytes::from("v")));
        let changes = puts.iter().map(put).collect();
        let commit = Arc::new(Commit {
            revision,
            range_deletes,
            changes,
        });
        let (done, _) = oneshot::channel();
        ordering.push(Pending {
            commit,
            lsn: Lsn(revision.0),
            done,
        });
    }

    #[test]
    fn the_newest_pending_commit_decides() {
        let mut ordering = Ordering::new(Revision(0));
        let at = |ordering: &Ordering, key: &str| {
            let found = ordering.lookup(key.as_bytes());
            found.map(|found| found.map(|found| found.revision.0))
        };
        push(&mut ordering, vec![], &["a", "b"]);
        push(&mut ordering, vec![KeyRange::new("a", "z")], &["b"]);
        assert_eq!(at(&ordering, "a"), Some(None));
        assert_eq!(at(&ordering, "b"), Some(Some(2)));
        assert_eq!(at(&ordering, "z"), None);
        push(&mut ordering, vec![], &["a"]);
        assert_eq!(at(&ordering, "a"), Some(Some(3)));
        assert!(ordering.pop(Lsn(1)).is_some() && ordering.pop(Lsn(1)).is_none());
        assert_eq!(
            (at(&ordering, "b"), at(&ordering, "c")),
            (Some(Some(2)), Some(None))
        );
        assert!(ordering.pop(Lsn(2)).is_some());
        assert_eq!(
            (at(&ordering, "a"), at(&ordering, "c")),
            (Some(Some(3)), None)
        );
        assert!(ordering.pop(Lsn(9)).is_some());
        assert_eq!(at(&ordering, "a"), None);
    }
}
