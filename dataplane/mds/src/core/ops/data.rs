//! File data: leases, chunk references, reports of writers.

use hither_proto::ids::{CHUNK_SIZE, ChunkIndex, Epoch, GroupId, InodeId, LeaseId, SessionId};
use hither_proto::meta::{
    Acquire, AllocChunks, ChunkRefs, GiveBack, PunchHole, Reply, WriteReport,
};
use hither_proto::status::{Errno, Status};
use hither_proto::stored::ChunkRef;

use super::{Outcome, is_regular, refuse, seal_of};
use crate::core::batch::Object;
use crate::core::cache::LoadKey;
use crate::core::event::SealChunk;
use crate::core::lease::{Data, Exclusive};
use crate::core::run::{Attempt, Blocker, Core, Stop};

/// References kept in the inode itself: those of the first pieces of the file.
pub(crate) const INLINE_CHUNKS: u32 = 8;
/// References in a page.
pub(crate) const PAGE_CHUNKS: u32 = 1024;
/// References in one answer at most.
const ANSWER_CHUNKS: usize = 4096;
/// Chunks that one hole may free.
const HOLE_CHUNKS_MAX: usize = 65_536;
/// What a shared lease is called: it needs no id of its own.
const SHARED: u64 = 1;

impl Core {
    pub(crate) fn acquire(&mut self, attempt: &mut Attempt, op: &Acquire) -> Outcome {
        let ino = InodeId(op.ino);
        self.need_inode(attempt, ino, op.hint.as_ref())?;
        self.need_file(ino)?;
        self.need_known_holders(ino, op.exclusive)?;
        let data = self.leases.of(ino).map(|leases| &leases.data);
        attempt.behind_writer |=
            matches!(data, Some(Data::Exclusive(held)) if held.session != attempt.session);
        self.need_calm(attempt, ino)?;
        self.need_turn(attempt.session, ino)?;
        self.need_refs(ino, 0, INLINE_CHUNKS)?;
        let mut wanted = self.leases.data_holders(ino, attempt.session, op.exclusive);
        if op.exclusive {
            wanted.extend(self.leases.attribute_holders(ino, attempt.session, false));
        }
        Self::need_recalls(wanted)?;
        let lease = if op.exclusive {
            let lease = self.give_exclusive(attempt, ino)?;
            self.end_turn(ino, attempt.session);
            lease
        } else {
            self.give_shared(attempt.session, ino)
        };
        let chunks = self.refs_in(ino, 0, u32::MAX);
        let epochs = self.epochs_of(&chunks);
        Ok(Reply {
            space: op.exclusive.then(|| self.space(ino)),
            data_lease: lease,
            data_exclusive: op.exclusive || lease != SHARED,
            behind_writer: attempt.behind_writer,
            chunks,
            epochs,
            ..self.reply_with(attempt, ino)
        })
    }

    fn give_exclusive(&mut self, attempt: &Attempt, ino: InodeId) -> Result<u64, Stop> {
        if let Some(Data::Exclusive(held)) = self.leases.of(ino).map(|l| &l.data)
            && held.session == attempt.session
        {
            return Ok(held.lease.0);
        }
        let lease = self.new_lease()?;
        self.leases.of_mut(ino).data = Data::Exclusive(Exclusive {
            session: attempt.session,
            lease,
            reserved: Vec::new(),
        });
        Ok(lease.0)
    }

    fn give_shared(&mut self, session: SessionId, ino: InodeId) -> u64 {
        let leases = self.leases.of_mut(ino);
        match &mut leases.data {
            Data::None => leases.data = Data::Shared(std::iter::once(session).collect()),
            Data::Shared(holders) => {
                if !holders.contains(&session) {
                    holders.push(session);
                }
            }
            // The session's own, or it would have been recalled: more than was asked for.
            Data::Exclusive(held) => return held.lease.0,
        }
        SHARED
    }

    fn need_file(&self, ino: InodeId) -> Result<(), Stop> {
        let mode = self.cache.inodes[&ino].inode.mode;
        if is_regular(mode) {
            Ok(())
        } else {
            Err(Errno::EINVAL.into())
        }
    }

    /// No lease is given while chunks of the file are sealed or trimmed, or while another waits.
    fn need_calm(&mut self, attempt: &Attempt, ino: InodeId) -> Result<(), Stop> {
        let Some(leases) = self.leases.of(ino) else {
            return self.need_trimmed(ino);
        };
        if leases.sealing || leases.recalling > 0 {
            return Err(Stop::Block(Blocker::Inode(ino)));
        }
        // A foreign writer gives its lease back first: a trim would number it anew behind its back.
        if matches!(&leases.data, Data::Exclusive(held) if held.session != attempt.session)
            && !leases.trimming
        {
            return Ok(());
        }
        self.need_trimmed(ino)
    }

    /// The request's session holds the lease it names. What a session resends after a takeover was
    /// under a lease it may have given back since, or have with a new number: it counts as long as
    /// nobody else writes, as nobody else gets the file before that session has resent everything.
    fn need_writer(&mut self, attempt: &Attempt, ino: InodeId, lease: u64) -> Result<(), Stop> {
        let data = self.leases.of(ino).map(|leases| &leases.data);
        let foreign =
            matches!(data, Some(Data::Exclusive(held)) if held.session != attempt.session);
        if attempt.replay && !foreign && self.is_missing(attempt.session) {
            return Ok(());
        }
        self.held_exclusive(attempt.session, ino, lease)?;
        Ok(())
    }

    /// The exclusive lease the request names, if its session holds it.
    pub(crate) fn held_exclusive(
        &mut self,
        session: SessionId,
        ino: InodeId,
        lease: u64,
    ) -> Result<&mut Exclusive, Stop> {
        match &mut self.leases.of_mut(ino).data {
            Data::Exclusive(held) if held.session == session && held.lease == LeaseId(lease) => {
                Ok(held)
            }
            _ => Err(refuse(
                Status::STALE_LEASE,
                "the file's lease is held no more",
            )),
        }
    }

    pub(crate) fn alloc_chunks(&mut self, attempt: &mut Attempt, op: &AllocChunks) -> Outcome {
        let ino = InodeId(op.ino);
        self.need_inode(attempt, ino, op.hint.as_ref())?;
        self.need_file(ino)?;
        if op.indices.len() > ANSWER_CHUNKS {
            return Err(Errno::E2BIG.into());
        }
        for index in &op.indices {
            self.need_refs(ino, *index, *index)?;
        }
        self.held_exclusive(attempt.session, ino, op.lease)?;
        self.note_progress(attempt.session, ino);
        let slot = &self.cache.inodes[&ino];
        let (class, parent) = (slot.inode.class, slot.parent);
        self.need_quota(parent, 1, 0)?;
        let mut chunks = Vec::with_capacity(op.indices.len());
        for index in &op.indices {
            let known = self
                .refs_in(ino, *index, *index)
                .into_iter()
                .next()
                .or_else(|| {
                    let held = self.held_exclusive(attempt.session, ino, op.lease).ok()?;
                    held.reserved
                        .iter()
                        .find(|chunk| chunk.index == *index)
                        .cloned()
                });
            let chunk = match known {
                Some(chunk) => chunk,
                None => {
                    let chunk = self.new_chunk(class, ino, *index)?;
                    let held = self.held_exclusive(attempt.session, ino, op.lease)?;
                    held.reserved.push(chunk);
                    chunk
                }
            };
            chunks.push(chunk);
        }
        let epochs = self.epochs_of(&chunks);
        Ok(Reply {
            chunks,
            epochs,
            ..Reply::default()
        })
    }

    pub(crate) fn chunk_refs(&mut self, attempt: &mut Attempt, op: &ChunkRefs) -> Outcome {
        let ino = InodeId(op.ino);
        self.need_inode(attempt, ino, op.hint.as_ref())?;
        let count = op.limit.clamp(1, PAGE_CHUNKS);
        let last = op.index.saturating_add(count - 1);
        self.need_refs(ino, op.index, last)?;
        let chunks = self.refs_in(ino, op.index, last);
        let epochs = self.epochs_of(&chunks);
        Ok(Reply {
            chunks,
            epochs,
            ..Reply::default()
        })
    }

    pub(crate) fn write_report(&mut self, attempt: &mut Attempt, op: &WriteReport) -> Outcome {
        self.note_progress(attempt.session, InodeId(op.ino));
        self.need_reportable(attempt, op)?;
        let ino = InodeId(op.ino);
        self.apply_report(attempt, op);
        let held = self.held_exclusive(attempt.session, ino, op.lease).is_ok();
        if held && op.release && !op.torn.is_empty() {
            self.release_torn(attempt, ino, &op.torn);
        } else if held && (op.release || op.downgrade) {
            self.release_exclusive(attempt.session, ino, op.downgrade);
        }
        Ok(self.reply_with(attempt, ino))
    }

    /// An exclusive lease ends although its holder's last writes did not reach all members: they
    /// agree again before anybody gets a lease.
    fn release_torn(&mut self, attempt: &mut Attempt, ino: InodeId, torn: &[ChunkRef]) {
        if let Some(slot) = self.cache.inodes.get_mut(&ino) {
            // A successor has to know.
            slot.inode.set_pending_seal(true);
            self.touch(attempt, Object::Inode(ino));
        }
        let leases = self.leases.of_mut(ino);
        let Data::Exclusive(held) = &mut leases.data else {
            return;
        };
        let mut chunks: Vec<SealChunk> = held.reserved.iter().map(seal_of).collect();
        for chunk in torn {
            if !chunks.iter().any(|known| known.chunk.0 == chunk.chunk) {
                chunks.push(seal_of(chunk));
            }
        }
        leases.data = Data::None;
        self.begin_seal(ino, chunks);
    }

    /// Makes sure that everything a report changes is in memory, and that it may change it.
    fn need_reportable(&mut self, attempt: &mut Attempt, op: &WriteReport) -> Result<(), Stop> {
        let ino = InodeId(op.ino);
        self.need_inode(attempt, ino, op.hint.as_ref())?;
        if op.size > 0 {
            super::create::chunk_index(op.size - 1)?;
        }
        self.need_trimmed(ino)?;
        for chunk in &op.written {
            self.need_refs(ino, chunk.index, chunk.index)?;
        }
        self.need_writer(attempt, ino, op.lease)?;
        self.note_absent_pages(ino, op.written.iter().map(|chunk| chunk.index));
        Ok(())
    }

    /// A report that came as the answer to a recall; the recall ends with it. One that counts no
    /// more (the file is gone, the lease is another's) is passed over.
    pub(crate) fn report_in_recall(
        &mut self,
        attempt: &mut Attempt,
        recall: u64,
        report: &WriteReport,
        open: bool,
    ) -> Outcome {
        match self.need_reportable(attempt, report) {
            Ok(()) => self.apply_report(attempt, report),
            Err(Stop::Refuse(_)) => self.leases.prune(InodeId(report.ino)),
            Err(stop) => return Err(stop),
        }
        if attempt.changed
            && let Some(session) = self.sessions.get_mut(&attempt.session)
        {
            session.last_batch = self.open.number;
        }
        self.finish_recall(recall, open);
        Ok(Reply::default())
    }

    fn apply_report(&mut self, attempt: &mut Attempt, op: &WriteReport) {
        let ino = InodeId(op.ino);
        for epoch in &op.epochs {
            let floor = self.group_floor.entry(GroupId(epoch.group)).or_default();
            *floor = (*floor).max(Epoch(epoch.epoch));
        }
        let mut changed = false;
        for chunk in &op.written {
            if ChunkIndex(chunk.index).start() >= op.size {
                // Nothing of it counts; reserved, it is freed with the lease.
                continue;
            }
            changed |= self.put_ref(
                attempt,
                ino,
                &ChunkRef {
                    written: true,
                    ..*chunk
                },
            );
        }
        if let Data::Exclusive(held) = &mut self.leases.of_mut(ino).data {
            held.reserved
                .retain(|chunk| !op.written.iter().any(|w| w.chunk == chunk.chunk));
        }
        let slot = self
            .cache
            .inodes
            .get_mut(&ino)
            .expect("the caller has found it");
        let parent = slot.parent;
        let inode = &mut slot.inode;
        let grown = i64::try_from(op.size).unwrap_or(i64::MAX)
            - i64::try_from(inode.size).unwrap_or(i64::MAX);
        if inode.size != op.size || inode.mtime != op.mtime || changed {
            inode.size = op.size;
            inode.mtime = op.mtime;
            inode.ctime = inode.ctime.max(op.mtime);
            inode.data_version += 1;
            self.touch(attempt, Object::Inode(ino));
        }
        if grown != 0 {
            self.bump(parent, grown, 0);
        }
        if changed {
            self.need_back_pointer(attempt, ino);
        }
    }

    fn release_exclusive(&mut self, session: SessionId, ino: InodeId, keep_shared: bool) {
        let leases = self.leases.of_mut(ino);
        let Data::Exclusive(held) = &mut leases.data else {
            return;
        };
        let reserved = std::mem::take(&mut held.reserved);
        leases.data = if keep_shared {
            Data::Shared(std::iter::once(session).collect())
        } else {
            Data::None
        };
        // Reserved and never reported: nothing of it counts.
        self.free_chunks(ino, &reserved);
        self.wake(&Blocker::Inode(ino));
        self.leases.prune(ino);
    }

    /// Ends exclusive leases nobody has used. Their reserved chunks exist nowhere: nothing has to
    /// be freed. A lease that is not (or no longer) held is passed over.
    pub(crate) fn give_back(&mut self, session: SessionId, op: &GiveBack) -> Reply {
        for unused in &op.leases {
            let ino = InodeId(unused.ino);
            if self.drop_unused(session, ino, LeaseId(unused.lease)) {
                self.leases.of_mut(ino).data = Data::None;
                self.wake(&Blocker::Inode(ino));
                self.leases.prune(ino);
            }
        }
        Reply::default()
    }

    /// Forgets what was reserved under a lease that was not used; whether the session holds it.
    pub(crate) fn drop_unused(&mut self, session: SessionId, ino: InodeId, lease: LeaseId) -> bool {
        let held = self
            .leases
            .of(ino)
            .is_some_and(|leases| match &leases.data {
                // The answer to a recall under way ends it.
                Data::Exclusive(held) => {
                    held.session == session && held.lease == lease && leases.recalling == 0
                }
                Data::None | Data::Shared(_) => false,
            });
        if held && let Data::Exclusive(held) = &mut self.leases.of_mut(ino).data {
            held.reserved = Vec::new();
        }
        held
    }

    pub(crate) fn punch_hole(&mut self, attempt: &mut Attempt, op: &PunchHole) -> Outcome {
        let ino = InodeId(op.ino);
        self.need_inode(attempt, ino, op.hint.as_ref())?;
        self.need_file(ino)?;
        let end = op.offset.saturating_add(op.length);
        let first = op.offset.div_ceil(CHUNK_SIZE);
        let after = end / CHUNK_SIZE;
        let (Ok(first), Ok(after)) = (u32::try_from(first), u32::try_from(after)) else {
            return Err(Errno::EFBIG.into());
        };
        self.need_writer(attempt, ino, op.lease)?;
        if first < after {
            self.need_refs(ino, first, after - 1)?;
            // A hole is no larger than what one batch frees.
            let held = self.refs_at(ino, first);
            if held.take_while(|chunk| chunk.index < after).count() > HOLE_CHUNKS_MAX {
                return Err(Errno::EFBIG.into());
            }
            let mut freed = self.remove_refs(attempt, ino, first, after - 1);
            if let Data::Exclusive(held) = &mut self.leases.of_mut(ino).data {
                let (gone, kept) = std::mem::take(&mut held.reserved)
                    .into_iter()
                    .partition(|chunk| (first..after).contains(&chunk.index));
                held.reserved = kept;
                freed.extend::<Vec<_>>(gone);
            }
            self.leases.prune(ino);
            self.free_chunks(ino, &freed);
        }
        let slot = self.cache.inodes.get_mut(&ino).expect("needed above");
        slot.inode.mtime = attempt.now;
        slot.inode.ctime = attempt.now;
        slot.inode.data_version += 1;
        self.touch(attempt, Object::Inode(ino));
        Ok(self.reply_with(attempt, ino))
    }

    // ---- references

    /// Makes sure that the references of these indices are in memory.
    pub(crate) fn need_refs(&mut self, ino: InodeId, first: u32, last: u32) -> Result<(), Stop> {
        let inode = &self.cache.inodes[&ino].inode;
        if inode.rare().paged_chunks == 0 || last < INLINE_CHUNKS {
            return Ok(());
        }
        // No reference lies beyond the file's end; a single one may be about to extend it.
        let end = ChunkIndex::of_offset(inode.size.max(1) - 1).map_or(u32::MAX, |index| index.0);
        let last = if first == last { last } else { last.min(end) };
        let pages = first.max(INLINE_CHUNKS) / PAGE_CHUNKS..=last / PAGE_CHUNKS;
        let missing: Vec<LoadKey> = pages
            .filter(|page| !self.cache.pages.contains_key(&(ino, *page)))
            .map(|page| LoadKey::Page(ino, page))
            .collect();
        if missing.is_empty() {
            Ok(())
        } else {
            Err(Stop::Load(missing))
        }
    }

    /// A file without any page has not these either: they may be written without being read.
    pub(crate) fn note_absent_pages(&mut self, ino: InodeId, indices: impl Iterator<Item = u32>) {
        let slot = self.cache.inodes.get(&ino);
        if slot.is_some_and(|slot| slot.inode.rare().paged_chunks == 0) {
            for index in indices.filter(|index| *index >= INLINE_CHUNKS) {
                self.cache
                    .pages
                    .entry((ino, index / PAGE_CHUNKS))
                    .or_default();
            }
        }
    }

    /// References from `first` on that are in memory, by index.
    pub(crate) fn refs_at(&self, ino: InodeId, first: u32) -> impl Iterator<Item = &ChunkRef> {
        let inline = self.cache.inodes.get(&ino).into_iter();
        let inline = inline.flat_map(|slot| &slot.inode.chunks);
        let pages = (ino, first / PAGE_CHUNKS)..=(ino, u32::MAX);
        let paged = self.cache.pages.range(pages).flat_map(|(_, refs)| refs);
        inline
            .chain(paged)
            .filter(move |chunk| chunk.index >= first)
    }

    /// References that are in memory, by index; at most [`ANSWER_CHUNKS`].
    pub(crate) fn refs_in(&self, ino: InodeId, first: u32, last: u32) -> Vec<ChunkRef> {
        self.refs_at(ino, first)
            .take_while(|chunk| chunk.index <= last)
            .take(ANSWER_CHUNKS)
            .copied()
            .collect()
    }

    /// Sets a reference; true when that changed anything. Its page is in memory, or noted as absent.
    pub(crate) fn put_ref(
        &mut self,
        attempt: &mut Attempt,
        ino: InodeId,
        chunk: &ChunkRef,
    ) -> bool {
        let slot = self
            .cache
            .inodes
            .get_mut(&ino)
            .expect("the caller has found it");
        let inline = chunk.index < INLINE_CHUNKS;
        let page = (ino, chunk.index / PAGE_CHUNKS);
        let list = if inline {
            &mut slot.inode.chunks
        } else {
            assert!(
                self.cache.pages.contains_key(&page),
                "a page of references that was not read would be overwritten: {ino} {page:?}"
            );
            self.cache.pages.entry(page).or_default()
        };
        let new = match list.binary_search_by_key(&chunk.index, |known| known.index) {
            Ok(at) if list[at] == *chunk => return false,
            Ok(at) => {
                list[at] = *chunk;
                false
            }
            Err(at) => {
                list.insert(at, *chunk);
                true
            }
        };
        let count = list.len();
        if !inline {
            if new {
                slot.inode.rare_mut().paged_chunks += 1;
            }
            self.open.touch_page(page, count);
        }
        self.touch(attempt, Object::Inode(ino));
        true
    }

    /// Takes references away; all of the range are in memory.
    pub(crate) fn remove_refs(
        &mut self,
        attempt: &mut Attempt,
        ino: InodeId,
        first: u32,
        last: u32,
    ) -> Vec<ChunkRef> {
        let inside = |chunk: &ChunkRef| (first..=last).contains(&chunk.index);
        let slot = self
            .cache
            .inodes
            .get_mut(&ino)
            .expect("the caller has found it");
        let mut removed: Vec<ChunkRef> = slot
            .inode
            .chunks
            .extract_if(.., |chunk| inside(chunk))
            .collect();
        for (page, list) in self.cache.pages.range_mut((ino, 0)..=(ino, u32::MAX)) {
            let before = removed.len();
            removed.extend(list.extract_if(.., |chunk| inside(chunk)));
            let count = removed.len() - before;
            if count > 0 {
                self.open.touch_page(*page, list.len());
                let count = u32::try_from(count).unwrap_or(u32::MAX);
                let paged = &mut slot.inode.rare_mut().paged_chunks;
                *paged = paged.saturating_sub(count);
            }
        }
        if !removed.is_empty() {
            self.touch(attempt, Object::Inode(ino));
        }
        removed
    }
}
