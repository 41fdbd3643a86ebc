use std::collections::BTreeSet;

use proptest::prelude::*;

use super::test_support::{counts, disk, existing, group, rules, server};
use super::*;
use crate::matcher::Cause;

fn definition(text: &str) -> StorageDefinition {
    text.parse().unwrap()
}

fn keys(group: &PlannedGroup) -> Vec<u64> {
    group
        .members
        .iter()
        .flatten()
        .map(|member| member.server.0)
        .collect()
}

#[test]
fn members_are_spread_evenly_and_mixed() {
    let definition = definition("3*");
    let servers: Vec<PlanServer> = (1..=12).map(|key| server(key, "", "", 10)).collect();
    let wanted = wanted_groups(12, 3);
    assert_eq!(wanted, 256);
    let plan = plan_groups(rules(&definition), &servers, &[], wanted);
    assert_eq!(plan.groups.len(), 256);
    let counts = counts(&existing(&plan));
    assert!(counts.values().all(|count| *count == 64), "{counts:?}");
    // A lost server is rebuilt from all the others.
    for server in 1..=12 {
        let with: Vec<&PlannedGroup> = plan
            .groups
            .iter()
            .filter(|group| keys(group).contains(&server))
            .collect();
        let partners: BTreeSet<u64> = with.iter().flat_map(|group| keys(group)).collect();
        assert_eq!(partners.len(), 12, "partners of {server}: {partners:?}");
    }
    assert_eq!(plan_groups(rules(&definition), &servers, &[], wanted), plan);
}

#[test]
fn larger_servers_and_disks_take_more() {
    let definition = definition("2*");
    let mut servers: Vec<PlanServer> = (1..=4).map(|key| server(key, "", "", 100)).collect();
    servers[0] = server(1, "", "", 200);
    servers[0].disks = vec![disk(0, 150), disk(1, 50)];
    let plan = plan_groups(rules(&definition), &servers, &[], 200);
    let groups = existing(&plan);
    let counts = counts(&groups);
    assert_eq!(counts[&ServerKey(1)], 160);
    assert_eq!(counts[&ServerKey(2)], 80);
    let on_small = groups
        .iter()
        .flat_map(|group| group.members.iter().flatten());
    let on_small = on_small
        .filter(|m| m.server == ServerKey(1) && m.disk == DiskKey(1))
        .count();
    assert_eq!(on_small, 40);
}

#[test]
fn groups_satisfy_labels_and_zones() {
    let definition = definition("S,H,H/[ZONE]");
    let zones = ["a", "b", "c"];
    let servers: Vec<PlanServer> = (0..12_u64)
        .map(|key| {
            let zone = zones[usize::try_from(key % 3).unwrap()];
            server(key, zone, if key < 6 { "S" } else { "H" }, 10)
        })
        .collect();
    let plan = plan_groups(rules(&definition), &servers, &[], 100);
    assert_eq!(plan.unmet, None);
    for group in &plan.groups {
        let keys = keys(group);
        let zones: BTreeSet<u64> = keys.iter().map(|key| key % 3).collect();
        assert_eq!(zones.len(), 3);
        assert!(keys[0] < 6 && keys[1] >= 6 && keys[2] >= 6);
    }
}

#[test]
fn a_lost_server_changes_only_its_groups_and_only_its_places() {
    let definition = definition("3*");
    let mut servers: Vec<PlanServer> = (1..=8).map(|key| server(key, "", "", 10)).collect();
    let groups = existing(&plan_groups(rules(&definition), &servers, &[], 100));
    servers.remove(0);
    let plan = plan_groups(rules(&definition), &servers, &groups, 100);
    for (old, new) in groups.iter().zip(&plan.groups) {
        let lost = old
            .members
            .iter()
            .flatten()
            .filter(|m| m.server == ServerKey(1))
            .count();
        assert_eq!(
            (new.lost.len(), new.added.len(), new.removed.len()),
            (lost, lost, 0)
        );
        assert_eq!(new.members.iter().flatten().count(), 3);
    }
    let counts = counts(&existing(&plan));
    assert!(
        counts.values().all(|count| (42..=44).contains(count)),
        "{counts:?}"
    );
}

#[test]
fn a_server_that_joins_gets_the_new_groups_and_moves_nothing() {
    let definition = definition("2*");
    let mut servers: Vec<PlanServer> = (1..=4).map(|key| server(key, "", "", 10)).collect();
    let groups = existing(&plan_groups(rules(&definition), &servers, &[], 128));
    servers.push(server(5, "", "", 10));
    let plan = plan_groups(rules(&definition), &servers, &groups, 160);
    assert!(plan.groups[..128].iter().all(|group| !group.is_changed()));
    assert!(
        plan.groups[128..]
            .iter()
            .all(|group| keys(group).contains(&5))
    );
}

#[test]
fn a_lost_disk_leaves_the_server_in_the_groups_of_its_others() {
    let definition = definition("2*");
    let mut servers: Vec<PlanServer> = (1..=4)
        .map(|key| PlanServer {
            disks: vec![disk(0, 5), disk(1, 5)],
            ..server(key, "", "", 10)
        })
        .collect();
    let groups = existing(&plan_groups(rules(&definition), &servers, &[], 64));
    servers[0].disks[1].usable = false;
    let plan = plan_groups(rules(&definition), &servers, &groups, 64);
    let gone = Member {
        server: ServerKey(1),
        disk: DiskKey(1),
    };
    for (old, new) in groups.iter().zip(&plan.groups) {
        let was_hit = old.members.contains(&Some(gone));
        assert_eq!(new.is_changed(), was_hit);
        assert!(!new.members.contains(&Some(gone)));
    }
}

#[test]
fn strict_and_coded_groups_are_made_whole_or_not_at_all() {
    let servers: Vec<PlanServer> = (1..=2).map(|key| server(key, "", "A", 10)).collect();
    let strict = GroupRules {
        mode: Mode::Strict,
        ..rules(&definition("3A"))
    }
    .plan(&servers);
    assert_eq!(strict.groups, []);
    assert_eq!(
        strict.unmet.unwrap()[2],
        TermOutcome::Unsatisfied(Cause::Taken)
    );
    let coded = rules(&definition("@2+1")).plan(&servers);
    assert!(coded.groups.is_empty() && coded.unmet.is_some());
    // Copies are better than nothing.
    let copies = rules(&definition("3A")).plan(&servers);
    assert_eq!(copies.groups.len(), 4);
    assert!(copies.groups.iter().all(|group| keys(group).len() == 2));
    assert_eq!(rules(&definition("A")).plan(&[]).groups, []);
}

impl GroupRules<'_> {
    fn plan(self, servers: &[PlanServer]) -> GroupPlan {
        plan_groups(self, servers, &[], 4)
    }
}

#[test]
fn a_member_on_the_wrong_server_moves_when_a_right_one_is_there() {
    let definition = definition("A,B");
    let servers = [
        server(1, "", "A", 10),
        server(2, "", "A", 10),
        server(3, "", "B", 10),
    ];
    let plan = plan_groups(rules(&definition), &servers, &[group(0, &[1, 2])], 0);
    let planned = &plan.groups[0];
    assert_eq!(keys(planned), [1, 3]);
    assert_eq!(planned.removed[0].server, ServerKey(2));
    // Nowhere to go: it stays, and is said to have spilled.
    let plan = plan_groups(rules(&definition), &servers[..2], &[group(0, &[1, 2])], 0);
    assert!(!plan.groups[0].is_changed());
    assert_eq!(
        plan.groups[0].outcomes[1],
        TermOutcome::Spilled(Cause::NoServer)
    );
}

#[test]
fn copies_too_close_together_stay_until_there_is_room() {
    let definition = definition("3*/[ZONE]");
    let servers = [
        server(1, "a", "", 10),
        server(2, "a", "", 10),
        server(3, "b", "", 10),
    ];
    let plan = plan_groups(rules(&definition), &servers, &[group(0, &[1, 2, 3])], 0);
    assert!(!plan.groups[0].is_changed());
    let with_third: Vec<PlanServer> = servers
        .into_iter()
        .chain([server(4, "c", "", 10)])
        .collect();
    let plan = plan_groups(rules(&definition), &with_third, &[group(0, &[1, 2, 3])], 0);
    assert_eq!(plan.groups[0].added[0].server, ServerKey(4));
    assert_eq!(plan.groups[0].removed.len(), 1);
}

fn cluster() -> impl Strategy<Value = Vec<PlanServer>> {
    let one = (
        0_usize..3,
        prop::sample::select(&["", "A", "B", "A,B"][..]),
        1_u64..4,
    );
    prop::collection::vec(one, 1..9).prop_map(|servers| {
        let zones = ["a", "b", "c"];
        let numbered = servers.into_iter().zip(1..);
        numbered
            .map(|((zone, labels, size), key)| server(key, zones[zone], labels, size))
            .collect()
    })
}

proptest! {
    #[test]
    fn plans_are_steady_and_keep_what_serves(
        servers in cluster(),
        text in prop::sample::select(&["2*", "A,B", "A,*/[ZONE]", "3*/[ZONE]", "A,A,B:l", "@2+1"][..]),
        lost in 0_usize..9,
    ) {
        let definition = definition(text);
        let rules = rules(&definition);
        let plan = plan_groups(rules, &servers, &[], 20);
        let groups = existing(&plan);
        // The same servers again: nothing changes.
        let again = plan_groups(rules, &servers, &groups, 20);
        for group in &again.groups {
            prop_assert!(!group.is_changed(), "{:?}", group);
        }
        // One server fewer: whoever served and satisfies a term still does.
        let mut fewer = servers.clone();
        let lost = fewer.remove(lost % servers.len()).candidate.key;
        let mended = plan_groups(rules, &fewer, &groups, 20);
        for (old, new) in groups.iter().zip(&mended.groups) {
            prop_assert!(new.removed.len() <= new.added.len());
            let members: Vec<Member> = new.members.iter().flatten().copied().collect();
            let servers: BTreeSet<ServerKey> = members.iter().map(|m| m.server).collect();
            prop_assert_eq!(servers.len(), members.len());
            prop_assert!(!servers.contains(&lost));
            if old.members.iter().flatten().all(|member| member.server != lost) {
                prop_assert!(!new.is_changed());
            }
        }
    }
}
