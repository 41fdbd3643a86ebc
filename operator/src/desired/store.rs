//! How managers and metadata servers reach an etcd.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{SecretVolumeSource, Volume, VolumeMount};
use kube::ResourceExt as _;

use super::World;
use super::etcd::{member_names, peers_domain};
use super::names::etcd_client_secret;
use crate::api::HitherCluster;
use crate::etcd::member::client_url;

/// What a server needs to reach etcd.
pub(crate) struct Store {
    pub(crate) args: Vec<String>,
    pub(crate) mounts: Vec<VolumeMount>,
    pub(crate) volumes: Vec<Volume>,
    /// Makes a new template of new certificates: they are read at the start.
    pub(crate) annotations: BTreeMap<String, String>,
}

/// Whether the metadata is outside the manager.
pub(crate) fn is_etcd(cluster: &HitherCluster) -> bool {
    let store = &cluster.spec.metadata_store;
    store.etcd.is_some() || store.managed_etcd.is_some()
}

/// `None` with the embedded store.
pub(crate) fn store(cluster: &HitherCluster, world: &World) -> Option<Store> {
    let spec = &cluster.spec.metadata_store;
    let name = cluster.name_any();
    let (endpoints, secret) = match (&spec.managed_etcd, &spec.etcd) {
        (Some(_), _) => {
            let domain = peers_domain(cluster);
            let one = |member: String| client_url(&member, &domain);
            let endpoints = member_names(&name).into_iter().map(one).collect();
            (endpoints, Some(etcd_client_secret(&name)))
        }
        (None, Some(etcd)) => {
            let secret = etcd.tls.as_ref().map(|tls| tls.secret_name.clone());
            (etcd.endpoints.clone(), secret)
        }
        (None, None) => return None,
    };
    let mut store = Store {
        args: vec![format!("--etcd={}", endpoints.join(","))],
        mounts: Vec::new(),
        volumes: Vec::new(),
        annotations: BTreeMap::new(),
    };
    if let Some(secret) = secret {
        store.args.push(format!("--etcd-tls={TLS_DIR}"));
        store.mounts.push(VolumeMount {
            name: "etcd-tls".into(),
            mount_path: TLS_DIR.into(),
            read_only: Some(true),
            ..VolumeMount::default()
        });
        store.volumes.push(secret_volume("etcd-tls", secret));
        let hash = world.certificates.clone().unwrap_or_default();
        store.annotations.insert(CERTIFICATES.into(), hash);
    }
    Some(store)
}

pub(crate) fn secret_volume(name: &str, secret: String) -> Volume {
    Volume {
        name: name.into(),
        secret: Some(SecretVolumeSource {
            secret_name: Some(secret),
            default_mode: Some(READABLE),
            ..SecretVolumeSource::default()
        }),
        ..Volume::default()
    }
}

/// Annotation with what stands for the certificates that pods have read.
pub(crate) const CERTIFICATES: &str = "hither.dev/certificates";
/// Where certificates are.
pub(crate) const TLS_DIR: &str = "/etc/hither-tls";
/// The owner and the group of the pod read it.
const READABLE: i32 = 0o440;
