//! Pod disruption budgets that follow the data.

use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt as _;

use super::names::{
    Component, ZONE_LABEL, bounded, component_labels, match_labels, metadata, owner, selector, slug,
};
use super::store::is_etcd;
use super::{Object, World, metadata as mds};
use crate::api::HitherCluster;

/// Which chunkservers may be evicted now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Disruption {
    /// None: the data is not safe without them, or it is not known whether it is.
    #[default]
    Nobody,
    /// One, anywhere: all copies are there.
    One,
    /// Those of a zone whose copies are missing anyway; nobody elsewhere.
    InZone(String),
}

pub(crate) fn objects(cluster: &HitherCluster, world: &World) -> Vec<Object> {
    let name = cluster.name_any();
    let mut objects = vec![budget(
        cluster,
        Component::Manager,
        match_labels(selector(&name, Component::Manager)),
        1,
    )];
    if cluster.spec.metadata_store.managed_etcd.is_some() {
        let pods = match_labels(selector(&name, Component::Etcd));
        objects.push(budget(
            cluster,
            Component::Etcd,
            pods,
            i32::from(world.etcd_is_whole),
        ));
    }
    if is_etcd(cluster) && mds::standbys(cluster) > 0 {
        let pods = match_labels(selector(&name, Component::Metadata));
        objects.push(budget(cluster, Component::Metadata, pods, 1));
    }
    let mut pods = match_labels(selector(&name, Component::Chunkserver));
    let allowed = match &world.disruption {
        Disruption::Nobody => 0,
        Disruption::One => 1,
        Disruption::InZone(zone) => {
            pods.match_expressions = Some(vec![LabelSelectorRequirement {
                key: ZONE_LABEL.into(),
                operator: "NotIn".into(),
                values: Some(vec![bounded(&slug(zone), 63)]),
            }]);
            0
        }
    };
    objects.push(budget(cluster, Component::Chunkserver, pods, allowed));
    objects
}

fn budget(
    cluster: &HitherCluster,
    component: Component,
    pods: LabelSelector,
    allowed: i32,
) -> Object {
    Object::new(&PodDisruptionBudget {
        metadata: metadata(
            cluster,
            format!("{}-{}", cluster.name_any(), component.as_str()),
            component_labels(cluster, component),
            owner(cluster),
        ),
        spec: Some(PodDisruptionBudgetSpec {
            selector: Some(pods),
            max_unavailable: Some(IntOrString::Int(allowed)),
            // A pod that does not work holds nothing up.
            unhealthy_pod_eviction_policy: Some("AlwaysAllow".into()),
            ..PodDisruptionBudgetSpec::default()
        }),
        ..PodDisruptionBudget::default()
    })
}
