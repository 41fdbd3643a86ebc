//! What the API server refuses, each rule with its message.

use hither_operator::api::{ChunkStorageClass, ChunkserverPool, HitherCluster};
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use kube::{Api, Resource, ResourceExt as _};
use serde_json::{Value, json};

use crate::support::{Place, sample};

/// Tries a resource with a part of it changed; what the API server says against it.
async fn refusal<K>(place: &Place, file: &str, change: Value) -> String
where
    K: Resource<DynamicType = ()>,
{
    let mut value: Value = sample(file);
    json_patch(&mut value, &change);
    let object: DynamicObject = serde_json::from_value(value).unwrap();
    let resource = kube::api::ApiResource::erase::<K>(&());
    let api: Api<DynamicObject> =
        Api::namespaced_with(place.client.clone(), &place.name, &resource);
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    match api.create(&dry_run, &object).await {
        Ok(_) => "taken".into(),
        Err(error) => error.to_string(),
    }
}

/// A merge patch, as the API server does it.
fn json_patch(value: &mut Value, change: &Value) {
    let (Value::Object(target), Value::Object(change)) = (&mut *value, change) else {
        *value = change.clone();
        return;
    };
    for (key, change) in change {
        if change.is_null() {
            target.remove(key);
        } else {
            json_patch(target.entry(key).or_insert(Value::Null), change);
        }
    }
}

#[tokio::test]
async fn clusters_that_cannot_be_are_refused() {
    let place = Place::new("rules").await;
    let store = |store: Value| json!({"spec": {"metadataStore": store}});
    let etcd = |endpoint: &str, tls: bool| {
        let mut etcd = json!({"endpoints": [endpoint]});
        if tls {
            etcd["tls"] = json!({"secretName": "s"});
        }
        store(json!({"embedded": null, "etcd": etcd}))
    };
    let managed =
        |storage: Value| store(json!({"embedded": null, "managedEtcd": {"storage": storage}}));
    let cases = [
        (
            json!({"metadata": {"name": "x".repeat(31)}}),
            "at most 30 characters",
        ),
        (json!({"metadata": {"name": "1x"}}), "a letter first"),
        (
            json!({"spec": {"managers": {"replicas": 2}}}),
            "one manager",
        ),
        (
            json!({"spec": {"metadataServers": {"standbys": 1}}}),
            "no standbys",
        ),
        (json!({"spec": {"zones": []}}), "zones"),
        (
            json!({"spec": {"zones": [{"name": "a", "letter": "A"}, {"name": "b", "letter": "A"}]}}),
            "same letter",
        ),
        (
            json!({"spec": {"zones": [{"name": "a", "letter": "a"}]}}),
            "letter",
        ),
        (
            json!({"spec": {"distances": [{"from": "eu-1a", "to": "nowhere", "distance": 1}]}}),
            "between zones of the cluster",
        ),
        (
            json!({"spec": {"metadataStore": {"embedded": null}}}),
            "exactly one of embedded, managedEtcd and etcd",
        ),
        (
            json!({"spec": {"metadataStore": {"etcd": {"endpoints": ["http://e:1"]}}}}),
            "exactly one of embedded, managedEtcd and etcd",
        ),
        (etcd("https://e:2379", false), "begin with https:// if tls"),
        (etcd("http://e:2379", true), "begin with https:// if tls"),
        (etcd("e:2379", false), "http://HOST:PORT"),
        (
            managed(json!({"hostPath": {"paths": ["/x"]}})),
            "has to keep its volume",
        ),
        (
            managed(json!({"claim": {"size": "1Gi", "disks": 2}})),
            "on one volume",
        ),
        (managed(json!({})), "exactly one of claim, hostPath"),
        (
            store(json!({"dumps": {"schedule": "hourly", "claimName": "d"}})),
            "a schedule has five fields",
        ),
        (
            json!({"spec": {"metadataStore": {"embedded": {"storage": {"claim": null, "hostPath": {"paths": ["/x"]}}}}}}),
            "follow its pod",
        ),
        (
            json!({"spec": {"metadataStore": {"embedded": {"storage": {"claim": {"disks": 2}}}}}}),
            "one volume",
        ),
        (
            json!({"spec": {"imagePullPolicy": "Sometimes"}}),
            "Always, IfNotPresent or Never",
        ),
        (
            json!({"spec": {"sessionLeaseSeconds": 1}}),
            "sessionLeaseSeconds",
        ),
    ];
    for (change, says) in cases {
        let said = refusal::<HitherCluster>(&place, "cluster.yaml", change.clone()).await;
        assert!(said.contains(says), "{change}: {said}");
    }
    for good in [
        etcd("http://e.x:2379", false),
        etcd("https://e.x:2379", true),
        managed(json!({"claim": {"size": "1Gi"}})),
        managed(json!({"emptyDir": {}})),
        store(json!({"dumps": {"schedule": "*/5 1-3 * * 1,2", "claimName": "d"}})),
    ] {
        let said = refusal::<HitherCluster>(&place, "cluster.yaml", good).await;
        assert_eq!(said, "taken");
    }
    place.end().await;
}

#[tokio::test]
async fn pools_and_classes_that_cannot_be_are_refused() {
    let place = Place::new("rules").await;
    let pools = [
        (
            json!({"spec": {"labels": ["media"]}}),
            "one letter A-Z or key=value",
        ),
        (
            json!({"spec": {"labels": ["ab"]}}),
            "one letter A-Z or key=value",
        ),
        (
            json!({"spec": {"labels": ["zone=x"]}}),
            "set by where a chunkserver runs",
        ),
        (
            json!({"spec": {"labels": ["media=a", "media=b"]}}),
            "a key can have one value",
        ),
        (json!({"spec": {"replicasPerZone": -1}}), "replicasPerZone"),
        (
            json!({"spec": {"storage": {"emptyDir": {}}}}),
            "exactly one of claim, hostPath and emptyDir",
        ),
        (
            json!({"spec": {"storage": {"claim": null}}}),
            "exactly one of claim, hostPath and emptyDir",
        ),
        (
            json!({"spec": {"storage": {"claim": null, "hostPath": {"paths": ["relative"]}}}}),
            "paths",
        ),
    ];
    for (change, says) in pools {
        let said = refusal::<ChunkserverPool>(&place, "pools.yaml", change.clone()).await;
        assert!(said.contains(says), "{change}: {said}");
    }
    let classes = [
        (json!({"spec": {"keep": "zone=a;{}"}}), "see docs/labels.md"),
        (json!({"spec": {"keep": "@4+2"}}), "kept as copies"),
        (json!({"spec": {"keep": ""}}), "keep"),
        (json!({"spec": {"minWriteCopies": 0}}), "minWriteCopies"),
        (json!({"spec": {"preferredLabels": "\"A\""}}), "no quotes"),
        (json!({"spec": {"mode": "maybe"}}), "mode"),
        (
            json!({"spec": {"volumes": {"rootMode": "rwx"}}}),
            "rootMode",
        ),
    ];
    for (change, says) in classes {
        let said = refusal::<ChunkStorageClass>(&place, "classes.yaml", change.clone()).await;
        assert!(said.contains(says), "{change}: {said}");
    }
    place.end().await;
}

#[tokio::test]
async fn what_cannot_be_changed_is_not() {
    let place = Place::new("rules").await;
    // Nobody acts on them: there is no operator.
    place.apply_samples().await;
    let mistyped = json!({"spec": {"defaultClass": "zone=eu-1a,,"}});
    let said = changed::<HitherCluster>(&place, "demo", &mistyped).await;
    assert_eq!(said, "taken: demo", "it has not begun");
    let begun = json!({"status": {"clusterId": "00ff"}});
    let clusters: Api<HitherCluster> = place.api();
    let merge = Patch::Merge(&begun);
    let params = PatchParams::default();
    clusters
        .patch_status("demo", &params, &merge)
        .await
        .unwrap();
    let cluster = [
        (
            json!({"spec": {"defaultClass": "2"}}),
            "only says how a new cluster begins",
        ),
        (
            json!({"spec": {"defaultClass": null}}),
            "only says how a new cluster begins",
        ),
        (
            json!({"spec": {"metadataStore": {"embedded": null, "etcd": {"endpoints": ["http://e:1"]}}}}),
            "kind of metadata store",
        ),
        (
            json!({"spec": {"metadataStore": {"embedded": null, "managedEtcd": {"storage": {"emptyDir": {}}}}}}),
            "kind of metadata store",
        ),
        (
            json!({"spec": {"metadataStore": {"embedded": {"storage": {"claim": {"size": "1Mi"}}}}}}),
            "never smaller",
        ),
        (
            json!({"spec": {"metadataStore": {"embedded": {"storage": {"claim": {"storageClassName": "other"}}}}}}),
            "number of claims cannot be changed",
        ),
    ];
    for (change, says) in cluster {
        let said = changed::<HitherCluster>(&place, "demo", &change).await;
        assert!(said.contains(says), "{change}: {said}");
    }
    let pool = [
        (
            json!({"spec": {"cluster": "other"}}),
            "cannot change its cluster",
        ),
        (
            json!({"spec": {"storage": {"claim": null, "emptyDir": {}}}}),
            "kind of storage cannot be changed",
        ),
        (
            json!({"spec": {"storage": {"claim": {"size": "1Mi"}}}}),
            "never smaller",
        ),
        (
            json!({"spec": {"storage": {"claim": {"size": "large"}}}}),
            "a quantity such as",
        ),
        (
            json!({"spec": {"storage": {"claim": {"size": "1Ei"}}}}),
            "taken",
        ),
    ];
    for (change, says) in pool {
        let said = changed::<ChunkserverPool>(&place, "main", &change).await;
        assert!(said.contains(says), "{change}: {said}");
    }
    let moved = json!({"spec": {"cluster": "other"}});
    let said = changed::<ChunkStorageClass>(&place, "everywhere", &moved).await;
    assert!(said.contains("cannot change its cluster"), "{said}");
    place.end().await;
}

async fn changed<K>(place: &Place, name: &str, change: &Value) -> String
where
    K: Resource<DynamicType = ()>,
{
    let resource = kube::api::ApiResource::erase::<K>(&());
    let api: Api<DynamicObject> =
        Api::namespaced_with(place.client.clone(), &place.name, &resource);
    match api
        .patch(name, &PatchParams::default(), &Patch::Merge(change))
        .await
    {
        Ok(changed) => format!("taken: {}", changed.name_any()),
        Err(error) => error.to_string(),
    }
}
