//! Fewer chunkservers: one after the other is emptied, then ended, then forgotten. Pure.

use std::collections::BTreeMap;

use hither_proto::map::Chunkserver;
use kube::ResourceExt as _;

use crate::api::DrainStatus;
use crate::desired::{COMPONENT_LABEL, Component, POOL_LABEL};
use crate::seen::{Seen, is_ready, is_up};

/// What to do about chunkservers that are too many, or that were and no longer are.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scale {
    /// Replicas of the sets that are being made smaller.
    pub replicas: BTreeMap<String, i32>,
    /// Chunkservers to mark as draining, or not any more.
    pub drain: Vec<(u64, bool)>,
    /// Chunkservers that are empty and gone.
    pub forget: Vec<u64>,
    /// Sets nobody asks for that have no pods left.
    pub remove: Vec<String>,
    /// Progress, by pool.
    pub progress: BTreeMap<String, Vec<DrainStatus>>,
    /// What holds it up, by pool.
    pub waiting: BTreeMap<String, String>,
}

/// Decides it. `wanted` has the replicas of every set that is asked for; sets of chunkservers that
/// are not in it are to go. `draining` says which servers the manager is emptying.
#[must_use]
pub fn plan(seen: &Seen, wanted: &BTreeMap<String, i32>) -> Scale {
    let mut scale = Scale::default();
    let (mut leaving, mut kept) = (Vec::new(), Vec::new());
    for set in &seen.sets {
        if set.labels().get(COMPONENT_LABEL).map(String::as_str)
            != Some(Component::Chunkserver.as_str())
        {
            continue;
        }
        let name = set.name_any();
        let pool = set.labels().get(POOL_LABEL).cloned().unwrap_or_default();
        let now = set
            .spec
            .as_ref()
            .and_then(|spec| spec.replicas)
            .unwrap_or(0);
        let goal = wanted.get(&name).copied().unwrap_or(0);
        if now == 0 && !wanted.contains_key(&name) && seen.pods_of(&name).is_empty() {
            scale.remove.push(name);
            continue;
        }
        let pods = seen.pods_of(&name);
        let going = pods.range(goal..);
        leaving.extend(going.filter_map(|(_, pod)| Some(seen.server_of(pod)?.id)));
        let staying = pods.range(..goal);
        kept.extend(staying.filter_map(|(_, pod)| Some(seen.server_of(pod)?.id)));
        if now > goal {
            let set = Shrinking {
                name,
                pool,
                now,
                goal,
            };
            shrink(seen, &mut scale, &set);
        }
    }
    for server in seen.servers() {
        if server.draining && !is_up(server) && seen.groups_on(server.id) == 0 {
            scale.forget.push(server.id);
        } else if !server.draining && leaving.contains(&server.id) {
            scale.drain.push((server.id, true));
        } else if server.draining && kept.contains(&server.id) {
            // Whose pod is gone already stays as it is until the manager misses it.
            scale.drain.push((server.id, false));
        }
    }
    scale
}

struct Shrinking {
    name: String,
    pool: String,
    now: i32,
    goal: i32,
}

fn shrink(seen: &Seen, scale: &mut Scale, set: &Shrinking) {
    let pods = seen.pods_of(&set.name);
    // All that are to go are emptied together: nothing is copied from one to the next.
    for (_, pod) in pods.range(set.goal..) {
        if let Some(server) = seen.server_of(pod) {
            let progress = scale.progress.entry(set.pool.clone()).or_default();
            progress.push(DrainStatus {
                pod: pod.name_any(),
                server: i64::try_from(server.id).unwrap_or(i64::MAX),
                groups_left: i32::try_from(seen.groups_on(server.id)).unwrap_or(i32::MAX),
                bytes_left: held(server),
            });
        }
    }
    let keep = |scale: &mut Scale, why: String| {
        scale.replicas.insert(set.name.clone(), set.now);
        scale.waiting.insert(set.pool.clone(), why);
    };
    if seen.status.is_none() {
        return keep(scale, "no manager answers: nothing is taken away".into());
    }
    let Some(pod) = pods.get(&(set.now - 1)) else {
        // Nothing runs there.
        scale.replicas.insert(set.name.clone(), set.now - 1);
        return;
    };
    let title = pod.name_any();
    match seen.server_of(pod) {
        Some(server) if seen.groups_on(server.id) > 0 => {
            let left = seen.groups_on(server.id);
            let stuck = server.draining && seen.groups().is_some_and(|groups| groups.filling == 0);
            let why = if stuck {
                ", and no other chunkserver may take them: their classes ask for it"
            } else {
                ""
            };
            keep(
                scale,
                format!("{title}: {left} placement groups are still on it{why}"),
            );
        }
        Some(server) if !server.draining => keep(scale, format!("{title} is being marked")),
        Some(_) => {
            scale.replicas.insert(set.name.clone(), set.now - 1);
        }
        None if !is_ready(pod) && seen.servers().iter().all(is_up) => {
            // It never began to serve, or the manager would miss a server.
            scale.replicas.insert(set.name.clone(), set.now - 1);
        }
        None => keep(
            scale,
            format!("{title}: no telling which chunkserver it is until it runs"),
        ),
    }
}

fn held(server: &Chunkserver) -> i64 {
    let bytes: u64 = server.disks.iter().map(|disk| disk.copy_bytes).sum();
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
