//! `hither session`.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use hither_managerlink::ManagerLink;
use hither_net::{NoHandler, connect};
use hither_proto::common::Empty;
use hither_proto::ids::MapVersion;
use hither_proto::kind::Kind;
use hither_proto::meta::{SessionEvict, SessionList};
use serde::Serialize;

use crate::args::Session;
use crate::cluster::{self, PATIENCE, patiently};
use crate::output::{Output, table};

/// A session as it is printed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    session: u64,
    rank: u16,
    host: String,
    mount_point: String,
    zone: String,
    leases: u64,
    exclusive_leases: u64,
    orphans: u64,
    locks: u64,
    idle_ms: u64,
}

pub(crate) async fn run(
    session: Session,
    cluster: Option<String>,
    output: Output,
) -> anyhow::Result<()> {
    let link = cluster::link(cluster.as_deref()).await?;
    let evicted_id = match session {
        Session::Ls => None,
        Session::Evict { id } => Some(id),
    };
    let (all, evicted) = list(&link, evicted_id, PATIENCE).await?;
    match session {
        Session::Ls => output.print(&all, |all| {
            let rows = all
                .iter()
                .map(|s| {
                    [
                        s.session.to_string(),
                        s.host.clone(),
                        s.mount_point.clone(),
                        s.zone.clone(),
                        s.leases.to_string(),
                        s.exclusive_leases.to_string(),
                        format!("{} ms", s.idle_ms),
                    ]
                })
                .collect();
            table(
                [
                    "SESSION", "HOST", "MOUNT", "ZONE", "LEASES", "WRITING", "IDLE",
                ],
                rows,
            )
        }),
        Session::Evict { id } if evicted => {
            output.done(&format!("session {id} evicted"));
            Ok(())
        }
        Session::Evict { id } => bail!("there is no session {id}: `hither session ls` lists all"),
    }
}

/// Where the mounts are that have a session: a directory and a host each.
pub(crate) async fn mounts(link: &ManagerLink, at_most: Duration) -> anyhow::Result<Vec<String>> {
    let (all, _) = list(link, None, at_most).await?;
    let place = |s: Shown| format!("{} on {}", s.mount_point, s.host);
    Ok(all.into_iter().map(place).collect())
}

/// The sessions of all ranks, and whether one of them was the one to evict.
async fn list(
    link: &ManagerLink,
    evict: Option<u64>,
    at_most: Duration,
) -> anyhow::Result<(Vec<Shown>, bool)> {
    let map = patiently(
        "a manager that leads",
        link.at_least(MapVersion(1), at_most),
    )
    .await
    .context("find the cluster")?;
    let mut all = Vec::new();
    let mut evicted = false;
    for (rank, at) in map.ranks() {
        let admin = cluster::admin();
        let connection = connect(&at.address, &admin, Arc::new(NoHandler), at_most).await?;
        let list = connection
            .call(Kind::SESSION_LIST, &Empty {}, &[], at_most)
            .await?;
        let list: SessionList = list.decode()?;
        if let Some(session) = evict
            && list.sessions.iter().any(|s| s.session == session)
        {
            let evict = SessionEvict { session };
            connection
                .call(Kind::SESSION_EVICT, &evict, &[], at_most)
                .await?;
            evicted = true;
        }
        all.extend(list.sessions.into_iter().map(|s| Shown {
            session: s.session,
            rank: rank.0,
            host: s.host,
            mount_point: s.mount_point,
            zone: s.zone,
            leases: s.leases,
            exclusive_leases: s.exclusive_leases,
            orphans: s.orphans,
            locks: s.locks,
            idle_ms: s.idle_ms,
        }));
    }
    Ok((all, evicted))
}
