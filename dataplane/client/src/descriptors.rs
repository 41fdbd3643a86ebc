//! Open files: what a descriptor is asked for.

use std::sync::Arc;

use bytes::Bytes;
use hither_proto::ids::InodeId;
use hither_proto::meta::{CloseInode, request::Op};

use crate::client::{Client, Inner};
use crate::error::FsError;
use crate::file::{Lease, OpenFile};
use crate::session::How;

impl Client {
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

    /// Tells errors of earlier writes, once, as close(2) should. What was written through a mapping
    /// is seen by others from then on.
    ///
    /// # Errors
    /// The error of data that could not be stored.
    pub async fn flush(&self, open: &OpenFile) -> Result<(), FsError> {
        let settled = self.inner.settle_mapped(&open.file).await;
        let told = open.told();
        settled.and(told)
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
    /// The server knew of a descriptor without a lease: it is closed.
    pub(crate) async fn tell_closed(&self, ino: InodeId) {
        let how = How {
            changes: true,
            ..How::default()
        };
        let op = Op::CloseInode(CloseInode { ino: ino.0 });
        if let Err(error) = self.ask(ino, op, how).await {
            tracing::warn!(%ino, %error, "the server could not be told of a close");
        }
    }
}
