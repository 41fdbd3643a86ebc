//! Which pod is replaced next when a template has changed. Pure.

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use crate::desired::Component;
use crate::etcd::plan::{self as etcd_plan, Place};
use crate::seen::{Seen, component, host_of, is_ready};

/// How far a change of templates has come.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rollout {
    /// Pods of an old template.
    pub outdated: Vec<String>,
    /// The one to end now.
    pub replace: Option<String>,
    /// Why none is, while there are outdated ones.
    pub waiting: Option<String>,
}

/// Decides it: members of etcd, managers, then standby metadata servers, then the active one, then chunkservers zone
/// by zone in the given order; one pod at a time, and a chunkserver only while all copies are there.
#[must_use]
pub fn plan(seen: &Seen, zones: &[String]) -> Rollout {
    let mut outdated: Vec<&Pod> = seen
        .pods
        .iter()
        .filter(|pod| pod.metadata.deletion_timestamp.is_none() && is_outdated(seen, pod))
        .collect();
    outdated.sort_by_key(|pod| turn(seen, zones, pod));
    let mut rollout = Rollout {
        outdated: outdated.iter().map(|pod| pod.name_any()).collect(),
        ..Rollout::default()
    };
    let Some(first) = outdated.first() else {
        return rollout;
    };
    // What does not work cannot get worse, and may be why nothing else goes on.
    if let Some(broken) = outdated
        .iter()
        .find(|pod| !is_ready(pod) && !is_standby(pod) && may_be_ended(seen, pod))
    {
        rollout.replace = Some(broken.name_any());
        return rollout;
    }
    match obstacle(seen, first) {
        Some(why) => rollout.waiting = Some(why),
        None => rollout.replace = Some(first.name_any()),
    }
    rollout
}

/// A member of etcd is ended only while the others agree without it.
fn may_be_ended(seen: &Seen, pod: &Pod) -> bool {
    let Some(etcd) = seen.etcd.as_ref() else {
        return true;
    };
    if component(pod) != Component::Etcd.as_str() {
        return true;
    }
    let name = pod.name_any();
    let answers = |place: &Place| place.said.is_some();
    let others_answer = etcd
        .places
        .iter()
        .all(|place| place.pod == name || answers(place));
    !etcd.established || etcd.members.is_some() && others_answer
}

fn obstacle(seen: &Seen, next: &Pod) -> Option<String> {
    for set in &seen.sets {
        let wanted = set
            .spec
            .as_ref()
            .and_then(|spec| spec.replicas)
            .unwrap_or(0);
        let pods = seen.pods_of(&set.name_any());
        let there = pods
            .values()
            .filter(|pod| is_ready(pod) || is_standby(pod))
            .count();
        if i32::try_from(there).unwrap_or(i32::MAX) < wanted {
            return Some(format!(
                "{}: {there} of {wanted} pods are ready",
                set.name_any()
            ));
        }
    }
    if let Some(etcd) = &seen.etcd
        && !etcd_plan::is_whole(etcd)
    {
        return Some(format!(
            "{} of {} members of etcd vote",
            etcd_plan::voters(etcd),
            etcd.places.len()
        ));
    }
    if [Component::Manager.as_str(), Component::Etcd.as_str()].contains(&component(next)) {
        return None;
    }
    let chunkservers = seen
        .pods
        .iter()
        .filter(|pod| component(pod) == Component::Chunkserver.as_str() && is_ready(pod));
    for pod in chunkservers {
        // It may listen before the manager knows what it missed.
        if seen.server_of(pod).is_none() {
            return Some(format!(
                "{}: the manager does not know it yet",
                pod.name_any()
            ));
        }
    }
    let Some(groups) = seen.groups() else {
        return Some("no manager answers".into());
    };
    if component(next) == Component::Chunkserver.as_str() && !seen.is_clean() {
        let (whole, total) = (groups.whole, groups.total);
        return Some(format!("{whole} of {total} placement groups are whole"));
    }
    None
}

/// The order in which pods are replaced.
fn turn(seen: &Seen, zones: &[String], pod: &Pod) -> (u8, usize, String) {
    let name = pod.name_any();
    let address = pod
        .status
        .as_ref()
        .and_then(|status| status.pod_ip.as_deref());
    match component(pod) {
        "etcd" => {
            let leader = seen.etcd.as_ref().and_then(etcd_plan::leader);
            (0, usize::from(leader.as_ref() == Some(&name)), name)
        }
        "manager" => {
            let leader = seen.status.as_ref().map_or("", |status| &status.leader);
            let leads = address == Some(host_of(leader));
            (1, usize::from(leads), name)
        }
        "mds" => {
            let map = seen.status.as_ref().and_then(|status| status.map.as_ref());
            let active = map.is_some_and(|map| {
                map.ranks
                    .iter()
                    .any(|rank| address == Some(host_of(&rank.address)))
            });
            (2, usize::from(active), name)
        }
        _ => {
            let zone = seen.server_of(pod).map(|server| &server.zone);
            let at = zones.iter().position(|known| Some(known) == zone);
            (3, at.unwrap_or(zones.len()), name)
        }
    }
}

/// A metadata server says nothing of whether it is ready while it stands by.
fn is_standby(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    component(pod) == Component::Metadata.as_str() && phase == Some("Running")
}

fn is_outdated(seen: &Seen, pod: &Pod) -> bool {
    let of = |set: &&StatefulSet| {
        seen.pods_of(&set.name_any())
            .values()
            .any(|one| one.uid() == pod.uid())
    };
    let Some(set) = seen.sets.iter().find(of) else {
        return false;
    };
    let status = set.status.as_ref();
    // Before the set's controller has seen the change it knows no new revision.
    let current = status.and_then(|s| s.observed_generation) == set.metadata.generation;
    let revision = status.and_then(|status| status.update_revision.as_ref());
    current && revision.is_some() && pod.labels().get(REVISION_LABEL) != revision
}

/// Label of a set's pods with the revision of their template.
const REVISION_LABEL: &str = "controller-revision-hash";
