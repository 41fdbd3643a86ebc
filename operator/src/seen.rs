//! What there is: the cluster as Kubernetes and its manager show it. Pure.

use std::collections::{BTreeMap, BTreeSet};

use hither_clustermap::{count_groups, groups_in_use, lacks_members};
use hither_proto::manager::ClusterStatus;
use hither_proto::map::{Chunkserver, MemberState, ServerState};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use crate::api::GroupHealth;
use crate::desired::{COMPONENT_LABEL, ZONE_KEY};
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
    /// Chunkservers that the pools' statuses say the operator empties.
    pub drained: BTreeSet<u64>,
    /// The members of a managed etcd.
    pub etcd: Option<etcd::plan::World>,
    /// When its certificates are renewed.
    pub certificates_renewed_at: Option<jiff::Timestamp>,
    /// When the last scheduled dump of the metadata succeeded.
    pub last_dump: Option<String>,
    /// Nodes whose mounters are of an older template, if that is known.
    pub outdated_mounters: Option<Vec<String>>,
}

impl Seen {
    /// The manager's chunkservers; none when it does not answer.
    #[must_use]
    pub fn servers(&self) -> &[Chunkserver] {
        let map = self.status.as_ref().and_then(|status| status.map.as_ref());
        map.map_or(&[], |map| &map.chunkservers)
    }

    /// The chunkserver that runs in a pod: the one that is up at its address and names no other
    /// pod. Addresses are used again, so one that is down is not it, and of two none.
    #[must_use]
    pub fn server_of(&self, pod: &Pod) -> Option<&Chunkserver> {
        let ip = pod.status.as_ref()?.pod_ip.as_deref()?;
        let name = pod.name_any();
        let mut here = self.servers().iter().filter(|server| {
            is_up(server) && host(server) == ip && (server.name.is_empty() || server.name == name)
        });
        here.next().filter(|_| here.next().is_none())
    }

    /// The chunkservers that ran in a pod of this name last, whether they are up or not.
    pub fn servers_named(&self, pod: &str) -> impl Iterator<Item = &Chunkserver> {
        let named = move |server: &&Chunkserver| server.name == pod;
        self.servers().iter().filter(named)
    }

    /// Chunkservers of which nobody can tell in which pod they run or ran.
    pub fn unplaced(&self) -> impl Iterator<Item = &Chunkserver> {
        self.servers().iter().filter(|server| {
            let here = |pod: &&Pod| self.server_of(pod).is_some_and(|of| of.id == server.id);
            server.name.is_empty() && !self.pods.iter().any(|pod| here(&pod))
        })
    }

    /// Whether another chunkserver runs in the pod of one that is down: its disks are gone, or on
    /// another node.
    #[must_use]
    pub fn is_replaced(&self, server: &Chunkserver) -> bool {
        !is_up(server) && !server.name.is_empty() && self.servers_named(&server.name).any(is_up)
    }

    /// A set by name.
    #[must_use]
    pub fn set(&self, name: &str) -> Option<&StatefulSet> {
        self.sets.iter().find(|set| set.name_any() == name)
    }

    /// The pods of a set, by ordinal.
    #[must_use]
    pub fn pods_of(&self, set: &str) -> BTreeMap<i32, &Pod> {
        self.pods
            .iter()
            .filter_map(|pod| Some((ordinal(set, &pod.name_any())?, pod)))
            .collect()
    }

    /// Placement groups by health; `None` when the manager does not answer.
    #[must_use]
    pub fn groups(&self) -> Option<GroupHealth> {
        let counts = count_groups(self.status.as_ref()?);
        let number = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
        Some(GroupHealth {
            total: number(counts.total),
            whole: number(counts.whole),
            filling: number(counts.filling),
            undergoal: number(counts.undergoal),
            one_copy: number(counts.one_copy),
        })
    }

    /// Groups that have fewer members than their classes ask for.
    #[must_use]
    pub fn short(&self) -> usize {
        let Some(status) = &self.status else {
            return 0;
        };
        let in_use = groups_in_use(status);
        let groups = status.groups.iter();
        groups
            .filter(|group| lacks_members(group) && in_use.contains(&group.group))
            .count()
    }

    /// Groups of which no member with everything is up: nothing of them can be read.
    #[must_use]
    pub fn unreadable(&self) -> usize {
        let up: BTreeSet<u64> = self
            .servers()
            .iter()
            .filter(|server| is_up(server))
            .map(|server| server.id)
            .collect();
        let map = self.status.as_ref().and_then(|status| status.map.as_ref());
        let groups = map.map_or(&[][..], |map| &map.groups);
        let dead = |group: &&hither_proto::map::Group| {
            let serves = |member: &hither_proto::map::Member| {
                is_in_sync(member) && up.contains(&member.server)
            };
            !group.members.iter().any(serves)
        };
        groups.iter().filter(dead).count()
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
                is_in_sync(member) && zones.get(&member.server).is_some_and(|of| *of != zone)
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

    /// Chunkservers that are down and of which groups have members.
    pub fn missing(&self) -> impl Iterator<Item = &Chunkserver> {
        let missing = |server: &&Chunkserver| !is_up(server) && self.groups_on(server.id) > 0;
        self.servers().iter().filter(missing)
    }

    /// Whether all copies are where they should be, and all servers that have any up, as far as is
    /// known.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.groups()
            .is_some_and(|groups| groups.whole == groups.total)
            && self.missing().next().is_none()
    }

    /// Whether nothing is missing but what is on these servers, and all of that is elsewhere too.
    #[must_use]
    pub fn is_clean_without(&self, servers: &[u64]) -> bool {
        let Some(map) = self.status.as_ref().and_then(|status| status.map.as_ref()) else {
            return false;
        };
        let on = |member: &hither_proto::map::Member| servers.contains(&member.server);
        let mut members = map.groups.iter().flat_map(|group| &group.members);
        let mut missing = self.missing();
        self.short() == 0
            && members.all(|member| on(member) || is_in_sync(member))
            && missing.all(|server| servers.contains(&server.id))
            && map.groups.iter().all(|group| {
                let mut members = group.members.iter();
                members.any(|member| !on(member) && is_in_sync(member))
            })
    }

    /// The zone of a pod's node: Kubernetes says it of the pod (from 1.35 on), or a chunkserver is on
    /// the same node.
    #[must_use]
    pub fn zone_of<'a>(&'a self, pod: &'a Pod) -> Option<&'a str> {
        let told = pod.labels().get(ZONE_KEY).map(String::as_str);
        told.or_else(|| {
            let node = pod.spec.as_ref()?.node_name.as_deref()?;
            let mut servers = self.servers().iter();
            let beside = servers.find(|server| is_up(server) && server.node == node)?;
            Some(beside.zone.as_str())
        })
    }

    /// Whether rank 0 is served by a pod that is ready.
    #[must_use]
    pub fn is_rank_served(&self) -> bool {
        let map = self.status.as_ref().and_then(|status| status.map.as_ref());
        let ranks = map.map_or(&[][..], |map| &map.ranks);
        let address = ranks.iter().find(|rank| rank.rank == 0);
        address.is_some_and(|rank| {
            let serves = |pod: &&Pod| is_ready(pod) && is_at(pod, &rank.address);
            self.pods.iter().any(|pod| serves(&pod))
        })
    }
}

/// The number of a pod of a set, from its name.
#[must_use]
pub fn ordinal(set: &str, pod: &str) -> Option<i32> {
    pod.strip_prefix(set)?.strip_prefix('-')?.parse().ok()
}

/// Whether a pod has the host of this address.
#[must_use]
pub fn is_at(pod: &Pod, address: &str) -> bool {
    let status = pod.status.as_ref();
    let ip = status.and_then(|status| status.pod_ip.as_deref());
    ip.is_some_and(|ip| ip == host_of(address))
}

fn is_in_sync(member: &hither_proto::map::Member) -> bool {
    member.state == i32::from(MemberState::InSync)
}

/// A chunkserver for people: its id, its zone and its pod.
#[must_use]
pub fn title(server: &Chunkserver) -> String {
    if server.name.is_empty() {
        format!("{} in {}", server.id, server.zone)
    } else {
        format!("{} in {} ({})", server.id, server.zone, server.name)
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
