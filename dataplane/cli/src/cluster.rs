//! Reaching a cluster from the command line.

use std::time::Duration;

use anyhow::{Context as _, bail};
use hither_managerlink::ManagerLink;
use hither_net::{Identity, NetError, Reply};
use hither_proto::common::Role;
use hither_proto::kind::Kind;
use prost::Message;

/// Time a command gives the cluster.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// A link to the managers the command line names.
pub(crate) fn link(cluster: Option<&str>) -> anyhow::Result<ManagerLink> {
    let Some(cluster) = cluster else {
        bail!("which cluster? give --cluster HOST:PORT or set HITHER_CLUSTER");
    };
    let addresses = cluster
        .split(',')
        .map(|address| address.trim().to_owned())
        .collect();
    Ok(ManagerLink::start(addresses, admin(), ""))
}

/// How the command line introduces itself.
pub(crate) fn admin() -> Identity {
    Identity {
        role: Role::Admin,
        boot_id: rand::random(),
        ..Identity::default()
    }
}

/// Asks the leading manager; the error is for people.
pub(crate) async fn ask(
    link: &ManagerLink,
    kind: Kind,
    message: &impl Message,
) -> anyhow::Result<Reply> {
    match link.call(kind, message, PATIENCE).await {
        Ok(reply) => Ok(reply),
        Err(NetError::Refused { failure, .. }) if !failure.text.is_empty() => {
            bail!("{}", failure.text)
        }
        Err(error) => Err(error).context("ask the manager"),
    }
}
