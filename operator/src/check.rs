//! What the API server's rules cannot check: labels, definitions and preferences in full. Pure.

use hither_labels::{
    ChunkState, Label, LabelSet, PreferenceTemplate, StorageClass, StorageDefinition,
};

use crate::api::{ChunkStorageClass, ChunkserverPool, HitherCluster};
use crate::desired::class_kubernetes_name;
use crate::quantity::bytes_of;

/// Why a resource is not acted on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Stable word for the condition.
    pub reason: &'static str,
    /// What is wrong and where, for people.
    pub message: String,
}

fn refuse(reason: &'static str, message: impl Into<String>) -> Refusal {
    Refusal {
        reason,
        message: message.into(),
    }
}

/// Checks a cluster.
///
/// # Errors
/// What is wrong with it.
pub fn cluster(cluster: &HitherCluster) -> Result<(), Refusal> {
    match &cluster.spec.default_class {
        Some(text) => definition("defaultClass", text).map(|_| ()),
        None => Ok(()),
    }
}

/// Checks a pool of a cluster.
///
/// # Errors
/// What is wrong with it.
pub fn pool(pool: &ChunkserverPool, cluster: Option<&HitherCluster>) -> Result<(), Refusal> {
    let mut set = LabelSet::default();
    for label in &pool.spec.labels {
        let parsed = label
            .parse::<Label>()
            .map_err(|error| refuse("InvalidLabel", format!("labels:\n{error}")))?;
        set.insert(parsed)
            .map_err(|error| refuse("InvalidLabel", format!("labels: {error}")))?;
    }
    sizes(pool)?;
    paths(pool)?;
    let Some(cluster) = cluster else {
        return Err(no_cluster(&pool.spec.cluster));
    };
    let known: Vec<&str> = cluster
        .spec
        .zones
        .iter()
        .map(|zone| zone.name.as_str())
        .collect();
    let strange = pool
        .spec
        .zones
        .iter()
        .find(|zone| !known.contains(&zone.as_str()));
    match strange {
        Some(zone) => Err(refuse(
            "UnknownZone",
            format!(
                "the cluster has no zone {zone:?}; it has: {}",
                known.join(", ")
            ),
        )),
        None => Ok(()),
    }
}

fn sizes(pool: &ChunkserverPool) -> Result<(), Refusal> {
    let settings = &pool.spec.settings;
    let named = [
        ("freeFloor", &settings.free_floor),
        ("fillBandwidth", &settings.fill_bandwidth),
    ];
    for (name, quantity) in named {
        if let Some(quantity) = quantity
            && bytes_of(quantity).is_none()
        {
            let text = format!("settings.{name}: {:?} is no number of bytes", quantity.0);
            return Err(refuse("InvalidSettings", text));
        }
    }
    Ok(())
}

/// One directory is one disk.
fn paths(pool: &ChunkserverPool) -> Result<(), Refusal> {
    let host = pool.spec.storage.host_path.iter();
    let mut seen: Vec<Vec<&str>> = Vec::new();
    for path in host.flat_map(|host| &host.paths) {
        let parts: Vec<&str> = path
            .split('/')
            .filter(|part| !part.is_empty() && *part != ".")
            .collect();
        if parts.is_empty() || parts.contains(&"..") {
            let text = format!("storage.hostPath: {path:?}: name a directory of its own");
            return Err(refuse("InvalidStorage", text));
        }
        let within = |one: &Vec<&str>| one.starts_with(&parts) || parts.starts_with(one);
        if seen.iter().any(within) {
            let text = format!("storage.hostPath: {path:?} is in another of the paths, or is it");
            return Err(refuse("InvalidStorage", text));
        }
        seen.push(parts);
    }
    Ok(())
}

/// Checks a class of a cluster.
///
/// # Errors
/// What is wrong with it.
pub fn class(class: &ChunkStorageClass, cluster: Option<&HitherCluster>) -> Result<(), Refusal> {
    let spec = &class.spec;
    let name = class.metadata.name.clone().unwrap_or_default();
    let mut checked = StorageClass::new(name, definition("keep", &spec.keep)?);
    if let Some(create) = &spec.create {
        checked.create = Some(definition("create", create)?);
    }
    if let Some(template) = &spec.preferred_labels {
        let parsed = PreferenceTemplate::parse(template)
            .map_err(|e| refuse("InvalidPreferredLabels", format!("preferredLabels:\n{e}")))?;
        let strange = parsed
            .variables()
            .into_iter()
            .find(|name| !VARIABLES.contains(name));
        if let Some(name) = strange {
            let text = format!(
                "preferredLabels: {{{name}}} is unknown: use {{zone}}, {{region}} or {{node}}"
            );
            return Err(refuse("InvalidPreferredLabels", text));
        }
        checked.preferred_labels = Some(parsed);
    }
    checked.min_write_copies = spec.min_write_copies.and_then(|n| u8::try_from(n).ok());
    checked
        .validate()
        .map_err(|error| refuse("InvalidClass", error.to_string()))?;
    let copies = checked.definition(ChunkState::Keep).terms(1).len();
    if copies == 0 {
        return Err(refuse(
            "InvalidDefinition",
            "keep: a class has at least one copy",
        ));
    }
    let kubernetes = class_kubernetes_name(class);
    if kubernetes.len() > NAME_MAX {
        let text = format!("{kubernetes} would be too long as the name of a StorageClass");
        return Err(refuse("NameTooLong", text));
    }
    match cluster {
        Some(_) => Ok(()),
        None => Err(no_cluster(&spec.cluster)),
    }
}

fn no_cluster(name: &str) -> Refusal {
    refuse(
        "ClusterNotFound",
        format!("there is no HitherCluster {name:?} in this namespace"),
    )
}

fn definition(field: &str, text: &str) -> Result<StorageDefinition, Refusal> {
    text.parse()
        .map_err(|error| refuse("InvalidDefinition", format!("{field}:\n{error}")))
}

/// What a template may name.
const VARIABLES: [&str; 3] = ["zone", "region", "node"];
/// Longest name of a cluster-scoped object.
const NAME_MAX: usize = 253;

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn refused(spec: &Value) -> Option<&'static str> {
        let mut all = json!({
            "cluster": "demo", "replicasPerZone": 1, "storage": {"emptyDir": {}},
        });
        let fields = all.as_object_mut().unwrap();
        fields.extend(spec.as_object().unwrap().clone());
        let checked = json!({
            "apiVersion": "hither.dev/v1alpha1",
            "kind": "ChunkserverPool",
            "metadata": {"name": "ssd"},
            "spec": all,
        });
        let refusal = pool(&serde_json::from_value(checked).unwrap(), None).unwrap_err();
        // Everything else is right when only the cluster is missing.
        (refusal.reason != "ClusterNotFound").then_some(refusal.reason)
    }

    #[test]
    fn sizes_are_those_of_kubernetes() {
        let with = |floor: &str| refused(&json!({"settings": {"freeFloor": floor}}));
        assert_eq!(with("1.5Gi"), None);
        assert_eq!(with("many"), Some("InvalidSettings"));
    }

    #[test]
    fn a_directory_is_one_disk_of_a_server() {
        let with = |paths: &[&str]| refused(&json!({"storage": {"hostPath": {"paths": paths}}}));
        assert_eq!(with(&["/data/a", "/data/ab"]), None);
        for wrong in [
            &["/d", "/d/"][..],
            &["/"],
            &["/./"],
            &["/a/../b"],
            &["/d", "/d/e"],
        ] {
            assert_eq!(with(wrong), Some("InvalidStorage"), "{wrong:?}");
        }
    }
}
