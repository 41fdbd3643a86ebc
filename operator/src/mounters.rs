//! Which mounters run what is no longer wanted. Pure.
//!
//! A mounter's mounts end with it, so nobody renews it but people, node by node.

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use crate::conditions::{Said, said};

/// The nodes whose mounters are of an older template than the newest, in order; `None` while there
/// is no telling.
#[must_use]
pub fn outdated(pods: &[Pod], revisions: &[ControllerRevision]) -> Option<Vec<String>> {
    let newest = revisions.iter().max_by_key(|one| one.revision)?;
    let newest = newest.labels().get(REVISION_LABEL)?;
    let stays = |pod: &&Pod| pod.metadata.deletion_timestamp.is_none();
    let old = |pod: &&Pod| pod.labels().get(REVISION_LABEL) != Some(newest);
    let node = |pod: &Pod| pod.spec.as_ref()?.node_name.clone();
    let mut nodes: Vec<String> = pods
        .iter()
        .filter(stays)
        .filter(old)
        .filter_map(node)
        .collect();
    nodes.sort();
    Some(nodes)
}

/// The condition that tells of them.
#[must_use]
pub fn told(nodes: &[String]) -> Said {
    if nodes.is_empty() {
        return said(TYPE, false, "UpToDate", "");
    }
    let named = nodes.iter().take(NAMED_MAX).cloned().collect::<Vec<_>>();
    let more = match nodes.len().saturating_sub(NAMED_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let text = format!(
        "the mounters of these nodes run as before the last upgrade, since their mounts would end \
         with them: {}{more}. Drain each node, delete its mounter pod and uncordon it",
        named.join(", ")
    );
    said(TYPE, true, "DrainToRenew", text)
}

/// Type of the condition.
const TYPE: &str = "MountsOutdated";
/// Nodes that are named at most.
const NAMED_MAX: usize = 10;
/// Label of a DaemonSet's pods and revisions with the hash of their template.
const REVISION_LABEL: &str = "controller-revision-hash";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(node: &str, hash: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": node, "labels": {"controller-revision-hash": hash}},
            "spec": {"nodeName": node, "containers": []},
        }))
        .unwrap()
    }

    fn revision(number: i64, hash: &str) -> ControllerRevision {
        serde_json::from_value(json!({
            "metadata": {"name": hash, "labels": {"controller-revision-hash": hash}},
            "revision": number,
        }))
        .unwrap()
    }

    #[test]
    fn nodes_with_old_mounters_are_named() {
        let pods = [pod("c", "old"), pod("b", "new"), pod("a", "old")];
        let revisions = [revision(2, "new"), revision(1, "old")];
        let nodes = outdated(&pods, &revisions).unwrap();
        assert_eq!(nodes, ["a", "c"]);
        let told = told(&nodes);
        assert_eq!((told.type_, told.status), ("MountsOutdated", Some(true)));
        assert!(told.message.contains("upgrade") && told.message.contains(": a, c. Drain"));
        // The upgrade was taken back: the revision it had before is the newest again.
        let revisions = [revision(2, "new"), revision(3, "old")];
        assert_eq!(outdated(&pods, &revisions).unwrap(), ["b"]);
        assert_eq!(outdated(&pods, &[]), None);
    }

    #[test]
    fn who_is_ending_and_who_is_new_is_not_told_of() {
        let mut ends = pod("a", "old");
        ends.metadata.deletion_timestamp =
            Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
        let nodes = outdated(&[ends, pod("b", "new")], &[revision(1, "new")]).unwrap();
        assert!(nodes.is_empty());
        assert_eq!(told(&nodes).status, Some(false));
    }

    #[test]
    fn a_message_stays_short() {
        let nodes: Vec<String> = (0..500).map(|at| format!("node-{at:03}")).collect();
        assert!(
            told(&nodes)
                .message
                .contains("node-009 and 490 more. Drain")
        );
    }
}
