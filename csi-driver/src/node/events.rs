//! Events on pods.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};

use crate::DRIVER;
use crate::node::record::Pod;

/// Writes events on pods; without Kubernetes, none.
#[derive(Clone)]
pub struct Events {
    recorder: Option<Recorder>,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Events(on: {})", self.recorder.is_some())
    }
}

impl Events {
    /// Events of this node's plugin.
    #[must_use]
    pub fn new(client: Option<Client>, node: &str) -> Self {
        let reporter = Reporter {
            controller: DRIVER.into(),
            instance: Some(node.to_owned()),
        };
        Self {
            recorder: client.map(|client| Recorder::new(client, reporter)),
        }
    }

    /// Warns the owner of a pod. What cannot be written is only logged.
    pub async fn warn(&self, pod: Option<&Pod>, reason: &str, note: &str) {
        let (Some(recorder), Some(pod)) = (&self.recorder, pod) else {
            return;
        };
        let event = Event {
            type_: EventType::Warning,
            reason: reason.to_owned(),
            note: Some(note.to_owned()),
            action: "Mount".into(),
            secondary: None,
        };
        let on = ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            namespace: Some(pod.namespace.clone()),
            name: Some(pod.name.clone()),
            uid: Some(pod.uid.clone()),
            ..ObjectReference::default()
        };
        if let Err(error) = recorder.publish(&event, &on).await {
            tracing::warn!(%error, reason, pod = pod.name, "an event cannot be written");
        }
    }
}
