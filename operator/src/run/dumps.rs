//! The scheduled dumps of the metadata: when the last one succeeded, and their end.

use k8s_openapi::api::batch::v1::CronJob;
use kube::api::DeleteParams;
use kube::{Api, ResourceExt as _};

use super::Context;
use super::calls::ask;
use super::cluster::Memory;
use crate::api::HitherCluster;
use crate::desired::dump_job;
use crate::error::Error;

/// When the last dump succeeded, if there are any.
pub(super) async fn last(
    context: &Context,
    cluster: &HitherCluster,
) -> Result<Option<String>, Error> {
    if cluster.spec.metadata_store.dumps.is_none() {
        return Ok(None);
    }
    let name = dump_job(&cluster.name_any());
    let job = ask(format!("read {name}"), api(context, cluster).get_opt(&name)).await?;
    let time = job.and_then(|job| job.status?.last_successful_time);
    Ok(time.map(|time| time.0.to_string()))
}

/// Ends them, when they are no longer asked for.
pub(super) async fn end(
    context: &Context,
    cluster: &HitherCluster,
    memory: &mut Memory,
) -> Result<(), Error> {
    let generation = cluster.metadata.generation;
    if cluster.spec.metadata_store.dumps.is_some() || memory.without_dumps == generation {
        return Ok(());
    }
    let name = dump_job(&cluster.name_any());
    let (jobs, params) = (api(context, cluster), DeleteParams::background());
    let deleted = context.change(format!("delete {name}"), jobs.delete(&name, &params));
    deleted.await.map(|_| ()).or_else(Error::unless_gone)?;
    memory.without_dumps = generation;
    Ok(())
}

fn api(context: &Context, cluster: &HitherCluster) -> Api<CronJob> {
    let namespace = cluster.namespace().unwrap_or_default();
    Api::namespaced(context.client.clone(), &namespace)
}
