//! Snapshots and deltas.

use std::collections::BTreeMap;

use hither_labels::{Label, LabelSet};
use hither_proto::ids::{ChunkserverId, ClassId, GroupId, MapVersion, RankId};
use hither_proto::map::{Chunkserver, ClusterMap};

use crate::view::{ClusterView, Server};

/// Why a message cannot be applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ApplyError {
    /// The delta starts at a version newer than the map: fetch a snapshot.
    #[error("a delta since version {since} does not fit a map of version {have}")]
    Gap {
        /// Version the delta starts from.
        since: u64,
        /// Version of the map.
        have: MapVersion,
    },
}

impl ClusterView {
    /// The map after a snapshot or delta. One that is not newer leaves it as it is.
    ///
    /// # Errors
    /// `Gap` when a delta does not reach back to this version.
    pub fn applied(&self, message: &ClusterMap) -> Result<Self, ApplyError> {
        if message.since == 0 {
            let same = message.cluster_id == self.cluster_id || self.cluster_id.is_empty();
            if same && message.version < self.version.0 {
                return Ok(self.clone());
            }
            return Ok(Self::from_snapshot(message));
        }
        if message.since > self.version.0 {
            return Err(ApplyError::Gap {
                since: message.since,
                have: self.version,
            });
        }
        let mut next = self.clone();
        if message.version > self.version.0 {
            next.take_delta(message);
        }
        Ok(next)
    }

    /// The map a snapshot describes.
    #[must_use]
    pub fn from_snapshot(message: &ClusterMap) -> Self {
        let mut view = Self {
            cluster_id: message.cluster_id.to_vec(),
            locations: message.locations,
            session_lease_ms: message.session_lease_ms,
            ..Self::default()
        };
        view.take_items(message);
        view.subtrees.clone_from(&message.subtrees);
        view.distances.clone_from(&message.distances);
        view.managers.clone_from(&message.managers);
        view.version = MapVersion(message.version);
        view
    }

    fn take_items(&mut self, message: &ClusterMap) {
        for server in &message.chunkservers {
            self.servers.insert(ChunkserverId(server.id), read(server));
        }
        for group in &message.groups {
            self.groups.insert(GroupId(group.id), group.clone());
        }
        for class in &message.classes {
            self.classes.insert(ClassId(class.id), class.clone());
        }
        for rank in &message.ranks {
            let id = RankId(u16::try_from(rank.rank).unwrap_or(u16::MAX));
            self.ranks.insert(id, rank.clone());
        }
    }

    fn take_delta(&mut self, delta: &ClusterMap) {
        for id in &delta.removed_chunkservers {
            self.servers.remove(&ChunkserverId(*id));
        }
        for id in &delta.removed_groups {
            self.groups.remove(&GroupId(*id));
        }
        for id in &delta.removed_classes {
            self.classes.remove(&ClassId(*id));
        }
        self.take_items(delta);
        if delta.replace_subtrees {
            self.subtrees.clone_from(&delta.subtrees);
        }
        if delta.replace_distances {
            self.distances.clone_from(&delta.distances);
        }
        if delta.replace_managers {
            self.managers.clone_from(&delta.managers);
        }
        self.locations = delta.locations;
        self.session_lease_ms = delta.session_lease_ms;
        self.version = MapVersion(delta.version);
    }
}

/// The whole map as a message.
#[must_use]
pub fn snapshot_of(view: &ClusterView) -> ClusterMap {
    ClusterMap {
        cluster_id: view.cluster_id.clone().into(),
        version: view.version.0,
        since: 0,
        chunkservers: view
            .servers
            .values()
            .map(|s| s.chunkserver.clone())
            .collect(),
        ranks: view.ranks.values().cloned().collect(),
        subtrees: view.subtrees.clone(),
        groups: view.groups.values().cloned().collect(),
        classes: view.classes.values().cloned().collect(),
        distances: view.distances.clone(),
        locations: view.locations,
        managers: view.managers.clone(),
        session_lease_ms: view.session_lease_ms,
        ..ClusterMap::default()
    }
}

/// What leads from `old` to `new`, as a message.
#[must_use]
pub fn delta_between(old: &ClusterView, new: &ClusterView) -> ClusterMap {
    ClusterMap {
        cluster_id: new.cluster_id.clone().into(),
        version: new.version.0,
        since: old.version.0,
        chunkservers: changed(&old.servers, &new.servers, |s| s.chunkserver.clone()),
        ranks: changed(&old.ranks, &new.ranks, Clone::clone),
        groups: changed(&old.groups, &new.groups, Clone::clone),
        classes: changed(&old.classes, &new.classes, Clone::clone),
        removed_chunkservers: removed(&old.servers, &new.servers).map(|id| id.0).collect(),
        removed_groups: removed(&old.groups, &new.groups).map(|id| id.0).collect(),
        removed_classes: removed(&old.classes, &new.classes).map(|id| id.0).collect(),
        replace_subtrees: old.subtrees != new.subtrees,
        subtrees: if old.subtrees == new.subtrees {
            vec![]
        } else {
            new.subtrees.clone()
        },
        replace_distances: old.distances != new.distances,
        distances: if old.distances == new.distances {
            vec![]
        } else {
            new.distances.clone()
        },
        replace_managers: old.managers != new.managers,
        managers: if old.managers == new.managers {
            vec![]
        } else {
            new.managers.clone()
        },
        locations: new.locations,
        session_lease_ms: new.session_lease_ms,
    }
}

fn changed<K: Ord, V: PartialEq, M>(
    old: &BTreeMap<K, V>,
    new: &BTreeMap<K, V>,
    message: impl Fn(&V) -> M,
) -> Vec<M> {
    new.iter()
        .filter(|(key, value)| old.get(key) != Some(value))
        .map(|(_, v)| message(v))
        .collect()
}

fn removed<'a, K: Ord, V>(
    old: &'a BTreeMap<K, V>,
    new: &'a BTreeMap<K, V>,
) -> impl Iterator<Item = &'a K> {
    old.keys().filter(|key| !new.contains_key(key))
}

fn read(server: &Chunkserver) -> Server {
    let mut labels = LabelSet::default();
    for text in &server.labels {
        if let Ok(label) = text.parse::<Label>() {
            // A set beyond its bound keeps what fits: the manager refuses such servers.
            let _ = labels.insert(label);
        }
    }
    Server {
        chunkserver: server.clone(),
        labels,
    }
}

#[cfg(test)]
mod tests {
    use hither_proto::map::{Distance, Group, StorageClass};
    use proptest::prelude::*;

    use super::*;

    fn view(version: u64, servers: &[(u64, u8)], groups: &[(u32, u64)], far: u32) -> ClusterView {
        ClusterView::from_snapshot(&ClusterMap {
            cluster_id: vec![1].into(),
            version,
            chunkservers: servers
                .iter()
                .map(|(id, state)| Chunkserver {
                    id: *id,
                    zone: format!("z{}", id % 3),
                    labels: vec!["A".into(), format!("zone=z{}", id % 3)],
                    state: i32::from(*state),
                    ..Chunkserver::default()
                })
                .collect(),
            groups: groups
                .iter()
                .map(|(id, epoch)| Group {
                    id: *id,
                    epoch: *epoch,
                    ..Group::default()
                })
                .collect(),
            classes: vec![StorageClass {
                id: far % 2,
                ..StorageClass::default()
            }],
            distances: vec![Distance {
                zone_a: "z0".into(),
                zone_b: "z1".into(),
                distance: far,
            }],
            ..ClusterMap::default()
        })
    }

    proptest! {
        #[test]
        fn a_delta_leads_from_old_to_new(
            old in prop::collection::btree_map(0u64..8, 0u8..3, 0..8),
            new in prop::collection::btree_map(0u64..8, 0u8..3, 0..8),
            old_groups in prop::collection::btree_map(0u32..8, 0u64..3, 0..8),
            new_groups in prop::collection::btree_map(0u32..8, 0u64..3, 0..8),
            far in (0u32..3, 0u32..3),
        ) {
            let list = |m: BTreeMap<u64, u8>| m.into_iter().collect::<Vec<_>>();
            let groups = |m: BTreeMap<u32, u64>| m.into_iter().collect::<Vec<_>>();
            let old = view(5, &list(old), &groups(old_groups), far.0);
            let new = view(6, &list(new), &groups(new_groups), far.1);
            let delta = delta_between(&old, &new);
            prop_assert_eq!(old.applied(&delta).unwrap(), new.clone());
            prop_assert_eq!(new.applied(&delta).unwrap(), new.clone(), "again changes nothing");
            prop_assert_eq!(ClusterView::from_snapshot(&snapshot_of(&new)), new);
        }
    }

    #[test]
    fn a_gap_is_refused_and_an_old_snapshot_ignored() {
        let view = view(5, &[(1, 1)], &[], 1);
        let delta = ClusterMap {
            version: 9,
            since: 7,
            ..ClusterMap::default()
        };
        assert_eq!(
            view.applied(&delta),
            Err(ApplyError::Gap {
                since: 7,
                have: MapVersion(5)
            })
        );
        let old = ClusterMap {
            cluster_id: vec![1].into(),
            version: 3,
            ..ClusterMap::default()
        };
        assert_eq!(view.applied(&old).unwrap(), view);
    }

    #[test]
    fn distances_are_symmetric_and_far_by_default() {
        let view = view(1, &[], &[], 7);
        assert_eq!(view.distance("z0", "z0"), 0);
        assert_eq!(view.distance("z1", "z0"), 7);
        assert_eq!(view.distance("z0", "z2"), ClusterView::FAR);
    }
}
