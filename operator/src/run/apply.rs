//! Writing to the API server: objects, statuses, finalizers, events.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::runtime::events::{Event, EventType};
use kube::{Api, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::time::Instant;

use super::Context;
use super::calls::ask;
use super::cluster::Memory;
use crate::conditions::changed;
use crate::desired::{CLUSTER_LABEL, MANAGED_BY, Object, POOL_LABEL};
use crate::error::Error;

/// A resource whose type is known; in a namespace where nothing else is said.
pub(super) trait Ours<Scope = NamespaceResourceScope>:
    Resource<DynamicType = (), Scope = Scope> + Clone + Debug + DeserializeOwned + Serialize
{
}

impl<K, Scope> Ours<Scope> for K where
    K: Resource<DynamicType = (), Scope = Scope> + Clone + Debug + DeserializeOwned + Serialize
{
}

impl Context {
    /// Applies an object; what was applied just as it is a moment ago is left alone.
    pub(super) async fn apply(&self, object: &Object, memory: &mut Memory) -> Result<(), Error> {
        let title = object.title();
        let text = serde_json::to_string(&object.object).unwrap_or_default();
        // Two pools may come to one name.
        let pool = label(object.object.metadata.labels.as_ref(), POOL_LABEL);
        let key = format!("{title} {}", pool.unwrap_or_default());
        if let Some((same, when)) = memory.applied.get(&key)
            && *same == text
            && when.elapsed() < APPLY_AGAIN
        {
            return Ok(());
        }
        let namespace = object.object.metadata.namespace.clone().unwrap_or_default();
        let api: Api<kube::api::DynamicObject> =
            Api::namespaced_with(self.client.clone(), &namespace, &object.resource);
        let name = object.object.metadata.name.clone().unwrap_or_default();
        if !memory.applied.contains_key(&key) {
            // Names of two clusters may be one: what another made stays another's.
            let there = ask(format!("look for {title}"), api.get_metadata_opt(&name)).await?;
            if there.is_some_and(|there| !is_ours(there.labels(), object)) {
                return Err(Error::NameConflict { title });
            }
        }
        let patch = Patch::Apply(&object.object);
        self.change(
            format!("apply {title}"),
            api.patch(&name, &params(), &patch),
        )
        .await?;
        memory.applied.insert(key, (text, Instant::now()));
        Ok(())
    }

    /// Writes a status, if it says something else than the stored one, and tells of conditions that
    /// changed.
    pub(super) async fn write_status<K: Ours, S: Serialize + PartialEq>(
        &self,
        object: &K,
        old: Option<&S>,
        new: &S,
        conditions: (&[Condition], &[Condition]),
    ) -> Result<(), Error> {
        if old == Some(new) {
            return Ok(());
        }
        let api: Api<K> = self.api_of(object);
        let patch = json!({
            "apiVersion": K::api_version(&()),
            "kind": K::kind(&()),
            "metadata": {"name": object.name_any()},
            "status": new,
        });
        let (name, params, patch) = (object.name_any(), params(), Patch::Apply(patch));
        let what = format!("write the status of {name}");
        self.change(what, api.patch_status(&name, &params, &patch))
            .await?;
        for condition in changed(conditions.0, conditions.1) {
            self.tell(object, condition).await;
        }
        Ok(())
    }

    /// An event about a condition that changed.
    async fn tell<K: Ours>(&self, object: &K, condition: &Condition) {
        let good = matches!(
            condition.type_.as_str(),
            "Ready" | "Accepted" | "ZoneLossTolerated" | "Satisfiable"
        );
        let is_warning = match condition.status.as_str() {
            "True" => matches!(
                condition.type_.as_str(),
                "DataAtRisk"
                    | "Degraded"
                    | "DeletionBlocked"
                    | "MetadataQuorumLost"
                    | "MetadataSpaceLow"
            ),
            _ => good,
        };
        if condition.status == "Unknown"
            || (condition.status == "False" && !good && condition.message.is_empty())
        {
            return;
        }
        let type_ = if is_warning {
            EventType::Warning
        } else {
            EventType::Normal
        };
        self.event(
            object,
            type_,
            &condition.reason,
            &condition.type_,
            &condition.message,
        )
        .await;
    }

    /// An event; one that cannot be written is logged.
    pub(super) async fn event<K: Ours>(
        &self,
        object: &K,
        type_: EventType,
        reason: &str,
        action: &str,
        note: &str,
    ) {
        let event = Event {
            type_,
            reason: reason.into(),
            note: Some(note.chars().take(NOTE_MAX).collect()),
            action: action.into(),
            secondary: None,
        };
        let reference: ObjectReference = object.object_ref(&());
        let written = self.recorder.publish(&event, &reference);
        if let Err(error) = self.change("write an event", written).await {
            tracing::warn!(%error, reason, "an event was not written");
        }
    }

    /// Puts a finalizer on, or takes it off.
    pub(super) async fn finalizer<K: Ours>(
        &self,
        object: &K,
        finalizer: &str,
        on: bool,
    ) -> Result<(), Error> {
        let mut all = object.finalizers().to_vec();
        if all.iter().any(|one| one == finalizer) == on {
            return Ok(());
        }
        if on {
            all.push(finalizer.to_owned());
        } else {
            all.retain(|one| one != finalizer);
        }
        // The version makes it void when somebody else changed the list meanwhile.
        let patch = json!({"metadata": {
            "resourceVersion": object.resource_version(),
            "finalizers": all,
        }});
        let api: Api<K> = self.api_of(object);
        let (name, params, patch) = (
            object.name_any(),
            PatchParams::default(),
            Patch::Merge(patch),
        );
        let what = format!("change finalizers of {name}");
        let patched = self.change(what, api.patch(&name, &params, &patch)).await;
        // Gone already, or seen too late: the next pass sees it as it is.
        patched.map(|_| ()).or_else(Error::unless_gone)
    }

    /// Deletes exactly this object.
    pub(super) async fn delete<K: Ours>(&self, object: &K) -> Result<(), Error> {
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: object.uid(),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        let api: Api<K> = self.api_of(object);
        let name = object.name_any();
        let deleted = self
            .change(format!("delete {name}"), api.delete(&name, &params))
            .await;
        deleted.map(|_| ()).or_else(Error::unless_gone)
    }

    fn api_of<K: Ours>(&self, object: &K) -> Api<K> {
        let namespace = object.namespace().unwrap_or_default();
        Api::namespaced(self.client.clone(), &namespace)
    }
}

/// Whether what is there was made for the same cluster and pool.
fn is_ours(there: &BTreeMap<String, String>, wanted: &Object) -> bool {
    let wanted = wanted.object.metadata.labels.as_ref();
    let same = |key| label(Some(there), key) == label(wanted, key);
    there.contains_key(CLUSTER_LABEL) && same(CLUSTER_LABEL) && same(POOL_LABEL)
}

fn label<'a>(labels: Option<&'a BTreeMap<String, String>>, key: &str) -> Option<&'a str> {
    labels?.get(key).map(String::as_str)
}

/// How everything is applied: what the operator says, it owns.
pub(super) fn params() -> PatchParams {
    PatchParams::apply(MANAGED_BY).force()
}

/// The same is applied again after this long, in case somebody else changed it.
const APPLY_AGAIN: Duration = Duration::from_secs(60);
/// Characters of an event's text; the API server takes 1024 bytes.
const NOTE_MAX: usize = 900;
