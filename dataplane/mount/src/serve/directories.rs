//! Listing directories.

use std::sync::Arc;

use bytes::Bytes;
use hither_client::{FsError, GoOn, ListingEntry};
use hither_proto::ids::InodeId;
use hither_proto::status::Errno;
use parking_lot::Mutex;

use super::Server;
use crate::transport::{Answer, DirEntry, Opened};

/// An open directory: what was read and not passed on.
#[derive(Debug, Default)]
pub(super) struct OpenDir {
    page: Mutex<Option<Arc<Page>>>,
}

/// Consecutive entries of a directory.
#[derive(Debug)]
struct Page {
    /// The kernel's offset the page begins at.
    from: u64,
    /// Sorted by cookie.
    entries: Vec<ListingEntry>,
    next: Option<GoOn>,
    /// Attributes were asked for.
    attributes: bool,
}

impl Page {
    /// Index of the first entry behind an offset; `None` when the page does not say.
    fn behind(&self, offset: u64) -> Option<usize> {
        if offset < self.from {
            return None;
        }
        let at = self.entries.partition_point(|entry| entry.cookie <= offset);
        let last = self.entries.last().map_or(self.from, |entry| entry.cookie);
        let inside = at < self.entries.len() || offset == last || self.next.is_none();
        inside.then_some(at)
    }
}

/// `.` and `..` come first; entries have offsets from 3 on.
const AFTER_DOT: u64 = 1;
const AFTER_DOTDOT: u64 = 2;
/// Entries read at a time: names alone, and with attributes.
const PAGE_NAMES: u32 = 4096;
const PAGE_ATTRIBUTES: u32 = 512;
/// Entries passed on at a time: what fits into the buffer of a readdir(3) with short names, alone
/// and with attributes.
const ANSWER_NAMES: usize = 1024;
const ANSWER_ATTRIBUTES: usize = 224;
const S_IFDIR: u32 = 0o040_000;

impl Server {
    pub(super) fn opendir(&self, _: InodeId) -> Answer {
        let handle = self.handle();
        self.dirs.lock().insert(handle, Arc::default());
        Answer::Opened(Opened {
            handle,
            direct: false,
            keep_cache: false,
        })
    }

    pub(super) async fn readdir(
        &self,
        ino: InodeId,
        handle: u64,
        offset: u64,
        plus: bool,
    ) -> Result<Answer, FsError> {
        let dir = self.dirs.lock().get(&handle).cloned().ok_or(Errno::EBADF)?;
        let mut list = Vec::new();
        if offset < AFTER_DOTDOT {
            self.dots(ino, offset, plus, &mut list).await?;
        }
        let (page, at) = self.page_behind(&dir, ino, offset, plus).await?;
        let most = if plus {
            ANSWER_ATTRIBUTES
        } else {
            ANSWER_NAMES
        };
        let part = &page.entries[at..page.entries.len().min(at + most)];
        list.reserve(part.len());
        for entry in part {
            let known = match (plus, &entry.found) {
                (false, _) => None,
                (true, Some(found)) => Some(Box::new(self.entry((**found).clone()))),
                // Not in the listing (a further name, an unread directory): looked up by itself.
                (true, None) => match self.client.lookup(ino, &entry.name).await {
                    Ok(found) => Some(Box::new(self.entry(found))),
                    Err(error) if error.errno == Errno::ENOENT => continue,
                    Err(error) => return Err(error),
                },
            };
            list.push(DirEntry {
                ino: entry.ino,
                offset: entry.cookie,
                kind: entry.kind,
                name: entry.name.clone(),
                entry: known,
            });
        }
        Ok(Answer::Listing(list))
    }

    async fn dots(
        &self,
        ino: InodeId,
        offset: u64,
        plus: bool,
        list: &mut Vec<DirEntry>,
    ) -> Result<(), FsError> {
        let names = [(AFTER_DOT, &b"."[..]), (AFTER_DOTDOT, &b".."[..])];
        let inode = if plus {
            Some(self.client.attributes(ino).await?.inode)
        } else {
            None
        };
        for (after, name) in names.into_iter().filter(|(after, _)| *after > offset) {
            // The kernel knows the parent itself and takes no attributes of either.
            let entry = inode.clone().map(crate::front::short_lived).map(Box::new);
            let name = Bytes::from_static(name);
            list.push(DirEntry {
                ino,
                offset: after,
                kind: S_IFDIR,
                name,
                entry,
            });
        }
        Ok(())
    }

    /// A page with the entries behind an offset, and where they begin in it: the one read before,
    /// or another one.
    async fn page_behind(
        &self,
        dir: &OpenDir,
        ino: InodeId,
        offset: u64,
        plus: bool,
    ) -> Result<(Arc<Page>, usize), FsError> {
        let kept = dir.page.lock().clone();
        let from = match kept {
            // A new beginning shows the directory anew.
            _ if offset <= AFTER_DOTDOT => None,
            Some(page) => match page.behind(offset) {
                Some(at) if at == page.entries.len() => match page.next.clone() {
                    None => return Ok((page, at)),
                    next => next,
                },
                Some(at) if page.attributes || !plus => return Ok((page, at)),
                _ => Some(GoOn::behind(offset)),
            },
            None => Some(GoOn::behind(offset)),
        };
        let limit = if plus { PAGE_ATTRIBUTES } else { PAGE_NAMES };
        let listing = self.client.list(ino, from.as_ref(), limit, plus).await?;
        let page = Arc::new(Page {
            from: offset,
            entries: listing.entries,
            next: listing.next,
            attributes: plus,
        });
        *dir.page.lock() = Some(Arc::clone(&page));
        Ok((page, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(from: u64, cookies: &[u64], next: Option<GoOn>) -> Page {
        let entry = |cookie: &u64| ListingEntry {
            name: Bytes::from(cookie.to_string()),
            ino: InodeId(*cookie),
            kind: 0,
            cookie: *cookie,
            found: None,
        };
        Page {
            from,
            entries: cookies.iter().map(entry).collect(),
            next,
            attributes: false,
        }
    }

    #[test]
    fn a_page_says_what_is_behind_an_offset_only_inside_it() {
        let more = page(10, &[12, 15, 19], Some(GoOn::behind(19)));
        let found: Vec<_> = [9, 10, 12, 13, 15, 19, 20]
            .map(|offset| more.behind(offset))
            .to_vec();
        let expected = [None, Some(0), Some(1), Some(1), Some(2), Some(3), None];
        assert_eq!(found, expected);
        let last = page(10, &[12], None);
        assert_eq!([12, 99].map(|offset| last.behind(offset)), [Some(1); 2]);
        assert_eq!(page(10, &[], None).behind(10), Some(0));
    }
}
