//! `HitherCluster`: the servers of one cluster and where its metadata is.

use k8s_openapi::api::core::v1::LocalObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use super::{PodSettings, Storage};

/// One cluster: one namespace of files over the zones it names.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "hither.dev",
    version = "v1alpha1",
    kind = "HitherCluster",
    plural = "hitherclusters",
    shortname = "hc",
    category = "hither",
    namespaced,
    status = "HitherClusterStatus",
    derive = "PartialEq",
    doc = "A Hither cluster: managers, metadata servers and the zones its chunkservers stand in.",
    validation = Rule::new("self.metadata.name.size() <= 30").message("the name is part of others: at most 30 characters"),
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')").message("the name becomes a DNS name: lower-case letters, digits and -, a letter first"),
    validation = Rule::new("!has(oldSelf.status) || !has(oldSelf.status.clusterId) || has(self.spec.defaultClass) == has(oldSelf.spec.defaultClass) && (!has(self.spec.defaultClass) || self.spec.defaultClass == oldSelf.spec.defaultClass)").message("defaultClass only says how a new cluster begins: change its class with a ChunkStorageClass named default"),
    printcolumn(json_path = r#".status.conditions[?(@.type=="Ready")].status"#, name = "Ready", type_ = "string"),
    printcolumn(json_path = ".status.health", name = "Health", type_ = "string"),
    printcolumn(json_path = ".status.zonesReady", name = "Zones", type_ = "string"),
    printcolumn(json_path = ".status.chunkserversReady", name = "Chunkservers", type_ = "string"),
    printcolumn(json_path = ".status.groupsWhole", name = "Groups", type_ = "string"),
    printcolumn(json_path = r#".status.conditions[?(@.type=="Ready")].message"#, name = "Message", type_ = "string", priority = 1),
    printcolumn(json_path = ".status.clusterId", name = "Cluster-Id", type_ = "string", priority = 1),
    printcolumn(json_path = ".metadata.creationTimestamp", name = "Age", type_ = "date")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.metadataStore.embedded) || !has(self.managers) || !has(self.managers.replicas) || self.managers.replicas == 1")
        .message("the embedded metadata store has one manager: leave managers.replicas out, or use etcd"),
    validation = Rule::new("!has(self.metadataStore.embedded) || !has(self.metadataServers)")
        .message("the embedded metadata store has its metadata rank in the manager and no standbys: leave metadataServers out, or use etcd"),
    validation = Rule::new("!has(self.distances) || self.distances.all(d, self.zones.exists(z, z.name == d.from) && self.zones.exists(z, z.name == d.to))")
        .message("distances are between zones of the cluster")
)]
pub struct HitherClusterSpec {
    /// Image of the servers; absent: that of the operator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512))]
    pub image: Option<String>,
    /// When the image is pulled: `Always`, `IfNotPresent` or `Never`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self in ['Always', 'IfNotPresent', 'Never']").message("imagePullPolicy is Always, IfNotPresent or Never"))]
    #[schemars(length(max = 16))]
    pub image_pull_policy: Option<String>,
    /// Secrets for the registry of the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub image_pull_secrets: Vec<LocalObjectReference>,
    /// The zones, by the value of the nodes' label `topology.kubernetes.io/zone`.
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".to_string()]))]
    #[x_kube(validation = Rule::new("self.all(z, !has(z.letter) || self.filter(y, has(y.letter) && y.letter == z.letter).size() == 1)").message("two zones have the same letter"))]
    pub zones: Vec<Zone>,
    /// Distances between zones, for the order in which copies are read and made; those that are not
    /// named are 1 apart, a zone is 0 from itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 120))]
    pub distances: Vec<Distance>,
    /// Where the metadata is.
    pub metadata_store: MetadataStore,
    /// The managers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managers: Option<Managers>,
    /// The metadata servers; only with etcd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata_servers: Option<MetadataServers>,
    /// Definition of the storage class of a new cluster's root directory, such as
    /// `zone=a,zone=b`; absent: two copies anywhere. It can be changed until the cluster has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub default_class: Option<String>,
    /// Seconds a mount's session lives without renewal.
    #[serde(default = "session_lease")]
    #[schemars(range(min = 3, max = 300))]
    pub session_lease_seconds: i32,
    /// Seconds a chunkserver may be away before its copies are made elsewhere.
    #[serde(default = "repair_after")]
    #[schemars(range(min = 10, max = 86_400))]
    pub repair_after_seconds: i32,
}

/// A zone of the cluster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Zone {
    /// Value of the nodes' label `topology.kubernetes.io/zone`; chunkservers there carry the label
    /// `zone=NAME`.
    #[schemars(
        length(min = 1, max = 63),
        regex(pattern = "^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
    )]
    pub name: String,
    /// Region of the zone; chunkservers there carry the label `region=NAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 1, max = 63),
        regex(pattern = "^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
    )]
    pub region: Option<String>,
    /// A letter that all chunkservers of the zone carry, for short label expressions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1), regex(pattern = "^[A-Z]$"))]
    pub letter: Option<String>,
}

/// A distance between two zones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Distance {
    /// One zone.
    #[schemars(length(min = 1, max = 63))]
    pub from: String,
    /// The other.
    #[schemars(length(min = 1, max = 63))]
    pub to: String,
    /// 0 is the same place, more is farther.
    #[schemars(range(min = 0, max = 1000))]
    pub distance: i32,
}

/// Where the metadata is: exactly one of the fields, for good.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("[has(self.embedded), has(self.managedEtcd), has(self.etcd)].filter(x, x).size() == 1")
        .message("give exactly one of embedded, managedEtcd and etcd"),
    validation = Rule::new("has(self.embedded) == has(oldSelf.embedded) && has(self.managedEtcd) == has(oldSelf.managedEtcd)")
        .message("the kind of metadata store cannot be changed: dump the metadata and load it into a new cluster")
)]
pub struct MetadataStore {
    /// In the one manager, on its own volume: the loss of its zone stops the cluster until the zone
    /// is back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedded: Option<EmbeddedStore>,
    /// In an etcd of three members that the operator runs over the zones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed_etcd: Option<ManagedEtcd>,
    /// In an etcd that exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd: Option<EtcdStore>,
    /// Dumps of the metadata, at given times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dumps: Option<Dumps>,
}

/// Dumps of the metadata, written by `hither meta dump` and read by `hither meta load`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Dumps {
    /// When: in the form of a CronJob, such as `0 * * * *` for every hour.
    #[schemars(length(min = 1, max = 100))]
    #[x_kube(validation = Rule::new("self.matches('^(@(hourly|daily|weekly|monthly)|[^ ]+( [^ ]+){4})$')").message("a schedule has five fields (minute, hour, day, month, weekday), or is @hourly, @daily, @weekly or @monthly"))]
    pub schedule: String,
    /// The claim they are written to; it is yours, and stays.
    #[schemars(length(min = 1, max = 253))]
    pub claim_name: String,
    /// How many stay.
    #[serde(default = "dumps_kept")]
    #[schemars(range(min = 1, max = 1000))]
    pub keep: i32,
}

/// The embedded metadata store.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EmbeddedStore {
    /// Its volume.
    #[x_kube(validation = Rule::new("!has(self.hostPath)").message("the metadata has to follow its pod: give claim, or emptyDir for a test"))]
    #[x_kube(validation = Rule::new("!has(self.claim) || self.claim.disks == 1").message("the metadata is on one volume: leave disks out"))]
    pub storage: Storage,
}

/// An etcd that the operator runs: three members, one in each zone as far as there are zones, that
/// talk with TLS among themselves and with the servers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ManagedEtcd {
    /// The volume of each member. With `emptyDir` a member whose pod goes has lost its data, and two
    /// at once are the loss of all metadata: for tests only.
    #[x_kube(validation = Rule::new("!has(self.hostPath)").message("a member has to keep its volume: give claim, or emptyDir for a test"))]
    #[x_kube(validation = Rule::new("!has(self.claim) || self.claim.disks == 1").message("a member is on one volume: leave disks out"))]
    pub storage: Storage,
    /// How their pods run.
    #[serde(default)]
    pub pods: PodSettings,
}

/// An etcd that exists; nothing else may use keys that begin with `hither/`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.endpoints.all(e, e.startsWith('https://') == has(self.tls))")
        .message("endpoints begin with https:// if tls is given, and with http:// if not")
)]
pub struct EtcdStore {
    /// Addresses of its members, `http://HOST:PORT`, with `tls` `https://HOST:PORT`.
    #[schemars(length(min = 1, max = 9), inner(length(max = 300)))]
    #[x_kube(validation = Rule::new("self.all(e, e.matches('^https?://[^/ ,:]+:[0-9]+$'))").message("an endpoint is http://HOST:PORT or https://HOST:PORT"))]
    pub endpoints: Vec<String>,
    /// TLS with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<EtcdTls>,
}

/// Certificates for TLS with an etcd that exists.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdTls {
    /// Secret with `ca.crt`, and, if etcd asks for a certificate, `tls.crt` and `tls.key`; when it
    /// changes, managers and metadata servers are replaced one after the other.
    #[schemars(length(min = 1, max = 253))]
    pub secret_name: String,
}

/// The managers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Managers {
    /// Managers, one of which leads; absent: with etcd one for each zone and 2 to 3 in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 5))]
    pub replicas: Option<i32>,
    /// How their pods run.
    #[serde(default)]
    pub pods: PodSettings,
}

/// The metadata servers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct MetadataServers {
    /// Metadata servers beside the active one, that take over when it is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 4))]
    pub standbys: Option<i32>,
    /// How their pods run.
    #[serde(default)]
    pub pods: PodSettings,
}

/// What the operator has seen.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct HitherClusterStatus {
    /// Generation of the spec this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`, `Progressing`, `Degraded`, `DataAtRisk`, `ZoneLossTolerated`, `Upgrading`,
    /// `Accepted`, `DeletionBlocked`, `MountsOutdated`; with `managedEtcd` also `MetadataQuorumLost`,
    /// `MetadataMembers` and `MetadataSpaceLow`.
    #[serde(default)]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_string()]))]
    pub conditions: Vec<Condition>,
    /// Random id of the cluster, made when it began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// Address at which a manager is found inside Kubernetes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// `Healthy`, `Repairing`, `AtRisk` or `Unknown`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<String>,
    /// Zones whose chunkservers are all ready, of all zones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zones_ready: Option<String>,
    /// Chunkservers that are ready, of those wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunkservers_ready: Option<String>,
    /// Placement groups that are whole, of all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups_whole: Option<String>,
    /// Placement groups by health.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<GroupHealth>,
    /// When the last of the scheduled dumps succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_dump: Option<String>,
    /// The members of a `managedEtcd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd: Option<EtcdStatus>,
    /// Each zone.
    #[serde(default)]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".to_string()]))]
    pub zones: Vec<ZoneStatus>,
}

/// A managed etcd as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdStatus {
    /// Members that vote and answer, of three.
    pub members: String,
    /// Pod of the member that leads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
    /// Bytes of the largest member's file, in steps of a MiB.
    pub file_bytes: i64,
    /// Bytes of it that hold something, in steps of a MiB.
    pub used_bytes: i64,
    /// Bytes at which etcd takes no more changes.
    pub quota_bytes: i64,
    /// When the certificates of members and servers are renewed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificates_renewed_at: Option<String>,
}

/// Placement groups by health.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GroupHealth {
    /// All of them.
    pub total: i32,
    /// All members have every acknowledged byte.
    pub whole: i32,
    /// A member is fetching what it lacks.
    pub filling: i32,
    /// A member is away.
    pub undergoal: i32,
    /// Not whole, and one member only has everything.
    pub one_copy: i32,
}

/// A zone as it is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ZoneStatus {
    /// Name of the zone.
    pub name: String,
    /// Chunkservers the pools ask for.
    pub chunkservers: i32,
    /// Those whose pods are ready.
    pub ready: i32,
    /// Those the manager hears of.
    pub up: i32,
    /// Bytes of their disks.
    pub total_bytes: i64,
    /// Free bytes of their disks.
    pub free_bytes: i64,
}

fn dumps_kept() -> i32 {
    24
}

fn session_lease() -> i32 {
    15
}

fn repair_after() -> i32 {
    600
}
