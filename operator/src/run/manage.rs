//! What a manager is told: labels, drains, distances, storage classes.

use hither_labels::StorageDefinition;
use hither_proto::map::{Distance, StorageClass as Stored};
use kube::ResourceExt as _;
use kube::runtime::events::EventType;

use super::pass::{Wanted, timed};
use super::{Context, products};
use crate::api::{ChunkStorageClass, ChunkStorageClassStatus, ChunkserverPool, HitherCluster};
use crate::check;
use crate::conditions::{Said, said};
use crate::desired::{class_kubernetes_name, pool_set, pool_zones, wanted_labels};
use crate::error::Error;
use crate::labels;
use crate::manager::Manager;
use crate::scale::Scale;
use crate::seen::{Seen, is_up, title};

/// Labels of running chunkservers, those to empty and to forget, distances.
pub(super) async fn servers(
    context: &Context,
    manager: &Manager,
    cluster: &HitherCluster,
    pools: &[ChunkserverPool],
    seen: &Seen,
    scale: &Scale,
) -> Result<(), Error> {
    for pool in pools {
        for zone in pool_zones(cluster, pool) {
            let set = pool_set(&cluster.name_any(), &pool.name_any(), &zone.name);
            let wanted = wanted_labels(pool, zone);
            for pod in seen.pods_of(&set).values() {
                let Some(server) = seen.server_of(pod).filter(|server| is_up(server)) else {
                    continue;
                };
                let changes = labels::changes(&server.labels, &wanted);
                if !changes.is_empty() {
                    tracing::info!(server = server.id, ?changes, "labels");
                    let change = manager.label(server.id, changes);
                    context.lease.command(change).await?;
                }
            }
        }
    }
    for (server, on) in &scale.drain {
        tracing::info!(server, on, "drain");
        context.lease.command(manager.drain(*server, *on)).await?;
    }
    for server in &scale.forget {
        tracing::info!(server, "forget");
        context.lease.command(manager.forget(*server)).await?;
        let mut known = seen.servers().iter();
        let known = known.find(|known| known.id == *server).map(title);
        let text = format!(
            "chunkserver {} is down, holds nothing and cannot come back with its disks: it is \
             forgotten",
            known.unwrap_or_default()
        );
        let kind = EventType::Normal;
        context
            .event(cluster, kind, "ServerForgotten", "Forget", &text)
            .await;
    }
    let map = seen.status.as_ref().and_then(|status| status.map.as_ref());
    let wanted: Vec<Distance> = cluster.spec.distances.iter().map(distance).collect();
    if map.is_some_and(|map| map.distances != wanted) {
        context.lease.command(manager.distances(wanted)).await?;
    }
    Ok(())
}

fn distance(of: &crate::api::Distance) -> Distance {
    Distance {
        zone_a: of.from.clone(),
        zone_b: of.to.clone(),
        distance: u32::try_from(of.distance).unwrap_or(0),
    }
}

/// All classes of a cluster; one that fails does not hold the others up.
pub(super) async fn classes(
    context: &Context,
    cluster: &HitherCluster,
    wanted: &Wanted,
    manager: Option<&Manager>,
    seen: &Seen,
) -> Result<(), Error> {
    let mut failed = None;
    for class in &wanted.classes {
        let done = if class.metadata.deletion_timestamp.is_some() {
            remove_class(context, class, manager, seen).await
        } else {
            keep_class(context, cluster, class, manager, seen).await
        };
        failed = done.err().or(failed);
    }
    failed.map_or(Ok(()), Err)
}

async fn keep_class(
    context: &Context,
    cluster: &HitherCluster,
    class: &ChunkStorageClass,
    manager: Option<&Manager>,
    seen: &Seen,
) -> Result<(), Error> {
    if let Err(refusal) = check::class(class, Some(cluster)) {
        let conditions = [
            said("Accepted", false, refusal.reason, refusal.message),
            said("Ready", false, refusal.reason, ""),
        ];
        return tell(context, class, None, &conditions).await;
    }
    context.finalizer(class, CLASS_FINALIZER, true).await?;
    let accepted = said("Accepted", true, "Accepted", "");
    let (Some(manager), Some(_)) = (manager, &seen.status) else {
        let conditions = [
            accepted,
            said("Ready", false, "ManagerUnreachable", "no manager answers"),
        ];
        return tell(context, class, None, &conditions).await;
    };
    let satisfiable = match in_manager(context, manager, class, seen).await {
        Ok(satisfiable) => satisfiable,
        Err(error) => {
            let conditions = [accepted, said("Ready", false, "Refused", error.to_string())];
            tell(context, class, None, &conditions).await?;
            return Ok(());
        }
    };
    let name = class_kubernetes_name(class);
    let ready = match products::keep(context, class).await? {
        None => said("Ready", true, "Ready", ""),
        Some(kind) => said(
            "Ready",
            false,
            "NameConflict",
            format!("there is a {kind} {name} that is not this operator's"),
        ),
    };
    let shown = (ready.status == Some(true)).then_some(name);
    tell(context, class, shown, &[accepted, ready, satisfiable]).await
}

/// Sees to it that the manager has the class; says whether the servers of now satisfy it.
async fn in_manager(
    context: &Context,
    manager: &Manager,
    class: &ChunkStorageClass,
    seen: &Seen,
) -> Result<Said, Error> {
    let spec = &class.spec;
    let known = seen
        .status
        .as_ref()
        .and_then(|status| status.map.as_ref())
        .and_then(|map| {
            map.classes
                .iter()
                .find(|known| known.name == class.name_any())
        });
    let wanted = Stored {
        name: class.name_any(),
        description: spec.description.clone().unwrap_or_default(),
        keep: normal(&spec.keep),
        create: spec.create.as_deref().map(normal).unwrap_or_default(),
        mode: spec.mode.as_str().into(),
        preferred_labels: spec.preferred_labels.clone().unwrap_or_default(),
        min_write_copies: spec
            .min_write_copies
            .and_then(|n| u32::try_from(n).ok())
            .unwrap_or(0),
        ..known.cloned().unwrap_or_default()
    };
    let dry_run = known == Some(&wanted);
    let change = manager.class(wanted, known.is_some(), dry_run);
    let reply = context.lease.command(change).await?;
    let notes = reply.notes.join("; ");
    Ok(if reply.satisfiable {
        said("Satisfiable", true, "ServersMatch", notes)
    } else {
        said("Satisfiable", false, "NoServersMatch", notes)
    })
}

/// A definition as the manager writes it.
fn normal(text: &str) -> String {
    text.parse::<StorageDefinition>()
        .map_or_else(|_| text.to_owned(), |parsed| parsed.to_string())
}

async fn remove_class(
    context: &Context,
    class: &ChunkStorageClass,
    manager: Option<&Manager>,
    seen: &Seen,
) -> Result<(), Error> {
    products::remove(context, class).await?;
    let known = seen
        .status
        .as_ref()
        .and_then(|status| status.map.as_ref())
        .map(|map| {
            map.classes
                .iter()
                .any(|known| known.name == class.name_any())
        });
    let blocked = match (manager, known) {
        (_, Some(false)) => None,
        (Some(manager), Some(true)) => {
            let removed = manager.remove_class(class.name_any());
            let removed = context.lease.command(removed).await;
            removed.err().map(|error| error.to_string())
        }
        _ => Some("no manager answers".to_owned()),
    };
    match blocked {
        None => context.finalizer(class, CLASS_FINALIZER, false).await,
        Some(why) => {
            let conditions = [
                said("Ready", false, "BeingDeleted", ""),
                said("DeletionBlocked", true, "InUse", why),
            ];
            tell(context, class, None, &conditions).await
        }
    }
}

/// A class whose cluster is not there.
pub(super) async fn class_without_cluster(
    context: &Context,
    class: &ChunkStorageClass,
) -> Result<(), Error> {
    if class.metadata.deletion_timestamp.is_some() {
        products::remove(context, class).await?;
        return context.finalizer(class, CLASS_FINALIZER, false).await;
    }
    if let Err(refusal) = check::class(class, None) {
        let conditions = [
            said("Accepted", false, refusal.reason, refusal.message),
            said("Ready", false, refusal.reason, ""),
        ];
        return tell(context, class, None, &conditions).await;
    }
    Ok(())
}

async fn tell(
    context: &Context,
    class: &ChunkStorageClass,
    name: Option<String>,
    conditions: &[Said],
) -> Result<(), Error> {
    let old = class.status.as_ref();
    let before = old.map_or(&[][..], |status| &status.conditions);
    let status = ChunkStorageClassStatus {
        observed_generation: class.metadata.generation,
        conditions: timed(before, conditions, class.metadata.generation),
        storage_class_name: name,
    };
    let both = (before, &status.conditions[..]);
    context.write_status(class, old, &status, both).await
}

/// Keeps a class until the manager and Kubernetes no longer have it.
const CLASS_FINALIZER: &str = "hither.dev/class";
