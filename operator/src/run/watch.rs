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
    /// By namespace; one without a name when all are watched.
    stores: Vec<(Option<String>, Store<K>)>,
}

impl<K> Watched<K>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    /// Waits until everything there is in a namespace has been listed once.
    pub(super) async fn ready(&self, namespace: &str) {
        let of = |(name, _): &&(Option<String>, Store<K>)| {
            name.as_deref().is_none_or(|name| name == namespace)
        };
        let stores = self.stores.iter().filter(of);
        // A writer that is gone has taken the process's watches with it; the process ends too.
        join_all(stores.map(|(_, store)| store.wait_until_ready())).await;
    }

    /// All that fit.
    pub(super) fn find(&self, fits: impl Fn(&K) -> bool) -> Vec<K> {
        let all = self.stores.iter().flat_map(|(_, store)| store.state());
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
        Watched {
            stores: apis.into_iter().map(start).collect(),
        }
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
}
