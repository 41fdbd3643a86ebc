//! One pass over a cluster: look, decide, do, tell.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt as _;
use kube::runtime::events::EventType;

use super::cluster::Memory;
use super::{Context, Key, claims, deletion, dumps, etcd, manage};
use crate::api::{ChunkStorageClass, ChunkserverPool, HitherCluster};
use crate::check::{self, Refusal};
use crate::claims::made_with;
use crate::conditions::{Said, stored};
use crate::desired::{
    CLUSTER_LABEL, Component, POOL_LABEL, World, desired, manager_set, pool_set, pool_zones,
    zones_of,
};
use crate::error::{Error, Failures};
use crate::etcd::plan as etcd_plan;
use crate::manager::Manager;
use crate::rollout::{self, Rollout};
use crate::scale::{self, Scale};
use crate::seen::{Seen, component, is_ready};
use crate::status::{self, Told};

/// What comes after a pass.
pub(super) enum After {
    /// Another one, in a while.
    Again,
    /// Another one in a moment.
    Soon,
    /// Nothing, until somebody makes something of that name.
    Nothing,
}

/// The custom resources of one cluster.
pub(super) struct Wanted {
    pub(super) cluster: Option<HitherCluster>,
    pub(super) pools: Vec<ChunkserverPool>,
    pub(super) classes: Vec<ChunkStorageClass>,
}

impl Wanted {
    fn of(context: &Context, (namespace, name): &Key) -> Self {
        let here = |of: Option<String>| of.as_deref() == Some(namespace);
        let mut clusters = context
            .clusters
            .find(|cluster| here(cluster.namespace()) && cluster.name_any() == *name);
        Self {
            cluster: clusters.pop(),
            pools: context
                .pools
                .find(|pool| here(pool.namespace()) && pool.spec.cluster == *name),
            classes: context
                .classes
                .find(|class| here(class.namespace()) && class.spec.cluster == *name),
        }
    }
}

/// Brings a cluster one step nearer to what is asked for.
pub(super) async fn pass(
    context: &Context,
    key: &Key,
    memory: &mut Memory,
) -> Result<After, Error> {
    let wanted = Wanted::of(context, key);
    let Some(cluster) = &wanted.cluster else {
        memory.manager = None;
        return deletion::orphans(context, &wanted).await;
    };
    let mut seen = look(context, key);
    seen.drained = drained(&wanted.pools);
    ask_manager(cluster, memory, &mut seen).await;
    let store = etcd::look(context, cluster, memory, &mut seen).await?;
    let mut blocked = None;
    if cluster.metadata.deletion_timestamp.is_some() {
        blocked = deletion::cluster(context, cluster, &wanted, &seen).await?;
        if blocked.is_none() {
            return Ok(After::Again);
        }
    }
    context.finalizer(cluster, CLUSTER_FINALIZER, true).await?;
    for pool in wanted
        .pools
        .iter()
        .filter(|pool| pool.metadata.deletion_timestamp.is_none())
    {
        context.finalizer(pool, POOL_FINALIZER, true).await?;
    }
    let refused = check::cluster(cluster).err().or(store.refused.clone());
    let mut plan = Plan {
        blocked,
        ..Plan::of(cluster, &wanted, &seen)
    };
    let mut failed = None;
    if refused.is_none() {
        failed = act(context, cluster, &wanted, &seen, &plan, &store, memory)
            .await
            .err();
    }
    if let Some(error) = &failed {
        let text = error.to_string();
        context
            .event(cluster, EventType::Warning, "ApplyFailed", "Apply", &text)
            .await;
    }
    plan.failed = failed.as_ref().map(ToString::to_string);
    seen.last_dump = dumps::last(context, cluster).await?;
    tell(context, cluster, &wanted, &seen, &plan, refused.as_ref()).await?;
    let told = manage::classes(context, cluster, &wanted, memory.manager.as_ref(), &seen).await;
    failed.map_or(Ok(()), Err)?;
    told?;
    let etcd = &plan.etcd;
    if etcd.step.is_some() || etcd.waiting.is_some() || etcd.lost.is_some() {
        return Ok(After::Soon);
    }
    Ok(After::Again)
}

fn look(context: &Context, (namespace, name): &Key) -> Seen {
    let of = |labels: &BTreeMap<String, String>| labels.get(CLUSTER_LABEL) == Some(name);
    let here = |of: Option<String>| of.as_deref() == Some(namespace);
    Seen {
        sets: context
            .sets
            .find(|set| here(set.namespace()) && of(set.labels())),
        pods: context
            .pods
            .find(|pod| here(pod.namespace()) && of(pod.labels())),
        outdated_mounters: context.mounters.lock().clone(),
        ..Seen::default()
    }
}

/// The chunkservers that the operator empties, as it has told.
fn drained(pools: &[ChunkserverPool]) -> BTreeSet<u64> {
    let told = pools.iter().filter_map(|pool| pool.status.as_ref());
    told.flat_map(|status| &status.draining)
        .filter_map(|drain| u64::try_from(drain.server).ok())
        .collect()
}

/// Asks the manager how things are; the pods' own addresses need no name service.
async fn ask_manager(cluster: &HitherCluster, memory: &mut Memory, seen: &mut Seen) {
    let managers = seen
        .pods
        .iter()
        .filter(|pod| component(pod) == Component::Manager.as_str() && is_ready(pod));
    let ips = managers.filter_map(|pod| pod.status.as_ref()?.pod_ip.clone());
    let addresses: Vec<String> = ips.map(|ip| manager_at(&ip)).collect();
    if addresses.is_empty() {
        memory.manager = None;
        return;
    }
    if memory
        .manager
        .as_ref()
        .is_none_or(|manager| manager.addresses() != addresses)
    {
        memory.manager = Some(Manager::at(addresses));
    }
    let Some(manager) = &memory.manager else {
        return;
    };
    match manager.status().await {
        Ok(status) => {
            let id = status::cluster_id(&status);
            let known = cluster
                .status
                .as_ref()
                .and_then(|status| status.cluster_id.clone());
            if let (Some(id), Some(known)) = (&id, &known)
                && id != known
            {
                seen.silence = Some(format!(
                    "the manager serves cluster {id}, not {known}: its metadata is another's or new"
                ));
                return;
            }
            seen.status = Some(status);
        }
        Err(error) => seen.silence = Some(error.to_string()),
    }
}

fn manager_at(ip: &str) -> String {
    if ip.contains(':') {
        format!("[{ip}]:7650")
    } else {
        format!("{ip}:7650")
    }
}

/// What was decided.
pub(super) struct Plan {
    /// Pools that are acted on.
    accepted: Vec<ChunkserverPool>,
    /// Why others are not.
    refused: BTreeMap<String, Refusal>,
    scale: Scale,
    rollout: Rollout,
    /// Why the cluster cannot go, if it is to.
    blocked: Option<Said>,
    /// What could not be brought about, if anything.
    failed: Option<String>,
    /// What is next with the members of a managed etcd.
    etcd: etcd_plan::Plan,
}

impl Plan {
    fn of(cluster: &HitherCluster, wanted: &Wanted, seen: &Seen) -> Self {
        let (mut accepted, mut refused) = (Vec::new(), BTreeMap::new());
        let mut replicas = BTreeMap::new();
        let staying = wanted
            .pools
            .iter()
            .filter(|pool| pool.metadata.deletion_timestamp.is_none());
        for pool in staying {
            let name = pool.name_any();
            match check::pool(pool, Some(cluster)) {
                Ok(()) => {
                    let sets = pool_zones(cluster, pool)
                        .map(|zone| pool_set(&cluster.name_any(), &name, &zone.name));
                    replicas.extend(sets.map(|set| (set, pool.spec.replicas_per_zone)));
                    accepted.push(pool.clone());
                }
                Err(refusal) => {
                    // What is not understood is left as it is, also in zones nobody knows.
                    for set in sets_of(&name, seen) {
                        let now = set.spec.as_ref().and_then(|spec| spec.replicas);
                        replicas.insert(set.name_any(), now.unwrap_or(0));
                    }
                    refused.insert(name, refusal);
                }
            }
        }
        let zones: Vec<String> = cluster.spec.zones.iter().map(|z| z.name.clone()).collect();
        Self {
            accepted,
            refused,
            scale: scale::plan(seen, &replicas),
            rollout: rollout::plan(seen, &zones),
            blocked: None,
            failed: None,
            etcd: seen.etcd.as_ref().map(etcd_plan::plan).unwrap_or_default(),
        }
    }
}

/// The sets of a pool.
fn sets_of<'a>(pool: &'a str, seen: &'a Seen) -> impl Iterator<Item = &'a StatefulSet> {
    let of = move |set: &&StatefulSet| {
        let named = set.labels().get(POOL_LABEL);
        named.is_some_and(|named| named == pool)
    };
    seen.sets.iter().filter(of)
}

async fn act(
    context: &Context,
    cluster: &HitherCluster,
    wanted: &Wanted,
    seen: &Seen,
    plan: &Plan,
    store: &etcd::Look,
    memory: &mut Memory,
) -> Result<(), Error> {
    let known = cluster
        .status
        .as_ref()
        .and_then(|status| status.cluster_id.clone());
    let world = World {
        image: context.options.image.clone(),
        cluster_id: seen.status.as_ref().and_then(status::cluster_id).or(known),
        provisioner: context.options.provisioner.clone(),
        replicas: plan.scale.replicas.clone(),
        disruption: status::disruption(seen),
        manager_zones: seen
            .set(&manager_set(&cluster.name_any()))
            .and_then(zones_of),
        etcd_is_whole: seen.etcd.as_ref().is_some_and(etcd_plan::is_whole),
        certificates: store.certificates.clone(),
        trust: store.trust.clone(),
        operator: context.options.own_namespace.clone(),
        claim_sizes: made_with(&seen.sets),
    };
    // What somebody has deleted is made anew at once.
    memory.applied.retain(|title, _| {
        let set = title.strip_prefix("StatefulSet/");
        let name = set.map(|rest| rest.split(' ').next().unwrap_or(rest));
        name.is_none_or(|name| seen.set(name).is_some())
    });
    let mut failures = Failures::default();
    etcd::prepare(context, cluster, store, memory).await?;
    for object in desired(cluster, &plan.accepted, &world) {
        failures.take(context.apply(&object, memory).await)?;
    }
    failures.take(claims::enlarge(context, cluster, &plan.accepted, seen).await)?;
    failures.take(etcd::step(context, cluster, store, &plan.etcd, memory).await)?;
    failures.take(dumps::end(context, cluster, memory).await)?;
    failures.take(shrink(context, wanted, seen, plan).await)?;
    if let Some(manager) = &memory.manager
        && seen.status.is_some()
    {
        manage::servers(context, manager, cluster, &plan.accepted, seen, &plan.scale).await?;
    }
    if let Some(name) = &plan.rollout.replace
        && let Some(pod) = seen.pods.iter().find(|pod| pod.name_any() == *name)
        && memory
            .replaced
            .is_none_or(|when| when.elapsed() > REPLACE_PAUSE)
    {
        context.delete(pod).await?;
        memory.replaced = Some(tokio::time::Instant::now());
        let text = format!("{name} is replaced: its template has changed");
        context
            .event(cluster, EventType::Normal, "PodReplaced", "Upgrade", &text)
            .await;
    }
    failures.end()
}

/// Sets of pools that are going, or of zones that are no longer asked for.
async fn shrink(context: &Context, wanted: &Wanted, seen: &Seen, plan: &Plan) -> Result<(), Error> {
    let applied: Vec<String> = plan
        .accepted
        .iter()
        .flat_map(|pool| {
            let cluster = wanted.cluster.as_ref();
            cluster.into_iter().flat_map(move |cluster| {
                pool_zones(cluster, pool)
                    .map(|zone| pool_set(&cluster.name_any(), &pool.name_any(), &zone.name))
            })
        })
        .collect();
    for set in &seen.sets {
        let name = set.name_any();
        if plan.scale.remove.contains(&name) {
            // The file of its pods goes first: once the set is gone nobody would know of it.
            let namespace = set.namespace().unwrap_or_default();
            deletion::remove::<ConfigMap>(context, &namespace, &name).await?;
            context.delete(set).await?;
        } else if let Some(replicas) = plan.scale.replicas.get(&name)
            && !applied.contains(&name)
            && set.spec.as_ref().and_then(|spec| spec.replicas) != Some(*replicas)
        {
            deletion::resize(context, set, *replicas).await?;
        }
    }
    for pool in wanted
        .pools
        .iter()
        .filter(|pool| pool.metadata.deletion_timestamp.is_some())
    {
        let name = pool.name_any();
        if sets_of(&name, seen).next().is_none() {
            context.finalizer(pool, POOL_FINALIZER, false).await?;
        }
    }
    Ok(())
}

async fn tell(
    context: &Context,
    cluster: &HitherCluster,
    wanted: &Wanted,
    seen: &Seen,
    plan: &Plan,
    refused: Option<&Refusal>,
) -> Result<(), Error> {
    let Told {
        mut status,
        mut conditions,
    } = status::cluster(cluster, &plan.accepted, seen, &plan.rollout, refused);
    if let Some(failed) = &plan.failed {
        status::not_applied(&mut conditions, failed);
    }
    if let Some(etcd) = &seen.etcd {
        let told = status::etcd(cluster, etcd, &plan.etcd, seen.certificates_renewed_at);
        status.etcd = Some(told.status);
        conditions.extend(told.conditions);
    }
    conditions.extend(plan.blocked.clone());
    let old = cluster.status.as_ref();
    let before = old.map_or(&[][..], |status| &status.conditions);
    status.conditions = timed(before, &conditions, cluster.metadata.generation);
    let both = (before, &status.conditions[..]);
    context.write_status(cluster, old, &status, both).await?;
    for pool in &wanted.pools {
        let refused = plan.refused.get(&pool.name_any());
        tell_pool(context, pool, Some(cluster), seen, &plan.scale, refused).await?;
    }
    Ok(())
}

pub(super) async fn tell_pool(
    context: &Context,
    pool: &ChunkserverPool,
    cluster: Option<&HitherCluster>,
    seen: &Seen,
    scale: &Scale,
    refused: Option<&Refusal>,
) -> Result<(), Error> {
    let Told {
        mut status,
        conditions,
    } = status::pool(pool, cluster, seen, scale, refused);
    let old = pool.status.as_ref();
    let before = old.map_or(&[][..], |status| &status.conditions);
    status.conditions = timed(before, &conditions, pool.metadata.generation);
    let both = (before, &status.conditions[..]);
    context.write_status(pool, old, &status, both).await
}

pub(super) fn timed(
    before: &[k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition],
    said: &[Said],
    generation: Option<i64>,
) -> Vec<k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition> {
    stored(before, said, generation, Timestamp::now())
}

/// Keeps a cluster until nothing needs it.
pub(super) const CLUSTER_FINALIZER: &str = "hither.dev/cluster";
/// Keeps a pool until its chunkservers are empty.
pub(super) const POOL_FINALIZER: &str = "hither.dev/pool";
/// Time in which what was ended is seen to be so.
const REPLACE_PAUSE: std::time::Duration = std::time::Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::decisions_tests::seen;

    fn cluster() -> HitherCluster {
        serde_json::from_value(json!({
            "apiVersion": "hither.dev/v1alpha1",
            "kind": "HitherCluster",
            "metadata": {"name": "demo", "namespace": "files"},
            "spec": {
                "zones": [{"name": "a"}],
                "metadataStore": {"embedded": {"storage": {"emptyDir": {}}}},
            },
        }))
        .unwrap()
    }

    fn pool(deleted: bool) -> ChunkserverPool {
        let mut pool: ChunkserverPool = serde_json::from_value(json!({
            "apiVersion": "hither.dev/v1alpha1",
            "kind": "ChunkserverPool",
            "metadata": {"name": "ssd", "namespace": "files"},
            "spec": {
                "cluster": "demo",
                "replicasPerZone": 1,
                "zones": ["a", "b"],
                "storage": {"emptyDir": {}},
            },
        }))
        .unwrap();
        if deleted {
            let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::now());
            pool.metadata.deletion_timestamp = Some(now);
        }
        pool
    }

    fn plan(pool: ChunkserverPool) -> Plan {
        let wanted = Wanted {
            cluster: None,
            pools: vec![pool],
            classes: Vec::new(),
        };
        Plan::of(&cluster(), &wanted, &seen(&["a", "b"]))
    }

    #[test]
    fn a_pool_that_names_an_unknown_zone_is_left_as_it_is() {
        let plan = plan(pool(false));
        assert_eq!(plan.refused["ssd"].reason, "UnknownZone");
        assert_eq!(plan.scale, Scale::default());
    }

    #[test]
    fn a_pool_that_is_refused_can_be_deleted() {
        let plan = plan(pool(true));
        assert!(plan.refused.is_empty());
        assert_eq!(plan.scale.drain, [(1, true), (2, true)]);
    }
}
