//! What the status of a cluster and its pools says, from what was seen. Pure.

use std::collections::{BTreeMap, BTreeSet};

use hither_proto::manager::ClusterStatus;
use hither_proto::map::Chunkserver;
use jiff::Timestamp;
use kube::ResourceExt as _;

use crate::api::{
    ChunkserverPool, ChunkserverPoolStatus, EtcdStatus, GroupHealth, HitherCluster,
    HitherClusterStatus, ZoneStatus,
};
use crate::check::Refusal;
use crate::conditions::{Said, said};
use crate::desired::{
    Component, Disruption, manager_address, manager_replicas, pool_set, pool_zones, standbys,
    wanted_labels,
};
use crate::etcd::plan::{self, Plan, World};
use crate::mounters;
use crate::rollout::Rollout;
use crate::scale::Scale;
use crate::seen::{Seen, component, is_ready, is_up, title};

/// A status whose conditions have no times yet.
#[derive(Debug, Clone)]
pub struct Told<S> {
    /// All but the conditions.
    pub status: S,
    /// The conditions.
    pub conditions: Vec<Said>,
}

/// The cluster's random id as it is written.
#[must_use]
pub fn cluster_id(status: &ClusterStatus) -> Option<String> {
    let id = &status.map.as_ref()?.cluster_id;
    (!id.is_empty()).then(|| id.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The status of a cluster.
#[must_use]
pub fn cluster(
    cluster: &HitherCluster,
    pools: &[ChunkserverPool],
    seen: &Seen,
    rollout: &Rollout,
    refused: Option<&Refusal>,
) -> Told<HitherClusterStatus> {
    let before = cluster.status.clone().unwrap_or_default();
    let zones = zones(cluster, pools, seen);
    let wanted: i32 = zones.iter().map(|zone| zone.chunkservers).sum();
    let ready: i32 = zones.iter().map(|zone| zone.ready).sum();
    let whole_zones = zones
        .iter()
        .filter(|z| z.chunkservers > 0 && z.ready >= z.chunkservers);
    let zones_ready = format!("{}/{}", whole_zones.count(), zones.len());
    let groups = seen.groups();
    let mut conditions = vec![
        accepted(refused),
        is_served(seen, wanted, ready),
        progressing(seen, wanted, ready),
        degraded(seen),
        at_risk(seen),
        zone_loss(cluster, seen),
        upgrading(rollout),
    ];
    conditions.extend(seen.outdated_mounters.as_deref().map(mounters::told));
    let health = match groups {
        None => "Unknown",
        Some(groups) if groups.one_copy > 0 || seen.unreadable() > 0 => "AtRisk",
        Some(_) if !seen.is_clean() => "Repairing",
        Some(_) => "Healthy",
    };
    Told {
        status: HitherClusterStatus {
            observed_generation: cluster.metadata.generation,
            conditions: Vec::new(),
            cluster_id: seen
                .status
                .as_ref()
                .and_then(cluster_id)
                .or(before.cluster_id),
            address: Some(manager_address(cluster)),
            health: Some(health.into()),
            zones_ready: Some(zones_ready),
            chunkservers_ready: Some(format!("{ready}/{wanted}")),
            groups_whole: groups.map(|groups| format!("{}/{}", groups.whole, groups.total)),
            groups,
            zones,
            last_dump: seen.last_dump.clone(),
            etcd: None,
        },
        conditions,
    }
}

/// What the conditions say when something could not be brought about: nobody is to take the rest
/// for all there was to do.
pub fn not_applied(conditions: &mut [Said], why: &str) {
    for condition in conditions {
        let said = match (condition.type_, condition.status) {
            ("Progressing", _) => said("Progressing", false, "ApplyFailed", why),
            ("Degraded", Some(false)) => said("Degraded", true, "ApplyFailed", why),
            ("Upgrading", Some(false)) => said("Upgrading", None, "ApplyFailed", why),
            _ => continue,
        };
        *condition = said;
    }
}

/// The members of a managed etcd.
#[must_use]
pub fn etcd(
    cluster: &HitherCluster,
    world: &World,
    plan: &Plan,
    renewed_at: Option<Timestamp>,
) -> Told<EtcdStatus> {
    let voters = plan::voters(world);
    let members = format!("{voters}/{}", world.places.len());
    let fullest = plan::fullest(world);
    // A status that changed with every byte would be written with every look.
    let mebibytes = |bytes: i64| bytes >> 20 << 20;
    let quota = fullest.map_or(0, |said| said.quota_bytes);
    let lost = "MetadataQuorumLost";
    let quorum = match &plan.lost {
        Some(why) => said(
            lost,
            true,
            "NoQuorum",
            format!("{why}. {}", how_to_go_on(cluster, world)),
        ),
        None if world.established => said(lost, false, "Quorum", ""),
        None => said(lost, false, "NotBegun", ""),
    };
    let all = match (&plan.waiting, &plan.lost) {
        (Some(why), _) if plan.step.is_some() => ("Changing", why.clone()),
        (Some(why), _) => ("Waiting", why.clone()),
        (None, Some(_)) => ("NoQuorum", String::new()),
        (None, None) => ("AllVote", format!("{members} members vote")),
    };
    let used = fullest.map_or(0, |said| said.used_bytes);
    let low = if plan::space_is_low(world) {
        let what = if world.full {
            "etcd is full and takes no changes"
        } else {
            "little room is left"
        };
        let text = format!(
            "{what}: of {} bytes {} are in use, in a file of {}",
            quota,
            mebibytes(used),
            mebibytes(fullest.map_or(0, |said| said.file_bytes))
        );
        said(
            "MetadataSpaceLow",
            true,
            if world.full { "Full" } else { "NearlyFull" },
            text,
        )
    } else {
        said("MetadataSpaceLow", false, "RoomLeft", "")
    };
    Told {
        status: EtcdStatus {
            members,
            leader: plan::leader(world),
            file_bytes: mebibytes(fullest.map_or(0, |said| said.file_bytes)),
            used_bytes: mebibytes(used),
            quota_bytes: quota,
            certificates_renewed_at: renewed_at.map(|at| at.to_string()),
        },
        conditions: vec![
            quorum,
            said("MetadataMembers", plan::is_whole(world), all.0, all.1),
            low,
        ],
    }
}

/// What people can do without a quorum.
fn how_to_go_on(cluster: &HitherCluster, world: &World) -> String {
    // Whoever answers has its data; of the others it is not known.
    let mut with_data: Vec<&plan::Place> =
        world.places.iter().filter(|place| !place.waits).collect();
    with_data.sort_by_key(|place| place.said.is_none());
    let Some(place) = with_data.first() else {
        return "Nothing is changed until enough members answer".into();
    };
    let namespace = cluster.metadata.namespace.clone().unwrap_or_default();
    format!(
        "Nothing is changed until enough members answer: bring their pods back. If they are lost \
         for good, go on with what one of them has, and without what only the others have: \
         kubectl annotate -n {namespace} hc {} hither.dev/restart-etcd-from={}",
        cluster.name_any(),
        place.pod
    )
}

fn zones(cluster: &HitherCluster, pools: &[ChunkserverPool], seen: &Seen) -> Vec<ZoneStatus> {
    let one = |zone: &crate::api::Zone| {
        let mut status = ZoneStatus {
            name: zone.name.clone(),
            ..ZoneStatus::default()
        };
        for pool in pools {
            if pool_zones(cluster, pool).any(|of| of.name == zone.name) {
                let set = pool_set(&cluster.name_any(), &pool.name_any(), &zone.name);
                status.chunkservers += pool.spec.replicas_per_zone;
                status.ready += ready_in(seen, &set);
            }
        }
        for server in seen
            .servers()
            .iter()
            .filter(|server| server.zone == zone.name)
        {
            status.up += i32::from(is_up(server));
            for disk in &server.disks {
                let add = |sum: i64, bytes: u64| {
                    sum.saturating_add(i64::try_from(bytes).unwrap_or(i64::MAX))
                };
                status.total_bytes = add(status.total_bytes, disk.total_bytes);
                status.free_bytes = add(status.free_bytes, disk.free_bytes);
            }
        }
        status
    };
    cluster.spec.zones.iter().map(one).collect()
}

fn ready_in(seen: &Seen, set: &str) -> i32 {
    let ready = seen
        .pods_of(set)
        .values()
        .filter(|pod| is_ready(pod))
        .count();
    i32::try_from(ready).unwrap_or(i32::MAX)
}

fn accepted(refused: Option<&Refusal>) -> Said {
    match refused {
        Some(refusal) => said("Accepted", false, refusal.reason, refusal.message.clone()),
        None => said("Accepted", true, "Accepted", ""),
    }
}

fn is_served(seen: &Seen, wanted: i32, ready: i32) -> Said {
    let Some(status) = &seen.status else {
        let why = seen
            .silence
            .clone()
            .unwrap_or_else(|| "no manager pod is ready".into());
        return said("Ready", false, "ManagerUnreachable", why);
    };
    let ranks = status.map.as_ref().map_or(&[][..], |map| &map.ranks);
    if !ranks.iter().any(|rank| !rank.address.is_empty()) {
        return said(
            "Ready",
            false,
            "MetadataNotServed",
            "no metadata server serves rank 0",
        );
    }
    if wanted == 0 {
        return said(
            "Ready",
            false,
            "NoChunkservers",
            "no ChunkserverPool asks for chunkservers",
        );
    }
    let text = format!("{ready} of {wanted} chunkservers are ready");
    if ready < wanted {
        said("Ready", false, "ChunkserversNotReady", text)
    } else {
        said("Ready", true, "Ready", text)
    }
}

fn progressing(seen: &Seen, wanted: i32, ready: i32) -> Said {
    let moving = seen
        .servers()
        .iter()
        .filter(|server| server.draining)
        .count();
    if moving > 0 {
        return said(
            "Progressing",
            true,
            "Draining",
            format!("{moving} chunkservers are being emptied"),
        );
    }
    if ready < wanted || seen.status.is_none() {
        return said("Progressing", true, "Starting", "pods are not ready yet");
    }
    said("Progressing", false, "AsWanted", "")
}

fn degraded(seen: &Seen) -> Said {
    let Some(groups) = seen.groups() else {
        return said("Degraded", None, "ManagerUnreachable", "");
    };
    let replaced = |server: &&Chunkserver| seen.is_replaced(server);
    let lost: Vec<String> = seen.missing().filter(replaced).map(title).collect();
    if !lost.is_empty() {
        let text = format!(
            "others run in the pods of chunkservers that hold copies: {}. They are forgotten once \
             the copies are made elsewhere, or when they are back with their disks; {}",
            lost.join(", "),
            wholeness(seen, groups)
        );
        return said("Degraded", true, "ServerLost", text);
    }
    let servers = seen.servers().iter();
    let down: Vec<String> = servers.filter(|server| !is_up(server)).map(title).collect();
    if !down.is_empty() {
        let text = format!(
            "chunkservers down: {}; {}",
            down.join(", "),
            wholeness(seen, groups)
        );
        return said("Degraded", true, "ChunkserversDown", text);
    }
    if groups.whole < groups.total {
        return said("Degraded", true, "CopiesMissing", wholeness(seen, groups));
    }
    said("Degraded", false, "Whole", "")
}

fn wholeness(seen: &Seen, groups: GroupHealth) -> String {
    let (whole, total, filling) = (groups.whole, groups.total, groups.filling);
    let short = match seen.short() {
        0 => String::new(),
        short => format!(", {short} have fewer members than their classes ask for"),
    };
    format!("{whole} of {total} placement groups are whole, {filling} are filling{short}")
}

fn at_risk(seen: &Seen) -> Said {
    let Some(groups) = seen.groups() else {
        return said("DataAtRisk", None, "ManagerUnreachable", "");
    };
    let (unreadable, total) = (seen.unreadable(), groups.total);
    if unreadable > 0 {
        let text = format!(
            "{unreadable} of {total} placement groups have no member with everything that is up: \
             what is in them can be read when one of those chunkservers is back"
        );
        return said("DataAtRisk", true, "Unavailable", text);
    }
    if groups.one_copy > 0 {
        let text = format!(
            "{} of {total} placement groups have one member with everything: the next loss loses \
             data",
            groups.one_copy
        );
        return said("DataAtRisk", true, "OneCopyLeft", text);
    }
    said("DataAtRisk", false, "CopiesLeft", "")
}

fn zone_loss(cluster: &HitherCluster, seen: &Seen) -> Said {
    let name = "ZoneLossTolerated";
    if cluster.spec.zones.len() < 2 {
        return said(name, false, "OneZone", "the cluster has one zone");
    }
    if cluster.spec.metadata_store.embedded.is_some() {
        let text = "the metadata is in the one manager: losing its zone stops the cluster";
        return said(name, false, "EmbeddedStore", text);
    }
    if let Some(etcd) = &seen.etcd {
        if cluster.spec.zones.len() == 2 {
            let text = "two of etcd's three members are in one zone: losing it stops the cluster";
            return said(name, false, "MetadataInTwoZones", text);
        }
        if !plan::is_whole(etcd) {
            let text = format!("{} of 3 members of etcd vote", plan::voters(etcd));
            return said(name, false, "MetadataMembersMissing", text);
        }
    }
    if seen.status.is_none() {
        return said(name, None, "ManagerUnreachable", "");
    }
    if manager_replicas(cluster) < 2 {
        let text = "one manager: without its zone nobody leads";
        return said(name, false, "OneManager", text);
    }
    if standbys(cluster) < 1 {
        let text = "no metadata server stands by: without the active one's zone nothing is found";
        return said(name, false, "NoStandby", text);
    }
    let zones = cluster.spec.zones.iter().map(|zone| zone.name.as_str());
    let needed: Vec<&str> = zones.filter(|zone| !seen.readable_without(zone)).collect();
    if !needed.is_empty() {
        let text = format!("some files have no copy outside of: {}", needed.join(", "));
        return said(name, false, "CopiesInOneZone", text);
    }
    let (managers, metadata) = (
        spread(seen, Component::Manager),
        spread(seen, Component::Metadata),
    );
    if managers == Some(false) {
        let text = "the managers that are ready are in one zone";
        return said(name, false, "ManagersInOneZone", text);
    }
    if metadata == Some(false) {
        let text = "the metadata servers that are ready are in one zone";
        return said(name, false, "MetadataInOneZone", text);
    }
    if seen.groups().is_none_or(|groups| groups.total == 0) {
        return said(name, None, "NoGroups", "there are no placement groups yet");
    }
    if managers.is_none() || metadata.is_none() {
        let text = "the zones of the managers' and metadata servers' nodes are not known";
        return said(name, None, "PlacesUnknown", text);
    }
    if cluster.spec.metadata_store.etcd.is_some() {
        let text = "everything of the cluster's own is in other zones too; whether etcd survives \
                    the loss of a zone is not known here";
        return said(name, None, "EtcdNotOurs", text);
    }
    said(name, true, "CopiesElsewhere", "")
}

/// Whether the pods of a component that are ready are in more than one zone, as far as is known.
fn spread(seen: &Seen, of: Component) -> Option<bool> {
    let pods = seen.pods.iter();
    let ready = pods.filter(|pod| component(pod) == of.as_str() && is_ready(pod));
    let zones: Vec<Option<&str>> = ready.map(|pod| seen.zone_of(pod)).collect();
    let known: BTreeSet<&str> = zones.iter().copied().flatten().collect();
    if known.len() > 1 {
        return Some(true);
    }
    (!zones.contains(&None)).then_some(false)
}

fn upgrading(rollout: &Rollout) -> Said {
    let left = rollout.outdated.len();
    match (&rollout.waiting, &rollout.replace) {
        (Some(why), _) => said(
            "Upgrading",
            true,
            "Waiting",
            format!("{left} pods to replace; waiting: {why}"),
        ),
        (None, Some(pod)) => said(
            "Upgrading",
            true,
            "Replacing",
            format!("{left} pods to replace; now {pod}"),
        ),
        (None, None) => said("Upgrading", false, "UpToDate", ""),
    }
}

/// The status of a pool.
#[must_use]
pub fn pool(
    pool: &ChunkserverPool,
    cluster: Option<&HitherCluster>,
    seen: &Seen,
    scale: &Scale,
    refused: Option<&Refusal>,
) -> Told<ChunkserverPoolStatus> {
    let name = pool.name_any();
    let mut least = None;
    let (mut ready, mut wanted) = (0, 0);
    let mut labels = Vec::new();
    if let (Some(cluster), None) = (cluster, refused) {
        for zone in pool_zones(cluster, pool) {
            let here = ready_in(seen, &pool_set(&cluster.name_any(), &name, &zone.name));
            least = Some(least.map_or(here, |least: i32| least.min(here)));
            ready += here;
            wanted += pool.spec.replicas_per_zone;
            for label in wanted_labels(pool, zone) {
                if pool.spec.labels.contains(&label) && !labels.contains(&label) {
                    labels.push(label);
                }
            }
        }
    }
    let text = format!("{ready} of {wanted} chunkservers are ready");
    let mut conditions = vec![
        accepted(refused),
        match refused {
            Some(refusal) => said("Ready", false, refusal.reason, ""),
            None if ready < wanted => said("Ready", false, "ChunkserversNotReady", text),
            None => said("Ready", true, "Ready", text),
        },
    ];
    let draining = scale.progress.get(&name).cloned().unwrap_or_default();
    conditions.push(match scale.waiting.get(&name) {
        Some(why) => said("Draining", true, "Draining", why.clone()),
        None if !draining.is_empty() => said("Draining", true, "Draining", ""),
        None => said("Draining", false, "NothingToDrain", ""),
    });
    Told {
        status: ChunkserverPoolStatus {
            observed_generation: pool.metadata.generation,
            conditions: Vec::new(),
            replicas_per_zone: least.unwrap_or(0),
            chunkservers_ready: Some(format!("{ready}/{wanted}")),
            labels: (!labels.is_empty()).then(|| labels.join(",")),
            selector: Some(format!(
                "hither.dev/cluster={},hither.dev/pool={name}",
                pool.spec.cluster
            )),
            draining,
        },
        conditions,
    }
}

/// Which chunkservers may be evicted.
#[must_use]
pub fn disruption(seen: &Seen) -> Disruption {
    if seen.is_clean() {
        return Disruption::One;
    }
    if seen.short() > 0 {
        // What is missing has no zone.
        return Disruption::Nobody;
    }
    let mut zones: BTreeMap<&str, ()> = BTreeMap::new();
    for server in seen.missing() {
        zones.insert(&server.zone, ());
    }
    let map = seen.status.as_ref().and_then(|status| status.map.as_ref());
    let behind = map
        .into_iter()
        .flat_map(|map| &map.groups)
        .flat_map(|group| {
            let in_sync = i32::from(hither_proto::map::MemberState::InSync);
            group
                .members
                .iter()
                .filter(move |member| member.state != in_sync)
        });
    for member in behind {
        let server = seen
            .servers()
            .iter()
            .find(|server| server.id == member.server);
        zones.insert(server.map_or("", |server| &server.zone), ());
    }
    match zones.keys().next() {
        Some(zone) if zones.len() == 1 && !zone.is_empty() && seen.readable_without(zone) => {
            Disruption::InZone((*zone).to_owned())
        }
        _ => Disruption::Nobody,
    }
}
