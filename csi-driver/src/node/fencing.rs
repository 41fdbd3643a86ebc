//! Whether a volume may be taken from the node that has it.

use hither_mounter_proto::Holder;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};

use crate::error::Refusal;

/// The nodes of this Kubernetes cluster, as far as fencing goes.
#[derive(Clone)]
pub struct Nodes {
    me: String,
    client: Option<Client>,
}

impl std::fmt::Debug for Nodes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Nodes(as {})", self.me)
    }
}

impl Nodes {
    /// As seen from a node; without Kubernetes only that one is known.
    #[must_use]
    pub fn new(me: String, client: Option<Client>) -> Self {
        Self { me, client }
    }

    /// Whether the mount that has claimed a volume may be fenced off: one of this node that nobody
    /// serves any more, or one of a node that was deleted or is declared out of service. A node
    /// that is cordoned, drained or not ready may have pods that write: nothing is taken from it
    /// while it renews its session.
    ///
    /// # Errors
    /// `Unreachable` when the API server does not say.
    pub async fn may_fence(&self, holder: &Holder) -> Result<bool, Refusal> {
        if !holder.mount_point.contains(KUBELET_MOUNTS) {
            // Somebody's own mount: its host need not be a Node at all.
            return Ok(false);
        }
        if holder.host == self.me {
            return Ok(true);
        }
        let Some(client) = &self.client else {
            return Ok(false);
        };
        let api: Api<Node> = Api::all(client.clone());
        let node = api.get_opt(&holder.host).await.map_err(|error| {
            Refusal::Unreachable(format!("ask for the Node {}: {error}", holder.host))
        })?;
        Ok(node.is_none_or(|node| is_out_of_service(&node)))
    }
}

fn is_out_of_service(node: &Node) -> bool {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
    taints
        .into_iter()
        .flatten()
        .any(|taint| taint.key == OUT_OF_SERVICE)
}

/// Part of every path at which the kubelet has volumes staged.
const KUBELET_MOUNTS: &str = "/plugins/kubernetes.io/csi/";
/// Put on a Node by an administrator or a controller that has made sure it is off.
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use kube::client::Body;

    use super::*;

    /// An API server with the nodes n1, which is not ready, and n2, which is out of service.
    fn server() -> Client {
        let service = tower::service_fn(|request: http::Request<Body>| async move {
            let name = request.uri().path().rsplit('/').next().unwrap_or_default();
            let taint = match name {
                "n1" => "node.kubernetes.io/unreachable",
                "n2" => OUT_OF_SERVICE,
                "n3" => {
                    let body =
                        r#"{"kind":"Status","status":"Failure","reason":"NotFound","code":404}"#;
                    let answer = http::Response::builder().status(404);
                    return Ok::<_, Infallible>(
                        answer.body(Body::from(body.as_bytes().to_vec())).unwrap(),
                    );
                }
                _ => {
                    let answer = http::Response::builder().status(503);
                    return Ok(answer.body(Body::empty()).unwrap());
                }
            };
            let node = format!(
                r#"{{"apiVersion":"v1","kind":"Node","metadata":{{"name":"{name}"}},"spec":{{"taints":[{{"key":"{taint}","effect":"NoExecute"}}]}}}}"#
            );
            Ok(http::Response::new(Body::from(node.into_bytes())))
        });
        Client::new(service, "default")
    }

    fn holder(host: &str) -> Holder {
        Holder {
            session: 7,
            host: host.into(),
            mount_point: "/var/lib/kubelet/plugins/kubernetes.io/csi/csi.hither.dev/x/globalmount"
                .into(),
        }
    }

    #[tokio::test]
    async fn only_what_is_surely_gone_is_fenced() {
        let nodes = Nodes::new("n0".into(), Some(server()));
        assert_eq!(nodes.may_fence(&holder("n0")).await, Ok(true));
        assert_eq!(nodes.may_fence(&holder("n1")).await, Ok(false));
        assert_eq!(nodes.may_fence(&holder("n2")).await, Ok(true));
        assert_eq!(nodes.may_fence(&holder("n3")).await, Ok(true));
        let unknown = nodes.may_fence(&holder("n4")).await;
        assert!(
            matches!(unknown, Err(Refusal::Unreachable(_))),
            "{unknown:?}"
        );
        let own = Holder {
            mount_point: "/mnt".into(),
            ..holder("n3")
        };
        assert_eq!(nodes.may_fence(&own).await, Ok(false));
        let alone = Nodes::new("n0".into(), None);
        assert_eq!(alone.may_fence(&holder("n3")).await, Ok(false));
    }
}
