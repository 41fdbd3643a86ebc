//! The task of one cluster: a pass whenever something changed, and now and then anyway.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::etcd::Links;
use super::pass::{After, pass};
use super::{Context, Key};
use crate::error::Error;
use crate::manager::Manager;

/// What a cluster's task remembers between passes; losing it costs work, no more.
#[derive(Default)]
pub(super) struct Memory {
    /// The link to the managers.
    pub(super) manager: Option<Manager>,
    /// What was applied, and when: the same is not sent again for a while.
    pub(super) applied: BTreeMap<String, (String, Instant)>,
    /// The members of a managed etcd.
    pub(super) etcd: Links,
    /// Generation of the cluster that has no dumps, and is known to have none any more.
    pub(super) without_dumps: Option<i64>,
    /// When a pod was last ended.
    pub(super) replaced: Option<Instant>,
}

/// Keeps one cluster as it should be, for good.
pub(super) async fn keep(context: Arc<Context>, key: Key, wake: Arc<Notify>) {
    ready(&context, &key.0).await;
    let mut memory = Memory::default();
    let mut pause = PAUSE_MIN;
    loop {
        let begun = Instant::now();
        let running = context.health.pass(&key);
        let ended = timeout(PASS_MAX, Box::pin(pass(&context, &key, &mut memory))).await;
        drop(running);
        let again = match ended.unwrap_or_else(|_| Err(too_long())) {
            Ok(After::Again) => {
                pause = PAUSE_MIN;
                Some(LOOK)
            }
            Ok(After::Soon) => {
                pause = PAUSE_MIN;
                Some(LOOK_SOON)
            }
            Ok(After::Nothing) => {
                memory = Memory::default();
                None
            }
            Err(error) => {
                tracing::warn!(namespace = key.0, cluster = key.1, %error, "a pass ended early");
                pause = (pause * 2).min(PAUSE_MAX);
                Some(pause)
            }
        };
        let timer = async {
            match again {
                Some(again) => sleep(again).await,
                None => std::future::pending().await,
            }
        };
        let map = async {
            match &memory.manager {
                Some(manager) => manager.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = wake.notified() => {}
            () = timer => {}
            () = map => {}
        }
        // Many changes make one pass.
        sleep_until(begun + BETWEEN).await;
    }
}

/// Before everything has been listed, what is missing may only not have been seen.
async fn ready(context: &Context, namespace: &str) {
    context.clusters.ready(namespace).await;
    context.pools.ready(namespace).await;
    context.classes.ready(namespace).await;
    context.sets.ready(namespace).await;
    context.pods.ready(namespace).await;
}

fn too_long() -> Error {
    Error::Silent {
        what: "bring the cluster to what is asked for".into(),
    }
}

/// A pass that takes longer is given up; the next one begins anew.
const PASS_MAX: Duration = Duration::from_secs(120);
/// A look without a reason.
const LOOK: Duration = Duration::from_secs(20);
/// A look while something goes on of which nobody tells.
const LOOK_SOON: Duration = Duration::from_secs(3);
/// Shortest time between the beginnings of passes.
const BETWEEN: Duration = Duration::from_millis(1000);
/// First and longest pause after a failure.
const PAUSE_MIN: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(60);
