//! Looking things up.

use std::collections::{BTreeMap, BTreeSet};

use hither_labels::LabelSet;
use hither_proto::ids::{ChunkserverId, ClassId, DefinitionId, Epoch, GroupId, MapVersion, RankId};
use hither_proto::map::{Chunkserver, Distance, Group, MemberState, Rank, StorageClass, Subtree};

/// A chunkserver with its labels read.
#[derive(Debug, Clone, PartialEq)]
pub struct Server {
    /// As the map says it.
    pub chunkserver: Chunkserver,
    /// Its labels; one that does not parse is left out.
    pub labels: LabelSet,
}

/// A cluster map, indexed.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ClusterView {
    pub(crate) cluster_id: Vec<u8>,
    pub(crate) version: MapVersion,
    pub(crate) servers: BTreeMap<ChunkserverId, Server>,
    pub(crate) groups: BTreeMap<GroupId, Group>,
    pub(crate) classes: BTreeMap<ClassId, StorageClass>,
    pub(crate) ranks: BTreeMap<RankId, Rank>,
    pub(crate) subtrees: Vec<Subtree>,
    pub(crate) distances: Vec<Distance>,
    pub(crate) managers: Vec<String>,
    pub(crate) locations: bool,
    pub(crate) session_lease_ms: u32,
}

impl ClusterView {
    /// Random id of the installation; empty before the first map.
    #[must_use]
    pub fn cluster_id(&self) -> &[u8] {
        &self.cluster_id
    }

    /// Version of the map; 0 before the first one.
    #[must_use]
    pub fn version(&self) -> MapVersion {
        self.version
    }

    /// A chunkserver.
    #[must_use]
    pub fn server(&self, id: ChunkserverId) -> Option<&Server> {
        self.servers.get(&id)
    }

    /// All chunkservers by id.
    pub fn servers(&self) -> impl Iterator<Item = (ChunkserverId, &Server)> {
        self.servers.iter().map(|(id, server)| (*id, server))
    }

    /// The address a chunkserver is reached at.
    #[must_use]
    pub fn address(&self, id: ChunkserverId) -> Option<&str> {
        self.servers
            .get(&id)?
            .chunkserver
            .addresses
            .first()
            .map(String::as_str)
    }

    /// A placement group.
    #[must_use]
    pub fn group(&self, id: GroupId) -> Option<&Group> {
        self.groups.get(&id)
    }

    /// All placement groups by id.
    pub fn groups(&self) -> impl Iterator<Item = (GroupId, &Group)> {
        self.groups.iter().map(|(id, group)| (*id, group))
    }

    /// Epoch of a group.
    #[must_use]
    pub fn epoch(&self, id: GroupId) -> Option<Epoch> {
        self.groups.get(&id).map(|group| Epoch(group.epoch))
    }

    /// Members of a group in this state, in the map's order.
    pub fn members_in(
        &self,
        id: GroupId,
        state: MemberState,
    ) -> impl Iterator<Item = ChunkserverId> {
        self.groups
            .get(&id)
            .into_iter()
            .flat_map(|group| &group.members)
            .filter(move |member| member.state == i32::from(state))
            .map(|member| ChunkserverId(member.server))
    }

    /// Members that have every acknowledged byte.
    pub fn in_sync(&self, id: GroupId) -> impl Iterator<Item = ChunkserverId> {
        self.members_in(id, MemberState::InSync)
    }

    /// A storage class.
    #[must_use]
    pub fn class(&self, id: ClassId) -> Option<&StorageClass> {
        self.classes.get(&id)
    }

    /// A storage class by name.
    #[must_use]
    pub fn class_named(&self, name: &str) -> Option<(ClassId, &StorageClass)> {
        self.classes().find(|(_, class)| class.name == name)
    }

    /// All storage classes by id.
    pub fn classes(&self) -> impl Iterator<Item = (ClassId, &StorageClass)> {
        self.classes.iter().map(|(id, class)| (*id, class))
    }

    /// Groups that satisfy a definition.
    pub fn groups_of(&self, definition: DefinitionId) -> impl Iterator<Item = (GroupId, &Group)> {
        self.groups()
            .filter(move |(_, group)| group.definition == definition.0)
    }

    /// A metadata rank.
    #[must_use]
    pub fn rank(&self, rank: RankId) -> Option<&Rank> {
        self.ranks.get(&rank)
    }

    /// All ranks.
    pub fn ranks(&self) -> impl Iterator<Item = (RankId, &Rank)> {
        self.ranks.iter().map(|(id, rank)| (*id, rank))
    }

    /// Where authority over directories changes.
    #[must_use]
    pub fn subtrees(&self) -> &[Subtree] {
        &self.subtrees
    }

    /// Distances between zones.
    #[must_use]
    pub fn distances(&self) -> &[Distance] {
        &self.distances
    }

    /// Distance between two zones: 0 the same, as set otherwise, 2 within a region that both
    /// servers and callers need not know, so [`FAR`](Self::FAR) when nothing was set.
    #[must_use]
    pub fn distance(&self, a: &str, b: &str) -> u32 {
        if a == b {
            return 0;
        }
        self.distances
            .iter()
            .find(|d| (d.zone_a == a && d.zone_b == b) || (d.zone_a == b && d.zone_b == a))
            .map_or(Self::FAR, |d| d.distance)
    }

    /// Distance of two zones about which nothing was set.
    pub const FAR: u32 = 100;

    /// Addresses of the managers, leader first.
    #[must_use]
    pub fn managers(&self) -> &[String] {
        &self.managers
    }

    /// Whether labels count only inside a client's own zone.
    #[must_use]
    pub fn locations(&self) -> bool {
        self.locations
    }

    /// Milliseconds a session lives without renewal.
    #[must_use]
    pub fn session_lease_ms(&self) -> u32 {
        self.session_lease_ms
    }

    /// Zones that have a chunkserver.
    #[must_use]
    pub fn zones(&self) -> BTreeSet<&str> {
        self.servers
            .values()
            .map(|server| server.chunkserver.zone.as_str())
            .collect()
    }
}
