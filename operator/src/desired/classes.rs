//! The Kubernetes StorageClass of a class.

use std::collections::BTreeMap;

use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt as _;

use super::names::{CLUSTER_LABEL, MANAGED_BY, OWNER_LABEL, csi_secret};
use crate::api::{ChunkStorageClass, DRIVER, ReclaimPolicy, VolumeBinding};

/// Name of the StorageClass: `NAMESPACE-CLUSTER-CLASS`.
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
    for step in SECRET_STEPS {
        let prefix = format!("csi.storage.k8s.io/{step}-secret");
        parameters.insert(format!("{prefix}-name"), csi_secret(&class.spec.cluster));
        parameters.insert(format!("{prefix}-namespace"), namespace.clone());
    }
    let default = ("storageclass.kubernetes.io/is-default-class", "true");
    StorageClass {
        metadata: ObjectMeta {
            name: Some(class_kubernetes_name(class)),
            labels: Some(
                [
                    ("app.kubernetes.io/managed-by", MANAGED_BY),
                    (OWNER_LABEL, &class.uid().unwrap_or_default()),
                    (CLUSTER_LABEL, &class.spec.cluster),
                ]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
            ),
            annotations: volumes
                .default
                .then(|| [(default.0.to_owned(), default.1.to_owned())].into()),
            ..ObjectMeta::default()
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

/// Calls of the driver that are given the secret.
const SECRET_STEPS: [&str; 4] = [
    "provisioner",
    "controller-expand",
    "controller-modify",
    "node-stage",
];
