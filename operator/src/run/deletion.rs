//! Ends: of clusters, and of what refers to a cluster that is not there.

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolume, Secret};
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::{DeleteParams, ListParams, Patch};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use super::pass::{After, CLUSTER_FINALIZER, POOL_FINALIZER, Wanted, tell_pool};
use super::{Context, manage, products};
use crate::api::{DRIVER, HitherCluster};
use crate::check;
use crate::conditions::{Said, said};
use crate::desired::csi_secret;
use crate::error::Error;
use crate::scale::Scale;
use crate::seen::Seen;

/// Ends a cluster, unless volumes are on it: then it says so, and is to be kept as it should be.
pub(super) async fn cluster(
    context: &Context,
    cluster: &HitherCluster,
    wanted: &Wanted,
    seen: &Seen,
) -> Result<Option<Said>, Error> {
    let name = cluster.name_any();
    let volumes = volumes(context, cluster).await?;
    let forced = cluster
        .annotations()
        .get(FORCE)
        .is_some_and(|said| *said == name);
    if !volumes.is_empty() && !forced {
        let shown: Vec<&str> = volumes.iter().take(NAMED_MAX).map(String::as_str).collect();
        let more = volumes.len().saturating_sub(NAMED_MAX);
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        let text = format!(
            "{} volumes are on it: {}{more}. Delete their claims first; or, to destroy them and \
             everything else on the cluster, annotate it with {FORCE}={name}",
            volumes.len(),
            shown.join(", ")
        );
        return Ok(Some(said("DeletionBlocked", true, "VolumesExist", text)));
    }
    for class in &wanted.classes {
        products::remove(context, class).await?;
    }
    for set in &seen.sets {
        context.delete(set).await?;
    }
    let namespace = cluster.namespace().unwrap_or_default();
    let secret = csi_secret(&name);
    remove::<RoleBinding>(context, &namespace, &secret).await?;
    remove::<Role>(context, &namespace, &secret).await?;
    remove::<Secret>(context, &namespace, &secret).await?;
    context.finalizer(cluster, CLUSTER_FINALIZER, false).await?;
    Ok(None)
}

/// Pools and classes of a cluster that is not there: they say so, and may go.
pub(super) async fn orphans(context: &Context, wanted: &Wanted) -> Result<After, Error> {
    for pool in &wanted.pools {
        if pool.metadata.deletion_timestamp.is_some() {
            context.finalizer(pool, POOL_FINALIZER, false).await?;
            continue;
        }
        let refused = check::pool(pool, None).err();
        let (seen, scale) = (Seen::default(), Scale::default());
        tell_pool(context, pool, None, &seen, &scale, refused.as_ref()).await?;
    }
    for class in &wanted.classes {
        manage::class_without_cluster(context, class).await?;
    }
    Ok(After::Nothing)
}

/// Sets the replicas of a set that is no longer asked for.
pub(super) async fn resize(
    context: &Context,
    set: &StatefulSet,
    replicas: i32,
) -> Result<(), Error> {
    let name = set.name_any();
    let namespace = set.namespace().unwrap_or_default();
    let api: Api<StatefulSet> = Api::namespaced(context.client.clone(), &namespace);
    let patch = json!({"spec": {"replicas": replicas}});
    let patched = api
        .patch(
            &name,
            &kube::api::PatchParams::default(),
            &Patch::Merge(patch),
        )
        .await;
    patched
        .map(|_| ())
        .map_err(Error::kubernetes(format!("resize {name}")))
}

/// Names of the PersistentVolumes on the cluster.
async fn volumes(context: &Context, cluster: &HitherCluster) -> Result<Vec<String>, Error> {
    let id = cluster
        .status
        .as_ref()
        .and_then(|status| status.cluster_id.clone());
    let handles = id.map(|id| format!("{id}."));
    let namespace = cluster.namespace().unwrap_or_default();
    let classes = format!("{namespace}-{}-", cluster.name_any());
    let api: Api<PersistentVolume> = Api::all(context.client.clone());
    let all = api
        .list(&ListParams::default())
        .await
        .map_err(Error::kubernetes("list persistent volumes"))?;
    let on_it = |volume: &&PersistentVolume| {
        let spec = volume.spec.as_ref();
        let class = spec.and_then(|spec| spec.storage_class_name.as_deref());
        spec.and_then(|spec| spec.csi.as_ref()).is_some_and(|csi| {
            let handle = handles
                .as_ref()
                .is_some_and(|id| csi.volume_handle.starts_with(id));
            csi.driver == DRIVER && (handle || class.is_some_and(|c| c.starts_with(&classes)))
        })
    };
    Ok(all
        .items
        .iter()
        .filter(on_it)
        .map(kube::ResourceExt::name_any)
        .collect())
}

/// Fails while a cluster, or a volume of one, exists.
///
/// # Errors
/// What exists, by name; or that the API server does not say.
pub async fn guard(client: kube::Client) -> anyhow::Result<()> {
    let clusters: Api<HitherCluster> = Api::all(client.clone());
    let clusters = clusters.list(&ListParams::default()).await?;
    let title = |one: &HitherCluster| {
        format!(
            "HitherCluster {}/{}",
            one.namespace().unwrap_or_default(),
            one.name_any()
        )
    };
    let mut found: Vec<String> = clusters.items.iter().map(title).collect();
    let volumes: Api<PersistentVolume> = Api::all(client);
    let volumes = volumes.list(&ListParams::default()).await?;
    let ours = volumes.items.iter().filter(|volume| {
        let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
        csi.is_some_and(|csi| csi.driver == DRIVER)
    });
    found.extend(ours.map(|volume| format!("PersistentVolume {}", volume.name_any())));
    if found.is_empty() {
        return Ok(());
    }
    anyhow::bail!(
        "still there: {}. Delete claims and clusters first: without operator and driver they could \
         not end, nor pods that use them",
        found.join(", ")
    )
}

async fn remove<K>(context: &Context, namespace: &str, name: &str) -> Result<(), Error>
where
    K: super::apply::Ours,
{
    let api: Api<K> = Api::namespaced(context.client.clone(), namespace);
    match api.delete(name, &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(Error::kubernetes(format!("delete {name}"))(error)),
    }
}

/// Annotation that lets a cluster with volumes go; its value is the cluster's name.
const FORCE: &str = "hither.dev/destroy-volumes";
/// Volumes that are named.
const NAMED_MAX: usize = 20;
