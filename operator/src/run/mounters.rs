//! Looks now and then which nodes' mounters are of an older template.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use parking_lot::Mutex;

use super::Context;
use super::calls::ask;
use crate::error::Error;
use crate::mounters::outdated;

/// The nodes, once it is known.
pub(super) type Nodes = Arc<Mutex<Option<Vec<String>>>>;

/// Looks again and again, for good; the cluster's passes tell.
pub(super) async fn follow(context: &Context) {
    let Some(selector) = &context.options.mounters else {
        return std::future::pending().await;
    };
    loop {
        match look(context, selector).await {
            Ok(nodes) => *context.mounters.lock() = nodes,
            Err(error) => tracing::warn!(%error, "not known which mounters are outdated"),
        }
        tokio::time::sleep(LOOK).await;
    }
}

async fn look(context: &Context, selector: &str) -> Result<Option<Vec<String>>, Error> {
    let (client, namespace) = (&context.client, &context.options.own_namespace);
    let params = ListParams::default().labels(selector);
    let revisions: Api<ControllerRevision> = Api::namespaced(client.clone(), namespace);
    let revisions = ask("list the mounters' revisions", revisions.list(&params)).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let pods = ask("list the mounters", pods.list(&params)).await?;
    Ok(outdated(&pods.items, &revisions.items))
}

/// How often. People renew them: a minute is soon.
const LOOK: Duration = Duration::from_secs(60);
