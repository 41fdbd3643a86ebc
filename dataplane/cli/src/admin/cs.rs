//! `hither cs`.

use anyhow::bail;
use hither_proto::common::Empty;
use hither_proto::kind::Kind;
use hither_proto::manager::{ClusterStatus, ServerLabel, ServerMaintenance};
use hither_proto::map::ServerState;
use serde::Serialize;

use crate::args::Cs;
use crate::cluster;
use crate::output::{Output, bytes, table};

/// A chunkserver as `hither cs ls` prints it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Server {
    id: u64,
    address: String,
    zone: String,
    node: String,
    labels: Vec<String>,
    state: String,
    disks: usize,
    total_bytes: u64,
    free_bytes: u64,
    groups: usize,
}

pub(crate) async fn run(cs: Cs, cluster: Option<String>, output: Output) -> anyhow::Result<()> {
    let link = cluster::link(cluster.as_deref())?;
    match cs {
        Cs::Ls => {
            let reply = cluster::ask(&link, Kind::CLUSTER_STATUS, &Empty {}).await?;
            let servers = list(&reply.decode()?);
            output.print(&servers, |servers| show(servers))
        }
        Cs::Label { id, changes } => {
            if let Some(option) = changes.iter().find(|change| change.starts_with("--")) {
                bail!("{option} would be a label change here: options go before `cs`");
            }
            let message = ServerLabel {
                server: id,
                changes,
            };
            cluster::ask(&link, Kind::SERVER_LABEL, &message).await?;
            output.done(&format!("chunkserver {id}: labels changed"));
            Ok(())
        }
        Cs::Maintenance { id, state } => {
            let message = ServerMaintenance {
                server: id,
                on: state == "on",
            };
            cluster::ask(&link, Kind::SERVER_MAINTENANCE, &message).await?;
            output.done(&format!("chunkserver {id}: maintenance {state}"));
            Ok(())
        }
    }
}

fn list(status: &ClusterStatus) -> Vec<Server> {
    let map = status.map.clone().unwrap_or_default();
    map.chunkservers
        .iter()
        .map(|server| Server {
            id: server.id,
            address: server.addresses.first().cloned().unwrap_or_default(),
            zone: server.zone.clone(),
            node: server.node.clone(),
            labels: server.labels.clone(),
            state: match ServerState::try_from(server.state).unwrap_or_default() {
                ServerState::Up => "up",
                ServerState::Maintenance => "maintenance",
                ServerState::Down | ServerState::Unspecified => "down",
            }
            .into(),
            disks: server.disks.len(),
            total_bytes: server.disks.iter().map(|disk| disk.total_bytes).sum(),
            free_bytes: server.disks.iter().map(|disk| disk.free_bytes).sum(),
            groups: map
                .groups
                .iter()
                .filter(|group| group.members.iter().any(|m| m.server == server.id))
                .count(),
        })
        .collect()
}

fn show(servers: &[Server]) -> String {
    let rows = servers
        .iter()
        .map(|s| {
            [
                s.id.to_string(),
                s.address.clone(),
                s.zone.clone(),
                s.labels.join(","),
                s.state.clone(),
                bytes(s.free_bytes),
                s.groups.to_string(),
            ]
        })
        .collect();
    table(
        ["ID", "ADDRESS", "ZONE", "LABELS", "STATE", "FREE", "GROUPS"],
        rows,
    )
}
