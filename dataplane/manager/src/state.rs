//! Everything the manager decides about, how it is stored, and the map it makes.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use hither_clustermap::{ClusterView, snapshot_of};
use hither_labels::{Mode, StorageDefinition};
use hither_proto::ids::{BootId, ChunkserverId, ClassId, DefinitionId, GroupId, RankId};
use hither_proto::map::{Chunkserver, ClusterMap, Distance, Group, Rank, StorageClass, Subtree};
use hither_proto::stored::{ManagerState, ServerRecord, StoredDefinition};
use prost::Message;

/// A chunkserver as the manager knows it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ServerState {
    /// What clients see; labels are the effective ones.
    pub shown: Chunkserver,
    /// Labels as the server itself last said them.
    pub own_labels: Vec<String>,
    /// Changes made by hand, in the form `+A`, `-B`, `key=value`, `-key`; they win.
    pub manual_labels: Vec<String>,
    /// Repairs nothing for now.
    pub maintenance: bool,
    /// Down for so long that its copies are made elsewhere. Not stored: a new leader waits anew.
    pub gone: bool,
}

/// What groups are made for: a definition with its mode, shared by classes that say the same.
#[derive(Debug, Clone, PartialEq)]
pub struct Definition {
    /// The definition.
    pub definition: StorageDefinition,
    /// The mode that holds for it.
    pub mode: Mode,
    /// Smallest in-sync set that may acknowledge.
    pub min_write_copies: u32,
}

/// Everything the manager decides about.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct State {
    /// Random id of the installation.
    pub cluster_id: Vec<u8>,
    /// Version of the map: rises with every change.
    pub version: u64,
    /// Next chunkserver id.
    pub next_server: u64,
    /// Next definition id.
    pub next_definition: u32,
    /// Next class id.
    pub next_class: u32,
    /// Next group id.
    pub next_group: u32,
    /// Chunkservers.
    pub servers: BTreeMap<ChunkserverId, ServerState>,
    /// Definitions.
    pub definitions: BTreeMap<DefinitionId, Definition>,
    /// Storage classes.
    pub classes: BTreeMap<ClassId, StorageClass>,
    /// Placement groups.
    pub groups: BTreeMap<GroupId, Group>,
    /// Metadata ranks.
    pub ranks: BTreeMap<RankId, Rank>,
    /// Where authority changes.
    pub subtrees: Vec<Subtree>,
    /// Distances between zones.
    pub distances: Vec<Distance>,
    /// Addresses of the managers, leader first; not stored.
    pub managers: Vec<String>,
    /// Labels count only inside a client's own zone.
    pub locations: bool,
    /// Milliseconds a session lives without renewal.
    pub session_lease_ms: u32,
}

/// Keys with their new values; `None` deletes.
pub(crate) type Writes = Vec<(Bytes, Option<Bytes>)>;

/// Prefixes the manager owns in the store.
pub(crate) const PREFIXES: [&[u8]; 2] = [b"g/", b"m/"];
/// Key whose value names the leader's term: the precondition of every commit.
pub(crate) const TERM_KEY: &[u8] = b"m/term";
/// Key the leader renews.
pub(crate) const LEADER_KEY: &[u8] = b"m/leader";
/// Key of what is left when all lists are stored elsewhere, the version among it.
pub(crate) const STATE_KEY: &[u8] = b"m/state";

impl State {
    /// The map of this state.
    #[must_use]
    pub fn view(&self) -> ClusterView {
        ClusterView::from_snapshot(&self.map())
    }

    /// The map of this state as a message.
    #[must_use]
    pub fn map(&self) -> ClusterMap {
        ClusterMap {
            cluster_id: self.cluster_id.clone().into(),
            version: self.version,
            chunkservers: self.servers.values().map(|s| s.shown.clone()).collect(),
            ranks: self.ranks.values().cloned().collect(),
            subtrees: self.subtrees.clone(),
            groups: self.groups.values().cloned().collect(),
            classes: self.classes.values().cloned().collect(),
            distances: self.distances.clone(),
            managers: self.managers.clone(),
            locations: self.locations,
            session_lease_ms: self.session_lease_ms,
            ..ClusterMap::default()
        }
    }

    /// Boot id of a server as last seen.
    #[must_use]
    pub fn boot_of(&self, id: ChunkserverId) -> Option<BootId> {
        self.servers
            .get(&id)
            .map(|server| BootId(server.shown.boot_id))
    }

    /// What has to be written so that the store holds this state instead of `old`.
    pub(crate) fn writes_from(&self, old: &Self) -> Writes {
        let mut writes = Writes::new();
        diff(
            &mut writes,
            &old.servers,
            &self.servers,
            |id| key(b"m/s/", id.0),
            encode_server,
        );
        diff(
            &mut writes,
            &old.definitions,
            &self.definitions,
            |id| key(b"m/d/", u64::from(id.0)),
            encode_definition,
        );
        diff(
            &mut writes,
            &old.classes,
            &self.classes,
            |id| key(b"m/c/", u64::from(id.0)),
            Message::encode_to_vec,
        );
        diff(
            &mut writes,
            &old.groups,
            &self.groups,
            |id| key(b"g/", u64::from(id.0)),
            Message::encode_to_vec,
        );
        let (was, is) = (old.record(), self.record());
        if was != is {
            writes.push((
                Bytes::from_static(STATE_KEY),
                Some(is.encode_to_vec().into()),
            ));
        }
        writes
    }

    fn record(&self) -> ManagerState {
        ManagerState {
            cluster_id: self.cluster_id.clone().into(),
            version: self.version,
            next_server: self.next_server,
            next_definition: self.next_definition,
            next_class: self.next_class,
            next_group: self.next_group,
            locations: self.locations,
            session_lease_ms: self.session_lease_ms,
            distances: self
                .distances
                .iter()
                .map(|d| hither_proto::stored::StoredDistance {
                    zone_a: d.zone_a.clone(),
                    zone_b: d.zone_b.clone(),
                    distance: d.distance,
                })
                .collect(),
        }
    }

    /// The state the store's entries describe.
    ///
    /// # Errors
    /// The key that cannot be read, and why.
    pub(crate) fn restored(
        entries: impl IntoIterator<Item = (Bytes, Bytes)>,
    ) -> Result<Self, (Bytes, String)> {
        let mut state = Self::default();
        for (key, value) in entries {
            state.restore(&key, value).map_err(|reason| (key, reason))?;
        }
        Ok(state)
    }

    fn restore(&mut self, key: &Bytes, value: Bytes) -> Result<(), String> {
        let text = |e: prost::DecodeError| e.to_string();
        if key.starts_with(b"m/s/") {
            let record = ServerRecord::decode(value).map_err(text)?;
            let server = decode_server(record)?;
            self.servers.insert(ChunkserverId(server.shown.id), server);
        } else if key.starts_with(b"m/d/") {
            let id = DefinitionId(number(key)?);
            let stored = StoredDefinition::decode(value).map_err(text)?;
            self.definitions.insert(id, decode_definition(&stored)?);
        } else if key.starts_with(b"m/c/") {
            let class = StorageClass::decode(value).map_err(text)?;
            self.classes.insert(ClassId(class.id), class);
        } else if key.starts_with(b"g/") {
            let group = Group::decode(value).map_err(text)?;
            self.groups.insert(GroupId(group.id), group);
        } else if key[..] == *STATE_KEY {
            let record = ManagerState::decode(value).map_err(text)?;
            self.take_record(record);
        }
        Ok(())
    }

    fn take_record(&mut self, record: ManagerState) {
        self.cluster_id = record.cluster_id.to_vec();
        self.version = record.version;
        self.next_server = record.next_server;
        self.next_definition = record.next_definition;
        self.next_class = record.next_class;
        self.next_group = record.next_group;
        self.locations = record.locations;
        self.session_lease_ms = record.session_lease_ms;
        self.distances = record
            .distances
            .into_iter()
            .map(|d| Distance {
                zone_a: d.zone_a,
                zone_b: d.zone_b,
                distance: d.distance,
            })
            .collect();
    }

    /// Servers that hold a member of the group.
    #[must_use]
    pub fn members(&self, id: GroupId) -> BTreeSet<ChunkserverId> {
        let group = self.groups.get(&id);
        group
            .into_iter()
            .flat_map(|g| &g.members)
            .map(|m| ChunkserverId(m.server))
            .collect()
    }

    /// The whole map as a message for a new subscriber.
    #[must_use]
    pub fn snapshot(&self) -> ClusterMap {
        snapshot_of(&self.view())
    }
}

fn encode_server(server: &ServerState) -> Vec<u8> {
    ServerRecord {
        shown: server.shown.encode_to_vec().into(),
        own_labels: server.own_labels.clone(),
        manual_labels: server.manual_labels.clone(),
        maintenance: server.maintenance,
    }
    .encode_to_vec()
}

fn decode_server(record: ServerRecord) -> Result<ServerState, String> {
    Ok(ServerState {
        shown: Chunkserver::decode(record.shown).map_err(|e| e.to_string())?,
        own_labels: record.own_labels,
        manual_labels: record.manual_labels,
        maintenance: record.maintenance,
        gone: false,
    })
}

fn encode_definition(definition: &Definition) -> Vec<u8> {
    StoredDefinition {
        definition: definition.definition.to_string(),
        mode: definition.mode.as_str().to_owned(),
        min_write_copies: definition.min_write_copies,
    }
    .encode_to_vec()
}

fn decode_definition(stored: &StoredDefinition) -> Result<Definition, String> {
    Ok(Definition {
        definition: stored.definition.parse().map_err(|e| format!("{e}"))?,
        mode: mode_of(&stored.mode).ok_or_else(|| format!("mode {:?}", stored.mode))?,
        min_write_copies: stored.min_write_copies,
    })
}

/// Reads a mode's name; empty is std.
pub(crate) fn mode_of(text: &str) -> Option<Mode> {
    match text {
        "strict" => Some(Mode::Strict),
        "std" | "" => Some(Mode::Std),
        "loose" => Some(Mode::Loose),
        _ => None,
    }
}

fn diff<K: Ord, V: PartialEq>(
    writes: &mut Writes,
    old: &BTreeMap<K, V>,
    new: &BTreeMap<K, V>,
    key: impl Fn(&K) -> Bytes,
    encode: impl Fn(&V) -> Vec<u8>,
) {
    for (id, value) in new {
        if old.get(id) != Some(value) {
            writes.push((key(id), Some(encode(value).into())));
        }
    }
    for id in old.keys().filter(|id| !new.contains_key(id)) {
        writes.push((key(id), None));
    }
}

fn key(prefix: &[u8], number: u64) -> Bytes {
    [prefix, &number.to_be_bytes()].concat().into()
}

fn number(key: &[u8]) -> Result<u32, String> {
    let tail = key.last_chunk::<8>().ok_or("the key is too short")?;
    u32::try_from(u64::from_be_bytes(*tail)).map_err(|_| "the key's number is too large".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_restored() {
        let mut state = State {
            cluster_id: vec![1, 2],
            version: 7,
            ..State::default()
        };
        state.servers.insert(
            ChunkserverId(3),
            ServerState {
                shown: Chunkserver {
                    id: 3,
                    zone: "a".into(),
                    ..Chunkserver::default()
                },
                manual_labels: vec!["+A".into()],
                ..ServerState::default()
            },
        );
        state.definitions.insert(
            DefinitionId(1),
            Definition {
                definition: "zone=a,zone=b".parse().unwrap(),
                mode: Mode::Strict,
                min_write_copies: 1,
            },
        );
        state.classes.insert(
            ClassId(1),
            StorageClass {
                id: 1,
                ..StorageClass::default()
            },
        );
        state.groups.insert(
            GroupId(9),
            Group {
                id: 9,
                epoch: 4,
                ..Group::default()
            },
        );
        let all = state.writes_from(&State::default());
        let entries: Vec<_> = all.into_iter().map(|(k, v)| (k, v.unwrap())).collect();
        assert_eq!(State::restored(entries).unwrap(), state);
        assert!(state.writes_from(&state).is_empty());
        let mut less = state.clone();
        less.groups.clear();
        let gone = less.writes_from(&state);
        assert_eq!(gone, vec![(key(b"g/", 9), None)]);
    }
}
