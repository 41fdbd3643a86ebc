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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;

    use kube::client::Body;
    use tokio::sync::Notify;

    use super::*;

    fn node(zone: &str, version: u32) -> String {
        format!(
            r#"{{"apiVersion":"v1","kind":"Node","metadata":{{"name":"n1","resourceVersion":"{version}","labels":{{"topology.kubernetes.io/zone":"{zone}"}}}}}}"#
        )
    }

    /// An API server with one node, which moves to another zone when it is told to.
    fn server(moves: Arc<Notify>) -> Client {
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let moves = Arc::clone(&moves);
            async move {
                let watches = request.uri().query().unwrap_or("").contains("watch=true");
                if request.uri().path().ends_with("/n1") {
                    return Ok::<_, Infallible>(http::Response::new(Body::from(
                        node("a", 1).into_bytes(),
                    )));
                }
                if !watches {
                    let list = format!(
                        r#"{{"apiVersion":"v1","kind":"NodeList","metadata":{{"resourceVersion":"1"}},"items":[{}]}}"#,
                        node("a", 1)
                    );
                    return Ok(http::Response::new(Body::from(list.into_bytes())));
                }
                moves.notified().await;
                let event = format!(r#"{{"type":"MODIFIED","object":{}}}"#, node("b", 2));
                Ok(http::Response::new(Body::from(
                    format!("{event}\n").into_bytes(),
                )))
            }
        });
        Client::new(service, "default")
    }

    #[tokio::test]
    async fn a_changed_label_is_followed() {
        let moves = Arc::new(Notify::new());
        let client = server(Arc::clone(&moves));
        let first = read(&client, "n1").await.unwrap();
        assert_eq!(first.zone, "a");
        let (tell, mut labels) = watch::channel(first);
        let following = tokio::spawn(follow(client, tell));
        moves.notify_one();
        let moved = labels.wait_for(|labels| labels.zone == "b").await.unwrap();
        assert_eq!(moved.node, "n1");
        drop(moved);
        following.abort();
    }
}
