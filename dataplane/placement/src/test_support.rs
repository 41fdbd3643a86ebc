//! Small clusters for tests.

use std::collections::BTreeMap;

use hither_labels::{Mode, StorageDefinition};

use super::{Disk, Group, GroupPlan, GroupRules, Member, PlanServer};
use crate::candidate::{Candidate, DiskKey, GroupKey, ServerKey};

/// A server with one disk 0 of so many bytes.
pub(crate) fn server(key: u64, zone: &str, labels: &str, bytes: u64) -> PlanServer {
    PlanServer {
        candidate: Candidate {
            zone: (!zone.is_empty()).then(|| zone.to_owned()),
            labels: labels.parse().unwrap(),
            ..Candidate::new(ServerKey(key), bytes)
        },
        disks: vec![disk(0, bytes)],
    }
}

pub(crate) fn disk(key: u16, total_bytes: u64) -> Disk {
    Disk {
        key: DiskKey(key),
        total_bytes,
        usable: true,
        draining: false,
    }
}

pub(crate) fn rules(definition: &StorageDefinition) -> GroupRules<'_> {
    GroupRules {
        definition,
        mode: Mode::Std,
        default_data_parts: 8,
    }
}

/// A group with members on disk 0 of the servers.
pub(crate) fn group(key: u32, servers: &[u64]) -> Group {
    let member = |server: &u64| {
        Some(Member {
            server: ServerKey(*server),
            disk: DiskKey(0),
        })
    };
    Group {
        key: GroupKey(key),
        members: servers.iter().map(member).collect(),
    }
}

/// The planned groups, made real and numbered from 0.
pub(crate) fn existing(plan: &GroupPlan) -> Vec<Group> {
    let planned = plan.groups.iter().zip(0..);
    planned
        .map(|(group, key)| Group {
            key: GroupKey(key),
            members: group.members.clone(),
        })
        .collect()
}

/// Memberships by server.
pub(crate) fn counts(groups: &[Group]) -> BTreeMap<ServerKey, u64> {
    let mut counts = BTreeMap::new();
    for member in groups
        .iter()
        .flat_map(|group| group.members.iter().flatten())
    {
        *counts.entry(member.server).or_default() += 1;
    }
    counts
}
