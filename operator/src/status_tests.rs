//! What conditions promise, and when they do not.

use serde_json::{Value, json};

use crate::api::HitherCluster;
use crate::conditions::{Said, said};
use crate::decisions_tests::{labels, members, pod, seen, server, with_etcd};
use crate::desired::ZONE_KEY;
use crate::rollout::Rollout;
use crate::seen::Seen;
use crate::status;

fn cluster(spec: &Value) -> HitherCluster {
    let mut all = json!({
        "zones": [{"name": "a"}, {"name": "b"}, {"name": "c"}],
        "metadataStore": {"etcd": {"endpoints": ["http://etcd:2379"]}},
    });
    let fields = all.as_object_mut().unwrap();
    fields.extend(spec.as_object().unwrap().clone());
    serde_json::from_value(json!({
        "apiVersion": "hither.dev/v1alpha1",
        "kind": "HitherCluster",
        "metadata": {"name": "demo", "namespace": "files"},
        "spec": all,
    }))
    .unwrap()
}

/// Managers and metadata servers in these zones, on nodes with a chunkserver or where the pod says.
fn with_pods(zones: &[(&str, &str)]) -> Seen {
    let mut seen = seen(&["a", "b", "c"]);
    seen.pods
        .retain(|pod| pod.metadata.name.as_deref() != Some("demo-manager-0"));
    for (at, (component, zone)) in zones.iter().enumerate() {
        let mut pod = pod(
            &format!("demo-{component}"),
            at,
            &format!("10.0.7.{at}"),
            "old",
        );
        let labels = labels(&mut pod);
        labels.insert("app.kubernetes.io/component".into(), (*component).into());
        if !zone.is_empty() {
            labels.insert(ZONE_KEY.into(), (*zone).into());
        }
        seen.pods.push(pod);
    }
    seen
}

fn zone_loss(cluster: &HitherCluster, seen: &Seen) -> (Option<bool>, &'static str) {
    let told = status::cluster(cluster, &[], seen, &Rollout::default(), None);
    let mut all = told.conditions.into_iter();
    let said = all.find(|one| one.type_ == "ZoneLossTolerated").unwrap();
    (said.status, said.reason)
}

#[test]
fn a_zone_loss_is_tolerated_only_when_everything_is_elsewhere_too() {
    let spread = [
        ("manager", "a"),
        ("manager", "b"),
        ("mds", "a"),
        ("mds", "c"),
    ];
    let plain = cluster(&json!({}));
    let seen = with_pods(&spread);
    assert_eq!(zone_loss(&plain, &seen), (None, "EtcdNotOurs"));
    let alone = cluster(&json!({"metadataServers": {"standbys": 0}}));
    assert_eq!(zone_loss(&alone, &seen), (Some(false), "NoStandby"));
    let alone = cluster(&json!({"managers": {"replicas": 1}}));
    assert_eq!(zone_loss(&alone, &seen), (Some(false), "OneManager"));
    let mut one_zone = spread;
    one_zone[3].1 = "a";
    let seen = with_pods(&one_zone);
    assert_eq!(zone_loss(&plain, &seen), (Some(false), "MetadataInOneZone"));
    one_zone[1].1 = "a";
    let seen = with_pods(&one_zone);
    assert_eq!(zone_loss(&plain, &seen), (Some(false), "ManagersInOneZone"));
    let mut unknown = spread;
    unknown[3].1 = "";
    assert_eq!(
        zone_loss(&plain, &with_pods(&unknown)),
        (None, "PlacesUnknown")
    );
    let mut beside = with_pods(&unknown);
    server(&mut beside, 3).node = "n3".into();
    let spec = json!({"containers": [], "nodeName": "n3"});
    beside.pods.last_mut().unwrap().spec = Some(serde_json::from_value(spec).unwrap());
    assert_eq!(zone_loss(&plain, &beside), (None, "EtcdNotOurs"));
    let mut empty = with_pods(&spread);
    let status = empty.status.as_mut().unwrap();
    status.groups.clear();
    status.map.as_mut().unwrap().groups.clear();
    assert_eq!(zone_loss(&plain, &empty), (None, "NoGroups"));
    let mut copies = with_pods(&spread);
    members(&mut copies).truncate(1);
    assert_eq!(zone_loss(&plain, &copies), (Some(false), "CopiesInOneZone"));
}

#[test]
fn what_could_not_be_applied_is_not_told_as_done() {
    let plain = cluster(&json!({}));
    let mut said_before = status::cluster(
        &plain,
        &[],
        &with_pods(&[("manager", "a")]),
        &Rollout::default(),
        None,
    )
    .conditions;
    let of = |all: &[Said], type_: &str| all.iter().find(|one| one.type_ == type_).cloned();
    assert_eq!(of(&said_before, "Upgrading").unwrap().status, Some(false));
    status::not_applied(&mut said_before, "apply StatefulSet/x: quota");
    for (type_, status) in [
        ("Progressing", Some(false)),
        ("Degraded", Some(true)),
        ("Upgrading", None),
    ] {
        let expected = said(type_, status, "ApplyFailed", "apply StatefulSet/x: quota");
        assert_eq!(of(&said_before, type_), Some(expected));
    }
}

#[test]
fn with_a_managed_etcd_most_of_its_members_have_to_be_elsewhere() {
    let spread = [
        ("manager", "a"),
        ("manager", "b"),
        ("mds", "a"),
        ("mds", "b"),
    ];
    let mut seen = with_pods(&spread);
    with_etcd(&mut seen);
    let over = |zones: &[&str]| {
        let zones: Vec<Value> = zones.iter().map(|zone| json!({"name": zone})).collect();
        let store = json!({"managedEtcd": {"storage": {"emptyDir": {}}}});
        cluster(&json!({"zones": zones, "metadataStore": store}))
    };
    let (two, three) = (over(&["a", "b"]), over(&["a", "b", "c"]));
    assert_eq!(zone_loss(&two, &seen), (Some(false), "MetadataInTwoZones"));
    assert_eq!(zone_loss(&three, &seen), (Some(true), "CopiesElsewhere"));
    seen.etcd.as_mut().unwrap().places[1].said = None;
    assert_eq!(
        zone_loss(&three, &seen),
        (Some(false), "MetadataMembersMissing")
    );
}
