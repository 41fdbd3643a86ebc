//! The custom resources: what users write and what the operator answers.
//!
//! The schema that the API server enforces is generated from these types; what it cannot check
//! (labels and definitions in full) the operator checks with the `labels` crate and tells in the
//! condition `Accepted`.
#![allow(
    unreachable_pub,
    reason = "the derive for rules repeats each type inside a function, where nothing is reachable"
)]

mod class;
mod cluster;
mod pods;
mod pool;
mod storage;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;

pub use class::{
    ChunkStorageClass, ChunkStorageClassSpec, ChunkStorageClassStatus, DefinitionMode,
    ReclaimPolicy, VolumeBinding, VolumeDefaults,
};
pub use cluster::{
    Distance, Dumps, EmbeddedStore, EtcdStatus, EtcdStore, EtcdTls, GroupHealth, HitherCluster,
    HitherClusterSpec, HitherClusterStatus, ManagedEtcd, Managers, MetadataServers, MetadataStore,
    Zone, ZoneStatus,
};
pub use pods::PodSettings;
pub use pool::{
    ChunkserverPool, ChunkserverPoolSpec, ChunkserverPoolStatus, ChunkserverSettings, DrainStatus,
};
pub use storage::{ClaimStorage, EmptyDirStorage, HostPathStorage, Storage};

/// API group of the custom resources, prefix of labels and annotations.
pub const GROUP: &str = "hither.dev";
/// Name of the CSI driver.
pub const DRIVER: &str = "csi.hither.dev";

/// The definitions of all kinds, as they are installed.
#[must_use]
pub fn definitions() -> Vec<CustomResourceDefinition> {
    vec![
        HitherCluster::crd(),
        ChunkserverPool::crd(),
        ChunkStorageClass::crd(),
    ]
}
