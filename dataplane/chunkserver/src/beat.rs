//! Signs of life: who this server is, and what it has reached.

use std::sync::Arc;
use std::time::Duration;

use hither_managerlink::ManagerLink;
use hither_net::NetError;
use hither_proto::ids::{BootId, ChunkserverId};
use hither_proto::kind::Kind;
use hither_proto::manager::{Heartbeat, HeartbeatReply, MemberReport};
use hither_proto::map::{Chunkserver, Disk as ShownDisk, ServerState};

use crate::config::ChunkServerConfig;
use crate::error::StartError;
use crate::server::Inner;

/// What a heartbeat says of the server itself.
pub(crate) struct Description<'a> {
    pub(crate) config: &'a ChunkServerConfig,
    pub(crate) labels: Vec<String>,
    pub(crate) address: &'a str,
    pub(crate) boot: BootId,
    pub(crate) server: ChunkserverId,
    pub(crate) disks: Vec<ShownDisk>,
}

impl Description<'_> {
    fn shown(self) -> Chunkserver {
        Chunkserver {
            id: self.server.0,
            addresses: vec![self.address.to_owned()],
            zone: self.config.zone.clone(),
            region: self.config.region.clone(),
            node: self.config.node.clone(),
            name: self.config.name.clone(),
            labels: self.labels,
            state: ServerState::Up.into(),
            disks: self.disks,
            boot_id: self.boot.0,
            // The manager knows; a server does not.
            draining: false,
        }
    }
}

/// Sends one heartbeat.
pub(crate) async fn beat(
    link: &ManagerLink,
    description: Description<'_>,
    reports: Vec<MemberReport>,
    load: u32,
    timeout: Duration,
) -> Result<HeartbeatReply, NetError> {
    let heartbeat = Heartbeat {
        server: description.server.0,
        description: Some(description.shown()),
        reports,
        load,
        map_version: link.map().version().0,
    };
    link.call(Kind::HEARTBEAT, &heartbeat, timeout)
        .await?
        .decode()
}

/// Beats until the server stops, or until another process has its id.
pub(crate) async fn run(inner: Arc<Inner>) {
    let pause = Duration::from_millis(inner.config.beat_ms.max(1));
    loop {
        // Either is a reason to beat.
        let _ = tokio::time::timeout(pause, inner.beat_now.notified()).await;
        if inner.is_stopping() {
            return;
        }
        let disks = inner.probes.describe(&inner.store).await;
        // After what may take its time: what is reported should still be so.
        let reports = inner
            .fills
            .caught_up(&inner)
            .into_iter()
            .map(|mandate| MemberReport {
                group: mandate.group.0,
                epoch: mandate.epoch.0,
                disk: u32::from(mandate.disk.0),
                caught_up: true,
            });
        let description = Description {
            config: &inner.config,
            labels: inner.labels.read().clone(),
            address: &inner.address,
            boot: inner.boot,
            server: inner.me,
            disks,
        };
        let load = u32::try_from(inner.admission.requests()).unwrap_or(u32::MAX);
        let sent = beat(
            &inner.link,
            description,
            reports.collect(),
            load,
            BEAT_TIMEOUT,
        );
        match sent.await {
            Ok(reply) if reply.duplicate => {
                tracing::error!(server = %inner.me, "another process has this server's id, stopping");
                inner.stop_with(StartError::Duplicate(inner.me));
                return;
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(%error, "no manager took the heartbeat"),
        }
    }
}

/// Time the managers get for one heartbeat.
const BEAT_TIMEOUT: Duration = Duration::from_secs(2);
