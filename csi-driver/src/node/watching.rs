//! The labels of this node, followed in Kubernetes.

use futures::TryStreamExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt as _};
use tokio::sync::watch;

use crate::node::labels::NodeLabels;

/// Reads the node's labels once. What goes wrong is logged: the zone is unknown then.
pub async fn read(client: &Client, node: &str) -> Option<NodeLabels> {
    let api: Api<Node> = Api::all(client.clone());
    match api.get(node).await {
        Ok(object) => Some(NodeLabels::of(node, object.labels())),
        Err(error) => {
            tracing::warn!(%error, node, "this node's labels cannot be read: zone unknown");
            None
        }
    }
}

/// Follows the node's labels; never returns. A watch that breaks starts again.
pub async fn follow(client: Client, labels: watch::Sender<NodeLabels>) {
    let node = labels.borrow().node.clone();
    let api: Api<Node> = Api::all(client);
    let config = watcher::Config::default().fields(&format!("metadata.name={node}"));
    loop {
        let objects = watcher(api.clone(), config.clone())
            .default_backoff()
            .applied_objects();
        let followed = objects
            .try_for_each(|object| {
                let now = NodeLabels::of(&node, object.labels());
                labels.send_if_modified(|known| {
                    let changed = *known != now;
                    if changed {
                        tracing::info!(
                            zone = now.zone,
                            region = now.region,
                            "the node stands here"
                        );
                        *known = now;
                    }
                    changed
                });
                std::future::ready(Ok(()))
            })
            .await;
        if let Err(error) = followed {
            tracing::warn!(%error, "the node's labels are not followed: trying again");
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Between two attempts to follow.
const PAUSE: std::time::Duration = std::time::Duration::from_secs(5);
