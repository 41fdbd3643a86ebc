//! Making things: files, directories, links.

use bytes::Bytes;
use hither_proto::fragment::Fragment;
use hither_proto::ids::{ABOVE_ROOT, CHUNK_SIZE, ChunkIndex, InodeId, LeaseId, ROOT, SYMLINK_MAX};
use hither_proto::meta::{Create, GroupEpoch, Link, Reply};
use hither_proto::status::{Errno, Status};
use hither_proto::stored::{ChunkRef, FragmentHead, Inode};
use prost::Message;

use super::{Outcome, SETGID, SYMLINK, check_name, is_dir, is_regular, refuse};
use crate::core::batch::{Object, back_pointer};
use crate::core::cache::{Dir, EntryKey, Target};
use crate::core::event::Counter;
use crate::core::lease::{Data, Exclusive};
use crate::core::run::{Attempt, Blocker, Core, Stop};
use crate::keys;

impl Core {
    pub(crate) fn create(&mut self, attempt: &mut Attempt, op: &Create) -> Outcome {
        let dir = InodeId(op.parent);
        Self::need_ordinary(dir)?;
        check_name(&op.name)?;
        if op.symlink.len() > SYMLINK_MAX {
            return Err(Errno::ENAMETOOLONG.into());
        }
        if op.mode & super::TYPE_MASK == SYMLINK && op.symlink.is_empty() {
            return Err(Errno::ENOENT.into());
        }
        if let Some(target) = self.find(attempt, dir, &op.name)? {
            return self.create_existing(attempt, op, target);
        }
        self.need_linked(dir)?;
        // An empty file takes no bytes: at the limit only what is written is refused.
        self.need_quota(dir, 0, 1)?;
        self.need_recalls_for_entry(attempt, dir, &op.name)?;
        let ino = self.new_ino(attempt)?;
        let first_chunk = self.first_chunk(dir, ino, op)?;
        // From here on nothing stops.
        self.insert_new(attempt, dir, op, ino);
        let mut reply = self.reply_with(attempt, ino);
        reply.entries_leased = self.leases.give_entries(dir, attempt.session);
        reply.directory_leased = is_dir(op.mode) && self.leases.give_entries(ino, attempt.session);
        if let Some((lease, chunk)) = first_chunk {
            self.give_first_chunk(attempt, ino, lease, &chunk, &mut reply);
        }
        Ok(self.with_parents(attempt, reply, dir, dir))
    }

    /// Lease and chunk for a file that is opened for writing. A name needs no chunkserver: without
    /// a group that takes chunks the file is made all the same, and its writer asks later.
    fn first_chunk(
        &mut self,
        dir: InodeId,
        ino: InodeId,
        op: &Create,
    ) -> Result<Option<(LeaseId, ChunkRef)>, Stop> {
        if !op.open_for_write || !is_regular(op.mode) {
            return Ok(None);
        }
        let class = self.cache.inodes[&dir].inode.class;
        match self.new_chunk(class, ino, 0) {
            Ok(chunk) => Ok(Some((self.new_lease()?, chunk))),
            Err(Stop::Refuse(_)) => Ok(None),
            Err(stop) => Err(stop),
        }
    }

    fn create_existing(&mut self, attempt: &mut Attempt, op: &Create, target: Target) -> Outcome {
        let ino = self.need_target(attempt, target)?;
        let mode = self.cache.inodes[&ino].inode.mode;
        if op.exclusive || !is_regular(op.mode) || !is_regular(mode) {
            return Err(Errno::EEXIST.into());
        }
        let entries_leased = self
            .leases
            .give_entries(InodeId(op.parent), attempt.session);
        Ok(Reply {
            existed: true,
            entries_leased,
            ..self.reply_with(attempt, ino)
        })
    }

    fn insert_new(&mut self, attempt: &mut Attempt, dir: InodeId, op: &Create, ino: InodeId) {
        let parent = &self.cache.inodes[&dir].inode;
        let inherits_group = parent.mode & SETGID != 0;
        let mut mode = op.mode;
        if inherits_group && is_dir(mode) {
            mode |= SETGID;
        }
        let inode = Inode {
            ino: ino.0,
            mode,
            uid: op.uid,
            gid: if inherits_group { parent.gid } else { op.gid },
            nlink: 1,
            rdev: op.rdev,
            size: op.symlink.len() as u64,
            atime: attempt.now,
            mtime: attempt.now,
            ctime: attempt.now,
            btime: attempt.now,
            symlink: op.symlink.clone(),
            class: parent.class,
            back_pointer: is_dir(mode),
            ..Inode::default()
        };
        let key = EntryKey::of(&op.name).kept();
        if is_dir(mode) {
            let head = FragmentHead {
                mtime: attempt.now,
                ctime: attempt.now,
                ..FragmentHead::default()
            };
            self.cache.dirs.insert(
                ino,
                Dir {
                    head,
                    complete: true,
                    ..Dir::default()
                },
            );
            self.touch(attempt, Object::Head(ino));
            self.open
                .put_raw(keys::back_pointer(ino), Some(back_pointer(dir, &key)));
        }
        self.cache.insert_inode(dir, key.clone(), inode);
        self.put_entry(attempt, dir, key, Some(Target::Primary(ino)));
        self.change_directory(attempt, dir, 1, i64::from(is_dir(mode)));
        self.bump(dir, 0, 1);
    }

    fn give_first_chunk(
        &mut self,
        attempt: &Attempt,
        ino: InodeId,
        lease: LeaseId,
        chunk: &ChunkRef,
        reply: &mut Reply,
    ) {
        self.leases.of_mut(ino).data = Data::Exclusive(Exclusive {
            session: attempt.session,
            lease,
            reserved: vec![*chunk],
        });
        reply.data_lease = lease.0;
        reply.data_exclusive = true;
        reply.space = Some(self.space(ino));
        reply.epochs = self.epochs_of(std::slice::from_ref(chunk));
        reply.chunks = vec![*chunk];
    }

    pub(crate) fn link(&mut self, attempt: &mut Attempt, op: &Link) -> Outcome {
        let (ino, dir) = (InodeId(op.ino), InodeId(op.new_parent));
        Self::need_ordinary(dir)?;
        check_name(&op.new_name)?;
        self.need_inode(attempt, ino, op.hint.as_ref())?;
        let inode = &self.cache.inodes[&ino].inode;
        if is_dir(inode.mode) {
            return Err(Errno::EPERM.into());
        }
        if inode.nlink >= LINKS_MAX {
            return Err(Errno::EMLINK.into());
        }
        if inode.nlink == 0 {
            return Err(Errno::ENOENT.into());
        }
        if self.find(attempt, dir, &op.new_name)?.is_some() {
            return Err(Errno::EEXIST.into());
        }
        self.need_linked(dir)?;
        let mut wanted = self.leases.attribute_holders(ino, attempt.session, false);
        wanted.extend(self.entry_recalls(attempt, dir, &op.new_name));
        Self::need_recalls(wanted)?;
        self.need_back_pointer(attempt, ino);
        let slot = self.cache.inodes.get_mut(&ino).expect("needed above");
        slot.inode.nlink += 1;
        slot.inode.ctime = attempt.now;
        let kind = slot.inode.mode & super::TYPE_MASK;
        self.touch(attempt, Object::Inode(ino));
        self.put_entry(
            attempt,
            dir,
            EntryKey::of(&op.new_name).kept(),
            Some(Target::Remote(ino, kind)),
        );
        self.change_directory(attempt, dir, 1, 0);
        let entries_leased = self.leases.give_entries(dir, attempt.session);
        let reply = Reply {
            entries_leased,
            ..self.reply_with(attempt, ino)
        };
        Ok(self.with_parents(attempt, reply, dir, dir))
    }

    /// Stores where the inode is, if that is not stored yet.
    pub(crate) fn need_back_pointer(&mut self, attempt: &mut Attempt, ino: InodeId) {
        let slot = self
            .cache
            .inodes
            .get_mut(&ino)
            .expect("the caller has found it");
        if !std::mem::replace(&mut slot.inode.back_pointer, true) {
            let value = back_pointer(slot.parent, &slot.key);
            self.open.put_raw(keys::back_pointer(ino), Some(value));
            self.touch(attempt, Object::Inode(ino));
        }
    }

    /// Sets or clears an entry.
    pub(crate) fn put_entry(
        &mut self,
        attempt: &mut Attempt,
        dir: InodeId,
        key: EntryKey,
        target: Option<Target>,
    ) {
        let directory = self
            .cache
            .dirs
            .get_mut(&dir)
            .expect("the caller has found it");
        directory.entries.insert(key.clone(), target);
        self.touch(attempt, Object::Entry(dir, key));
    }

    /// Counts and times of a directory after a change of its entries.
    pub(crate) fn change_directory(
        &mut self,
        attempt: &mut Attempt,
        dir: InodeId,
        entries: i64,
        subdirs: i64,
    ) {
        let head = &mut self
            .cache
            .dirs
            .get_mut(&dir)
            .expect("the caller has found it")
            .head;
        head.version += 1;
        head.entries = head.entries.saturating_add_signed(entries);
        head.subdirs = head.subdirs.saturating_add_signed(subdirs);
        head.mtime = head.mtime.max(attempt.now);
        head.ctime = head.ctime.max(attempt.now);
        self.touch(attempt, Object::Head(dir));
    }

    /// Adds to the recursive statistics of `dir` and all directories above it.
    pub(crate) fn bump(&mut self, dir: InodeId, bytes: i64, inodes: i64) {
        let above: Vec<InodeId> = self.up_from(dir).collect();
        for at in above {
            let Some(directory) = self.cache.dirs.get_mut(&at) else {
                return;
            };
            let head = &mut directory.head;
            head.recursive_bytes = head.recursive_bytes.saturating_add(bytes);
            head.recursive_inodes = head.recursive_inodes.saturating_add(inodes);
            self.open.touch_statistics(at);
        }
    }

    /// Refuses growth beyond the quota of `dir` or any directory above it.
    pub(crate) fn need_quota(&self, dir: InodeId, bytes: u64, inodes: u64) -> Result<(), Stop> {
        for at in self.up_from(dir) {
            let slot = &self.cache.inodes[&at];
            let Some(Dir { head, .. }) = self.cache.dirs.get(&at) else {
                continue;
            };
            let over = |limit: u64, used: i64, more: u64| {
                let used = u64::try_from(used).unwrap_or(0);
                limit != 0 && more != 0 && used.saturating_add(more) > limit
            };
            if over(slot.inode.rare().quota_bytes, head.recursive_bytes, bytes)
                || over(
                    slot.inode.rare().quota_inodes,
                    head.recursive_inodes,
                    inodes,
                )
            {
                return Err(Errno::EDQUOT.into());
            }
        }
        Ok(())
    }

    /// A removed directory takes no new entries.
    pub(crate) fn need_linked(&self, dir: InodeId) -> Result<(), Stop> {
        let gone = self
            .cache
            .inodes
            .get(&dir)
            .is_none_or(|slot| slot.inode.nlink == 0);
        if gone {
            Err(Errno::ENOENT.into())
        } else {
            Ok(())
        }
    }

    pub(crate) fn entry_recalls(
        &self,
        attempt: &Attempt,
        dir: InodeId,
        name: &Bytes,
    ) -> Vec<crate::core::lease::Wanted> {
        let mut wanted = self
            .leases
            .entry_holders(dir, name, attempt.session, &attempt.given_back);
        wanted.extend(self.leases.attribute_holders(dir, attempt.session, false));
        wanted
    }

    fn need_recalls_for_entry(
        &self,
        attempt: &Attempt,
        dir: InodeId,
        name: &Bytes,
    ) -> Result<(), Stop> {
        Self::need_recalls(self.entry_recalls(attempt, dir, name))
    }

    fn new_ino(&mut self, attempt: &Attempt) -> Result<InodeId, Stop> {
        // Only what was resent may name its number, and only one that is not given out any more.
        if attempt.replay && attempt.replay_ino != 0 {
            let ino = InodeId(attempt.replay_ino);
            if !self.is_before_takeover(ino) || self.cache.inodes.contains_key(&ino) {
                return Err(Errno::EIO.into());
            }
            return Ok(ino);
        }
        self.take_number(Counter::Inode).map(InodeId)
    }

    pub(crate) fn new_lease(&mut self) -> Result<LeaseId, Stop> {
        self.take_number(Counter::Lease).map(LeaseId)
    }

    fn take_number(&mut self, counter: Counter) -> Result<u64, Stop> {
        let number = self.numbers.take(counter);
        self.reserve_numbers();
        number.ok_or(Stop::Block(Blocker::Numbers))
    }

    /// Reserves a chunk for a piece of a file: an id of its own in one of the class's groups.
    pub(crate) fn new_chunk(
        &mut self,
        class: u32,
        ino: InodeId,
        index: u32,
    ) -> Result<ChunkRef, Stop> {
        let groups = self
            .groups
            .by_class
            .get(&class)
            .or_else(|| self.groups.by_class.get(&self.groups.default_class))
            .filter(|groups| !groups.is_empty());
        let Some(groups) = groups else {
            if self.groups.full.contains(&class) {
                return Err(Errno::ENOSPC.into());
            }
            return Err(refuse(
                Status::RETRY,
                "no placement group may take new chunks: are enough chunkservers up?",
            ));
        };
        let count = groups.len() as u64;
        let spread = ino.0.wrapping_mul(SPREAD).rotate_left(23) ^ u64::from(index);
        let pick = usize::try_from(spread % count).unwrap_or(0);
        let group = groups[pick];
        let chunk = self.take_number(Counter::Chunk)?;
        Ok(ChunkRef {
            index,
            chunk,
            group: group.0,
            written: false,
        })
    }

    /// The lowest epochs at which these chunks may be used.
    pub(crate) fn epochs_of(&self, chunks: &[ChunkRef]) -> Vec<GroupEpoch> {
        let mut groups: Vec<u32> = chunks.iter().map(|chunk| chunk.group).collect();
        groups.sort_unstable();
        groups.dedup();
        groups
            .into_iter()
            .map(|group| {
                let id = hither_proto::ids::GroupId(group);
                let known = self.groups.epochs.get(&id).copied().unwrap_or_default();
                let floor = self.group_floor.get(&id).copied().unwrap_or_default();
                GroupEpoch {
                    group,
                    epoch: known.max(floor).0,
                }
            })
            .collect()
    }

    /// Makes the root of a new cluster.
    pub fn bootstrap_writes(class: u32, now: i64) -> Vec<(Bytes, Bytes)> {
        let root = Inode {
            ino: ROOT.0,
            mode: super::DIRECTORY | 0o755,
            nlink: 1,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            class,
            back_pointer: true,
            ..Inode::default()
        };
        let key = EntryKey::of(&Bytes::from_static(b"/"));
        let target = Some(hither_proto::stored::dentry::Target::Primary(root));
        let dentry = hither_proto::stored::Dentry { target };
        let head = FragmentHead {
            mtime: now,
            ctime: now,
            ..FragmentHead::default()
        };
        vec![
            (
                keys::dentry(ABOVE_ROOT, key.hash, &key.name),
                dentry.encode_to_vec().into(),
            ),
            (
                keys::fragment_head(ROOT, Fragment::WHOLE),
                head.encode_to_vec().into(),
            ),
            (keys::back_pointer(ROOT), back_pointer(ABOVE_ROOT, &key)),
        ]
    }
}

/// The chunk that holds `offset`, or `EFBIG`.
pub(crate) fn chunk_index(offset: u64) -> Result<u32, Stop> {
    ChunkIndex::of_offset(offset)
        .map(|index| index.0)
        .ok_or_else(|| Errno::EFBIG.into())
}

/// Bytes of the chunk `index` that lie below `size`.
pub(crate) fn length_in_chunk(size: u64, index: u32) -> u32 {
    let start = ChunkIndex(index).start();
    u32::try_from(size.saturating_sub(start).min(CHUNK_SIZE)).unwrap_or(u32::MAX)
}

/// Most names of one inode.
const LINKS_MAX: u32 = 65_000;
/// Spreads neighbouring inode numbers over groups.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
