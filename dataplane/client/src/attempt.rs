//! One attempt at a read: all copies in the order of preference, late ones overtaken.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt as _};
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
use crate::detour::{Detour, Place, detour};
use crate::late::{Patience, SILENT, Wait};
use crate::servers::{Candidate, Servers};

impl Inner {
    /// Tries all in-sync members, nearest first, in one attempt; a late one is overtaken.
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
        let mut absent = 0;
        let mut failed = false;
        let mut race = Race::new(&self.servers, request, list);
        while let Some((at, answer)) = race.answer().await {
            match answer {
                Ok(bytes) => {
                    if race.overtakes(at) {
                        self.counters.add(|report| report.hedge_wins += 1);
                    } else if failed {
                        self.counters.add(|report| report.failovers += 1);
                    }
                    self.count(map, group, &race.list, at, bytes.len() as u64, failed);
                    return Ok(bytes);
                }
                Err(TryFailed::Absent) => {
                    absent += 1;
                    failed = true;
                }
                Err(TryFailed::Other) => failed = true,
                // The list itself is old: a silent server on it is not waited for.
                Err(TryFailed::Stale) => return Err(Exhausted::Failed),
            }
        }
        let all_absent = !race.list.is_empty() && absent == race.list.len();
        Err(if all_absent {
            Exhausted::Absent
        } else {
            Exhausted::Failed
        })
    }

    /// Counts a read that the server at `at` of the list answered.
    fn count(
        &self,
        map: &ClusterView,
        group: GroupId,
        list: &[Candidate],
        at: usize,
        bytes: u64,
        failed: bool,
    ) {
        let Some(server) = list.get(at).and_then(|server| map.server(server.id)) else {
            return;
        };
        let locality = locality_of(&self.servers.standpoint(), server);
        self.counters.read(locality, server.chunkserver.id, bytes);
        let places: Vec<Place> = list.iter().map(|server| server.place).collect();
        let unread = self.servers.nearest_unread(map, group);
        let Some(why) = detour(&places, at, unread, failed) else {
            return;
        };
        self.counters.detour(why, bytes);
        if why == Detour::Quiet
            && let Some(quiet) = list.iter().min_by_key(|server| server.place.farness)
        {
            self.servers.strayed(quiet.id);
        }
    }
}

/// What a server said, by its place in the list.
type Answered = (usize, Result<Bytes, TryFailed>);

/// A question to the server at this place of the list.
struct Try {
    at: usize,
    answer: BoxFuture<'static, Result<Bytes, TryFailed>>,
}

impl Future for Try {
    type Output = Answered;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Answered> {
        let at = self.at;
        self.answer.as_mut().poll(context).map(|said| (at, said))
    }
}

/// The servers of one attempt, some of which have been asked.
struct Race<'a> {
    servers: &'a Arc<Servers>,
    request: &'a Read,
    list: Vec<Candidate>,
    /// Asked, and no answer yet.
    tries: FuturesUnordered<Try>,
    /// How many have been asked.
    asked: usize,
    /// The last of them has failed.
    failed: bool,
    /// How long the last of them has been.
    wait: Wait,
    /// The one that was late first, and how long it has been asked.
    late: Option<(usize, Wait)>,
    looked: Instant,
}

impl<'a> Race<'a> {
    fn new(servers: &'a Arc<Servers>, request: &'a Read, list: Vec<Candidate>) -> Self {
        Self {
            servers,
            request,
            list,
            tries: FuturesUnordered::new(),
            asked: 0,
            failed: false,
            wait: Wait::default(),
            late: None,
            looked: Instant::now(),
        }
    }

    /// The next answer. One more server is asked when nobody is, and whenever the last one is late
    /// or has failed.
    async fn answer(&mut self) -> Option<Answered> {
        loop {
            if self.tries.is_empty() || self.failed {
                self.ask_next();
            }
            if self.tries.is_empty() {
                return None;
            }
            let Some(patience) = self.patience() else {
                let answered = self.tries.next().await;
                return self.done(answered);
            };
            let Some(pause) = self.wait.next(patience) else {
                self.overtake();
                continue;
            };
            let answered = tokio::time::timeout(pause, self.tries.next()).await;
            self.look();
            if let Ok(answered) = answered {
                return self.done(answered);
            }
        }
    }

    fn done(&mut self, answered: Option<Answered>) -> Option<Answered> {
        if let Some((at, Err(_))) = &answered {
            // Who has failed is not late.
            self.late = self.late.filter(|(late, _)| late != at);
            self.failed |= at + 1 == self.asked;
        }
        answered
    }

    fn ask_next(&mut self) {
        self.look();
        let Some(next) = self.list.get(self.asked) else {
            return;
        };
        self.wait = Wait::begin(self.servers.heard(next));
        let asked = ask(Arc::clone(self.servers), next.clone(), self.request.clone());
        self.tries.push(Try {
            at: self.asked,
            answer: asked.boxed(),
        });
        self.asked += 1;
        self.failed = false;
    }

    /// Time has passed.
    fn look(&mut self) {
        let now = Instant::now();
        let passed = now - std::mem::replace(&mut self.looked, now);
        if let Some(newest) = self.list.get(self.asked.wrapping_sub(1)) {
            self.wait.pass(passed, self.servers.heard(newest));
        }
        if let Some((late, wait)) = &mut self.late
            && let Some(late) = self.list.get(*late)
        {
            wait.pass(passed, self.servers.heard(late));
        }
    }

    /// How late the server asked last may be; `None`: nobody else is asked before it answers.
    fn patience(&self) -> Option<Patience> {
        let newest = self.list.get(self.asked.checked_sub(1)?)?;
        let next = self.list.get(self.asked)?;
        // Who stands last is no help against a moment's delay.
        if self.late.is_some() || next.place.last.is_some() {
            return self.servers.patience_again();
        }
        self.servers.patience(newest.id, next.is_beyond(newest))
    }

    /// The server asked last is late: the next one is asked too, and the first answer wins.
    fn overtake(&mut self) {
        let newest = self.asked.wrapping_sub(1);
        if let (Some(slow), Some(next)) = (self.list.get(newest), self.list.get(self.asked)) {
            tracing::debug!(slow = %slow.id, next = %next.id, wait = ?self.wait, "a late read is hedged");
            self.servers.hedged(slow.id, next.is_beyond(slow));
            self.late.get_or_insert((newest, self.wait));
        }
        self.ask_next();
    }

    /// Whether the answer of the server at `at` has overtaken a late one, which is noted. A server
    /// from which nothing at all has come is asked last until something does. What it was asked stays
    /// asked for a while, unless it was but a moment late: its answer is the sign of life, of the
    /// server and of its disk.
    fn overtakes(&mut self, at: usize) -> bool {
        let Some((slow_at, wait)) = self.late.filter(|(late, _)| at > *late) else {
            return false;
        };
        let Some(slow) = self.list.get(slow_at).cloned() else {
            return false;
        };
        let heard = self.servers.heard(&slow);
        let silent = wait.is_silent(heard);
        if silent {
            self.servers.silent(slow.id);
        } else {
            self.servers.overtaken(&slow, wait.age());
        }
        // All others are cancelled: their answers would cross zones for nothing.
        let mut tries = std::mem::take(&mut self.tries).into_iter();
        if wait.age() >= SILENT
            && let Some(late) = tries.find(|asked| asked.at == slow_at)
        {
            tokio::spawn(linger(
                Arc::clone(self.servers),
                slow,
                late,
                silent.then_some(heard),
            ));
        }
        true
    }
}

/// Waits for the answer to a read that was overtaken, and decides about the server: `silent` is how
/// many bytes had come from it if it said nothing at all.
async fn linger(servers: Arc<Servers>, slow: Candidate, late: Try, silent: Option<u64>) {
    let answered = tokio::time::timeout(LINGER, late).await.is_ok();
    if let Some(heard) = silent {
        servers.settle(&slow, heard);
    }
    if !answered {
        tracing::debug!(slow = %slow.id, disk = slow.disk, "a late read is given up");
        if !servers.is_suspect(slow.id) {
            servers.hangs(&slow);
        }
    }
}

/// Asks one server.
async fn ask(servers: Arc<Servers>, server: Candidate, request: Read) -> Result<Bytes, TryFailed> {
    let begun = Instant::now();
    let _in_flight = servers.begin(server.id);
    let sent = servers
        .pool
        .call(
            &server.address,
            Kind::CHUNK_READ,
            &request,
            &[],
            TRY_TIMEOUT,
        )
        .await;
    check_read(&servers, &server, &request, begun, sent)
}

fn check_read(
    servers: &Arc<Servers>,
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
                servers.suspect(server.id, &server.address);
                return Err(TryFailed::Other);
            }
            servers.answered(server, begun.elapsed());
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
            servers.spilled(server.id);
            Err(TryFailed::Other)
        }
        Err(NetError::Refused {
            status: Status::RETRY,
            ..
        }) => {
            // It starts or stops: others may serve.
            servers.sinks(server.id);
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
            servers.suspect(server.id, &server.address);
            Err(TryFailed::Other)
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

/// Time one server has at most to answer a read.
const TRY_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that a read which was overtaken stays asked for; silence until then makes a suspect.
const LINGER: Duration = Duration::from_secs(1);
