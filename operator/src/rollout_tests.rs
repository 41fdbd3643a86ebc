//! What a change of templates ends, and what it leaves alone.

use hither_proto::map::{MemberState, ServerState};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use crate::decisions_tests::{labels, members, outdated, pod, seen, server, stateful_set};
use crate::rollout::{Rollout, plan};
use crate::seen::Seen;

fn planned(seen: &Seen) -> Rollout {
    plan(seen, &["a".to_owned(), "b".to_owned()])
}

fn not_ready(pod: &mut Pod) {
    let status = pod.status.as_mut().unwrap();
    status.conditions.as_mut().unwrap()[0].status = "False".into();
    running(pod, true);
}

fn running(pod: &mut Pod, runs: bool) {
    let state = if runs {
        json!({"running": {}})
    } else {
        json!({"waiting": {"reason": "CrashLoopBackOff"}})
    };
    let container = json!({
        "name": "x", "image": "", "imageID": "", "ready": false, "restartCount": 3, "state": state,
    });
    let status = pod.status.as_mut().unwrap();
    status.phase = Some("Running".into());
    status.container_statuses = Some(vec![serde_json::from_value(container).unwrap()]);
}

/// Chunkserver 1 of b is down, the group goes on with the other one.
fn with_one_down() -> Seen {
    let mut seen = seen(&["b", "a"]);
    outdated(&mut seen);
    not_ready(&mut seen.pods[0]);
    server(&mut seen, 1).state = ServerState::Down.into();
    members(&mut seen)[0].state = MemberState::Lagging.into();
    let group = &mut seen.status.as_mut().unwrap().groups[0];
    (group.in_sync, group.lagging) = (1, 1);
    seen
}

#[test]
fn a_pod_that_is_not_ready_is_not_replaced_past_the_gate() {
    let mut seen = seen(&["b", "a"]);
    outdated(&mut seen);
    not_ready(&mut seen.pods[0]);
    let plan = planned(&seen);
    assert_eq!(plan.replace, None, "its server is up");
    assert!(plan.waiting.unwrap().contains("0 of 1 pods are ready"));
    assert_eq!(planned(&with_one_down()).replace, None, "it runs, unseen");
}

#[test]
fn a_chunkserver_that_cannot_start_and_is_not_missed_is_replaced_at_once() {
    let mut seen = with_one_down();
    running(&mut seen.pods[0], false);
    assert_eq!(planned(&seen).replace.as_deref(), Some("demo-ssd-b-0"));
    // While it is up to the manager somebody may read from it.
    let mut up = seen.clone();
    server(&mut up, 1).state = ServerState::Up.into();
    assert_eq!(planned(&up).replace, None);
    // The other copy is gone as well: with its directory this one might go for good.
    members(&mut seen)[0].state = MemberState::InSync.into();
    members(&mut seen)[1].state = MemberState::Lagging.into();
    assert_eq!(planned(&seen).replace, None);
    // With a claim it keeps what it has.
    let spec = json!({"containers": [], "volumes": [
        {"name": "disk-0", "persistentVolumeClaim": {"claimName": "x"}},
        {"name": "config", "configMap": {"name": "x"}},
    ]});
    seen.pods[0].spec = Some(serde_json::from_value(spec).unwrap());
    assert_eq!(planned(&seen).replace.as_deref(), Some("demo-ssd-b-0"));
}

#[test]
fn a_pod_that_finds_no_node_is_replaced_at_once() {
    let mut seen = with_one_down();
    let status = seen.pods[0].status.as_mut().unwrap();
    (status.phase, status.container_statuses) = (Some("Pending".into()), None);
    status.pod_ip = None;
    assert_eq!(planned(&seen).replace.as_deref(), Some("demo-ssd-b-0"));
}

/// Adds two metadata servers, the first of which serves rank 0.
fn with_metadata_servers(seen: &mut Seen) {
    for at in 0..2 {
        let mut pod = pod("demo-mds", at, &format!("10.0.8.{at}"), "old");
        labels(&mut pod).insert("app.kubernetes.io/component".into(), "mds".into());
        seen.pods.push(pod);
    }
    seen.sets.push(stateful_set("demo-mds", 2));
    let map = seen.status.as_mut().unwrap().map.as_mut().unwrap();
    map.ranks[0].address = "10.0.8.0:7651".into();
}

#[test]
fn the_active_metadata_server_stays_while_the_standby_crashes() {
    let mut seen = seen(&["a"]);
    with_metadata_servers(&mut seen);
    outdated(&mut seen);
    assert_eq!(planned(&seen).replace.as_deref(), Some("demo-mds-1"));
    let standby = seen.pods.last_mut().unwrap();
    labels(standby).insert("controller-revision-hash".into(), "new".into());
    not_ready(standby);
    for runs in [true, false] {
        running(seen.pods.last_mut().unwrap(), runs);
        let plan = planned(&seen);
        assert_eq!(plan.replace, None);
        assert!(plan.waiting.unwrap().contains("demo-mds: 1 of 2 pods"));
    }
    *seen.pods.last_mut().unwrap() = {
        let mut pod = pod("demo-mds", 1, "10.0.8.1", "new");
        labels(&mut pod).insert("app.kubernetes.io/component".into(), "mds".into());
        pod
    };
    assert_eq!(planned(&seen).replace.as_deref(), Some("demo-mds-0"));
}

#[test]
fn a_standby_that_never_gets_ready_is_replaced_by_what_may_work() {
    let mut seen = seen(&["a"]);
    with_metadata_servers(&mut seen);
    outdated(&mut seen);
    let active = seen.pods.len() - 2;
    not_ready(&mut seen.pods[active]);
    assert_eq!(planned(&seen).replace, None, "it serves");
    not_ready(&mut seen.pods[active + 1]);
    assert_eq!(planned(&seen).replace.as_deref(), Some("demo-mds-1"));
}

#[test]
fn after_the_hand_over_a_served_rank_is_waited_for() {
    let mut seen = seen(&["a"]);
    with_metadata_servers(&mut seen);
    outdated(&mut seen);
    for pod in &mut seen.pods {
        if pod.metadata.name.as_ref().unwrap().starts_with("demo-mds") {
            labels(pod).insert("controller-revision-hash".into(), "new".into());
        }
    }
    assert_eq!(planned(&seen).replace.as_deref(), Some("demo-ssd-a-0"));
    let map = seen.status.as_mut().unwrap().map.as_mut().unwrap();
    map.ranks[0].address = "10.0.8.7:7651".into();
    let plan = planned(&seen);
    assert_eq!(plan.replace, None);
    assert!(plan.waiting.unwrap().contains("serves rank 0"));
}
