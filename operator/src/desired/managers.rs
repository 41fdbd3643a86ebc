//! The managers, with the embedded store also the metadata.

use k8s_openapi::api::apps::v1::{StatefulSet, StatefulSetSpec, StatefulSetUpdateStrategy};
use k8s_openapi::api::core::v1::{ConfigMap, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;
use serde_json::json;

use super::names::{
    Component, component_labels, manager_service, manager_set, match_labels, metadata, owner,
    selector, short_hash,
};
use super::network::{MANAGER_PORT, METADATA_PORT};
use super::pod::{HOST_KEY, Server, ZONE_KEY};
use super::store::{Store, store};
use super::{Object, World, chunkservers};
use crate::api::HitherCluster;

/// The address at which a manager is found inside Kubernetes.
#[must_use]
pub fn manager_address(cluster: &HitherCluster) -> String {
    let namespace = cluster.namespace().unwrap_or_default();
    format!(
        "{}.{namespace}.svc:{MANAGER_PORT}",
        manager_service(&cluster.name_any())
    )
}

/// Managers the cluster asks for.
#[must_use]
pub fn replicas(cluster: &HitherCluster) -> i32 {
    if cluster.spec.metadata_store.embedded.is_some() {
        return 1;
    }
    let zones = i32::try_from(cluster.spec.zones.len()).unwrap_or(3);
    let said = cluster.spec.managers.as_ref().and_then(|m| m.replicas);
    said.unwrap_or(zones.clamp(2, 3))
}

pub(crate) fn objects(cluster: &HitherCluster, world: &World) -> Vec<Object> {
    let name = manager_set(&cluster.name_any());
    let file = config_file(cluster);
    let labels = component_labels(cluster, Component::Manager);
    let config = ConfigMap {
        metadata: metadata(cluster, name.clone(), labels.clone(), owner(cluster)),
        data: Some([("manager.yaml".to_owned(), file.clone())].into()),
        ..ConfigMap::default()
    };
    let pods = selector(&cluster.name_any(), Component::Manager);
    let store = store(cluster, world);
    let made_with = world.claim_sizes.get(&name);
    let mut annotations = config_hash(&file);
    annotations.extend(store.iter().flat_map(|store| store.annotations.clone()));
    let set = StatefulSet {
        metadata: metadata(cluster, name.clone(), labels.clone(), owner(cluster)),
        spec: Some(StatefulSetSpec {
            replicas: Some(replicas(cluster)),
            selector: match_labels(pods),
            pod_management_policy: Some("Parallel".into()),
            update_strategy: Some(on_delete()),
            template: PodTemplateSpec {
                metadata: Some(ObjectMeta {
                    labels: Some(labels),
                    annotations: Some(annotations),
                    ..ObjectMeta::default()
                }),
                spec: Some(server(cluster, world, name, store).spec()),
            },
            volume_claim_templates: cluster.spec.metadata_store.embedded.as_ref().and_then(
                |embedded| chunkservers::claims(&embedded.storage, "metadata", made_with),
            ),
            ..StatefulSetSpec::default()
        }),
        ..StatefulSet::default()
    };
    vec![Object::new(&config), Object::new(&set)]
}

fn server<'a>(
    cluster: &'a HitherCluster,
    world: &'a World,
    config: String,
    store: Option<Store>,
) -> Server<'a> {
    let spec = &cluster.spec;
    let mut args = vec![
        format!("--listen=0.0.0.0:{MANAGER_PORT}"),
        "--advertise=$(POD_IP)".into(),
    ];
    let mut ports = vec![("manager", MANAGER_PORT)];
    let (mut mounts, mut volumes) = (Vec::new(), Vec::new());
    if let Some(embedded) = &spec.metadata_store.embedded {
        args.push(format!("--dir={METADATA_DIR}/store"));
        args.push(format!("--mds-listen=0.0.0.0:{METADATA_PORT}"));
        ports.push(("metadata", METADATA_PORT));
        mounts = chunkservers::mounts(&embedded.storage, "metadata", |_| METADATA_DIR.into());
        volumes = chunkservers::volumes(&embedded.storage, "metadata");
    } else if let Some(store) = store {
        args.extend(store.args);
        mounts.extend(store.mounts);
        volumes.extend(store.volumes);
    }
    let embedded = spec.metadata_store.embedded.is_some();
    Server {
        cluster,
        world,
        settings: spec.managers.as_ref().map_or(&NO_SETTINGS, |m| &m.pods),
        role: "manager",
        args,
        ports,
        config,
        mounts,
        volumes,
        zones: zones(cluster, world),
        spread: (
            selector(&cluster.name_any(), Component::Manager),
            if embedded { HOST_KEY } else { ZONE_KEY },
        ),
        grace_seconds: 60,
        may_stand_by: false,
    }
}

/// Zones a manager may run in. With the embedded store they stay those of the beginning: its volume
/// is in one of them, and other zones of the cluster are no reason to restart it.
fn zones(cluster: &HitherCluster, world: &World) -> Vec<String> {
    let spec = &cluster.spec;
    match &world.manager_zones {
        Some(zones) if spec.metadata_store.embedded.is_some() => zones.clone(),
        _ => spec.zones.iter().map(|zone| zone.name.clone()).collect(),
    }
}

fn config_file(cluster: &HitherCluster) -> String {
    let spec = &cluster.spec;
    let mut file = json!({
        "sessionLeaseMs": i64::from(spec.session_lease_seconds) * 1000,
        "repairAfterMs": i64::from(spec.repair_after_seconds) * 1000,
    });
    if let Some(class) = &spec.default_class {
        file["defaultClass"] = json!(class);
    }
    // JSON is YAML.
    format!("{file:#}\n")
}

/// The annotation that makes a new template of a new file.
pub(crate) fn config_hash(file: &str) -> std::collections::BTreeMap<String, String> {
    [("hither.dev/config".to_owned(), short_hash(file))].into()
}

/// Pods are ended by the operator alone, when the data allows it.
pub(crate) fn on_delete() -> StatefulSetUpdateStrategy {
    StatefulSetUpdateStrategy {
        type_: Some("OnDelete".into()),
        ..StatefulSetUpdateStrategy::default()
    }
}

/// Settings of pods nothing was said about.
pub(crate) static NO_SETTINGS: crate::api::PodSettings = crate::api::PodSettings {
    resources: None,
    node_selector: std::collections::BTreeMap::new(),
    tolerations: Vec::new(),
    priority_class_name: None,
};

const METADATA_DIR: &str = "/var/lib/hither";
