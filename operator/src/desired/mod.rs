//! What objects a cluster, its pools and its classes ask for: a pure function.

mod chunkservers;
mod classes;
mod disruption;
mod managers;
mod metadata;
mod names;
mod network;
mod object;
mod pod;

use std::collections::BTreeMap;

pub use chunkservers::{pool_zones, settings_file, wanted_labels};
pub use classes::{
    class_kubernetes_name, is_same_storage_class, storage_class, volume_attributes_class,
};
pub use disruption::Disruption;
pub use managers::{manager_address, replicas as manager_replicas};
pub use metadata::standbys;
pub use names::{
    CLUSTER_LABEL, COMPONENT_LABEL, Component, MANAGED_BY, OWNER_LABEL, POOL_LABEL, ZONE_LABEL,
    csi_secret, manager_service, manager_set, metadata_set, pool_set, selector,
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
}

/// The objects of the cluster's namespace, in the order in which they are applied.
///
/// Pools that were not accepted do not belong into `pools`.
#[must_use]
pub fn desired(cluster: &HitherCluster, pools: &[ChunkserverPool], world: &World) -> Vec<Object> {
    let mut objects = network::services(cluster);
    objects.extend(network::policies(cluster));
    objects.extend(network::csi_secret_objects(cluster, world));
    objects.extend(managers::objects(cluster, world));
    objects.extend(metadata::objects(cluster, world));
    for pool in pools {
        for zone in pool_zones(cluster, pool) {
            objects.extend(chunkservers::objects(cluster, pool, zone, world));
        }
    }
    objects.extend(disruption::objects(cluster, world));
    objects
}

#[cfg(test)]
mod tests;
