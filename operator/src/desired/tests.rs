//! What the samples ask for, as a whole.

use k8s_openapi::api::apps::v1::StatefulSet;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::*;
use crate::api::ChunkStorageClass;
use crate::etcd::certificates::Certificates;
use crate::etcd::state::State;

/// The resources of sample files, by kind.
fn sample(names: &[&str]) -> (HitherCluster, Vec<ChunkserverPool>, Vec<ChunkStorageClass>) {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/samples");
    let read = |name: &&str| std::fs::read_to_string(format!("{root}/{name}")).unwrap();
    let text = names.iter().map(read).collect::<Vec<_>>().join("\n---\n");
    let documents: Vec<&str> = text.split("\n---\n").collect();
    (
        of_kind(&documents, "HitherCluster").remove(0),
        of_kind(&documents, "ChunkserverPool"),
        of_kind(&documents, "ChunkStorageClass"),
    )
}

fn of_kind<K: DeserializeOwned + kube::ResourceExt>(documents: &[&str], kind: &str) -> Vec<K> {
    let of = |text: &&&str| text.contains(&format!("kind: {kind}\n"));
    let read = |text: &&str| {
        let mut one: K = serde_saphyr::from_str(text).unwrap();
        one.meta_mut().namespace = Some("files".into());
        one.meta_mut().uid = Some(format!("uid-of-{kind}"));
        one
    };
    documents.iter().filter(of).map(read).collect()
}

fn shown(objects: &[Object]) -> String {
    let one = |object: &Object| serde_saphyr::to_string(&object.object).unwrap();
    objects.iter().map(one).collect::<Vec<_>>().join("---\n")
}

fn world() -> World {
    World {
        image: "example.org/hither:1".into(),
        cluster_id: Some("00112233445566778899aabbccddeeff".into()),
        provisioner: Some(("system".into(), "hither-csi-controller".into())),
        disruption: Disruption::One,
        etcd_is_whole: true,
        certificates: Some("1234abcd".into()),
        trust: Some("abcd1234".into()),
        operator: "system".into(),
        ..World::default()
    }
}

#[test]
fn the_demo_is_one_manager_and_a_set_of_chunkservers_in_each_zone() {
    let (cluster, pools, _) = sample(&DEMO);
    insta::assert_snapshot!("demo", shown(&desired(&cluster, &pools, &world())));
}

#[test]
fn with_etcd_there_are_managers_and_metadata_servers() {
    let (cluster, pools, _) = sample(&["etcd/given.yaml"]);
    let objects = desired(&cluster, &pools, &world());
    let titles: Vec<String> = objects.iter().map(Object::title).collect();
    insta::assert_snapshot!("etcd_titles", titles.join("\n"));
    insta::assert_snapshot!("etcd", shown(&metadata::objects(&cluster, &world())));
}

/// The pods' labels and whom they stay away from, of a pool with these directories.
fn apart(cluster_name: &str, paths: &[&str]) -> (serde_json::Value, serde_json::Value) {
    let (mut cluster, mut pools, _) = sample(&DEMO);
    cluster.metadata.name = Some(cluster_name.into());
    pools[0].spec.storage = serde_json::from_value(json!({"hostPath": {"paths": paths}})).unwrap();
    let zone = &cluster.spec.zones[0];
    let objects = chunkservers::objects(&cluster, &pools[0], zone, &world());
    let set = json!(objects[1].object);
    let pods = &set["spec"]["template"];
    let anti = &pods["spec"]["affinity"]["podAntiAffinity"];
    (
        pods["metadata"]["labels"].clone(),
        anti["requiredDuringSchedulingIgnoredDuringExecution"].clone(),
    )
}

#[test]
fn servers_of_two_clusters_with_one_directory_are_kept_apart() {
    let away = |from: &serde_json::Value, labels: &serde_json::Value| {
        from.as_array().unwrap().iter().any(|term| {
            let wanted = term["labelSelector"]["matchLabels"].as_object().unwrap();
            wanted.iter().all(|(key, value)| labels[key] == *value)
        })
    };
    let (labels, _) = apart("one", &["/data/a", "/data/b"]);
    let (_, from) = apart("two", &["/data//b/"]);
    assert!(away(&from, &labels));
    assert_eq!(from[1]["namespaceSelector"], json!({}));
    let (_, from) = apart("two", &["/data/c"]);
    assert!(!away(&from, &labels), "they may share a node");
    let (_, from) = apart("one", &["/data/c"]);
    assert!(away(&from, &labels), "servers of a cluster never do");
}

#[test]
fn sets_keep_the_sizes_of_their_claims() {
    let (cluster, mut pools, _) = sample(&DEMO);
    let size = |world: &World, pools: &[ChunkserverPool]| {
        let zone = &cluster.spec.zones[0];
        let set = json!(chunkservers::objects(&cluster, &pools[0], zone, world)[1].object);
        set["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"].clone()
    };
    let made = size(&world(), &pools);
    let name = pool_set("demo", "main", &cluster.spec.zones[0].name);
    let kept = serde_json::from_value(made.clone()).unwrap();
    let world = World {
        claim_sizes: [(name, kept)].into(),
        ..world()
    };
    pools[0].spec.storage.claim.as_mut().unwrap().size.0 = "1Ti".into();
    assert_eq!(size(&world, &pools), made);
    assert_eq!(size(&self::world(), &pools), json!("1Ti"));
}

#[test]
fn nothing_is_deleted_by_kubernetes_while_a_finalizer_holds_its_owner() {
    for files in [&DEMO[..], &["etcd/cluster.yaml"]] {
        let (cluster, pools, _) = sample(files);
        for object in desired(&cluster, &pools, &world()) {
            let metadata = &object.object.metadata;
            assert_eq!(metadata.owner_references, None, "{}", object.title());
            if metadata.labels.as_ref().unwrap().contains_key(OWNER_LABEL) {
                continue;
            }
            // What the driver needs is removed by name.
            let of_the_driver = ["Secret", "Role", "RoleBinding"];
            assert!(of_the_driver.contains(&object.resource.kind.as_str()));
        }
    }
}

#[test]
fn the_embedded_manager_stays_as_it_is_when_zones_come_and_go() {
    let template = |cluster: &HitherCluster, world: &World| {
        let objects = desired(cluster, &[], world);
        let name = format!(
            "StatefulSet/{}-manager",
            cluster.metadata.name.as_ref().unwrap()
        );
        let set = objects.iter().find(|object| object.title() == name);
        let set: StatefulSet = serde_json::from_value(json!(set.unwrap().object)).unwrap();
        set
    };
    for (file, embedded) in [("cluster.yaml", true), ("etcd/cluster.yaml", false)] {
        let (mut cluster, _, _) = sample(&[file]);
        let before = template(&cluster, &world());
        let world = World {
            manager_zones: zones_of(&before),
            ..world()
        };
        assert_eq!(
            world.manager_zones.as_ref().unwrap().len(),
            cluster.spec.zones.len()
        );
        cluster.spec.zones.remove(0);
        let after = template(&cluster, &world);
        assert_eq!(zones_of(&after) == zones_of(&before), embedded);
        assert_eq!(after == before, embedded);
    }
}

#[test]
fn a_managed_etcd_is_three_members_over_the_zones() {
    let (cluster, pools, _) = sample(&["etcd/cluster.yaml"]);
    let objects = desired(&cluster, &pools, &world());
    let titles: Vec<String> = objects.iter().map(Object::title).collect();
    insta::assert_snapshot!("managed_titles", titles.join("\n"));
    let of_etcd: Vec<Object> = objects
        .into_iter()
        .filter(|object| {
            object.title().contains("prod-etcd") || object.title().contains("/prod-mds")
        })
        .collect();
    insta::assert_snapshot!("managed", shown(&of_etcd));
    let recorded = etcd_state_object(&cluster, &State::default());
    assert_eq!(recorded.object.metadata.owner_references, None);
}

#[test]
fn new_certificates_replace_servers_and_new_authorities_members() {
    let (cluster, pools, _) = sample(&["etcd/cluster.yaml"]);
    let templates = |world: &World| {
        let objects = desired(&cluster, &pools, world);
        ["prod-etcd", "prod-manager", "prod-mds", "prod-disks-eu-1a"].map(|name| {
            let title = format!("StatefulSet/{name}");
            let set = objects.iter().find(|object| object.title() == title);
            set.unwrap().object.data["spec"]["template"].clone()
        })
    };
    let before = templates(&world());
    let certificates = Some("other".to_owned());
    let renewed = templates(&World {
        certificates,
        ..world()
    });
    let changed = |after: &[serde_json::Value; 4]| {
        let mut changed = before
            .iter()
            .zip(after)
            .map(|(before, after)| before != after);
        [(); 4].map(|()| changed.next().unwrap())
    };
    assert_eq!(changed(&renewed), [false, true, true, false]);
    let trust = Some("other".to_owned());
    let followed = templates(&World { trust, ..world() });
    assert_eq!(changed(&followed), [true, false, false, false]);
}

#[test]
fn certificates_come_back_from_their_secrets() {
    use crate::etcd::certificates::Pair;
    let (cluster, _, _) = sample(&["etcd/cluster.yaml"]);
    let pair = |name: &str| {
        Some(Pair {
            certificate: format!("{name} certificate"),
            key: format!("{name} key"),
        })
    };
    let certificates = Certificates {
        authority: pair("authority"),
        next: pair("next"),
        old: Some("old".into()),
        member: pair("member"),
        client: pair("client"),
    };
    let secrets: Vec<k8s_openapi::api::core::v1::Secret> =
        certificate_secrets(&cluster, &certificates)
            .iter()
            .map(|object| {
                let value = serde_json::to_value(&object.object).unwrap();
                serde_json::from_value(value).unwrap()
            })
            .collect();
    let read = certificates_of([secrets.first(), secrets.get(1), secrets.get(2)]);
    assert_eq!(read, certificates);
    assert_eq!(certificates_of([None; 3]), Certificates::default());
}

#[test]
fn dumps_are_a_job_at_given_times() {
    let (mut cluster, pools, _) = sample(&DEMO);
    let titles = |cluster: &HitherCluster| {
        let objects = desired(cluster, &pools, &world());
        objects
            .into_iter()
            .filter(|object| object.title() == "CronJob/demo-dump")
            .collect::<Vec<_>>()
    };
    assert!(titles(&cluster).is_empty());
    cluster.spec.metadata_store.dumps = Some(crate::api::Dumps {
        schedule: "0 * * * *".into(),
        claim_name: "dumps".into(),
        keep: 24,
    });
    insta::assert_snapshot!("dumps", shown(&titles(&cluster)));
}

#[test]
fn a_class_becomes_a_storage_class_of_references() {
    let (_, _, classes) = sample(&DEMO);
    let class = serde_saphyr::to_string(&storage_class(&classes[0])).unwrap();
    insta::assert_snapshot!("class", class);
}

#[test]
fn a_class_may_pin_its_volumes_to_a_zone() {
    let (_, _, mut classes) = sample(&DEMO);
    classes[0].spec.volumes.pin_to_zone = true;
    let parameters = storage_class(&classes[0]).parameters.unwrap();
    assert_eq!(parameters["pinToZone"], "true");
}

#[test]
fn a_class_becomes_what_claims_may_change_to() {
    let (_, _, classes) = sample(&DEMO);
    let class = serde_saphyr::to_string(&volume_attributes_class(&classes[0])).unwrap();
    insta::assert_snapshot!("attributes", class);
}

#[test]
fn labels_ask_for_no_restart_and_settings_do() {
    let (cluster, mut pools, _) = sample(&DEMO);
    let template = |pools: &[ChunkserverPool]| {
        let objects = desired(&cluster, pools, &world());
        let set = objects
            .iter()
            .find(|o| o.title() == "StatefulSet/demo-main-eu-1a");
        set.unwrap().object.data["spec"]["template"].clone()
    };
    let before = template(&pools);
    pools[0].spec.labels = vec!["Z".into()];
    assert_eq!(template(&pools), before);
    pools[0].spec.settings.scrub_days = Some(3);
    assert_ne!(template(&pools), before);
}

#[test]
fn sizes_are_told_to_servers_in_bytes() {
    let (_, mut pools, _) = sample(&DEMO);
    let quantity = Quantity("1.5Gi".into());
    pools[0].spec.settings.free_floor = Some(quantity);
    assert_eq!(settings_file(&pools[0])["floor_bytes"], 1_610_612_736);
}

#[test]
fn nothing_is_given_to_volumes_before_the_cluster_has_an_id() {
    let (cluster, pools, _) = sample(&DEMO);
    let world = World {
        cluster_id: None,
        ..world()
    };
    let objects = desired(&cluster, &pools, &world);
    assert!(
        !objects
            .iter()
            .any(|object| object.title() == "Secret/demo-csi")
    );
}

#[test]
fn only_the_zone_that_is_away_may_lose_more() {
    let (cluster, _, _) = sample(&DEMO);
    let budget = |disruption| {
        let world = World {
            disruption,
            ..world()
        };
        let object = disruption::objects(&cluster, &world).pop().unwrap();
        object.object.data["spec"].clone()
    };
    assert_eq!(budget(Disruption::Nobody)["maxUnavailable"], 0);
    assert_eq!(budget(Disruption::One)["maxUnavailable"], 1);
    let zone = budget(Disruption::InZone("eu-1b".into()));
    assert_eq!(zone["maxUnavailable"], 0);
    assert_eq!(
        zone["selector"]["matchExpressions"][0]["values"][0],
        "eu-1b"
    );
}

#[test]
fn long_and_strange_zones_have_names_that_fit() {
    let long = "x".repeat(30);
    let name = pool_set(&long, &long, "EU_West.1");
    assert!(name.len() <= 52, "{name}");
    assert_ne!(name, pool_set(&long, &long, "eu-west-1"));
}

const DEMO: [&str; 3] = ["cluster.yaml", "pools.yaml", "classes.yaml"];
