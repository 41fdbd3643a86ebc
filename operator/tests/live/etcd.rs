//! The managed etcd.

use std::collections::BTreeSet;
use std::time::Duration;

use hither_operator::api::{ChunkserverPool, HitherCluster};
use hither_operator::etcd::ask::{Credentials, Link, Peer};
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Pod, Secret};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::json;

use crate::life::{manager, ready};
use crate::support::{Place, condition, holds, sample};

/// A cluster with a managed etcd, ready.
async fn begin(name: &str) -> Place {
    let mut place = Place::new(name).await;
    place.operate();
    let mut cluster: HitherCluster = sample("cluster.yaml");
    let store = json!({"managedEtcd": {"storage": {"claim": {"size": "1Gi"}}}});
    cluster.spec.metadata_store = serde_json::from_value(store).unwrap();
    let create = PostParams::default();
    place
        .api::<HitherCluster>()
        .create(&create, &cluster)
        .await
        .unwrap();
    place
        .api::<ChunkserverPool>()
        .create(&create, &sample("pools.yaml"))
        .await
        .unwrap();
    ready(&place).await;
    until(&place, "all members vote", "MetadataMembers", true).await;
    place
}

async fn end(place: Place) {
    place.delete::<HitherCluster>("demo").await;
    place.delete::<ChunkserverPool>("main").await;
    // What a later cluster of the same name must not begin without.
    place.api::<ConfigMap>().get("demo-etcd").await.unwrap();
    place.end().await;
}

/// Waits until a condition holds, or does not.
async fn until(place: &Place, what: &str, type_: &'static str, is: bool) -> HitherCluster {
    place
        .until("demo", what, move |cluster: &HitherCluster| {
            let status = cluster.status.as_ref();
            let one = status.and_then(|status| condition(&status.conditions, type_));
            one.is_some_and(|one| one.status == if is { "True" } else { "False" })
        })
        .await
}

/// The pod goes together with its volume.
async fn lose(place: &Place, pod: &str) {
    let params = DeleteParams::default();
    place
        .api::<PersistentVolumeClaim>()
        .delete(&format!("data-0-{pod}"), &params)
        .await
        .unwrap();
    place.api::<Pod>().delete(pod, &params).await.unwrap();
}

async fn cluster_id(place: &Place) -> bytes::Bytes {
    let status = manager(place).await.status().await.unwrap();
    status.map.unwrap().cluster_id
}

#[tokio::test]
async fn a_member_that_lost_its_volume_is_replaced() {
    let place = begin("managed").await;
    let cluster = ready(&place).await;
    let status = cluster.status.unwrap();
    assert!(holds(&status.conditions, "ZoneLossTolerated"), "{status:?}");
    assert!(!holds(&status.conditions, "MetadataQuorumLost"));
    let etcd = status.etcd.unwrap();
    assert_eq!(etcd.members, "3/3");
    assert_eq!(etcd.quota_bytes, 8 << 30);
    assert!(etcd.leader.is_some() && etcd.certificates_renewed_at.is_some());
    // One in each zone: the nodes of the test cluster are a zone each.
    let of_etcd = ListParams::default().labels("app.kubernetes.io/component=etcd");
    let pods = place.api::<Pod>().list(&of_etcd).await.unwrap();
    let nodes: BTreeSet<String> = pods
        .iter()
        .filter_map(|pod| pod.spec.as_ref()?.node_name.clone())
        .collect();
    assert_eq!(nodes.len(), 3, "{nodes:?}");
    let state = place.api::<ConfigMap>().get("demo-etcd").await.unwrap();
    assert_eq!(state.data.as_ref().unwrap()["state"], "existing");
    assert!(state.owner_references().is_empty());
    let before = cluster_id(&place).await;

    lose(&place, "demo-etcd-1").await;
    until(&place, "a member is missed", "MetadataMembers", false).await;
    until(&place, "it is replaced", "MetadataMembers", true).await;
    ready(&place).await;
    assert_eq!(cluster_id(&place).await, before);
    end(place).await;
}

#[tokio::test]
async fn a_member_taken_off_the_list_while_it_runs_joins_again() {
    let place = begin("removed").await;
    let client: Secret = place.api().get("demo-etcd-client").await.unwrap();
    let of = |name: &str| client.data.as_ref().unwrap()[name].0.clone();
    let credentials = Credentials {
        trusted: of("ca.crt"),
        certificate: of("tls.crt"),
        key: of("tls.key"),
    };
    let pod = |name: &'static str| {
        let pods = place.api::<Pod>();
        async move { pods.get(name).await.unwrap() }
    };
    let ip = pod("demo-etcd-0").await.status.unwrap().pod_ip.unwrap();
    let peer = Peer {
        url: format!("https://{ip}:2379"),
        server_name: Some(format!("demo-etcd.{}.svc", place.name)),
    };
    let link = Link::to(&peer, &credentials).await.unwrap();
    let id = async || {
        let members = link.members().await.unwrap();
        let one = members.iter().find(|member| member.name == "demo-etcd-1");
        one.map(|member| member.id)
    };
    let (was, uid) = (id().await.unwrap(), pod("demo-etcd-1").await.uid());
    // etcd finds members shaky that do not know each other for some seconds yet.
    let removed = async {
        while !link.remove(was).await.unwrap() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), removed)
        .await
        .unwrap();
    until(&place, "a member is missed", "MetadataMembers", false).await;
    until(&place, "it has joined again", "MetadataMembers", true).await;
    assert_ne!(id().await.unwrap(), was);
    assert_ne!(pod("demo-etcd-1").await.uid(), uid);
    ready(&place).await;
    end(place).await;
}

#[tokio::test]
async fn without_quorum_nothing_is_done_until_somebody_says_what_to_go_on_from() {
    let place = begin("quorum").await;
    let before = cluster_id(&place).await;
    lose(&place, "demo-etcd-0").await;
    lose(&place, "demo-etcd-2").await;
    let waits = |pod: &Pod| {
        let status = pod.status.as_ref();
        let admission = status.and_then(|status| status.init_container_statuses.as_ref()?.first());
        admission.is_some_and(|admission| admission.restart_count > 0)
    };
    for pod in ["demo-etcd-0", "demo-etcd-2"] {
        place.until(pod, "a member waits", waits).await;
    }
    let says = |cluster: &HitherCluster| {
        let status = cluster.status.as_ref();
        let one = status.and_then(|status| condition(&status.conditions, "MetadataQuorumLost"));
        one.is_some_and(|one| {
            one.status == "True"
                && one
                    .message
                    .contains("without data: demo-etcd-0, demo-etcd-2")
                && one
                    .message
                    .ends_with("hither.dev/restart-etcd-from=demo-etcd-1")
        })
    };
    place.until("demo", "it is told what to do", says).await;
    let annotation =
        |pod: &str| json!({"metadata": {"annotations": {"hither.dev/restart-etcd-from": pod}}});
    place
        .change::<HitherCluster>("demo", annotation("demo-etcd-1"))
        .await;
    until(
        &place,
        "a member goes on alone",
        "MetadataQuorumLost",
        false,
    )
    .await;
    let cluster = until(&place, "the others join", "MetadataMembers", true).await;
    assert!(
        !cluster
            .annotations()
            .contains_key("hither.dev/restart-etcd-from")
    );
    ready(&place).await;
    assert_eq!(cluster_id(&place).await, before);
    end(place).await;
}

#[tokio::test]
async fn new_certificates_are_taken_over_one_after_the_other() {
    let place = begin("certs").await;
    let client: Secret = place.api().get("demo-etcd-client").await.unwrap();
    // As if it had reached two thirds of its life: what cannot be read is made anew.
    let broken = json!({"stringData": {"tls.crt": "x"}});
    place.change::<Secret>("demo-etcd-client", broken).await;
    let renewed = move |secret: &Secret| {
        let of = |secret: &Secret| secret.data.as_ref().unwrap()["tls.crt"].clone();
        of(secret).0.len() > 100 && of(secret) != of(&client)
    };
    place
        .until("demo-etcd-client", "a certificate is made", renewed)
        .await;
    until(&place, "servers are replaced", "Upgrading", true).await;
    until(&place, "all are replaced", "Upgrading", false).await;
    ready(&place).await;
    end(place).await;
}
