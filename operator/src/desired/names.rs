//! Names and labels of the objects.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::{Resource, ResourceExt as _};

use crate::api::{ChunkserverPool, HitherCluster};

/// Label with the cluster's name.
pub const CLUSTER_LABEL: &str = "hither.dev/cluster";
/// Label with the pool's name.
pub const POOL_LABEL: &str = "hither.dev/pool";
/// Label with the zone, made to fit.
pub const ZONE_LABEL: &str = "hither.dev/zone";
/// Label with the uid of the object something was made for, and is removed with.
pub const OWNER_LABEL: &str = "hither.dev/owner";
/// Label that says what a pod does.
pub const COMPONENT_LABEL: &str = "app.kubernetes.io/component";
/// Value of `app.kubernetes.io/managed-by`.
pub const MANAGED_BY: &str = "hither-operator";

/// What a pod does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Component {
    /// A manager, with the embedded store also the metadata rank.
    Manager,
    /// A metadata server of its own.
    Metadata,
    /// A chunkserver.
    Chunkserver,
    /// A member of a managed etcd.
    Etcd,
    /// A dump of the metadata.
    Dump,
}

impl Component {
    /// Value of the label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Manager => "manager",
            Self::Metadata => "mds",
            Self::Chunkserver => "chunkserver",
            Self::Etcd => "etcd",
            Self::Dump => "dump",
        }
    }
}

/// The StatefulSet of the managers.
#[must_use]
pub fn manager_set(cluster: &str) -> String {
    format!("{cluster}-manager")
}

/// The Service that finds a manager.
#[must_use]
pub fn manager_service(cluster: &str) -> String {
    format!("{cluster}-manager")
}

/// The StatefulSet of the metadata servers.
#[must_use]
pub fn metadata_set(cluster: &str) -> String {
    format!("{cluster}-mds")
}

/// The StatefulSet of the members of a managed etcd, and the Service that finds one.
#[must_use]
pub fn etcd_set(cluster: &str) -> String {
    format!("{cluster}-etcd")
}

/// The Service that names each member.
#[must_use]
pub fn etcd_peers(cluster: &str) -> String {
    format!("{cluster}-etcd-peers")
}

/// The ConfigMap that says whether the members have begun.
#[must_use]
pub fn etcd_state(cluster: &str) -> String {
    format!("{cluster}-etcd")
}

/// The secret with the authority of a managed etcd.
#[must_use]
pub fn etcd_authority_secret(cluster: &str) -> String {
    format!("{cluster}-etcd-ca")
}

/// The secret with the certificate of the members.
#[must_use]
pub fn etcd_member_secret(cluster: &str) -> String {
    format!("{cluster}-etcd-member")
}

/// The secret with the certificate of managers and metadata servers.
#[must_use]
pub fn etcd_client_secret(cluster: &str) -> String {
    format!("{cluster}-etcd-client")
}

/// The CronJob that dumps the metadata.
#[must_use]
pub fn dump_job(cluster: &str) -> String {
    format!("{cluster}-dump")
}

/// The secret for the CSI driver.
#[must_use]
pub fn csi_secret(cluster: &str) -> String {
    format!("{cluster}-csi")
}

/// The StatefulSet of a pool in a zone.
#[must_use]
pub fn pool_set(cluster: &str, pool: &str, zone: &str) -> String {
    bounded(&format!("{cluster}-{pool}-{}", slug(zone)), SET_NAME_MAX)
}

/// A zone as part of a name or label value.
pub(crate) fn slug(zone: &str) -> String {
    let plain: String = zone
        .chars()
        .map(|c| match c.to_ascii_lowercase() {
            c @ ('a'..='z' | '0'..='9') => c,
            _ => '-',
        })
        .collect();
    let plain = plain.trim_matches('-');
    if plain == zone {
        plain.to_owned()
    } else {
        format!("{plain}-{}", short_hash(zone))
    }
}

/// Labels of everything of the cluster.
pub(crate) fn labels(cluster: &HitherCluster) -> BTreeMap<String, String> {
    let name = cluster.name_any();
    [
        ("app.kubernetes.io/name", "hither"),
        ("app.kubernetes.io/instance", &name),
        ("app.kubernetes.io/managed-by", MANAGED_BY),
        (CLUSTER_LABEL, &name),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .into()
}

/// Labels of a component.
pub(crate) fn component_labels(
    cluster: &HitherCluster,
    component: Component,
) -> BTreeMap<String, String> {
    let mut all = labels(cluster);
    all.insert(COMPONENT_LABEL.to_owned(), component.as_str().to_owned());
    all
}

/// Selector of a component's pods.
#[must_use]
pub fn selector(cluster: &str, component: Component) -> BTreeMap<String, String> {
    [
        (CLUSTER_LABEL.to_owned(), cluster.to_owned()),
        (COMPONENT_LABEL.to_owned(), component.as_str().to_owned()),
    ]
    .into()
}

/// Labels of one pool in one zone.
pub(crate) fn pool_labels(
    cluster: &HitherCluster,
    pool: &ChunkserverPool,
    zone: &str,
) -> BTreeMap<String, String> {
    let mut all = component_labels(cluster, Component::Chunkserver);
    all.insert(POOL_LABEL.to_owned(), pool.name_any());
    all.insert(ZONE_LABEL.to_owned(), bounded(&slug(zone), 63));
    all
}

pub(crate) fn match_labels(labels: BTreeMap<String, String>) -> LabelSelector {
    LabelSelector {
        match_labels: Some(labels),
        ..LabelSelector::default()
    }
}

/// Whom an object is removed with.
pub(crate) struct Owner(String);

/// Metadata of an object in the cluster's namespace.
///
/// The owner is a label, never a reference: with `--cascade=foreground` Kubernetes deletes what
/// refers to an owner at once, whatever finalizer still holds the owner for the sake of the data.
pub(crate) fn metadata(
    cluster: &HitherCluster,
    name: String,
    mut labels: BTreeMap<String, String>,
    owner: Option<Owner>,
) -> ObjectMeta {
    labels.extend(owner.map(|Owner(uid)| (OWNER_LABEL.to_owned(), uid)));
    ObjectMeta {
        name: Some(name),
        namespace: cluster.namespace(),
        labels: Some(labels),
        ..ObjectMeta::default()
    }
}

pub(crate) fn owner<K: Resource<DynamicType = ()>>(object: &K) -> Option<Owner> {
    object.meta().uid.clone().map(Owner)
}

/// The text, or its beginning and a hash when it is too long.
pub(crate) fn bounded(text: &str, bytes_max: usize) -> String {
    if text.len() <= bytes_max {
        return text.to_owned();
    }
    let hash = short_hash(text);
    let kept: String = text.chars().take(bytes_max - hash.len() - 1).collect();
    format!("{}-{hash}", kept.trim_end_matches(['-', '.']))
}

/// Eight digits that stand for a text (FNV-1a).
#[must_use]
pub fn short_hash(text: &str) -> String {
    let hash = text.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    format!("{hash:08x}")
}

/// A set's pods carry its name with ten more characters as a label.
const SET_NAME_MAX: usize = 52;
