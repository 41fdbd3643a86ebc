//! What loads from the store bring in.

use hither_proto::ids::InodeId;
use hither_proto::status::Status;

use super::cache::{EntryKey, LoadKey, Loaded};
use super::event::{Effect, Refusal};
use super::run::{Blocker, Core};

impl Core {
    pub(crate) fn loaded(&mut self, key: &LoadKey, loaded: Loaded) {
        if !self.cache.end_load(key) && loaded != Loaded::Failed {
            self.cache.begin_load(key);
            return self.effects.push(Effect::Load(key.clone()));
        }
        match (key, loaded) {
            (LoadKey::Entry(dir, entry), Loaded::Entry(dentry)) => {
                self.cache.install(*dir, entry, dentry);
            }
            (LoadKey::Head(dir), Loaded::Head(head)) => {
                self.cache
                    .dirs
                    .entry(*dir)
                    .or_insert_with(|| super::cache::Dir {
                        head: head.unwrap_or_default(),
                        ..super::cache::Dir::default()
                    });
            }
            (LoadKey::BackPointer(ino), Loaded::BackPointer(found)) => {
                let place = found.map(|p| (InodeId(p.parent), EntryKey::of(&p.name)));
                self.cache.back_pointers.insert(*ino, place);
            }
            (LoadKey::Page(ino, page), Loaded::Page(found)) => {
                self.cache
                    .pages
                    .entry((*ino, *page))
                    .or_insert(found.chunks);
            }
            (LoadKey::Directory(dir, after), Loaded::Directory(entries, more)) => {
                let last = entries.last().map(|(key, _)| key.clone());
                for (entry, dentry) in entries {
                    self.cache.install(*dir, &entry, Some(dentry));
                }
                if let Some(directory) = self.cache.dirs.get_mut(dir) {
                    directory.cover(after.clone(), last, more);
                }
            }
            (_, _) => {
                // The store failed: whoever waits is told to come again; what the system has to do it
                // does later.
                let refusal = Refusal::status(Status::RETRY, "the metadata store does not answer");
                for task in self
                    .waiters
                    .remove(&Blocker::Load(key.clone()))
                    .unwrap_or_default()
                {
                    let request = self.tasks.get(&task).map(|task| task.work.request());
                    match request {
                        // A change that is resent was answered with success before: its client
                        // takes a refusal for its loss.
                        Some(Some(request)) if !request.replay => self.drop_task(task, &refusal),
                        Some(_) => self.pause_task(task),
                        None => {}
                    }
                }
            }
        }
        self.wake(&Blocker::Load(key.clone()));
    }
}
