//! Writes and flushes: to the disk and to the next member of the chain at the same time.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hither_chunkstore::{Error, WriteOp};
use hither_net::{NetError, Reply};
use hither_proto::chunk::{Ack, Applied, Flush, Hop, Target, Write};
use hither_proto::ids::{
    ChainNumber, ChunkId, ChunkserverId, DiskIndex, InodeId, LeaseId, SessionId,
};
use hither_proto::status::Status;
use parking_lot::Mutex;

use crate::authority::{BadChain, Mandate, check_chain};
use crate::counters::{RecentWrite, add};
use crate::doubts::Attempt;
use crate::gate::Ticket;
use crate::links::{Message, Outgoing};
use crate::operation::{Call, Parked};
use crate::read::mend_block;
use crate::server::Inner;
use crate::status::Refusal;

/// Serves a write. Called in the order of arrival, which disk and link keep.
pub(crate) fn write(
    inner: &Arc<Inner>,
    mut write: Write,
    call: Call,
    mandate: Mandate,
    ticket: Ticket<Parked>,
) {
    let head = call.peer.is_none();
    if let Err(refusal) = check(inner, head, &mandate, &write.rest) {
        return refusal.answer(call.responder);
    }
    let Some(writing) = inner.sessions.begin(SessionId(write.session)) else {
        let text = format!("session {} is fenced", write.session);
        return Refusal::new(Status::NO_SESSION, text).answer(call.responder);
    };
    let Some(disk) = inner.store.disk(mandate.disk) else {
        return inner.no_disk().answer(call.responder);
    };
    let Some(target) = write.target.clone() else {
        return Refusal::new(Status::BAD_REQUEST, "a write names no chunk").answer(call.responder);
    };
    let chunk = ChunkId(target.chunk);
    let filling = mandate.filling && inner.fills.lacks(mandate.group, mandate.epoch, chunk);
    let op = write_op(&write, &target, &call, &mandate, filling);
    let recent = RecentWrite {
        chunk,
        behind: write.rest.len(),
        head,
    };
    let payload = call.payload.clone();
    let effect = Effect::Write(attempt_of(&op), mandate.disk);
    let join = Join::new(inner, call, !write.rest.is_empty(), effect);
    if let Some(next) = take_first(&mut write.rest) {
        let sync = write.sync;
        let timeout = inner.link_timeout(write.rest.len(), sync);
        join.forward(&next, Message::Write(Box::new(write)), payload, timeout);
    }
    let inner = Arc::clone(inner);
    disk.write(op, move |outcome| {
        let outcome = match outcome {
            Err(Error::BadBlock { chunk, block }) => {
                return mend_later(&inner, &join, mandate, chunk, block);
            }
            Ok(()) => {
                inner.counts.remember(recent);
                Ok(())
            }
            Err(error) => {
                if matches!(error, Error::DiskFailed { .. }) {
                    // The manager should know before the next regular beat.
                    inner.beat_now.notify_one();
                }
                Err(error.into())
            }
        };
        drop((ticket, writing));
        join.local(outcome);
    });
}

fn write_op(
    write: &Write,
    target: &Target,
    call: &Call,
    mandate: &Mandate,
    filling: bool,
) -> WriteOp {
    WriteOp {
        chunk: ChunkId(target.chunk),
        group: mandate.group,
        inode: InodeId(write.inode),
        lease: LeaseId(target.lease),
        chain: ChainNumber(write.chain_number),
        offset: write.offset,
        payload: call.payload.clone(),
        checksums: write.checksums.clone(),
        may_create: write.may_create,
        session: SessionId(write.session),
        epoch: mandate.epoch,
        sync: write.sync,
        filling,
    }
}

fn attempt_of(op: &WriteOp) -> Attempt {
    let length = u32::try_from(op.payload.len()).unwrap_or(u32::MAX);
    Attempt {
        chunk: op.chunk,
        group: op.group,
        lease: op.lease,
        session: op.session,
        epoch: op.epoch,
        range: op.offset..op.offset.saturating_add(length),
    }
}

/// Serves a flush: what was written before through this member is made stable.
pub(crate) fn flush(
    inner: &Arc<Inner>,
    mut flush: Flush,
    call: Call,
    mandate: Mandate,
    ticket: Ticket<Parked>,
) {
    if let Err(refusal) = check(inner, call.peer.is_none(), &mandate, &flush.rest) {
        return refusal.answer(call.responder);
    }
    let Some(disk) = inner.store.disk(mandate.disk) else {
        return inner.no_disk().answer(call.responder);
    };
    let chunks: Vec<ChunkId> = flush.chunks.iter().copied().map(ChunkId).collect();
    let join = Join::new(inner, call, !flush.rest.is_empty(), Effect::Flush);
    if let Some(next) = take_first(&mut flush.rest) {
        let timeout = inner.link_timeout(flush.rest.len(), true);
        join.forward(&next, Message::Flush(flush), Bytes::new(), timeout);
    }
    disk.flush(&chunks, move |outcome| {
        drop(ticket);
        join.local(outcome.map_err(Refusal::from));
    });
}

fn check(inner: &Inner, head: bool, mandate: &Mandate, rest: &[Hop]) -> Result<(), Refusal> {
    if !head {
        return Ok(());
    }
    match check_chain(&inner.link.map(), inner.me, mandate.group, rest) {
        Ok(()) => Ok(()),
        Err(BadChain::Incomplete) => {
            let mut refusal = Refusal::stale_epoch(mandate.epoch);
            refusal.failure.text = "the chain does not name all members".into();
            Err(refusal)
        }
        Err(BadChain::TooFewCopies) => Err(Refusal::new(
            Status::TOO_FEW_COPIES,
            format!("group {} has too few in-sync members", mandate.group),
        )),
    }
}

fn take_first(rest: &mut Vec<Hop>) -> Option<Hop> {
    (!rest.is_empty()).then(|| rest.remove(0))
}

/// The block in which a short piece was to be merged is damaged: it is repaired, and the writer
/// sends again. Writing later from here could put these bytes over newer ones.
fn mend_later(inner: &Arc<Inner>, join: &Arc<Join>, mandate: Mandate, chunk: ChunkId, block: u32) {
    let (inner, join) = (Arc::clone(inner), Arc::clone(join));
    let runtime = inner.runtime.clone();
    runtime.spawn(async move {
        let outcome = match mend_block(&inner, mandate, chunk, block).await {
            Ok(()) => Refusal::retry("a damaged block was repaired, send again"),
            Err(refusal) => refusal,
        };
        join.local(Err(outcome));
    });
}

enum Effect {
    /// The write, and the disk it goes to here.
    Write(Attempt, DiskIndex),
    Flush,
}

/// Waits for this member and for those behind it, then answers.
struct Join {
    inner: Arc<Inner>,
    parts: Mutex<Parts>,
    effect: Effect,
}

struct Parts {
    call: Option<Call>,
    local: Option<Result<(), Refusal>>,
    behind: Option<Result<Vec<Ack>, Refusal>>,
}

impl Join {
    fn new(inner: &Arc<Inner>, call: Call, has_next: bool, effect: Effect) -> Arc<Self> {
        Arc::new(Self {
            inner: Arc::clone(inner),
            parts: Mutex::new(Parts {
                call: Some(call),
                local: None,
                behind: (!has_next).then(|| Ok(Vec::new())),
            }),
            effect,
        })
    }

    fn forward(self: &Arc<Self>, next: &Hop, message: Message, payload: Bytes, timeout: Duration) {
        let join = Arc::clone(self);
        let to = next.server;
        let Some(address) = self.inner.address_of(next) else {
            let error = NetError::Connect {
                address: next.address.clone(),
                reason: "it is not in the map".into(),
            };
            return self.behind(Err(Refusal::broken_link(self.inner.me.0, to, &error)));
        };
        let done = move |outcome: Result<Reply, NetError>| {
            let acks = outcome.and_then(|reply| reply.decode::<Applied>());
            join.behind(match acks {
                Ok(applied) => Ok(applied.acks),
                Err(NetError::Refused { status, failure }) => Err(Refusal { status, failure }),
                Err(error) => Err(Refusal::broken_link(join.inner.me.0, to, &error)),
            });
        };
        self.inner.links.send(
            &address,
            Outgoing {
                message,
                payload,
                timeout,
                done: Box::new(done),
            },
        );
    }

    fn local(&self, outcome: Result<(), Refusal>) {
        self.finish(|parts| parts.local = Some(outcome));
    }

    fn behind(&self, outcome: Result<Vec<Ack>, Refusal>) {
        self.finish(|parts| parts.behind = Some(outcome));
    }

    fn finish(&self, arrive: impl FnOnce(&mut Parts)) {
        let (call, local, behind) = {
            let mut parts = self.parts.lock();
            arrive(&mut parts);
            if parts.local.is_none() || parts.behind.is_none() {
                return;
            }
            (parts.call.take(), parts.local.take(), parts.behind.take())
        };
        let (Some(call), Some(local), Some(behind)) = (call, local, behind) else {
            return;
        };
        match both(local, behind) {
            Ok(behind) => {
                self.note_success();
                let own = Ack {
                    server: self.inner.me.0,
                    boot_id: self.inner.boot.0,
                };
                let acks = std::iter::once(own).chain(behind).collect();
                call.responder.ok(&Applied { acks });
            }
            Err(refusal) => {
                self.note_failure(&refusal);
                refusal.answer(call.responder);
            }
        }
        drop(call.permit);
    }

    fn note_success(&self) {
        let counts = &self.inner.counts;
        match &self.effect {
            Effect::Write(attempt, _) => {
                add(&counts.writes, 1);
                add(&counts.write_bytes, attempt.range.len() as u64);
                self.inner.doubts.passed(attempt);
            }
            Effect::Flush => add(&counts.flushes, 1),
        }
    }

    /// A member may have applied the write that another has not. Before the answer, so that no
    /// close comes in between.
    fn note_failure(&self, refusal: &Refusal) {
        let Effect::Write(attempt, disk) = &self.effect else {
            return;
        };
        if refusal.status == Status::STALE_LEASE && refusal.failure.lease > attempt.lease.0 {
            // Sealed meanwhile: the copies are compared for that.
            return;
        }
        let inner = &self.inner;
        inner.doubts.failed(attempt);
        if let (Some(doubt), Some(disk)) = (inner.doubts.overflow(), inner.store.disk(*disk)) {
            let submitted = disk.submit(move |disk| {
                if let Err(error) = disk.doubt(&doubt) {
                    tracing::warn!(chunk = %doubt.chunk, %error, "a doubt about a copy is lost");
                }
            });
            if let Err(error) = submitted {
                tracing::warn!(%error, "a doubt about a copy is lost");
            }
        }
    }
}

/// The outcome here and behind. Of two members that have seen more than the writer knows, the
/// answer is that which has seen most.
fn both(
    local: Result<(), Refusal>,
    behind: Result<Vec<Ack>, Refusal>,
) -> Result<Vec<Ack>, Refusal> {
    match (local, behind) {
        (Ok(()), behind) => behind,
        (Err(local), Err(behind))
            if [&local, &behind].map(|refusal| refusal.status) == [Status::STALE_LEASE; 2] =>
        {
            let seen = |refusal: &Refusal| (refusal.failure.lease, refusal.failure.chain);
            Err(if seen(&local) < seen(&behind) {
                behind
            } else {
                local
            })
        }
        (Err(local), _) => Err(local),
    }
}

impl Inner {
    /// Time the next member gets, with this many behind it.
    fn link_timeout(&self, behind: usize, stable: bool) -> Duration {
        let members = u32::try_from(behind).unwrap_or(u32::MAX).saturating_add(1);
        let one = Duration::from_millis(self.config.link_timeout_ms.max(1));
        let one = if stable { one * STABLE_FACTOR } else { one };
        one.saturating_mul(members)
    }

    /// Where the next member is, by the map: what the writer says may be older, or wrong.
    fn address_of(&self, hop: &Hop) -> Option<String> {
        let map = self.link.map();
        map.address(ChunkserverId(hop.server)).map(str::to_owned)
    }
}

/// Stable storage gets so many times the time.
const STABLE_FACTOR: u32 = 2;
