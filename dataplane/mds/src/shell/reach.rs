//! Asking chunkservers, and telling the manager which of them do not answer.
//!
//! That a member does not answer may be the fault of this rank's own connections. Before a group is
//! to go on without a member, the member has been silent for long, does not answer a ping either, and
//! others that were asked at the same time did answer.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::future::join_all;
use hither_clustermap::ClusterView;
use hither_metastore::MetaStore;
use hither_net::{NetError, Reply};
use hither_proto::common::Empty;
use hither_proto::ids::{ChunkserverId, Epoch, GroupId};
use hither_proto::kind::Kind;
use hither_proto::manager::ReportUnreachable;
use hither_proto::status::Status;
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Shared;

/// What a call is about, for the report when the member does not answer.
#[derive(Clone, Copy)]
pub(crate) struct About<'a> {
    pub(crate) map: &'a ClusterView,
    /// 0: all groups of the server.
    pub(crate) group: GroupId,
    pub(crate) epoch: Epoch,
}

/// A call that gave no OK.
#[derive(Debug, PartialEq)]
pub(crate) enum Outcome {
    /// The member has no such copy.
    NoSuchChunk,
    /// The member knows a later lease.
    Superseded,
    /// It answered that it cannot: later, with a newer map.
    Again,
    /// It has not answered.
    Silent,
    /// It was not asked: nobody knows where it is, or too much waits to be sent.
    Unasked,
}

/// Since when chunkservers have given this rank no answer of any kind. Bounded by the servers ever
/// in the map.
#[derive(Debug)]
pub(crate) struct Silences {
    of: Mutex<BTreeMap<ChunkserverId, Silence>>,
    patience: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Silence {
    first: Instant,
    last: Instant,
}

impl Silences {
    /// After `patience` a member is silent for long.
    pub(crate) fn new(patience: Duration) -> Self {
        Self {
            of: Mutex::default(),
            patience,
        }
    }

    fn answered(&self, server: ChunkserverId) {
        self.of.lock().remove(&server);
    }

    /// A call that was made at `begun` got no answer. A time in which nothing was asked does not
    /// count.
    fn silent(&self, server: ChunkserverId, begun: Instant, now: Instant) {
        let mut of = self.of.lock();
        let silence = of.entry(server).or_insert(Silence {
            first: now,
            last: now,
        });
        if begun > silence.last + UNASKED_MAX {
            silence.first = now;
        }
        silence.last = now;
    }

    pub(crate) fn is_long(&self, server: ChunkserverId) -> bool {
        let of = self.of.lock();
        let silence = of.get(&server);
        silence.is_some_and(|silence| silence.last - silence.first >= self.patience)
    }
}

impl Default for Silences {
    fn default() -> Self {
        Self::new(MEMBER_PATIENCE)
    }
}

impl<S: MetaStore> Shared<S> {
    /// Asks a chunkserver; reports one that does not answer.
    pub(crate) async fn ask(
        &self,
        about: About<'_>,
        member: ChunkserverId,
        kind: Kind,
        message: &impl Message,
        at_most: Duration,
    ) -> Result<Reply, Outcome> {
        let address = about.map.address(member).ok_or(Outcome::Unasked)?;
        let begun = Instant::now();
        let result = self.pool.call(address, kind, message, &[], at_most).await;
        let error = match result {
            Ok(reply) => {
                self.silences.answered(member);
                return Ok(reply);
            }
            Err(error) => error,
        };
        if error.is_silence() {
            tracing::debug!(%member, %kind, %error, "chunkserver does not answer");
            self.silences.silent(member, begun, Instant::now());
            self.report(about, member, false);
            return Err(Outcome::Silent);
        }
        let NetError::Refused { status, .. } = error else {
            tracing::debug!(%member, %kind, %error, "chunkserver call failed");
            return Err(Outcome::Unasked);
        };
        self.silences.answered(member);
        match status {
            Status::NO_SUCH_CHUNK => Err(Outcome::NoSuchChunk),
            Status::STALE_LEASE => Err(Outcome::Superseded),
            _ => {
                tracing::debug!(%member, %kind, %error, "chunkserver call refused");
                Err(Outcome::Again)
            }
        }
    }

    /// Asks members of a group that all have to answer; the results are in their order. The group is
    /// to go on without those that have been silent for long, if another one answers.
    pub(crate) async fn ask_all(
        &self,
        about: About<'_>,
        members: &[ChunkserverId],
        kind: Kind,
        message: &impl Message,
    ) -> Vec<Result<Reply, Outcome>> {
        let calls = members
            .iter()
            .map(|member| self.ask(about, *member, kind, message, CALL_TIMEOUT));
        let results = join_all(calls).await;
        let outcomes = members.iter().zip(&results);
        let (answered, silent): (Vec<_>, Vec<_>) =
            outcomes.partition(|(_, result)| has_answered(result));
        if !answered.is_empty() {
            let silent: Vec<ChunkserverId> =
                silent.into_iter().map(|(member, _)| *member).collect();
            for member in self.out_of_reach(about, &silent).await {
                self.report(about, member, true);
            }
        }
        results
    }

    /// Those of the members that have been silent for long and do not answer a ping.
    pub(crate) async fn out_of_reach(
        &self,
        about: About<'_>,
        members: &[ChunkserverId],
    ) -> Vec<ChunkserverId> {
        let long = |member: &ChunkserverId| self.silences.is_long(*member);
        let long: Vec<ChunkserverId> = members.iter().copied().filter(long).collect();
        let answering = self.answering(about, &long).await;
        let away = |member: &ChunkserverId| !answering.contains(member);
        long.into_iter().filter(away).collect()
    }

    /// Those of the servers that answer a ping.
    pub(crate) async fn answering(
        &self,
        about: About<'_>,
        servers: &[ChunkserverId],
    ) -> BTreeSet<ChunkserverId> {
        let pings = servers.iter().map(|server| self.answers(about, *server));
        let answers = join_all(pings).await;
        let answers = servers.iter().zip(answers);
        answers.filter(|(_, is)| *is).map(|(id, _)| *id).collect()
    }

    async fn answers(&self, about: About<'_>, server: ChunkserverId) -> bool {
        let Some(address) = about.map.address(server) else {
            return false;
        };
        for _ in 0..2 {
            let ping = self
                .pool
                .call(address, Kind::PING, &Empty {}, &[], PING_TIMEOUT);
            match ping.await {
                Err(error) if error.is_silence() => {}
                _ => {
                    self.silences.answered(server);
                    return true;
                }
            }
            // It may be the connection that is dead, and not the server.
            self.pool.drop_connection(address);
        }
        false
    }

    /// Tells the manager that a member does not answer; with `needs_all`, that the group had better
    /// go on without it.
    pub(crate) fn report(&self, about: About<'_>, member: ChunkserverId, needs_all: bool) {
        (self.unreachable)(ReportUnreachable {
            to: member.0,
            group: about.group.0,
            epoch: about.epoch.0,
            needs_all,
            ..ReportUnreachable::default()
        });
    }

    /// Waits for the next map, or a moment: what failed is then tried again.
    pub(crate) async fn pause(&self) {
        pause(&self.map).await;
    }
}

fn has_answered(result: &Result<Reply, Outcome>) -> bool {
    !matches!(result, Err(Outcome::Silent | Outcome::Unasked))
}

async fn pause<T>(map: &watch::Receiver<T>) {
    let mut map = map.clone();
    // A clone has seen what its original has, and that is never asked.
    map.mark_unchanged();
    let news = async {
        if map.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    // Out of time is as good as a new map: both end the pause.
    let _ = tokio::time::timeout(PAUSE, news).await;
}

/// After this long without an answer of a member the group goes on without it: the manager, which
/// reaches it, could wait for ever.
const MEMBER_PATIENCE: Duration = Duration::from_secs(15);
/// A server that was not asked for longer than this has not been silent.
const UNASKED_MAX: Duration = Duration::from_secs(5);
/// Time a chunkserver gets for one call.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time a chunkserver gets for a ping, on an open connection and on a new one.
const PING_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause before another attempt.
const PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const ONE: ChunkserverId = ChunkserverId(1);

    /// One lost connection late in a job took a healthy member out: the job was old, and not the
    /// silence.
    #[test]
    fn only_a_member_that_was_asked_and_silent_all_the_while_is_silent_for_long() {
        let silences = Silences::new(Duration::from_secs(15));
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        silences.silent(ONE, at(0), at(0));
        assert!(!silences.is_long(ONE));
        for end in 1..4 {
            silences.silent(ONE, at(5 * end - 5), at(5 * end));
        }
        assert!(silences.is_long(ONE));
        silences.answered(ONE);
        silences.silent(ONE, at(15), at(20));
        assert!(!silences.is_long(ONE));
        // Not asked for a minute.
        silences.silent(ONE, at(80), at(85));
        assert!(!silences.is_long(ONE));
        for end in 18..21 {
            silences.silent(ONE, at(5 * end - 5), at(5 * end));
        }
        assert!(silences.is_long(ONE));
    }

    /// It did not pause at all once the map had changed: whoever waited for a store or a server
    /// that was away spun.
    #[tokio::test]
    async fn a_pause_waits_for_news_and_not_for_what_is_known() {
        let (map, receiver) = watch::channel(1);
        map.send_replace(2);
        assert!(pause(&receiver).now_or_never().is_none());
        let mut waiting = Box::pin(pause(&receiver));
        assert!((&mut waiting).now_or_never().is_none());
        map.send_replace(3);
        assert!(waiting.now_or_never().is_some());
        drop(map);
        assert!(pause(&receiver).now_or_never().is_none());
    }
}
