//! Listing directories: from what is known under the lease, or page by page from the server.

use bytes::Bytes;
use hither_proto::ids::{InodeId, NameHash};
use hither_proto::meta::{Readdir, Reply, request::Op};

use crate::cache::SentAt;
use crate::client::{Client, Inner};
use crate::entries::{Position, Target};
use crate::error::FsError;
use crate::names::Found;
use crate::session::How;

/// An entry of a listing.
#[derive(Debug, Clone)]
pub struct ListingEntry {
    /// The name.
    pub name: Bytes,
    /// The inode's number.
    pub ino: InodeId,
    /// File type bits.
    pub kind: u32,
    /// Cookie of the position behind the entry.
    pub cookie: u64,
    /// The inode, where it was asked for and is known.
    pub found: Option<Box<Found>>,
}

/// Part of a directory.
#[derive(Debug, Clone, Default)]
pub struct Listing {
    /// Entries in the order of their positions.
    pub entries: Vec<ListingEntry>,
    /// Where to go on; `None`: nothing follows.
    pub next: Option<GoOn>,
}

/// Where a listing goes on.
#[derive(Debug, Clone)]
pub struct GoOn {
    after: Position,
    /// When the first page was asked for, if all pages since were read one after the other.
    first: Option<SentAt>,
}

impl GoOn {
    /// Behind everything that has this cookie.
    #[must_use]
    pub fn behind(cookie: u64) -> Self {
        let after = Position {
            hash: NameHash((cookie << 1) | 1),
            name: Bytes::from_static(&[0xff; hither_proto::ids::NAME_MAX + 1]),
        };
        Self { after, first: None }
    }
}

impl Client {
    /// Lists a directory from a position on (`None`: from the start), with attributes if they are
    /// wanted.
    ///
    /// # Errors
    /// What the metadata server says.
    pub async fn list(
        &self,
        dir: InodeId,
        from: Option<&GoOn>,
        limit: u32,
        attributes: bool,
    ) -> Result<Listing, FsError> {
        self.inner.list(dir, from, limit, attributes).await
    }
}

impl Inner {
    async fn list(
        &self,
        dir: InodeId,
        from: Option<&GoOn>,
        limit: u32,
        attributes: bool,
    ) -> Result<Listing, FsError> {
        if let Some(known) = self.list_known(dir, from, limit, attributes) {
            return Ok(known);
        }
        let sent = self.cache.sent_at();
        let first = from.map_or(Some(sent), |from| from.first);
        let after = from.map(|from| from.after.clone());
        let op = Readdir {
            dir: dir.0,
            hint: self.cache.hint(dir),
            after_hash: after.as_ref().map_or(0, |after| after.hash.0),
            start: after.is_none(),
            after_name: after.map_or(Bytes::new(), |after| after.name),
            limit,
            names_only: !attributes,
        };
        let reply = self.ask(dir, Op::Readdir(op), How::default()).await?;
        Ok(self.take_listing(dir, reply, sent, first))
    }

    /// A page out of the cache; `None` unless all of it is known.
    fn list_known(
        &self,
        dir: InodeId,
        from: Option<&GoOn>,
        limit: u32,
        attributes: bool,
    ) -> Option<Listing> {
        if !self.is_valid(dir) {
            return None;
        }
        let after = from.map(|from| &from.after);
        let (page, end) = self.cache.list(dir, after, limit as usize)?;
        let next = page.last().filter(|_| !end).map(|(position, _)| GoOn {
            after: position.clone(),
            first: None,
        });
        let mut entries = Vec::with_capacity(page.len());
        for (position, target) in page {
            let found = if attributes {
                let known = self.known_attributes(target.ino)?;
                Some(Box::new(self.found(dir, known)))
            } else {
                None
            };
            entries.push(ListingEntry {
                cookie: position.hash.cookie(),
                name: position.name,
                ino: target.ino,
                kind: target.kind,
                found,
            });
        }
        Some(Listing { entries, next })
    }

    /// Keeps what a reply lists under leases, and passes it on.
    fn take_listing(
        &self,
        dir: InodeId,
        reply: Reply,
        sent: SentAt,
        first: Option<SentAt>,
    ) -> Listing {
        let position = |entry: &hither_proto::meta::Entry| Position {
            hash: NameHash(entry.hash),
            name: entry.name.clone(),
        };
        let mut kept = false;
        if reply.entries_leased {
            let page = reply.entries.iter().map(|entry| {
                let target = Target {
                    ino: InodeId(entry.ino),
                    kind: entry.r#type,
                };
                (position(entry), target)
            });
            let complete = first.filter(|_| reply.end);
            kept = self.cache.put_listed(sent, dir, page, complete);
        }
        // Without this page the whole is not known, whatever the next ones bring.
        let first = first.filter(|_| kept);
        let last = reply.entries.last().filter(|_| !reply.end);
        let next = last.map(|entry| GoOn {
            after: position(entry),
            first,
        });
        let entries = reply.entries.into_iter();
        let entries = entries
            .map(|entry| {
                let found = entry.inode.map(|inode| {
                    let place = Some((dir, &entry.name));
                    self.cache
                        .put_inode(sent, &inode, entry.attributes_leased, place);
                    Box::new(self.found(dir, self.shown(inode)))
                });
                ListingEntry {
                    cookie: NameHash(entry.hash).cookie(),
                    name: entry.name,
                    ino: InodeId(entry.ino),
                    kind: entry.r#type,
                    found,
                }
            })
            .collect();
        Listing { entries, next }
    }

    /// Notes that a name had to be asked for. When that has happened often enough, the whole
    /// directory is fetched in the background, so that later names need no request.
    pub(crate) fn note_miss(&self, dir: InodeId) {
        let most = (self.config.cached_inodes_max / 4) as u64;
        if !self.cache.count_miss(dir, most) {
            return;
        }
        let Some(inner) = self.me.upgrade() else {
            return;
        };
        tokio::spawn(async move {
            if let Err(error) = inner.fetch_whole(dir).await {
                tracing::debug!(%dir, %error, "a directory could not be fetched as a whole");
            }
            inner.cache.fetched(dir);
        });
    }

    async fn fetch_whole(&self, dir: InodeId) -> Result<(), FsError> {
        let mut from = None;
        loop {
            let page = self.list(dir, from.as_ref(), FETCHED_ENTRIES, true).await?;
            from = page.next;
            if from.is_none() {
                return Ok(());
            }
        }
    }
}

/// Entries fetched in one request.
const FETCHED_ENTRIES: u32 = 1024;
