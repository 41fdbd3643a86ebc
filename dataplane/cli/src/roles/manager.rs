//! The manager, with the metadata ranks where the store is embedded.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use hither_log::{LogDir, RealDir};
use hither_manager::{Manager, ManagerConfig};
use hither_mds::{RankConfig, RankServer};
use hither_metastore::{EmbeddedOptions, EmbeddedStore};
use hither_net::Identity;
use hither_proto::ids::{MapVersion, RankId};
use serde::Deserialize;

use super::{Signals, announce, ending, host_of, read_config, told_address};
use crate::args;

/// Configuration of a manager.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Config {
    /// Directory of the embedded store.
    dir: Option<PathBuf>,
    /// etcd endpoints, separated by commas.
    etcd: Option<String>,
    /// Directory with the certificates for TLS with etcd; ca.crt, tls.crt, tls.key.
    etcd_tls: Option<PathBuf>,
    /// Address to listen at. Default 127.0.0.1:7650.
    listen: String,
    /// Address to tell others; empty: the one listened at.
    advertise: String,
    /// Address of the metadata ranks in this process; empty: the host of `listen` with port 7651.
    mds_listen: String,
    /// Address of these ranks to tell others; empty: the host of `advertise` with the port listened
    /// at, and without that the one listened at.
    mds_advertise: String,
    /// Metadata ranks in this process, 0 or 1 for now; only with the embedded store.
    ranks: u16,
    /// Storage class of the root directory of a new cluster. Default: two copies anywhere.
    default_class: String,
    /// Labels count only inside a client's own zone.
    locations: bool,
    /// Milliseconds a mount's session lives without renewal. Default 15000.
    session_lease_ms: u64,
    /// Answer changes before they are in the store (to their own mount only).
    early_answers: bool,
    /// Inodes a rank keeps in memory.
    cached_inodes_max: usize,
    /// Milliseconds a chunkserver may be down before its copies are made elsewhere. Default 600000.
    repair_after_ms: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            dir: None,
            etcd: None,
            etcd_tls: None,
            listen: "127.0.0.1:7650".into(),
            advertise: String::new(),
            mds_listen: String::new(),
            mds_advertise: String::new(),
            ranks: 1,
            default_class: "2".into(),
            locations: false,
            session_lease_ms: 15_000,
            early_answers: true,
            cached_inodes_max: 1_000_000,
            repair_after_ms: 600_000,
        }
    }
}

/// Runs until SIGTERM.
pub(crate) async fn run(args: args::Manager) -> anyhow::Result<()> {
    let mut config: Config = read_config(args.config.as_deref())?;
    config.dir = args.dir.or(config.dir);
    config.etcd = args.etcd.or(config.etcd);
    config.etcd_tls = args.etcd_tls.or(config.etcd_tls);
    config.listen = args.listen.unwrap_or(config.listen);
    config.advertise = args.advertise.unwrap_or(config.advertise);
    config.mds_listen = args.mds_listen.unwrap_or(config.mds_listen);
    config.mds_advertise = args.mds_advertise.unwrap_or(config.mds_advertise);
    config.ranks = args.ranks.unwrap_or(config.ranks);
    config.default_class = args.default_class.unwrap_or(config.default_class);
    config.advertise = told_address(&config.listen, &config.advertise)?;
    if config.mds_listen.is_empty() {
        config.mds_listen = rank_address(&config.listen);
    }
    if config.mds_advertise.is_empty() && !config.advertise.is_empty() {
        host_of(&config.advertise).clone_into(&mut config.mds_advertise);
    }
    if config.etcd.is_none() && config.ranks > 0 {
        config.mds_advertise = told_address(&config.mds_listen, &config.mds_advertise)
            .context("the metadata ranks of this process (--mds-listen, --mds-advertise)")?;
    }
    if config.ranks > 1 {
        bail!("one metadata rank for now: several active ranks come later");
    }
    match (&config.dir, &config.etcd) {
        (Some(_), Some(_)) => bail!("give either --dir (embedded store) or --etcd, not both"),
        (None, None) => bail!("where is the metadata store? give --dir DIRECTORY or --etcd URLS"),
        (Some(at), None) => {
            let dir: Arc<dyn LogDir> =
                Arc::new(RealDir::open(at).with_context(|| format!("open {}", at.display()))?);
            let store = EmbeddedStore::open(&dir, EmbeddedOptions::default())
                .map_err(|error| unopened(at, &error))?;
            with_store(&config, Arc::new(store), true).await
        }
        (None, Some(urls)) => with_etcd(&config, urls).await,
    }
}

/// Why the embedded store in the directory `at` is not opened, and what to do.
fn unopened(at: &Path, error: &hither_metastore::Error) -> anyhow::Error {
    let at = at.display();
    let todo = match error {
        hither_metastore::Error::Corrupt { .. } => format!(
            "\nNothing in {at} is given up. Move it away, and fill an empty directory from the last \
             dump: hither meta load FILE --dir {at}"
        ),
        _ => String::new(),
    };
    anyhow!("open the metadata store in {at}: {error}{todo}")
}

/// Where the ranks beside a manager listen unless something else is said: where it does itself.
fn rank_address(listen: &str) -> String {
    let host = listen.rsplit_once(':').map_or(listen, |(host, _)| host);
    format!("{host}:{RANK_PORT}")
}

/// Port of the first rank in a manager's process.
const RANK_PORT: u16 = 7651;

#[cfg(feature = "etcd")]
async fn with_etcd(config: &Config, urls: &str) -> anyhow::Result<()> {
    let store = super::etcd::open(urls, config.etcd_tls.as_deref()).await?;
    let config = Config {
        ranks: 0,
        ..config.clone()
    };
    with_store(&config, Arc::new(store), false).await
}

#[cfg(not(feature = "etcd"))]
async fn with_etcd(_: &Config, _: &str) -> anyhow::Result<()> {
    std::future::ready(()).await;
    bail!("this build has no etcd backend: build with `--features etcd`")
}

async fn with_store<S: hither_metastore::MetaStore>(
    config: &Config,
    store: Arc<S>,
    embedded: bool,
) -> anyhow::Result<()> {
    let session_lease = Duration::from_millis(config.session_lease_ms);
    let manager = Manager::start(
        ManagerConfig {
            listen: config.listen.clone(),
            advertise: config.advertise.clone(),
            store_is_exclusive: embedded,
            locations: config.locations,
            session_lease,
            default_class: config.default_class.clone(),
            repair_after: Duration::from_millis(config.repair_after_ms),
            store_name: if embedded { "embedded" } else { "etcd" }.into(),
        },
        Arc::clone(&store),
    )
    .await?;
    let mut rank = None;
    if embedded && config.ranks > 0 {
        rank = Some(start_rank(config, &manager, store, session_lease).await?);
    }
    // Who reads that it is ready may end it: as asked, and not where it stands.
    let mut signals = Signals::listen()?;
    announce(&format!("manager ready at {}", manager.address()));
    let stopped = async {
        match &rank {
            Some(rank) => rank.fenced().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = signals.next() => {}
        // Whoever watches the process starts it again; without its rank it would serve nobody.
        () = stopped => bail!("the metadata rank of this process has stopped"),
    }
    ending(
        async {
            if let Some(rank) = rank {
                rank.shutdown().await;
            }
            manager.shutdown().await;
        },
        true,
    )
    .await
}

async fn start_rank<S: hither_metastore::MetaStore>(
    config: &Config,
    manager: &Manager,
    store: Arc<S>,
    session_lease: Duration,
) -> anyhow::Result<RankServer> {
    let mut map = manager.map();
    let first = {
        let ready = map.wait_for(|map| map.version() > MapVersion(0)).await;
        Arc::clone(&*ready.context("wait for the first cluster map")?)
    };
    let default_class = first.classes().next().map_or(1, |(id, _)| id.0);
    let identity = Identity {
        cluster_id: bytes::Bytes::copy_from_slice(first.cluster_id()),
        boot_id: rand::random(),
        ..Identity::default()
    };
    let rank = RankServer::start(
        RankConfig {
            rank: RankId(0),
            listen: config.mds_listen.clone(),
            session_lease,
            early_answers: config.early_answers,
            cached_inodes_max: config.cached_inodes_max,
            default_class,
            holder: None,
        },
        identity,
        store,
        manager.map(),
        manager.unreachable_reporter(),
    )
    .await?;
    let address = if config.mds_advertise.is_empty() {
        rank.address().to_string()
    } else {
        config.mds_advertise.clone()
    };
    manager
        .announce_rank(RankId(0), address, rank.epoch().0)
        .await;
    Ok(rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_listen_where_their_manager_does() {
        assert_eq!(rank_address("0.0.0.0:7650"), "0.0.0.0:7651");
        assert_eq!(rank_address("[::]:17650"), "[::]:7651");
        assert_eq!(rank_address(&Config::default().listen), "127.0.0.1:7651");
    }
}
