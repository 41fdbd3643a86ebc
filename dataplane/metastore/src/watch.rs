//! Streams of changes.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::Stream;
use futures::stream::BoxStream;

use crate::error::Error;
use crate::types::{KeyRange, Revision};

/// One change of a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A key got a value.
    Put {
        /// The key.
        key: Bytes,
        /// Its new value.
        value: Bytes,
    },
    /// A key was deleted; it need not have had a value.
    Deleted {
        /// The key.
        key: Bytes,
    },
    /// Every key of a range was deleted, before the puts of the same commit. The range is cut to
    /// the watched prefix. A backend may report single keys instead.
    RangeDeleted {
        /// The range.
        range: KeyRange,
    },
}

/// What a watch yields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WatchItem {
    /// Everything that one commit changed below the watched prefix; never nothing.
    Commit {
        /// The commit. Watching again after it goes on with the next one.
        revision: Revision,
        /// Its changes: ranges first, then keys in order.
        changes: Vec<Change>,
    },
    /// Changes were missed, because the store does not keep them for ever. The last item: scan the
    /// range anew and watch after that.
    Compacted,
}

/// A stream of changes. Ends with [`WatchItem::Compacted`], with an error, or when the store is
/// closed.
pub struct Watch {
    items: BoxStream<'static, Result<WatchItem, Error>>,
}

impl Watch {
    pub(crate) fn new(items: BoxStream<'static, Result<WatchItem, Error>>) -> Self {
        Self { items }
    }
}

impl Stream for Watch {
    type Item = Result<WatchItem, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.items.as_mut().poll_next(context)
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}
