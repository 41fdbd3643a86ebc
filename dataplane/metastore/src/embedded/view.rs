//! The committed state: layers in memory over the last checkpoint.

use std::borrow::Cow;
use std::iter::Peekable;
use std::sync::Arc;

use bytes::Bytes;

use crate::embedded::layer::{Layer, Lookup, RangeSet};
use crate::embedded::ordered::{Applied, OrderedSnapshot};
use crate::error::Error;
use crate::store::Snapshot;
use crate::types::{
    Entry, KeyRange, Revision, SCAN_BYTES_MAX, SCAN_ENTRIES_MAX, ScanPage, Versioned,
};

/// What readers see.
pub(crate) struct View {
    pub(crate) base: Arc<dyn OrderedSnapshot>,
    /// Layers that take no more commits, oldest first; a checkpoint moves them into the base.
    pub(crate) frozen: Vec<Frozen>,
    pub(crate) active: Layer,
    /// The last commit in `active`.
    pub(crate) committed: Applied,
}

/// A layer that takes no more commits.
#[derive(Clone)]
pub(crate) struct Frozen {
    pub(crate) layer: Arc<Layer>,
    /// Its last commit.
    pub(crate) last: Applied,
}

impl View {
    /// Moves the active layer to the frozen ones, unless it is empty.
    pub(crate) fn freeze(&mut self) {
        if !self.active.is_empty() {
            let layer = Arc::new(std::mem::take(&mut self.active));
            self.frozen.push(Frozen {
                layer,
                last: self.committed,
            });
        }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        let frozen = self.frozen.iter().map(|frozen| frozen.layer.memory_bytes());
        self.active.memory_bytes() + frozen.sum::<usize>()
    }

    /// Looks a key up in memory; if the answer is below, returns the base to ask without a lock.
    pub(crate) fn lookup(&self, key: &[u8]) -> Result<Option<Versioned>, Arc<dyn OrderedSnapshot>> {
        if let Lookup::Known(found) = self.active.lookup(key) {
            return Ok(found);
        }
        for frozen in self.frozen.iter().rev() {
            if let Lookup::Known(found) = frozen.layer.lookup(key) {
                return Ok(found);
            }
        }
        Err(Arc::clone(&self.base))
    }

    /// Copies what a scan needs, so that it can read the base without holding a lock.
    pub(crate) fn slice(&self, range: &KeyRange, limit: usize) -> ViewSlice {
        let limit = limit.max(SLICE_CELLS_MIN);
        let mut cells: Vec<_> = self
            .active
            .cells(range)
            .take(limit + 1)
            .map(|(key, cell)| (key.clone(), cell.versioned()))
            .collect();
        let horizon = if cells.len() > limit {
            cells.pop().map(|(key, _)| key)
        } else {
            None
        };
        ViewSlice {
            below: self.below(),
            cells,
            deleted: self.active.deleted().within(range),
            horizon,
        }
    }

    /// A page straight from the view, for a range that begins with so many deleted keys that a
    /// slice has nothing to show.
    pub(crate) fn page(&self, range: &KeyRange, limit: usize) -> Result<ScanPage, Error> {
        let below = self.below();
        below.page(range, limit, Some(Source::layer(&self.active, range)), None)
    }

    fn layers(&self) -> impl Iterator<Item = Arc<Layer>> {
        self.frozen.iter().map(|frozen| Arc::clone(&frozen.layer))
    }

    /// The committed state, if nothing is active.
    pub(crate) fn below(&self) -> EmbeddedSnapshot {
        EmbeddedSnapshot {
            base: Arc::clone(&self.base),
            frozen: self.layers().collect(),
            revision: self.committed.revision,
        }
    }
}

/// The part of a view that one page of a scan can show.
pub(crate) struct ViewSlice {
    below: EmbeddedSnapshot,
    cells: Vec<(Bytes, Option<Versioned>)>,
    deleted: RangeSet,
    /// The slice says nothing about keys from here on.
    horizon: Option<Bytes>,
}

impl ViewSlice {
    pub(crate) fn page(self, range: &KeyRange, limit: usize) -> Result<ScanPage, Error> {
        let active = Source {
            cells: boxed(self.cells.into_iter().map(Ok)),
            deleted: Cow::Owned(self.deleted),
        };
        self.below
            .page(range, limit, Some(active), self.horizon.as_ref())
    }
}

/// The embedded store as it was at one moment.
pub struct EmbeddedSnapshot {
    pub(crate) base: Arc<dyn OrderedSnapshot>,
    /// Oldest first.
    pub(crate) frozen: Vec<Arc<Layer>>,
    pub(crate) revision: Revision,
}

impl EmbeddedSnapshot {
    fn page<'a>(
        &'a self,
        range: &'a KeyRange,
        limit: usize,
        newest: Option<Source<'a>>,
        horizon: Option<&Bytes>,
    ) -> Result<ScanPage, Error> {
        let mut sources: Vec<_> = newest.into_iter().collect();
        sources.extend(
            self.frozen
                .iter()
                .rev()
                .map(|layer| Source::layer(layer, range)),
        );
        let base = self.base.range(range)?;
        let base = base.map(|entry| entry.map(|entry| (entry.key, Some(entry.versioned))));
        sources.push(Source {
            cells: boxed(base),
            deleted: Cow::Owned(RangeSet::default()),
        });
        let (entries, resume) = merge(sources, limit, horizon)?;
        Ok(ScanPage {
            entries,
            resume,
            revision: self.revision,
        })
    }
}

impl Snapshot for EmbeddedSnapshot {
    fn revision(&self) -> Revision {
        self.revision
    }

    async fn scan(&self, range: &KeyRange, limit: usize) -> Result<ScanPage, Error> {
        self.page(range, effective_limit(limit), None, None)
    }
}

impl std::fmt::Debug for EmbeddedSnapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EmbeddedSnapshot")
            .field("revision", &self.revision)
            .finish_non_exhaustive()
    }
}

/// The limit that a caller's limit means.
pub(crate) fn effective_limit(limit: usize) -> usize {
    if limit == 0 {
        SCAN_ENTRIES_MAX
    } else {
        limit.min(SCAN_ENTRIES_MAX)
    }
}

type Cells<'a> = Box<dyn Iterator<Item = Result<(Bytes, Option<Versioned>), Error>> + 'a>;

/// Cells in the order of their keys, and the ranges that are deleted below them.
struct Source<'a> {
    cells: Peekable<Cells<'a>>,
    deleted: Cow<'a, RangeSet>,
}

impl<'a> Source<'a> {
    fn layer(layer: &'a Layer, range: &KeyRange) -> Self {
        let cells = layer.cells(range);
        let cells = boxed(cells.map(|(key, cell)| Ok((key.clone(), cell.versioned()))));
        let deleted = Cow::Borrowed(layer.deleted());
        Self { cells, deleted }
    }
}

fn boxed<'a>(
    cells: impl Iterator<Item = Result<(Bytes, Option<Versioned>), Error>> + 'a,
) -> Peekable<Cells<'a>> {
    let cells: Cells<'a> = Box::new(cells);
    cells.peekable()
}

/// Merges sources, newest first, up to `limit` entries and before `horizon`; also says where to go
/// on.
fn merge(
    mut sources: Vec<Source<'_>>,
    limit: usize,
    horizon: Option<&Bytes>,
) -> Result<(Vec<Entry>, Option<Bytes>), Error> {
    let mut entries = Vec::new();
    let (mut bytes, mut hidden_count) = (0, 0);
    loop {
        let mut first: Option<Bytes> = None;
        for source in &mut sources {
            match source.cells.peek() {
                Some(Err(error)) => return Err(error.clone()),
                Some(Ok((key, _))) if first.as_ref().is_none_or(|first| key < first) => {
                    first = Some(key.clone());
                }
                _ => {}
            }
        }
        let beyond = |key: &Bytes| horizon.is_some_and(|horizon| key >= horizon);
        let Some(key) = first.filter(|key| !beyond(key)) else {
            return Ok((entries, horizon.cloned()));
        };
        let enough = bytes > SCAN_BYTES_MAX || hidden_count > HIDDEN_MAX;
        if entries.len() >= limit || (enough && !entries.is_empty()) {
            return Ok((entries, Some(key)));
        }
        match take_newest(&mut sources, &key) {
            Some(versioned) => {
                bytes += key.len() + versioned.value.len();
                entries.push(Entry { key, versioned });
            }
            None => hidden_count += 1,
        }
    }
}

/// Takes `key` from every source that has it next; returns its value if it has one.
fn take_newest(sources: &mut [Source<'_>], key: &Bytes) -> Option<Versioned> {
    let mut newest: Option<Option<Versioned>> = None;
    let mut hidden = false;
    for source in sources {
        let next = source
            .cells
            .next_if(|cell| matches!(cell, Ok((next, _)) if next == key));
        if let Some(Ok((_, value))) = next
            && newest.is_none()
        {
            newest = Some(if hidden { None } else { value });
        }
        hidden |= source.deleted.covers(key);
    }
    newest.flatten()
}

/// A page that has something ends after so many deleted entries.
const HIDDEN_MAX: usize = 4096;
/// A slice has room for so many cells even if fewer entries are wanted: some may be deleted.
const SLICE_CELLS_MIN: usize = 64;
