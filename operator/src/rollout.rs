//! Which pod is replaced next when a template has changed. Pure.

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use crate::desired::Component;
use crate::etcd::plan::{self as etcd_plan, Place};
use crate::seen::{Seen, component, is_at, is_ready, is_up, title};

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
    if let Some(broken) = outdated.iter().find(|pod| is_broken(seen, pod)) {
        rollout.replace = Some(broken.name_any());
        return rollout;
    }
    match obstacle(seen, first) {
        Some(why) => rollout.waiting = Some(why),
        None => rollout.replace = Some(first.name_any()),
    }
    rollout
}

/// Whether a pod serves nobody, so that nothing is lost by ending it. That it is not ready is not
/// enough: it may serve all the same, out of sight of its node.
fn is_broken(seen: &Seen, pod: &Pod) -> bool {
    if is_ready(pod) {
        return false;
    }
    if component(pod) == Component::Etcd.as_str() {
        return may_be_ended(seen, pod);
    }
    if component(pod) == Component::Chunkserver.as_str() {
        return runs_nothing(pod) && is_missed_by_nobody(seen, pod);
    }
    if runs_nothing(pod) || is_alone(seen, pod) {
        return true;
    }
    // The others have no data: who does not serve by what the manager says is not missed.
    let Some(status) = &seen.status else {
        return component(pod) == Component::Manager.as_str();
    };
    let map = status.map.as_ref();
    let mut ranks = map.into_iter().flat_map(|map| &map.ranks);
    !is_at(pod, &status.leader) && !ranks.any(|rank| is_at(pod, &rank.address))
}

/// Whether a chunkserver's pod may go although something is missing: it is down, and its data
/// stays or is elsewhere as well.
fn is_missed_by_nobody(seen: &Seen, pod: &Pod) -> bool {
    let name = pod.name_any();
    let known: Vec<u64> = seen.servers_named(&name).map(|server| server.id).collect();
    let is_down = seen.status.is_some()
        && seen.server_of(pod).is_none()
        && !seen.servers_named(&name).any(is_up)
        && !seen.unplaced().any(is_up);
    is_down && (keeps_its_disks(pod) || seen.is_clean_without(&known))
}

/// Whether the next pod of this name has the same disks: directories of a node may be left behind.
fn keeps_its_disks(pod: &Pod) -> bool {
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_ref());
    let mut disks = volumes
        .into_iter()
        .flatten()
        .filter(|volume| volume.name.starts_with("disk-"))
        .peekable();
    disks.peek().is_some() && disks.all(|disk| disk.persistent_volume_claim.is_some())
}

/// Whether no container of a pod runs: it was not scheduled, cannot start or crashes.
fn runs_nothing(pod: &Pod) -> bool {
    let Some(status) = &pod.status else {
        return false;
    };
    match status.container_statuses.as_deref() {
        None | Some([]) => status.phase.as_deref() == Some("Pending"),
        Some(all) => all.iter().all(|container| {
            let state = container.state.as_ref();
            state.is_some_and(|state| state.waiting.is_some())
        }),
    }
}

/// Whether it is the only one of its set: nobody else could make it work again.
fn is_alone(seen: &Seen, pod: &Pod) -> bool {
    let set = set_of(seen, pod).and_then(|set| set.spec.as_ref());
    set.and_then(|spec| spec.replicas) == Some(1)
}

/// A member of etcd is ended only while the others agree without it.
fn may_be_ended(seen: &Seen, pod: &Pod) -> bool {
    let Some(etcd) = seen.etcd.as_ref() else {
        return true;
    };
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
        let there = pods.values().filter(|pod| is_ready(pod)).count();
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
    if seen.status.is_none() {
        return Some("no manager answers".into());
    }
    // Who was to take over may not have.
    if !seen.is_rank_served() {
        return Some("no metadata server that is ready serves rank 0".into());
    }
    if component(next) == Component::Chunkserver.as_str() {
        return incomplete(seen);
    }
    None
}

/// What of the data is missing.
fn incomplete(seen: &Seen) -> Option<String> {
    let groups = seen.groups()?;
    let down: Vec<String> = seen.missing().map(title).collect();
    if !down.is_empty() {
        return Some(format!("chunkservers down: {}", down.join(", ")));
    }
    if groups.whole == groups.total {
        return None;
    }
    let (whole, total) = (groups.whole, groups.total);
    let short = match seen.short() {
        0 => String::new(),
        short => format!(", {short} have fewer members than their classes ask for"),
    };
    Some(format!(
        "{whole} of {total} placement groups are whole{short}"
    ))
}

/// The order in which pods are replaced.
fn turn(seen: &Seen, zones: &[String], pod: &Pod) -> (u8, usize, String) {
    let name = pod.name_any();
    match component(pod) {
        "etcd" => {
            let leader = seen.etcd.as_ref().and_then(etcd_plan::leader);
            (0, usize::from(leader.as_ref() == Some(&name)), name)
        }
        "manager" => {
            let leader = seen.status.as_ref().map_or("", |status| &status.leader);
            (1, usize::from(is_at(pod, leader)), name)
        }
        "mds" => {
            let map = seen.status.as_ref().and_then(|status| status.map.as_ref());
            let active =
                map.is_some_and(|map| map.ranks.iter().any(|rank| is_at(pod, &rank.address)));
            (2, usize::from(active), name)
        }
        _ => {
            let named = || seen.servers_named(&name).next();
            let zone = seen
                .server_of(pod)
                .or_else(named)
                .map(|server| &server.zone);
            let at = zones.iter().position(|known| Some(known) == zone);
            (3, at.unwrap_or(zones.len()), name)
        }
    }
}

fn set_of<'a>(seen: &'a Seen, pod: &Pod) -> Option<&'a StatefulSet> {
    let of = |set: &&StatefulSet| {
        seen.pods_of(&set.name_any())
            .values()
            .any(|one| one.uid() == pod.uid())
    };
    seen.sets.iter().find(of)
}

fn is_outdated(seen: &Seen, pod: &Pod) -> bool {
    let Some(set) = set_of(seen, pod) else {
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
