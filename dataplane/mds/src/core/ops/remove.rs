//! Removing names, and inodes without names.

use bytes::Bytes;
use hither_proto::fragment::Fragment;
use hither_proto::ids::{ChunkId, ChunkIndex, GroupId, InodeId, LeaseId, STRAYS, SessionId};
use hither_proto::meta::{OpenInode, Reply, Unlink};
use hither_proto::status::Errno;
use hither_proto::stored::{ChunkRef, FreeChunk};
use prost::Message;

use super::{Outcome, check_name, is_dir};
use crate::core::batch::{OPERATION_BYTES_MAX, Object, back_pointer};
use crate::core::cache::{EntryKey, LoadKey, Target};
use crate::core::event::Effect;
use crate::core::lease::{Data, Wanted};
use crate::core::run::{Attempt, Blocker, Core, Stop, Work};
use crate::core::session::{EndStep, ORPHANS_MAX};
use crate::keys;

/// What removing a name will do to its inode.
pub(crate) struct Removal {
    pub(crate) target: Target,
    /// The inode loses its last name.
    pub(crate) last: bool,
    /// The requester holds a descriptor of it (or may do so).
    pub(crate) held_open: bool,
}

impl Core {
    pub(crate) fn unlink(&mut self, attempt: &mut Attempt, op: &Unlink) -> Outcome {
        let dir = InodeId(op.parent);
        Self::need_ordinary(dir)?;
        check_name(&op.name)?;
        let Some(target) = self.find(attempt, dir, &op.name)? else {
            return Err(Errno::ENOENT.into());
        };
        let ino = self.need_target(attempt, target)?;
        match (op.directory, is_dir(self.cache.inodes[&ino].inode.mode)) {
            (true, false) => return Err(Errno::ENOTDIR.into()),
            (false, true) => return Err(Errno::EISDIR.into()),
            _ => {}
        }
        let removal = self.plan_removal(attempt, target, op.expect_ino, op.held_open)?;
        let mut wanted = self.entry_recalls(attempt, dir, &op.name);
        wanted.extend(self.removal_recalls(attempt, &removal));
        Self::need_recalls(wanted)?;
        if op.unused_lease != 0 && removal.last && !removal.held_open {
            self.drop_unused(attempt.session, ino, LeaseId(op.unused_lease));
        }
        let orphaned = self.remove_name(attempt, dir, EntryKey::of(&op.name), &removal);
        let entries_leased = self.leases.give_entries(dir, attempt.session);
        let reply = Reply {
            orphaned,
            entries_leased,
            other_ino: ino.0,
            gone: !self.cache.inodes.contains_key(&ino),
            ..Reply::default()
        };
        Ok(self.with_parents(attempt, reply, dir, dir))
    }

    /// Checks that the inode behind a name may lose it, and loads what that takes.
    pub(crate) fn plan_removal(
        &mut self,
        attempt: &mut Attempt,
        target: Target,
        expect_ino: u64,
        held_open: bool,
    ) -> Result<Removal, Stop> {
        let ino = target.ino();
        let inode = &self.cache.inodes[&ino].inode;
        if is_dir(inode.mode) {
            self.need_dir(attempt, ino)?;
            if self.cache.dirs[&ino].head.entries != 0 {
                return Err(Errno::ENOTEMPTY.into());
            }
            return Ok(Removal {
                target,
                last: true,
                held_open: false,
            });
        }
        let last = inode.nlink <= 1;
        if last {
            self.need_refs(ino, 0, u32::MAX)?;
            self.need_orphan_room(attempt.session, ino)?;
        }
        // A caller that took the name for another inode cannot say whether it holds this one.
        let held_open = last && (held_open || expect_ino != ino.0);
        Ok(Removal {
            target,
            last,
            held_open,
        })
    }

    /// A session that holds too many unlinked inodes open gets no more of them.
    fn need_orphan_room(&self, session: SessionId, ino: InodeId) -> Result<(), Stop> {
        let open = self.leases.of(ino).map(|leases| &leases.open[..]);
        let mut holders = open.unwrap_or_default().iter().chain([&session]);
        let full = holders.any(|holder| {
            let session = self.sessions.get(holder);
            session.is_some_and(|session| session.orphans.len() >= ORPHANS_MAX)
        });
        if full {
            Err(Errno::ENOSPC.into())
        } else {
            Ok(())
        }
    }

    pub(crate) fn removal_recalls(&self, attempt: &Attempt, removal: &Removal) -> Vec<Wanted> {
        let ino = removal.target.ino();
        let file = !self.cache.dirs.contains_key(&ino);
        self.leases
            .attribute_holders(ino, attempt.session, removal.last && file)
    }

    /// Takes the name away; true when the requester is taken to hold the inode open.
    pub(crate) fn remove_name(
        &mut self,
        attempt: &mut Attempt,
        dir: InodeId,
        key: EntryKey,
        removal: &Removal,
    ) -> bool {
        let ino = removal.target.ino();
        let directory = is_dir(self.cache.inodes[&ino].inode.mode);
        self.put_entry(attempt, dir, key, None);
        self.change_directory(attempt, dir, -1, -i64::from(directory));
        if directory {
            self.remove_directory(attempt, dir, ino);
            return false;
        }
        let slot = self
            .cache
            .inodes
            .get_mut(&ino)
            .expect("the caller has found it");
        slot.inode.nlink = slot.inode.nlink.saturating_sub(1);
        slot.inode.ctime = attempt.now;
        let size = i64::try_from(slot.inode.size).unwrap_or(i64::MAX);
        let primary_here = matches!(removal.target, Target::Primary(_));
        let stray_already = slot.parent == STRAYS;
        self.touch(attempt, Object::Inode(ino));
        if primary_here && !stray_already {
            self.bump(dir, -size, -1);
        }
        if !removal.last {
            if primary_here {
                self.move_to_strays(attempt, ino);
            }
            return false;
        }
        let mut holders: Vec<SessionId> = self
            .leases
            .of(ino)
            .map(|leases| leases.open.to_vec())
            .unwrap_or_default();
        if removal.held_open && attempt.session.0 != 0 {
            holders.push(attempt.session);
        }
        let possible = self.possible_holders(ino).into_iter();
        holders.extend(possible.filter(|holder| *holder != attempt.session));
        holders.sort_unstable();
        holders.dedup();
        if holders.is_empty() && self.chunk_count(ino) <= FREE_CHUNKS_MAX {
            self.destroy(attempt, ino);
            return false;
        }
        if primary_here {
            self.move_to_strays(attempt, ino);
        }
        if holders.is_empty() {
            // Too large to go at once: the system removes it piece by piece.
            self.spawn(Work::RemoveOrphan {
                ino,
                session: SessionId(0),
            });
            return false;
        }
        let leases = self.leases.of_mut(ino);
        leases.open = holders.iter().copied().collect();
        for holder in holders {
            if let Some(session) = self.sessions.get_mut(&holder) {
                session.orphans.insert(ino);
                self.touch_session(holder);
            }
        }
        removal.held_open
    }

    fn remove_directory(&mut self, attempt: &mut Attempt, dir: InodeId, ino: InodeId) {
        self.bump(dir, 0, -1);
        self.cache.dirs.remove(&ino);
        self.open
            .put_raw(keys::fragment_head(ino, Fragment::WHOLE), None);
        self.leases.clear(ino);
        self.forget_inode(attempt, ino);
    }

    /// Removes the inode and frees its chunks. All its references are in memory.
    fn destroy(&mut self, attempt: &mut Attempt, ino: InodeId) {
        let refs = self.remove_refs(attempt, ino, 0, u32::MAX);
        self.free_chunks(ino, &refs);
        let reserved = match &mut self.leases.of_mut(ino).data {
            Data::Exclusive(held) => std::mem::take(&mut held.reserved),
            Data::None | Data::Shared(_) => Vec::new(),
        };
        self.free_chunks(ino, &reserved);
        self.leases.clear(ino);
        self.forget_inode(attempt, ino);
    }

    /// Makes sure that the file has not too many chunks from `first` on to be freed at once: frees
    /// the last ones, and waits for the next batch. All its references are in memory.
    pub(crate) fn free_tail(
        &mut self,
        attempt: &mut Attempt,
        ino: InodeId,
        first: u32,
    ) -> Result<(), Stop> {
        let keep = self.refs_at(ino, first).count();
        if keep <= FREE_CHUNKS_MAX {
            return Ok(());
        }
        let from = self.refs_at(ino, first).nth(keep - FREE_CHUNKS_MAX);
        let from = from.map_or(u32::MAX, |chunk| chunk.index);
        let freed = self.remove_refs(attempt, ino, from, u32::MAX);
        self.free_chunks(ino, &freed);
        let slot = self
            .cache
            .inodes
            .get_mut(&ino)
            .expect("the caller has found it");
        let (old, parent) = (slot.inode.size, slot.parent);
        slot.inode.size = old.min(ChunkIndex(from).start());
        let less = old - slot.inode.size;
        self.bump(parent, -i64::try_from(less).unwrap_or(i64::MAX), 0);
        self.open.close();
        Err(Stop::Block(Blocker::Room))
    }

    fn chunk_count(&self, ino: InodeId) -> usize {
        self.refs_at(ino, 0).count()
    }

    fn forget_inode(&mut self, attempt: &mut Attempt, ino: InodeId) {
        let Some(slot) = self.cache.inodes.remove(&ino) else {
            return;
        };
        if slot.inode.back_pointer {
            self.open.put_raw(keys::back_pointer(ino), None);
        }
        let here = self
            .cache
            .dirs
            .get(&slot.parent)
            .and_then(|d| d.entries.get(&slot.key));
        if here.copied().flatten() == Some(Target::Primary(ino)) {
            self.put_entry(attempt, slot.parent, slot.key, None);
        }
    }

    /// Keeps an inode that has lost the name it was stored under.
    fn move_to_strays(&mut self, attempt: &mut Attempt, ino: InodeId) {
        let key = EntryKey::of(&Bytes::from(ino.0.to_string()));
        self.cache.dirs.entry(STRAYS).or_default();
        self.move_primary(attempt, ino, STRAYS, key);
    }

    /// Stores the inode under another entry; the old one has been dealt with by the caller.
    pub(crate) fn move_primary(
        &mut self,
        attempt: &mut Attempt,
        ino: InodeId,
        dir: InodeId,
        key: EntryKey,
    ) {
        let slot = self
            .cache
            .inodes
            .get_mut(&ino)
            .expect("the caller has found it");
        slot.parent = dir;
        slot.key = key.clone();
        slot.inode.back_pointer = true;
        self.open
            .put_raw(keys::back_pointer(ino), Some(back_pointer(dir, &key)));
        self.put_entry(attempt, dir, key, Some(Target::Primary(ino)));
        self.touch(attempt, Object::Inode(ino));
    }

    /// Puts chunks on the list of those to be freed.
    pub(crate) fn free_chunks(&mut self, ino: InodeId, chunks: &[ChunkRef]) {
        for chunk in chunks {
            let key = keys::free_chunk(GroupId(chunk.group), ChunkId(chunk.chunk));
            let value = FreeChunk {
                ino: ino.0,
                lease: 0,
            }
            .encode_to_vec();
            self.open.put_raw(key, Some(value.into()));
        }
        if !chunks.is_empty() {
            self.effects.push(Effect::FreeChunks);
        }
    }

    /// The session's last descriptor of an unlinked inode is closed.
    pub(crate) fn close_inode(&mut self, attempt: &mut Attempt, ino: InodeId) -> Outcome {
        let session = attempt.session;
        self.drop_descriptor(attempt, ino, session)
    }

    /// An unlinked inode of a session that is gone.
    pub(crate) fn remove_orphan(
        &mut self,
        attempt: &mut Attempt,
        ino: InodeId,
        session: SessionId,
    ) -> Outcome {
        let done = self.drop_descriptor(attempt, ino, session)?;
        self.end_sessions(Some(EndStep::Orphan(ino)));
        Ok(done)
    }

    /// Looks through the strays, a page at a time, for inodes without a name that nobody holds: a
    /// predecessor may have died between a holder's end and the removal.
    pub(crate) fn sweep_strays(&mut self, attempt: &mut Attempt) -> Outcome {
        self.need_dir(attempt, STRAYS)?;
        let strays = &self.cache.dirs[&STRAYS];
        if !strays.complete {
            let after = strays
                .covered
                .as_ref()
                .and_then(|covered| covered.to.clone());
            return Err(Stop::Load(vec![LoadKey::Directory(STRAYS, after)]));
        }
        let nameless: Vec<InodeId> = strays
            .entries
            .values()
            .flatten()
            .map(|target| target.ino())
            .filter(|ino| {
                let slot = self.cache.inodes.get(ino);
                slot.is_some_and(|slot| slot.inode.nlink == 0)
            })
            .collect();
        for ino in nameless {
            self.spawn(Work::RemoveOrphan {
                ino,
                session: SessionId(0),
            });
        }
        Ok(Reply::default())
    }

    fn drop_descriptor(
        &mut self,
        attempt: &mut Attempt,
        ino: InodeId,
        session: SessionId,
    ) -> Outcome {
        let others = self
            .leases
            .of(ino)
            .is_some_and(|leases| leases.open.iter().any(|holder| *holder != session))
            || self
                .sessions
                .iter()
                .any(|(id, other)| *id != session && other.orphans.contains(&ino));
        let destroy = !others
            && match self.need_inode(attempt, ino, None) {
                Ok(()) => self.cache.inodes[&ino].inode.nlink == 0,
                // It has a name and no back-pointer, or it is gone: nothing to remove.
                Err(Stop::Refuse(_)) => false,
                Err(stop) => return Err(stop),
            };
        if destroy {
            self.need_refs(ino, 0, u32::MAX)?;
            self.free_tail(attempt, ino, 0)?;
        }
        self.leases
            .of_mut(ino)
            .open
            .retain(|holder| *holder != session);
        self.leases.prune(ino);
        if let Some(holder) = self.sessions.get_mut(&session)
            && holder.orphans.remove(&ino)
        {
            attempt.changed = true;
            self.touch_session(session);
        }
        if destroy {
            self.destroy(attempt, ino);
        }
        Ok(Reply::default())
    }

    /// The session holds a descriptor and no lease that would say so.
    pub(crate) fn open_inode(&mut self, attempt: &mut Attempt, op: &OpenInode) -> Outcome {
        let ino = InodeId(op.ino);
        self.need_inode(attempt, ino, op.hint.as_ref())?;
        let leases = self.leases.of_mut(ino);
        if !leases.open.contains(&attempt.session) {
            leases.open.push(attempt.session);
        }
        Ok(self.reply_with(attempt, ino))
    }

    /// Ends the data lease a recall has taken back.
    pub(crate) fn release_recalled_data(
        &mut self,
        session: SessionId,
        recall: &hither_proto::meta::Recall,
        open: bool,
    ) {
        let ino = InodeId(recall.ino);
        let takes = (recall.data_lease != 0 && !recall.report_only) || (recall.unlinked && !open);
        if !takes {
            return;
        }
        let leases = self.leases.of_mut(ino);
        match &mut leases.data {
            Data::Exclusive(held)
                if held.session == session
                    && (recall.unlinked || held.lease == LeaseId(recall.data_lease)) =>
            {
                let reserved = std::mem::take(&mut held.reserved);
                leases.data = if recall.keep_shared {
                    Data::Shared(std::iter::once(session).collect())
                } else {
                    Data::None
                };
                // Reserved and never reported: nothing of it counts.
                self.free_chunks(ino, &reserved);
            }
            Data::Shared(holders) if recall.unlinked => {
                holders.retain(|holder| *holder != session);
                if holders.is_empty() {
                    leases.data = Data::None;
                }
            }
            Data::Exclusive(_) | Data::Shared(_) | Data::None => {}
        }
        self.leases.prune(ino);
    }
}

/// Chunks freed in one batch; a larger file goes piece by piece.
const FREE_CHUNKS_MAX: usize = 65_536;
/// Bytes of a chunk to be freed in a batch: key and value.
const FREE_BYTES: usize = 48;
const _: () = assert!(
    FREE_CHUNKS_MAX * FREE_BYTES <= OPERATION_BYTES_MAX,
    "must fit"
);
