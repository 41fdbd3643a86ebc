//! Placement groups by health, from what a manager says of them.

use std::collections::BTreeSet;

use hither_proto::ids::ChunkserverId;
use hither_proto::manager::{ClusterStatus, GroupHealth};
use hither_proto::map::{Group, MemberState, ServerState, StorageClass};

/// How many groups are how well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GroupCounts {
    /// All of them.
    pub total: usize,
    /// All members that are asked for have every acknowledged byte.
    pub whole: usize,
    /// A member fetches what it lacks.
    pub filling: usize,
    /// A member is away, or there are fewer than are asked for.
    pub undergoal: usize,
    /// Not whole, and one member at most has everything.
    pub one_copy: usize,
}

/// Counts the groups.
#[must_use]
pub fn count_groups(status: &ClusterStatus) -> GroupCounts {
    let in_use = groups_in_use(status);
    let mut counts = GroupCounts::default();
    for group in &status.groups {
        let few = lacks_members(group);
        let moves = group.filling > 0 || group.lagging > 0;
        let lacks = few && in_use.contains(&group.group);
        counts.total += 1;
        counts.whole += usize::from(!moves && !lacks);
        counts.filling += usize::from(group.filling > 0);
        counts.undergoal += usize::from(group.lagging > 0 || few);
        counts.one_copy += usize::from((moves || few) && group.in_sync <= 1);
    }
    counts
}

/// Groups whose definition a class has: others keep what they hold, and nobody asks for more.
#[must_use]
pub fn groups_in_use(status: &ClusterStatus) -> BTreeSet<u32> {
    let Some(map) = &status.map else {
        return BTreeSet::new();
    };
    let asked_for = |group: &&Group| {
        let mut classes = map.classes.iter();
        classes.any(|class| {
            [class.keep_definition, class.create_definition].contains(&group.definition)
        })
    };
    let used = map.groups.iter().filter(asked_for);
    used.map(|group| group.id).collect()
}

/// Whether a group has fewer members than its definition asks for.
#[must_use]
pub fn lacks_members(group: &GroupHealth) -> bool {
    group.in_sync + group.filling + group.lagging < group.wanted
}

/// Whether enough of a group's members are there to acknowledge a write.
#[must_use]
pub fn takes_writes(group: &Group, is_up: impl Fn(ChunkserverId) -> bool) -> bool {
    let there = group.members.iter().filter(|member| {
        member.state == i32::from(MemberState::InSync) && is_up(ChunkserverId(member.server))
    });
    there.count() >= group.min_write_copies.max(1) as usize
}

/// Names of the classes under which nothing can be written at the moment: no placement group of
/// theirs has enough members.
#[must_use]
pub fn classes_without_writes(status: &ClusterStatus) -> Vec<String> {
    let Some(map) = &status.map else {
        return Vec::new();
    };
    let servers = map.chunkservers.iter();
    let up: BTreeSet<u64> = servers
        .filter(|server| server.state != i32::from(ServerState::Down))
        .map(|server| server.id)
        .collect();
    let writable: BTreeSet<u32> = map
        .groups
        .iter()
        .filter(|group| takes_writes(group, |id| up.contains(&id.0)))
        .map(|group| group.definition)
        .collect();
    let classes = map.classes.iter();
    let definition = |class: &StorageClass| match class.create_definition {
        0 => class.keep_definition,
        other => other,
    };
    classes
        .filter(|class| !writable.contains(&definition(class)))
        .map(|class| class.name.clone())
        .collect()
}

#[cfg(test)]
mod tests {
    use hither_proto::map::ClusterMap;

    use super::*;

    fn status(groups: &[(u32, u32, u32, u32)]) -> ClusterStatus {
        let health = |(at, group): (usize, &(u32, u32, u32, u32))| GroupHealth {
            group: u32::try_from(at).unwrap(),
            in_sync: group.0,
            filling: group.1,
            lagging: group.2,
            wanted: group.3,
        };
        let map = ClusterMap {
            classes: vec![StorageClass {
                keep_definition: 1,
                ..StorageClass::default()
            }],
            groups: (0..groups.len())
                .map(|at| Group {
                    id: u32::try_from(at).unwrap(),
                    definition: 1,
                    ..Group::default()
                })
                .collect(),
            ..ClusterMap::default()
        };
        ClusterStatus {
            map: Some(map),
            groups: groups.iter().enumerate().map(health).collect(),
            ..ClusterStatus::default()
        }
    }

    /// A class whose only servers are away takes no writes, and one is named for it.
    #[test]
    fn a_class_whose_servers_are_away_is_named() {
        use hither_proto::map::{Chunkserver, Member};

        let class = |name: &str, definition| StorageClass {
            name: name.into(),
            create_definition: definition,
            ..StorageClass::default()
        };
        let server = |id, state: ServerState| Chunkserver {
            id,
            state: state.into(),
            ..Chunkserver::default()
        };
        let group = |definition, servers: &[u64]| Group {
            definition,
            min_write_copies: 1,
            members: servers
                .iter()
                .map(|server| Member {
                    server: *server,
                    state: MemberState::InSync.into(),
                    ..Member::default()
                })
                .collect(),
            ..Group::default()
        };
        let map = ClusterMap {
            classes: vec![class("both", 1), class("away", 2), class("none", 3)],
            chunkservers: vec![server(1, ServerState::Up), server(2, ServerState::Down)],
            groups: vec![group(1, &[1, 2]), group(2, &[2])],
            ..ClusterMap::default()
        };
        let status = ClusterStatus {
            map: Some(map),
            ..ClusterStatus::default()
        };
        assert_eq!(classes_without_writes(&status), ["away", "none"]);
    }

    /// Members that were taken out altogether, because their disks are gone, are missed too.
    #[test]
    fn who_is_in_no_list_is_missed() {
        let counts = |groups: &[(u32, u32, u32, u32)]| {
            let GroupCounts {
                whole,
                undergoal,
                one_copy,
                ..
            } = count_groups(&status(groups));
            (whole, undergoal, one_copy)
        };
        assert_eq!(counts(&[(3, 0, 0, 3), (2, 0, 0, 0)]), (2, 0, 0));
        assert_eq!(counts(&[(2, 0, 0, 3)]), (0, 1, 0));
        assert_eq!(counts(&[(1, 0, 0, 3)]), (0, 1, 1));
        assert_eq!(counts(&[(1, 1, 0, 2)]), (0, 0, 1));
        let mut unused = status(&[(1, 0, 0, 2)]);
        unused.map.as_mut().unwrap().classes.clear();
        assert_eq!(count_groups(&unused).whole, 1);
    }
}
