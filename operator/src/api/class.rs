//! `ChunkStorageClass`: where copies are to be, and the Kubernetes storage class for it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// Where the copies of a class's files are to be; the operator keeps a class of this name in the
/// manager and a Kubernetes StorageClass `NAMESPACE-CLUSTER-NAME`.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "hither.dev",
    version = "v1alpha1",
    kind = "ChunkStorageClass",
    plural = "chunkstorageclasses",
    shortname = "csc",
    category = "hither",
    namespaced,
    status = "ChunkStorageClassStatus",
    derive = "PartialEq",
    doc = "Where the copies of a class's files are to be, and the Kubernetes StorageClass for it.",
    selectable = ".spec.cluster",
    validation = Rule::new("self.metadata.name.size() <= 63").message("the name is part of others: at most 63 characters"),
    printcolumn(json_path = ".spec.cluster", name = "Cluster", type_ = "string"),
    printcolumn(json_path = ".spec.keep", name = "Keep", type_ = "string"),
    printcolumn(json_path = r#".status.conditions[?(@.type=="Ready")].status"#, name = "Ready", type_ = "string"),
    printcolumn(json_path = ".status.storageClassName", name = "StorageClass", type_ = "string"),
    printcolumn(json_path = r#".status.conditions[?(@.type=="Ready")].message"#, name = "Message", type_ = "string", priority = 1),
    printcolumn(json_path = ".metadata.creationTimestamp", name = "Age", type_ = "date")
)]
#[serde(rename_all = "camelCase")]
pub struct ChunkStorageClassSpec {
    /// Cluster of the class, in the same namespace.
    #[schemars(length(min = 1, max = 30))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("a class cannot change its cluster: make another"))]
    pub cluster: String,
    /// Where copies stay: a label expression for each copy, separated by commas, such as
    /// `zone=a,zone=b`, or a number of copies anywhere.
    #[schemars(length(min = 1, max = 1024))]
    #[x_kube(validation = Rule::new("self.matches(r'^[-A-Za-z0-9_.=+&|!~*(),;:/ \\[\\]]+$')").message("a definition has letters, key=value, operators, commas and numbers: see docs/labels.md"))]
    #[x_kube(validation = Rule::new("!self.startsWith('@') && !self.startsWith('=')").message("chunks are kept as copies; erasure coding is for states that do not exist yet"))]
    pub keep: String,
    /// Where new copies are written, if elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    #[x_kube(validation = Rule::new("self.matches(r'^[-A-Za-z0-9_.=+&|!~*(),;:/ \\[\\]]+$')").message("a definition has letters, key=value, operators, commas and numbers: see docs/labels.md"))]
    pub create: Option<String>,
    /// What happens when servers that match have no room: `strict` fails, `std` takes others while
    /// that lasts, `loose` takes others also when servers are only busy.
    #[serde(default)]
    pub mode: DefinitionMode,
    /// Smallest number of copies that may acknowledge a write; absent: one less than there are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 9))]
    pub min_write_copies: Option<i32>,
    /// Preferred labels of the mounts, in order, separated by `;`. `{zone}`, `{region}` and
    /// `{node}` are filled in on each node. Absent: `node={node}; zone={zone}; region={region}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    #[x_kube(validation = Rule::new(r#"!self.contains('"') && !self.contains("'")"#).message("preferred labels have no quotes"))]
    pub preferred_labels: Option<String>,
    /// Text for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 255))]
    pub description: Option<String>,
    /// What volumes of the class are like.
    #[serde(default)]
    pub volumes: VolumeDefaults,
}

/// What is done when servers that match a definition have no room.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub enum DefinitionMode {
    /// The write fails.
    Strict,
    /// Other servers are used while that lasts.
    #[default]
    Std,
    /// Other servers are used also when those that match are only busy.
    Loose,
}

impl DefinitionMode {
    /// As the manager calls it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Std => "std",
            Self::Loose => "loose",
        }
    }
}

/// What the volumes of a class are like.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeDefaults {
    /// Mode of a new volume's root directory, octal.
    #[schemars(regex(pattern = "^[0-7]{3,4}$"))]
    pub root_mode: String,
    /// Owner of a new volume's root directory.
    #[schemars(range(min = 0))]
    pub root_uid: i64,
    /// Group of a new volume's root directory.
    #[schemars(range(min = 0))]
    pub root_gid: i64,
    /// What happens to a volume whose claim is deleted.
    pub reclaim_policy: ReclaimPolicy,
    /// When volumes are made.
    pub binding: VolumeBinding,
    /// Pods use a volume in its first pod's zone only, as with disks. Needs the chart's value
    /// `csi.topology.enabled`, and `WaitForFirstConsumer` for the pod to choose the zone.
    pub pin_to_zone: bool,
    /// Options of the mounts.
    #[schemars(length(max = 32), inner(length(max = 128)))]
    pub mount_options: Vec<String>,
    /// Use this class for claims that name none.
    pub default: bool,
}

impl Default for VolumeDefaults {
    fn default() -> Self {
        Self {
            root_mode: "0777".into(),
            root_uid: 0,
            root_gid: 0,
            reclaim_policy: ReclaimPolicy::Delete,
            binding: VolumeBinding::Immediate,
            pin_to_zone: false,
            mount_options: Vec::new(),
            default: false,
        }
    }
}

/// What happens to a volume whose claim is deleted.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
pub enum ReclaimPolicy {
    /// It is deleted.
    #[default]
    Delete,
    /// It stays.
    Retain,
}

/// When volumes are made.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
pub enum VolumeBinding {
    /// With the claim: a volume can be reached from every zone.
    #[default]
    Immediate,
    /// With the first pod.
    WaitForFirstConsumer,
}

/// What the operator has seen.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ChunkStorageClassStatus {
    /// Generation of the spec this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`, `Accepted`, `Satisfiable`, `DeletionBlocked`.
    #[serde(default)]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_string()]))]
    pub conditions: Vec<Condition>,
    /// The Kubernetes StorageClass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage_class_name: Option<String>,
}
