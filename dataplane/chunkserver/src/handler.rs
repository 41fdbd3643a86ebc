//! Where requests come in: on the reading task of a connection, which must not wait.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use hither_net::{Connection, Handler, Incoming, Responder};
use hither_proto::chunk::{Fence, FenceReply, OpenChunk, Read, StatusReply};
use hither_proto::common::Role;
use hither_proto::ids::{Epoch, GroupId, SessionId};
use hither_proto::kind::Kind;
use hither_proto::status::Status;
use parking_lot::RwLock;

use crate::authority::{Mandate, Need, Verdict, judge};
use crate::counters::add;
use crate::gate::{Entered, Ticket};
use crate::operation::{Call, Operation, Parked};
use crate::server::Inner;
use crate::status::Refusal;
use crate::{chain, maintain, read};

/// Serves connections from before the server is registered on: until then everybody has to wait.
#[derive(Default)]
pub(crate) struct Front {
    inner: RwLock<Option<Arc<Inner>>>,
    /// Connections that have asked for something, to be closed at the end.
    connections: RwLock<BTreeMap<u64, Weak<Connection>>>,
}

impl Front {
    /// Begins to serve.
    pub(crate) fn open(&self, inner: Arc<Inner>) {
        *self.inner.write() = Some(inner);
    }

    /// Ends to serve.
    pub(crate) fn close(&self) {
        *self.inner.write() = None;
        let connections = std::mem::take(&mut *self.connections.write());
        for connection in connections.into_values().filter_map(|weak| weak.upgrade()) {
            connection.close();
        }
    }

    fn remember(&self, connection: &Arc<Connection>) {
        if !self.connections.read().contains_key(&connection.id()) {
            let weak = Arc::downgrade(connection);
            self.connections.write().insert(connection.id(), weak);
        }
    }
}

impl Handler for Front {
    fn request(&self, connection: &Arc<Connection>, incoming: Incoming, responder: Responder) {
        self.remember(connection);
        let inner = self.inner.read().clone();
        match inner {
            Some(inner) if !inner.is_stopping() => {
                inner.request(connection, incoming, responder);
            }
            _ => Refusal::retry("the chunkserver is starting or stopping").answer(responder),
        }
    }

    fn closed(&self, connection: &Arc<Connection>) {
        self.connections.write().remove(&connection.id());
    }
}

/// What the map says of a request, once it is new enough.
pub(crate) enum Judged {
    Granted(Mandate),
    /// The map has to be fetched first.
    Newer,
    Refused(Refusal),
}

impl Inner {
    fn request(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        incoming: Incoming,
        responder: Responder,
    ) {
        let kind = incoming.header.kind;
        match kind {
            Kind::CHUNK_READ => return self.read(connection, &incoming, responder),
            Kind::FENCE_SESSION => return self.fence(&incoming, responder),
            Kind::CHUNK_STATUS => return responder.ok(&self.status()),
            _ => {}
        }
        let operation = match Operation::decode(&incoming) {
            Some(Ok(operation)) => operation,
            Some(Err(error)) => return responder.fail(Status::BAD_REQUEST, error.to_string()),
            None => {
                return responder.fail(Status::UNSUPPORTED, format!("{kind} is not served here"));
            }
        };
        let peer = connection
            .peer()
            .filter(|peer| peer.role == Role::Chunkserver)
            .map(|peer| peer.server_id);
        let bytes = incoming.payload.len() + operation.reply_bytes();
        let Some(permit) = self.admission.enter(connection.id(), bytes, peer.is_some()) else {
            return self.busy(responder);
        };
        let call = Call {
            payload: incoming.payload,
            responder,
            permit,
            peer,
        };
        self.dispatch(operation, call);
    }

    /// Refuses a request as one too many.
    pub(crate) fn busy(&self, responder: Responder) {
        add(&self.counts.busy, 1);
        responder.fail(Status::BUSY, "too much is under way");
    }

    /// Serves a request now, or lets it wait behind others of its group.
    fn dispatch(self: &Arc<Self>, operation: Operation, call: Call) {
        let (group, epoch) = operation.group();
        if !self.gates.has_waiting(group) {
            match self.judge(group, epoch, operation.need()) {
                Judged::Refused(refusal) => return refusal.answer(call.responder),
                Judged::Granted(mandate) => match self.gates.enter(group, epoch) {
                    Entered::In(ticket) => return self.serve(operation, call, mandate, ticket),
                    Entered::Stale(known) => {
                        return Refusal::stale_epoch(known).answer(call.responder);
                    }
                    Entered::Draining => {}
                },
                Judged::Newer => {}
            }
        }
        match self.gates.park(group, Parked { operation, call }) {
            Ok(true) => {
                let inner = Arc::clone(self);
                tokio::spawn(async move { inner.serve_waiting(group).await });
            }
            Ok(false) => {}
            Err(parked) => self.busy(parked.call.responder),
        }
    }

    /// Serves what waits for a group, one after the other.
    async fn serve_waiting(self: Arc<Self>, group: GroupId) {
        while let Some(Parked { operation, call }) = self.gates.next_waiting(group) {
            let (_, epoch) = operation.group();
            let judged = self.judge_fresh(group, epoch, operation.need()).await;
            let mandate = match judged {
                Ok(mandate) => mandate,
                Err(refusal) => {
                    refusal.answer(call.responder);
                    continue;
                }
            };
            self.gates.drained(group, epoch).await;
            match self.gates.enter(group, epoch) {
                Entered::In(ticket) => self.serve(operation, call, mandate, ticket),
                Entered::Stale(known) => Refusal::stale_epoch(known).answer(call.responder),
                Entered::Draining => {
                    Refusal::retry("an older epoch is still under way").answer(call.responder);
                }
            }
        }
    }

    fn serve(
        self: &Arc<Self>,
        operation: Operation,
        call: Call,
        mandate: Mandate,
        ticket: Ticket<Parked>,
    ) {
        match operation {
            Operation::Write(write) => chain::write(self, *write, call, mandate, ticket),
            Operation::Flush(flush) => chain::flush(self, flush, call, mandate, ticket),
            Operation::Fetch(fetch) => read::fetch(self, &fetch, call, mandate, ticket),
            other => maintain::serve(self, other, call, mandate, ticket),
        }
    }

    /// Judges a request by the map at hand.
    pub(crate) fn judge(&self, group: GroupId, epoch: Epoch, need: Need) -> Judged {
        match judge(&self.link.map(), self.me, group, epoch, need) {
            Verdict::Granted(mandate) => Judged::Granted(mandate),
            Verdict::Newer => Judged::Newer,
            Verdict::Stale(known) => Judged::Refused(Refusal::stale_epoch(known)),
            Verdict::NotMine => Judged::Refused(self.not_mine(group)),
        }
    }

    fn not_mine(&self, group: GroupId) -> Refusal {
        let text = format!(
            "chunkserver {} does not serve this of group {group}",
            self.me
        );
        let mut refusal = Refusal::new(Status::NOT_MINE, text);
        refusal.failure.map_version = self.link.map().version().0;
        refusal
    }

    /// Judges a request by a map that is as new as its sender's, fetched if need be.
    pub(crate) async fn judge_fresh(
        &self,
        group: GroupId,
        epoch: Epoch,
        need: Need,
    ) -> Result<Mandate, Refusal> {
        for attempt in 0..2 {
            match self.judge(group, epoch, need) {
                Judged::Granted(mandate) => return Ok(mandate),
                Judged::Refused(refusal) => return Err(refusal),
                Judged::Newer if attempt == 0 => {
                    if let Err(error) = self.link.refresh(REFRESH_TIMEOUT).await {
                        tracing::debug!(%error, "no newer map");
                    }
                }
                Judged::Newer => {}
            }
        }
        Err(Refusal::retry(format!(
            "group {group} is not known to be at epoch {epoch} yet"
        )))
    }

    fn read(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        incoming: &Incoming,
        responder: Responder,
    ) {
        let read: Read = match incoming.decode() {
            Ok(read) => read,
            Err(error) => return responder.fail(Status::BAD_REQUEST, error.to_string()),
        };
        let bytes = read.length as usize;
        let Some(permit) = self.admission.enter(connection.id(), bytes, false) else {
            return self.busy(responder);
        };
        let call = Call {
            payload: bytes::Bytes::new(),
            responder,
            permit,
            peer: None,
        };
        let target = read.target.clone().unwrap_or_default();
        let (group, epoch) = (GroupId(target.group), Epoch(target.epoch));
        match self.judge(group, epoch, Need::InSync) {
            Judged::Granted(mandate) => read::read(self, &read, call, mandate),
            Judged::Refused(refusal) => refusal.answer(call.responder),
            Judged::Newer => {
                let inner = Arc::clone(self);
                tokio::spawn(async move {
                    match inner.judge_fresh(group, epoch, Need::InSync).await {
                        Ok(mandate) => read::read(&inner, &read, call, mandate),
                        Err(refusal) => refusal.answer(call.responder),
                    }
                });
            }
        }
    }

    fn fence(self: &Arc<Self>, incoming: &Incoming, responder: Responder) {
        let fence: Fence = match incoming.decode() {
            Ok(fence) => fence,
            Err(error) => return responder.fail(Status::BAD_REQUEST, error.to_string()),
        };
        let inner = Arc::clone(self);
        tokio::spawn(async move {
            let session = SessionId(fence.session);
            inner.sessions.fence(session).await;
            let disks = inner.store.disks();
            let open = disks.flat_map(|disk| disk.open_chunks(Some(session)));
            let open = open.map(|(chunk, entry)| OpenChunk {
                chunk: chunk.0,
                group: entry.group.0,
                inode: entry.inode.0,
            });
            responder.ok(&FenceReply {
                open: open.collect(),
            });
        });
    }

    fn status(&self) -> StatusReply {
        let counts = self.counts.snapshot();
        let disks: Vec<_> = self.store.disks().map(|disk| disk.counters()).collect();
        StatusReply {
            reads: counts.reads,
            read_bytes: counts.read_bytes,
            writes: counts.writes,
            write_bytes: counts.write_bytes,
            flushes: counts.flushes,
            busy: counts.busy,
            repaired_blocks: counts.repaired_blocks,
            chunks: disks.iter().map(|disk| disk.chunks).sum(),
            log_bytes: disks.iter().map(|disk| disk.log_bytes).sum(),
        }
    }
}

/// Time to fetch a map for a request that knows of a newer one.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(1);
