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
use crate::detour::{Detour, Place};
use crate::late::Patience;
use crate::memory::{FAR_AGE_MAX, Memory, OVERTAKE};

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
    /// Of its disks the one that has the group.
    pub(crate) disk: u32,
    pub(crate) place: Place,
    /// It is being filled: it stands behind all that are in-sync.
    pub(crate) filling: bool,
}

impl Candidate {
    /// Whether it is farther than another.
    pub(crate) fn is_beyond(&self, other: &Self) -> bool {
        self.place.farness > other.place.farness
    }
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
        let order = self.order(map, group, &received, true);
        self.candidates(map, group, &received, &order)
    }

    /// How far the nearest member is that lacks something.
    pub(crate) fn nearest_unread(&self, map: &ClusterView, group: GroupId) -> Option<(usize, u32)> {
        [MemberState::Filling, MemberState::Lagging]
            .into_iter()
            .flat_map(|state| map.members_in(group, state))
            .filter_map(|id| Some(self.candidate(map, group, id)?.place.farness))
            .min()
    }

    /// The chain: in-sync members in write order, then those that are filling; around links that
    /// failed a moment ago.
    pub(crate) fn chain(&self, map: &ClusterView, group: GroupId) -> Vec<Candidate> {
        let received = self.received(map, map.in_sync(group).collect());
        let order = self.order(map, group, &received, false);
        let mut chain = self.candidates(map, group, &received, &order);
        for id in map.members_in(group, MemberState::Filling) {
            chain.extend(self.candidate(map, group, id).map(|filling| Candidate {
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

    fn order(
        &self,
        map: &ClusterView,
        group: GroupId,
        ids: &[ChunkserverId],
        read: bool,
    ) -> Vec<usize> {
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
                let disk = read.then(|| disk_of(map, group, *id));
                ServerView {
                    labels: server.map_or(&none, |s| effective_labels(&s.labels, view)),
                    suspect: remembered.is_some_and(|memory| memory.last(now, disk).is_some()),
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
        group: GroupId,
        ids: &[ChunkserverId],
        order: &[usize],
    ) -> Vec<Candidate> {
        order
            .iter()
            .filter_map(|at| self.candidate(map, group, *ids.get(*at)?))
            .collect()
    }

    fn candidate(&self, map: &ClusterView, group: GroupId, id: ChunkserverId) -> Option<Candidate> {
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
            disk: disk_of(map, group, id),
            place: Place {
                farness: (rank, map.distance(&standpoint.zone, zone)),
                last: self.stands_last(map, group, id),
            },
            filling: false,
        })
    }

    /// Why a server is asked last for what is in a group, if it is.
    pub(crate) fn stands_last(
        &self,
        map: &ClusterView,
        group: GroupId,
        id: ChunkserverId,
    ) -> Option<Detour> {
        let disk = disk_of(map, group, id);
        let memory = self.memory.lock();
        memory.get(&id)?.last(Instant::now(), Some(disk))
    }

    pub(crate) fn is_suspect(&self, id: ChunkserverId) -> bool {
        self.memory.lock().get(&id).is_some_and(Memory::is_suspect)
    }

    pub(crate) fn in_flight(&self, id: ChunkserverId) -> u32 {
        self.memory
            .lock()
            .get(&id)
            .map_or(0, |memory| memory.in_flight)
    }

    /// Bytes that have come from a server over the connection to it.
    pub(crate) fn heard(&self, server: &Candidate) -> u64 {
        self.pool.bytes_heard(&server.address)
    }

    fn with<T>(&self, id: ChunkserverId, change: impl FnOnce(&mut Memory) -> T) -> T {
        change(self.memory.lock().entry(id).or_default())
    }

    /// A read was answered.
    pub(crate) fn answered(&self, server: &Candidate, took: Duration) {
        self.with(server.id, |memory| {
            memory.answered(server.disk, took, Instant::now());
        });
    }

    /// A read was answered by another server first.
    pub(crate) fn overtaken(&self, server: &Candidate, after: Duration) {
        self.with(server.id, |memory| {
            memory.overtaken(server.disk, after, Instant::now());
        });
    }

    /// How late a server may be with a read before one is asked too that is as near, or farther;
    /// `None`: as late as it likes.
    pub(crate) fn patience(&self, id: ChunkserverId, farther: bool) -> Option<Patience> {
        self.config
            .hedge
            .then(|| self.with(id, |memory| memory.patience(farther)))
    }

    /// The same for every further server, and for one that stands last.
    pub(crate) fn patience_again(&self) -> Option<Patience> {
        self.config.hedge.then_some(Patience {
            age: FAR_AGE_MAX,
            silence: OVERTAKE,
        })
    }

    /// Another server was asked too, since this one is late.
    pub(crate) fn hedged(&self, id: ChunkserverId, farther: bool) {
        self.with(id, |memory| memory.hedged(farther));
        self.counters.add(|report| report.hedges += 1);
    }

    /// A read went farther since the server is quiet.
    pub(crate) fn strayed(&self, id: ChunkserverId) {
        self.with(id, Memory::strayed);
    }

    /// The server cannot serve at the moment: it is asked last for a while.
    pub(crate) fn sinks(&self, id: ChunkserverId) {
        if self.config.failure_memory {
            self.with(id, |memory| memory.busy(Instant::now()));
        }
    }

    /// The server is overloaded: it loses its place for a while.
    pub(crate) fn spilled(&self, id: ChunkserverId) {
        if self.config.failure_memory {
            self.sinks(id);
            self.counters.add(|report| report.spills += 1);
        }
    }

    /// Another server has answered while this one said nothing: reads ask it last until it does,
    /// or until [`settle`](Self::settle).
    pub(crate) fn silent(&self, id: ChunkserverId) {
        self.with(id, |memory| memory.silent(Instant::now()));
    }

    /// Decides about a server that was silent when this many bytes had come from it: whether it is
    /// gone.
    pub(crate) fn settle(self: &Arc<Self>, server: &Candidate, heard: u64) {
        if !self.with(server.id, |memory| memory.is_quiet()) {
            return;
        }
        if self.heard(server) == heard {
            self.suspect(server.id, &server.address);
        } else {
            self.with(server.id, |memory| memory.speaks(Instant::now()));
        }
    }

    /// A read stays unanswered while other things may come from the server: what is on the same disk
    /// is asked of it last for a while.
    pub(crate) fn hangs(&self, server: &Candidate) {
        if self.config.failure_memory {
            self.with(server.id, |memory| {
                memory.hangs(server.disk, Instant::now());
            });
        }
    }

    /// The server failed: it sorts last until a probe succeeds.
    pub(crate) fn suspect(self: &Arc<Self>, id: ChunkserverId, address: &str) {
        if !self.config.failure_memory {
            return;
        }
        if self.with(id, Memory::fails) {
            tracing::warn!(%id, address, "chunkserver does not answer: it is asked last for now");
            self.counters.add(|report| report.suspicions += 1);
            tokio::spawn(probe(Arc::downgrade(self), id, address.to_owned()));
        }
    }
}

/// The disk of a member of a group.
fn disk_of(map: &ClusterView, group: GroupId, id: ChunkserverId) -> u32 {
    let members = map.group(group).into_iter().flat_map(|g| &g.members);
    members
        .filter(|member| member.server == id.0)
        .map(|member| member.disk)
        .next()
        .unwrap_or_default()
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

/// Asks a suspect now and then, until it answers or the mount is gone.
async fn probe(servers: std::sync::Weak<Servers>, id: ChunkserverId, address: String) {
    let mut pause = PROBE_FIRST;
    loop {
        let jitter = rand::rng().random_range(0.5..1.5);
        tokio::time::sleep(pause.mul_f64(jitter)).await;
        let Some(servers) = servers.upgrade() else {
            return;
        };
        if !servers.is_suspect(id) {
            return;
        }
        if servers.answers(&address).await {
            tracing::info!(%id, address, "chunkserver answers again");
            servers.with(id, |memory| memory.speaks(Instant::now()));
            return;
        }
        pause = (pause * 2).min(PROBE_LAST);
    }
}

/// Time for which a link that was found broken is gone round.
const BROKEN_FOR: Duration = Duration::from_secs(10);
/// Broken links remembered; beyond, the first in their order are forgotten, and found again.
const BROKEN_MAX: usize = 1024;
/// Time for which a chain does not begin at a server this mount did not reach.
const UNREACHED_FOR: Duration = Duration::from_secs(1);
/// First and longest pause between probes of a suspect.
const PROBE_FIRST: Duration = Duration::from_millis(200);
const PROBE_LAST: Duration = Duration::from_secs(3);
/// Time a probed server has to answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
