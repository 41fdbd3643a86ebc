//! Claims that are to be larger. Pure.
//!
//! The claims in a StatefulSet are for good: it keeps the sizes it was made with, and what it has
//! made of them is enlarged claim by claim.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt as _;

use crate::api::{ChunkserverPool, HitherCluster, Storage};
use crate::desired::{etcd_set, manager_set, pool_set, pool_zones};
use crate::quantity::bytes_of;
use crate::seen::ordinal;

/// The size that the claims of each set are to have, for those that have claims.
#[must_use]
pub fn wanted(cluster: &HitherCluster, pools: &[ChunkserverPool]) -> BTreeMap<String, Quantity> {
    let name = cluster.name_any();
    let store = &cluster.spec.metadata_store;
    let mut sizes = BTreeMap::new();
    let mut add = |set: String, storage: &Storage| {
        sizes.extend(
            storage
                .claim
                .iter()
                .map(|claim| (set.clone(), claim.size.clone())),
        );
    };
    if let Some(embedded) = &store.embedded {
        add(manager_set(&name), &embedded.storage);
    }
    if let Some(etcd) = &store.managed_etcd {
        add(etcd_set(&name), &etcd.storage);
    }
    for pool in pools {
        for zone in pool_zones(cluster, pool) {
            add(
                pool_set(&name, &pool.name_any(), &zone.name),
                &pool.spec.storage,
            );
        }
    }
    sizes
}

/// The sizes that sets were made with.
#[must_use]
pub fn made_with(sets: &[StatefulSet]) -> BTreeMap<String, Quantity> {
    let size = |set: &StatefulSet| {
        let size = request(templates(set).first()?)?.clone();
        Some((set.name_any(), size))
    };
    sets.iter().filter_map(size).collect()
}

/// Whether claims of a set have to be looked at: it was made with another size.
#[must_use]
pub fn may_lag(sets: &[StatefulSet], wanted: &BTreeMap<String, Quantity>) -> bool {
    let made = made_with(sets);
    let mut both = wanted
        .iter()
        .filter_map(|(set, size)| Some((size, made.get(set)?)));
    both.any(|(wanted, made)| bytes_of(wanted) != bytes_of(made))
}

/// The claims that are smaller than wanted, and what they are to ask for.
#[must_use]
pub fn too_small(
    sets: &[StatefulSet],
    claims: &[PersistentVolumeClaim],
    wanted: &BTreeMap<String, Quantity>,
) -> Vec<(String, Quantity)> {
    let size_of = |claim: &PersistentVolumeClaim| {
        let of = |set: &&StatefulSet| {
            templates(set).iter().any(|template| {
                let prefix = format!("{}-{}", template.name_any(), set.name_any());
                ordinal(&prefix, &claim.name_any()).is_some()
            })
        };
        wanted.get(&sets.iter().find(of)?.name_any())
    };
    // One that has no volume yet cannot be changed.
    let is_bound = |claim: &&PersistentVolumeClaim| {
        let phase = claim
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        phase == Some("Bound")
    };
    let small = |claim: &PersistentVolumeClaim| {
        let size = size_of(claim)?;
        let (now, then) = (bytes_of(request(claim)?)?, bytes_of(size)?);
        (now < then).then(|| (claim.name_any(), size.clone()))
    };
    claims.iter().filter(is_bound).filter_map(small).collect()
}

fn templates(set: &StatefulSet) -> &[PersistentVolumeClaim] {
    let spec = set.spec.as_ref();
    spec.and_then(|spec| spec.volume_claim_templates.as_deref())
        .unwrap_or_default()
}

fn request(claim: &PersistentVolumeClaim) -> Option<&Quantity> {
    let resources = claim.spec.as_ref()?.resources.as_ref()?;
    resources.requests.as_ref()?.get("storage")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn claim(name: &str, size: &str) -> Value {
        json!({
            "metadata": {"name": name},
            "spec": {"resources": {"requests": {"storage": size}}},
            "status": {"phase": "Bound"},
        })
    }

    fn set(name: &str, size: &str) -> StatefulSet {
        serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {
                "selector": {}, "template": {}, "serviceName": "",
                "volumeClaimTemplates": [claim("disk-0", size), claim("disk-1", size)],
            },
        }))
        .unwrap()
    }

    fn claims(all: &[(&str, &str)]) -> Vec<PersistentVolumeClaim> {
        let one = |(name, size): &(&str, &str)| serde_json::from_value(claim(name, size)).unwrap();
        all.iter().map(one).collect()
    }

    fn sizes(all: &[(&str, &str)]) -> BTreeMap<String, Quantity> {
        let one = |(set, size): &(&str, &str)| ((*set).to_owned(), Quantity((*size).to_owned()));
        all.iter().map(one).collect()
    }

    #[test]
    fn claims_of_a_set_that_are_too_small_are_enlarged() {
        let sets = [set("demo-main-a", "10Gi"), set("demo-main-b", "10Gi")];
        let wanted = sizes(&[("demo-main-a", "20Gi"), ("demo-main-b", "10Gi")]);
        assert!(may_lag(&sets, &wanted));
        let mut there = claims(&[
            ("disk-0-demo-main-a-0", "10Gi"),
            ("disk-1-demo-main-a-11", "10Gi"),
            ("disk-0-demo-main-a-1", "20Gi"),
            ("disk-0-demo-main-a-2", "30Gi"),
            ("disk-0-demo-main-b-0", "10Gi"),
            // Of another cluster or of nobody.
            ("disk-0-demo-main-a-a-0", "10Gi"),
            ("disk-2-demo-main-a-0", "10Gi"),
            ("dumps", "1Gi"),
        ]);
        let mut unbound = there[0].clone();
        unbound.metadata.name = Some("disk-0-demo-main-a-3".into());
        unbound.status.as_mut().unwrap().phase = Some("Pending".into());
        there.push(unbound);
        let small = too_small(&sets, &there, &wanted);
        let names: Vec<&str> = small.iter().map(|(name, _)| &name[..]).collect();
        assert_eq!(names, ["disk-0-demo-main-a-0", "disk-1-demo-main-a-11"]);
        assert!(small.iter().all(|(_, size)| size.0 == "20Gi"));
    }

    #[test]
    fn a_set_keeps_the_size_it_was_made_with() {
        let sets = [set("x", "10Gi")];
        assert_eq!(made_with(&sets), sizes(&[("x", "10Gi")]));
        assert!(!may_lag(&sets, &sizes(&[("x", "10240Mi"), ("y", "1Gi")])));
    }
}
