//! Data leases: asking for them, holding them, and what is asked for under them.

use hither_proto::meta::{Acquire, AllocChunks, ChunkRefs, Reply, request::Op};
use hither_proto::status::Status;
use tokio::sync::RwLockReadGuard;
use tokio::time::Instant;

use crate::client::Inner;
use crate::error::FsError;
use crate::file::{Data, File, Lease, room};
use crate::session::How;

/// Resets [`Data::asking`], whatever becomes of the request.
struct Asking<'a>(&'a File);

impl<'a> Asking<'a> {
    /// Also gives how many recalls were declined so far.
    fn begin(file: &'a File) -> (Self, u64) {
        let declined = file.ask_begins();
        (Self(file), declined)
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.ask_ended();
    }
}

impl Inner {
    /// Holds the file's lease, shared or exclusive: it does not end before the guard is dropped.
    pub(crate) async fn hold<'a>(
        &self,
        file: &'a File,
        exclusive: bool,
        deadline: Instant,
    ) -> Result<RwLockReadGuard<'a, ()>, FsError> {
        let enough = |lease: Lease| match lease {
            Lease::None => false,
            Lease::Shared => !exclusive,
            Lease::Exclusive(_) => true,
        };
        let session = self.session_for(file.ino);
        loop {
            session.wait_valid(deadline).await?;
            {
                let held = file.gate.read().await;
                let mut data = file.data.lock();
                if enough(data.lease) {
                    if exclusive {
                        self.adopt_mapped(&mut data);
                    }
                    drop(data);
                    return Ok(held);
                }
            }
            let _one = file.acquiring.lock().await;
            if enough(file.lease()) {
                continue;
            }
            if let Some(held) = self.acquire(file, exclusive).await? {
                if exclusive {
                    self.adopt_mapped(&mut file.data.lock());
                }
                return Ok(held);
            }
            if Instant::now() >= deadline {
                return Err(crate::session::timed_out("the metadata server"));
            }
        }
    }

    /// Asks for a lease; `None`: it was taken back before it was here.
    async fn acquire<'a>(
        &self,
        file: &'a File,
        exclusive: bool,
    ) -> Result<Option<RwLockReadGuard<'a, ()>>, FsError> {
        let (asking, declined) = Asking::begin(file);
        let sent = self.cache.sent_at();
        let op = Acquire {
            ino: file.ino.0,
            hint: self.cache.hint(file.ino),
            exclusive,
        };
        let begun = Instant::now();
        let reply = self.ask(file.ino, Op::Acquire(op), How::default()).await?;
        if reply.behind_writer && !exclusive {
            let waited = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.counters.add(|report| {
                report.write_back_waits += 1;
                report.write_back_wait_us += waited;
            });
        }
        if let Some(inode) = &reply.inode {
            self.cache
                .put_inode(sent, inode, reply.attributes_leased, None);
        }
        let held = file.gate.read().await;
        {
            let mut data = file.data.lock();
            if data.declined != declined {
                return Ok(None);
            }
            data.take_grant(&reply);
        }
        drop(asking);
        Ok(Some(held))
    }

    /// Asks how much the quota leaves by now; the exclusive lease stays.
    pub(crate) async fn ask_for_room(&self, file: &File) -> Result<(), FsError> {
        self.report(file, false).await?;
        let tenure = file.data.lock().tenure;
        let op = Acquire {
            ino: file.ino.0,
            hint: self.cache.hint(file.ino),
            exclusive: true,
        };
        let reply = self.ask(file.ino, Op::Acquire(op), How::default()).await?;
        let mut data = file.data.lock();
        if data.tenure == tenure
            && let (Some(space), Some(inode)) = (&reply.space, &reply.inode)
        {
            data.size_max = inode.size.saturating_add(room(space));
        }
        Ok(())
    }

    /// Makes sure that the references of these pieces are known.
    pub(crate) async fn need_refs(
        &self,
        file: &File,
        tenure: u64,
        first: u32,
        last: u32,
    ) -> Result<(), FsError> {
        loop {
            let from = {
                let data = file.data.lock();
                if data.tenure != tenure || data.lease == Lease::None {
                    return Err(lease_gone());
                }
                if last < data.refs_known {
                    return Ok(());
                }
                data.refs_known.max(first.min(data.refs_known))
            };
            let op = ChunkRefs {
                ino: file.ino.0,
                hint: self.cache.hint(file.ino),
                index: from,
                limit: REFS_ASKED,
            };
            let reply = self
                .ask(file.ino, Op::ChunkRefs(op), How::default())
                .await?;
            let mut data = file.data.lock();
            data.learn_new(tenure, &reply)?;
            data.refs_known = from.saturating_add(REFS_ASKED);
        }
    }

    /// Asks for chunks of pieces that have none.
    pub(crate) async fn need_chunks(
        &self,
        file: &File,
        tenure: u64,
        indices: &[u32],
    ) -> Result<(), FsError> {
        if let (Some(first), Some(last)) = (indices.first(), indices.last()) {
            self.need_refs(file, tenure, *first, *last).await?;
        }
        let (lease, missing) = {
            let data = file.data.lock();
            let Lease::Exclusive(lease) = data.lease else {
                return Err(lease_gone());
            };
            let missing: Vec<u32> = indices
                .iter()
                .copied()
                .filter(|index| !data.refs.contains_key(index))
                .collect();
            (lease, missing)
        };
        if missing.is_empty() {
            return Ok(());
        }
        let op = AllocChunks {
            ino: file.ino.0,
            hint: self.cache.hint(file.ino),
            lease: lease.0,
            indices: missing,
        };
        let reply = self
            .ask(file.ino, Op::AllocChunks(op), How::default())
            .await?;
        let mut data = file.data.lock();
        data.learn_new(tenure, &reply)
    }
}

impl Data {
    /// Takes in references that were asked for under a lease; those that are known stay as they are.
    fn learn_new(&mut self, tenure: u64, reply: &Reply) -> Result<(), FsError> {
        if self.tenure != tenure {
            return Err(lease_gone());
        }
        for chunk in &reply.chunks {
            if !self.refs.contains_key(&chunk.index) {
                self.learn(chunk);
            }
        }
        self.take_epochs(reply);
        Ok(())
    }
}

/// What was begun under a lease is refused once that is over.
pub(crate) fn lease_gone() -> FsError {
    FsError::of_status(Status::STALE_LEASE, "the file's lease is over")
}

/// References asked for at a time.
const REFS_ASKED: u32 = 1024;
