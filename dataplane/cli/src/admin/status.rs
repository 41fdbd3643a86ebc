//! `hither status`.

use hither_clustermap::{classes_without_writes, count_groups};
use hither_proto::common::Empty;
use hither_proto::kind::Kind;
use hither_proto::manager::ClusterStatus;
use hither_proto::map::ServerState;
use serde::Serialize;

use crate::cluster;
use crate::output::{Output, bytes, table};

/// What `hither status` prints.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    cluster: String,
    leader: String,
    store: String,
    map_version: u64,
    ranks: Vec<Rank>,
    zones: Vec<Zone>,
    groups: Groups,
    /// Storage classes under which nothing can be written at the moment.
    classes_without_writes: Vec<String>,
    healthy: bool,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Rank {
    rank: u32,
    address: String,
    epoch: u64,
}

#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Zone {
    zone: String,
    chunkservers: usize,
    up: usize,
    total_bytes: u64,
    free_bytes: u64,
}

#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Groups {
    total: usize,
    whole: usize,
    filling: usize,
    undergoal: usize,
    one_copy: usize,
}

pub(crate) async fn run(cluster: Option<String>, output: Output) -> anyhow::Result<()> {
    let link = cluster::link(cluster.as_deref()).await?;
    let reply = cluster::ask(&link, Kind::CLUSTER_STATUS, &Empty {}).await?;
    let status = summarise(&reply.decode()?);
    output.print(&status, show)
}

/// The status as the command line shows it, from the manager's answer.
fn summarise(status: &ClusterStatus) -> Status {
    let map = status.map.clone().unwrap_or_default();
    let mut zones: Vec<Zone> = Vec::new();
    for server in &map.chunkservers {
        let at = zones
            .iter()
            .position(|zone| zone.zone == server.zone)
            .unwrap_or_else(|| {
                zones.push(Zone {
                    zone: server.zone.clone(),
                    ..Zone::default()
                });
                zones.len() - 1
            });
        let zone = &mut zones[at];
        zone.chunkservers += 1;
        zone.up += usize::from(server.state != i32::from(ServerState::Down));
        zone.total_bytes += server
            .disks
            .iter()
            .map(|disk| disk.total_bytes)
            .sum::<u64>();
        zone.free_bytes += server.disks.iter().map(|disk| disk.free_bytes).sum::<u64>();
    }
    zones.sort_by(|a, b| a.zone.cmp(&b.zone));
    let classes_without_writes = classes_without_writes(status);
    let counts = count_groups(status);
    let groups = Groups {
        total: counts.total,
        whole: counts.whole,
        filling: counts.filling,
        undergoal: counts.undergoal,
        one_copy: counts.one_copy,
    };
    let down = zones.iter().any(|zone| zone.up < zone.chunkservers);
    let unserved = map.ranks.is_empty();
    Status {
        cluster: map
            .cluster_id
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect(),
        leader: status.leader.clone(),
        store: status.store.clone(),
        map_version: map.version,
        ranks: map
            .ranks
            .iter()
            .map(|r| Rank {
                rank: r.rank,
                address: r.address.clone(),
                epoch: r.epoch,
            })
            .collect(),
        healthy: !down
            && !unserved
            && classes_without_writes.is_empty()
            && groups.whole == groups.total,
        classes_without_writes,
        zones,
        groups,
    }
}

fn show(status: &Status) -> String {
    let mut text = format!(
        "cluster {}: {}\nmanager {} ({} store, map version {})\n",
        status.cluster,
        if status.healthy {
            "healthy"
        } else {
            "needs attention"
        },
        status.leader,
        status.store,
        status.map_version,
    );
    for rank in &status.ranks {
        text.push_str(&format!(
            "metadata rank {} at {} (epoch {})\n",
            rank.rank, rank.address, rank.epoch
        ));
    }
    text.push('\n');
    let rows = status
        .zones
        .iter()
        .map(|zone| {
            [
                zone.zone.clone(),
                format!("{}/{}", zone.up, zone.chunkservers),
                bytes(zone.total_bytes),
                bytes(zone.free_bytes),
            ]
        })
        .collect();
    text.push_str(&table(["ZONE", "CHUNKSERVERS UP", "TOTAL", "FREE"], rows));
    let groups = &status.groups;
    text.push_str(&format!(
        "\n\nplacement groups: {} of {} whole, {} filling, {} undergoal, {} with one copy",
        groups.whole, groups.total, groups.filling, groups.undergoal, groups.one_copy
    ));
    if !status.classes_without_writes.is_empty() {
        text.push_str(&format!(
            "\nwrites wait in storage class {}: too few of the servers it asks for are up \
             (hither sclass show, hither cs ls)",
            status.classes_without_writes.join(", ")
        ));
    }
    text
}
