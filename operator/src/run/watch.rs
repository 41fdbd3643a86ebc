//! Watches: each on its own, with its own back-off, so that one that fails holds no other up.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use futures::StreamExt as _;
use futures::future::join_all;
use k8s_openapi::NamespaceResourceScope;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::{self, Store};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource, ResourceExt as _};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::sync::OnceCell;
use tokio::time::Instant;

use super::{Key, WATCH_FAILS_MAX};

/// How all watches begin.
pub(super) struct Start<'a> {
    pub(super) client: &'a Client,
    pub(super) namespaces: &'a [String],
    pub(super) health: &'a Health,
    pub(super) poke: &'a Arc<dyn Fn(Key) + Send + Sync>,
}

/// What a kind's watches have seen.
pub(super) struct Watched<K>
where
    K: Resource<DynamicType = ()> + 'static,
{
    stores: Vec<Store<K>>,
    /// A store wakes one of those that wait for it, so only one does.
    listed: OnceCell<()>,
}

impl<K> Watched<K>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    fn of(stores: Vec<Store<K>>) -> Self {
        Self {
            stores,
            listed: OnceCell::new(),
        }
    }

    /// Waits until everything there is has been listed once.
    pub(super) async fn ready(&self) {
        let listed = async {
            // A writer that is gone has taken the process's watches with it; the process ends too.
            join_all(self.stores.iter().map(Store::wait_until_ready)).await;
        };
        self.listed.get_or_init(|| listed).await;
    }

    /// All that fit.
    pub(super) fn find(&self, fits: impl Fn(&K) -> bool) -> Vec<K> {
        let all = self.stores.iter().flat_map(Store::state);
        let mut found: Vec<K> = all
            .filter(|one| fits(one))
            .map(|one| (*one).clone())
            .collect();
        found.sort_by_key(|one| (one.namespace(), one.name_any()));
        found
    }
}

impl Start<'_> {
    /// Watches a kind; `of` names the cluster an object belongs to.
    pub(super) fn watch<K>(
        &self,
        labels: &str,
        of: impl Fn(&K) -> Option<String> + Clone + Send + 'static,
    ) -> Watched<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + DeserializeOwned
            + Send
            + Sync
            + 'static,
    {
        let apis: Vec<Api<K>> = match self.namespaces {
            [] => vec![Api::all(self.client.clone())],
            named => {
                let one = |name: &String| Api::namespaced(self.client.clone(), name);
                named.iter().map(one).collect()
            }
        };
        let start = |api: Api<K>| {
            let (store, writer) = reflector::store();
            let config = watcher::Config::default().labels(labels);
            // What nobody reads takes no memory.
            let slim = |object: &mut K| object.managed_fields_mut().clear();
            let events = watcher::watcher(api, config).modify(slim).default_backoff();
            let events = kube::runtime::reflector(writer, events);
            let follow = Follow {
                kind: K::kind(&()).into_owned(),
                health: self.health.clone(),
                poke: Arc::clone(self.poke),
            };
            tokio::spawn(follow.run(events.boxed(), of.clone()));
            store
        };
        Watched::of(apis.into_iter().map(start).collect())
    }
}

struct Follow {
    kind: String,
    health: Health,
    poke: Arc<dyn Fn(Key) + Send + Sync>,
}

impl Follow {
    async fn run<K>(
        self,
        mut events: futures::stream::BoxStream<'static, watcher::Result<Event<K>>>,
        of: impl Fn(&K) -> Option<String>,
    ) where
        K: Resource<DynamicType = ()>,
    {
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Apply(object) | Event::InitApply(object) | Event::Delete(object)) => {
                    self.health.works(&self.kind);
                    if let (Some(namespace), Some(cluster)) = (object.namespace(), of(&object)) {
                        (self.poke)((namespace, cluster));
                    }
                }
                Ok(Event::Init | Event::InitDone) => self.health.works(&self.kind),
                Err(error) => {
                    tracing::warn!(kind = self.kind, %error, "a watch fails: it is tried again");
                    self.health.fails(&self.kind);
                }
            }
        }
    }
}

/// Which watches fail, and since when.
#[derive(Clone, Default)]
pub(super) struct Health {
    failing: Arc<Mutex<BTreeMap<String, Instant>>>,
}

impl Health {
    fn works(&self, kind: &str) {
        self.failing.lock().remove(kind);
    }

    fn fails(&self, kind: &str) {
        self.failing
            .lock()
            .entry(kind.to_owned())
            .or_insert_with(Instant::now);
    }

    /// What has failed for too long.
    pub(super) fn complaint(&self) -> Option<String> {
        let failing = self.failing.lock();
        let (kind, since) = failing
            .iter()
            .find(|(_, since)| since.elapsed() > WATCH_FAILS_MAX)?;
        Some(format!(
            "the watch of {kind} has failed for {} s",
            since.elapsed().as_secs()
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use k8s_openapi::api::core::v1::Pod;

    use super::*;

    #[tokio::test]
    async fn all_clusters_go_on_when_everything_is_listed() {
        let (store, mut writer) = reflector::store::<Pod>();
        let watched = Arc::new(Watched::of(vec![store]));
        let wait = |watched: Arc<Watched<Pod>>| async move { watched.ready().await };
        let mut tasks: Vec<_> = (0..3)
            .map(|_| tokio::spawn(wait(Arc::clone(&watched))))
            .collect();
        // All of them wait by now.
        tokio::task::yield_now().await;
        writer.apply_watcher_event(&Event::Init);
        writer.apply_watcher_event(&Event::InitDone);
        for task in &mut tasks {
            let woken = tokio::time::timeout(Duration::from_secs(5), task).await;
            woken.expect("a task waits for good").unwrap();
        }
    }
}
