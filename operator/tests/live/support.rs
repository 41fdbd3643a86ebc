//! A namespace with an operator, and waiting for what is to come.

use std::fmt::Debug;
use std::time::Duration;

use hither_operator::api::{ChunkStorageClass, ChunkserverPool, HitherCluster};
use hither_operator::run::{Options, run};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{DeleteParams, ObjectMeta, Patch, PatchParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::runtime::wait::conditions::is_deleted;
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::task::JoinHandle;

/// A namespace of a test.
pub(crate) struct Place {
    pub(crate) client: Client,
    pub(crate) name: String,
    operator: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Place {
    /// Makes the namespace, and sees to it that the custom resources are those of this build.
    pub(crate) async fn new(name: &str) -> Self {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let client = Client::try_default()
            .await
            .expect("a Kubernetes: set KUBECONFIG");
        let name = format!("hither-{name}-{:06x}", rand::random::<u32>() & 0xff_ffff);
        let namespace = Namespace {
            metadata: ObjectMeta {
                name: Some(name.clone()),
                ..ObjectMeta::default()
            },
            ..Namespace::default()
        };
        let all: Api<Namespace> = Api::all(client.clone());
        all.create(&PostParams::default(), &namespace)
            .await
            .unwrap();
        install(&client).await;
        Self {
            client,
            name,
            operator: None,
        }
    }

    /// Starts the operator; it ends with the place.
    pub(crate) fn operate(&mut self) {
        self.operator = Some(self.another("first"));
    }

    /// An operator of this name.
    pub(crate) fn another(&self, identity: &str) -> JoinHandle<anyhow::Result<()>> {
        let options = Options {
            namespaces: vec![self.name.clone()],
            own_namespace: self.name.clone(),
            identity: identity.into(),
            image: image(),
            provisioner: None,
            mounters: None,
            probes: "127.0.0.1:0".parse().unwrap(),
        };
        tokio::spawn(run(self.client.clone(), options))
    }

    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), &self.name)
    }

    /// Makes what the sample files say.
    pub(crate) async fn apply_samples(&self) {
        let create = PostParams::default();
        self.api::<HitherCluster>()
            .create(&create, &sample("cluster.yaml"))
            .await
            .unwrap();
        self.api::<ChunkserverPool>()
            .create(&create, &sample("pools.yaml"))
            .await
            .unwrap();
        self.api::<ChunkStorageClass>()
            .create(&create, &sample("classes.yaml"))
            .await
            .unwrap();
    }

    /// Changes a part of an object.
    pub(crate) async fn change<K>(&self, name: &str, patch: Value)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        let api: Api<K> = self.api();
        let merge = Patch::Merge(patch);
        api.patch(name, &PatchParams::default(), &merge)
            .await
            .unwrap();
    }

    /// Waits until an object is as it should be.
    pub(crate) async fn until<K>(
        &self,
        name: &str,
        what: &str,
        is: impl Fn(&K) -> bool + Send + 'static,
    ) -> K
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + DeserializeOwned
            + Send
            + Sync
            + 'static,
    {
        let api: Api<K> = self.api();
        let condition = move |object: Option<&K>| object.is_some_and(&is);
        let awaited = await_condition(api.clone(), name, condition);
        let Ok(found) = tokio::time::timeout(PATIENCE, awaited).await else {
            panic!("{what}: {name} is {:#?}", api.get_opt(name).await);
        };
        found.unwrap().unwrap()
    }

    /// Deletes an object and waits until it is gone.
    pub(crate) async fn delete<K>(&self, name: &str)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + DeserializeOwned
            + Send
            + 'static,
    {
        let api: Api<K> = self.api();
        let uid = api.get(name).await.unwrap().uid().unwrap();
        api.delete(name, &DeleteParams::default()).await.unwrap();
        let gone = await_condition(api.clone(), name, is_deleted(&uid));
        if tokio::time::timeout(PATIENCE, gone).await.is_err() {
            panic!("{name} stays: {:#?}", api.get_opt(name).await);
        }
    }

    /// Waits until an object that was deleted is gone.
    pub(crate) async fn gone<K>(&self, name: &str)
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + DeserializeOwned
            + Send
            + 'static,
    {
        let api: Api<K> = self.api();
        let gone = await_condition(api.clone(), name, |object: Option<&K>| object.is_none());
        if tokio::time::timeout(PATIENCE, gone).await.is_err() {
            panic!("{name} stays: {:#?}", api.get_opt(name).await);
        }
    }

    /// Ends everything.
    pub(crate) async fn end(self) {
        if let Some(operator) = self.operator {
            operator.abort();
        }
        let all: Api<Namespace> = Api::all(self.client);
        all.delete(&self.name, &DeleteParams::default())
            .await
            .unwrap();
    }
}

/// Image of the servers; it has etcd too.
pub(crate) fn image() -> String {
    std::env::var("HITHER_IMAGE").unwrap_or_else(|_| IMAGE.into())
}

/// A condition by type.
pub(crate) fn condition<'a>(all: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    all.iter().find(|one| one.type_ == type_)
}

/// Whether a condition says `True`.
pub(crate) fn holds(all: &[Condition], type_: &str) -> bool {
    condition(all, type_).is_some_and(|one| one.status == "True")
}

/// A resource of a sample file.
pub(crate) fn sample<K: DeserializeOwned>(file: &str) -> K {
    let path = format!("{}/../config/samples/{file}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    serde_saphyr::from_str(&text).unwrap()
}

async fn install(client: &Client) {
    use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    let params = PatchParams::apply("hither-tests").force();
    for definition in hither_operator::api::definitions() {
        let name = definition.name_any();
        api.patch(&name, &params, &Patch::Apply(&definition))
            .await
            .unwrap();
        let established = kube::runtime::wait::conditions::is_crd_established();
        await_condition(api.clone(), &name, established)
            .await
            .unwrap();
    }
}

/// Time for anything to come about.
const PATIENCE: Duration = Duration::from_secs(180);
/// Image of the servers on the test cluster.
const IMAGE: &str = "hither.test/hither:dev";
