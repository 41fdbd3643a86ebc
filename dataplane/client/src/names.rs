//! Operations on names and attributes.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hither_proto::ids::{InodeId, ROOT};
use hither_proto::meta::{
    Caller, CloseInode, Create, Getattr, Link, Lookup, RemoveXattr, Rename, Reply, SetXattr,
    Setattr, Space, Statfs, Unlink, request::Op,
};
use hither_proto::status::Errno;
use hither_proto::stored::Inode;

use crate::cache::{Attributes, Known};
use crate::client::{Client, Inner};
use crate::entries::Target;
use crate::error::FsError;
use crate::file::{File, Lease, OpenFile};
use crate::session::How;

/// What a name stands for.
#[derive(Debug, Clone)]
pub struct Found {
    /// The inode.
    pub attributes: Attributes,
    /// How long the kernel may keep the name; zero: not at all.
    pub entry_valid: Duration,
}

/// A new inode.
#[derive(Debug, Clone)]
pub struct Created {
    /// As looked up.
    pub found: Found,
    /// It was there already (only without `exclusive`).
    pub existed: bool,
}

/// Attributes to be changed.
#[derive(Debug, Clone, Copy, Default)]
pub struct SetAttributes {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size: cuts or extends.
    pub size: Option<u64>,
    /// Access time, nanoseconds since 1970.
    pub atime: Option<i64>,
    /// Modification time.
    pub mtime: Option<i64>,
    /// Change time.
    pub ctime: Option<i64>,
    /// Storage class (administration).
    pub class: Option<u32>,
    /// Quota in bytes, 0 for none (administration).
    pub quota_bytes: Option<u64>,
    /// Quota in inodes, 0 for none (administration).
    pub quota_inodes: Option<u64>,
}

impl Client {
    /// The root of the cluster's name-space.
    ///
    /// # Errors
    /// As [`attributes`](Self::attributes).
    pub async fn root(&self) -> Result<Attributes, FsError> {
        self.attributes(ROOT).await
    }

    /// Finds a name.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR` and what the metadata server says.
    pub async fn lookup(&self, dir: InodeId, name: &Bytes) -> Result<Found, FsError> {
        if name.len() > hither_proto::ids::NAME_MAX {
            // Also where every name is known: it is not merely absent.
            return Err(Errno::ENAMETOOLONG.into());
        }
        let inner = &self.inner;
        match inner.cache.lookup(dir, name) {
            Known::Absent if inner.is_valid(dir) => return Err(Errno::ENOENT.into()),
            Known::Is(ino) if inner.is_valid(dir) => {
                if let Some(attributes) = inner.known_attributes(ino) {
                    return Ok(inner.found(dir, attributes));
                }
            }
            _ => {}
        }
        let sent = inner.cache.sent_at();
        let op = Op::Lookup(Lookup {
            parent: dir.0,
            name: name.clone(),
        });
        let reply = inner.ask_name(dir, name, op, How::default()).await?;
        inner.note_miss(dir);
        match &reply.inode {
            Some(inode) => {
                let target = Some(Target::of(inode));
                inner
                    .cache
                    .put_entry(sent, dir, name, target, reply.entries_leased);
                let place = Some((dir, name));
                inner
                    .cache
                    .put_inode(sent, inode, reply.attributes_leased, place);
                let attributes = inner.shown(inode.clone());
                Ok(inner.found(dir, attributes))
            }
            None => {
                inner
                    .cache
                    .put_entry(sent, dir, name, None, reply.entries_leased);
                Err(Errno::ENOENT.into())
            }
        }
    }

    /// Attributes of an inode.
    ///
    /// # Errors
    /// `ESTALE` when it is gone, and what the metadata server says.
    pub async fn attributes(&self, ino: InodeId) -> Result<Attributes, FsError> {
        let inner = &self.inner;
        if let Some(attributes) = inner.known_attributes(ino) {
            return Ok(attributes);
        }
        let sent = inner.cache.sent_at();
        let op = Op::Getattr(Getattr {
            ino: ino.0,
            hint: inner.cache.hint(ino),
        });
        let reply = inner.ask(ino, op, How::default()).await?;
        inner.take_inode(sent, &reply)
    }

    /// Changes attributes.
    ///
    /// # Errors
    /// What the metadata server says; data that could not be written back first.
    pub async fn set_attributes(
        &self,
        ino: InodeId,
        set: SetAttributes,
        caller: Caller,
    ) -> Result<Attributes, FsError> {
        self.inner.set_attributes(ino, set, caller).await
    }

    /// Makes a file, directory, link, device, pipe or socket.
    ///
    /// # Errors
    /// `EEXIST` and what the metadata server says.
    pub async fn create(&self, request: Create, caller: Caller) -> Result<Created, FsError> {
        let inner = &self.inner;
        let dir = InodeId(request.parent);
        let name = request.name.clone();
        let sent = inner.cache.sent_at();
        let how = How {
            changes: true,
            caller,
            ..How::default()
        };
        let reply = inner.ask_name(dir, &name, Op::Create(request), how).await?;
        let inode = reply.inode.clone().ok_or(Errno::EIO)?;
        let ino = InodeId(inode.ino);
        inner.take_parents(sent, &reply, dir, dir);
        inner
            .cache
            .put_made(sent, dir, &name, Target::of(&inode), reply.entries_leased);
        if reply.directory_leased {
            inner.cache.put_empty(sent, ino);
        }
        inner
            .cache
            .put_changed(sent, &inode, reply.attributes_leased, Some((dir, &name)));
        if reply.data_lease != 0 {
            let file = inner.file(ino);
            let mut data = file.data.lock();
            // A recall that comes from now on finds the file and the lease.
            if inner.cache.still_good(ino, sent) {
                data.take_grant(&reply);
            }
        }
        let attributes = inner.shown(inode);
        Ok(Created {
            found: inner.found(dir, attributes),
            existed: reply.existed,
        })
    }

    /// Removes a name; a directory with `directory`.
    ///
    /// # Errors
    /// What unlink(2) and rmdir(2) say.
    pub async fn unlink(
        &self,
        dir: InodeId,
        name: &Bytes,
        directory: bool,
        caller: Caller,
    ) -> Result<(), FsError> {
        let inner = &self.inner;
        let (expect_ino, held_open) = inner.expected(dir, name);
        let file = inner.known_file(InodeId(expect_ino));
        let unused = file.and_then(|file| file.unused_lease());
        let op = Unlink {
            parent: dir.0,
            name: name.clone(),
            directory,
            expect_ino,
            held_open,
            unused_lease: unused.map_or(0, |lease| lease.0),
        };
        let how = How {
            changes: true,
            caller,
            ..How::default()
        };
        let sent = inner.cache.sent_at();
        let reply = inner.ask_name(dir, name, Op::Unlink(op), how).await?;
        inner.take_parents(sent, &reply, dir, dir);
        inner.cache.set_entry(dir, name, None);
        inner.removed(InodeId(reply.other_ino), &reply).await;
        Ok(())
    }

    /// Moves a name. `flags`: 1 do not replace, 2 exchange.
    ///
    /// # Errors
    /// What renameat2(2) says.
    pub async fn rename(
        &self,
        from: (InodeId, &Bytes),
        to: (InodeId, &Bytes),
        flags: u32,
        caller: Caller,
    ) -> Result<(), FsError> {
        let inner = &self.inner;
        let (expect_ino, held_open) = inner.expected(to.0, to.1);
        let replaced = inner.cache.target(to.0, to.1);
        let op = Rename {
            parent: from.0.0,
            name: from.1.clone(),
            new_parent: to.0.0,
            new_name: to.1.clone(),
            flags,
            expect_ino,
            held_open,
        };
        let how = How {
            changes: true,
            caller,
            ..How::default()
        };
        let sent = inner.cache.sent_at();
        let reply = inner.ask_name(from.0, from.1, Op::Rename(op), how).await?;
        inner.take_parents(sent, &reply, from.0, to.0);
        let other = (reply.other_ino != 0).then_some(InodeId(reply.other_ino));
        let Some(inode) = &reply.inode else {
            // Two names of one inode: nothing happened.
            return Ok(());
        };
        let moved = Target::of(inode);
        inner.cache.set_entry(to.0, to.1, Some(moved));
        inner
            .cache
            .put_changed(sent, inode, reply.attributes_leased, None);
        if flags & 2 != 0 {
            match replaced.filter(|replaced| Some(replaced.ino) == other) {
                Some(replaced) => inner.cache.set_entry(from.0, from.1, Some(replaced)),
                // Its type is not known here.
                None => inner.cache.forget_entry(from.0, from.1),
            }
            if let Some(other) = other {
                inner.cache.outdate(other);
            }
            return Ok(());
        }
        inner.cache.set_entry(from.0, from.1, None);
        if let Some(replaced) = other {
            inner.removed(replaced, &reply).await;
        }
        Ok(())
    }

    /// Makes a further name.
    ///
    /// # Errors
    /// What link(2) says.
    pub async fn link(
        &self,
        ino: InodeId,
        dir: InodeId,
        name: &Bytes,
        caller: Caller,
    ) -> Result<Found, FsError> {
        let inner = &self.inner;
        let sent = inner.cache.sent_at();
        let op = Link {
            ino: ino.0,
            hint: inner.cache.hint(ino),
            new_parent: dir.0,
            new_name: name.clone(),
        };
        let how = How {
            changes: true,
            caller,
            ..How::default()
        };
        let reply = inner.ask_name(dir, name, Op::Link(op), how).await?;
        inner.take_parents(sent, &reply, dir, dir);
        let kind = reply
            .inode
            .as_ref()
            .map_or(0, |inode| Target::of(inode).kind);
        inner
            .cache
            .put_made(sent, dir, name, Target { ino, kind }, reply.entries_leased);
        let attributes = inner.take_changed(sent, &reply)?;
        Ok(inner.found(dir, attributes))
    }

    /// Sets an extended attribute. `flags`: 1 create, 2 replace.
    ///
    /// # Errors
    /// What setxattr(2) says.
    pub async fn set_xattr(
        &self,
        ino: InodeId,
        name: &Bytes,
        value: Bytes,
        flags: u32,
    ) -> Result<(), FsError> {
        let inner = &self.inner;
        let sent = inner.cache.sent_at();
        let hint = inner.cache.hint(ino);
        let op = SetXattr {
            ino: ino.0,
            hint,
            name: name.clone(),
            value,
            flags,
        };
        let how = How {
            changes: true,
            ..How::default()
        };
        let reply = inner.ask(ino, Op::SetXattr(op), how).await?;
        inner.take_changed(sent, &reply).map(|_| ())
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// What removexattr(2) says.
    pub async fn remove_xattr(&self, ino: InodeId, name: &Bytes) -> Result<(), FsError> {
        let inner = &self.inner;
        let sent = inner.cache.sent_at();
        let op = RemoveXattr {
            ino: ino.0,
            hint: inner.cache.hint(ino),
            name: name.clone(),
        };
        let how = How {
            changes: true,
            ..How::default()
        };
        let reply = inner.ask(ino, Op::RemoveXattr(op), how).await?;
        inner.take_changed(sent, &reply).map(|_| ())
    }

    /// Space that is left where the inode is.
    ///
    /// # Errors
    /// What the metadata server says.
    pub async fn space(&self, ino: InodeId) -> Result<Space, FsError> {
        let inner = &self.inner;
        let op = Op::Statfs(Statfs {
            ino: ino.0,
            hint: inner.cache.hint(ino),
        });
        let reply = inner.ask(ino, op, How::default()).await?;
        reply.space.ok_or_else(|| Errno::EIO.into())
    }

    // ---- descriptors

    /// Opens a file. No request goes out while anything is leased of it.
    ///
    /// # Errors
    /// What the metadata server says.
    pub async fn open(
        &self,
        ino: InodeId,
        append: bool,
        sync: bool,
    ) -> Result<Arc<OpenFile>, FsError> {
        let inner = &self.inner;
        let file = inner.file(ino);
        let told = {
            let mut handles = file.handles.lock();
            handles.open += 1;
            handles.told
        };
        // Looked at only now: leases of files without descriptors are given back at any time.
        let informed = inner.cache.is_leased(ino) || file.lease() != Lease::None;
        if !informed && !told {
            let sent = inner.cache.sent_at();
            let hint = inner.cache.hint(ino);
            let op = Op::OpenInode(hither_proto::meta::OpenInode { ino: ino.0, hint });
            match inner.ask(ino, op, How::default()).await {
                Ok(reply) => {
                    file.handles.lock().told = true;
                    inner.take_inode(sent, &reply)?;
                }
                Err(error) => {
                    file.handles.lock().open -= 1;
                    return Err(error);
                }
            }
        }
        Ok(Arc::new(OpenFile::new(file, append, sync)))
    }

    /// Closes a descriptor; what is dirty is written back in the background.
    pub fn release(&self, open: &OpenFile) {
        let inner = &self.inner;
        let file = &open.file;
        let gone = {
            let mut handles = file.handles.lock();
            handles.open = handles.open.saturating_sub(1);
            let last = handles.open == 0;
            let tell = last && (handles.orphaned || handles.told);
            if last {
                handles.told = false;
            }
            (last, tell, handles.orphaned)
        };
        let (last, tell, orphaned) = gone;
        if !last {
            return;
        }
        if tell {
            let (inner, file) = (Arc::clone(inner), Arc::clone(file));
            if orphaned {
                inner.drop_file(&file);
            }
            tokio::spawn(async move { inner.tell_closed(file.ino).await });
        }
        if !orphaned {
            inner.close_soon(file);
        }
    }

    /// Reads.
    ///
    /// # Errors
    /// `EIO` or `ETIMEDOUT` when no copy can be read in time.
    pub async fn read(
        &self,
        open: &Arc<OpenFile>,
        offset: u64,
        length: u32,
    ) -> Result<Bytes, FsError> {
        self.inner.read(open, offset, length).await
    }

    /// Writes; where it was written (the end of the file for a descriptor that appends).
    ///
    /// # Errors
    /// `EDQUOT`, `EFBIG`, and what a lost lease or cluster means.
    pub async fn write(&self, open: &OpenFile, offset: u64, data: Bytes) -> Result<u64, FsError> {
        self.inner.write(open, offset, data).await
    }

    /// Tells errors of earlier writes, once, as close(2) should.
    ///
    /// # Errors
    /// The error of data that could not be stored.
    pub fn flush(&self, open: &OpenFile) -> Result<(), FsError> {
        open.told()
    }

    /// Everything written to the file is on stable storage when this returns.
    ///
    /// # Errors
    /// What could not be stored.
    pub async fn fsync(&self, open: &OpenFile) -> Result<(), FsError> {
        self.inner.fsync(open).await
    }

    /// Everything changed in the directory is on stable storage when this returns.
    ///
    /// # Errors
    /// What the metadata server says.
    pub async fn fsync_dir(&self, dir: InodeId) -> Result<(), FsError> {
        let inner = &self.inner;
        let safe = inner.session_for(dir).barrier().await;
        let lost = inner.known_file(dir).map_or(Ok(()), |file| {
            let mut data = file.data.lock();
            let untold = data.errors.untold();
            data.errors.forget();
            untold
        });
        safe.and(lost)
    }

    /// Makes the file at least so long; what is new reads as zeros.
    ///
    /// # Errors
    /// As writing.
    pub async fn extend(&self, open: &OpenFile, size: u64) -> Result<(), FsError> {
        self.inner.extend(open, size).await
    }

    /// Makes a hole: the range reads as zeros. The size stays.
    ///
    /// # Errors
    /// As writing.
    pub async fn punch_hole(
        &self,
        open: &OpenFile,
        offset: u64,
        length: u64,
    ) -> Result<(), FsError> {
        self.inner.punch_hole(open, offset, length).await
    }
}

impl Inner {
    /// Whether the session's leases hold for a while.
    pub(crate) fn is_valid(&self, ino: InodeId) -> bool {
        !self.session_for(ino).valid_for().is_zero()
    }

    /// Attributes that need no request.
    pub(crate) fn known_attributes(&self, ino: InodeId) -> Option<Attributes> {
        let inode = self.cache.attributes(ino)?;
        self.is_valid(ino).then(|| self.shown(inode))
    }

    /// An inode with what this mount knows better, and how long that is good.
    pub(crate) fn shown(&self, mut inode: Inode) -> Attributes {
        let ino = InodeId(inode.ino);
        if let Some((size, mtime)) = self.known_file(ino).and_then(|file| file.own_attributes()) {
            inode.size = size;
            inode.mtime = inode.mtime.max(mtime);
            inode.ctime = inode.ctime.max(mtime);
        }
        let valid = if self.cache.is_leased(ino) {
            self.session_for(ino).valid_for()
        } else {
            Duration::ZERO
        };
        Attributes { inode, valid }
    }

    pub(crate) fn found(&self, dir: InodeId, attributes: Attributes) -> Found {
        let entry_valid = if self.cache.entries_leased(dir) {
            self.session_for(dir).valid_for()
        } else {
            Duration::ZERO
        };
        Found {
            attributes,
            entry_valid,
        }
    }

    pub(crate) fn take_inode(
        &self,
        sent: crate::cache::SentAt,
        reply: &Reply,
    ) -> Result<Attributes, FsError> {
        let inode = reply.inode.clone().ok_or(Errno::EIO)?;
        self.cache
            .put_inode(sent, &inode, reply.attributes_leased, None);
        Ok(self.shown(inode))
    }

    /// As [`take_inode`](Self::take_inode), after a change of this mount.
    pub(crate) fn take_changed(
        &self,
        sent: crate::cache::SentAt,
        reply: &Reply,
    ) -> Result<Attributes, FsError> {
        let inode = reply.inode.clone().ok_or(Errno::EIO)?;
        self.cache
            .put_changed(sent, &inode, reply.attributes_leased, None);
        Ok(self.shown(inode))
    }

    /// The directories whose entries a change of this mount has touched.
    fn take_parents(
        &self,
        sent: crate::cache::SentAt,
        reply: &Reply,
        dir: InodeId,
        other: InodeId,
    ) {
        let told = [(dir, &reply.parent), (other, &reply.new_parent)];
        for (ino, parent) in told.iter().take(1 + usize::from(other != dir)) {
            match parent {
                Some(inode) => self
                    .cache
                    .put_changed(sent, inode, reply.parents_leased, None),
                None => self.cache.outdate(*ino),
            }
        }
    }

    /// The inode a name is believed to have, and whether a descriptor of it is open here.
    fn expected(&self, dir: InodeId, name: &Bytes) -> (u64, bool) {
        let Known::Is(ino) = self.cache.lookup(dir, name) else {
            return (0, false);
        };
        let file = self.known_file(ino);
        (ino.0, file.is_some_and(|file| file.handles.lock().open > 0))
    }

    /// A name of this inode was removed by this client.
    async fn removed(&self, ino: InodeId, reply: &Reply) {
        self.cache.outdate(ino);
        let file = self.known_file(ino);
        let open = match &file {
            Some(file) => {
                let mut handles = file.handles.lock();
                handles.orphaned |= reply.orphaned && handles.open > 0;
                handles.open > 0
            }
            None => false,
        };
        if open {
            return;
        }
        if reply.gone {
            match file {
                Some(file) => self.drop_file(&file),
                None => self.cache.remove(ino),
            }
            return;
        }
        if reply.orphaned {
            // The server took it for open because it could not know.
            self.tell_closed(ino).await;
        }
        // With other names left, the next use asks the server again.
        if let Some(file) = file
            && file.lease() == Lease::None
        {
            self.drop_file(&file);
        } else if let Some(inode) = &reply.inode
            && inode.ino != ino.0
        {
            self.cache.remove(ino);
        }
    }

    async fn tell_closed(&self, ino: InodeId) {
        let how = How {
            changes: true,
            ..How::default()
        };
        let op = Op::CloseInode(CloseInode { ino: ino.0 });
        if let Err(error) = self.ask(ino, op, how).await {
            tracing::warn!(%ino, %error, "the server could not be told of a close");
        }
    }

    async fn set_attributes(
        &self,
        ino: InodeId,
        set: SetAttributes,
        caller: Caller,
    ) -> Result<Attributes, FsError> {
        let file = self.known_file(ino);
        let resize = set.size.is_some();
        let mut lease = 0;
        let mut _alone = None;
        if let Some(file) = &file
            && (resize || set.mtime.is_some())
        {
            // Writers wait: what they have written is sent and told first.
            let alone = file.gate.write().await;
            lease = self.settle_before_change(file).await?;
            // Without the exclusive lease the server may have to recall this mount's own first.
            _alone = (lease != 0).then_some(alone);
        }
        let sent = self.cache.sent_at();
        let op = Setattr {
            ino: ino.0,
            hint: self.cache.hint(ino),
            mode: set.mode,
            uid: set.uid,
            gid: set.gid,
            size: set.size,
            atime: set.atime,
            mtime: set.mtime,
            ctime: set.ctime,
            lease,
            class: set.class,
            quota_bytes: set.quota_bytes,
            quota_inodes: set.quota_inodes,
        };
        let how = How {
            changes: true,
            caller,
            ..How::default()
        };
        let reply = self.ask(ino, Op::Setattr(op), how).await?;
        if let (Some(file), Some(inode)) = (&file, &reply.inode) {
            self.take_change(file, inode, &reply, resize);
        }
        self.take_changed(sent, &reply)
    }

    /// Sends what is dirty and reports it, so that a change of size or times has the last word.
    async fn settle_before_change(&self, file: &File) -> Result<u64, FsError> {
        match self.flush_dirty(file, false).await {
            // What no server takes is gone, and told at the next fsync: it is no reason to refuse this.
            Err(error) if error.errno == Errno::ETIMEDOUT => return Err(error),
            _ => {}
        }
        self.report(file, false).await?;
        Ok(match file.lease() {
            Lease::Exclusive(lease) => lease.0,
            Lease::None | Lease::Shared => 0,
        })
    }

    async fn punch_hole(
        self: &Arc<Self>,
        open: &OpenFile,
        offset: u64,
        length: u64,
    ) -> Result<(), FsError> {
        use hither_proto::ids::CHUNK_SIZE;
        let file = &open.file;
        let size = {
            let _held = self.hold(file, true, self.deadline()).await?;
            file.data.lock().size
        };
        let end = offset.saturating_add(length).min(size);
        if offset >= end {
            return Ok(());
        }
        let first_whole = offset.div_ceil(CHUNK_SIZE) * CHUNK_SIZE;
        let last_whole = end / CHUNK_SIZE * CHUNK_SIZE;
        // The edges are written as zeros; whole pieces between them lose their chunks.
        let (head_end, tail_start) = if first_whole < last_whole {
            (first_whole, last_whole)
        } else {
            (end, end)
        };
        let edges = [offset..head_end, tail_start..end];
        let plain = OpenFile::new(Arc::clone(file), false, false);
        for edge in edges {
            let mut at = edge.start;
            while at < edge.end {
                let step = (edge.end - at).min(ZERO_BYTES);
                let zeros = vec![0; usize::try_from(step).unwrap_or(0)];
                self.write(&plain, at, zeros.into()).await?;
                at += step;
            }
        }
        if first_whole >= last_whole {
            return Ok(());
        }
        let _alone = file.gate.write().await;
        let lease = self.settle_before_change(file).await?;
        let sent = self.cache.sent_at();
        let op = hither_proto::meta::PunchHole {
            ino: file.ino.0,
            hint: self.cache.hint(file.ino),
            lease,
            offset: first_whole,
            length: last_whole - first_whole,
        };
        let how = How {
            changes: true,
            ..How::default()
        };
        let reply = self.ask(file.ino, Op::PunchHole(op), how).await?;
        {
            let mut data = file.data.lock();
            let inside = |index: &u32| {
                let start = u64::from(*index) * CHUNK_SIZE;
                first_whole <= start && start < last_whole
            };
            data.refs.retain(|index, _| !inside(index));
            data.unreported.retain(|index| !inside(index));
            data.generation += 1;
        }
        self.take_changed(sent, &reply).map(|_| ())
    }
}

impl Inner {
    /// Size and times were set by this client.
    fn take_change(&self, file: &File, inode: &Inode, reply: &Reply, resized: bool) {
        let mut data = file.data.lock();
        data.mtime = inode.mtime;
        data.generation += 1;
        if reply.data_lease != 0
            && let Lease::Exclusive(lease) = &mut data.lease
        {
            // A cut gives the lease a new id.
            *lease = hither_proto::ids::LeaseId(reply.data_lease).max(*lease);
        }
        if !resized {
            return;
        }
        let size = inode.size;
        data.size = size;
        data.unreported_size = false;
        let keep = u32::try_from(size.div_ceil(hither_proto::ids::CHUNK_SIZE)).unwrap_or(u32::MAX);
        data.refs.retain(|index, _| *index < keep);
        data.unreported.retain(|index| *index < keep);
        data.young.retain(|index| *index < keep);
        data.marked.retain(|index| *index < keep);
        let count = |data: &crate::file::Data| -> usize {
            data.unsynced.values().map(|u| u.data.bytes()).sum()
        };
        let (dirty, unsynced) = (data.dirty.bytes(), count(&data));
        data.dirty.truncate(size);
        for unsynced in data.unsynced.values_mut() {
            unsynced.data.truncate(size);
        }
        self.dirty_bytes.sub(dirty - data.dirty.bytes());
        self.unsynced_bytes.sub(unsynced - count(&data));
    }
}

/// Zeros written at a time.
const ZERO_BYTES: u64 = 1 << 20;
