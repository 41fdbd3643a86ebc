//! Scaling, replacing and telling, decided on made-up clusters.

use std::collections::BTreeMap;

use hither_proto::manager::{ClusterStatus, GroupHealth};
use hither_proto::map::{
    Chunkserver, ClusterMap, Group, Member, MemberState, Rank, ServerState, StorageClass,
};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use crate::desired::Disruption;
use crate::seen::Seen;
use crate::{rollout, scale, status};

/// A zone each, a chunkserver each, one group over all, and a manager with the metadata.
pub(crate) fn seen(zones: &[&str]) -> Seen {
    let mut seen = Seen::default();
    let mut map = ClusterMap::default();
    let mut group = Group {
        id: 1,
        ..Group::default()
    };
    for (at, zone) in zones.iter().enumerate() {
        let (id, ip) = (at as u64 + 1, format!("10.0.0.{}", at + 1));
        let set = format!("demo-ssd-{zone}");
        let ordinal = seen.pods_of(&set).len();
        seen.pods.push(pod(&set, ordinal, &ip, "old"));
        seen.sets
            .retain(|known: &StatefulSet| known.metadata.name.as_ref() != Some(&set));
        seen.sets.push(stateful_set(&set, ordinal + 1));
        map.chunkservers.push(Chunkserver {
            id,
            addresses: vec![format!("{ip}:7420")],
            zone: (*zone).to_owned(),
            state: ServerState::Up.into(),
            name: format!("{set}-{ordinal}"),
            ..Chunkserver::default()
        });
        group.members.push(Member {
            server: id,
            disk: 0,
            state: MemberState::InSync.into(),
        });
    }
    map.groups.push(group);
    map.classes.push(StorageClass::default());
    let mut manager = pod("demo-manager", 0, "10.0.9.1", "old");
    labels(&mut manager).insert("app.kubernetes.io/component".into(), "manager".into());
    seen.pods.push(manager);
    map.ranks.push(Rank {
        rank: 0,
        address: "10.0.9.1:7651".into(),
        epoch: 1,
    });
    seen.status = Some(ClusterStatus {
        map: Some(map),
        groups: vec![GroupHealth {
            group: 1,
            in_sync: u32::try_from(zones.len()).unwrap(),
            wanted: u32::try_from(zones.len()).unwrap(),
            ..GroupHealth::default()
        }],
        ..ClusterStatus::default()
    });
    seen
}

pub(crate) fn labels(pod: &mut Pod) -> &mut BTreeMap<String, String> {
    pod.metadata.labels.as_mut().unwrap()
}

pub(crate) fn pod(set: &str, ordinal: usize, ip: &str, revision: &str) -> Pod {
    serde_json::from_value(json!({
        "metadata": {
            "name": format!("{set}-{ordinal}"),
            "uid": format!("{set}-{ordinal}"),
            "labels": {
                "app.kubernetes.io/component": "chunkserver",
                "controller-revision-hash": revision,
            },
        },
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]},
    }))
    .unwrap()
}

pub(crate) fn stateful_set(name: &str, replicas: usize) -> StatefulSet {
    serde_json::from_value(json!({
        "metadata": {
            "name": name,
            "generation": 1,
            "labels": {"app.kubernetes.io/component": "chunkserver", "hither.dev/pool": "ssd"},
        },
        "spec": {"replicas": replicas, "selector": {}, "template": {}, "serviceName": ""},
        "status": {"replicas": replicas, "observedGeneration": 1, "updateRevision": "old"},
    }))
    .unwrap()
}

pub(crate) fn server(seen: &mut Seen, id: u64) -> &mut Chunkserver {
    let map = seen.status.as_mut().unwrap().map.as_mut().unwrap();
    map.chunkservers
        .iter_mut()
        .find(|server| server.id == id)
        .unwrap()
}

pub(crate) fn members(seen: &mut Seen) -> &mut Vec<Member> {
    let map = seen.status.as_mut().unwrap().map.as_mut().unwrap();
    &mut map.groups[0].members
}

pub(crate) fn wanted(sets: &[(&str, i32)]) -> BTreeMap<String, i32> {
    sets.iter()
        .map(|(zone, n)| (format!("demo-ssd-{zone}"), *n))
        .collect()
}

#[test]
fn a_chunkserver_is_emptied_then_ended_then_forgotten() {
    let mut seen = seen(&["a", "a", "b"]);
    let goal = wanted(&[("a", 1), ("b", 1)]);
    let first = scale::plan(&seen, &goal);
    assert_eq!(first.drain, [(2, true)]);
    assert_eq!(
        first.replicas["demo-ssd-a"], 2,
        "its copies are still on it"
    );
    server(&mut seen, 2).draining = true;
    let second = scale::plan(&seen, &goal);
    assert_eq!(second.replicas["demo-ssd-a"], 2);
    assert_eq!(second.progress["ssd"][0].groups_left, 1);
    assert!(second.waiting["ssd"].contains("no other chunkserver may take them"));
    seen.status.as_mut().unwrap().groups[0].filling = 1;
    let moving = scale::plan(&seen, &goal);
    assert!(!moving.waiting["ssd"].contains("no other"));
    members(&mut seen).retain(|member| member.server != 2);
    let third = scale::plan(&seen, &goal);
    assert_eq!(third.replicas["demo-ssd-a"], 1);
    assert!(third.forget.is_empty());
    // The set is smaller, its pod ends; the manager still hears of the server.
    seen.sets[0] = stateful_set("demo-ssd-a", 1);
    assert!(scale::plan(&seen, &goal).drain.is_empty());
    seen.pods.remove(1);
    assert!(scale::plan(&seen, &goal).drain.is_empty());
    server(&mut seen, 2).state = ServerState::Down.into();
    assert_eq!(scale::plan(&seen, &goal).forget, [2]);
}

#[test]
fn asking_for_more_again_takes_a_drain_back() {
    let mut seen = seen(&["a", "a"]);
    server(&mut seen, 2).draining = true;
    seen.drained.insert(2);
    let plan = scale::plan(&seen, &wanted(&[("a", 2)]));
    assert_eq!(plan.drain, [(2, false)]);
    assert_eq!(plan.progress["ssd"][0].server, 2, "until the manager knows");
    assert!(plan.replicas.is_empty());
}

#[test]
fn nothing_is_taken_away_while_no_manager_answers() {
    let mut seen = seen(&["a", "a"]);
    seen.status = None;
    let plan = scale::plan(&seen, &wanted(&[("a", 0)]));
    assert_eq!(plan.replicas["demo-ssd-a"], 2);
    assert!(plan.waiting["ssd"].contains("no manager"));
}

#[test]
fn a_set_nobody_asks_for_is_emptied_and_removed() {
    let mut seen = seen(&["a"]);
    let plan = scale::plan(&seen, &BTreeMap::new());
    assert_eq!(plan.drain, [(1, true)]);
    seen.pods.clear();
    seen.sets[0] = stateful_set("demo-ssd-a", 0);
    assert_eq!(scale::plan(&seen, &BTreeMap::new()).remove, ["demo-ssd-a"]);
}

pub(crate) fn outdated(seen: &mut Seen) {
    for set in &mut seen.sets {
        set.status.as_mut().unwrap().update_revision = Some("new".into());
    }
}

#[test]
fn one_chunkserver_is_replaced_at_a_time_and_only_while_all_copies_are_there() {
    let mut seen = seen(&["b", "a"]);
    let zones = ["a".to_owned(), "b".to_owned()];
    assert!(rollout::plan(&seen, &zones).outdated.is_empty());
    outdated(&mut seen);
    let plan = rollout::plan(&seen, &zones);
    assert_eq!(plan.replace.as_deref(), Some("demo-ssd-a-0"));
    assert_eq!(plan.outdated.len(), 2);
    seen.status.as_mut().unwrap().groups[0].lagging = 1;
    let plan = rollout::plan(&seen, &zones);
    assert_eq!(plan.replace, None);
    assert!(plan.waiting.unwrap().contains("0 of 1"));
}

#[test]
fn a_pod_that_came_back_is_waited_for_until_the_manager_knows_it() {
    let mut seen = seen(&["b", "a"]);
    outdated(&mut seen);
    seen.pods[1] = pod("demo-ssd-a", 0, "10.0.0.9", "new");
    let plan = rollout::plan(&seen, &["a".to_owned(), "b".to_owned()]);
    assert!(plan.waiting.unwrap().contains("does not know it yet"));
}

#[test]
fn evictions_are_allowed_where_they_cost_nothing_more() {
    let mut seen = seen(&["a", "b"]);
    assert_eq!(status::disruption(&seen), Disruption::One);
    server(&mut seen, 1).state = ServerState::Down.into();
    seen.status.as_mut().unwrap().groups[0].lagging = 1;
    members(&mut seen)[0].state = MemberState::Lagging.into();
    assert_eq!(status::disruption(&seen), Disruption::InZone("a".into()));
    members(&mut seen)[1].state = MemberState::Filling.into();
    assert_eq!(status::disruption(&seen), Disruption::Nobody);
    seen.status = None;
    assert_eq!(status::disruption(&seen), Disruption::Nobody);
}

/// Adds three members of etcd that vote and answer; the first leads.
pub(crate) fn with_etcd(seen: &mut Seen) {
    use crate::etcd::plan::{Member, Place, Said, World};
    let one = |at: u64| {
        let (pod, peer) = (format!("demo-etcd-{at}"), format!("https://e-{at}:2380"));
        let place = Place {
            pod: pod.clone(),
            peer: peer.clone(),
            said: Some(Said {
                id: at + 1,
                leader: 1,
                ..Said::default()
            }),
            ..Place::default()
        };
        let member = Member {
            id: at + 1,
            name: pod,
            started: true,
            peer,
            learner: false,
        };
        (place, member)
    };
    let (places, members): (Vec<Place>, Vec<Member>) = (0..3).map(one).unzip();
    seen.etcd = Some(World {
        established: true,
        places,
        members: Some(members),
        ..World::default()
    });
    for at in 0..3 {
        let mut pod = pod("demo-etcd", at, &format!("10.0.1.{at}"), "old");
        let labels = pod.metadata.labels.as_mut().unwrap();
        labels.insert("app.kubernetes.io/component".into(), "etcd".into());
        seen.pods.push(pod);
    }
    seen.sets.push(stateful_set("demo-etcd", 3));
}

#[test]
fn members_of_etcd_are_replaced_first_and_the_leader_last_of_them() {
    let mut seen = seen(&["a", "b"]);
    with_etcd(&mut seen);
    outdated(&mut seen);
    let zones = ["a".to_owned(), "b".to_owned()];
    let plan = rollout::plan(&seen, &zones);
    assert_eq!(plan.replace.as_deref(), Some("demo-etcd-1"));
    let order: Vec<&str> = plan.outdated.iter().map(String::as_str).collect();
    assert_eq!(order[..3], ["demo-etcd-1", "demo-etcd-2", "demo-etcd-0"]);
}

#[test]
fn nothing_is_replaced_while_a_member_of_etcd_has_no_vote() {
    let mut seen = seen(&["a", "b"]);
    with_etcd(&mut seen);
    outdated(&mut seen);
    let etcd = seen.etcd.as_mut().unwrap();
    etcd.members.as_mut().unwrap()[2].learner = true;
    let plan = rollout::plan(&seen, &["a".into(), "b".into()]);
    assert_eq!(plan.replace, None);
    assert!(
        plan.waiting
            .unwrap()
            .contains("2 of 3 members of etcd vote")
    );
}

#[test]
fn a_member_of_etcd_that_does_not_work_is_replaced_only_while_the_others_agree() {
    let mut seen = seen(&["a", "b"]);
    with_etcd(&mut seen);
    outdated(&mut seen);
    let broken = seen
        .pods
        .iter_mut()
        .find(|pod| pod.metadata.name.as_deref() == Some("demo-etcd-2"));
    broken.unwrap().status.as_mut().unwrap().conditions = None;
    let etcd = |seen: &mut Seen| seen.etcd.take().unwrap();
    let mut world = etcd(&mut seen);
    world.places[2].said = None;
    seen.etcd = Some(world);
    let zones = ["a".to_owned(), "b".to_owned()];
    assert_eq!(
        rollout::plan(&seen, &zones).replace.as_deref(),
        Some("demo-etcd-2")
    );
    let mut world = etcd(&mut seen);
    (world.places[0].said, world.members) = (None, None);
    seen.etcd = Some(world);
    assert_eq!(rollout::plan(&seen, &zones).replace, None);
}

#[test]
fn the_status_tells_of_the_members_of_etcd() {
    use crate::etcd::plan::plan;
    let cluster: crate::api::HitherCluster = serde_json::from_value(json!({
        "apiVersion": "hither.dev/v1alpha1",
        "kind": "HitherCluster",
        "metadata": {"name": "demo", "namespace": "files"},
        "spec": {"zones": [{"name": "a"}], "metadataStore": {}},
    }))
    .unwrap();
    let mut seen = seen(&["a"]);
    with_etcd(&mut seen);
    let of = |seen: &Seen, type_: &str| {
        let world = seen.etcd.as_ref().unwrap();
        let told = status::etcd(&cluster, world, &plan(world), None);
        let mut conditions = told.conditions.into_iter();
        conditions.find(|one| one.type_ == type_).unwrap()
    };
    assert_eq!(of(&seen, "MetadataQuorumLost").status, Some(false));
    assert_eq!(of(&seen, "MetadataMembers").status, Some(true));
    let world = seen.etcd.as_mut().unwrap();
    world.members = None;
    world.places[0].said = None;
    world.places[1].said = None;
    let lost = of(&seen, "MetadataQuorumLost");
    assert_eq!(lost.status, Some(true));
    assert!(
        lost.message.contains("1 of 3 members answer"),
        "{}",
        lost.message
    );
    let command = "kubectl annotate -n files hc demo hither.dev/restart-etcd-from=demo-etcd-2";
    assert!(lost.message.ends_with(command), "{}", lost.message);
    assert_eq!(of(&seen, "MetadataMembers").status, Some(false));
}
