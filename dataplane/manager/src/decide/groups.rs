//! Placement groups: made, mended and moved as servers and definitions change.

use hither_placement::{
    Candidate, Disk, DiskKey, Group as Planned, GroupKey, GroupRules, Member as Place, PlanServer,
    ServerKey, plan_groups, wanted_groups,
};
use hither_proto::ids::{ChunkserverId, DefinitionId, GroupId};
use hither_proto::map::{Group, Member, MemberState, ServerState as Shown};

use super::membership::is_in_sync;
use crate::state::{Definition, ServerState, State};

/// Data parts of an erasure-coded form that does not name them.
pub(super) const DEFAULT_DATA_PARTS: u8 = 8;

/// The state with groups as servers and definitions ask for: new ones are made, new members start
/// to fill, members that are not wanted leave once those that are hold everything.
#[must_use]
pub fn plan(state: &State) -> State {
    let mut next = state.clone();
    let servers = plan_servers(state);
    for (id, definition) in &state.definitions {
        plan_definition(&mut next, *id, definition, &servers);
    }
    next
}

/// Servers as the planner sees them.
pub(crate) fn plan_servers(state: &State) -> Vec<PlanServer> {
    state
        .servers
        .iter()
        .filter(|(_, server)| !server.gone)
        .map(|(id, server)| PlanServer {
            candidate: candidate(state, *id, server),
            disks: server
                .shown
                .disks
                .iter()
                .map(|disk| Disk {
                    key: DiskKey(u16::try_from(disk.index).unwrap_or(u16::MAX)),
                    total_bytes: disk.total_bytes,
                    usable: !disk.failed,
                    draining: false,
                })
                .collect(),
        })
        .collect()
}

fn candidate(state: &State, id: ChunkserverId, server: &ServerState) -> Candidate {
    let shown = &server.shown;
    let named = |text: &String| (!text.is_empty()).then(|| text.clone());
    let sum = |f: fn(&hither_proto::map::Disk) -> u64| shown.disks.iter().map(f).sum::<u64>();
    let view = state
        .servers
        .get(&id)
        .map(|s| s.shown.labels.join(","))
        .unwrap_or_default();
    let host = shown
        .addresses
        .first()
        .map_or("", |a| a.rsplit_once(':').map_or(a, |(h, _)| h));
    Candidate {
        zone: named(&shown.zone),
        region: named(&shown.region),
        host: named(&shown.node).unwrap_or_else(|| host.to_owned()),
        labels: view.parse().unwrap_or_default(),
        free_bytes: sum(|disk| disk.free_bytes),
        usable: shown.state != i32::from(Shown::Down),
        full: !shown.disks.is_empty() && shown.disks.iter().all(|disk| disk.full || disk.failed),
        maintenance: server.maintenance,
        draining: shown.draining,
        ..Candidate::new(ServerKey(id.0), sum(|disk| disk.total_bytes))
    }
}

fn plan_definition(
    state: &mut State,
    id: DefinitionId,
    definition: &Definition,
    servers: &[PlanServer],
) {
    if definition.definition.is_ec() {
        return;
    }
    let existing: Vec<Planned> = state
        .groups
        .values()
        .filter(|group| group.definition == id.0)
        .map(planned_of)
        .collect();
    let terms = definition.definition.terms(DEFAULT_DATA_PARTS).len();
    let up = servers
        .iter()
        .filter(|server| server.candidate.usable)
        .count();
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    // Groups are never given up, so no more are made than the servers of now ask for.
    let wanted = wanted_groups(count(up), count(terms)).max(count(existing.len()));
    let rules = GroupRules {
        definition: &definition.definition,
        mode: definition.mode,
        default_data_parts: DEFAULT_DATA_PARTS,
    };
    for group in plan_groups(rules, servers, &existing, wanted).groups {
        let places: Vec<Place> = group.members.iter().flatten().copied().collect();
        match group.key {
            Some(GroupKey(key)) => {
                let gone = |place: &Place| {
                    let server = state.servers.get(&ChunkserverId(place.server.0));
                    server.is_some_and(|server| server.gone)
                };
                let (gone, lost) = group.lost.iter().copied().partition(gone);
                if let Some(old) = state.groups.get_mut(&GroupId(key)) {
                    let change = Change {
                        wanted: &places,
                        removed: &group.removed,
                        lost,
                        gone,
                        whole: places.len() == terms,
                    };
                    mend(old, &change);
                }
            }
            None => {
                let key = state.next_group.max(1);
                state.next_group = key + 1;
                let group = new_group(key, id, definition, &places);
                state.groups.insert(GroupId(key), group);
            }
        }
    }
}

/// Members a group's definition asks for; 0 for a definition that has no groups of copies.
#[must_use]
pub fn members_wanted(state: &State, group: &Group) -> u32 {
    let definition = state.definitions.get(&DefinitionId(group.definition));
    let copies = definition.filter(|definition| !definition.definition.is_ec());
    copies.map_or(0, |of| {
        let terms = of.definition.terms(DEFAULT_DATA_PARTS).len();
        u32::try_from(terms).unwrap_or(u32::MAX)
    })
}

fn planned_of(group: &Group) -> Planned {
    Planned {
        key: GroupKey(group.id),
        members: group
            .members
            .iter()
            .map(|member| Some(place_of(member)))
            .collect(),
    }
}

fn place_of(member: &Member) -> Place {
    Place {
        server: ServerKey(member.server),
        disk: DiskKey(u16::try_from(member.disk).unwrap_or(u16::MAX)),
    }
}

fn member_at(place: &Place, state: MemberState) -> Member {
    Member {
        server: place.server.0,
        disk: u32::from(place.disk.0),
        state: state.into(),
    }
}

/// A group nobody has written to yet: all its members hold everything there is.
fn new_group(key: u32, id: DefinitionId, definition: &Definition, places: &[Place]) -> Group {
    Group {
        id: key,
        epoch: 1,
        members: places
            .iter()
            .map(|place| member_at(place, MemberState::InSync))
            .collect(),
        definition: id.0,
        min_write_copies: definition.min_write_copies,
    }
}

/// What is to become of the members of a group.
struct Change<'a> {
    wanted: &'a [Place],
    /// To leave once those that are wanted hold everything.
    removed: &'a [Place],
    /// On disks that failed, or of servers nobody knows any more.
    lost: Vec<Place>,
    /// Of servers that are down for long: they may come back.
    gone: Vec<Place>,
    /// Everything that is asked for is among what is wanted.
    whole: bool,
}

/// Brings new members in; lets those that are to leave go once all that stay are in-sync, and those
/// that are lost at once. The last in-sync member stays whatever became of it.
fn mend(group: &mut Group, change: &Change<'_>) {
    let Change {
        wanted, removed, ..
    } = change;
    let mut out = change.lost.clone();
    if change.whole {
        out.extend(&change.gone);
    }
    let serves = |member: &Member| is_in_sync(member.state) && !out.contains(&place_of(member));
    if !group.members.iter().any(serves) {
        out.clear();
    }
    let before = group.members.len();
    group
        .members
        .retain(|member| !out.contains(&place_of(member)));
    let mut changed = group.members.len() != before;
    for place in *wanted {
        // One member of a server is all that a group can tell apart.
        if !group
            .members
            .iter()
            .any(|member| member.server == place.server.0)
        {
            group.members.push(member_at(place, MemberState::Filling));
            changed = true;
        }
    }
    let staying_in_sync = wanted.iter().all(|place| {
        group
            .members
            .iter()
            .any(|m| place_of(m) == *place && is_in_sync(m.state))
    });
    if staying_in_sync && !wanted.is_empty() {
        let before = group.members.len();
        group
            .members
            .retain(|member| !removed.contains(&place_of(member)));
        changed |= group.members.len() != before;
    }
    if changed {
        group.epoch += 1;
    }
}

#[cfg(test)]
mod tests {
    use hither_labels::Mode;
    use hither_proto::map::{Chunkserver, Disk as ShownDisk};

    use super::*;

    fn with_servers(zones: &[&str], definition: &str) -> State {
        let mut state = State::default();
        for (at, zone) in zones.iter().enumerate() {
            let id = at as u64 + 1;
            state.servers.insert(
                ChunkserverId(id),
                ServerState {
                    shown: Chunkserver {
                        id,
                        zone: (*zone).to_owned(),
                        labels: vec![format!("zone={zone}")],
                        state: Shown::Up.into(),
                        disks: vec![ShownDisk {
                            total_bytes: 1 << 40,
                            free_bytes: 1 << 39,
                            ..ShownDisk::default()
                        }],
                        ..Chunkserver::default()
                    },
                    ..ServerState::default()
                },
            );
        }
        let definition = Definition {
            definition: definition.parse().unwrap(),
            mode: Mode::Std,
            min_write_copies: 1,
        };
        state.definitions.insert(DefinitionId(1), definition);
        state
    }

    fn zones_of(state: &State, group: &Group) -> Vec<String> {
        let mut zones: Vec<String> = group
            .members
            .iter()
            .map(|m| state.servers[&ChunkserverId(m.server)].shown.zone.clone())
            .collect();
        zones.sort();
        zones
    }

    #[test]
    fn every_group_has_a_copy_in_each_zone_and_planning_again_changes_nothing() {
        let state = with_servers(&["a", "a", "b", "b", "c", "c"], "zone=a,zone=b,zone=c");
        let state = plan(&state);
        assert_eq!(state.groups.len(), 128);
        for group in state.groups.values() {
            assert_eq!(zones_of(&state, group), vec!["a", "b", "c"]);
            assert!(group.members.iter().all(|m| is_in_sync(m.state)));
        }
        assert_eq!(plan(&state), state);
    }

    #[test]
    fn a_draining_server_serves_until_others_hold_everything_and_takes_nothing() {
        let mut state = plan(&with_servers(&["a", "a", "b", "b"], "zone=a,zone=b"));
        let on = |state: &State| {
            let has = |group: &&Group| group.members.iter().any(|m| m.server == 1);
            state.groups.values().filter(has).count()
        };
        let before = on(&state);
        assert!(before > 0);
        let drained = ChunkserverId(1);
        state = plan(&crate::decide::draining_changed(&state, drained, true).unwrap());
        assert_eq!(on(&state), before, "it serves on");
        for group in state.groups.values_mut() {
            for member in &mut group.members {
                member.state = MemberState::InSync.into();
            }
        }
        state = plan(&state);
        assert_eq!(on(&state), 0);
        for group in state.groups.values() {
            assert_eq!(zones_of(&state, group), vec!["a", "b"]);
        }
        assert_eq!(plan(&state), state);
        state = plan(&crate::decide::draining_changed(&state, drained, false).unwrap());
        assert!(!state.servers[&drained].shown.draining);
    }

    fn replaced(state: &State, was: u64) -> usize {
        let groups = state.groups.values();
        let gone = groups.filter(|group| group.members.iter().all(|m| m.server != was));
        gone.count()
    }

    #[test]
    fn a_failed_disk_leaves_its_groups_and_another_one_takes_its_place() {
        let mut state = with_servers(&["a", "b"], "zone=a,zone=b");
        let server = state.servers.get_mut(&ChunkserverId(1)).unwrap();
        let second = ShownDisk {
            index: 1,
            ..server.shown.disks[0]
        };
        server.shown.disks.push(second);
        let mut state = plan(&state);
        let on = |state: &State, disk: u32| {
            let members = state.groups.values().flat_map(|group| &group.members);
            members.filter(|m| m.server == 1 && m.disk == disk).count()
        };
        let all = state.groups.len();
        assert!(on(&state, 0) > 0 && on(&state, 0) + on(&state, 1) == all);
        // The last in-sync member of a group stays, whatever became of it.
        let first = *state.groups.keys().next().unwrap();
        let group = state.groups.get_mut(&first).unwrap();
        for member in &mut group.members {
            member.disk = 0;
            if member.server == 2 {
                member.state = MemberState::Lagging.into();
            }
        }
        state
            .servers
            .get_mut(&ChunkserverId(1))
            .unwrap()
            .shown
            .disks[0]
            .failed = true;
        let state = plan(&state);
        assert_eq!((on(&state, 0), on(&state, 1)), (1, all - 1));
        for (id, group) in &state.groups {
            let members: Vec<u64> = group.members.iter().map(|m| m.server).collect();
            assert_eq!(members.len(), 2, "{members:?}");
            let filling = group
                .members
                .iter()
                .any(|m| m.server == 1 && m.state == i32::from(MemberState::Filling));
            assert!(filling || *id == first || group.epoch == 1);
        }
        assert_eq!(plan(&state), state, "planning again changes nothing");
    }

    #[test]
    fn a_group_whose_disk_failed_and_that_nobody_takes_over_says_how_many_it_wants() {
        let mut state = plan(&with_servers(&["a", "b", "c"], "zone=a,zone=b,zone=c"));
        for id in [2, 3] {
            let server = state.servers.get_mut(&ChunkserverId(id)).unwrap();
            server.shown.disks[0].failed = true;
        }
        let state = plan(&state);
        for group in state.groups.values() {
            assert_eq!((group.members.len(), members_wanted(&state, group)), (1, 3));
        }
    }

    #[test]
    fn a_server_that_is_gone_is_replaced_where_others_can_take_its_place() {
        let mut state = plan(&with_servers(&["a", "a", "b"], "zone=a,zone=b"));
        for id in [1, 3] {
            state = super::super::server_lost(&state, ChunkserverId(id));
        }
        let down = plan(&state);
        assert_eq!(
            (replaced(&down, 1), replaced(&down, 3)),
            (replaced(&state, 1), 0)
        );
        for id in [1, 3] {
            state.servers.get_mut(&ChunkserverId(id)).unwrap().gone = true;
        }
        let state = plan(&state);
        let all = state.groups.len();
        // Nobody else is in zone b: what was there is waited for.
        assert_eq!(replaced(&state, 3), 0);
        let held_by_2 = state
            .groups
            .values()
            .filter(|g| g.members.iter().any(|m| m.server == 2));
        assert_eq!(held_by_2.count(), all);
    }

    #[test]
    fn a_relabelled_server_is_replaced_and_leaves_only_when_others_hold_everything() {
        let mut state = plan(&with_servers(&["a", "b", "a"], "zone=a,zone=b"));
        let holder = ChunkserverId(1);
        let of = |state: &State, id: ChunkserverId| super::super::groups_with(&state.groups, id);
        let held = of(&state, holder);
        assert!(!held.is_empty());
        state.servers.get_mut(&holder).unwrap().shown.labels = vec![];
        state = plan(&state);
        for group in &held {
            let group = &state.groups[group];
            assert!(group.members.iter().any(|m| m.server == 1), "still there");
            let filling = MemberState::Filling.into();
            assert!(
                group
                    .members
                    .iter()
                    .any(|m| m.server == 3 && m.state == filling)
            );
        }
        for group in state.groups.values_mut() {
            for member in &mut group.members {
                member.state = MemberState::InSync.into();
            }
        }
        state = plan(&state);
        assert!(of(&state, holder).is_empty());
    }
}
