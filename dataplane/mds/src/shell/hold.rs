//! Holding a rank where several processes share a store.
//!
//! The holder renews a record; a standby takes the rank when the record has stayed the same for a
//! lease's time on the standby's own clock. The holder counts from before it asked for a renewal,
//! so it stops answering before anybody else can begin.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hither_metastore::{Batch, Error, MetaStore};
use hither_proto::ids::RankId;
use hither_proto::stored::RankLease;
use prost::Message;
use tokio::time::Instant;

use super::RankError;
use super::claim::{self, Authority};
use super::pulse::Pulse;
use crate::keys;

/// Who wants a rank that others may hold.
#[derive(Debug, Clone)]
pub struct Holder {
    /// Random id of this run.
    pub boot_id: u64,
    /// Address for people who ask who holds the rank.
    pub address: String,
    /// Beats, while this process stands by, whenever the store has said who holds the rank.
    pub looks: Pulse,
}

/// Until when this process may answer for its rank.
#[derive(Debug, Clone)]
pub(crate) struct LeaseClock {
    started: Instant,
    /// Milliseconds since `started`; `u64::MAX`: nobody else can have the rank.
    until_ms: Arc<AtomicU64>,
}

impl Default for LeaseClock {
    fn default() -> Self {
        Self::endless()
    }
}

impl LeaseClock {
    /// For a store that no other process can open.
    pub(crate) fn endless() -> Self {
        Self {
            started: Instant::now(),
            until_ms: Arc::new(AtomicU64::new(u64::MAX)),
        }
    }

    fn since(asked: Instant) -> Self {
        let clock = Self {
            until_ms: Arc::default(),
            ..Self::endless()
        };
        clock.extend(asked);
        clock
    }

    /// A renewal that was asked for at that time has succeeded.
    fn extend(&self, asked: Instant) {
        let until = asked.saturating_duration_since(self.started) + RANK_LEASE - MARGIN;
        let until_ms = u64::try_from(until.as_millis()).unwrap_or(u64::MAX);
        self.until_ms.fetch_max(until_ms, Ordering::AcqRel);
    }

    /// Whether the rank is surely ours now.
    pub(crate) fn holds(&self) -> bool {
        let until_ms = self.until_ms.load(Ordering::Acquire);
        until_ms == u64::MAX || self.started.elapsed() < Duration::from_millis(until_ms)
    }
}

/// What a standby has seen of the holder.
#[derive(Debug, Default)]
struct Watched {
    same_since: Option<(Bytes, Duration)>,
}

impl Watched {
    /// Whether the rank may be taken from whoever wrote this record, by the process `boot_id`.
    fn look(&mut self, found: &Bytes, boot_id: u64, now: Duration) -> bool {
        let ours = RankLease::decode(found.clone()).is_ok_and(|lease| lease.boot_id == boot_id);
        if ours {
            // Of an attempt of our own whose outcome was not known.
            return true;
        }
        match &self.same_since {
            Some((known, since)) if known == found => *since + RANK_LEASE <= now,
            _ => {
                self.same_since = Some((found.clone(), now));
                false
            }
        }
    }

    /// The store did not answer (soon): the holder could not renew either.
    fn blind(&mut self) {
        self.same_since = None;
    }
}

/// A rank that was taken.
pub(crate) struct Taken {
    pub(crate) authority: Authority,
    pub(crate) clock: LeaseClock,
    pub(crate) lease: Lease,
}

/// The holder's side of the record.
pub(crate) struct Lease {
    key: Bytes,
    record: RankLease,
    value: Bytes,
}

/// Waits until the rank is vacant and takes it: one batch fences the predecessor and names us.
pub(crate) async fn take<S: MetaStore>(
    store: &S,
    rank: RankId,
    class: u32,
    holder: &Holder,
) -> Result<Taken, RankError> {
    loop {
        let vacant = wait_vacant(store, rank, holder).await;
        let lease = Lease::new(rank, holder);
        let mut batch = Batch::new();
        match vacant {
            Some(value) => batch.require_value(lease.key.clone(), value),
            None => batch.require_absent(lease.key.clone()),
        };
        batch.put(lease.key.clone(), lease.value.clone());
        let asked = Instant::now();
        match claim::raise_epochs(store, rank, class, batch).await {
            Ok(authority) => {
                return Ok(Taken {
                    authority,
                    clock: LeaseClock::since(asked),
                    lease,
                });
            }
            Err(RankError::Store(Error::PreconditionFailed { .. })) => {
                tracing::info!(%rank, "another standby was faster");
            }
            Err(RankError::Store(error @ (Error::Unknown { .. } | Error::Unavailable { .. }))) => {
                tracing::warn!(%rank, %error, "the rank could not be taken: trying again");
                tokio::time::sleep(LOOK).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Waits until nobody renews the rank; the record as it was left, if there is one.
async fn wait_vacant<S: MetaStore>(store: &S, rank: RankId, holder: &Holder) -> Option<Bytes> {
    let key = keys::rank_lease(rank);
    let started = Instant::now();
    let mut watched = Watched::default();
    let mut told = false;
    loop {
        let asked = Instant::now();
        match store.get(&key).await {
            Ok(None) => return None,
            Ok(Some(found)) if asked.elapsed() < SOON => {
                holder.looks.beat();
                if watched.look(&found.value, holder.boot_id, started.elapsed()) {
                    return Some(found.value);
                }
                if !std::mem::replace(&mut told, true) {
                    let held = RankLease::decode(found.value).unwrap_or_default();
                    tracing::info!(%rank, holder = held.address, "standing by");
                }
            }
            Ok(Some(_)) => watched.blind(),
            Err(error) => {
                tracing::debug!(%rank, %error, "the holder of the rank cannot be read");
                watched.blind();
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

impl Lease {
    fn new(rank: RankId, holder: &Holder) -> Self {
        let record = RankLease {
            boot_id: holder.boot_id,
            address: holder.address.clone(),
            beat: 0,
        };
        Self {
            key: keys::rank_lease(rank),
            value: record.encode_to_vec().into(),
            record,
        }
    }

    /// Renews until the rank is lost to another process.
    pub(crate) async fn keep<S: MetaStore>(mut self, store: Arc<S>, clock: LeaseClock) {
        let mut away = false;
        loop {
            tokio::time::sleep(if away { LOOK } else { RENEW }).await;
            let asked = Instant::now();
            match self.renew(&*store).await {
                Ok(true) => {
                    clock.extend(asked);
                    if std::mem::replace(&mut away, false) {
                        tracing::info!("the rank's lease is renewed again");
                    }
                }
                Ok(false) => return,
                Err(error) => {
                    if !std::mem::replace(&mut away, true) {
                        tracing::warn!(%error, "the rank's lease cannot be renewed: trying on");
                    }
                }
            }
        }
    }

    /// False: another process has the rank.
    async fn renew<S: MetaStore>(&mut self, store: &S) -> Result<bool, Error> {
        let next = RankLease {
            beat: self.record.beat + 1,
            ..self.record.clone()
        };
        let value = Bytes::from(next.encode_to_vec());
        let mut batch = Batch::new();
        batch
            .require_value(self.key.clone(), self.value.clone())
            .put(self.key.clone(), value.clone());
        match store.commit(batch).await {
            Ok(_) => {
                (self.record, self.value) = (next, value);
                Ok(true)
            }
            Err(Error::PreconditionFailed { .. }) => self.reread(store).await,
            Err(error) => Err(error),
        }
    }

    /// An earlier renewal may have come through although nobody said so.
    async fn reread<S: MetaStore>(&mut self, store: &S) -> Result<bool, Error> {
        let Some(found) = store.get(&self.key).await? else {
            return Ok(false);
        };
        let record = RankLease::decode(found.value.clone()).unwrap_or_default();
        if record.boot_id != self.record.boot_id {
            return Ok(false);
        }
        (self.record, self.value) = (record, found.value);
        Err(Error::Unavailable {
            cause: "a renewal has come late".into(),
        })
    }
}

/// Gives the rank up: a standby need not wait.
pub(crate) async fn release<S: MetaStore>(store: &S, rank: RankId, boot_id: u64) {
    let key = keys::rank_lease(rank);
    let released = async {
        let Some(found) = store.get(&key).await? else {
            return Ok(());
        };
        let record = RankLease::decode(found.value.clone()).unwrap_or_default();
        if record.boot_id != boot_id {
            return Ok(());
        }
        let mut batch = Batch::new();
        batch.require_value(key.clone(), found.value);
        batch.delete(key.clone());
        store.commit(batch).await.map(|_| ())
    };
    if let Err(error) = released.await {
        tracing::debug!(%rank, %error, "the rank could not be given up: it runs out");
    }
}

/// How long a rank stays with its holder after the last renewal.
const RANK_LEASE: Duration = Duration::from_secs(3);
/// How much earlier the holder stops answering: clocks do not run alike.
const MARGIN: Duration = Duration::from_millis(250);
/// How often the holder renews.
const RENEW: Duration = Duration::from_millis(750);
/// How often a standby looks.
const LOOK: Duration = Duration::from_millis(250);
/// A look that took longer says nothing about the holder.
const SOON: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    fn record(boot_id: u64, beat: u64) -> Bytes {
        let lease = RankLease {
            boot_id,
            beat,
            ..RankLease::default()
        };
        lease.encode_to_vec().into()
    }

    #[test]
    fn a_rank_is_taken_when_its_record_has_not_changed_for_the_lease() {
        let mut watched = Watched::default();
        let at = Duration::from_millis;
        assert!(!watched.look(&record(1, 1), 9, at(0)));
        assert!(!watched.look(&record(1, 1), 9, at(2900)));
        assert!(!watched.look(&record(1, 2), 9, at(3000)), "it was renewed");
        assert!(!watched.look(&record(1, 2), 9, at(5900)));
        assert!(watched.look(&record(1, 2), 9, at(6000)));
    }

    #[test]
    fn a_time_without_the_store_does_not_count_against_the_holder() {
        let mut watched = Watched::default();
        let at = Duration::from_millis;
        assert!(!watched.look(&record(1, 1), 9, at(0)));
        watched.blind();
        assert!(!watched.look(&record(1, 1), 9, at(9000)));
        assert!(watched.look(&record(1, 1), 9, at(12_000)));
    }

    #[test]
    fn what_an_attempt_of_our_own_left_is_taken_at_once() {
        assert!(Watched::default().look(&record(9, 0), 9, Duration::ZERO));
    }

    #[test]
    fn the_holder_stops_before_a_standby_can_begin() {
        let asked = Instant::now();
        let clock = LeaseClock::since(asked);
        assert!(clock.holds() && LeaseClock::endless().holds());
        let until = Duration::from_millis(clock.until_ms.load(Ordering::Relaxed));
        assert!(clock.started + until <= asked + RANK_LEASE);
    }
}
