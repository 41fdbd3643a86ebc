//! What a class is in Kubernetes: objects of the whole of it, of the class's own name. One of that
//! name which somebody else has made is left alone.

use k8s_openapi::ClusterResourceScope;
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};
use kube::api::{DeleteParams, Patch, Preconditions};
use kube::{Api, ResourceExt as _};

use super::Context;
use super::apply::{Ours, params};
use super::calls::ask;
use crate::api::ChunkStorageClass;
use crate::desired::{
    OWNER_LABEL, class_kubernetes_name, is_same_storage_class, storage_class,
    volume_attributes_class,
};
use crate::error::Error;

/// Sees to it that Kubernetes has what a class is there; a kind of which another has the name.
pub(super) async fn keep(
    context: &Context,
    class: &ChunkStorageClass,
) -> Result<Option<String>, Error> {
    let volumes = storage_class(class);
    let changes = volume_attributes_class(class);
    for taken in [
        keep_one(context, class, &volumes, is_same_storage_class).await?,
        // What it says follows from the class's name alone.
        keep_one(context, class, &changes, |_, _| true).await?,
    ] {
        if taken.is_some() {
            return Ok(taken);
        }
    }
    Ok(None)
}

/// Deletes what the class is in Kubernetes, as far as it is ours.
pub(super) async fn remove(context: &Context, class: &ChunkStorageClass) -> Result<(), Error> {
    remove_one::<StorageClass>(context, class).await?;
    remove_one::<VolumeAttributesClass>(context, class).await
}

async fn keep_one<K: Ours<ClusterResourceScope>>(
    context: &Context,
    class: &ChunkStorageClass,
    wanted: &K,
    is_same: impl Fn(&K, &K) -> bool,
) -> Result<Option<String>, Error> {
    let name = wanted.name_any();
    let kind = K::kind(&()).into_owned();
    let what = format!("apply {kind} {name}");
    let api: Api<K> = Api::all(context.client.clone());
    let old = ask(what.clone(), api.get_opt(&name)).await?;
    if let Some(old) = &old {
        if old.labels().get(OWNER_LABEL) != class.uid().as_ref() {
            return Ok(Some(kind));
        }
        // Most of it cannot be changed; volumes do not need it once they are made.
        if !is_same(old, wanted) {
            remove_one::<K>(context, class).await?;
        }
    }
    let (params, patch) = (params(), Patch::Apply(wanted));
    context
        .change(what, api.patch(&name, &params, &patch))
        .await?;
    Ok(None)
}

async fn remove_one<K: Ours<ClusterResourceScope>>(
    context: &Context,
    class: &ChunkStorageClass,
) -> Result<(), Error> {
    let name = class_kubernetes_name(class);
    let what = format!("delete {} {name}", K::kind(&()));
    let api: Api<K> = Api::all(context.client.clone());
    let Some(old) = ask(what.clone(), api.get_opt(&name)).await? else {
        return Ok(());
    };
    if old.labels().get(OWNER_LABEL) != class.uid().as_ref() {
        return Ok(());
    }
    let params = DeleteParams {
        preconditions: Some(Preconditions {
            uid: old.uid(),
            resource_version: None,
        }),
        ..DeleteParams::default()
    };
    let deleted = context.change(what, api.delete(&name, &params)).await;
    deleted.map(|_| ()).or_else(Error::unless_gone)
}
