//! The index of one disk in memory: which copies there are and what is known of them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use hither_proto::ids::{ChunkId, GroupId, SessionId};

use crate::entry::{Detail, Entry, EntryFlags, Packed};

/// The index. Changes are gathered for the next checkpoint.
#[derive(Debug, Default)]
pub(crate) struct Index {
    entries: BTreeMap<ChunkId, Packed>,
    /// Of copies in use: with an open mark, or not settled yet.
    details: BTreeMap<ChunkId, Detail>,
    by_group: BTreeSet<(GroupId, ChunkId)>,
    partial: BTreeSet<(GroupId, ChunkId)>,
    copy_bytes: u64,
    deleted: Deleted,
    changes: Changes,
}

/// What changed since the last checkpoint.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) entries: BTreeMap<ChunkId, Option<Entry>>,
    /// Newly remembered deletions with their numbers.
    pub(crate) deleted: Vec<(u64, ChunkId)>,
    /// Deletions below this number are forgotten.
    pub(crate) deleted_from: u64,
}

impl Changes {
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.deleted.is_empty()
    }
}

/// The last ids that were deleted, so that a late write does not bring one back.
#[derive(Debug, Default)]
struct Deleted {
    ids: BTreeSet<ChunkId>,
    order: VecDeque<ChunkId>,
    /// Number of the first in `order`.
    from: u64,
}

impl Deleted {
    fn add(&mut self, chunk: ChunkId, max: usize) -> Option<u64> {
        if !self.ids.insert(chunk) {
            return None;
        }
        let number = self.from + self.order.len() as u64;
        self.order.push_back(chunk);
        while self.order.len() > max {
            if let Some(oldest) = self.order.pop_front() {
                self.ids.remove(&oldest);
                self.from += 1;
            }
        }
        Some(number)
    }
}

impl Index {
    /// The index as a checkpoint left it.
    pub(crate) fn load(entries: Vec<(ChunkId, Entry)>, deleted: &[(u64, ChunkId)]) -> Self {
        let mut index = Self::default();
        for (chunk, entry) in entries {
            index.insert(chunk, entry);
        }
        if let Some((first, _)) = deleted.first() {
            index.deleted.from = *first;
        }
        for (_, chunk) in deleted {
            index.deleted.add(*chunk, usize::MAX);
        }
        index
    }

    pub(crate) fn get(&self, chunk: ChunkId) -> Option<Entry> {
        let packed = self.entries.get(&chunk)?;
        Some(packed.with(self.details.get(&chunk)))
    }

    pub(crate) fn put(&mut self, chunk: ChunkId, entry: Entry) {
        self.insert(chunk, entry);
        self.changes.entries.insert(chunk, Some(entry));
    }

    /// Changes what is not stored.
    pub(crate) fn note(&mut self, chunk: ChunkId, change: impl FnOnce(&mut Entry)) {
        if let Some(mut entry) = self.get(chunk) {
            change(&mut entry);
            self.insert(chunk, entry);
        }
    }

    fn insert(&mut self, chunk: ChunkId, entry: Entry) {
        let (packed, detail) = Packed::of(&entry);
        match detail {
            Some(detail) => self.details.insert(chunk, detail),
            None => self.details.remove(&chunk),
        };
        self.copy_bytes += u64::from(entry.length);
        let old = self.entries.insert(chunk, packed);
        if let Some(old) = &old {
            self.copy_bytes -= u64::from(old.length);
        }
        if old.as_ref().map(Packed::group) != Some(entry.group) {
            if let Some(old) = &old {
                self.by_group.remove(&(old.group(), chunk));
                self.partial.remove(&(old.group(), chunk));
            }
            self.by_group.insert((entry.group, chunk));
        }
        if entry.is_partial() {
            self.partial.insert((entry.group, chunk));
        } else if old.is_some_and(|old| old.flags.has(EntryFlags::PARTIAL)) {
            self.partial.remove(&(entry.group, chunk));
        }
    }

    /// Removes a chunk and remembers that it was deleted.
    pub(crate) fn delete(&mut self, chunk: ChunkId, deleted_max: usize) {
        if let Some(number) = self.deleted.add(chunk, deleted_max) {
            self.changes.deleted.push((number, chunk));
        }
        self.changes.entries.insert(chunk, None);
        self.details.remove(&chunk);
        if let Some(old) = self.entries.remove(&chunk) {
            self.copy_bytes -= u64::from(old.length);
            self.by_group.remove(&(old.group(), chunk));
            self.partial.remove(&(old.group(), chunk));
        }
    }

    pub(crate) fn was_deleted(&self, chunk: ChunkId) -> bool {
        self.deleted.ids.contains(&chunk)
    }

    /// Copies of a group from chunk `from` on, and whether there are more.
    pub(crate) fn list(
        &self,
        group: GroupId,
        from: ChunkId,
        limit: usize,
    ) -> (Vec<(ChunkId, Entry)>, bool) {
        let mut found = Vec::new();
        let range = (group, from)..=(group, ChunkId(u64::MAX));
        for (_, chunk) in self.by_group.range(range) {
            let Some(entry) = self.get(*chunk).filter(Entry::exists) else {
                continue;
            };
            if found.len() == limit {
                return (found, true);
            }
            found.push((*chunk, entry));
        }
        (found, false)
    }

    /// Partial copies of a group.
    pub(crate) fn partial(&self, group: GroupId) -> Vec<ChunkId> {
        let range = (group, ChunkId(0))..=(group, ChunkId(u64::MAX));
        self.partial.range(range).map(|(_, chunk)| *chunk).collect()
    }

    /// The first copy from `chunk` on.
    pub(crate) fn next(&self, chunk: ChunkId) -> Option<(ChunkId, Entry)> {
        let mut rest = self.entries.range(chunk..);
        rest.find(|(_, packed)| packed.exists())
            .map(|(chunk, packed)| (*chunk, packed.with(self.details.get(chunk))))
    }

    /// Bytes of all copies.
    pub(crate) fn copy_bytes(&self) -> u64 {
        self.copy_bytes
    }

    /// Groups with at least one copy.
    pub(crate) fn groups(&self) -> Vec<GroupId> {
        let mut groups = Vec::new();
        let mut from = GroupId(0);
        while let Some((group, _)) = self.by_group.range((from, ChunkId(0))..).next() {
            groups.push(*group);
            let Some(next) = group.0.checked_add(1) else {
                break;
            };
            from = GroupId(next);
        }
        groups
    }

    /// Copies with an open mark; of one session, or of all.
    pub(crate) fn open(&self, session: Option<SessionId>) -> Vec<(ChunkId, Entry)> {
        let marked = self.details.iter().filter_map(|(chunk, detail)| {
            let open = detail.open?;
            let wanted = session.is_none_or(|session| open.session == session);
            wanted.then(|| Some((*chunk, self.get(*chunk)?))).flatten()
        });
        marked.collect()
    }

    /// Entries whose files have to be looked at before they are used.
    pub(crate) fn suspects(&self) -> Vec<ChunkId> {
        let suspects = self
            .details
            .iter()
            .filter(|(_, detail)| !detail.suspect.is_empty());
        suspects.map(|(chunk, _)| *chunk).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn is_changed(&self) -> bool {
        !self.changes.is_empty()
    }

    pub(crate) fn take_changes(&mut self) -> Changes {
        let mut changes = std::mem::take(&mut self.changes);
        changes.deleted_from = self.deleted.from;
        changes
    }

    /// Puts changes back that could not be written; newer ones win.
    pub(crate) fn give_back(&mut self, mut changes: Changes) {
        changes.entries.append(&mut self.changes.entries);
        changes.deleted.append(&mut self.changes.deleted);
        self.changes = changes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(group: u32) -> Entry {
        Entry {
            group: GroupId(group),
            ..Entry::default()
        }
    }

    #[test]
    fn lists_by_group_in_pages() {
        let mut index = Index::default();
        for chunk in 0..10 {
            index.put(ChunkId(chunk), entry(u32::try_from(chunk % 2).unwrap()));
        }
        let (page, more) = index.list(GroupId(1), ChunkId(2), 3);
        let ids: Vec<u64> = page.iter().map(|(chunk, _)| chunk.0).collect();
        assert_eq!((ids, more), (vec![3, 5, 7], true));
        assert_eq!(index.list(GroupId(1), ChunkId(9), 3).0.len(), 1);
        assert_eq!(index.list(GroupId(2), ChunkId(0), 3), (vec![], false));
        assert_eq!(index.groups(), [GroupId(0), GroupId(1)]);
    }

    #[test]
    fn remembers_the_last_deletions() {
        let mut index = Index::default();
        for chunk in 0..5 {
            index.put(ChunkId(chunk), entry(0));
            index.delete(ChunkId(chunk), 3);
        }
        assert!(!index.was_deleted(ChunkId(1)) && index.was_deleted(ChunkId(2)));
        let changes = index.take_changes();
        assert_eq!(changes.deleted_from, 2);
        let kept: Vec<(u64, ChunkId)> = changes
            .deleted
            .into_iter()
            .filter(|(n, _)| *n >= 2)
            .collect();
        let mut again = Index::load(vec![], &kept);
        assert!(again.was_deleted(ChunkId(4)) && !again.was_deleted(ChunkId(0)));
        again.delete(ChunkId(9), 3);
        assert_eq!(again.take_changes().deleted, [(5, ChunkId(9))]);
    }
}
