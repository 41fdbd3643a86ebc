//! Watches: each on its own, with its own back-off, so that one that fails holds no other up.

use std::fmt::Debug;
use std::sync::Arc;

use super::Key;
use super::health::{Health, Watch};
use futures::StreamExt as _;
use futures::future::join_all;
use k8s_openapi::NamespaceResourceScope;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::{self, Store};
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::sync::OnceCell;

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
    /// One for each namespace; one without a name when all are watched.
    stores: Vec<Listed<K>>,
}

/// What the watch of one namespace has seen.
struct Listed<K>
where
    K: Resource<DynamicType = ()> + 'static,
{
    namespace: Option<String>,
    store: Store<K>,
    /// A store wakes one of those that wait for it, so only one does.
    listed: OnceCell<()>,
}

impl<K> Listed<K>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    async fn ready(&self) {
        let listed = async {
            // A writer that is gone has taken the process's watches with it; the process ends too.
            let _ = self.store.wait_until_ready().await;
        };
        self.listed.get_or_init(|| listed).await;
    }
}

impl<K> Watched<K>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    fn of(stores: Vec<(Option<String>, Store<K>)>) -> Self {
        let listed = |(namespace, store)| Listed {
            namespace,
            store,
            listed: OnceCell::new(),
        };
        Self {
            stores: stores.into_iter().map(listed).collect(),
        }
    }

    /// Waits until everything there is in a namespace has been listed once.
    pub(super) async fn ready(&self, namespace: &str) {
        let of = |listed: &&Listed<K>| {
            let name = listed.namespace.as_deref();
            name.is_none_or(|name| name == namespace)
        };
        join_all(self.stores.iter().filter(of).map(Listed::ready)).await;
    }

    /// All that fit.
    pub(super) fn find(&self, fits: impl Fn(&K) -> bool) -> Vec<K> {
        let all = self.stores.iter().flat_map(|one| one.store.state());
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
        let apis: Vec<(Option<String>, Api<K>)> = match self.namespaces {
            [] => vec![(None, Api::all(self.client.clone()))],
            named => {
                let api = |name: &String| Api::namespaced(self.client.clone(), name);
                let one = |name: &String| (Some(name.clone()), api(name));
                named.iter().map(one).collect()
            }
        };
        let start = |(namespace, api): (Option<String>, Api<K>)| {
            let (store, writer) = reflector::store();
            let config = watcher::Config::default().labels(labels);
            // What nobody reads takes no memory.
            let slim = |object: &mut K| object.managed_fields_mut().clear();
            let events = watcher::watcher(api, config).modify(slim).default_backoff();
            let events = kube::runtime::reflector(writer, events);
            let watch = Watch {
                kind: K::kind(&()).into_owned(),
                namespace: namespace.clone(),
            };
            self.health.begins(&watch);
            let follow = Follow {
                watch,
                health: self.health.clone(),
                poke: Arc::clone(self.poke),
            };
            tokio::spawn(follow.run(events.boxed(), of.clone()));
            (namespace, store)
        };
        Watched::of(apis.into_iter().map(start).collect())
    }
}

struct Follow {
    watch: Watch,
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
                    self.health.works(&self.watch);
                    if let (Some(namespace), Some(cluster)) = (object.namespace(), of(&object)) {
                        (self.poke)((namespace, cluster));
                    }
                }
                // Said before the API server is asked.
                Ok(Event::Init) => {}
                Ok(Event::InitDone) => self.health.works(&self.watch),
                Err(error) => {
                    let watch = &self.watch;
                    tracing::warn!(%watch, %error, "a watch fails: it is tried again");
                    self.health.fails(watch, is_refused(&error));
                }
            }
        }
    }
}

/// Whether the API server works, and does not give what is asked for: the namespace or the right to
/// it is gone, which a new process would not change.
fn is_refused(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => matches!(status.code, 403 | 404),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::stream;
    use k8s_openapi::api::core::v1::Pod;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_list_that_fails_again_and_again_is_told() {
        let health = Health::default();
        let attempt = async || {
            let follow = Follow {
                watch: Watch {
                    kind: "Pod".into(),
                    namespace: None,
                },
                health: health.clone(),
                poke: Arc::new(|_| {}),
            };
            let events = [
                Ok(Event::<Pod>::Init),
                Err(watcher::Error::NoResourceVersion),
            ];
            follow.run(stream::iter(events).boxed(), |_| None).await;
        };
        attempt().await;
        tokio::time::advance(Duration::from_secs(301)).await;
        attempt().await;
        assert!(health.complaint().is_some());
    }

    #[tokio::test]
    async fn all_clusters_go_on_when_everything_is_listed() {
        let (store, mut writer) = reflector::store::<Pod>();
        let watched = Arc::new(Watched::of(vec![(None, store)]));
        let wait = |watched: Arc<Watched<Pod>>| async move { watched.ready("n").await };
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
