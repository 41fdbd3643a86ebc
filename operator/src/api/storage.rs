//! Where a server keeps what it stores.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

/// Where a server keeps what it stores: exactly one of the fields.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("[has(self.claim), has(self.hostPath), has(self.emptyDir)].filter(x, x).size() == 1")
        .message("give exactly one of claim, hostPath and emptyDir"),
    validation = Rule::new("has(self.claim) == has(oldSelf.claim) && has(self.hostPath) == has(oldSelf.hostPath) && has(self.emptyDir) == has(oldSelf.emptyDir)")
        .message("the kind of storage cannot be changed: make a new pool, and delete this one when it holds nothing")
)]
pub struct Storage {
    /// A claim for each disk, made by the StatefulSet and kept when the pod or the set goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<ClaimStorage>,
    /// Directories of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<HostPathStorage>,
    /// Gone with the pod: for tests only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub empty_dir: Option<EmptyDirStorage>,
}

/// Persistent volume claims.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("isQuantity(string(self.size))").message("size is a quantity such as 100Gi"),
    validation = Rule::new("isQuantity(string(self.size)) && quantity(string(self.size)).compareTo(quantity(string(oldSelf.size))) >= 0")
        .message("claims can be made larger, never smaller: make a new pool, and delete this one when it holds nothing"),
    validation = Rule::new("has(self.storageClassName) == has(oldSelf.storageClassName) && (!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName) && self.disks == oldSelf.disks")
        .message("the class and the number of claims cannot be changed in place: make a new pool, and delete this one when it holds nothing")
)]
pub struct ClaimStorage {
    /// Kubernetes storage class; absent: the default one. Its volumes have to be bound when the pod
    /// is scheduled (`WaitForFirstConsumer`), or they may be in another zone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub storage_class_name: Option<String>,
    /// Size of each claim. It can be raised where the Kubernetes storage class allows expansion.
    pub size: Quantity,
    /// Claims, each one disk of the server.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 16))]
    pub disks: i32,
}

/// Directories of the node; servers of the pool then never share a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct HostPathStorage {
    /// Directories that exist on every node of the pool, each one disk of the server.
    #[schemars(
        length(min = 1, max = 16),
        inner(length(max = 512), regex(pattern = r"^/[^:]+$"))
    )]
    #[x_kube(validation = Rule::new("self == oldSelf").message("paths cannot be changed: make a new pool, and delete this one when it holds nothing"))]
    pub paths: Vec<String>,
}

/// Storage that is gone with the pod.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EmptyDirStorage {
    /// Bytes at which the pod is evicted; absent: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_limit: Option<Quantity>,
}

impl Storage {
    /// Directories of the disks inside the container.
    #[must_use]
    pub fn disks(&self) -> usize {
        let claims = |claim: &ClaimStorage| usize::try_from(claim.disks).unwrap_or(1);
        match (&self.claim, &self.host_path) {
            (Some(claim), _) => claims(claim),
            (_, Some(host)) => host.paths.len(),
            _ => 1,
        }
    }
}

fn one() -> i32 {
    1
}
