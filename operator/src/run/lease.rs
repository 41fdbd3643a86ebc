//! The lease: one operator acts at a time.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease as Object, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client};
use parking_lot::Mutex;
use tokio::time::Instant;

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
            match self.attempt(&mut watched).await {
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
            tokio::time::sleep(RETRY).await;
            match self.attempt(&mut None).await {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => tracing::warn!(%error, "the lease was not renewed: trying again"),
            }
            if !self.is_held() {
                return;
            }
        }
    }

    /// Whether it is surely ours; to be asked before something is ended.
    pub(super) fn is_held(&self) -> bool {
        self.until
            .lock()
            .is_some_and(|until| Instant::now() < until)
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
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(self.is_held()),
            Err(error) => Err(what()(error)),
        }
    }
}

/// Name of the lease.
const NAME: &str = "hither-operator";
/// How long it holds without renewal.
const DURATION: Duration = Duration::from_secs(15);
/// Its holder stops this much earlier.
const MARGIN: Duration = Duration::from_secs(3);
/// Time between attempts.
const RETRY: Duration = Duration::from_secs(2);
