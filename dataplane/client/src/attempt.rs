//! One attempt at a read: all copies in the order of preference, slow ones overtaken.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{FuturesUnordered, StreamExt as _};
use hither_clustermap::ClusterView;
use hither_net::NetError;
use hither_proto::checksum::pieces_match;
use hither_proto::chunk::{Read, ReadReply};
use hither_proto::ids::GroupId;
use hither_proto::kind::Kind;
use hither_proto::status::Status;
use tokio::time::Instant;

use crate::client::Inner;
use crate::counters::locality_of;
use crate::servers::Candidate;

impl Inner {
    /// Tries all in-sync members, nearest first, in one attempt; a slow one is overtaken.
    pub(crate) async fn read_any(
        &self,
        map: &Arc<ClusterView>,
        group: GroupId,
        request: &Read,
    ) -> Result<Bytes, Exhausted> {
        let mut list = self.servers.read_list(map, group);
        if !self.config.failure_memory {
            // The first of the list alone: when it fails, a new list is asked for.
            list.truncate(1);
        }
        let mut tries = FuturesUnordered::new();
        let mut left = list.iter();
        let mut started = 0;
        let mut absent = 0;
        let mut hedge_of = None;
        let mut failed = false;
        let begun = Instant::now();
        loop {
            if tries.is_empty() {
                let Some(next) = left.next() else { break };
                tries.push(self.read_from(map, next, request, started));
                started += 1;
            }
            let newest = list.get(started - 1);
            let patience =
                newest.and_then(|server| self.patience(server, left.as_slice().first(), hedge_of));
            let done = match patience {
                Some(patience) => tokio::time::timeout(patience, tries.next()).await.ok(),
                None => Some(tries.next().await),
            };
            let Some(done) = done else {
                // Slow: the next one is asked too, the first answer wins.
                let Some(next) = left.next() else { continue };
                if let Some(slow) = newest {
                    tracing::debug!(slow = %slow.id, next = %next.id, "a slow read is hedged");
                    self.servers.hedged(slow.id);
                    hedge_of = Some(started);
                }
                tries.push(self.read_from(map, next, request, started));
                started += 1;
                continue;
            };
            match done {
                Some((at, Ok(bytes))) => {
                    if hedge_of == Some(at) {
                        self.counters.add(|report| report.hedge_wins += 1);
                        self.overtaken(list.get(at.wrapping_sub(1)), begun);
                    } else if failed {
                        self.counters.add(|report| report.failovers += 1);
                    }
                    return Ok(bytes);
                }
                Some((_, Err(TryFailed::Absent))) => {
                    absent += 1;
                    failed = true;
                }
                Some((_, Err(TryFailed::Other))) => failed = true,
                // The list itself is old: a silent server on it is not waited for.
                Some((_, Err(TryFailed::Stale))) => return Err(Exhausted::Failed),
                None => {}
            }
        }
        let all_absent = !list.is_empty() && absent == list.len();
        Err(if all_absent {
            Exhausted::Absent
        } else {
            Exhausted::Failed
        })
    }

    /// Time a server has before the next one is asked as well; `None`: as long as it takes.
    ///
    /// A server that is as near is asked after the tracked 95th percentile. One that is farther
    /// costs money: it is asked only when the near one is far slower than it ever is.
    fn patience(
        &self,
        server: &Candidate,
        next: Option<&Candidate>,
        hedged: Option<usize>,
    ) -> Option<Duration> {
        let next = next.filter(|_| self.config.hedge)?;
        if hedged.is_some() {
            return Some(OVERTAKE);
        }
        let usual = self.servers.hedge_after(server.id).unwrap_or(OVERTAKE);
        let patience = if next.farness > server.farness {
            (usual * FAR_PATIENCE).max(FAR_PATIENCE_MIN)
        } else {
            usual
        };
        Some(patience.min(OVERTAKE))
    }

    /// A server lost a race. One that is far slower than it usually is loses its place for a
    /// while, so that not every read has to wait for it first.
    fn overtaken(&self, slow: Option<&Candidate>, begun: Instant) {
        if let Some(slow) = slow
            && begun.elapsed() >= FAR_PATIENCE_MIN
        {
            self.servers.spilled(slow.id);
        }
    }

    async fn read_from(
        &self,
        map: &ClusterView,
        server: &Candidate,
        request: &Read,
        at: usize,
    ) -> (usize, Result<Bytes, TryFailed>) {
        let begun = Instant::now();
        let _in_flight = self.servers.begin(server.id);
        // A read that is overtaken is dropped, and a server that says nothing must not stay first:
        // whoever drops this future before an answer has waited long enough to doubt the server.
        let doubt = Doubt {
            inner: self,
            server,
            begun,
            answered: false,
        };
        let sent = self
            .servers
            .pool
            .call(&server.address, Kind::CHUNK_READ, request, &[], TRY_TIMEOUT)
            .await;
        let result = self.check_read(map, server, request, begun, sent);
        doubt.end();
        (at, result)
    }

    fn check_read(
        &self,
        map: &ClusterView,
        server: &Candidate,
        request: &Read,
        begun: Instant,
        sent: Result<hither_net::Reply, NetError>,
    ) -> Result<Bytes, TryFailed> {
        match sent {
            Ok(reply) => {
                let sums = reply.decode::<ReadReply>().map_err(|_| TryFailed::Other)?;
                let bytes = reply.payload();
                if !pieces_match(request.offset, bytes, &sums.checksums)
                    || bytes.len() > request.length as usize
                {
                    tracing::warn!(id = %server.id, "bytes do not match their checksums");
                    self.servers.suspect(server.id, &server.address);
                    return Err(TryFailed::Other);
                }
                self.servers.answered(server.id, begun.elapsed());
                if let Some(known) = map.server(server.id) {
                    let locality = locality_of(&self.servers.standpoint(), known);
                    self.counters
                        .read(locality, server.id.0, bytes.len() as u64);
                }
                Ok(bytes.clone())
            }
            Err(NetError::Refused {
                status: Status::NO_SUCH_CHUNK,
                ..
            }) => Err(TryFailed::Absent),
            Err(NetError::Refused {
                status: Status::BUSY,
                ..
            }) => {
                self.servers.spilled(server.id);
                Err(TryFailed::Other)
            }
            Err(NetError::Refused {
                status: Status::RETRY,
                ..
            }) => {
                // It starts or stops: others may serve.
                self.servers.sinks(server.id);
                Err(TryFailed::Other)
            }
            Err(NetError::Refused {
                status: status @ (Status::STALE_EPOCH | Status::NOT_MINE),
                ..
            }) => {
                tracing::debug!(id = %server.id, %status, "a read was refused");
                Err(TryFailed::Stale)
            }
            Err(error) => {
                tracing::debug!(id = %server.id, %error, "a read failed");
                self.servers.suspect(server.id, &server.address);
                Err(TryFailed::Other)
            }
        }
    }
}

/// Why one server did not answer a read.
enum TryFailed {
    Absent,
    Other,
    /// The map the list was made from is not the server's.
    Stale,
}

/// Why no server of the list answered.
pub(crate) enum Exhausted {
    Absent,
    Failed,
}

/// A server that was still silent when another had answered, after long enough a time.
struct Doubt<'a> {
    inner: &'a Inner,
    server: &'a Candidate,
    begun: Instant,
    answered: bool,
}

impl Doubt<'_> {
    fn end(mut self) {
        self.answered = true;
    }
}

impl Drop for Doubt<'_> {
    fn drop(&mut self) {
        if !self.answered && self.begun.elapsed() >= DOUBT {
            self.inner
                .servers
                .suspect(self.server.id, &self.server.address);
        }
    }
}

/// Time one server has at most to answer a read.
const TRY_TIMEOUT: Duration = Duration::from_secs(10);
/// A server that has not answered for this long is overtaken whatever the hedging budget says.
const OVERTAKE: Duration = Duration::from_millis(300);
/// How much slower than usual a server has to be before a farther one is asked, and the least.
const FAR_PATIENCE: u32 = 4;
const FAR_PATIENCE_MIN: Duration = Duration::from_millis(100);
/// Silence after which a server is a suspect.
const DOUBT: Duration = Duration::from_millis(250);
