//! Fewer chunkservers: one after the other is emptied, then ended, then forgotten. Pure.

use std::collections::BTreeMap;

use hither_proto::map::Chunkserver;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;

use crate::api::DrainStatus;
use crate::desired::{COMPONENT_LABEL, Component, POOL_LABEL};
use crate::seen::{Seen, is_ready, is_up, ordinal, title};

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
/// are not in it are to go. What is emptied and taken away are servers, not pods: a pod that is not
/// there may have left a server that holds the only copies.
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
        let now = replicas(set);
        let goal = wanted.get(&name).copied().unwrap_or(0);
        let set = Shrinking {
            name,
            pool,
            now,
            goal,
        };
        let servers = set.servers(seen);
        let (going, staying): (Vec<_>, Vec<_>) =
            servers.iter().partition(|(ordinal, _)| *ordinal >= goal);
        leaving.extend(going.iter().map(|(_, server)| server.id));
        kept.extend(staying.iter().map(|(_, server)| server.id));
        set.tell(seen, &mut scale, &servers);
        if now == 0 && !wanted.contains_key(&set.name) && seen.pods_of(&set.name).is_empty() {
            scale.remove.push(set.name);
        } else if now > goal {
            set.shrink(seen, &mut scale, &servers);
        }
    }
    for server in seen.servers() {
        let id = server.id;
        if !is_up(server) && seen.groups_on(id) == 0 && !can_return(seen, wanted, server) {
            scale.forget.push(id);
        } else if !server.draining && leaving.contains(&id) {
            scale.drain.push((id, true));
        } else if server.draining && kept.contains(&id) && seen.drained.contains(&id) {
            // What somebody else has marked is not ours to unmark; whose pod is gone already stays
            // as it is until the manager misses it.
            scale.drain.push((id, false));
        }
    }
    scale
}

/// Whether a server that is down may come back with its disks.
fn can_return(seen: &Seen, wanted: &BTreeMap<String, i32>, server: &Chunkserver) -> bool {
    if server.name.is_empty() {
        // It is not known where it ran: who was emptied was to go.
        return !server.draining;
    }
    let within = |set: &str, replicas: i32| {
        ordinal(set, &server.name).is_some_and(|ordinal| ordinal < replicas)
    };
    let is_asked_for = wanted.iter().any(|(set, goal)| within(set, *goal));
    let mut sets = seen.sets.iter();
    let is_there = sets.any(|set| within(&set.name_any(), replicas(set)));
    let mut pods = seen.pods.iter();
    let is_ending = pods.any(|pod| pod.name_any() == server.name);
    (is_asked_for || is_there || is_ending) && !seen.is_replaced(server)
}

fn replicas(set: &StatefulSet) -> i32 {
    let spec = set.spec.as_ref();
    spec.and_then(|spec| spec.replicas).unwrap_or(0)
}

struct Shrinking {
    name: String,
    pool: String,
    now: i32,
    goal: i32,
}

impl Shrinking {
    /// The servers that run, or ran last, in the pods of the set, by ordinal.
    fn servers<'a>(&self, seen: &'a Seen) -> Vec<(i32, &'a Chunkserver)> {
        let pods = seen.pods_of(&self.name);
        let of = |server: &'a Chunkserver| {
            let by_name = ordinal(&self.name, &server.name);
            let here = |pod: &Pod| seen.server_of(pod).is_some_and(|of| of.id == server.id);
            let by_address = || pods.iter().find(|(_, pod)| here(pod));
            Some((by_name.or_else(|| Some(*by_address()?.0))?, server))
        };
        seen.servers().iter().filter_map(of).collect()
    }

    /// Progress of all that are emptied: nothing is copied from one to the next. Those that are no
    /// longer to go are in it until the manager knows.
    fn tell(&self, seen: &Seen, scale: &mut Scale, servers: &[(i32, &Chunkserver)]) {
        let mut pods: BTreeMap<i32, DrainStatus> = BTreeMap::new();
        for (ordinal, server) in servers {
            let is_ours = server.draining && seen.drained.contains(&server.id);
            if *ordinal < self.goal && !is_ours {
                continue;
            }
            let groups = i32::try_from(seen.groups_on(server.id)).unwrap_or(i32::MAX);
            // More than one when disks were replaced: the one that holds more is named.
            let told = pods.entry(*ordinal).or_insert_with(|| DrainStatus {
                pod: format!("{}-{ordinal}", self.name),
                ..DrainStatus::default()
            });
            if told.server == 0 || groups > told.groups_left {
                told.server = i64::try_from(server.id).unwrap_or(i64::MAX);
            }
            told.groups_left = told.groups_left.saturating_add(groups);
            told.bytes_left = told.bytes_left.saturating_add(held(server));
        }
        if !pods.is_empty() {
            let progress = scale.progress.entry(self.pool.clone()).or_default();
            progress.extend(pods.into_values());
        }
    }

    /// Takes the last pod away, if nothing is lost with it.
    fn shrink(&self, seen: &Seen, scale: &mut Scale, servers: &[(i32, &Chunkserver)]) {
        let replicas = match self.reason_to_wait(seen, servers) {
            Some(why) => {
                scale.waiting.insert(self.pool.clone(), why);
                self.now
            }
            None => self.now - 1,
        };
        scale.replicas.insert(self.name.clone(), replicas);
    }

    fn reason_to_wait(&self, seen: &Seen, servers: &[(i32, &Chunkserver)]) -> Option<String> {
        if seen.status.is_none() {
            return Some("no manager answers: nothing is taken away".into());
        }
        let last = self.now - 1;
        let pod = format!("{}-{last}", self.name);
        let here = || servers.iter().filter(|(ordinal, _)| *ordinal == last);
        for (_, server) in here() {
            let left = seen.groups_on(server.id);
            if left > 0 {
                let stuck = seen.groups().is_some_and(|groups| groups.filling == 0);
                let why = if server.draining && stuck {
                    ", and no other chunkserver may take them: their classes ask for it"
                } else {
                    ""
                };
                return Some(format!(
                    "{pod}: {left} placement groups are still on chunkserver {}{why}",
                    server.id
                ));
            }
            if !server.draining {
                return Some(format!("{pod} is being marked"));
            }
        }
        if here().next().is_some() {
            return None;
        }
        if seen
            .pods_of(&self.name)
            .get(&last)
            .is_some_and(|pod| is_ready(pod))
        {
            return Some(format!(
                "{pod}: no telling which chunkserver it is until the manager knows it"
            ));
        }
        // It never began to serve, unless one that said nothing of its pod was it.
        let stray = seen.unplaced().next()?;
        Some(format!(
            "{pod}: chunkserver {} may be the one that ran there",
            title(stray)
        ))
    }
}

fn held(server: &Chunkserver) -> i64 {
    let bytes: u64 = server.disks.iter().map(|disk| disk.copy_bytes).sum();
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
