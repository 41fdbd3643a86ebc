//! Rename, with all that can stand at the new name.

use std::collections::BTreeSet;

use hither_proto::ids::InodeId;
use hither_proto::meta::{Rename, Reply};
use hither_proto::status::Errno;

use super::remove::Removal;
use super::{Outcome, check_name, is_dir};
use crate::core::batch::Object;
use crate::core::cache::{EntryKey, Target};
use crate::core::run::{Attempt, Core, Stop};

const NOREPLACE: u32 = 1;
const EXCHANGE: u32 = 2;

/// One end of a rename.
#[derive(Clone)]
struct End {
    dir: InodeId,
    key: EntryKey,
}

impl Core {
    pub(crate) fn rename(&mut self, attempt: &mut Attempt, op: &Rename) -> Outcome {
        let from = End {
            dir: InodeId(op.parent),
            key: EntryKey::of(&op.name).kept(),
        };
        let to = End {
            dir: InodeId(op.new_parent),
            key: EntryKey::of(&op.new_name).kept(),
        };
        for end in [&from, &to] {
            Self::need_ordinary(end.dir)?;
            check_name(&end.key.name)?;
        }
        if op.flags & !(NOREPLACE | EXCHANGE) != 0 || op.flags == NOREPLACE | EXCHANGE {
            return Err(Errno::EINVAL.into());
        }
        let Some(moved) = self.find(attempt, from.dir, &from.key.name)? else {
            return Err(Errno::ENOENT.into());
        };
        let there = self.find(attempt, to.dir, &to.key.name)?;
        self.need_linked(to.dir)?;
        self.need_target(attempt, moved)?;
        if let Some(there) = there {
            self.need_target(attempt, there)?;
            if op.flags & NOREPLACE != 0 {
                return Err(Errno::EEXIST.into());
            }
        }
        self.need_no_loop(moved.ino(), to.dir)?;
        if op.flags & EXCHANGE != 0 {
            let Some(there) = there else {
                return Err(Errno::ENOENT.into());
            };
            self.need_no_loop(there.ino(), from.dir)?;
            self.need_room_to_exchange(&from, &to, moved, there)?;
            return self.exchange(attempt, &from, &to, moved, there);
        }
        if there.is_some_and(|there| there.ino() == moved.ino()) {
            // Two names of one inode: POSIX wants nothing to happen.
            return Ok(Reply {
                other_ino: moved.ino().0,
                ..Reply::default()
            });
        }
        let removal = match there {
            Some(there) => Some(self.plan_replacement(attempt, op, moved, there)?),
            None => None,
        };
        self.need_room(from.dir, to.dir, moved)?;
        self.rename_recalls(attempt, &from, &to, moved, removal.as_ref())?;
        Ok(self.carry_out(attempt, &from, &to, moved, removal.as_ref()))
    }

    fn plan_replacement(
        &mut self,
        attempt: &mut Attempt,
        op: &Rename,
        moved: Target,
        there: Target,
    ) -> Result<Removal, Stop> {
        let mode = |core: &Self, target: Target| core.cache.inodes[&target.ino()].inode.mode;
        match (is_dir(mode(self, moved)), is_dir(mode(self, there))) {
            (true, false) => return Err(Errno::ENOTDIR.into()),
            (false, true) => return Err(Errno::EISDIR.into()),
            _ => {}
        }
        self.plan_removal(attempt, there, op.expect_ino, op.held_open)
    }

    fn rename_recalls(
        &self,
        attempt: &Attempt,
        from: &End,
        to: &End,
        moved: Target,
        removal: Option<&Removal>,
    ) -> Result<(), Stop> {
        let mut wanted = self.entry_recalls(attempt, from.dir, &from.key.name);
        for more in [
            self.entry_recalls(attempt, to.dir, &to.key.name),
            self.leases
                .attribute_holders(moved.ino(), attempt.session, false),
            removal
                .map(|r| self.removal_recalls(attempt, r))
                .unwrap_or_default(),
        ] {
            for wish in more {
                if !wanted.contains(&wish) {
                    wanted.push(wish);
                }
            }
        }
        Self::need_recalls(wanted)
    }

    fn carry_out(
        &mut self,
        attempt: &mut Attempt,
        from: &End,
        to: &End,
        moved: Target,
        removal: Option<&Removal>,
    ) -> Reply {
        let mut reply = Reply::default();
        if let Some(removal) = removal {
            reply.other_ino = removal.target.ino().0;
            reply.orphaned = self.remove_name(attempt, to.dir, to.key.clone(), removal);
            reply.gone = !self.cache.inodes.contains_key(&removal.target.ino());
        }
        let subdirs = i64::from(is_dir(self.cache.inodes[&moved.ino()].inode.mode));
        self.put_entry(attempt, from.dir, from.key.clone(), None);
        self.change_directory(attempt, from.dir, -1, -subdirs);
        self.place(attempt, moved, from.dir, to);
        self.change_directory(attempt, to.dir, 1, subdirs);
        reply.entries_leased = self.leases.give_entries(to.dir, attempt.session)
            && self.leases.give_entries(from.dir, attempt.session);
        let with = self.reply_with(attempt, moved.ino());
        let reply = Reply {
            inode: with.inode,
            attributes_leased: with.attributes_leased,
            ..reply
        };
        self.with_parents(attempt, reply, from.dir, to.dir)
    }

    /// Puts a moved entry at its new place and its statistics with it.
    fn place(&mut self, attempt: &mut Attempt, moved: Target, old_dir: InodeId, to: &End) {
        let ino = moved.ino();
        if let Some(slot) = self.cache.inodes.get_mut(&ino) {
            slot.inode.ctime = attempt.now;
        }
        self.touch(attempt, Object::Inode(ino));
        if let Target::Remote(..) = moved {
            return self.put_entry(attempt, to.dir, to.key.clone(), Some(moved));
        }
        let (bytes, inodes) = self.weight(ino);
        self.bump(old_dir, -bytes, -inodes);
        self.move_primary(attempt, ino, to.dir, to.key.clone());
        self.bump(to.dir, bytes, inodes);
    }

    /// Bytes and inodes that move with an entry.
    fn weight(&self, ino: InodeId) -> (i64, i64) {
        match self.cache.dirs.get(&ino) {
            Some(dir) => (dir.head.recursive_bytes, dir.head.recursive_inodes + 1),
            None => {
                let size = self
                    .cache
                    .inodes
                    .get(&ino)
                    .map_or(0, |slot| slot.inode.size);
                (i64::try_from(size).unwrap_or(i64::MAX), 1)
            }
        }
    }

    fn exchange(
        &mut self,
        attempt: &mut Attempt,
        from: &End,
        to: &End,
        moved: Target,
        there: Target,
    ) -> Outcome {
        self.rename_recalls(attempt, from, to, moved, None)?;
        Self::need_recalls(
            self.leases
                .attribute_holders(there.ino(), attempt.session, false),
        )?;
        if moved.ino() == there.ino() {
            return Ok(Reply {
                other_ino: there.ino().0,
                ..Reply::default()
            });
        }
        let subdirs =
            |core: &Self, t: Target| i64::from(is_dir(core.cache.inodes[&t.ino()].inode.mode));
        let (a, b) = (subdirs(self, moved), subdirs(self, there));
        self.place(attempt, moved, from.dir, to);
        self.place(attempt, there, to.dir, from);
        self.change_directory(attempt, from.dir, 0, b - a);
        self.change_directory(attempt, to.dir, 0, a - b);
        let reply = Reply {
            other_ino: there.ino().0,
            ..self.reply_with(attempt, moved.ino())
        };
        Ok(self.with_parents(attempt, reply, from.dir, to.dir))
    }

    /// A directory must not become its own descendant.
    fn need_no_loop(&self, moved: InodeId, into: InodeId) -> Result<(), Stop> {
        if self.up_from(into).any(|at| at == moved) {
            return Err(Errno::EINVAL.into());
        }
        Ok(())
    }

    /// What moves under another quota must fit there.
    fn need_room(&self, from: InodeId, to: InodeId, moved: Target) -> Result<(), Stop> {
        let (bytes, inodes) = self.weight_of(moved);
        self.need_room_for(from, to, bytes, inodes)
    }

    /// What one side gains must fit there; the other side only gets room.
    fn need_room_to_exchange(
        &self,
        from: &End,
        to: &End,
        moved: Target,
        there: Target,
    ) -> Result<(), Stop> {
        let (bytes, inodes) = self.weight_of(moved);
        let (back_bytes, back_inodes) = self.weight_of(there);
        let bytes = bytes.saturating_sub(back_bytes);
        let inodes = inodes.saturating_sub(back_inodes);
        self.need_room_for(from.dir, to.dir, bytes, inodes)?;
        self.need_room_for(to.dir, from.dir, -bytes, -inodes)
    }

    /// Bytes and inodes that move with a name; those of a further name stand elsewhere.
    fn weight_of(&self, moved: Target) -> (i64, i64) {
        match moved {
            Target::Primary(ino) => self.weight(ino),
            Target::Remote(..) => (0, 0),
        }
    }

    /// Only limits that are not above both ends matter, but the check of all is right whenever
    /// there is room.
    fn need_room_for(
        &self,
        from: InodeId,
        to: InodeId,
        bytes: i64,
        inodes: i64,
    ) -> Result<(), Stop> {
        let bytes = u64::try_from(bytes).unwrap_or(0);
        let inodes = u64::try_from(inodes).unwrap_or(0);
        if from == to || (bytes == 0 && inodes == 0) {
            return Ok(());
        }
        let shared: BTreeSet<InodeId> = self.up_from(from).collect();
        for at in self.up_from(to).take_while(|at| !shared.contains(at)) {
            let limits = self.cache.inodes[&at].inode.rare();
            if limits.quota_bytes != 0 || limits.quota_inodes != 0 {
                self.need_quota(at, bytes, inodes)?;
            }
        }
        Ok(())
    }
}
