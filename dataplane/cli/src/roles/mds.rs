//! A metadata server of its own, where the store is outside the manager.

#[cfg(feature = "etcd")]
pub(crate) use with_etcd::run;

#[cfg(not(feature = "etcd"))]
pub(crate) use without_etcd::run;

#[cfg(not(feature = "etcd"))]
mod without_etcd {
    use anyhow::bail;

    use crate::args;

    /// Says that this build cannot.
    pub(crate) async fn run(_: args::Mds) -> anyhow::Result<()> {
        std::future::ready(()).await;
        bail!(
            "with the embedded store the manager carries the metadata ranks; this build has no \
             etcd backend (build with `--features etcd`)"
        )
    }
}

#[cfg(feature = "etcd")]
mod with_etcd {
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::time::Duration;

    use anyhow::bail;
    use hither_clustermap::ClusterView;
    use hither_managerlink::ManagerLink;
    use hither_mds::{Holder, Pulse, RankConfig, RankServer};
    use hither_metastore::EtcdStore;
    use hither_net::Identity;
    use hither_proto::common::Role;
    use hither_proto::ids::{MapVersion, RankId};
    use hither_proto::kind::Kind;
    use hither_proto::manager::{RankBeat, ReportUnreachable};
    use serde::Deserialize;

    use crate::args;
    use crate::cluster::manager_addresses;
    use crate::roles::life::{Doing, Life};
    use crate::roles::probes::Probes;
    use crate::roles::{announce, ending, etcd, read_config, terminated, told_address};

    /// Configuration of a metadata server.
    #[derive(Debug, Clone, Deserialize)]
    #[serde(rename_all = "camelCase", default, deny_unknown_fields)]
    struct Config {
        /// Rank to serve.
        rank: u16,
        /// etcd endpoints, separated by commas.
        etcd: String,
        /// Directory with the certificates for TLS with etcd; ca.crt, tls.crt, tls.key.
        etcd_tls: Option<PathBuf>,
        /// Address to listen at. Default 127.0.0.1:7651.
        listen: String,
        /// Address to tell others; empty: the one listened at.
        advertise: String,
        /// Addresses of managers, separated by commas.
        managers: String,
        /// Address that answers probes; empty: none.
        probes: String,
        /// Answer changes before they are in the store (to their own mount only).
        early_answers: bool,
        /// Inodes kept in memory.
        cached_inodes_max: usize,
    }

    impl Default for Config {
        fn default() -> Self {
            Self {
                rank: 0,
                etcd: String::new(),
                etcd_tls: None,
                listen: "127.0.0.1:7651".into(),
                advertise: String::new(),
                managers: "127.0.0.1:7650".into(),
                probes: String::new(),
                early_answers: true,
                cached_inodes_max: 1_000_000,
            }
        }
    }

    /// Serves the rank, or stands by for whoever does, until SIGTERM.
    pub(crate) async fn run(args: args::Mds) -> anyhow::Result<()> {
        let mut config: Config = read_config(args.config.as_deref())?;
        config.rank = args.rank.unwrap_or(config.rank);
        config.etcd = args.etcd.unwrap_or(config.etcd);
        config.etcd_tls = args.etcd_tls.or(config.etcd_tls);
        config.listen = args.listen.unwrap_or(config.listen);
        config.advertise = args.advertise.unwrap_or(config.advertise);
        config.managers = args.managers.unwrap_or(config.managers);
        config.probes = args.probes.unwrap_or(config.probes);
        if config.etcd.is_empty() {
            bail!("where is the metadata store? give --etcd URLS");
        }
        config.advertise = told_address(&config.listen, &config.advertise)?;
        let managers = manager_addresses(&config.managers)?;
        let life = Arc::new(Life::default());
        let _probes = Probes::answer(&config.probes, Arc::clone(&life)).await?;
        let end = terminated();
        tokio::pin!(end);
        let store = tokio::select! {
            store = etcd::open(&config.etcd, config.etcd_tls.as_deref()) => Arc::new(store?),
            ended = &mut end => return ended,
        };
        let identity = Identity {
            role: Role::Mds,
            boot_id: rand::random(),
            ..Identity::default()
        };
        let link = ManagerLink::start(managers, identity.clone(), "");
        loop {
            let rank = tokio::select! {
                rank = take_rank(&config, &identity, &store, &link, &life) => rank?,
                ended = &mut end => return ended,
            };
            life.turns_to(Doing::Serving(rank.vitals()));
            let address = match config.advertise.as_str() {
                "" => rank.address().to_string(),
                told => told.to_owned(),
            };
            announce(&format!("metadata rank {} ready at {address}", config.rank));
            let beat = RankBeat {
                rank: u32::from(config.rank),
                address,
                epoch: rank.epoch().0,
                boot_id: identity.boot_id,
            };
            let beats = tokio::spawn(beat_on(link.clone(), beat));
            let ended = tokio::select! {
                ended = &mut end => Some(ended),
                () = rank.fenced() => None,
            };
            beats.abort();
            if let Some(ended) = ended {
                ended?;
                let settled = tokio::time::timeout(SETTLE_IN, rank.shutdown());
                if ending(settled, true).await?.is_err() {
                    bail!(
                        "the metadata store does not answer: what was not stored is left to the \
                         mounts, which send it again"
                    );
                }
                return Ok(());
            }
            tracing::warn!(
                rank = config.rank,
                "another process serves the rank now: standing by"
            );
        }
    }

    /// Waits until nobody else has the rank, and begins to serve it.
    async fn take_rank(
        config: &Config,
        identity: &Identity,
        store: &Arc<EtcdStore>,
        link: &ManagerLink,
        life: &Life,
    ) -> anyhow::Result<RankServer> {
        life.turns_to(Doing::Beginning);
        let first = first_map(link.clone()).await;
        let default_class = first.classes().next().map_or(1, |(id, _)| id.0);
        let looks = Pulse::default();
        life.turns_to(Doing::StandingBy(looks.clone()));
        let rank = RankServer::start(
            RankConfig {
                rank: RankId(config.rank),
                listen: config.listen.clone(),
                session_lease: Duration::from_millis(u64::from(first.session_lease_ms())),
                early_answers: config.early_answers,
                cached_inodes_max: config.cached_inodes_max,
                default_class,
                holder: Some(Holder {
                    boot_id: rand::random(),
                    address: match config.advertise.as_str() {
                        "" => config.listen.clone(),
                        told => told.to_owned(),
                    },
                    looks,
                }),
            },
            Identity {
                cluster_id: bytes::Bytes::copy_from_slice(first.cluster_id()),
                ..identity.clone()
            },
            Arc::clone(store),
            link.watch(),
            reporter(link),
        )
        .await?;
        Ok(rank)
    }

    /// The cluster map, once a manager leads.
    async fn first_map(link: ManagerLink) -> Arc<ClusterView> {
        loop {
            match link.at_least(MapVersion(1), MAP_IN).await {
                Ok(map) => return map,
                Err(error) => tracing::warn!(%error, "no manager leads yet: waiting for one"),
            }
        }
    }

    /// Says again and again where the rank is: the manager forgets it when it restarts.
    async fn beat_on(link: ManagerLink, beat: RankBeat) {
        loop {
            if let Err(error) = link.call(Kind::RANK_BEAT, &beat, BEAT).await {
                tracing::debug!(%error, "no manager takes the beat");
            }
            tokio::time::sleep(BEAT).await;
        }
    }

    fn reporter(link: &ManagerLink) -> Box<dyn Fn(ReportUnreachable) + Send + Sync> {
        let link = link.clone();
        Box::new(move |report| {
            let link = link.clone();
            tokio::spawn(async move {
                if let Err(error) = link.call(Kind::REPORT_UNREACHABLE, &report, BEAT).await {
                    tracing::debug!(%error, "a report was not taken");
                }
            });
        })
    }

    /// After this long it is said that no manager leads.
    const MAP_IN: Duration = Duration::from_secs(10);
    /// Time to store what was answered, at the end.
    const SETTLE_IN: Duration = Duration::from_secs(10);
    /// How often the rank says where it is.
    const BEAT: Duration = Duration::from_secs(1);
}
