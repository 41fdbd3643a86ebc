//! What the embedded store asks of the engine that holds its checkpoints.

use std::sync::Arc;

use hither_log::Lsn;

use crate::embedded::layer::Layer;
use crate::error::Error;
use crate::types::{Entry, KeyRange, Revision, Versioned};

/// How far an engine has come: it holds the effects of all commits up to this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Applied {
    pub(crate) revision: Revision,
    /// The log record of that commit.
    pub(crate) lsn: Lsn,
}

/// An ordered key-value engine with durable, atomic batches.
pub(crate) trait OrderedStore: Send + Sync + 'static {
    /// How far the last checkpoint came.
    fn applied(&self) -> Result<Applied, Error>;

    /// Applies layers, oldest first, and notes how far they go; durable and atomic. Calls
    /// `progress` now and then with the number of changes applied so far.
    fn apply(
        &self,
        layers: &[Arc<Layer>],
        applied: Applied,
        progress: &dyn Fn(usize),
    ) -> Result<(), Error>;

    /// The state after the last [`OrderedStore::apply`].
    fn snapshot(&self) -> Result<Arc<dyn OrderedSnapshot>, Error>;
}

/// Entries in the order of their keys.
pub(crate) type Entries = Box<dyn Iterator<Item = Result<Entry, Error>> + Send>;

/// A state of an engine that later batches do not change.
pub(crate) trait OrderedSnapshot: Send + Sync + 'static {
    fn get(&self, key: &[u8]) -> Result<Option<Versioned>, Error>;

    fn range(&self, range: &KeyRange) -> Result<Entries, Error>;
}
