//! What the core needs to know of placement, from the cluster map.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hither_clustermap::{ClusterView, takes_writes};
use hither_metastore::MetaStore;
use hither_proto::ids::{ChunkserverId, DefinitionId, Epoch, GroupId};
use hither_proto::map::{Group, ServerState};

use super::Shared;
use crate::core::{Event, GroupChoice};

/// Follows the map and tells the core what changed for it.
pub(crate) async fn follow<S: MetaStore>(shared: Arc<Shared<S>>) {
    let mut map = shared.map.clone();
    let mut last = GroupChoice::default();
    loop {
        let now = choice(&map.borrow_and_update());
        if now != last {
            last = now.clone();
            shared.send(Event::Groups(Box::new(now)));
        }
        if map.changed().await.is_err() {
            return;
        }
    }
}

/// Groups new chunks may go to, by class, and the space there is.
pub(crate) fn choice(map: &ClusterView) -> GroupChoice {
    let mut by_class = BTreeMap::new();
    let mut full = BTreeSet::new();
    for (id, class) in map.classes() {
        let definition = match class.create_definition {
            0 => class.keep_definition,
            other => other,
        };
        let sound: Vec<(GroupId, &Group)> = map
            .groups_of(DefinitionId(definition))
            .filter(|(_, group)| is_sound(map, group))
            .collect();
        let usable: Vec<GroupId> = sound
            .iter()
            .filter(|(_, group)| has_room(map, group))
            .map(|(id, _)| *id)
            .collect();
        if usable.is_empty() && !sound.is_empty() {
            full.insert(id.0);
        }
        by_class.insert(id.0, usable);
    }
    let default_class = map.classes().next().map_or(0, |(id, _)| id.0);
    let copies = map
        .groups()
        .map(|(_, group)| group.members.len())
        .max()
        .unwrap_or(1)
        .max(1);
    let disks = || {
        map.servers()
            .flat_map(|(_, server)| &server.chunkserver.disks)
    };
    let share = |bytes: u64| bytes / copies as u64;
    GroupChoice {
        by_class,
        full,
        epochs: map
            .groups()
            .map(|(id, group)| (id, Epoch(group.epoch)))
            .collect(),
        default_class,
        total_bytes: share(disks().map(|disk| disk.total_bytes).sum()),
        free_bytes: share(disks().map(|disk| disk.free_bytes).sum()),
    }
}

/// Whether a write to a group can be acknowledged.
fn is_sound(map: &ClusterView, group: &Group) -> bool {
    takes_writes(group, |id| {
        let server = map.server(id).map(|s| &s.chunkserver);
        server.is_some_and(|s| s.state != i32::from(ServerState::Down))
    })
}

/// Whether no member of a group is full or has failed.
fn has_room(map: &ClusterView, group: &Group) -> bool {
    let full = group.members.iter().any(|member| {
        map.server(ChunkserverId(member.server))
            .is_some_and(|server| {
                let disk = server
                    .chunkserver
                    .disks
                    .iter()
                    .find(|d| d.index == member.disk);
                disk.is_some_and(|disk| disk.full || disk.failed)
            })
    });
    !full
}
