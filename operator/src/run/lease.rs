//! The lease: one operator acts at a time.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease as Object, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};

use super::calls::PATIENCE;
use crate::error::Error;

/// The operators' lease.
#[derive(Clone)]
pub(super) struct Lease {
    api: Api<Object>,
    identity: String,
    /// Until when it is surely ours, by this process's clock.
    until: Arc<Mutex<Option<Instant>>>,
}

impl Lease {
    pub(super) fn new(client: Client, namespace: &str, identity: &str) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            identity: identity.to_owned(),
            until: Arc::default(),
        }
    }

    /// Waits until it is ours.
    pub(super) async fn take(&self) -> anyhow::Result<()> {
        // What another wrote, and when this process first saw it: clocks of machines differ.
        let mut watched: Option<(Option<MicroTime>, Instant)> = None;
        loop {
            let attempt = timeout(PATIENCE, self.attempt(&mut watched)).await;
            match attempt.unwrap_or_else(|_| Err(silence())) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => tracing::warn!(%error, "the lease cannot be had: trying again"),
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Renews it; returns when it is lost.
    pub(super) async fn keep(&self) {
        loop {
            let left = self.left().unwrap_or_default();
            tokio::time::sleep(RETRY.min(left)).await;
            // An attempt that hangs must not outlast what it is to renew.
            let Some(left) = self.left() else {
                return;
            };
            let attempt = timeout(left.min(RENEW_IN), self.attempt(&mut None)).await;
            match attempt.unwrap_or_else(|_| Err(silence())) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => tracing::warn!(%error, "the lease was not renewed: trying again"),
            }
        }
    }

    /// How long it is surely ours, if it is at all; to be asked before anything is changed.
    pub(super) fn left(&self) -> Option<Duration> {
        let until = (*self.until.lock())?;
        let left = until.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// Takes or renews it; false while another has it.
    async fn attempt(
        &self,
        watched: &mut Option<(Option<MicroTime>, Instant)>,
    ) -> Result<bool, Error> {
        let asked = Instant::now();
        let what = || Error::kubernetes("take the lease");
        let old = self.api.get_opt(NAME).await.map_err(what())?;
        let spec = old
            .as_ref()
            .and_then(|lease| lease.spec.clone())
            .unwrap_or_default();
        let holder = spec.holder_identity.clone().unwrap_or_default();
        if holder != self.identity && !holder.is_empty() {
            let seen = match watched {
                Some((time, seen)) if *time == spec.renew_time => *seen,
                _ => asked,
            };
            *watched = Some((spec.renew_time.clone(), seen));
            if self.until.lock().is_some() || asked.duration_since(seen) < DURATION {
                return Ok(false);
            }
        }
        let now = MicroTime(Timestamp::now());
        let changes_hands = holder != self.identity;
        let lease = Object {
            metadata: ObjectMeta {
                name: Some(NAME.into()),
                resource_version: old
                    .as_ref()
                    .and_then(|o| o.metadata.resource_version.clone()),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.identity.clone()),
                lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
                acquire_time: if changes_hands {
                    Some(now.clone())
                } else {
                    spec.acquire_time
                },
                renew_time: Some(now),
                lease_transitions: Some(
                    spec.lease_transitions.unwrap_or(0) + i32::from(changes_hands),
                ),
                ..LeaseSpec::default()
            }),
        };
        let params = PostParams::default();
        let written = match old {
            Some(_) => self.api.replace(NAME, &params, &lease).await,
            None => self.api.create(&params, &lease).await,
        };
        match written {
            Ok(_) => {
                *self.until.lock() = Some(asked + DURATION - MARGIN);
                Ok(true)
            }
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(self.left().is_some()),
            Err(error) => Err(what()(error)),
        }
    }
}

fn silence() -> Error {
    Error::Silent {
        what: "take the lease".into(),
    }
}

/// Name of the lease.
const NAME: &str = "hither-operator";
/// How long it holds without renewal.
const DURATION: Duration = Duration::from_secs(15);
/// Its holder stops this much earlier.
const MARGIN: Duration = Duration::from_secs(3);
/// Time one renewal gets, so that a second one fits in.
const RENEW_IN: Duration = Duration::from_secs(5);
/// Time between attempts.
const RETRY: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use http::{Request, Response, StatusCode};
    use kube::client::Body;

    use super::*;

    /// An API server without a lease that takes one, until it is to answer no more.
    fn server(hangs: &Arc<AtomicBool>) -> Client {
        let hangs = Arc::clone(hangs);
        let service = tower::service_fn(move |request: Request<Body>| {
            let hangs = hangs.load(Ordering::SeqCst);
            async move {
                if hangs {
                    std::future::pending::<()>().await;
                }
                let (status, body) = if request.method() == http::Method::GET {
                    let absent = serde_json::json!({
                        "kind": "Status", "status": "Failure", "reason": "NotFound",
                        "message": "", "code": 404,
                    });
                    (StatusCode::NOT_FOUND, absent)
                } else {
                    (StatusCode::OK, serde_json::json!({"metadata": {}}))
                };
                let mut response = Response::new(Body::from(body.to_string().into_bytes()));
                *response.status_mut() = status;
                Ok::<_, std::convert::Infallible>(response)
            }
        });
        Client::new(service, "default")
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_hangs_ends_the_lease_in_time() {
        let hangs = Arc::new(AtomicBool::new(false));
        let lease = Lease::new(server(&hangs), "default", "first");
        lease.take().await.unwrap();
        hangs.store(true, Ordering::SeqCst);
        let begun = Instant::now();
        lease.keep().await;
        assert!(
            begun.elapsed() <= DURATION - MARGIN,
            "{:?}",
            begun.elapsed()
        );
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_changed_without_the_lease_nor_beyond_its_end() {
        let hangs = Arc::new(AtomicBool::new(false));
        let lease = Lease::new(server(&hangs), "default", "first");
        let change = || lease.change("x", async { Ok(()) });
        let command = || lease.command(async { Ok(()) });
        assert!(matches!(change().await, Err(Error::NotLeader)));
        assert!(matches!(command().await, Err(Error::NotLeader)));
        lease.take().await.unwrap();
        change().await.unwrap();
        command().await.unwrap();
        let begun = Instant::now();
        let hanging = lease.change("x", std::future::pending::<kube::Result<()>>());
        assert!(matches!(hanging.await, Err(Error::Silent { .. })));
        assert!(begun.elapsed() <= PATIENCE);
        let hanging = lease.command(std::future::pending::<Result<(), Error>>());
        assert!(matches!(hanging.await, Err(Error::NotLeader)));
        assert!(begun.elapsed() <= DURATION - MARGIN);
        assert!(matches!(change().await, Err(Error::NotLeader)));
    }
}
