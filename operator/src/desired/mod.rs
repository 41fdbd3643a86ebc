//! What objects a cluster, its pools and its classes ask for: a pure function.

mod chunkservers;
mod classes;
mod disruption;
mod dumps;
mod etcd;
mod managers;
mod metadata;
mod names;
mod network;
mod object;
mod pod;
mod store;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

pub use chunkservers::{pool_zones, settings_file, wanted_labels};
pub use classes::{
    class_kubernetes_name, is_same_storage_class, storage_class, volume_attributes_class,
};
pub use disruption::Disruption;
pub use etcd::{
    certificate_names, certificate_secrets, certificates_of, etcd_state_object, member_names,
    members_host, peers_domain,
};
pub use managers::{manager_address, replicas as manager_replicas};
pub use metadata::standbys;
pub use names::{
    CLUSTER_LABEL, COMPONENT_LABEL, Component, MANAGED_BY, OWNER_LABEL, POOL_LABEL, ZONE_LABEL,
    csi_secret, dump_job, etcd_authority_secret, etcd_client_secret, etcd_member_secret,
    etcd_peers, etcd_set, etcd_state, manager_service, manager_set, metadata_set, pool_set,
    selector, short_hash,
};
pub use object::Object;
pub use pod::{ZONE_KEY, zones_of};

use crate::api::{ChunkserverPool, HitherCluster};

/// What is known besides the custom resources.
#[derive(Debug, Clone, Default)]
pub struct World {
    /// Image of servers whose cluster names none.
    pub image: String,
    /// The cluster's random id, once a manager has told it.
    pub cluster_id: Option<String>,
    /// Namespace and name of the service account that provisions volumes, if there is a driver.
    pub provisioner: Option<(String, String)>,
    /// Replicas of StatefulSets that are not simply as wanted: those that are being made smaller.
    pub replicas: BTreeMap<String, i32>,
    /// Which pods may be evicted now.
    pub disruption: Disruption,
    /// Zones in which the managers may run by what is there.
    pub manager_zones: Option<Vec<String>>,
    /// Whether a member of a managed etcd may be evicted now.
    pub etcd_is_whole: bool,
    /// What stands for the certificates that managers and metadata servers show etcd, and trust.
    pub certificates: Option<String>,
    /// What stands for the authorities that the members of a managed etcd trust.
    pub trust: Option<String>,
    /// Namespace of the operator, which talks with the members of a managed etcd.
    pub operator: String,
    /// Sizes of claims that StatefulSets were made with: they are for good.
    pub claim_sizes: BTreeMap<String, Quantity>,
}

/// The objects of the cluster's namespace, in the order in which they are applied.
///
/// Pools that were not accepted do not belong into `pools`.
#[must_use]
pub fn desired(cluster: &HitherCluster, pools: &[ChunkserverPool], world: &World) -> Vec<Object> {
    let mut objects = network::services(cluster);
    objects.extend(network::policies(cluster, world));
    objects.extend(network::csi_secret_objects(cluster, world));
    objects.extend(etcd::objects(cluster, world));
    objects.extend(managers::objects(cluster, world));
    objects.extend(metadata::objects(cluster, world));
    for pool in pools {
        for zone in pool_zones(cluster, pool) {
            objects.extend(chunkservers::objects(cluster, pool, zone, world));
        }
    }
    objects.extend(disruption::objects(cluster, world));
    objects.extend(dumps::objects(cluster, world));
    objects
}

#[cfg(test)]
mod tests;
