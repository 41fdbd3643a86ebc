//! What the command line says, of wrong input above all.
#![cfg(feature = "live")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs;
use std::path::Path;
use std::time::Duration;

use hither_e2e::{Cluster, eventually, hither, pattern, try_hither, write_stable};
use serde_json::Value;

fn said(args: &[&str]) -> String {
    let done = try_hither(args);
    assert!(!done.status.success(), "{args:?} succeeds");
    String::from_utf8_lossy(&done.stderr).into_owned()
}

/// Every key of a value, with where it stands; what stands under a name that is data is named `*`.
fn keys(value: &Value, at: &str, found: &mut Vec<String>) {
    const DATA: [&str; 2] = ["byServer", "byLocality"];
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let is_data = DATA.iter().any(|data| at.ends_with(data));
                let here = format!("{at}.{}", if is_data { "*" } else { key });
                keys(value, &here, found);
                found.push(here);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| keys(item, at, found)),
        _ => {}
    }
}

fn is_camel(key: &str) -> bool {
    key.starts_with(|c: char| c.is_ascii_lowercase())
        && key.chars().all(|c| c.is_ascii_alphanumeric())
}

#[test]
fn all_json_is_named_in_one_style() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let at = cluster.mount("m", "preflabels=zone=a,clientZone=a");
    let file = at.join("f");
    write_stable(&file, &pattern(1, 0, 100_000));
    fs::read(&file).unwrap();
    let (mount, file) = (at.display().to_string(), file.display().to_string());
    let play = cluster.dir().join("play").display().to_string();
    let dump = cluster.dir().join("dump").display().to_string();
    let outputs: [&[&str]; 14] = [
        &["status"],
        &["cs", "ls"],
        &["cs", "stat"],
        &["cs", "maintenance", "1", "off"],
        &["sclass", "ls"],
        &["sclass", "show", "default"],
        &["sclass", "check", "default", "zone=x"],
        &["sclass", "dry-run", "default", "--keep", "zone=a"],
        &["session", "ls"],
        &["where", &file],
        &["locality", &mount],
        &["quota", &mount],
        &["playground", "status", "--dir", &play],
        &["meta", "dump", &dump],
    ];
    let mut found = Vec::new();
    for args in outputs {
        let value = cluster.admin(args);
        assert!(value.is_object() || value.is_array(), "{args:?}: {value}");
        keys(&value, args[0], &mut found);
    }
    let state = fs::read_to_string(Path::new(&play).join("playground.json")).unwrap();
    keys(&serde_json::from_str(&state).unwrap(), "state", &mut found);
    for known in [
        "where.servers.inFlight",
        "locality.byLocality.*.readBytes",
        "quota.usedBytes",
    ] {
        assert!(
            found.iter().any(|key| key == known),
            "no {known} in {found:?}"
        );
    }
    for key in &found {
        let name = key.rsplit('.').next().unwrap_or_default();
        assert!(name == "*" || is_camel(name), "{key}");
    }
}

#[test]
fn a_class_in_use_is_not_removed() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let at = cluster.mount("m", "");
    let dir = at.join("cold");
    fs::create_dir(&dir).unwrap();
    let _ = cluster.admin(&["sclass", "create", "one", "--keep", "zone=a"]);
    hither(&["sclass", "set", "one", &dir.display().to_string()]);
    write_stable(&dir.join("f"), &pattern(1, 0, 1000));
    fs::File::open(&dir).unwrap().sync_all().unwrap();
    let refused = cluster.complaint(&["sclass", "delete", "one"]);
    assert!(refused.contains("1 directory and 1 file"), "{refused}");
    assert!(refused.contains("/cold, /cold/f"), "{refused}");
    let given = hither(&["sclass", "set", "-r", "default", &dir.display().to_string()]);
    assert!(
        given.contains("1 file has data of another class"),
        "{given}"
    );
    let places = hither(&["where", &dir.join("f").display().to_string()]);
    assert!(
        places.contains("had storage class default as it is now"),
        "{places}"
    );
    for path in [&dir, &dir.join("f")] {
        fs::File::open(path).unwrap().sync_all().unwrap();
    }
    assert_eq!(cluster.complaint(&["sclass", "delete", "one"]), "");
    let unknown = cluster.complaint(&["sclass", "dry-run", "one", "--keep", "zone=b"]);
    assert!(
        unknown.contains("there is no storage class \"one\""),
        "{unknown}"
    );
    let message = said(&["where", &dir.display().to_string()]);
    assert!(message.contains("is a directory"), "{message}");
    assert!(message.contains("storage class default"), "{message}");
}

/// A class whose zone is away takes no writes: the status says so, and names it.
#[test]
fn a_class_without_its_servers_is_named_by_the_status() {
    let cluster = Cluster::up("a,b", 1, &[]);
    let _ = cluster.admin(&["sclass", "create", "there", "--keep", "zone=b"]);
    let without = |cluster: &Cluster| cluster.admin(&["status"])["classesWithoutWrites"].clone();
    eventually(Duration::from_secs(20), "all classes take writes", || {
        without(&cluster) == serde_json::json!([])
    });
    cluster.playground("kill", "b");
    eventually(Duration::from_secs(20), "the class is named", || {
        without(&cluster) == serde_json::json!(["there"])
    });
    assert_eq!(cluster.admin(&["status"])["healthy"], false);
}

#[test]
fn a_dump_is_not_loaded_into_an_etcd_that_is_away() {
    let cluster = Cluster::up("a", 1, &[]);
    let dump = cluster.dir().join("dump").display().to_string();
    let _ = cluster.admin(&["meta", "dump", &dump]);
    let away = said(&["meta", "load", &dump, "--etcd", "127.0.0.1:1"]);
    assert!(away.contains("no etcd answers at 127.0.0.1:1"), "{away}");
}

#[test]
fn a_preference_that_matches_nothing_is_told_at_the_mount_and_in_its_log() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let at = cluster.dir().join("m");
    fs::create_dir(&at).unwrap();
    let (target, log) = (at.display().to_string(), cluster.dir().join("m.log"));
    let done = try_hither(&[
        "mount",
        "--cluster",
        &cluster.address,
        &target,
        "--log",
        &log.display().to_string(),
        "-o",
        "preflabels=zone=a;zone=x",
    ]);
    assert!(done.status.success());
    let warned = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(
        warned.contains("`zone=x`, matches no chunkserver"),
        "{warned}"
    );
    let logged = || fs::read_to_string(&log).unwrap();
    eventually(Duration::from_secs(10), "the log says it", || {
        logged().contains("`zone=x`, matches no chunkserver")
    });
    let logged = logged();
    assert!(
        !logged.contains('\u{1b}'),
        "no colours in a file: {logged:?}"
    );
    cluster.unmount(&at);
}

#[test]
fn wrong_input_is_told_at_once() {
    let dir = std::env::temp_dir().join(format!("hither-e2e-wrong-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let (at, none) = (
        dir.display().to_string(),
        dir.join("none").display().to_string(),
    );
    let begun = std::time::Instant::now();
    for (address, hint) in [
        ("nonsense", "has no port"),
        ("no-such-host.invalid:7650", "cannot be resolved"),
        ("127.0.0.1:1", "refused"),
    ] {
        let status = said(&["--cluster", address, "status"]);
        assert!(status.contains(hint), "{status}");
        let mount = said(&["mount", address, &at]);
        assert!(mount.contains(hint), "{mount}");
    }
    assert!(
        begun.elapsed().as_secs() < 20,
        "each within a second or two"
    );
    let zones = said(&["playground", "up", "--dir", &none, "--zones", "a,b c"]);
    assert!(zones.contains("\"b c\""), "{zones}");
    let down = said(&["playground", "down", "--dir", &none]);
    assert!(down.contains("there is no playground"), "{down}");
    assert!(!Path::new(&none).exists(), "nothing was made");
    fs::remove_dir(&dir).unwrap();
}

#[test]
fn a_playground_that_ends_names_the_mounts_it_leaves() {
    let mut cluster = Cluster::up("a", 1, &[]);
    let at = cluster.mount("m", "");
    let play = cluster.dir().join("play").display().to_string();
    let done = try_hither(&["playground", "down", "--dir", &play]);
    assert!(done.status.success());
    let warned = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(warned.contains("1 mount is still open"), "{warned}");
    assert!(warned.contains(&at.display().to_string()), "{warned}");
    hither(&["playground", "up", "--dir", &play]);
    fs::write(at.join("f"), pattern(1, 0, 100)).unwrap();
    cluster.unmount(&at);
}
