//! Chunkservers: one StatefulSet for each pool and zone.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{
    StatefulSet, StatefulSetPersistentVolumeClaimRetentionPolicy, StatefulSetSpec,
};
use k8s_openapi::api::core::v1::{
    Affinity, ConfigMap, EmptyDirVolumeSource, HostPathVolumeSource, PersistentVolumeClaim,
    PersistentVolumeClaimSpec, PodAffinityTerm, PodAntiAffinity, PodTemplateSpec, Volume,
    VolumeMount, VolumeResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::managers::{config_hash, manager_address, on_delete};
use super::names::{match_labels, metadata, owner, pool_labels, pool_set, short_hash};
use super::network::DATA_PORT;
use super::pod::{HOST_KEY, Server};
use super::{Object, World};
use crate::api::{ChunkserverPool, HitherCluster, Storage, Zone};
use crate::quantity::bytes_of;

/// The zones a pool stands in, in the cluster's order.
pub fn pool_zones<'a>(
    cluster: &'a HitherCluster,
    pool: &'a ChunkserverPool,
) -> impl Iterator<Item = &'a Zone> {
    let named = &pool.spec.zones;
    let zones = cluster.spec.zones.iter();
    zones.filter(move |zone| named.is_empty() || named.contains(&zone.name))
}

/// Labels of the chunkservers of a pool in a zone, without those that come from the place.
#[must_use]
pub fn wanted_labels(pool: &ChunkserverPool, zone: &Zone) -> Vec<String> {
    let mut labels: Vec<String> = zone.letter.iter().cloned().collect();
    for label in &pool.spec.labels {
        if !labels.contains(label) {
            labels.push(label.clone());
        }
    }
    labels
}

/// What of a chunkserver's file asks for a restart: all but the labels, which the manager is told.
#[must_use]
pub fn settings_file(pool: &ChunkserverPool) -> Value {
    let settings = &pool.spec.settings;
    // The servers know fewer forms than Kubernetes, and other units.
    let bytes = |quantity: &Quantity| bytes_of(quantity).map(|bytes| json!(bytes));
    let mut file = json!({});
    let fields = [
        ("floor_bytes", settings.free_floor.as_ref().and_then(bytes)),
        (
            "fill_bytes_per_second",
            settings.fill_bandwidth.as_ref().and_then(bytes),
        ),
        ("scrub_days", settings.scrub_days.map(|days| json!(days))),
    ];
    for (name, value) in fields {
        if let Some(value) = value {
            file[name] = value;
        }
    }
    file
}

pub(crate) fn objects(
    cluster: &HitherCluster,
    pool: &ChunkserverPool,
    zone: &Zone,
    world: &World,
) -> Vec<Object> {
    let name = pool_set(&cluster.name_any(), &pool.name_any(), &zone.name);
    let labels = pool_labels(cluster, pool, &zone.name);
    let settings = settings_file(pool);
    let mut file = settings.clone();
    file["labels"] = json!(wanted_labels(pool, zone));
    let config = ConfigMap {
        metadata: metadata(cluster, name.clone(), labels.clone(), owner(pool)),
        data: Some([("chunkserver.yaml".to_owned(), format!("{file:#}\n"))].into()),
        ..ConfigMap::default()
    };
    let mut selected = labels.clone();
    selected.retain(|key, _| key.starts_with("hither.dev/"));
    let mut spec = server(cluster, pool, zone, world, name.clone(), &selected).spec();
    let directories = directory_labels(&pool.spec.storage);
    if !directories.is_empty() {
        spec.affinity = spec
            .affinity
            .map(|affinity| alone_on_node(affinity, cluster, &directories));
    }
    let mut pod_labels = labels.clone();
    pod_labels.extend(directories);
    let wanted = pool.spec.replicas_per_zone;
    let made_with = world.claim_sizes.get(&name);
    let set = StatefulSet {
        metadata: metadata(cluster, name.clone(), labels.clone(), owner(pool)),
        spec: Some(StatefulSetSpec {
            replicas: Some(world.replicas.get(&name).copied().unwrap_or(wanted)),
            selector: match_labels(selected),
            pod_management_policy: Some("Parallel".into()),
            update_strategy: Some(on_delete()),
            template: PodTemplateSpec {
                metadata: Some(ObjectMeta {
                    labels: Some(pod_labels),
                    annotations: Some(config_hash(&settings.to_string())),
                    ..ObjectMeta::default()
                }),
                spec: Some(spec),
            },
            volume_claim_templates: claims(&pool.spec.storage, "disk", made_with),
            persistent_volume_claim_retention_policy: Some(
                StatefulSetPersistentVolumeClaimRetentionPolicy {
                    when_deleted: Some("Retain".into()),
                    when_scaled: Some("Retain".into()),
                },
            ),
            ..StatefulSetSpec::default()
        }),
        ..StatefulSet::default()
    };
    vec![Object::new(&config), Object::new(&set)]
}

fn server<'a>(
    cluster: &'a HitherCluster,
    pool: &'a ChunkserverPool,
    zone: &Zone,
    world: &'a World,
    config: String,
    selected: &BTreeMap<String, String>,
) -> Server<'a> {
    let storage = &pool.spec.storage;
    let mut args = vec![
        format!("--listen=0.0.0.0:{DATA_PORT}"),
        "--advertise=$(POD_IP)".to_owned(),
        format!("--zone={}", zone.name),
        "--node=$(NODE_NAME)".into(),
        "--name=$(POD_NAME)".into(),
        format!("--managers={}", manager_address(cluster)),
    ];
    args.extend(
        zone.region
            .iter()
            .map(|region| format!("--region={region}")),
    );
    args.extend((0..storage.disks()).map(|at| format!("--disk={}", disk_directory(at))));
    Server {
        cluster,
        world,
        settings: &pool.spec.pods,
        role: "chunkserver",
        args,
        ports: vec![("data", DATA_PORT)],
        config,
        mounts: mounts(storage, "disk", mount_directory),
        volumes: volumes(storage, "disk"),
        zones: vec![zone.name.clone()],
        spread: (selected.clone(), HOST_KEY),
        grace_seconds: 120,
        may_stand_by: false,
    }
}

/// A label for each directory of the node that a server takes.
fn directory_labels(storage: &Storage) -> BTreeMap<String, String> {
    let paths = storage.host_path.iter().flat_map(|host| &host.paths);
    let label = |path: &String| {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let key = format!("{DIRECTORY_LABEL}{}", short_hash(&parts.join("/")));
        (key, "taken".to_owned())
    };
    paths.map(label).collect()
}

/// Two servers cannot have one directory, whose ever they are.
fn alone_on_node(
    affinity: Affinity,
    cluster: &HitherCluster,
    directories: &BTreeMap<String, String>,
) -> Affinity {
    let own = super::selector(&cluster.name_any(), super::Component::Chunkserver);
    let mut apart = vec![PodAffinityTerm {
        label_selector: Some(match_labels(own)),
        topology_key: HOST_KEY.into(),
        ..PodAffinityTerm::default()
    }];
    apart.extend(directories.iter().map(|(key, value)| PodAffinityTerm {
        label_selector: Some(match_labels([(key.clone(), value.clone())].into())),
        // Of every namespace.
        namespace_selector: Some(LabelSelector::default()),
        topology_key: HOST_KEY.into(),
        ..PodAffinityTerm::default()
    }));
    Affinity {
        pod_anti_affinity: Some(PodAntiAffinity {
            required_during_scheduling_ignored_during_execution: Some(apart),
            ..PodAntiAffinity::default()
        }),
        ..affinity
    }
}

/// The claims of a server's volumes, `PREFIX-0` and up, of the size that their set was made with if
/// it was.
pub(crate) fn claims(
    storage: &Storage,
    prefix: &str,
    made_with: Option<&Quantity>,
) -> Option<Vec<PersistentVolumeClaim>> {
    let claim = storage.claim.as_ref()?;
    let size = made_with.unwrap_or(&claim.size);
    let one = |at| PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(format!("{prefix}-{at}")),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeClaimSpec {
            access_modes: Some(vec!["ReadWriteOnce".into()]),
            storage_class_name: claim.storage_class_name.clone(),
            resources: Some(VolumeResourceRequirements {
                requests: Some(BTreeMap::from([("storage".to_owned(), size.clone())])),
                ..VolumeResourceRequirements::default()
            }),
            ..PersistentVolumeClaimSpec::default()
        }),
        ..PersistentVolumeClaim::default()
    };
    Some((0..storage.disks()).map(one).collect())
}

/// Where a server's volumes are mounted.
pub(crate) fn mounts(
    storage: &Storage,
    prefix: &str,
    directory: impl Fn(usize) -> String,
) -> Vec<VolumeMount> {
    let one = |at| VolumeMount {
        name: format!("{prefix}-{at}"),
        mount_path: directory(at),
        ..VolumeMount::default()
    };
    (0..storage.disks()).map(one).collect()
}

/// Volumes that are not claims.
pub(crate) fn volumes(storage: &Storage, prefix: &str) -> Vec<Volume> {
    if let Some(empty) = &storage.empty_dir {
        return vec![Volume {
            name: format!("{prefix}-0"),
            empty_dir: Some(EmptyDirVolumeSource {
                size_limit: empty.size_limit.clone(),
                ..EmptyDirVolumeSource::default()
            }),
            ..Volume::default()
        }];
    }
    let paths = storage.host_path.iter().flat_map(|host| &host.paths);
    paths
        .enumerate()
        .map(|(at, path)| Volume {
            name: format!("{prefix}-{at}"),
            host_path: Some(HostPathVolumeSource {
                path: path.clone(),
                type_: Some("Directory".into()),
            }),
            ..Volume::default()
        })
        .collect()
}

fn mount_directory(disk: usize) -> String {
    format!("/var/lib/hither/disk-{disk}")
}

/// A directory of the volume, so that what the file system itself keeps there does not matter.
fn disk_directory(disk: usize) -> String {
    format!("{}/chunks", mount_directory(disk))
}

/// Beginning of labels that say which directories of its node a pod takes.
const DIRECTORY_LABEL: &str = "disk.hither.dev/";
