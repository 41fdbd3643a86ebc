//! What a class is in Kubernetes: a StorageClass, by which volumes begin, and a
//! VolumeAttributesClass, by which they come to the class later.

use std::collections::BTreeMap;

use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;

use super::names::{CLUSTER_LABEL, MANAGED_BY, OWNER_LABEL, csi_secret};
use crate::api::{ChunkStorageClass, DRIVER, ReclaimPolicy, VolumeBinding};

/// Name of what a class is in Kubernetes: `NAMESPACE-CLUSTER-CLASS`.
#[must_use]
pub fn class_kubernetes_name(class: &ChunkStorageClass) -> String {
    let namespace = class.namespace().unwrap_or_default();
    format!("{namespace}-{}-{}", class.spec.cluster, class.name_any())
}

/// The StorageClass. Its parameters cannot be changed, so they hold references and how a new
/// volume begins; where copies are is asked from the manager.
#[must_use]
pub fn storage_class(class: &ChunkStorageClass) -> StorageClass {
    let namespace = class.namespace().unwrap_or_default();
    let volumes = &class.spec.volumes;
    let mut parameters: BTreeMap<String, String> = [
        ("class", class.name_any()),
        ("cluster", format!("{namespace}.{}", class.spec.cluster)),
        ("rootMode", volumes.root_mode.clone()),
        ("rootUid", volumes.root_uid.to_string()),
        ("rootGid", volumes.root_gid.to_string()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into();
    if volumes.pin_to_zone {
        parameters.insert("pinToZone".into(), "true".into());
    }
    for step in SECRET_STEPS {
        let prefix = format!("csi.storage.k8s.io/{step}-secret");
        parameters.insert(format!("{prefix}-name"), csi_secret(&class.spec.cluster));
        parameters.insert(format!("{prefix}-namespace"), namespace.clone());
    }
    let default = ("storageclass.kubernetes.io/is-default-class", "true");
    StorageClass {
        metadata: ObjectMeta {
            annotations: volumes
                .default
                .then(|| [(default.0.to_owned(), default.1.to_owned())].into()),
            ..metadata(class)
        },
        provisioner: DRIVER.into(),
        parameters: Some(parameters),
        reclaim_policy: Some(
            match volumes.reclaim_policy {
                ReclaimPolicy::Delete => "Delete",
                ReclaimPolicy::Retain => "Retain",
            }
            .into(),
        ),
        volume_binding_mode: Some(
            match volumes.binding {
                VolumeBinding::Immediate => "Immediate",
                VolumeBinding::WaitForFirstConsumer => "WaitForFirstConsumer",
            }
            .into(),
        ),
        allow_volume_expansion: Some(true),
        mount_options: (!volumes.mount_options.is_empty()).then(|| volumes.mount_options.clone()),
        ..StorageClass::default()
    }
}

/// Whether all of it that cannot be changed is the same.
#[must_use]
pub fn is_same_storage_class(old: &StorageClass, new: &StorageClass) -> bool {
    let options = |class: &StorageClass| class.mount_options.clone().unwrap_or_default();
    old.parameters == new.parameters
        && old.reclaim_policy == new.reclaim_policy
        && old.volume_binding_mode == new.volume_binding_mode
        && options(old) == options(new)
}

/// The VolumeAttributesClass: a claim that names it has its volume in the class, and its mounts
/// prefer what the class does, whatever was said of them before.
#[must_use]
pub fn volume_attributes_class(class: &ChunkStorageClass) -> VolumeAttributesClass {
    let parameters = [
        ("class", class.name_any()),
        ("preferredLabels", String::new()),
    ];
    VolumeAttributesClass {
        metadata: metadata(class),
        driver_name: DRIVER.into(),
        parameters: Some(
            parameters
                .map(|(key, value)| (key.to_owned(), value))
                .into(),
        ),
    }
}

fn metadata(class: &ChunkStorageClass) -> ObjectMeta {
    let labels = [
        ("app.kubernetes.io/managed-by", MANAGED_BY),
        (OWNER_LABEL, &class.uid().unwrap_or_default()),
        (CLUSTER_LABEL, &class.spec.cluster),
    ];
    ObjectMeta {
        name: Some(class_kubernetes_name(class)),
        labels: Some(
            labels
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
        ),
        ..ObjectMeta::default()
    }
}

/// Calls of the driver that are given the secret.
const SECRET_STEPS: [&str; 4] = [
    "provisioner",
    "controller-expand",
    "controller-modify",
    "node-stage",
];
