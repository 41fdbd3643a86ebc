//! Ends: of clusters, and of what refers to a cluster that is not there.

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::batch::v1::CronJob;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolume, Secret, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use super::apply::Ours;
use super::calls::ask;
use super::pass::{After, CLUSTER_FINALIZER, POOL_FINALIZER, Wanted, tell_pool};
use super::{Context, manage, products};
use crate::api::{DRIVER, HitherCluster};
use crate::check;
use crate::conditions::{Said, said};
use crate::desired::{
    CLUSTER_LABEL, OWNER_LABEL, class_kubernetes_name, csi_secret, dump_job, etcd_authority_secret,
    etcd_client_secret, etcd_member_secret,
};
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
    let forced = cluster
        .annotations()
        .get(FORCE)
        .is_some_and(|said| *said == name);
    let blocked = |volumes: &[String]| {
        if volumes.is_empty() || forced {
            return None;
        }
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
        Some(said("DeletionBlocked", true, "VolumesExist", text))
    };
    if let Some(said) = blocked(&volumes(context, cluster, wanted).await?) {
        return Ok(Some(said));
    }
    for class in &wanted.classes {
        products::remove(context, class).await?;
    }
    // A claim may have come in between; the classes come back then.
    if let Some(said) = blocked(&volumes(context, cluster, wanted).await?) {
        return Ok(Some(said));
    }
    for set in &seen.sets {
        context.delete(set).await?;
    }
    let namespace = cluster.namespace().unwrap_or_default();
    let all = format!("{CLUSTER_LABEL}={name},{OWNER_LABEL}");
    sweep::<NetworkPolicy>(context, &namespace, &all).await?;
    sweep::<PodDisruptionBudget>(context, &namespace, &all).await?;
    sweep::<Service>(context, &namespace, &all).await?;
    sweep::<ConfigMap>(context, &namespace, &all).await?;
    remove::<CronJob>(context, &namespace, &dump_job(&name)).await?;
    // What a managed etcd has is on its claims; a cluster of the same name gets other certificates.
    for secret in [
        etcd_authority_secret,
        etcd_member_secret,
        etcd_client_secret,
    ] {
        remove::<Secret>(context, &namespace, &secret(&name)).await?;
    }
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
    let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
    let params = PatchParams::default();
    let patched = api.patch(&name, &params, &patch);
    context.change(format!("resize {name}"), patched).await?;
    Ok(())
}

/// Deletes what has these labels.
pub(super) async fn sweep<K: Ours>(
    context: &Context,
    namespace: &str,
    labels: &str,
) -> Result<(), Error> {
    let api: Api<K> = Api::namespaced(context.client.clone(), namespace);
    let what = format!("list every {} of {labels}", K::kind(&()));
    let params = ListParams::default().labels(labels);
    for one in ask(what, api.list(&params)).await?.items {
        context.delete(&one).await?;
    }
    Ok(())
}

/// Names of the PersistentVolumes on the cluster.
async fn volumes(
    context: &Context,
    cluster: &HitherCluster,
    wanted: &Wanted,
) -> Result<Vec<String>, Error> {
    let status = cluster.status.as_ref();
    let id = status.and_then(|status| status.cluster_id.as_deref());
    let classes: Vec<String> = wanted.classes.iter().map(class_kubernetes_name).collect();
    let api: Api<PersistentVolume> = Api::all(context.client.clone());
    let all = ask("list persistent volumes", api.list(&ListParams::default())).await?;
    let on_it = all.items.iter().filter(|one| is_on(one, id, &classes));
    Ok(on_it.map(kube::ResourceExt::name_any).collect())
}

/// Whether a volume is on the cluster of this id; before it has one, whether it is of one of its
/// classes. Names of other clusters may begin like its own.
fn is_on(volume: &PersistentVolume, id: Option<&str>, classes: &[String]) -> bool {
    let Some(spec) = &volume.spec else {
        return false;
    };
    let Some(csi) = spec.csi.as_ref().filter(|csi| csi.driver == DRIVER) else {
        return false;
    };
    match id {
        Some(id) => csi
            .volume_handle
            .strip_prefix(id)
            .is_some_and(|rest| rest.starts_with('.')),
        None => spec
            .storage_class_name
            .as_ref()
            .is_some_and(|class| classes.contains(class)),
    }
}

/// Fails while a cluster, or a volume of one, exists.
///
/// # Errors
/// What exists, by name; or that the API server does not say.
pub async fn guard(client: kube::Client) -> anyhow::Result<()> {
    let clusters: Api<HitherCluster> = Api::all(client.clone());
    let params = ListParams::default();
    let listed = ask("list clusters", clusters.list(&params)).await;
    let clusters = match listed {
        Ok(clusters) => clusters.items,
        // Where their definition is gone there are none.
        Err(error) => error.unless_gone().map(|()| Vec::new())?,
    };
    let title = |one: &HitherCluster| {
        format!(
            "HitherCluster {}/{}",
            one.namespace().unwrap_or_default(),
            one.name_any()
        )
    };
    let mut found: Vec<String> = clusters.iter().map(title).collect();
    let volumes: Api<PersistentVolume> = Api::all(client);
    let what = "list persistent volumes";
    let volumes = ask(what, volumes.list(&ListParams::default())).await?;
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

pub(super) async fn remove<K: Ours>(
    context: &Context,
    namespace: &str,
    name: &str,
) -> Result<(), Error> {
    let api: Api<K> = Api::namespaced(context.client.clone(), namespace);
    let params = DeleteParams::default();
    let deleted = context.change(format!("delete {name}"), api.delete(name, &params));
    deleted.await.map(|_| ()).or_else(Error::unless_gone)
}

/// Annotation that lets a cluster with volumes go; its value is the cluster's name.
const FORCE: &str = "hither.dev/destroy-volumes";
/// Volumes that are named.
const NAMED_MAX: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(handle: &str, class: &str) -> PersistentVolume {
        serde_json::from_value(json!({"spec": {
            "storageClassName": class,
            "csi": {"driver": DRIVER, "volumeHandle": handle},
        }}))
        .unwrap()
    }

    #[test]
    fn a_volume_of_a_cluster_whose_name_begins_alike_is_not_on_it() {
        let classes = ["files-demo-everywhere".to_owned()];
        let other = volume("ffff.1", "files-demo-two-everywhere");
        assert!(!is_on(&other, Some("abcd"), &classes));
        assert!(!is_on(&other, None, &classes));
        let own = volume("abcd.1", "files-demo-everywhere");
        assert!(is_on(&own, Some("abcd"), &[]));
        assert!(!is_on(&own, Some("abc"), &classes), "the id decides");
        assert!(is_on(&own, None, &classes));
        let foreign = serde_json::from_value(json!({"spec": {
            "csi": {"driver": "example.org", "volumeHandle": "abcd.1"},
        }}));
        assert!(!is_on(&foreign.unwrap(), Some("abcd"), &classes));
    }
}
