//! The members of a managed etcd.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::apps::v1::{
    StatefulSet, StatefulSetPersistentVolumeClaimRetentionPolicy, StatefulSetSpec,
};
use k8s_openapi::api::core::v1::{
    ConfigMap, ConfigMapVolumeSource, Container, EmptyDirVolumeSource, HTTPGetAction, PodSpec,
    PodTemplateSpec, Probe, Secret, Service, ServicePort, ServiceSpec, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt as _;

use super::managers::on_delete;
use super::names::{
    Component, component_labels, etcd_authority_secret, etcd_client_secret, etcd_member_secret,
    etcd_peers, etcd_set, etcd_state, labels, match_labels, metadata, owner, selector,
};
use super::pod::{
    HOST_KEY, ZONE_KEY, container_port, container_security, from_field, in_zones, pod_security,
    some, spread_over,
};
use super::store::{CERTIFICATES, TLS_DIR, secret_volume};
use super::{Object, World, chunkservers};
use crate::api::{HitherCluster, ManagedEtcd};
use crate::etcd::certificates::{Certificates, Names, Pair};
use crate::etcd::member::NO_DATA_FILE;
use crate::etcd::state::State;
use crate::etcd::{CLIENT_PORT, HEALTH_PORT, MEMBERS, PEER_PORT, QUOTA_BYTES};

/// The members' names, which are their pods'.
#[must_use]
pub fn member_names(cluster: &str) -> Vec<String> {
    let set = etcd_set(cluster);
    (0..MEMBERS).map(|at| format!("{set}-{at}")).collect()
}

/// What follows a member's name in its host name.
#[must_use]
pub fn peers_domain(cluster: &HitherCluster) -> String {
    let namespace = cluster.namespace().unwrap_or_default();
    format!("{}.{namespace}.svc", etcd_peers(&cluster.name_any()))
}

/// A name that every member's certificate has.
#[must_use]
pub fn members_host(cluster: &HitherCluster) -> String {
    let namespace = cluster.namespace().unwrap_or_default();
    format!("{}.{namespace}.svc", etcd_set(&cluster.name_any()))
}

/// What the certificates of the cluster's etcd say.
#[must_use]
pub fn certificate_names(cluster: &HitherCluster) -> Names {
    let member = etcd_set(&cluster.name_any());
    Names {
        client: format!("{member}-client"),
        hosts: vec![
            format!("*.{}", peers_domain(cluster)),
            members_host(cluster),
            // Who forwards a port to look inside.
            "localhost".into(),
        ],
        member,
    }
}

pub(crate) fn objects(cluster: &HitherCluster, world: &World) -> Vec<Object> {
    let Some(etcd) = &cluster.spec.metadata_store.managed_etcd else {
        return Vec::new();
    };
    let name = cluster.name_any();
    let peers = Service {
        metadata: metadata(
            cluster,
            etcd_peers(&name),
            component_labels(cluster, Component::Etcd),
            owner(cluster),
        ),
        spec: Some(ServiceSpec {
            cluster_ip: Some("None".into()),
            selector: Some(selector(&name, Component::Etcd)),
            // Members find each other before they are ready: that is how they become so.
            publish_not_ready_addresses: Some(true),
            ports: Some(vec![
                service_port("client", CLIENT_PORT),
                service_port("peer", PEER_PORT),
            ]),
            ..ServiceSpec::default()
        }),
        ..Service::default()
    };
    let clients = Service {
        metadata: metadata(
            cluster,
            etcd_set(&name),
            component_labels(cluster, Component::Etcd),
            owner(cluster),
        ),
        spec: Some(ServiceSpec {
            selector: Some(selector(&name, Component::Etcd)),
            ports: Some(vec![service_port("client", CLIENT_PORT)]),
            ..ServiceSpec::default()
        }),
        ..Service::default()
    };
    vec![
        Object::new(&peers),
        Object::new(&clients),
        Object::new(&set(cluster, etcd, world)),
    ]
}

fn set(cluster: &HitherCluster, etcd: &ManagedEtcd, world: &World) -> StatefulSet {
    let name = etcd_set(&cluster.name_any());
    let labels = component_labels(cluster, Component::Etcd);
    let trust = world.trust.clone().unwrap_or_default();
    let made_with = world.claim_sizes.get(&name);
    StatefulSet {
        metadata: metadata(cluster, name, labels.clone(), owner(cluster)),
        spec: Some(StatefulSetSpec {
            replicas: Some(MEMBERS),
            service_name: Some(etcd_peers(&cluster.name_any())),
            selector: match_labels(selector(&cluster.name_any(), Component::Etcd)),
            pod_management_policy: Some("Parallel".into()),
            update_strategy: Some(on_delete()),
            template: PodTemplateSpec {
                metadata: Some(ObjectMeta {
                    labels: Some(labels),
                    // Certificates are read at each connection, whom to trust at the start.
                    annotations: Some([(CERTIFICATES.to_owned(), trust)].into()),
                    ..ObjectMeta::default()
                }),
                spec: Some(pod(cluster, etcd, world)),
            },
            volume_claim_templates: chunkservers::claims(&etcd.storage, DATA, made_with),
            persistent_volume_claim_retention_policy: Some(
                StatefulSetPersistentVolumeClaimRetentionPolicy {
                    when_deleted: Some("Retain".into()),
                    when_scaled: Some("Retain".into()),
                },
            ),
            ..StatefulSetSpec::default()
        }),
        ..StatefulSet::default()
    }
}

fn pod(cluster: &HitherCluster, etcd: &ManagedEtcd, world: &World) -> PodSpec {
    let spec = &cluster.spec;
    let name = cluster.name_any();
    let settings = &etcd.pods;
    let zones: Vec<String> = spec.zones.iter().map(|zone| zone.name.clone()).collect();
    let pods = selector(&name, Component::Etcd);
    let mut volumes = chunkservers::volumes(&etcd.storage, DATA);
    volumes.extend([
        Volume {
            name: RUN.into(),
            empty_dir: Some(EmptyDirVolumeSource::default()),
            ..Volume::default()
        },
        Volume {
            name: STATE.into(),
            config_map: Some(ConfigMapVolumeSource {
                name: etcd_state(&name),
                ..ConfigMapVolumeSource::default()
            }),
            ..Volume::default()
        },
        secret_volume(TLS, etcd_member_secret(&name)),
    ]);
    PodSpec {
        affinity: Some(in_zones(&zones)),
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        image_pull_secrets: some(spec.image_pull_secrets.clone()),
        node_selector: (!settings.node_selector.is_empty()).then(|| settings.node_selector.clone()),
        priority_class_name: settings.priority_class_name.clone(),
        security_context: Some(pod_security()),
        termination_grace_period_seconds: Some(30),
        tolerations: some(settings.tolerations.clone()),
        topology_spread_constraints: Some(vec![
            spread_over(pods.clone(), ZONE_KEY, "DoNotSchedule"),
            spread_over(pods, HOST_KEY, "ScheduleAnyway"),
        ]),
        init_containers: Some(vec![admission(cluster, etcd, world)]),
        containers: vec![member(cluster, etcd, world)],
        volumes: Some(volumes),
        ..PodSpec::default()
    }
}

/// Lets etcd start only where it may.
fn admission(cluster: &HitherCluster, etcd: &ManagedEtcd, world: &World) -> Container {
    let name = cluster.name_any();
    let args = vec![
        "member".to_owned(),
        "--name=$(POD_NAME)".into(),
        format!("--members={}", member_names(&name).join(",")),
        format!("--domain={}", peers_domain(cluster)),
        format!("--token={}", cluster.uid().unwrap_or_default()),
        format!("--subject={}", certificate_names(cluster).member),
        format!("--dir={DATA_DIR}"),
        format!("--state={STATE_DIR}"),
        format!("--tls={TLS_DIR}"),
        format!("--quota-bytes={QUOTA_BYTES}"),
        format!("--out={RUN_DIR}/{CONFIGURATION}"),
        format!("--told={RUN_DIR}/{NO_DATA_FILE}"),
    ];
    let mut mounts = mounts(etcd);
    mounts.push(read_only(STATE, STATE_DIR));
    Container {
        name: "admission".into(),
        command: Some(vec!["/usr/local/bin/hither-operator".into()]),
        args: Some(args),
        env: Some(vec![from_field("POD_NAME", "metadata.name")]),
        volume_mounts: Some(mounts),
        ..container(cluster, etcd, world)
    }
}

fn member(cluster: &HitherCluster, etcd: &ManagedEtcd, world: &World) -> Container {
    let probe = |path: &str, period, failures| {
        Some(Probe {
            http_get: Some(HTTPGetAction {
                path: Some(path.into()),
                port: IntOrString::Int(i32::from(HEALTH_PORT)),
                ..HTTPGetAction::default()
            }),
            period_seconds: Some(period),
            failure_threshold: Some(failures),
            timeout_seconds: Some(5),
            ..Probe::default()
        })
    };
    Container {
        name: "etcd".into(),
        command: Some(vec!["/usr/local/bin/etcd".into()]),
        args: Some(vec![format!("--config-file={RUN_DIR}/{CONFIGURATION}")]),
        ports: Some(vec![
            container_port("client", CLIENT_PORT),
            container_port("peer", PEER_PORT),
            container_port("health", HEALTH_PORT),
        ]),
        // Ready is who answers with a quorum behind it; alive is who answers at all.
        readiness_probe: probe("/readyz", 5, 2),
        liveness_probe: probe("/livez", 20, 6),
        startup_probe: probe("/livez", 2, 300),
        volume_mounts: Some(mounts(etcd)),
        ..container(cluster, etcd, world)
    }
}

fn container(cluster: &HitherCluster, etcd: &ManagedEtcd, world: &World) -> Container {
    let spec = &cluster.spec;
    Container {
        image: Some(spec.image.clone().unwrap_or(world.image.clone())),
        image_pull_policy: spec.image_pull_policy.clone(),
        // One runs after the other: a pod takes them once.
        resources: etcd.pods.resources.clone(),
        security_context: Some(container_security()),
        ..Container::default()
    }
}

fn mounts(etcd: &ManagedEtcd) -> Vec<VolumeMount> {
    let mut mounts = chunkservers::mounts(&etcd.storage, DATA, |_| DATA_DIR.into());
    mounts.push(VolumeMount {
        name: RUN.into(),
        mount_path: RUN_DIR.into(),
        ..VolumeMount::default()
    });
    mounts.push(read_only(TLS, TLS_DIR));
    mounts
}

fn read_only(name: &str, path: &str) -> VolumeMount {
    VolumeMount {
        name: name.into(),
        mount_path: path.into(),
        read_only: Some(true),
        ..VolumeMount::default()
    }
}

fn service_port(name: &str, port: u16) -> ServicePort {
    ServicePort {
        name: Some(name.into()),
        port: i32::from(port),
        target_port: Some(IntOrString::Int(i32::from(port))),
        protocol: Some("TCP".into()),
        ..ServicePort::default()
    }
}

/// What is recorded about the members: without an owner, since their claims stay when the cluster
/// goes.
#[must_use]
pub fn etcd_state_object(cluster: &HitherCluster, state: &State) -> Object {
    Object::new(&ConfigMap {
        metadata: metadata(
            cluster,
            etcd_state(&cluster.name_any()),
            component_labels(cluster, Component::Etcd),
            None,
        ),
        data: Some(state.data()),
        ..ConfigMap::default()
    })
}

/// The secrets with the certificates.
#[must_use]
pub fn certificate_secrets(cluster: &HitherCluster, certificates: &Certificates) -> Vec<Object> {
    let name = cluster.name_any();
    let trusted = certificates.trusted();
    let mut authority = BTreeMap::new();
    pair_fields(&mut authority, "", certificates.authority.as_ref());
    pair_fields(&mut authority, "next-", certificates.next.as_ref());
    if let Some(old) = &certificates.old {
        authority.insert("old-tls.crt".to_owned(), bytes(old));
    }
    let leaf = |pair: &Option<Pair>| {
        let mut data = BTreeMap::from([("ca.crt".to_owned(), bytes(&trusted))]);
        pair_fields(&mut data, "", pair.as_ref());
        data
    };
    let one = |name: String, data: BTreeMap<String, ByteString>| {
        Object::new(&Secret {
            metadata: metadata(cluster, name, labels(cluster), owner(cluster)),
            data: Some(data),
            ..Secret::default()
        })
    };
    vec![
        one(etcd_authority_secret(&name), authority),
        one(etcd_member_secret(&name), leaf(&certificates.member)),
        one(etcd_client_secret(&name), leaf(&certificates.client)),
    ]
}

/// The certificates as the secrets have them: authority's, members', clients'.
#[must_use]
pub fn certificates_of(secrets: [Option<&Secret>; 3]) -> Certificates {
    let text = |secret: Option<&Secret>, key: &str| {
        let value = secret?.data.as_ref()?.get(key)?;
        String::from_utf8(value.0.clone()).ok()
    };
    let pair = |secret, prefix: &str| {
        Some(Pair {
            certificate: text(secret, &format!("{prefix}tls.crt"))?,
            key: text(secret, &format!("{prefix}tls.key"))?,
        })
    };
    let [authority, member, client] = secrets;
    Certificates {
        authority: pair(authority, ""),
        next: pair(authority, "next-"),
        old: text(authority, "old-tls.crt"),
        member: pair(member, ""),
        client: pair(client, ""),
    }
}

fn pair_fields(data: &mut BTreeMap<String, ByteString>, prefix: &str, pair: Option<&Pair>) {
    if let Some(pair) = pair {
        data.insert(format!("{prefix}tls.crt"), bytes(&pair.certificate));
        data.insert(format!("{prefix}tls.key"), bytes(&pair.key));
    }
}

fn bytes(text: &str) -> ByteString {
    ByteString(text.as_bytes().to_vec())
}

/// Volumes, and where they are.
const DATA: &str = "data";
const DATA_DIR: &str = "/var/lib/etcd";
const RUN: &str = "run";
const RUN_DIR: &str = "/run/etcd";
const STATE: &str = "state";
const STATE_DIR: &str = "/etc/hither-state";
const TLS: &str = "tls";
/// etcd's configuration.
const CONFIGURATION: &str = "etcd.yaml";
