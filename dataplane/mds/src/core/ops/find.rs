//! Finding inodes, directories and entries; lookup and getattr.

use bytes::Bytes;
use hither_proto::common::Failure;
use hither_proto::fragment::Fragment;
use hither_proto::ids::{ABOVE_ROOT, InodeId, NameHash, ROOT, RankId, STRAYS};
use hither_proto::meta::{Getattr, Hint, Lookup, Recall, Reply};
use hither_proto::status::{Errno, Status};
use hither_proto::stored::Inode;

use super::{Outcome, check_name, hint_of, is_dir, refuse};
use crate::core::batch::Object;
use crate::core::cache::{Dir, EntryKey, LoadKey, Target};
use crate::core::event::Refusal;
use crate::core::lease::{Data, Wanted};
use crate::core::run::{Attempt, Core, Stop};

impl Core {
    /// Makes sure that the inode is in memory, and that this rank serves it.
    pub(crate) fn need_inode(
        &mut self,
        attempt: &mut Attempt,
        ino: InodeId,
        hint: Option<&Hint>,
    ) -> Result<(), Stop> {
        self.locate(attempt, ino, hint)?;
        let slot = &self.cache.inodes[&ino];
        self.check_authority(slot.parent, slot.key.hash)
    }

    /// Makes sure that the inode is in memory, whoever serves it: the way to a directory leads
    /// through those above it.
    fn locate(
        &mut self,
        attempt: &mut Attempt,
        ino: InodeId,
        hint: Option<&Hint>,
    ) -> Result<(), Stop> {
        if self.cache.inode(ino).is_some() {
            self.depend(attempt, &Object::Inode(ino));
            return Ok(());
        }
        if ino == ROOT {
            return self.locate_at(attempt, ino, ABOVE_ROOT, &Bytes::from_static(b"/"));
        }
        if let Some((parent, name)) = hint_of(hint) {
            match self.locate_at(attempt, ino, parent, name) {
                // The hint is older than a rename: the back-pointer knows better, if there is one.
                Err(Stop::Refuse(refusal)) if is_stale(&refusal) => {}
                found => return found,
            }
        }
        match self.cache.back_pointers.get(&ino).cloned() {
            None => Err(Stop::Load(vec![LoadKey::BackPointer(ino)])),
            Some(None) => {
                self.cache.back_pointers.remove(&ino);
                Err(Errno::ESTALE.into())
            }
            Some(Some((parent, key))) => {
                let found = self.locate_at(attempt, ino, parent, &key.name);
                if !matches!(found, Err(Stop::Load(_))) {
                    self.cache.back_pointers.remove(&ino);
                }
                found
            }
        }
    }

    /// Looks for the inode under this name; `ESTALE` when another one (or none) is there.
    fn locate_at(
        &mut self,
        attempt: &mut Attempt,
        ino: InodeId,
        parent: InodeId,
        name: &Bytes,
    ) -> Result<(), Stop> {
        match self.find_any(attempt, parent, name)? {
            Some(Target::Primary(found)) if found == ino => {
                self.depend(attempt, &Object::Inode(ino));
                Ok(())
            }
            _ => Err(Errno::ESTALE.into()),
        }
    }

    /// Makes sure that the directory's own state is in memory.
    pub(crate) fn need_dir(&mut self, attempt: &mut Attempt, dir: InodeId) -> Result<(), Stop> {
        if dir == ABOVE_ROOT || dir == STRAYS {
            self.cache.dirs.entry(dir).or_default();
            return Ok(());
        }
        self.locate(attempt, dir, None)?;
        if !is_dir(self.cache.inodes[&dir].inode.mode) {
            return Err(Errno::ENOTDIR.into());
        }
        if !self.cache.dirs.contains_key(&dir) {
            return Err(Stop::Load(vec![LoadKey::Head(dir)]));
        }
        self.depend(attempt, &Object::Head(dir));
        Ok(())
    }

    /// What `name` stands for in `dir`, if this rank serves that name.
    pub(crate) fn find(
        &mut self,
        attempt: &mut Attempt,
        dir: InodeId,
        name: &Bytes,
    ) -> Result<Option<Target>, Stop> {
        self.need_dir(attempt, dir)?;
        self.check_authority(dir, NameHash::of(name))?;
        self.find_any(attempt, dir, name)
    }

    fn find_any(
        &mut self,
        attempt: &mut Attempt,
        dir: InodeId,
        name: &Bytes,
    ) -> Result<Option<Target>, Stop> {
        self.need_dir(attempt, dir)?;
        let key = EntryKey::of(name);
        let directory = &self.cache.dirs[&dir];
        let found = match directory.entries.get(&key) {
            Some(found) => *found,
            None if directory.complete => None,
            None => return Err(Stop::Load(vec![LoadKey::Entry(dir, key)])),
        };
        self.depend(attempt, &Object::Entry(dir, key));
        Ok(found)
    }

    /// Makes sure that the inode behind a found name is in memory.
    pub(crate) fn need_target(
        &mut self,
        attempt: &mut Attempt,
        target: Target,
    ) -> Result<InodeId, Stop> {
        let ino = target.ino();
        self.locate(attempt, ino, None)?;
        if is_dir(self.cache.inodes[&ino].inode.mode) {
            self.need_dir(attempt, ino)?;
        }
        Ok(ino)
    }

    /// Refuses what belongs to another rank. "Not mine" is never "not found".
    pub(crate) fn check_authority(&self, dir: InodeId, hash: NameHash) -> Result<(), Stop> {
        let me = self.options.rank;
        if self.subtrees.values().all(|(rank, _)| *rank == me) {
            return Ok(());
        }
        match self.owner(dir, hash) {
            Some(rank) if rank != me => Err(Stop::Refuse(Refusal {
                status: Status::NOT_MINE,
                failure: Box::new(Failure {
                    text: format!("rank {rank} serves this directory"),
                    hint_rank_plus_one: u32::from(rank.0) + 1,
                    ..Failure::default()
                }),
            })),
            _ => Ok(()),
        }
    }

    /// The rank that serves a name: the nearest enclosing subtree root decides.
    fn owner(&self, dir: InodeId, hash: NameHash) -> Option<RankId> {
        let mut hash = hash;
        for at in self.up_from(dir) {
            let roots = self.subtrees.range((at, Fragment::WHOLE)..);
            let here = roots
                .take_while(|((root, _), _)| *root == at)
                .find(|((_, fragment), _)| fragment.contains(hash));
            if let Some((_, (rank, _))) = here {
                return Some(*rank);
            }
            hash = self.cache.inodes[&at].key.hash;
        }
        None
    }

    /// The inode and the directories above it, as far as they are in memory, nearest first.
    pub(crate) fn up_from(&self, ino: InodeId) -> impl Iterator<Item = InodeId> {
        let known = |ino: InodeId| self.cache.inodes.contains_key(&ino).then_some(ino);
        std::iter::successors(known(ino), move |at| known(self.cache.inodes[at].parent))
            .take(DEPTH_MAX)
    }

    pub(crate) fn lookup(&mut self, attempt: &mut Attempt, op: &Lookup) -> Outcome {
        let dir = InodeId(op.parent);
        if op.name.len() > hither_proto::ids::NAME_MAX {
            return Err(Errno::ENAMETOOLONG.into());
        }
        check_name(&op.name)?;
        let Some(target) = self.find(attempt, dir, &op.name)? else {
            let leased = self.leases.give_entries(dir, attempt.session);
            return Ok(Reply {
                entries_leased: leased,
                ..Reply::default()
            });
        };
        let ino = self.need_target(attempt, target)?;
        self.bring_home(attempt, dir, &op.name, target);
        let entries_leased = self.leases.give_entries(dir, attempt.session);
        Ok(Reply {
            entries_leased,
            ..self.reply_with(attempt, ino)
        })
    }

    /// An inode whose first name was removed stands among the strays, out of all quotas, until one
    /// of its other names is looked up: it is stored under that one from then on.
    fn bring_home(&mut self, attempt: &mut Attempt, dir: InodeId, name: &Bytes, found: Target) {
        let Target::Remote(ino, _) = found else {
            return;
        };
        let slot = &self.cache.inodes[&ino];
        if slot.parent != STRAYS || slot.inode.nlink == 0 {
            return;
        }
        let size = i64::try_from(slot.inode.size).unwrap_or(i64::MAX);
        let stray = slot.key.clone();
        self.put_entry(attempt, STRAYS, stray, None);
        self.move_primary(attempt, ino, dir, EntryKey::of(name));
        self.bump(dir, size, 1);
    }

    pub(crate) fn getattr(&mut self, attempt: &mut Attempt, op: &Getattr) -> Outcome {
        let ino = InodeId(op.ino);
        self.need_inode(attempt, ino, op.hint.as_ref())?;
        if is_dir(self.cache.inodes[&ino].inode.mode) {
            self.need_dir(attempt, ino)?;
        }
        self.need_report(attempt, ino)?;
        Ok(self.reply_with(attempt, ino))
    }

    /// Asks a foreign writer for size and times, once per request; its lease stays.
    pub(crate) fn need_report(&mut self, attempt: &Attempt, ino: InodeId) -> Result<(), Stop> {
        let Some(Data::Exclusive(held)) = self.leases.of(ino).map(|leases| &leases.data) else {
            return Ok(());
        };
        if held.session == attempt.session || attempt.fresh.contains(&ino) {
            return Ok(());
        }
        Err(Stop::Recall(vec![Wanted {
            session: held.session,
            recall: Recall {
                ino: ino.0,
                data_lease: held.lease.0,
                report_only: true,
                ..Recall::default()
            },
        }]))
    }

    /// The inode as a client sees it.
    pub(crate) fn attributes_of(&self, ino: InodeId) -> Inode {
        let mut inode = self.cache.inodes[&ino].inode.stored();
        if let Some(Dir { head, .. }) = self.cache.dirs.get(&ino) {
            inode.size = head.entries;
            inode.nlink = u32::try_from(head.subdirs.saturating_add(2)).unwrap_or(u32::MAX);
            inode.mtime = inode.mtime.max(head.mtime);
            inode.ctime = inode.ctime.max(head.ctime);
        }
        inode
    }

    /// A reply with the inode, leased if it may be.
    pub(crate) fn reply_with(&mut self, attempt: &Attempt, ino: InodeId) -> Reply {
        let attributes_leased = self.leases.give_attributes(ino, attempt.session);
        Reply {
            inode: Some(self.attributes_of(ino)),
            attributes_leased,
            ..Reply::default()
        }
    }

    /// Adds the directories that an operation has changed entries of, so that their attributes
    /// need not be asked for after every one.
    pub(crate) fn with_parents(
        &mut self,
        attempt: &Attempt,
        reply: Reply,
        dir: InodeId,
        other: InodeId,
    ) -> Reply {
        let mut leased = self.leases.give_attributes(dir, attempt.session);
        let new_parent = if other == dir {
            None
        } else {
            leased &= self.leases.give_attributes(other, attempt.session);
            Some(self.attributes_of(other))
        };
        Reply {
            parent: Some(self.attributes_of(dir)),
            new_parent,
            parents_leased: leased,
            ..reply
        }
    }

    /// Stops for recalls if there are any.
    pub(crate) fn need_recalls(wanted: Vec<Wanted>) -> Result<(), Stop> {
        if wanted.is_empty() {
            Ok(())
        } else {
            Err(Stop::Recall(wanted))
        }
    }

    /// Refuses changes of what only the system may change.
    pub(crate) fn need_ordinary(dir: InodeId) -> Result<(), Stop> {
        if dir == ABOVE_ROOT || dir == STRAYS {
            return Err(refuse(
                Status::BAD_REQUEST,
                "this directory is the system's own",
            ));
        }
        Ok(())
    }
}

/// Nothing of that number is under that name (the directory itself may be gone).
fn is_stale(refusal: &Refusal) -> bool {
    [Errno::ESTALE.into(), Errno::ENOTDIR.into()].contains(&refusal.status)
}

/// Deepest directory; a damaged store with a loop in it must not hold the rank.
const DEPTH_MAX: usize = 65_536;
