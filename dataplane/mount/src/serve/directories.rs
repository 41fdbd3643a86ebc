//! Listing directories.

use std::sync::Arc;

use bytes::Bytes;
use hither_client::{FsError, ListingEntry};
use hither_proto::ids::InodeId;
use hither_proto::status::Errno;
use parking_lot::Mutex;

use super::Server;
use crate::transport::{Answer, DirEntry, Entry, Opened};

/// An open directory: what was read and not passed on, and where the last entry stood.
#[derive(Debug, Default)]
pub(super) struct OpenDir {
    state: Mutex<Listed>,
}

#[derive(Debug, Default)]
struct Listed {
    /// Entries read ahead, by position.
    page: Vec<(DirPosition, ListingEntry)>,
    end: bool,
}

/// Position behind an entry: the kernel's offset and the exact place.
#[derive(Debug, Clone)]
struct DirPosition {
    offset: u64,
    hash: u64,
    name: Bytes,
}

/// `.` and `..` come first; entries have offsets from 3 on.
const AFTER_DOT: u64 = 1;
const AFTER_DOTDOT: u64 = 2;
/// Entries read at a time.
const PAGE_ENTRIES: u32 = 1000;
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
        let from = if offset <= AFTER_DOTDOT {
            None
        } else {
            Some(offset)
        };
        let page = self.page_from(&dir, ino, from).await?;
        for (position, entry) in page {
            let known = match (plus, entry.found) {
                (false, _) => None,
                (true, Some(found)) => Some(self.entry(found)),
                // Not in the listing (a further name, an unread directory): looked up by itself.
                (true, None) => match self.client.lookup(ino, &entry.name).await {
                    Ok(found) => Some(self.entry(found)),
                    Err(error) if error.errno == Errno::ENOENT => continue,
                    Err(error) => return Err(error),
                },
            };
            list.push(DirEntry {
                ino: entry.ino,
                offset: position.offset,
                kind: entry.kind,
                name: entry.name,
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
            let entry: Option<Entry> = inode.clone().map(crate::front::short_lived);
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

    /// Entries behind an offset: those read before, or the next page.
    async fn page_from(
        &self,
        dir: &OpenDir,
        ino: InodeId,
        from: Option<u64>,
    ) -> Result<Vec<(DirPosition, ListingEntry)>, FsError> {
        let after = {
            let state = dir.state.lock();
            match from {
                None => None,
                Some(offset) => {
                    let at = state.page.iter().rposition(|(p, _)| p.offset == offset);
                    match at {
                        Some(at) if at + 1 < state.page.len() => {
                            return Ok(state.page[at + 1..].to_vec());
                        }
                        Some(_) if state.end => return Ok(Vec::new()),
                        Some(at) => {
                            let (position, _) = &state.page[at];
                            Some((position.hash, position.name.clone()))
                        }
                        // A position from long ago: the offset is the hash but for its last bit.
                        None => Some(((offset << 1) | 1, Bytes::from_static(&[0xff; 256]))),
                    }
                }
            }
        };
        let listing = self.client.list(ino, after, PAGE_ENTRIES).await?;
        let page: Vec<(DirPosition, ListingEntry)> = listing
            .entries
            .into_iter()
            .map(|entry| {
                let hash = hither_proto::ids::NameHash::of(&entry.name).0;
                let position = DirPosition {
                    offset: entry.cookie,
                    hash,
                    name: entry.name.clone(),
                };
                (position, entry)
            })
            .collect();
        let mut state = dir.state.lock();
        state.page.clone_from(&page);
        state.end = listing.end;
        Ok(page)
    }
}
