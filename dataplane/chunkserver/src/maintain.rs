//! What the metadata servers ask for: seal, settle, trim, close, delete; and listing.
//!
//! They ask the in-sync members. Members that fill have to follow, or they would become in-sync
//! with what was trimmed or settled away: one in-sync member passes it on to them before it answers.

use std::collections::BTreeMap;
use std::sync::Arc;

use hither_chunkstore::{Disk, Error, SettleOp, TrimOp};
use hither_net::NetError;
use hither_proto::chunk::{
    Close, Copy, Delete, List, ListReply, Seal, SealReply, Settle, Target, TouchedBlock, Trim,
};
use hither_proto::common::Empty;
use hither_proto::ids::{CHECKSUM_BLOCK, ChunkId, ChunkserverId, InodeId, LeaseId};
use hither_proto::kind::Kind;
use hither_proto::status::Status;
use prost::Message;

use crate::authority::{Mandate, followers, passes_on};
use crate::fetch::{Place, ask, copy_of, fetch_checksums, fetch_range};
use crate::fills::Followed;
use crate::gate::Ticket;
use crate::operation::{Call, Operation, Parked};
use crate::server::Inner;
use crate::status::Refusal;

/// Serves a request of the metadata side on a task of its own.
pub(crate) fn serve(
    inner: &Arc<Inner>,
    operation: Operation,
    call: Call,
    mandate: Mandate,
    ticket: Ticket<Parked>,
) {
    let inner = Arc::clone(inner);
    tokio::spawn(async move {
        let Call {
            responder,
            permit,
            peer,
            ..
        } = call;
        let peer = peer.map(ChunkserverId);
        let task = Task {
            inner: &inner,
            mandate,
            peer,
        };
        match operation {
            Operation::Seal(seal) => answer(responder, task.seal(&seal).await),
            Operation::Settle(settle) => answer(responder, task.settle(&settle).await),
            Operation::Trim(trim) => answer(responder, task.trim(&trim).await),
            Operation::Close(close) => answer(responder, task.close(&close).await),
            Operation::Delete(delete) => answer(responder, task.delete(&delete).await),
            Operation::List(list) => answer(responder, task.list(&list)),
            Operation::Write(_) | Operation::Flush(_) | Operation::Fetch(_) => {
                unreachable!("these are served where they came in")
            }
        }
        drop((permit, ticket));
    });
}

fn answer<M: Message>(responder: hither_net::Responder, outcome: Result<M, Refusal>) {
    match outcome {
        Ok(message) => responder.ok(&message),
        Err(refusal) => refusal.answer(responder),
    }
}

struct Task<'a> {
    inner: &'a Arc<Inner>,
    mandate: Mandate,
    /// The chunkserver that passed the request on.
    peer: Option<ChunkserverId>,
}

impl Task<'_> {
    async fn disk<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Disk) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Refusal> {
        Ok(self.inner.on_disk(self.mandate.disk, job).await?)
    }

    fn place(&self, member: ChunkserverId) -> Place {
        Place {
            member,
            group: self.mandate.group,
            epoch: self.mandate.epoch,
        }
    }

    async fn seal(&self, seal: &Seal) -> Result<SealReply, Refusal> {
        let target = target(seal.target.as_ref())?;
        let (chunk, lease) = (ChunkId(target.chunk), LeaseId(target.lease));
        let group = self.mandate.group;
        if !self.mandate.filling {
            self.whole(chunk).await?;
        }
        // What failed under older leases is to be among what the copies are compared by.
        self.write_doubts_down(&[chunk], lease).await?;
        let sealed = self
            .disk(move |disk| disk.seal(chunk, group, lease))
            .await?;
        self.follow(Kind::CHUNK_SEAL, seal).await?;
        let touched = sealed.touched.iter().map(|touched| TouchedBlock {
            block: touched.block,
            checksum: touched.checksum,
        });
        Ok(SealReply {
            exists: sealed.exists,
            copy_length: sealed.copy_length,
            lease_before: sealed.lease_before.0,
            touched: touched.collect(),
            boot_id: self.inner.boot.0,
        })
    }

    async fn settle(&self, settle: &Settle) -> Result<Empty, Refusal> {
        let target = target(settle.target.as_ref())?;
        let chunk = ChunkId(target.chunk);
        let source = settle
            .source
            .as_ref()
            .map(|source| ChunkserverId(source.server))
            .ok_or_else(|| bad_request("a settle names no source"))?;
        let op = SettleOp {
            chunk,
            group: self.mandate.group,
            inode: InodeId(0),
            lease: LeaseId(target.lease),
            epoch: self.mandate.epoch,
            runs: Vec::new(),
            length: settle.length,
            clear_open: true,
        };
        if self.mandate.filling {
            let fills = &self.inner.fills;
            let followed = fills.follow_change(self.inner, self.mandate, chunk, source);
            if let Followed::Complete(_alone) = followed.await? {
                // The blocks named are those in which the in-sync members differ.
                let blocks = self.differing(source, chunk, settle.length).await?;
                self.settle_from(source, op, &blocks).await?;
            }
            return Ok(Empty {});
        }
        self.whole(chunk).await?;
        if source == self.inner.me {
            self.disk(move |disk| disk.settle_blocks(&op)).await?;
            self.pass_on(Kind::CHUNK_SETTLE, settle).await?;
            return Ok(Empty {});
        }
        self.settle_from(source, op, &settle.blocks).await?;
        Ok(Empty {})
    }

    /// Sees to it that an in-sync member's copy lacks nothing.
    async fn whole(&self, chunk: ChunkId) -> Result<(), Refusal> {
        let fills = &self.inner.fills;
        fills.complete(self.inner, self.mandate, chunk).await
    }

    /// Blocks of the copy here that are not as another member has them, up to its `length`.
    async fn differing(
        &self,
        source: ChunkserverId,
        chunk: ChunkId,
        length: u32,
    ) -> Result<Vec<u32>, Refusal> {
        let place = self.place(source);
        let mut differing = Vec::new();
        for offset in (0..length).step_by(COMPARED_BYTES as usize) {
            let count = COMPARED_BYTES.min(length - offset);
            let theirs = fetch_checksums(self.inner, place, chunk, offset, count)
                .await
                .map_err(|error| self.unreached(source, &error))?;
            let held = self.disk(move |disk| disk.read(chunk, offset, count)).await;
            // What cannot be read here, or ends earlier, is taken from there.
            let ours = held.map_or_else(|_| Vec::new(), |data| data.checksums);
            let blocks = (offset / CHECKSUM_BLOCK..).zip(&theirs).enumerate();
            let other = blocks.filter(|(at, (_, sum))| ours.get(*at) != Some(*sum));
            differing.extend(other.map(|(_, (block, _))| block));
        }
        Ok(differing)
    }

    /// Takes blocks from another member's copy.
    async fn settle_from(
        &self,
        source: ChunkserverId,
        op: SettleOp,
        blocks: &[u32],
    ) -> Result<(), Refusal> {
        let place = self.place(source);
        let mut op = op;
        let held = self.inner.disk(self.mandate.disk)?.entry(op.chunk);
        op.inode = match held {
            Some(entry) => entry.inode,
            None => {
                let copy = copy_of(self.inner, place, op.chunk).await;
                let copy = copy.map_err(|error| self.unreached(source, &error))?;
                InodeId(copy.map_or(0, |copy| copy.inode))
            }
        };
        let mut runs = runs_of(blocks).into_iter().peekable();
        while let Some(run) = runs.next() {
            let last = runs.peek().is_none();
            let (first, count) = run;
            let offset = first * CHECKSUM_BLOCK;
            let fetched = fetch_range(self.inner, place, op.chunk, offset, count * CHECKSUM_BLOCK)
                .await
                .map_err(|error| self.unreached(source, &error))?;
            let part = SettleOp {
                // Behind the end of the source's copy there is nothing to settle.
                runs: if fetched.bytes.is_empty() {
                    Vec::new()
                } else {
                    vec![(first, fetched.bytes)]
                },
                clear_open: last,
                ..op.clone()
            };
            self.disk(move |disk| disk.settle_blocks(&part)).await?;
        }
        if blocks.is_empty() {
            self.disk(move |disk| disk.settle_blocks(&op)).await?;
        }
        Ok(())
    }

    async fn trim(&self, trim: &Trim) -> Result<Empty, Refusal> {
        let target = target(trim.target.as_ref())?;
        let op = TrimOp {
            chunk: ChunkId(target.chunk),
            group: self.mandate.group,
            lease: LeaseId(target.lease),
            epoch: self.mandate.epoch,
            offset: trim.offset,
            length: trim.length,
        };
        let chunk = op.chunk;
        if self.mandate.filling
            && let Some(source) = self.peer
        {
            let fills = &self.inner.fills;
            let followed = fills.follow_change(self.inner, self.mandate, chunk, source);
            let _alone = followed.await?;
            // Also for a chunk that its source has not: the lease at least is remembered.
            self.disk(move |disk| disk.trim(&op)).await?;
            return Ok(Empty {});
        }
        let cut_to_nothing = (op.offset, op.length) == (0, 0);
        let _alone = if cut_to_nothing {
            // Nothing is left that would have to be fetched first.
            let fills = &self.inner.fills;
            fills.alone(self.inner, self.mandate, chunk).await?
        } else {
            self.whole(chunk).await?;
            None
        };
        self.disk(move |disk| disk.trim(&op)).await?;
        self.follow(Kind::CHUNK_TRIM, trim).await?;
        Ok(Empty {})
    }

    async fn close(&self, close: &Close) -> Result<Empty, Refusal> {
        let mut by_lease: BTreeMap<LeaseId, Vec<ChunkId>> = BTreeMap::new();
        for (at, chunk) in close.chunks.iter().enumerate() {
            let lease = close.leases.get(at).copied().unwrap_or(close.lease);
            let chunks = by_lease.entry(LeaseId(lease)).or_default();
            chunks.push(ChunkId(*chunk));
        }
        let mut kept = Vec::new();
        for (lease, chunks) in by_lease {
            self.write_doubts_down(&chunks, lease).await?;
            let closed = self.disk(move |disk| disk.close_marks(&chunks, lease));
            kept.extend(closed.await?);
        }
        if kept.is_empty() {
            return Ok(Empty {});
        }
        let text = format!("{} copies may differ by a write that failed", kept.len());
        let mut refusal = Refusal::new(Status::NEEDS_SEAL, text);
        refusal.failure.chunks = kept.iter().map(|chunk| chunk.0).collect();
        Err(refusal)
    }

    async fn delete(&self, delete: &Delete) -> Result<Empty, Refusal> {
        let group = self.mandate.group;
        let disk = self.inner.disk(self.mandate.disk)?;
        let chunks: Vec<ChunkId> = delete
            .chunks
            .iter()
            .copied()
            .map(ChunkId)
            .filter(|chunk| disk.entry(*chunk).is_none_or(|entry| entry.group == group))
            .collect();
        self.inner.doubts.forget(&chunks);
        self.disk(move |disk| disk.delete(&chunks)).await?;
        self.follow(Kind::CHUNK_DELETE, delete).await?;
        Ok(Empty {})
    }

    /// Puts copies in doubt that this server knows failed writes of.
    async fn write_doubts_down(&self, chunks: &[ChunkId], lease: LeaseId) -> Result<(), Refusal> {
        let doubts = self.inner.doubts.take(chunks, lease);
        if doubts.is_empty() {
            return Ok(());
        }
        let of_job = doubts.clone();
        let written = self
            .disk(move |disk| of_job.iter().try_for_each(|doubt| disk.doubt(doubt)))
            .await;
        if written.is_err() {
            self.inner.doubts.put_back(&doubts);
        }
        written
    }

    fn list(&self, list: &List) -> Result<ListReply, Refusal> {
        let disk = self.inner.disk(self.mandate.disk)?;
        let limit = list.limit.clamp(1, LIST_MAX) as usize;
        let (copies, more) = disk.list(self.mandate.group, ChunkId(list.from), limit);
        let copies = copies.into_iter().map(|(chunk, entry)| Copy {
            chunk: chunk.0,
            lease: entry.lease.0,
            length: entry.length,
            inode: entry.inode.0,
            open: entry.open.is_some(),
            changed_epoch: entry.changed_epoch.0,
            partial: entry.is_partial(),
        });
        Ok(ListReply {
            copies: copies.collect(),
            more,
        })
    }

    /// Tells the members that fill, if that is this server's part.
    async fn follow<M: Message>(&self, kind: Kind, message: &M) -> Result<(), Refusal> {
        if self.mandate.filling {
            return Ok(());
        }
        let map = self.inner.link.map();
        let filling =
            followers(&map, self.inner.me, &self.mandate).map_err(Refusal::stale_epoch)?;
        if passes_on(&map, self.inner.me, self.mandate.group) {
            self.tell(&filling, kind, message).await?;
        }
        Ok(())
    }

    /// Tells the members that fill, and waits for all of them.
    async fn pass_on<M: Message>(&self, kind: Kind, message: &M) -> Result<(), Refusal> {
        let filling = followers(&self.inner.link.map(), self.inner.me, &self.mandate);
        self.tell(&filling.map_err(Refusal::stale_epoch)?, kind, message)
            .await
    }

    async fn tell<M: Message>(
        &self,
        filling: &[ChunkserverId],
        kind: Kind,
        message: &M,
    ) -> Result<(), Refusal> {
        let calls = filling
            .iter()
            .map(|member| ask(self.inner, *member, kind, message));
        let answers = futures::future::join_all(calls).await;
        for (member, answer) in filling.iter().zip(answers) {
            match answer {
                Ok(_)
                | Err(NetError::Refused {
                    status: Status::NO_SUCH_CHUNK,
                    ..
                }) => {}
                Err(error) => return Err(self.unreached(*member, &error)),
            }
        }
        Ok(())
    }

    fn unreached(&self, member: ChunkserverId, error: &NetError) -> Refusal {
        match error {
            NetError::Refused { status, failure } => Refusal {
                status: *status,
                failure: failure.clone(),
            },
            other => Refusal::broken_link(self.inner.me.0, member.0, other),
        }
    }
}

fn target(target: Option<&Target>) -> Result<&Target, Refusal> {
    target.ok_or_else(|| bad_request("the request names no chunk"))
}

fn bad_request(text: &str) -> Refusal {
    Refusal::new(Status::BAD_REQUEST, text)
}

/// Cuts block numbers into runs of neighbours: first and count.
fn runs_of(blocks: &[u32]) -> Vec<(u32, u32)> {
    let mut blocks = blocks.to_vec();
    blocks.sort_unstable();
    blocks.dedup();
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for block in blocks {
        match runs.last_mut() {
            Some((first, count)) if *first + *count == block && *count < RUN_BLOCKS_MAX => {
                *count += 1;
            }
            _ => runs.push((block, 1)),
        }
    }
    runs
}

/// Bytes compared at once.
const COMPARED_BYTES: u32 = 1 << 20;
/// Copies in one page of a list.
const LIST_MAX: u32 = 1024;
/// Blocks fetched at once.
const RUN_BLOCKS_MAX: u32 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_neighbours() {
        assert_eq!(runs_of(&[]), vec![]);
        assert_eq!(runs_of(&[5, 3, 4, 9, 4]), vec![(3, 3), (9, 1)]);
        let many: Vec<u32> = (0..300).collect();
        assert_eq!(runs_of(&many), vec![(0, 256), (256, 44)]);
    }
}
