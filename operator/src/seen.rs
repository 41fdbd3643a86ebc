//! What there is: the cluster as Kubernetes and its manager show it. Pure.

use std::collections::BTreeMap;

use hither_proto::manager::ClusterStatus;
use hither_proto::map::{Chunkserver, MemberState, ServerState};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use crate::api::GroupHealth;
use crate::desired::COMPONENT_LABEL;
use crate::etcd;

/// What was seen of one cluster.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// StatefulSets with the cluster's label.
    pub sets: Vec<StatefulSet>,
    /// Pods with the cluster's label.
    pub pods: Vec<Pod>,
    /// What the manager says; `None` when none answers.
    pub status: Option<ClusterStatus>,
    /// Why there is no status.
    pub silence: Option<String>,
    /// The members of a managed etcd.
    pub etcd: Option<etcd::plan::World>,
    /// When its certificates are renewed.
    pub certificates_renewed_at: Option<jiff::Timestamp>,
    /// When the last scheduled dump of the metadata succeeded.
    pub last_dump: Option<String>,
}

impl Seen {
    /// The manager's chunkservers; none when it does not answer.
    #[must_use]
    pub fn servers(&self) -> &[Chunkserver] {
        let map = self.status.as_ref().and_then(|status| status.map.as_ref());
        map.map_or(&[], |map| &map.chunkservers)
    }

    /// The chunkserver that runs in a pod, by its address.
    #[must_use]
    pub fn server_of(&self, pod: &Pod) -> Option<&Chunkserver> {
        let ip = pod.status.as_ref()?.pod_ip.as_deref()?;
        self.servers().iter().find(|server| host(server) == ip)
    }

    /// A set by name.
    #[must_use]
    pub fn set(&self, name: &str) -> Option<&StatefulSet> {
        self.sets.iter().find(|set| set.name_any() == name)
    }

    /// The pods of a set, by ordinal.
    #[must_use]
    pub fn pods_of(&self, set: &str) -> BTreeMap<i32, &Pod> {
        let of = |pod: &'_ Pod| {
            let name = pod.name_any();
            let ordinal = name.strip_prefix(set)?.strip_prefix('-')?.parse().ok()?;
            Some(ordinal)
        };
        self.pods
            .iter()
            .filter_map(|pod| Some((of(pod)?, pod)))
            .collect()
    }

    /// Placement groups by health; `None` when the manager does not answer.
    #[must_use]
    pub fn groups(&self) -> Option<GroupHealth> {
        let status = self.status.as_ref()?;
        let mut health = GroupHealth::default();
        for group in &status.groups {
            let whole = group.filling == 0 && group.lagging == 0;
            health.total += 1;
            health.whole += i32::from(whole);
            health.filling += i32::from(group.filling > 0);
            health.undergoal += i32::from(group.lagging > 0);
            health.one_copy += i32::from(!whole && group.in_sync <= 1);
        }
        Some(health)
    }

    /// Zones without which every group would still have a member with everything.
    #[must_use]
    pub fn readable_without(&self, zone: &str) -> bool {
        let Some(map) = self.status.as_ref().and_then(|status| status.map.as_ref()) else {
            return false;
        };
        let zones: BTreeMap<u64, &str> = map
            .chunkservers
            .iter()
            .map(|server| (server.id, server.zone.as_str()))
            .collect();
        map.groups.iter().all(|group| {
            group.members.iter().any(|member| {
                member.state == i32::from(MemberState::InSync)
                    && zones.get(&member.server).is_some_and(|of| *of != zone)
            })
        })
    }

    /// Groups that have a member on a server.
    #[must_use]
    pub fn groups_on(&self, server: u64) -> usize {
        let map = self.status.as_ref().and_then(|status| status.map.as_ref());
        map.map_or(0, |map| {
            let here = |group: &&hither_proto::map::Group| {
                group.members.iter().any(|member| member.server == server)
            };
            map.groups.iter().filter(here).count()
        })
    }

    /// Whether all copies are where they should be and all servers up, as far as is known.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.groups()
            .is_some_and(|groups| groups.whole == groups.total)
            && self.servers().iter().all(is_up)
    }
}

/// Whether the manager hears of it.
#[must_use]
pub fn is_up(server: &Chunkserver) -> bool {
    server.state != i32::from(ServerState::Down)
}

/// The host of a chunkserver's first address, without brackets.
#[must_use]
pub fn host(server: &Chunkserver) -> &str {
    let address = server.addresses.first().map_or("", String::as_str);
    host_of(address)
}

/// The host of an address, without brackets.
#[must_use]
pub fn host_of(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']')
}

/// Whether a pod is ready and not about to end.
#[must_use]
pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    pod.metadata.deletion_timestamp.is_none()
        && conditions.is_some_and(|all| {
            all.iter()
                .any(|one| one.type_ == "Ready" && one.status == "True")
        })
}

/// Whether a container of a pod runs.
#[must_use]
pub fn container_runs(pod: &Pod, name: &str) -> bool {
    let status = pod.status.as_ref();
    let all = status.and_then(|status| status.container_statuses.as_ref());
    all.into_iter().flatten().any(|container| {
        let state = container.state.as_ref();
        container.name == name && state.is_some_and(|state| state.running.is_some())
    })
}

/// A pod's component.
#[must_use]
pub fn component(pod: &Pod) -> &str {
    pod.labels().get(COMPONENT_LABEL).map_or("", String::as_str)
}
