//! Metadata servers of their own, where the store is etcd.

use k8s_openapi::api::apps::v1::{StatefulSet, StatefulSetSpec};
use k8s_openapi::api::core::v1::{ConfigMap, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;

use super::managers::{NO_SETTINGS, config_hash, manager_address, on_delete};
use super::names::{
    Component, component_labels, match_labels, metadata, metadata_set, owner, selector,
};
use super::network::{METADATA_PORT, PROBES_PORT};
use super::pod::{Server, ZONE_KEY};
use super::store::store;
use super::{Object, World};
use crate::api::HitherCluster;

/// Metadata servers beside the active one.
#[must_use]
pub fn standbys(cluster: &HitherCluster) -> i32 {
    let said = cluster.spec.metadata_servers.as_ref();
    said.and_then(|mds| mds.standbys).unwrap_or(1)
}

pub(crate) fn objects(cluster: &HitherCluster, world: &World) -> Vec<Object> {
    let Some(store) = store(cluster, world) else {
        return Vec::new();
    };
    let name = metadata_set(&cluster.name_any());
    let labels = component_labels(cluster, Component::Metadata);
    let file = "{}\n".to_owned();
    let mut annotations = config_hash(&file);
    annotations.extend(store.annotations);
    let config = ConfigMap {
        metadata: metadata(cluster, name.clone(), labels.clone(), owner(cluster)),
        data: Some([("mds.yaml".to_owned(), file.clone())].into()),
        ..ConfigMap::default()
    };
    let pods = selector(&cluster.name_any(), Component::Metadata);
    let zones = cluster.spec.zones.iter().map(|zone| zone.name.clone());
    let mut args = vec!["--rank=0".to_owned()];
    args.extend(store.args);
    args.extend([
        format!("--listen=0.0.0.0:{METADATA_PORT}"),
        "--advertise=$(POD_IP)".into(),
        format!("--probes=0.0.0.0:{PROBES_PORT}"),
        format!("--managers={}", manager_address(cluster)),
    ]);
    let server = Server {
        cluster,
        world,
        settings: cluster
            .spec
            .metadata_servers
            .as_ref()
            .map_or(&NO_SETTINGS, |mds| &mds.pods),
        role: "mds",
        args,
        ports: vec![("metadata", METADATA_PORT)],
        config: name.clone(),
        mounts: store.mounts,
        volumes: store.volumes,
        zones: zones.collect(),
        spread: (pods.clone(), ZONE_KEY),
        grace_seconds: 60,
        may_stand_by: true,
    };
    let set = StatefulSet {
        metadata: metadata(cluster, name, labels.clone(), owner(cluster)),
        spec: Some(StatefulSetSpec {
            replicas: Some(1 + standbys(cluster)),
            selector: match_labels(pods),
            pod_management_policy: Some("Parallel".into()),
            update_strategy: Some(on_delete()),
            template: PodTemplateSpec {
                metadata: Some(ObjectMeta {
                    labels: Some(labels),
                    annotations: Some(annotations),
                    ..ObjectMeta::default()
                }),
                spec: Some(server.spec()),
            },
            ..StatefulSetSpec::default()
        }),
        ..StatefulSet::default()
    };
    vec![Object::new(&config), Object::new(&set)]
}
