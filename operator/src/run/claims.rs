//! Makes claims larger.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use super::Context;
use super::calls::ask;
use crate::api::{ChunkserverPool, HitherCluster};
use crate::claims::{may_lag, too_small, wanted};
use crate::desired::CLUSTER_LABEL;
use crate::error::{Error, Failures};
use crate::seen::Seen;

/// Enlarges the claims of sets whose resources ask for more than the sets were made with. What
/// cannot be enlarged, by its storage class, the API server says.
pub(super) async fn enlarge(
    context: &Context,
    cluster: &HitherCluster,
    pools: &[ChunkserverPool],
    seen: &Seen,
) -> Result<(), Error> {
    let wanted = wanted(cluster, pools);
    if !may_lag(&seen.sets, &wanted) {
        return Ok(());
    }
    let namespace = cluster.namespace().unwrap_or_default();
    let api: Api<PersistentVolumeClaim> = Api::namespaced(context.client.clone(), &namespace);
    let ours = ListParams::default().labels(&format!("{CLUSTER_LABEL}={}", cluster.name_any()));
    let claims = ask("list the claims", api.list(&ours)).await?;
    let mut failures = Failures::default();
    for (name, size) in too_small(&seen.sets, &claims.items, &wanted) {
        let patch = json!({"spec": {"resources": {"requests": {"storage": size}}}});
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        let what = format!("enlarge the claim {name} to {}", size.0);
        let patched = context
            .change(what, api.patch(&name, &params, &patch))
            .await;
        failures.take(patched.map(|_| ()))?;
    }
    failures.end()
}
