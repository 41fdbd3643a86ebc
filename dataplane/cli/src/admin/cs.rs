//! `hither cs`.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use hither_managerlink::ManagerLink;
use hither_net::{NetError, NoHandler, connect};
use hither_proto::chunk::StatusReply;
use hither_proto::common::Empty;
use hither_proto::kind::Kind;
use hither_proto::manager::{
    ClusterStatus, ServerDrain, ServerForget, ServerLabel, ServerMaintenance,
};
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
    let link = cluster::link(cluster.as_deref()).await?;
    match cs {
        Cs::Ls => {
            let reply = cluster::ask(&link, Kind::CLUSTER_STATUS, &Empty {}).await?;
            let servers = list(&reply.decode()?);
            output.print(&servers, |servers| show(servers))
        }
        Cs::Stat => {
            let reply = cluster::ask(&link, Kind::CLUSTER_STATUS, &Empty {}).await?;
            let all = counted(&list(&reply.decode()?)).await;
            output.print(&all, |all| show_counted(all))
        }
        Cs::Label { id, changes } => {
            if let Some(option) = changes.iter().find(|change| change.starts_with("--")) {
                bail!("{option} would be a label change here: options go before `cs`");
            }
            let before = labels_of(&link, id).await?;
            for warning in absent(&before, &changes) {
                eprintln!("hither: warning: chunkserver {id}: {warning}");
            }
            let message = ServerLabel {
                server: id,
                changes,
            };
            cluster::ask(&link, Kind::SERVER_LABEL, &message).await?;
            let now = labels_of(&link, id).await?.join(",");
            output.done(&format!("chunkserver {id}: its labels are {now}"));
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
        Cs::Drain { id, state } => {
            let message = ServerDrain {
                server: id,
                on: state == "on",
            };
            cluster::ask(&link, Kind::SERVER_DRAIN, &message).await?;
            output.done(&format!("chunkserver {id}: drain {state}"));
            Ok(())
        }
        Cs::Forget { id } => {
            cluster::ask(&link, Kind::SERVER_FORGET, &ServerForget { server: id }).await?;
            output.done(&format!("chunkserver {id} is forgotten"));
            Ok(())
        }
    }
}

async fn labels_of(link: &ManagerLink, id: u64) -> anyhow::Result<Vec<String>> {
    let reply = cluster::ask(link, Kind::CLUSTER_STATUS, &Empty {}).await?;
    let all = list(&reply.decode()?);
    let server = all.into_iter().find(|server| server.id == id);
    let server = server
        .with_context(|| format!("there is no chunkserver {id}: `hither cs ls` shows them all"))?;
    Ok(server.labels)
}

/// Labels that are to be removed and are not there: typing errors, perhaps.
fn absent(labels: &[String], changes: &[String]) -> Vec<String> {
    let has = |name: &str| {
        labels.iter().any(|label| {
            let key = label.split_once('=').map_or("", |(key, _)| key);
            label.eq_ignore_ascii_case(name) || key == name
        })
    };
    changes
        .iter()
        .filter_map(|change| change.strip_prefix('-'))
        .filter(|name| !has(name))
        .map(|name| {
            format!(
                "it has no label {name} to remove; it has {}",
                labels.join(",")
            )
        })
        .collect()
}

/// A chunkserver's counters as `hither cs stat` prints them.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Counted {
    id: u64,
    address: String,
    reads: u64,
    read_bytes: u64,
    writes: u64,
    write_bytes: u64,
    flushes: u64,
    busy: u64,
    repaired_blocks: u64,
    copies: u64,
    /// Why there are none.
    error: Option<String>,
}

/// Asks all servers at the same time: one that is away does not hold the others up.
async fn counted(servers: &[Server]) -> Vec<Counted> {
    let mut asked = tokio::task::JoinSet::new();
    for server in servers {
        let (id, address) = (server.id, server.address.clone());
        asked.spawn(async move {
            let reply = ask_counters(&address).await;
            let error = reply.as_ref().err().map(ToString::to_string);
            let said = reply.unwrap_or_default();
            Counted {
                id,
                address,
                reads: said.reads,
                read_bytes: said.read_bytes,
                writes: said.writes,
                write_bytes: said.write_bytes,
                flushes: said.flushes,
                busy: said.busy,
                repaired_blocks: said.repaired_blocks,
                copies: said.chunks,
                error,
            }
        });
    }
    let mut all = asked.join_all().await;
    all.sort_by_key(|server| server.id);
    all
}

async fn ask_counters(address: &str) -> Result<StatusReply, NetError> {
    let connection = connect(address, &cluster::admin(), Arc::new(NoHandler), COUNTERS_IN).await?;
    let reply = connection
        .call(Kind::CHUNK_STATUS, &Empty {}, &[], COUNTERS_IN)
        .await;
    connection.close();
    reply?.decode()
}

fn show_counted(servers: &[Counted]) -> String {
    let rows = servers
        .iter()
        .map(|s| {
            [
                s.id.to_string(),
                s.address.clone(),
                s.error.clone().unwrap_or_else(|| s.copies.to_string()),
                format!("{} ({})", s.reads, bytes(s.read_bytes)),
                format!("{} ({})", s.writes, bytes(s.write_bytes)),
                s.flushes.to_string(),
                s.repaired_blocks.to_string(),
                s.busy.to_string(),
            ]
        })
        .collect();
    table(
        [
            "ID", "ADDRESS", "COPIES", "READS", "WRITES", "FLUSHES", "REPAIRED", "BUSY",
        ],
        rows,
    )
}

/// Time a chunkserver has to say its counters.
const COUNTERS_IN: Duration = Duration::from_secs(3);

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
                ServerState::Up if server.draining => "draining",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_that_is_not_there_is_told_when_it_is_removed() {
        let text = |all: &[&str]| all.iter().map(|&t| t.to_owned()).collect::<Vec<_>>();
        let labels = text(&["S", "media=ssd"]);
        let sound = text(&["-s", "-media", "-media=ssd", "+Q", "rack=1"]);
        assert_eq!(absent(&labels, &sound), Vec::<String>::new());
        let said = absent(&labels, &text(&["-Q", "-med"]));
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].contains("no label Q"), "{said:?}");
    }
}
