//! The process: watches, a task for each cluster, the lease, and what probes ask.

mod apply;
mod calls;
mod claims;
mod cluster;
mod definitions;
mod deletion;
mod dumps;
mod etcd;
mod health;
mod lease;
mod manage;
mod mounters;
mod pass;
mod probes;
mod products;
mod watch;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::events::{Recorder, Reporter};
use kube::{Client, ResourceExt as _};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::api::{ChunkStorageClass, ChunkserverPool, HitherCluster};
use crate::desired::{CLUSTER_LABEL, MANAGED_BY};
use crate::error::Error;
pub use deletion::guard;
use health::Health;
use lease::Lease;
use watch::Watched;

/// How the operator runs.
#[derive(Debug, Clone)]
pub struct Options {
    /// Namespaces that are watched; empty: all.
    pub namespaces: Vec<String>,
    /// Namespace of the lease.
    pub own_namespace: String,
    /// Who holds the lease; different for every process.
    pub identity: String,
    /// Image of servers whose cluster names none.
    pub image: String,
    /// Namespace and name of the service account that provisions volumes.
    pub provisioner: Option<(String, String)>,
    /// Labels of the pods that serve the nodes' mounts, in the lease's namespace.
    pub mounters: Option<String>,
    /// Where probes are answered.
    pub probes: SocketAddr,
}

/// A cluster's namespace and name.
type Key = (String, String);

struct Context {
    client: Client,
    options: Options,
    clusters: Watched<HitherCluster>,
    pools: Watched<ChunkserverPool>,
    classes: Watched<ChunkStorageClass>,
    sets: Watched<StatefulSet>,
    pods: Watched<Pod>,
    recorder: Recorder,
    lease: Lease,
    health: Health,
    /// Nodes whose mounters are outdated.
    mounters: mounters::Nodes,
}

/// The tasks of all clusters ever seen, and how each is woken.
#[derive(Clone, Default)]
struct Tasks {
    wake: Arc<Mutex<BTreeMap<Key, Arc<Notify>>>>,
}

impl Tasks {
    /// Wakes the cluster's task; the first time there is none yet, and it is told.
    fn wake(&self, key: Key) -> Option<Arc<Notify>> {
        let mut all = self.wake.lock();
        if let Some(wake) = all.get(&key) {
            wake.notify_one();
            return None;
        }
        let wake = Arc::new(Notify::new());
        all.insert(key, Arc::clone(&wake));
        Some(wake)
    }
}

/// Runs until the lease is lost or the future is dropped.
///
/// # Errors
/// When the probes' address cannot be had, or the lease was lost.
pub async fn run(client: Client, options: Options) -> anyhow::Result<()> {
    let health = Health::default();
    let probes = probes::serve(options.probes, health.clone()).await?;
    let lease = Lease::new(client.clone(), &options.own_namespace, &options.identity);
    tokio::pin!(probes);
    tokio::select! {
        taken = lease.take() => taken?,
        ended = &mut probes => return ended,
    }
    tracing::info!(identity = options.identity, "leading");
    let renewing = lease.clone();
    let kept = renewing.keep();
    tokio::pin!(kept);
    tokio::select! {
        () = definitions::update(&client, &lease) => {}
        () = &mut kept => return Err(Error::NotLeader.into()),
        ended = &mut probes => return ended,
    }
    let (new, mut seen) = tokio::sync::mpsc::channel(CLUSTERS_AT_ONCE);
    let tasks = Tasks::default();
    let poke = move |key: Key| {
        if let Some(wake) = tasks.wake(key.clone()) {
            let new = new.clone();
            // Waits only when very many clusters are first seen at once.
            tokio::spawn(async move { new.send((key, wake)).await });
        }
    };
    let poke: Arc<dyn Fn(Key) + Send + Sync> = Arc::new(poke);
    let context = Arc::new(context(&client, options, &health, &poke, lease.clone()));
    // They end with this future.
    let mut clusters = JoinSet::new();
    let dispatch = async {
        loop {
            tokio::select! {
                new = seen.recv() => match new {
                    Some((key, wake)) => {
                        clusters.spawn(cluster::keep(Arc::clone(&context), key, wake));
                    }
                    None => return Ok(()),
                },
                // None ends by itself: what broke it is for the process to tell.
                Some(ended) = clusters.join_next() => return ended.map_err(anyhow::Error::from),
            }
        }
    };
    tokio::select! {
        () = kept => Err(Error::NotLeader.into()),
        ended = probes => ended,
        ended = dispatch => ended,
        () = mounters::follow(&context) => Ok(()),
    }
}

fn context(
    client: &Client,
    options: Options,
    health: &Health,
    poke: &Arc<dyn Fn(Key) + Send + Sync>,
    lease: Lease,
) -> Context {
    let managed = format!("app.kubernetes.io/managed-by={MANAGED_BY}");
    let namespaces = &options.namespaces;
    let start = watch::Start {
        client,
        namespaces,
        health,
        poke,
    };
    let reporter = Reporter {
        controller: MANAGED_BY.into(),
        instance: Some(options.identity.clone()),
    };
    Context {
        client: client.clone(),
        clusters: start.watch("", |cluster: &HitherCluster| Some(cluster.name_any())),
        pools: start.watch("", |pool: &ChunkserverPool| Some(pool.spec.cluster.clone())),
        classes: start.watch("", |class: &ChunkStorageClass| {
            Some(class.spec.cluster.clone())
        }),
        sets: start.watch(&managed, |set: &StatefulSet| {
            set.labels().get(CLUSTER_LABEL).cloned()
        }),
        pods: start.watch(&managed, |pod: &Pod| {
            pod.labels().get(CLUSTER_LABEL).cloned()
        }),
        recorder: Recorder::new(client.clone(), reporter),
        lease,
        health: health.clone(),
        mounters: mounters::Nodes::default(),
        options,
    }
}

/// New clusters that wait for their task at most.
const CLUSTERS_AT_ONCE: usize = 256;
