//! The clusters this process knows, and one client of each.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hither_client::{Client, ClientConfig, NoKernelCaches};
use parking_lot::Mutex;

use crate::error::Refusal;
use crate::ids::ClusterId;
use crate::secret::ClusterAccess;
use crate::source::Source;

/// A cluster that answers.
#[derive(Debug, Clone)]
pub struct Cluster {
    /// Its id.
    pub id: ClusterId,
    /// A client of it.
    pub client: Client,
}

/// The clusters this process knows: those of its source and those that requests named.
#[derive(Debug)]
pub struct Clusters {
    host: String,
    source: Source,
    /// Clients by cluster; at most [`CLUSTERS_MAX`], an idle client more is dropped.
    clients: Mutex<BTreeMap<ClusterId, Cluster>>,
    /// What StorageClasses call clusters, as requests with secrets have shown.
    names: Mutex<BTreeMap<String, ClusterId>>,
}

impl Clusters {
    /// Knows the clusters of a source, and those that requests name.
    #[must_use]
    pub fn new(host: String, source: Source) -> Self {
        Self {
            host,
            source,
            clients: Mutex::default(),
            names: Mutex::default(),
        }
    }

    /// The cluster of a request: by its secrets, or if they name none by its id among the known.
    ///
    /// # Errors
    /// `NotNow` when nothing says how to reach it or another cluster answers there,
    /// `Unreachable` when none does.
    pub async fn of_request(
        &self,
        access: Option<&ClusterAccess>,
        id: Option<&ClusterId>,
    ) -> Result<Cluster, Refusal> {
        if let Some(access) = access {
            if let (Some(named), Some(id)) = (&access.cluster, id)
                && named != id
            {
                return Err(Refusal::NotNow(format!(
                    "the secret is of cluster {named}, the volume of {id}"
                )));
            }
            let mut access = access.clone();
            access.cluster = access.cluster.or_else(|| id.cloned());
            return self.reach(&access).await;
        }
        let id = id.ok_or_else(|| {
            Refusal::Invalid("the request has no secrets that name a cluster".into())
        })?;
        if let Some(known) = self.clients.lock().get(id) {
            return Ok(known.clone());
        }
        let configured = self.source.clusters().await?;
        let found = configured
            .into_iter()
            .flatten()
            .find(|(_, access)| access.cluster.as_ref() == Some(id));
        match found {
            Some((_, access)) => self.reach(&access).await,
            None => Err(Refusal::NotNow(format!(
                "nothing says how to reach cluster {id}: the request has no secrets"
            ))),
        }
    }

    /// Keeps what a StorageClass calls a cluster, for requests without secrets.
    pub fn learn(&self, name: &str, id: &ClusterId) {
        let mut names = self.names.lock();
        if names.len() < NAMES_MAX || names.contains_key(name) {
            names.insert(name.to_owned(), id.clone());
        }
    }

    /// The cluster a StorageClass names; without a name the only one known.
    ///
    /// # Errors
    /// `NotNow` when it is not known.
    pub async fn named(&self, name: Option<&str>) -> Result<Cluster, Refusal> {
        let configured = self.source.clusters().await?;
        let Some(name) = name else {
            let known: Vec<Cluster> = self.all().await?;
            return match &known[..] {
                [only] => Ok(only.clone()),
                _ => Err(Refusal::NotNow(
                    "the StorageClass names no cluster, and not exactly one is known".into(),
                )),
            };
        };
        let mut configured = configured.into_iter().flatten();
        if let Some((_, access)) = configured.find(|(of, _)| of == name) {
            return self.reach(&access).await;
        }
        let id = self.names.lock().get(name).cloned();
        match id {
            Some(id) => self.of_request(None, Some(&id)).await,
            None => Err(Refusal::NotNow(format!(
                "nothing says how to reach the cluster {name:?}: no StorageClass names its secret"
            ))),
        }
    }

    /// All clusters that are known.
    ///
    /// # Errors
    /// `Unreachable` when one cannot be reached: a list without it would say that its volumes are
    /// gone.
    pub async fn all(&self) -> Result<Vec<Cluster>, Refusal> {
        self.each().await?.into_iter().collect()
    }

    /// The same one by one: what holds one up is nothing to the others. Of a cluster that the
    /// source no longer has, the client is dropped.
    ///
    /// # Errors
    /// `Unreachable` when the source does not say which there are.
    pub async fn each(&self) -> Result<Vec<Result<Cluster, Refusal>>, Refusal> {
        let Some(configured) = self.source.clusters().await? else {
            return Ok(self.clients.lock().values().cloned().map(Ok).collect());
        };
        let mut reached = BTreeMap::new();
        let mut failed = Vec::new();
        for (name, access) in configured {
            match self.reach(&access).await {
                Ok(cluster) => {
                    reached.insert(cluster.id.clone(), cluster);
                }
                Err(error) => {
                    tracing::warn!(cluster = name, %error, "a cluster cannot be reached");
                    failed.push(Err(error));
                }
            }
        }
        self.clients.lock().retain(|id, _| reached.contains_key(id));
        Ok(reached.into_values().map(Ok).chain(failed).collect())
    }

    /// Ends the sessions with all clusters, as far as they answer soon.
    pub async fn close(&self) {
        let all = std::mem::take(&mut *self.clients.lock());
        for cluster in all.into_values() {
            let closed = tokio::time::timeout(CLOSE_TIMEOUT, cluster.client.close()).await;
            if !matches!(closed, Ok(Ok(()))) {
                tracing::warn!(cluster = %cluster.id, "the session is not closed: it runs out");
            }
        }
    }

    /// The cluster at these addresses.
    async fn reach(&self, access: &ClusterAccess) -> Result<Cluster, Refusal> {
        if let Some(id) = &access.cluster
            && let Some(known) = self.clients.lock().get(id)
        {
            return Ok(known.clone());
        }
        let config = ClientConfig {
            managers: access.managers.clone(),
            host: self.host.clone(),
            mount_point: "csi".into(),
            timeout: TIMEOUT,
            cached_inodes_max: CACHED_INODES,
            read_ahead_bytes_max: 0,
            ..ClientConfig::default()
        };
        let client = Client::start(config, Arc::new(NoKernelCaches)).await?;
        let id = ClusterId::of_bytes(client.map().cluster_id());
        if access.cluster.as_ref().is_some_and(|wanted| *wanted != id) {
            let wanted = access.cluster.as_ref().map_or("", ClusterId::as_str);
            return Err(Refusal::NotNow(format!(
                "the managers are those of cluster {id}, not of {wanted}"
            )));
        }
        let mut clients = self.clients.lock();
        if clients.len() >= CLUSTERS_MAX
            && let Some(first) = clients.keys().next().cloned()
        {
            clients.remove(&first);
        }
        // Another request may have been faster: then all use its client.
        let cluster = clients.entry(id.clone()).or_insert(Cluster { id, client });
        Ok(cluster.clone())
    }
}

/// Longest wait of one operation for a cluster: longer than what a lost client holds stays held
/// (15 s), shorter than the budgets of requests that ask a cluster.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Longest wait for a session to end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Clusters of which a client is kept.
const CLUSTERS_MAX: usize = 64;
/// Names of clusters that are kept.
const NAMES_MAX: usize = 1024;
/// Inodes a client of this process keeps.
const CACHED_INODES: usize = 10_000;
