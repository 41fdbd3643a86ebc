//! Where clusters are found that no request has named: requests without secrets, and work that no
//! request asks for, need them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};

use crate::DRIVER;
use crate::error::Refusal;
use crate::secret::ClusterAccess;

/// Where clusters are found.
#[derive(Clone)]
pub enum Source {
    /// Nowhere: those that requests have named are known.
    Requests,
    /// In a directory with a directory for each, named as StorageClasses name the cluster, in it a
    /// file for each key of its secret.
    Directory(PathBuf),
    /// In the secrets that Kubernetes' StorageClasses of this driver name.
    StorageClasses(Client),
}

/// What a StorageClass calls a cluster, and how it is reached.
pub type Known = (String, ClusterAccess);

impl Source {
    /// The clusters of now, by name; `None`: those that requests have named.
    ///
    /// # Errors
    /// `Unreachable` when Kubernetes does not say. A secret that is not there, not readable or
    /// wrong is logged: it holds no other cluster up.
    pub async fn clusters(&self) -> Result<Option<Vec<Known>>, Refusal> {
        match self {
            Self::Requests => Ok(None),
            Self::Directory(directory) => Ok(Some(in_directory(directory))),
            Self::StorageClasses(client) => {
                let asked = tokio::time::timeout(PATIENCE, in_secrets(client)).await;
                let silent = || Refusal::Unreachable("Kubernetes does not answer".into());
                asked.map_err(|_| silent())?.map(Some)
            }
        }
    }
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Requests => f.write_str("Requests"),
            Self::Directory(directory) => f.debug_tuple("Directory").field(directory).finish(),
            Self::StorageClasses(_) => f.write_str("StorageClasses"),
        }
    }
}

fn in_directory(directory: &Path) -> Vec<Known> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let named = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        if name.starts_with('.') || !entry.path().is_dir() {
            return None;
        }
        usable(name, ClusterAccess::of_directory(&entry.path()))
    });
    let mut all: Vec<Known> = named.collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

async fn in_secrets(client: &Client) -> Result<Vec<Known>, Refusal> {
    let said =
        |what: String| move |error: kube::Error| Refusal::Unreachable(format!("{what}: {error}"));
    let classes: Api<StorageClass> = Api::all(client.clone());
    let classes = classes
        .list(&ListParams::default())
        .await
        .map_err(said("list storage classes".into()))?;
    let mut all = Vec::new();
    for ((namespace, secret), names) in secrets_named(&classes.items) {
        let api: Api<Secret> = Api::namespaced(client.clone(), &namespace);
        let what = format!("read secret {namespace}/{secret}");
        let found = match api.get(&secret).await {
            // Nobody can use this class: what is wrong is told, and others go on.
            Err(kube::Error::Api(status)) if [403, 404].contains(&status.code) => {
                tracing::warn!(
                    what,
                    why = status.message,
                    "a cluster's secret cannot be had"
                );
                continue;
            }
            other => other.map_err(said(what))?,
        };
        let access = of_secret(&found);
        all.extend(
            names
                .into_iter()
                .filter_map(|name| usable(name, access.clone())),
        );
    }
    all.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(all)
}

/// Namespace and name of each secret that volumes are made with, and what classes call its cluster.
fn secrets_named(classes: &[StorageClass]) -> BTreeMap<(String, String), BTreeSet<String>> {
    let mut all: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
    for class in classes.iter().filter(|class| class.provisioner == DRIVER) {
        let value = |name: &str| {
            let value = class.parameters.as_ref()?.get(name)?;
            // What depends on the claim is known with a request only.
            (!value.contains("${")).then(|| value.clone())
        };
        if let (Some(namespace), Some(secret)) = (value(SECRET_NAMESPACE), value(SECRET_NAME)) {
            let name = value("cluster").unwrap_or_else(|| class.name_any());
            all.entry((namespace, secret)).or_default().insert(name);
        }
    }
    all
}

fn of_secret(secret: &Secret) -> Result<ClusterAccess, Refusal> {
    let data = secret.data.iter().flatten();
    let texts = data.map(|(key, value)| {
        let value = String::from_utf8_lossy(&value.0).into_owned();
        (key.clone(), value)
    });
    let access = ClusterAccess::of_secrets(&texts.collect())?;
    access.ok_or_else(|| Refusal::Invalid("the secret names no managers".into()))
}

fn usable(name: String, access: Result<ClusterAccess, Refusal>) -> Option<Known> {
    match access {
        Ok(access) => Some((name, access)),
        Err(error) => {
            tracing::warn!(cluster = name, %error, "a cluster's secret cannot be used");
            None
        }
    }
}

const SECRET_NAME: &str = "csi.storage.k8s.io/provisioner-secret-name";
const SECRET_NAMESPACE: &str = "csi.storage.k8s.io/provisioner-secret-namespace";
/// Longest wait for Kubernetes: shorter than the budget of a request.
const PATIENCE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use kube::client::Body;

    use super::*;

    fn class(name: &str, parameters: &str) -> String {
        let provisioner = if name == "foreign" { "other" } else { DRIVER };
        format!(
            r#"{{"metadata":{{"name":"{name}"}},"provisioner":"{provisioner}","parameters":{{{parameters}}}}}"#
        )
    }

    fn of(cluster: &str, namespace: &str, secret: &str) -> String {
        format!(
            r#""cluster":"{cluster}","{SECRET_NAME}":"{secret}","{SECRET_NAMESPACE}":"{namespace}""#
        )
    }

    /// An API server with these classes, and the secret `demo-csi` in namespaces `a` and `b`.
    fn server(classes: &[String]) -> Client {
        let list = format!(
            r#"{{"apiVersion":"storage.k8s.io/v1","kind":"StorageClassList","metadata":{{}},"items":[{}]}}"#,
            classes.join(",")
        );
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let list = list.clone();
            async move {
                let path = request.uri().path();
                // managers: a:7650 and b:7650.
                let secret = |managers: &str| {
                    let data = format!(r#""managers":"{managers}""#);
                    format!(
                        r#"{{"apiVersion":"v1","kind":"Secret","metadata":{{}},"data":{{{data}}}}}"#
                    )
                };
                let (code, text) = match path {
                    "/apis/storage.k8s.io/v1/storageclasses" => (200, list),
                    "/api/v1/namespaces/a/secrets/demo-csi" => (200, secret("YTo3NjUw")),
                    "/api/v1/namespaces/b/secrets/demo-csi" => (200, secret("Yjo3NjUw")),
                    "/api/v1/namespaces/b/secrets/broken" => (200, secret("bm90aGluZw==")),
                    "/api/v1/namespaces/b/secrets/foreign" => panic!("not of this driver"),
                    _ => (
                        403,
                        r#"{"kind":"Status","status":"Failure","message":"no","reason":"Forbidden","code":403}"#
                            .to_owned(),
                    ),
                };
                let answer = http::Response::builder().status(code);
                Ok::<_, Infallible>(answer.body(Body::from(text.into_bytes())).unwrap())
            }
        });
        Client::new(service, "default")
    }

    #[tokio::test]
    async fn storage_classes_say_which_clusters_there_are() {
        let client = server(&[
            class("one", &of("a.demo", "a", "demo-csi")),
            class("same", &of("a.demo", "a", "demo-csi")),
            class("two", &of("b.demo", "b", "demo-csi")),
            class("foreign", &of("b.other", "b", "foreign")),
            class("unreadable", &of("c.demo", "c", "demo-csi")),
            class("broken", &of("b.broken", "b", "broken")),
            class("by-claim", &of("d", "${pvc.namespace}", "demo-csi")),
            class("none", r#""cluster":"e""#),
        ]);
        let known = Source::StorageClasses(client).clusters().await;
        let known = known.unwrap().unwrap();
        let shown: Vec<(&str, &str)> = known
            .iter()
            .map(|(name, access)| (name.as_str(), access.managers[0].as_str()))
            .collect();
        assert_eq!(shown, [("a.demo", "a:7650"), ("b.demo", "b:7650")]);
    }

    #[tokio::test]
    async fn a_kubernetes_that_fails_is_not_one_without_clusters() {
        let service = tower::service_fn(|_: http::Request<Body>| async {
            let answer = http::Response::builder().status(500);
            Ok::<_, Infallible>(answer.body(Body::from(Vec::new())).unwrap())
        });
        let client = Client::new(service, "default");
        let error = Source::StorageClasses(client).clusters().await.unwrap_err();
        assert!(matches!(error, Refusal::Unreachable(_)), "{error}");
    }
}
