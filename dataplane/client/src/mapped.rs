//! Mapped pages. The kernel writes one back when it is to forget it, and forgets it only once that is
//! answered. Were a write-back to wait for the exclusive lease, two mounts that are both to forget
//! pages of one file would wait for each other; so it is answered at once: its data lies over what is
//! read, and becomes dirty when the exclusive lease is here.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use hither_proto::status::Errno;
use tokio::time::Instant;

use crate::client::{Client, Inner};
use crate::error::FsError;
use crate::file::{Data, File, Lease, OpenFile};

impl Client {
    /// Takes a page of a mapping that the kernel writes back. It never makes the file longer. Returns
    /// without waiting for a lease: `flush` and `fsync` do that.
    ///
    /// # Errors
    /// `ETIMEDOUT`: there was no room for it in time.
    pub async fn write_back(
        &self,
        open: &OpenFile,
        offset: u64,
        data: Bytes,
    ) -> Result<(), FsError> {
        self.inner.write_back(&open.file, offset, data).await
    }
}

impl Inner {
    async fn write_back(
        self: &Arc<Self>,
        file: &Arc<File>,
        offset: u64,
        page: Bytes,
    ) -> Result<(), FsError> {
        // Somebody waits for the kernel to forget: that is bounded by what it has, and goes first.
        let deadline = self.deadline();
        let room = async {
            match file.lease() {
                Lease::Exclusive(_) => self.wait_for_memory(file, page.len(), deadline).await,
                Lease::None | Lease::Shared => self.wait_for_mapped(page.len(), deadline).await,
            }
        };
        tokio::select! {
            room = room => room?,
            () = file.until(|data| data.recalls > 0) => {}
        }
        let gate = file.gate.try_read();
        let (kick, fetch) = {
            let mut data = file.data.lock();
            if gate.is_ok() && matches!(data.lease, Lease::Exclusive(_)) {
                self.adopt_mapped(&mut data);
                let page = within_file(data.size, offset, page);
                (self.make_dirty(&mut data, offset, page), false)
            } else {
                let before = data.mapped.bytes();
                data.mapped.insert(offset, page);
                // Its place is taken by one that is as long, or it grows.
                let more = data.mapped.bytes().saturating_sub(before);
                self.mapped_bytes.fetch_add(more, Ordering::AcqRel);
                data.generation += 1;
                (false, true)
            }
        };
        drop(gate);
        if kick {
            self.spawn_flusher(file);
        }
        if fetch {
            self.fetch_for_mapped_soon(file);
        }
        Ok(())
    }

    /// Asks for the lease mapped pages wait for, if there are any and nobody asks yet.
    pub(crate) fn fetch_for_mapped_soon(self: &Arc<Self>, file: &Arc<File>) {
        {
            let mut data = file.data.lock();
            if data.mapped.is_empty() || std::mem::replace(&mut data.fetching, true) {
                return;
            }
        }
        let (inner, file) = (Arc::clone(self), Arc::clone(file));
        tokio::spawn(async move { inner.fetch_for_mapped(&file).await });
    }

    /// Pages that wait for a lease have a bound of their own: writers of other files do not wait for
    /// whoever keeps it.
    async fn wait_for_mapped(&self, bytes: usize, deadline: Instant) -> Result<(), FsError> {
        loop {
            let mut less = std::pin::pin!(self.dirty_less.notified());
            less.as_mut().enable();
            let mapped = self.mapped_bytes.load(Ordering::Acquire);
            if mapped == 0 || mapped + bytes <= self.config.dirty_bytes_max {
                return Ok(());
            }
            if tokio::time::timeout_at(deadline, less).await.is_err() {
                return Err(crate::session::timed_out("another mount"));
            }
        }
    }

    /// Until there is nothing left, or once in vain: the client's tidying makes the next attempt.
    async fn fetch_for_mapped(&self, file: &File) {
        loop {
            let settled = self.settle_mapped(file).await;
            if let Err(error) = &settled {
                tracing::debug!(ino = %file.ino, %error, "mapped pages wait for the lease");
            }
            // Whoever has a further page sees either this task or that it has ended.
            let mut data = file.data.lock();
            if settled.is_err() || data.mapped.is_empty() {
                data.fetching = false;
                return;
            }
        }
    }

    /// Waits for the exclusive lease, if the kernel has written anything back without it.
    ///
    /// # Errors
    /// The file or the session is gone: it is lost, and the file's descriptors are told. Anything
    /// else: it is kept.
    pub(crate) async fn settle_mapped(&self, file: &File) -> Result<(), FsError> {
        if file.data.lock().mapped.is_empty() {
            return Ok(());
        }
        let held = self.hold(file, true, self.deadline()).await;
        let settled = held.map(drop);
        if let Err(error) = &settled
            && [Errno::ESTALE, Errno::ENOENT, Errno::ENOTCONN].contains(&error.errno)
        {
            let mut data = file.data.lock();
            if self.drop_mapped(&mut data) {
                data.generation += 1;
                data.errors.record(error.clone());
                self.forget_pages_soon(file.ino);
            }
        }
        settled
    }

    /// The exclusive lease is held: what was written back without it is dirty from here on.
    pub(crate) fn adopt_mapped(&self, data: &mut Data) {
        if data.mapped.is_empty() {
            return;
        }
        let mapped = std::mem::take(&mut data.mapped);
        let (bytes, runs) = (mapped.bytes(), data.flusher_runs);
        for (offset, page) in mapped.into_parts() {
            // Cut off by somebody else meanwhile, it does not bring the end back.
            let page = within_file(data.size, offset, page);
            self.make_dirty(data, offset, page);
        }
        // The next write, fsync or tidying sends it, and whoever waits for room.
        data.flusher_runs = runs;
        self.mapped_bytes.fetch_sub(bytes, Ordering::AcqRel);
        self.dirty_less.notify_waiters();
    }

    /// Forgets what was written back without the lease; whether there was anything.
    pub(crate) fn drop_mapped(&self, data: &mut Data) -> bool {
        let mapped = std::mem::take(&mut data.mapped);
        self.mapped_bytes
            .fetch_sub(mapped.bytes(), Ordering::AcqRel);
        self.dirty_less.notify_waiters();
        !mapped.is_empty()
    }

    /// A range of the file was cut off, or out.
    pub(crate) fn cut_out_mapped(&self, data: &mut Data, range: Range<u64>) {
        let before = data.mapped.bytes();
        data.mapped.remove(range);
        let less = before.saturating_sub(data.mapped.bytes());
        self.mapped_bytes.fetch_sub(less, Ordering::AcqRel);
        self.dirty_less.notify_waiters();
    }

    /// Makes the kernel forget all pages of a file. A page into which a write from here puts less than
    /// the whole may stay locked until that is answered, which may wait for the very lease that is
    /// given back: nobody can read such a page either, and it is forgotten after the write. One that
    /// is not locked is forgotten within a moment.
    pub(crate) async fn forget_pages(&self, file: &File) {
        loop {
            let (begun, locked) = file.writes();
            let forget = |range| self.kernel.forget_pages(file.ino, range);
            let others = join_all(around(&locked).into_iter().map(forget));
            let locked = join_all(
                locked
                    .iter()
                    .map(|page| forget(page * page_bytes()..(page + 1) * page_bytes())),
            );
            let both = async {
                let (_, in_time) = tokio::join!(others, tokio::time::timeout(MOMENT, locked));
                if in_time.is_err() {
                    tracing::trace!(ino = %file.ino, "a page is forgotten after its write");
                }
            };
            let another = async {
                tokio::time::sleep(MOMENT).await;
                file.until(|data| data.writes_begun != begun).await;
            };
            tokio::select! {
                () = both => return,
                // It may have locked one of the others.
                () = another => {}
            }
        }
    }
}

/// A page as far as the file goes.
fn within_file(size: u64, offset: u64, mut page: Bytes) -> Bytes {
    let most = size.saturating_sub(offset);
    page.truncate(usize::try_from(most).unwrap_or(usize::MAX));
    page
}

/// The bytes around these pages, which are in order.
fn around(pages: &[u64]) -> Vec<Range<u64>> {
    let mut ranges = Vec::new();
    let mut from = 0;
    for page in pages {
        if from < page * page_bytes() {
            ranges.push(from..page * page_bytes());
        }
        from = (page + 1) * page_bytes();
    }
    ranges.push(from..u64::MAX);
    ranges
}

/// The page that the kernel keeps locked while this is written, as it holds less than all of it.
pub(crate) fn locked_page(offset: u64, length: usize) -> Option<u64> {
    let end = offset.saturating_add(length as u64);
    let last = end.checked_sub(1)? / page_bytes();
    let whole = offset <= last * page_bytes() && end.is_multiple_of(page_bytes());
    (!whole).then_some(last)
}

/// Bytes of a page of the kernel's cache.
fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// Time in which the kernel forgets a page that is not locked.
const MOMENT: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_page_that_is_written_in_part_stays_locked() {
        let page = page_bytes();
        let locked = |from: u64, to: u64| locked_page(from, usize::try_from(to - from).unwrap());
        assert_eq!(locked(0, page), None);
        assert_eq!(locked(0, 2 * page), None);
        assert_eq!(locked(100, 2 * page), None, "the last page is whole");
        assert_eq!(locked(0, 10), Some(0));
        assert_eq!(locked(page - 96, page + 104), Some(1));
        assert_eq!(locked(page + 4, 2 * page), Some(1));
        assert_eq!(locked(0, 0), None);
    }

    #[test]
    fn everything_around_pages_is_named_once() {
        let page = page_bytes();
        assert_eq!(around(&[]), vec![0..u64::MAX]);
        assert_eq!(around(&[0]), vec![page..u64::MAX]);
        assert_eq!(
            around(&[1, 2, 5]),
            vec![0..page, 3 * page..5 * page, 6 * page..u64::MAX]
        );
    }
}
