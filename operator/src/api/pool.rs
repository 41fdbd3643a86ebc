//! `ChunkserverPool`: chunkservers of one kind, some in each zone.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use super::{PodSettings, Storage};

/// Chunkservers with the same labels and disks, a number of them in each zone.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "hither.dev",
    version = "v1alpha1",
    kind = "ChunkserverPool",
    plural = "chunkserverpools",
    shortname = "csp",
    category = "hither",
    namespaced,
    status = "ChunkserverPoolStatus",
    derive = "PartialEq",
    doc = "Chunkservers with the same labels and disks, a number of them in each zone.",
    selectable = ".spec.cluster",
    validation = Rule::new("self.metadata.name.size() <= 30").message("the name is part of others: at most 30 characters"),
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')").message("the name becomes a DNS name: lower-case letters, digits and -, a letter first"),
    scale(
        spec_replicas_path = ".spec.replicasPerZone",
        status_replicas_path = ".status.replicasPerZone",
        label_selector_path = ".status.selector"
    ),
    printcolumn(json_path = ".spec.cluster", name = "Cluster", type_ = "string"),
    printcolumn(json_path = ".spec.replicasPerZone", name = "Per-Zone", type_ = "integer"),
    printcolumn(json_path = r#".status.conditions[?(@.type=="Ready")].status"#, name = "Ready", type_ = "string"),
    printcolumn(json_path = ".status.chunkserversReady", name = "Chunkservers", type_ = "string"),
    printcolumn(json_path = ".status.labels", name = "Labels", type_ = "string"),
    printcolumn(json_path = r#".status.conditions[?(@.type=="Ready")].message"#, name = "Message", type_ = "string", priority = 1),
    printcolumn(json_path = ".metadata.creationTimestamp", name = "Age", type_ = "date")
)]
#[serde(rename_all = "camelCase")]
pub struct ChunkserverPoolSpec {
    /// Cluster of the pool, in the same namespace.
    #[schemars(length(min = 1, max = 30))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("a pool cannot change its cluster: make another"))]
    pub cluster: String,
    /// Chunkservers in each of the pool's zones.
    #[schemars(range(min = 0, max = 100))]
    pub replicas_per_zone: i32,
    /// Zones of the cluster the pool stands in; absent: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 63)))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub zones: Vec<String>,
    /// Labels of the chunkservers: letters `A` to `Z` and words `key=value`. A change acts at once,
    /// without a restart. `zone`, `region` and `node` are set by themselves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 30), inner(length(min = 1, max = 127)))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    #[x_kube(validation = Rule::new("self.all(l, l.matches('^([A-Z]|[a-z][-a-z0-9]*=[-A-Za-z0-9_.]+)$'))").message("a label is one letter A-Z or key=value"))]
    #[x_kube(validation = Rule::new("self.all(l, !l.startsWith('zone=') && !l.startsWith('region=') && !l.startsWith('node='))").message("zone, region and node are set by where a chunkserver runs"))]
    #[x_kube(validation = Rule::new("self.all(l, !l.contains('=') || self.filter(m, m.startsWith(l.split('=')[0] + '=')).size() == 1)").message("a key can have one value"))]
    pub labels: Vec<String>,
    /// Where the chunkservers keep their chunks.
    pub storage: Storage,
    /// Settings of the chunkservers.
    #[serde(default)]
    pub settings: ChunkserverSettings,
    /// How their pods run.
    #[serde(default)]
    pub pods: PodSettings,
}

/// Settings of chunkservers; absent ones have the defaults of `hither chunkserver`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ChunkserverSettings {
    /// Free bytes below which a disk takes no new chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_floor: Option<Quantity>,
    /// Bytes a second that one server fetches to fill its copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fill_bandwidth: Option<Quantity>,
    /// Days in which every copy is read and verified once; 0: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 365))]
    pub scrub_days: Option<i32>,
}

/// What the operator has seen.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ChunkserverPoolStatus {
    /// Generation of the spec this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`, `Accepted`, `Draining`.
    #[serde(default)]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_string()]))]
    pub conditions: Vec<Condition>,
    /// Smallest number of chunkservers in one of the zones.
    #[serde(default)]
    pub replicas_per_zone: i32,
    /// Chunkservers that are ready, of those wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunkservers_ready: Option<String>,
    /// Labels the chunkservers were given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<String>,
    /// Selector of the pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Chunkservers that are being emptied before they go.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["pod".to_string()]))]
    pub draining: Vec<DrainStatus>,
}

/// A chunkserver that is being emptied.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct DrainStatus {
    /// Its pod.
    pub pod: String,
    /// Its id in the manager.
    pub server: i64,
    /// Placement groups that still have a member on it.
    pub groups_left: i32,
    /// Bytes of copies that are still on it.
    pub bytes_left: i64,
}
