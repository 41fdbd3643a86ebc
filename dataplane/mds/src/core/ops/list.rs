//! Listing directories.

use hither_proto::ids::{InodeId, NameHash};
use hither_proto::meta::{Entry, Readdir, Reply};

use super::{Outcome, is_dir};
use crate::core::batch::Object;
use crate::core::cache::{EntryKey, LoadKey, Target};
use crate::core::run::{Attempt, Core, Stop};

/// Entries in one answer at most.
const ANSWER_ENTRIES: u32 = 4096;

impl Core {
    pub(crate) fn readdir(&mut self, attempt: &mut Attempt, op: &Readdir) -> Outcome {
        let dir = InodeId(op.dir);
        self.need_dir(attempt, dir)?;
        self.check_authority(dir, NameHash(op.after_hash))?;
        let after = (!op.start).then(|| EntryKey {
            hash: NameHash(op.after_hash),
            name: op.after_name.clone(),
        });
        let directory = &self.cache.dirs[&dir];
        let Some(known_to) = directory.known_to(after.as_ref()) else {
            return Err(Stop::Load(vec![LoadKey::Directory(dir, after)]));
        };
        let known_to = known_to.cloned();
        let limit = op.limit.clamp(1, ANSWER_ENTRIES) as usize;
        let inside = |key: &EntryKey| {
            after.as_ref().is_none_or(|after| key > after)
                && known_to.as_ref().is_none_or(|to| key <= to)
        };
        let from = match &after {
            Some(after) => std::ops::Bound::Excluded(after.clone()),
            None => std::ops::Bound::Unbounded,
        };
        let mut page: Vec<(EntryKey, Target)> = directory
            .entries
            .range((from, std::ops::Bound::Unbounded))
            .take_while(|(key, _)| inside(key))
            .filter_map(|(key, target)| target.map(|target| (key.clone(), target)))
            .take(limit + 1)
            .collect();
        let more_here = page.len() > limit;
        page.truncate(limit);
        let end = !more_here && known_to.is_none();
        if page.is_empty() && !end {
            // Everything known here was removed meanwhile: what follows is still to be read.
            return Err(Stop::Load(vec![LoadKey::Directory(dir, known_to)]));
        }
        self.depend_on_listing(attempt, dir, &page, op.names_only);
        let entries = page.into_iter().map(|(key, target)| {
            if op.names_only {
                self.name(key, target)
            } else {
                self.entry(attempt, key, target)
            }
        });
        let entries = entries.collect();
        let entries_leased = self.leases.give_entries(dir, attempt.session);
        Ok(Reply {
            entries,
            end,
            entries_leased,
            ..Reply::default()
        })
    }

    /// A listing rests on every change of the directory that is not in the store yet, removals
    /// included, and on the inodes it shows.
    fn depend_on_listing(
        &self,
        attempt: &mut Attempt,
        dir: InodeId,
        page: &[(EntryKey, Target)],
        names_only: bool,
    ) {
        if self.nothing_open() {
            return;
        }
        self.depend(attempt, &Object::Head(dir));
        if names_only {
            return;
        }
        for (_, target) in page {
            self.depend(attempt, &Object::Inode(target.ino()));
        }
    }

    /// Name, number and type.
    fn name(&self, key: EntryKey, target: Target) -> Entry {
        let ino = target.ino();
        Entry {
            name: key.name,
            hash: key.hash.0,
            ino: ino.0,
            r#type: match target {
                Target::Remote(_, kind) => kind,
                Target::Primary(_) => {
                    let slot = self.cache.inodes.get(&ino);
                    slot.map_or(0, |slot| slot.inode.mode & super::TYPE_MASK)
                }
            },
            ..Entry::default()
        }
    }

    fn entry(&mut self, attempt: &Attempt, key: EntryKey, target: Target) -> Entry {
        let ino = target.ino();
        let mut entry = self.name(key, target);
        if !self.cache.inodes.contains_key(&ino) {
            return entry;
        }
        let inode = self.attributes_of(ino);
        // Counts and times of a directory whose head is not in memory are not known here.
        let whole = !is_dir(inode.mode) || self.cache.dirs.contains_key(&ino);
        if whole {
            entry.attributes_leased = self.leases.give_attributes(ino, attempt.session);
            entry.inode = Some(inode);
        }
        entry
    }
}
