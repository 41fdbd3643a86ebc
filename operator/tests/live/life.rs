//! The life of a cluster.

use hither_operator::api::{ChunkStorageClass, ChunkserverPool, HitherCluster};
use hither_operator::manager::Manager;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{PersistentVolume, Pod, Secret, Service};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use crate::support::{Place, condition, holds, image, sample};

pub(crate) async fn ready(place: &Place) -> HitherCluster {
    place
        .until(
            "demo",
            "a cluster becomes ready",
            |cluster: &HitherCluster| {
                let status = cluster.status.as_ref();
                status.is_some_and(|status| {
                    holds(&status.conditions, "Ready")
                        && status.health.as_deref() == Some("Healthy")
                })
            },
        )
        .await
}

pub(crate) async fn manager(place: &Place) -> Manager {
    let pod: Pod = place.api().get("demo-manager-0").await.unwrap();
    let ip = pod.status.unwrap().pod_ip.unwrap();
    Manager::at(vec![format!("{ip}:7650")])
}

async fn pods(place: &Place) -> Vec<String> {
    let api: Api<Pod> = place.api();
    let all = api.list(&ListParams::default()).await.unwrap();
    all.items
        .iter()
        .map(|pod| format!("{} {}", pod.name_any(), pod.uid().unwrap()))
        .collect()
}

fn all_ready(wanted: &'static str) -> impl Fn(&ChunkserverPool) -> bool + Send + 'static {
    move |pool| {
        let status = pool.status.as_ref();
        status.is_some_and(|status| {
            status.chunkservers_ready.as_deref() == Some(wanted)
                && holds(&status.conditions, "Ready")
                && !holds(&status.conditions, "Draining")
        })
    }
}

#[tokio::test]
async fn a_cluster_begins_changes_and_ends() {
    let mut place = Place::new("life").await;
    place.operate();
    place.apply_samples().await;
    let cluster = ready(&place).await;
    let status = cluster.status.clone().unwrap();
    assert_eq!(status.zones_ready.as_deref(), Some("3/3"));
    assert!(
        status
            .zones
            .iter()
            .all(|zone| zone.ready == 1 && zone.up == 1),
        "{status:?}"
    );
    let loss = condition(&status.conditions, "ZoneLossTolerated").unwrap();
    assert_eq!(
        (loss.status.as_str(), loss.reason.as_str()),
        ("False", "EmbeddedStore")
    );
    volumes_find_their_cluster(&place, status.cluster_id.as_deref().unwrap()).await;
    labels_act_without_a_restart(&place).await;
    more_and_fewer(&place).await;
    pods_are_replaced(&place).await;
    a_volume_holds_the_cluster(&place, status.cluster_id.as_deref().unwrap()).await;
    let sets: Api<StatefulSet> = place.api();
    assert!(
        sets.list(&ListParams::default())
            .await
            .unwrap()
            .items
            .is_empty()
    );
    let left: Api<Service> = place.api();
    assert!(left.get_opt("demo-manager").await.unwrap().is_none());
    place.delete::<ChunkStorageClass>("everywhere").await;
    place.gone::<ChunkserverPool>("main").await;
    place.end().await;
}

async fn volumes_find_their_cluster(place: &Place, id: &str) {
    let class: ChunkStorageClass = place
        .until(
            "everywhere",
            "a class becomes ready",
            |class: &ChunkStorageClass| {
                class
                    .status
                    .as_ref()
                    .is_some_and(|status| holds(&status.conditions, "Ready"))
            },
        )
        .await;
    let name = class.status.unwrap().storage_class_name.unwrap();
    assert_eq!(name, format!("{}-demo-everywhere", place.name));
    let classes: Api<StorageClass> = Api::all(place.client.clone());
    let parameters = classes.get(&name).await.unwrap().parameters.unwrap();
    let secret = &parameters["csi.storage.k8s.io/node-stage-secret-name"];
    let secret: Secret = place.api().get(secret).await.unwrap();
    assert_eq!(secret.data.unwrap()["clusterID"].0, id.as_bytes());
    let known = manager(place).await.status().await.unwrap().map.unwrap();
    let class = known
        .classes
        .iter()
        .find(|class| class.name == "everywhere")
        .unwrap();
    assert_eq!(class.keep, "zone=eu-1a,zone=eu-1b,zone=eu-1c");
}

async fn labels_act_without_a_restart(place: &Place) {
    let before = pods(place).await;
    let labels = json!({"spec": {"labels": ["media=hdd", "X"]}});
    place.change::<ChunkserverPool>("main", labels).await;
    let manager = manager(place).await;
    loop {
        let map = manager.status().await.unwrap().map.unwrap();
        let has = |label: &str| {
            map.chunkservers
                .iter()
                .all(|server| server.labels.iter().any(|one| one == label))
        };
        if has("media=hdd") && has("X") {
            break;
        }
        manager.changed().await;
    }
    assert_eq!(pods(place).await, before);
}

async fn more_and_fewer(place: &Place) {
    let replicas = |n: i32| json!({"spec": {"replicasPerZone": n}});
    place.change::<ChunkserverPool>("main", replicas(2)).await;
    place
        .until("main", "the pool grows", all_ready("6/6"))
        .await;
    ready(place).await;
    place.change::<ChunkserverPool>("main", replicas(1)).await;
    for zone in ["eu-1a", "eu-1b", "eu-1c"] {
        let smaller = |set: &StatefulSet| {
            set.status
                .as_ref()
                .is_some_and(|status| status.replicas == 1)
        };
        place
            .until(&format!("demo-main-{zone}"), "a set shrinks", smaller)
            .await;
    }
    let manager = manager(place).await;
    loop {
        let map = manager.status().await.unwrap().map.unwrap();
        if map.chunkservers.len() == 3 {
            break;
        }
        manager.changed().await;
    }
    ready(place).await;
}

async fn pods_are_replaced(place: &Place) {
    let before = pods(place).await;
    let settings = json!({"spec": {"settings": {"scrubDays": 7}}});
    place.change::<ChunkserverPool>("main", settings).await;
    for zone in ["eu-1a", "eu-1b", "eu-1c"] {
        let name = format!("demo-main-{zone}-0");
        let old = before
            .iter()
            .find(|pod| pod.starts_with(&name))
            .unwrap()
            .clone();
        let replaced = move |pod: &Pod| {
            let ready = hither_operator::seen::is_ready(pod);
            ready && old != format!("{} {}", pod.name_any(), pod.uid().unwrap())
        };
        place.until(&name, "a pod is replaced", replaced).await;
    }
    ready(place).await;
}

async fn a_volume_holds_the_cluster(place: &Place, id: &str) {
    let volumes: Api<PersistentVolume> = Api::all(place.client.clone());
    let name = format!("{}-volume", place.name);
    let volume: PersistentVolume = serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "csi": {"driver": "csi.hither.dev", "volumeHandle": format!("{id}.1")},
        },
    }))
    .unwrap();
    volumes
        .create(&PostParams::default(), &volume)
        .await
        .unwrap();
    let clusters: Api<HitherCluster> = place.api();
    let before = pods(place).await;
    clusters
        .delete("demo", &DeleteParams::foreground())
        .await
        .unwrap();
    let named = name.clone();
    let blocked = move |cluster: &HitherCluster| {
        let conditions = cluster.status.as_ref().map(|status| &status.conditions);
        conditions
            .and_then(|all| condition(all, "DeletionBlocked"))
            .is_some_and(|one| one.status == "True" && one.message.contains(&named))
    };
    place
        .until("demo", "a volume holds the cluster", blocked)
        .await;
    a_pool_is_held_by_its_data(place).await;
    assert_eq!(pods(place).await, before, "nothing was ended");
    volumes
        .delete(&name, &DeleteParams::default())
        .await
        .unwrap();
    let gone = kube::runtime::wait::await_condition(
        clusters,
        "demo",
        |cluster: Option<&HitherCluster>| cluster.is_none(),
    );
    gone.await.unwrap();
}

/// Kubernetes deletes what belongs to something first, if asked to: not while it holds copies.
async fn a_pool_is_held_by_its_data(place: &Place) {
    let pools: Api<ChunkserverPool> = place.api();
    let foreground = DeleteParams::foreground();
    pools.delete("main", &foreground).await.unwrap();
    let held = |pool: &ChunkserverPool| {
        let status = pool.status.as_ref();
        pool.metadata.deletion_timestamp.is_some()
            && status.is_some_and(|status| {
                status.draining.len() == 3 && holds(&status.conditions, "Draining")
            })
    };
    place.until("main", "its data holds the pool", held).await;
}

#[tokio::test]
async fn what_is_written_wrong_is_told_where() {
    let mut place = Place::new("wrong").await;
    place.operate();
    let mut class: ChunkStorageClass = sample("classes.yaml");
    class.spec.keep = "zone=eu-1a,(zone=eu-1b".into();
    let api: Api<ChunkStorageClass> = place.api();
    api.create(&PostParams::default(), &class).await.unwrap();
    let told = |class: &ChunkStorageClass| {
        let conditions = class.status.as_ref().map(|status| &status.conditions);
        conditions
            .and_then(|all| condition(all, "Accepted"))
            .is_some_and(|one| one.reason == "InvalidDefinition" && one.message.contains('^'))
    };
    place.until("everywhere", "a mistake is shown", told).await;
    let pools: Api<ChunkserverPool> = place.api();
    pools
        .create(&PostParams::default(), &sample("pools.yaml"))
        .await
        .unwrap();
    let alone = |pool: &ChunkserverPool| {
        let conditions = pool.status.as_ref().map(|status| &status.conditions);
        conditions
            .and_then(|all| condition(all, "Accepted"))
            .is_some_and(|one| one.reason == "ClusterNotFound")
    };
    place.until("main", "a cluster is missing", alone).await;
    place.end().await;
}

#[tokio::test]
async fn with_etcd_a_standby_takes_over() {
    let mut place = Place::new("etcd").await;
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "etcd", "labels": {"app": "etcd"}},
        "spec": {"containers": [{
            "name": "etcd",
            "image": image(),
            "command": [
                "/usr/local/bin/etcd",
                "--data-dir=/tmp/etcd",
                "--listen-client-urls=http://0.0.0.0:2379",
                "--advertise-client-urls=http://etcd:2379",
            ],
        }]},
    }))
    .unwrap();
    place
        .api::<Pod>()
        .create(&PostParams::default(), &pod)
        .await
        .unwrap();
    let service: Service = serde_json::from_value(json!({
        "metadata": {"name": "etcd"},
        "spec": {"selector": {"app": "etcd"}, "ports": [{"port": 2379}]},
    }))
    .unwrap();
    place
        .api::<Service>()
        .create(&PostParams::default(), &service)
        .await
        .unwrap();
    place.operate();
    let mut cluster: HitherCluster = sample("cluster.yaml");
    let endpoint = format!("http://etcd.{}.svc:2379", place.name);
    cluster.spec.metadata_store =
        serde_json::from_value(json!({"etcd": {"endpoints": [endpoint]}})).unwrap();
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
    // Once the standby is ready too; nobody knows where the pod with etcd would be.
    let told = |cluster: &HitherCluster| {
        let status = cluster.status.as_ref();
        let loss = status.and_then(|status| condition(&status.conditions, "ZoneLossTolerated"));
        loss.is_some_and(|loss| loss.status == "Unknown" && loss.reason == "EtcdNotOurs")
    };
    place
        .until("demo", "a standby is in another zone", told)
        .await;
    let manager = manager(&place).await;
    let rank = |map: &hither_proto::map::ClusterMap| map.ranks[0].clone();
    let before = rank(&manager.status().await.unwrap().map.unwrap());
    let serves = |pod: &Pod| {
        let ip = pod.status.as_ref().and_then(|status| status.pod_ip.clone());
        ip.is_some_and(|ip| before.address.starts_with(&format!("{ip}:")))
    };
    let all = place
        .api::<Pod>()
        .list(&ListParams::default())
        .await
        .unwrap();
    let active = all.items.iter().find(|pod| serves(pod)).unwrap().name_any();
    place
        .api::<Pod>()
        .delete(&active, &DeleteParams::default())
        .await
        .unwrap();
    loop {
        let map = manager.status().await.unwrap().map.unwrap();
        if rank(&map).epoch > before.epoch && rank(&map).address != before.address {
            break;
        }
        manager.changed().await;
    }
    ready(&place).await;
    place.delete::<HitherCluster>("demo").await;
    place.delete::<ChunkserverPool>("main").await;
    place.end().await;
}

#[tokio::test]
async fn a_storage_class_of_somebody_else_is_left_alone() {
    let mut place = Place::new("name").await;
    let name = format!("{}-demo-everywhere", place.name);
    let foreign: StorageClass = serde_json::from_value(json!({
        "metadata": {"name": name},
        "provisioner": "example.org/other",
    }))
    .unwrap();
    let classes: Api<StorageClass> = Api::all(place.client.clone());
    classes
        .create(&PostParams::default(), &foreign)
        .await
        .unwrap();
    place.operate();
    place.apply_samples().await;
    let told = |class: &ChunkStorageClass| {
        let conditions = class.status.as_ref().map(|status| &status.conditions);
        conditions
            .and_then(|all| condition(all, "Ready"))
            .is_some_and(|one| one.reason == "NameConflict")
    };
    place.until("everywhere", "a name is taken", told).await;
    place.delete::<ChunkStorageClass>("everywhere").await;
    assert_eq!(
        classes.get(&name).await.unwrap().provisioner,
        "example.org/other"
    );
    classes
        .delete(&name, &DeleteParams::default())
        .await
        .unwrap();
    place.delete::<HitherCluster>("demo").await;
    place.delete::<ChunkserverPool>("main").await;
    place.end().await;
}

#[tokio::test]
async fn the_lease_has_one_holder_and_passes_on() {
    let place = Place::new("lease").await;
    let held = |by: &'static str| {
        move |lease: &Lease| {
            lease
                .spec
                .as_ref()
                .and_then(|spec| spec.holder_identity.as_deref())
                == Some(by)
        }
    };
    let first = place.another("first");
    place
        .until("hither-operator", "the first leads", held("first"))
        .await;
    let second = place.another("second");
    first.abort();
    place
        .until("hither-operator", "the second takes over", held("second"))
        .await;
    assert!(!second.is_finished());
    second.abort();
    place.end().await;
}
