//! Events on pods.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;

use crate::DRIVER;
use crate::node::record::Pod;

/// Writes events on pods; without Kubernetes, none. Nobody waits for them.
#[derive(Clone)]
pub struct Events {
    queue: Option<mpsc::Sender<(Event, ObjectReference)>>,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Events(on: {})", self.queue.is_some())
    }
}

impl Events {
    /// Events of this node's plugin, written by a task of their own.
    #[must_use]
    pub fn new(client: Option<Client>, node: &str) -> Self {
        let reporter = Reporter {
            controller: DRIVER.into(),
            instance: Some(node.to_owned()),
        };
        let queue = client.map(|client| {
            let (queue, waiting) = mpsc::channel(QUEUE_MAX);
            tokio::spawn(write(Recorder::new(client, reporter), waiting));
            queue
        });
        Self { queue }
    }

    /// Warns the owner of a pod. What cannot be written is only logged.
    pub fn warn(&self, pod: Option<&Pod>, reason: &str, note: &str) {
        let (Some(queue), Some(pod)) = (&self.queue, pod) else {
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
        if queue.try_send((event, on)).is_err() {
            tracing::warn!(
                reason,
                pod = pod.name,
                "too many events wait: one is dropped"
            );
        }
    }
}

async fn write(recorder: Recorder, mut waiting: mpsc::Receiver<(Event, ObjectReference)>) {
    while let Some((event, on)) = waiting.recv().await {
        let pod = on.name.unwrap_or_default();
        let on = ObjectReference {
            name: Some(pod.clone()),
            ..on
        };
        let reason = event.reason.clone();
        match tokio::time::timeout(WRITE_PATIENCE, recorder.publish(&event, &on)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, reason, pod, "an event cannot be written"),
            Err(_) => tracing::warn!(reason, pod, "an event is not taken by the API server"),
        }
    }
}

/// Events that may wait.
const QUEUE_MAX: usize = 256;
/// Longest wait for one to be written.
const WRITE_PATIENCE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use kube::client::Body;

    use super::*;

    #[tokio::test]
    async fn nobody_waits_for_an_api_server_that_does_not_answer() {
        let service = tower::service_fn(|_: http::Request<Body>| async {
            std::future::pending::<()>().await;
            Ok::<_, Infallible>(http::Response::new(Body::empty()))
        });
        let events = Events::new(Some(Client::new(service, "default")), "n1");
        let pod = Pod {
            namespace: "n".into(),
            name: "p".into(),
            uid: "u".into(),
        };
        for _ in 0..3 * QUEUE_MAX {
            events.warn(Some(&pod), "Reason", "note");
        }
        tokio::task::yield_now().await;
        let waiting = events.queue.as_ref().map(mpsc::Sender::capacity);
        assert!(waiting <= Some(1), "as many as fit wait: {waiting:?}");
    }
}
