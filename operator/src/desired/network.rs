//! Services, network policies, and the secret by which volumes find their cluster.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Secret, Service, ServicePort, ServiceSpec};
use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort,
    NetworkPolicySpec,
};
use k8s_openapi::api::rbac::v1::{PolicyRule, Role, RoleBinding, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt as _;

use super::managers::manager_address;
use super::names::{
    COMPONENT_LABEL, Component, component_labels, csi_secret, labels, manager_service,
    match_labels, metadata, owner, selector,
};
use super::{Object, World};
use crate::api::HitherCluster;
use crate::etcd::{CLIENT_PORT, PEER_PORT};

/// Port of the managers.
pub(crate) const MANAGER_PORT: u16 = 7650;
/// Port of the metadata servers.
pub(crate) const METADATA_PORT: u16 = 7651;
/// Where a metadata server answers probes.
pub(crate) const PROBES_PORT: u16 = 7652;
/// Port of the chunkservers.
pub(crate) const DATA_PORT: u16 = 7420;

/// The Service that finds a manager: every manager says who leads.
pub(crate) fn services(cluster: &HitherCluster) -> Vec<Object> {
    let name = cluster.name_any();
    let service = Service {
        metadata: metadata(
            cluster,
            manager_service(&name),
            component_labels(cluster, Component::Manager),
            owner(cluster),
        ),
        spec: Some(ServiceSpec {
            selector: Some(selector(&name, Component::Manager)),
            ports: Some(vec![ServicePort {
                name: Some("manager".into()),
                port: i32::from(MANAGER_PORT),
                target_port: Some(IntOrString::Int(i32::from(MANAGER_PORT))),
                protocol: Some("TCP".into()),
                ..ServicePort::default()
            }]),
            ..ServiceSpec::default()
        }),
        ..Service::default()
    };
    vec![Object::new(&service)]
}

/// Managers, metadata servers and chunkservers take what comes to their ports, from everywhere:
/// mounts run in the network of their node.
pub(crate) fn policies(cluster: &HitherCluster, world: &World) -> Vec<Object> {
    let embedded = cluster.spec.metadata_store.embedded.is_some();
    let ports = |component| match component {
        Component::Manager if embedded => vec![MANAGER_PORT, METADATA_PORT],
        Component::Manager => vec![MANAGER_PORT],
        Component::Metadata => vec![METADATA_PORT],
        Component::Chunkserver => vec![DATA_PORT],
        Component::Etcd | Component::Dump => Vec::new(),
    };
    let mut components = vec![Component::Manager, Component::Chunkserver];
    if !embedded {
        components.push(Component::Metadata);
    }
    let name = cluster.name_any();
    let one = |component: Component| {
        let policy = NetworkPolicy {
            metadata: metadata(
                cluster,
                format!("{name}-{}", component.as_str()),
                component_labels(cluster, component),
                owner(cluster),
            ),
            spec: Some(NetworkPolicySpec {
                pod_selector: Some(match_labels(selector(&name, component))),
                policy_types: Some(vec!["Ingress".into()]),
                ingress: Some(vec![NetworkPolicyIngressRule {
                    ports: Some(ports(component).into_iter().map(port).collect()),
                    ..NetworkPolicyIngressRule::default()
                }]),
                ..NetworkPolicySpec::default()
            }),
        };
        Object::new(&policy)
    };
    let mut policies: Vec<Object> = components.into_iter().map(one).collect();
    if cluster.spec.metadata_store.managed_etcd.is_some() {
        policies.push(etcd_policy(cluster, world));
    }
    policies
}

/// The members of a managed etcd take managers, metadata servers, the operator and each other.
fn etcd_policy(cluster: &HitherCluster, world: &World) -> Object {
    let name = cluster.name_any();
    let of = |component| NetworkPolicyPeer {
        pod_selector: Some(match_labels(selector(&name, component))),
        ..NetworkPolicyPeer::default()
    };
    let label = |key: &str, value: &str| match_labels([(key.into(), value.into())].into());
    let operator = NetworkPolicyPeer {
        namespace_selector: Some(label("kubernetes.io/metadata.name", &world.operator)),
        pod_selector: Some(label(COMPONENT_LABEL, "operator")),
        ..NetworkPolicyPeer::default()
    };
    let rule = |from, of: u16| NetworkPolicyIngressRule {
        from: Some(from),
        ports: Some(vec![port(of)]),
    };
    let clients = vec![
        of(Component::Manager),
        of(Component::Metadata),
        of(Component::Etcd),
        operator,
    ];
    Object::new(&NetworkPolicy {
        metadata: metadata(
            cluster,
            format!("{name}-{}", Component::Etcd.as_str()),
            component_labels(cluster, Component::Etcd),
            owner(cluster),
        ),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(match_labels(selector(&name, Component::Etcd))),
            policy_types: Some(vec!["Ingress".into()]),
            ingress: Some(vec![
                rule(clients, CLIENT_PORT),
                rule(vec![of(Component::Etcd)], PEER_PORT),
            ]),
            ..NetworkPolicySpec::default()
        }),
    })
}

fn port(port: u16) -> NetworkPolicyPort {
    NetworkPolicyPort {
        port: Some(IntOrString::Int(i32::from(port))),
        protocol: Some("TCP".into()),
        ..NetworkPolicyPort::default()
    }
}

/// What a volume needs to find its cluster, and the right of the provisioner to read it. It has no
/// owner: volumes need it for as long as they are.
pub(crate) fn csi_secret_objects(cluster: &HitherCluster, world: &World) -> Vec<Object> {
    let Some(id) = &world.cluster_id else {
        return Vec::new();
    };
    let name = csi_secret(&cluster.name_any());
    let text = |text: &str| ByteString(text.as_bytes().to_vec());
    let secret = Secret {
        metadata: metadata(cluster, name.clone(), labels(cluster), None),
        data: Some(
            [
                ("managers".to_owned(), text(&manager_address(cluster))),
                ("clusterID".to_owned(), text(id)),
            ]
            .into(),
        ),
        ..Secret::default()
    };
    let mut objects = vec![Object::new(&secret)];
    if let Some((namespace, account)) = &world.provisioner {
        let role = Role {
            metadata: metadata(cluster, name.clone(), labels(cluster), None),
            rules: Some(vec![PolicyRule {
                api_groups: Some(vec![String::new()]),
                resources: Some(vec!["secrets".into()]),
                resource_names: Some(vec![name.clone()]),
                verbs: vec!["get".into()],
                ..PolicyRule::default()
            }]),
        };
        let binding = RoleBinding {
            metadata: metadata(cluster, name.clone(), labels(cluster), None),
            role_ref: RoleRef {
                api_group: "rbac.authorization.k8s.io".into(),
                kind: "Role".into(),
                name,
            },
            subjects: Some(vec![Subject {
                kind: "ServiceAccount".into(),
                name: account.clone(),
                namespace: Some(namespace.clone()),
                ..Subject::default()
            }]),
        };
        objects.extend([Object::new(&role), Object::new(&binding)]);
    }
    objects
}
