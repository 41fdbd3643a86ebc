//! Operations on names.

use std::time::Duration;

use bytes::Bytes;
use hither_proto::ids::{InodeId, ROOT};
use hither_proto::meta::{
    Caller, Create, Getattr, Link, Lookup, RemoveXattr, Rename, Reply, SetXattr, Space, Statfs,
    Unlink, request::Op,
};
use hither_proto::status::Errno;
use hither_proto::stored::Inode;

use crate::cache::{Attributes, Known};
use crate::client::{Client, Inner};
use crate::entries::Target;
use crate::error::FsError;
use crate::file::Lease;
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
    pub(crate) fn take_parents(
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
}
