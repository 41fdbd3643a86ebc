//! One pass over a cluster: look, decide, do, tell.

use std::collections::BTreeMap;

use jiff::Timestamp;
use kube::ResourceExt as _;
use kube::runtime::events::EventType;

use super::cluster::Memory;
use super::{Context, Key, deletion, dumps, etcd, manage};
use crate::api::{ChunkStorageClass, ChunkserverPool, HitherCluster};
use crate::check::{self, Refusal};
use crate::conditions::{Said, stored};
use crate::desired::{CLUSTER_LABEL, Component, World, desired, pool_set, pool_zones};
use crate::error::Error;
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
    let plan = Plan {
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
        ..Seen::default()
    }
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
    /// What is next with the members of a managed etcd.
    etcd: etcd_plan::Plan,
}

impl Plan {
    fn of(cluster: &HitherCluster, wanted: &Wanted, seen: &Seen) -> Self {
        let (mut accepted, mut refused) = (Vec::new(), BTreeMap::new());
        let mut replicas = BTreeMap::new();
        for pool in &wanted.pools {
            let name = pool.name_any();
            let sets = pool_zones(cluster, pool)
                .map(|zone| pool_set(&cluster.name_any(), &name, &zone.name));
            let is_going = pool.metadata.deletion_timestamp.is_some();
            match check::pool(pool, Some(cluster)) {
                Ok(()) if is_going => {}
                Ok(()) => {
                    replicas.extend(sets.map(|set| (set, pool.spec.replicas_per_zone)));
                    accepted.push(pool.clone());
                }
                Err(refusal) => {
                    // What is not understood is left as it is.
                    for set in sets.filter_map(|set| seen.set(&set)) {
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
            etcd: seen.etcd.as_ref().map(etcd_plan::plan).unwrap_or_default(),
        }
    }
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
        etcd_is_whole: seen.etcd.as_ref().is_some_and(etcd_plan::is_whole),
        certificates: store.certificates.clone(),
        trust: store.trust.clone(),
        operator: context.options.own_namespace.clone(),
    };
    etcd::prepare(context, cluster, store, memory).await?;
    for object in desired(cluster, &plan.accepted, &world) {
        context.apply(&object, memory).await?;
    }
    etcd::step(context, cluster, store, &plan.etcd, memory).await?;
    dumps::end(context, cluster, memory).await?;
    shrink(context, wanted, seen, plan).await?;
    if let Some(manager) = &memory.manager
        && seen.status.is_some()
    {
        manage::servers(manager, cluster, &plan.accepted, seen, &plan.scale).await?;
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
    Ok(())
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
        let has = |set: &&k8s_openapi::api::apps::v1::StatefulSet| {
            set.labels().get(crate::desired::POOL_LABEL) == Some(&name)
        };
        if !seen.sets.iter().any(|set| has(&set)) {
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
