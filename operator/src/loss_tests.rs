//! What is missing, what is taken for it, and what may be taken away: nothing is lost by it.

use hither_proto::map::{Chunkserver, MemberState, ServerState};

use crate::conditions::Said;
use crate::decisions_tests::{members, pod, seen, server, stateful_set, wanted};
use crate::desired::Disruption;
use crate::seen::Seen;
use crate::{rollout, scale, status};

#[test]
fn a_server_whose_pod_is_not_there_is_emptied_before_its_set_gets_smaller() {
    let mut seen = seen(&["a", "a", "b"]);
    seen.pods.remove(1);
    let goal = wanted(&[("a", 1), ("b", 1)]);
    let plan = scale::plan(&seen, &goal);
    assert_eq!(plan.replicas["demo-ssd-a"], 2);
    assert_eq!(plan.drain, [(2, true)]);
    assert_eq!(plan.progress["ssd"][0].pod, "demo-ssd-a-1");
    assert_eq!(plan.progress["ssd"][0].groups_left, 1);
    server(&mut seen, 2).draining = true;
    server(&mut seen, 2).state = ServerState::Down.into();
    assert_eq!(scale::plan(&seen, &goal).replicas["demo-ssd-a"], 2);
    members(&mut seen).retain(|member| member.server != 2);
    assert_eq!(scale::plan(&seen, &goal).replicas["demo-ssd-a"], 1);
}

#[test]
fn a_pod_that_has_another_address_now_is_still_its_server() {
    let mut seen = seen(&["a", "a"]);
    seen.pods[1] = pod("demo-ssd-a", 1, "10.0.0.9", "old");
    let status = seen.pods[1].status.as_mut().unwrap();
    status.conditions.as_mut().unwrap()[0].status = "False".into();
    let plan = scale::plan(&seen, &wanted(&[("a", 1)]));
    assert_eq!(plan.replicas["demo-ssd-a"], 2);
    assert_eq!(plan.drain, [(2, true)]);
}

#[test]
fn a_pod_in_which_nothing_ever_ran_goes_at_once() {
    let mut seen = seen(&["a", "a"]);
    seen.pods.remove(1);
    let map = seen.status.as_mut().unwrap().map.as_mut().unwrap();
    map.chunkservers.remove(1);
    let goal = wanted(&[("a", 1)]);
    assert_eq!(scale::plan(&seen, &goal).replicas["demo-ssd-a"], 1);
    // A server that says nothing of its pod may be the one.
    let stray = Chunkserver {
        id: 7,
        state: ServerState::Down.into(),
        ..Chunkserver::default()
    };
    let map = seen.status.as_mut().unwrap().map.as_mut().unwrap();
    map.chunkservers.push(stray);
    let plan = scale::plan(&seen, &goal);
    assert_eq!(plan.replicas["demo-ssd-a"], 2);
    assert!(plan.waiting["ssd"].contains("chunkserver 7"));
}

#[test]
fn an_address_that_is_used_again_is_not_the_server_that_had_it() {
    let mut seen = seen(&["a", "a"]);
    let dead = Chunkserver {
        id: 9,
        addresses: vec!["10.0.0.2:7420".into()],
        state: ServerState::Down.into(),
        draining: true,
        ..Chunkserver::default()
    };
    for named in ["", "demo-ssd-b-0"] {
        let map = seen.status.as_mut().unwrap().map.as_mut().unwrap();
        map.chunkservers.retain(|server| server.id != 9);
        let dead = Chunkserver {
            name: named.into(),
            ..dead.clone()
        };
        map.chunkservers.insert(0, dead);
        assert_eq!(seen.server_of(&seen.pods[1]).unwrap().id, 2);
        let plan = scale::plan(&seen, &wanted(&[("a", 1), ("b", 1)]));
        assert_eq!(plan.replicas["demo-ssd-a"], 2);
        assert_eq!(plan.drain, [(2, true)]);
    }
    // Of two that say they are there, neither is believed.
    let second = &mut seen.status.as_mut().unwrap().map.as_mut().unwrap();
    second.chunkservers[0].state = ServerState::Up.into();
    second.chunkservers[0].name = String::new();
    assert!(seen.server_of(&seen.pods[1]).is_none());
}

#[test]
fn a_drain_by_hand_is_left_alone() {
    let mut seen = seen(&["a", "a"]);
    server(&mut seen, 2).draining = true;
    let plan = scale::plan(&seen, &wanted(&[("a", 2)]));
    assert!(plan.drain.is_empty() && plan.progress.is_empty());
    // Nor is it forgotten when it restarts while it is empty.
    members(&mut seen).retain(|member| member.server != 2);
    server(&mut seen, 2).state = ServerState::Down.into();
    assert!(scale::plan(&seen, &wanted(&[("a", 2)])).forget.is_empty());
}

/// Chunkserver 1 is gone with its disks: another runs in its pod.
fn with_lost_disks() -> Seen {
    let mut seen = seen(&["a", "b"]);
    server(&mut seen, 1).state = ServerState::Down.into();
    let new = Chunkserver {
        id: 3,
        addresses: vec!["10.0.0.1:7420".into()],
        state: ServerState::Up.into(),
        ..server(&mut seen, 1).clone()
    };
    let map = seen.status.as_mut().unwrap().map.as_mut().unwrap();
    map.chunkservers.push(new);
    seen
}

#[test]
fn a_server_whose_disks_are_gone_is_forgotten_when_nothing_is_on_it() {
    let mut seen = with_lost_disks();
    let goal = wanted(&[("a", 1), ("b", 1)]);
    members(&mut seen)[0].state = MemberState::Lagging.into();
    let group = &mut seen.status.as_mut().unwrap().groups[0];
    (group.in_sync, group.lagging) = (1, 1);
    assert!(scale::plan(&seen, &goal).forget.is_empty());
    let degraded = condition(&seen, "Degraded");
    assert_eq!(degraded.reason, "ServerLost");
    assert!(degraded.message.contains("1 in a (demo-ssd-a-0)"));
    let mut done = seen.clone();
    members(&mut done)[0].server = 3;
    members(&mut done)[0].state = MemberState::InSync.into();
    let group = &mut done.status.as_mut().unwrap().groups[0];
    (group.in_sync, group.lagging) = (2, 0);
    assert_eq!(scale::plan(&done, &goal).forget, [1]);
    assert!(done.is_clean(), "who has nothing is not missed");
    assert_eq!(status::disruption(&done), Disruption::One);
}

#[test]
fn a_server_that_may_come_back_is_not_forgotten_but_not_waited_for() {
    let mut seen = seen(&["a", "b"]);
    server(&mut seen, 1).state = ServerState::Down.into();
    members(&mut seen).remove(0);
    let group = &mut seen.status.as_mut().unwrap().groups[0];
    (group.in_sync, group.wanted) = (1, 1);
    let goal = wanted(&[("a", 1), ("b", 1)]);
    assert!(scale::plan(&seen, &goal).forget.is_empty());
    assert!(seen.is_clean());
    // Its set is gone, but its pod has not ended.
    seen.sets.remove(0);
    let goal = wanted(&[("b", 1)]);
    assert!(scale::plan(&seen, &goal).forget.is_empty());
    seen.pods.remove(0);
    assert_eq!(scale::plan(&seen, &goal).forget, [1]);
}

#[test]
fn a_group_with_fewer_members_than_its_class_asks_for_is_not_whole() {
    let mut seen = seen(&["a", "b", "c"]);
    members(&mut seen).truncate(1);
    seen.status.as_mut().unwrap().groups[0].in_sync = 1;
    let groups = seen.groups().unwrap();
    assert_eq!((groups.whole, groups.undergoal, groups.one_copy), (0, 1, 1));
    assert!(!seen.is_clean());
    assert_eq!(status::disruption(&seen), Disruption::Nobody);
    assert_eq!(condition(&seen, "DataAtRisk").reason, "OneCopyLeft");
    let degraded = condition(&seen, "Degraded");
    assert_eq!(degraded.reason, "CopiesMissing");
    assert!(degraded.message.contains("1 have fewer members"));
    for set in &mut seen.sets {
        set.status.as_mut().unwrap().update_revision = Some("new".into());
    }
    let plan = rollout::plan(&seen, &["a".to_owned()]);
    assert_eq!(plan.replace, None);
    assert!(plan.waiting.unwrap().contains("1 have fewer members"));
    // No class asks for it any more: it is told, and holds nothing up.
    let map = seen.status.as_mut().unwrap().map.as_mut().unwrap();
    map.classes[0].keep_definition = 7;
    map.classes[0].create_definition = 7;
    let groups = seen.groups().unwrap();
    assert_eq!((groups.whole, groups.undergoal, groups.one_copy), (1, 1, 1));
    assert!(seen.is_clean());
}

#[test]
fn a_group_that_cannot_be_read_is_not_told_as_one_that_could_be_lost() {
    let mut seen = seen(&["a", "b"]);
    for id in [1, 2] {
        server(&mut seen, id).state = ServerState::Down.into();
    }
    members(&mut seen)[0].state = MemberState::Lagging.into();
    let group = &mut seen.status.as_mut().unwrap().groups[0];
    (group.in_sync, group.lagging) = (1, 1);
    let risk = condition(&seen, "DataAtRisk");
    assert_eq!((risk.status, risk.reason), (Some(true), "Unavailable"));
    server(&mut seen, 2).state = ServerState::Up.into();
    assert_eq!(condition(&seen, "DataAtRisk").reason, "OneCopyLeft");
}

#[test]
fn a_set_whose_last_pod_has_two_servers_waits_for_both() {
    let mut seen = seen(&["a", "b"]);
    let old = Chunkserver {
        id: 5,
        state: ServerState::Down.into(),
        ..server(&mut seen, 1).clone()
    };
    let map = seen.status.as_mut().unwrap().map.as_mut().unwrap();
    map.chunkservers.push(old);
    let mut member = map.groups[0].members[0];
    member.server = 5;
    map.groups[0].members[0] = member;
    let plan = scale::plan(&seen, &wanted(&[("b", 1)]));
    assert_eq!(plan.drain, [(1, true), (5, true)]);
    assert_eq!(plan.replicas["demo-ssd-a"], 1);
    let progress = &plan.progress["ssd"];
    assert_eq!((progress.len(), progress[0].server), (1, 5));
    seen.sets[0] = stateful_set("demo-ssd-a", 0);
    seen.pods.remove(0);
    assert_eq!(
        scale::plan(&seen, &wanted(&[("b", 1)])).remove,
        ["demo-ssd-a"]
    );
}

pub(crate) fn condition(seen: &Seen, type_: &str) -> Said {
    let cluster = serde_json::from_value(serde_json::json!({
        "apiVersion": "hither.dev/v1alpha1",
        "kind": "HitherCluster",
        "metadata": {"name": "demo"},
        "spec": {"zones": [], "metadataStore": {"embedded": {"storage": {}}}},
    }))
    .unwrap();
    let told = status::cluster(&cluster, &[], seen, &rollout::Rollout::default(), None);
    let mut all = told.conditions.into_iter();
    all.find(|one| one.type_ == type_).unwrap()
}
