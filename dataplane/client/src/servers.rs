//! Chunkservers as this mount sees them: order, suspects, latency, operations in flight.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hither_clustermap::ClusterView;
use hither_labels::{
    Answer, LabelSet, LocationView, ServerView, effective_labels, read_order, write_order,
};
use hither_net::{Identity, NoHandler, Pool};
use hither_proto::common::Empty;
use hither_proto::ids::{ChunkserverId, GroupId};
use hither_proto::kind::Kind;
use hither_proto::map::MemberState;
use parking_lot::Mutex;
use rand::RngExt as _;
use tokio::time::Instant;

use crate::chain::{Link, avoiding};
use crate::config::{ClientConfig, Standpoint};
use crate::counters::Counters;

/// What is remembered of one server.
#[derive(Debug, Default)]
struct Memory {
    in_flight: u32,
    suspect: Option<Suspect>,
    /// Overloaded: lost its place until then.
    spilled_until: Option<Instant>,
    latency: Latency,
    /// Reads and hedged reads of late, for the budget.
    reads: u32,
    hedges: u32,
}

#[derive(Debug)]
struct Suspect {
    failures: u32,
}

/// Tracked latency of reads: a high quantile that follows what it sees.
#[derive(Debug, Default)]
struct Latency {
    /// Estimate of the 95th percentile, nanoseconds; 0: nothing seen.
    p95_nanos: f64,
}

impl Latency {
    /// Moves the estimate up by 19 steps for a slower read and down by 1 for a faster one: it
    /// rests where one in twenty is slower.
    fn see(&mut self, nanos: f64) {
        if self.p95_nanos == 0.0 {
            self.p95_nanos = nanos * 2.0;
            return;
        }
        let step = self.p95_nanos * 0.01;
        if nanos > self.p95_nanos {
            self.p95_nanos += step * 19.0;
        } else {
            self.p95_nanos -= step;
        }
    }
}

/// All chunkservers of one mount.
pub(crate) struct Servers {
    pub(crate) pool: Pool,
    identity: Identity,
    /// Where the client stands and what it prefers.
    standpoint: Mutex<Arc<Standpoint>>,
    config: Arc<ClientConfig>,
    memory: Mutex<BTreeMap<ChunkserverId, Memory>>,
    /// Links found broken, and until when that is believed.
    broken: Mutex<BTreeMap<Link, Instant>>,
    counters: Arc<Counters>,
    /// Breaks ties of equally near servers; one number per mount.
    seed: u64,
}

/// A member of a group, in the order of use.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) id: ChunkserverId,
    pub(crate) address: String,
    /// Rank by preference, then distance: lower is nearer.
    pub(crate) farness: (usize, u32),
    /// It is being filled: it stands behind all that are in-sync.
    pub(crate) filling: bool,
}

/// One operation in flight on a server; counted until dropped.
pub(crate) struct InFlight<'a> {
    servers: &'a Servers,
    id: ChunkserverId,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        if let Some(memory) = self.servers.memory.lock().get_mut(&self.id) {
            memory.in_flight = memory.in_flight.saturating_sub(1);
        }
    }
}

impl Servers {
    pub(crate) fn new(
        config: Arc<ClientConfig>,
        identity: Identity,
        counters: Arc<Counters>,
    ) -> Arc<Self> {
        Arc::new(Self {
            pool: Pool::new(identity.clone(), Arc::new(NoHandler)),
            identity,
            standpoint: Mutex::new(Arc::new(config.standpoint.clone())),
            config,
            memory: Mutex::default(),
            broken: Mutex::default(),
            counters,
            seed: rand::rng().random(),
        })
    }

    /// Where the client stands and what it prefers now.
    pub(crate) fn standpoint(&self) -> Arc<Standpoint> {
        Arc::clone(&self.standpoint.lock())
    }

    /// From the next operation on servers are ranked from here.
    pub(crate) fn stand(&self, standpoint: Standpoint) {
        *self.standpoint.lock() = Arc::new(standpoint);
    }

    pub(crate) fn begin(&self, id: ChunkserverId) -> InFlight<'_> {
        self.memory.lock().entry(id).or_default().in_flight += 1;
        InFlight { servers: self, id }
    }

    /// In-sync members in the order this mount reads from them.
    pub(crate) fn read_list(&self, map: &ClusterView, group: GroupId) -> Vec<Candidate> {
        let received = self.received(map, map.in_sync(group).collect());
        let order = self.order(map, &received, true);
        self.candidates(map, &received, &order)
    }

    /// The chain: in-sync members in write order, then those that are filling; around links that
    /// failed a moment ago.
    pub(crate) fn chain(&self, map: &ClusterView, group: GroupId) -> Vec<Candidate> {
        let received = self.received(map, map.in_sync(group).collect());
        let order = self.order(map, &received, false);
        let mut chain = self.candidates(map, &received, &order);
        for id in map.members_in(group, MemberState::Filling) {
            chain.extend(self.candidate(map, id).map(|filling| Candidate {
                filling: true,
                ..filling
            }));
        }
        avoiding(chain, &self.broken_links())
    }

    /// A link did not work: chains go round it for a while.
    pub(crate) fn link_broken(&self, link: Link) {
        let mut broken = self.broken.lock();
        if broken.len() >= BROKEN_MAX {
            broken.pop_first();
        }
        // A server this mount did not reach is a suspect besides, and probed.
        let time = if link.0.0 == 0 {
            UNREACHED_FOR
        } else {
            BROKEN_FOR
        };
        broken.insert(link, Instant::now() + time);
    }

    /// Links that are believed to be broken.
    pub(crate) fn broken_links(&self) -> Vec<Link> {
        let now = Instant::now();
        let mut broken = self.broken.lock();
        broken.retain(|_, until| *until > now);
        broken.keys().copied().collect()
    }

    /// The list as a master would send it: own location first, then by distance, ties broken at
    /// random.
    fn received(&self, map: &ClusterView, mut ids: Vec<ChunkserverId>) -> Vec<ChunkserverId> {
        let standpoint = self.standpoint();
        let zone = standpoint.zone.as_str();
        ids.sort_by_cached_key(|id| {
            let theirs = map
                .server(*id)
                .map_or("", |server| server.chunkserver.zone.as_str());
            let distance = if zone.is_empty() {
                0
            } else {
                map.distance(zone, theirs)
            };
            let mixed = (id.0 ^ self.seed)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(31);
            (distance, mixed)
        });
        ids
    }

    fn order(&self, map: &ClusterView, ids: &[ChunkserverId], read: bool) -> Vec<usize> {
        let none = LabelSet::default();
        let standpoint = self.standpoint();
        let memory = self.memory.lock();
        let now = Instant::now();
        let views: Vec<ServerView<'_>> = ids
            .iter()
            .map(|id| {
                let server = map.server(*id);
                let own = server.is_some_and(|s| s.chunkserver.zone == standpoint.zone);
                let view = if map.locations() && !own {
                    LocationView::Other
                } else {
                    LocationView::Own
                };
                let remembered = memory.get(id);
                ServerView {
                    labels: server.map_or(&none, |s| effective_labels(&s.labels, view)),
                    suspect: remembered.is_some_and(|memory| memory.sinks(now)),
                    in_flight: remembered.map_or(0, |memory| memory.in_flight),
                }
            })
            .collect();
        if read {
            read_order(&standpoint.preferred, Answer::Copies, &views)
        } else {
            write_order(&standpoint.preferred, Answer::Copies, &views)
        }
    }

    fn candidates(
        &self,
        map: &ClusterView,
        ids: &[ChunkserverId],
        order: &[usize],
    ) -> Vec<Candidate> {
        order
            .iter()
            .filter_map(|at| self.candidate(map, *ids.get(*at)?))
            .collect()
    }

    fn candidate(&self, map: &ClusterView, id: ChunkserverId) -> Option<Candidate> {
        let server = map.server(id)?;
        let zone = server.chunkserver.zone.as_str();
        let standpoint = self.standpoint();
        let own = zone == standpoint.zone;
        let view = if map.locations() && !own {
            LocationView::Other
        } else {
            LocationView::Own
        };
        let labels = effective_labels(&server.labels, view);
        let rank = standpoint.preferred.rank(labels).index();
        Some(Candidate {
            id,
            address: map.address(id)?.to_owned(),
            farness: (rank, map.distance(&standpoint.zone, zone)),
            filling: false,
        })
    }

    pub(crate) fn is_suspect(&self, id: ChunkserverId) -> bool {
        self.memory
            .lock()
            .get(&id)
            .is_some_and(|memory| memory.suspect.is_some())
    }

    pub(crate) fn in_flight(&self, id: ChunkserverId) -> u32 {
        self.memory
            .lock()
            .get(&id)
            .map_or(0, |memory| memory.in_flight)
    }

    /// A read was answered.
    pub(crate) fn answered(&self, id: ChunkserverId, took: Duration) {
        let mut all = self.memory.lock();
        let memory = all.entry(id).or_default();
        memory.latency.see(took.as_secs_f64() * 1e9);
        memory.suspect = None;
        memory.reads += 1;
        if memory.reads >= BUDGET_WINDOW {
            memory.reads /= 2;
            memory.hedges /= 2;
        }
    }

    /// Time after which a read is also sent elsewhere; `None`: not now.
    pub(crate) fn hedge_after(&self, id: ChunkserverId) -> Option<Duration> {
        if !self.config.hedge {
            return None;
        }
        let memory = self.memory.lock();
        let known = memory.get(&id)?;
        let spent = f64::from(known.hedges) > f64::from(known.reads).max(HEDGE_FREE) * HEDGE_SHARE;
        if spent || known.latency.p95_nanos == 0.0 {
            return None;
        }
        Some(Duration::from_secs_f64(known.latency.p95_nanos / 1e9).max(HEDGE_MIN))
    }

    pub(crate) fn hedged(&self, id: ChunkserverId) {
        self.memory.lock().entry(id).or_default().hedges += 1;
        self.counters.add(|report| report.hedges += 1);
    }

    /// The server cannot serve at the moment: it is asked last for a while.
    pub(crate) fn sinks(&self, id: ChunkserverId) {
        if self.config.failure_memory {
            self.memory.lock().entry(id).or_default().spilled_until = Some(Instant::now() + SPILL);
        }
    }

    /// The server is overloaded: it loses its place for a while.
    pub(crate) fn spilled(&self, id: ChunkserverId) {
        if !self.config.failure_memory {
            return;
        }
        self.memory.lock().entry(id).or_default().spilled_until = Some(Instant::now() + SPILL);
        self.counters.add(|report| report.spills += 1);
    }

    /// The server failed: it sorts last until a probe succeeds.
    pub(crate) fn suspect(self: &Arc<Self>, id: ChunkserverId, address: &str) {
        if !self.config.failure_memory {
            return;
        }
        let first = {
            let mut memory = self.memory.lock();
            let memory = memory.entry(id).or_default();
            match &mut memory.suspect {
                Some(suspect) => {
                    suspect.failures += 1;
                    false
                }
                None => {
                    memory.suspect = Some(Suspect { failures: 1 });
                    true
                }
            }
        };
        if first {
            tracing::warn!(%id, address, "chunkserver does not answer: it is asked last for now");
            self.counters.add(|report| report.suspicions += 1);
            tokio::spawn(probe(Arc::downgrade(self), id, address.to_owned()));
        }
    }
}

impl Servers {
    /// Whether a server answers, over a connection of its own: what is under way on the others is
    /// not disturbed.
    async fn answers(&self, address: &str) -> bool {
        let connected =
            hither_net::connect(address, &self.identity, Arc::new(NoHandler), PROBE_TIMEOUT).await;
        let Ok(connection) = connected else {
            return false;
        };
        let pong = connection
            .call(Kind::PING, &Empty {}, &[], PROBE_TIMEOUT)
            .await;
        connection.close();
        pong.is_ok()
    }
}

impl Memory {
    fn sinks(&self, now: Instant) -> bool {
        self.suspect.is_some() || self.spilled_until.is_some_and(|until| until > now)
    }
}

/// Asks a suspect now and then, until it answers or the mount is gone.
async fn probe(servers: std::sync::Weak<Servers>, id: ChunkserverId, address: String) {
    let mut pause = PROBE_FIRST;
    loop {
        let jitter = rand::rng().random_range(0.5..1.5);
        tokio::time::sleep(pause.mul_f64(jitter)).await;
        let Some(servers) = servers.upgrade() else {
            return;
        };
        let suspected = servers
            .memory
            .lock()
            .get(&id)
            .is_some_and(|m| m.suspect.is_some());
        if !suspected {
            return;
        }
        if servers.answers(&address).await {
            tracing::info!(%id, address, "chunkserver answers again");
            if let Some(memory) = servers.memory.lock().get_mut(&id) {
                memory.suspect = None;
            }
            return;
        }
        pause = (pause * 2).min(PROBE_LAST);
    }
}

/// Reads after which the budget's counts are halved.
const BUDGET_WINDOW: u32 = 10_000;
/// Share of reads that may be hedged, and reads taken as done before the first.
const HEDGE_SHARE: f64 = 0.05;
const HEDGE_FREE: f64 = 100.0;
/// No read is hedged sooner.
const HEDGE_MIN: Duration = Duration::from_millis(2);
/// Time for which a link that was found broken is gone round.
const BROKEN_FOR: Duration = Duration::from_secs(10);
/// Broken links remembered; beyond, the first in their order are forgotten, and found again.
const BROKEN_MAX: usize = 1024;
/// Time an overloaded server loses its place for.
const SPILL: Duration = Duration::from_secs(1);
/// Time for which a chain does not begin at a server this mount did not reach.
const UNREACHED_FOR: Duration = Duration::from_secs(1);
/// First and longest pause between probes of a suspect.
const PROBE_FIRST: Duration = Duration::from_millis(200);
const PROBE_LAST: Duration = Duration::from_secs(10);
/// Time a probed server has to answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
