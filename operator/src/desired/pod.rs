//! What the pods of all components have in common.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{
    Affinity, Capabilities, ConfigMapVolumeSource, Container, ContainerPort, EnvVar, EnvVarSource,
    HTTPGetAction, NodeAffinity, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm,
    ObjectFieldSelector, PodSecurityContext, PodSpec, Probe, SeccompProfile, SecurityContext,
    TCPSocketAction, TopologySpreadConstraint, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::World;
use super::names::match_labels;
use super::network::PROBES_PORT;
use crate::api::{HitherCluster, PodSettings};

/// One server's pod, before its kind adds to it.
pub(crate) struct Server<'a> {
    pub(crate) cluster: &'a HitherCluster,
    pub(crate) world: &'a World,
    pub(crate) settings: &'a PodSettings,
    /// Name of the container, first word of the command.
    pub(crate) role: &'static str,
    pub(crate) args: Vec<String>,
    pub(crate) ports: Vec<(&'static str, u16)>,
    /// The ConfigMap with the role's file, mounted at [`CONFIG_DIR`].
    pub(crate) config: String,
    pub(crate) mounts: Vec<VolumeMount>,
    pub(crate) volumes: Vec<Volume>,
    /// Zones the pod may run in.
    pub(crate) zones: Vec<String>,
    /// Labels of the pods to keep apart, and by which label of the node.
    pub(crate) spread: (BTreeMap<String, String>, &'static str),
    /// Seconds the process gets to end.
    pub(crate) grace_seconds: i64,
    /// Whether it listens at its first port only while it serves; how it is it then says at
    /// [`PROBES_PORT`].
    pub(crate) may_stand_by: bool,
}

impl Server<'_> {
    pub(crate) fn spec(mut self) -> PodSpec {
        let spec = &self.cluster.spec;
        let mut volumes = std::mem::take(&mut self.volumes);
        volumes.push(Volume {
            name: "config".into(),
            config_map: Some(ConfigMapVolumeSource {
                name: self.config.clone(),
                ..ConfigMapVolumeSource::default()
            }),
            ..Volume::default()
        });
        let (apart, by) = &self.spread;
        PodSpec {
            affinity: Some(in_zones(&self.zones)),
            automount_service_account_token: Some(false),
            enable_service_links: Some(false),
            image_pull_secrets: some(spec.image_pull_secrets.clone()),
            node_selector: (!self.settings.node_selector.is_empty())
                .then(|| self.settings.node_selector.clone()),
            priority_class_name: self.settings.priority_class_name.clone(),
            security_context: Some(pod_security()),
            termination_grace_period_seconds: Some(self.grace_seconds),
            tolerations: some(self.settings.tolerations.clone()),
            topology_spread_constraints: Some(vec![spread_over(
                apart.clone(),
                by,
                "ScheduleAnyway",
            )]),
            containers: vec![self.container()],
            volumes: Some(volumes),
            ..PodSpec::default()
        }
    }

    fn container(self) -> Container {
        let spec = &self.cluster.spec;
        let mut mounts = self.mounts;
        mounts.push(VolumeMount {
            name: "config".into(),
            mount_path: CONFIG_DIR.into(),
            read_only: Some(true),
            ..VolumeMount::default()
        });
        let mut args = vec![
            self.role.to_owned(),
            format!("--config={CONFIG_DIR}/{}.yaml", self.role),
        ];
        args.extend(self.args);
        let port = self.ports.first().map_or(0, |(_, port)| *port);
        let asks = |path, period, failures| {
            if self.may_stand_by {
                over_http(path, period, failures)
            } else {
                over_tcp(port, period, failures)
            }
        };
        Container {
            name: self.role.into(),
            image: Some(spec.image.clone().unwrap_or(self.world.image.clone())),
            image_pull_policy: spec.image_pull_policy.clone(),
            command: Some(vec!["/usr/local/bin/hither".into()]),
            args: Some(args),
            env: Some(vec![
                from_field("POD_IP", "status.podIP"),
                from_field("NODE_NAME", "spec.nodeName"),
                from_field("POD_NAME", "metadata.name"),
            ]),
            ports: Some(
                self.ports
                    .iter()
                    .map(|(name, port)| container_port(name, *port))
                    .collect(),
            ),
            readiness_probe: Some(asks("/readyz", 5, 2)),
            liveness_probe: Some(asks("/livez", 20, 6)),
            // Who answers probes does so from the beginning, also while it waits for etcd.
            startup_probe: (!self.may_stand_by).then(|| over_tcp(port, 2, 300)),
            resources: self.settings.resources.clone(),
            security_context: Some(container_security()),
            volume_mounts: Some(mounts),
            ..Container::default()
        }
    }
}

fn over_tcp(port: u16, period: i32, failures: i32) -> Probe {
    Probe {
        tcp_socket: Some(TCPSocketAction {
            port: IntOrString::Int(i32::from(port)),
            ..TCPSocketAction::default()
        }),
        ..probe(period, failures)
    }
}

fn over_http(path: &str, period: i32, failures: i32) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::Int(i32::from(PROBES_PORT)),
            ..HTTPGetAction::default()
        }),
        ..probe(period, failures)
    }
}

fn probe(period: i32, failures: i32) -> Probe {
    Probe {
        period_seconds: Some(period),
        failure_threshold: Some(failures),
        timeout_seconds: Some(5),
        ..Probe::default()
    }
}

/// As whom the containers of a pod run.
pub(crate) fn pod_security() -> PodSecurityContext {
    PodSecurityContext {
        run_as_non_root: Some(true),
        run_as_user: Some(USER),
        run_as_group: Some(USER),
        fs_group: Some(USER),
        fs_group_change_policy: Some("OnRootMismatch".into()),
        seccomp_profile: Some(SeccompProfile {
            type_: "RuntimeDefault".into(),
            ..SeccompProfile::default()
        }),
        ..PodSecurityContext::default()
    }
}

/// What a container may do.
pub(crate) fn container_security() -> SecurityContext {
    SecurityContext {
        allow_privilege_escalation: Some(false),
        read_only_root_filesystem: Some(true),
        capabilities: Some(Capabilities {
            drop: Some(vec!["ALL".into()]),
            ..Capabilities::default()
        }),
        ..SecurityContext::default()
    }
}

/// Keeps pods apart by a label of the nodes.
pub(crate) fn spread_over(
    pods: BTreeMap<String, String>,
    by: &str,
    otherwise: &str,
) -> TopologySpreadConstraint {
    TopologySpreadConstraint {
        label_selector: Some(match_labels(pods)),
        max_skew: 1,
        topology_key: by.into(),
        when_unsatisfiable: otherwise.into(),
        ..TopologySpreadConstraint::default()
    }
}

/// Only on nodes of these zones.
pub(crate) fn in_zones(zones: &[String]) -> Affinity {
    let here = NodeSelectorRequirement {
        key: ZONE_KEY.into(),
        operator: "In".into(),
        values: Some(zones.to_vec()),
    };
    Affinity {
        node_affinity: Some(NodeAffinity {
            required_during_scheduling_ignored_during_execution: Some(NodeSelector {
                node_selector_terms: vec![NodeSelectorTerm {
                    match_expressions: Some(vec![here]),
                    ..NodeSelectorTerm::default()
                }],
            }),
            ..NodeAffinity::default()
        }),
        ..Affinity::default()
    }
}

/// The zones the pods of a set may run in.
#[must_use]
pub fn zones_of(set: &StatefulSet) -> Option<Vec<String>> {
    let spec = set.spec.as_ref()?.template.spec.as_ref()?;
    let nodes = spec.affinity.as_ref()?.node_affinity.as_ref()?;
    let selector = nodes
        .required_during_scheduling_ignored_during_execution
        .as_ref()?;
    let expressions = selector
        .node_selector_terms
        .first()?
        .match_expressions
        .as_ref()?;
    let here = expressions.iter().find(|one| one.key == ZONE_KEY)?;
    here.values.clone()
}

pub(crate) fn from_field(name: &str, path: &str) -> EnvVar {
    EnvVar {
        name: name.into(),
        value_from: Some(EnvVarSource {
            field_ref: Some(ObjectFieldSelector {
                field_path: path.into(),
                ..ObjectFieldSelector::default()
            }),
            ..EnvVarSource::default()
        }),
        ..EnvVar::default()
    }
}

pub(crate) fn container_port(name: &str, port: u16) -> ContainerPort {
    ContainerPort {
        name: Some(name.into()),
        container_port: i32::from(port),
        protocol: Some("TCP".into()),
        ..ContainerPort::default()
    }
}

pub(crate) fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

/// Where a role finds its file.
pub(crate) const CONFIG_DIR: &str = "/etc/hither";
/// Label of nodes with their zone.
pub const ZONE_KEY: &str = "topology.kubernetes.io/zone";
/// Label of nodes with their name.
pub(crate) const HOST_KEY: &str = "kubernetes.io/hostname";
/// User and group the servers run as; nobody's in the image.
const USER: i64 = 65_532;
