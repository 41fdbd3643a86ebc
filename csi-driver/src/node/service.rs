//! The node service's requests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tonic::{Request, Response, Status};

use crate::clusters::Clusters;
use crate::decide::access::Access;
use crate::decide::publish::Staging;
use crate::error::Refusal;
use crate::guard::{Guards, within};
use crate::ids::Handle;
use crate::level::SpecLevel;
use crate::node::record::{FORMAT, Pod, Record, Target};
use crate::node::stats;
use crate::node::volume::Node;
use crate::rpc::csi;
use crate::rpc::csi::node_server::Node as Service;
use crate::rpc::csi::node_service_capability::{Rpc, Type as Kind, rpc::Type};
use crate::secret::ClusterAccess;
use crate::volumes::{Located, Volumes, path_of};

/// The node service.
#[derive(Debug, Clone)]
pub struct NodeService {
    /// The volumes of this node.
    pub node: Node,
    /// Clusters, to ask for what can change.
    pub clusters: Arc<Clusters>,
    /// One request for a volume at a time.
    pub guards: Guards,
    /// What is offered.
    pub level: SpecLevel,
    /// Report zone and region to the kubelet.
    pub topology: bool,
}

type Map = BTreeMap<String, String>;

impl NodeService {
    async fn do_stage(self, request: csi::NodeStageVolumeRequest) -> Result<(), Refusal> {
        let handle = handle(&request.volume_id)?;
        let staging = path(&request.staging_target_path, "staging_target_path")?;
        let access = Access::of(request.volume_capability.as_ref())?;
        let handle = handle.ok_or_else(|| unknown(&request.volume_id))?;
        let _held = self.guards.take(&request.volume_id).await?;
        let options: Vec<String> = access
            .fuse_options()
            .iter()
            .map(ToString::to_string)
            .collect();
        let known = self.node.records.load(&handle)?;
        let standing = self.node.standing(&handle, &staging).await?;
        if let Staging::Foreign(what) = &standing {
            return Err(Refusal::NotNow(format!(
                "{} is taken by {what}",
                staging.display()
            )));
        }
        if let (Some(known), Staging::Alive(_)) = (&known, &standing)
            && known.staged
        {
            let same = known.staging == staging
                && known.mode == i32::from(access.mode)
                && known.options == options;
            return if same {
                Ok(())
            } else {
                Err(Refusal::Exists(format!(
                    "{handle} is staged already with another mode, options or path"
                )))
            };
        }
        let given = ClusterAccess::of_secrets(&request.secrets)?;
        let found = self
            .clusters
            .of_request(given.as_ref(), Some(&handle.cluster));
        let cluster = found.await?;
        let managers = cluster.client.config().managers.clone();
        let volumes = Volumes::new(cluster.client);
        let (subdirectory, template) = match request.volume_context.get(SUBDIRECTORY) {
            // A volume of the administrator: a directory that this driver has not made.
            Some(directory) => (directory.clone(), String::new()),
            None => {
                let located = volumes.find(&handle.volume).await?;
                let located = located.ok_or_else(|| unknown(&request.volume_id))?;
                self.give_group(&volumes, &located, &access, None).await?;
                (path_of(&handle.volume), volumes.template(&located))
            }
        };
        let record = Record {
            format: FORMAT,
            boot: self.node.records.boot().to_owned(),
            handle: handle.to_string(),
            staging,
            staged: false,
            mode: access.mode.into(),
            options,
            managers,
            subdirectory,
            template,
            pods: known
                .as_ref()
                .map(|known| known.pods.clone())
                .unwrap_or_default(),
            targets: known.map(|known| known.targets).unwrap_or_default(),
            waited: 0,
        };
        let device = self.node.stage(&handle, record).await?;
        tracing::info!(volume = %handle, device, "staged");
        Ok(())
    }

    /// Gives the volume's root the pod's group, once and for all.
    async fn give_group(
        &self,
        volumes: &Volumes,
        located: &Located,
        access: &Access,
        pod: Option<&Pod>,
    ) -> Result<(), Refusal> {
        let Some(group) = access.group else {
            return Ok(());
        };
        let has = volumes.give_group(located, group).await?;
        if has != group {
            let note = format!(
                "the volume's root belongs to group {has}, given for an earlier pod: \
                 it stays, and group {group} of this pod gets no rights by it"
            );
            tracing::warn!(group, has, "another group has the volume");
            self.node.events.warn(pod, "VolumeGroupTaken", &note);
        }
        Ok(())
    }

    async fn do_unstage(self, request: csi::NodeUnstageVolumeRequest) -> Result<(), Refusal> {
        let handle = handle(&request.volume_id)?;
        let staging = path(&request.staging_target_path, "staging_target_path")?;
        let _held = self.guards.take(&request.volume_id).await?;
        match handle {
            Some(handle) => {
                self.node.unstage(&handle, &staging).await?;
                tracing::info!(volume = %handle, "unstaged");
            }
            None => crate::node::kernel::detach_all(&staging)?,
        }
        Ok(())
    }

    async fn do_publish(self, request: csi::NodePublishVolumeRequest) -> Result<(), Refusal> {
        let handle = handle(&request.volume_id)?;
        let target = path(&request.target_path, "target_path")?;
        let access = Access::of(request.volume_capability.as_ref())?;
        if request.staging_target_path.is_empty() {
            return Err(Refusal::NotNow("the volume has to be staged first".into()));
        }
        let staging = path(&request.staging_target_path, "staging_target_path")?;
        let handle = handle.ok_or_else(|| unknown(&request.volume_id))?;
        let _held = self.guards.take(&request.volume_id).await?;
        let record = self.node.records.load(&handle)?;
        let staged = record.filter(|record| record.staging == staging);
        let mut record = staged.ok_or_else(|| {
            Refusal::NotNow(format!("{handle} is not staged at {}", staging.display()))
        })?;
        let pod = pod_of(&request.volume_context);
        let read_only = request.readonly || access.is_read_only();
        let mut options: Vec<String> = access
            .bind_options()
            .iter()
            .map(ToString::to_string)
            .collect();
        if read_only && !options.iter().any(|option| option == "ro") {
            options.push("ro".into());
        }
        if access.group.is_some() && !request.volume_context.contains_key(SUBDIRECTORY) {
            let known = access_of(&record);
            let found = self
                .clusters
                .of_request(Some(&known), Some(&handle.cluster));
            let volumes = Volumes::new(found.await?.client);
            if let Some(located) = volumes.find(&handle.volume).await? {
                self.give_group(&volumes, &located, &access, pod.as_ref())
                    .await?;
            }
        }
        let zone_known = !self.node.labels.borrow().zone.is_empty();
        let wanted = Target {
            path: target,
            options,
            published: false,
            pod: pod.clone(),
        };
        self.node
            .publish(&handle, &mut record, wanted, access.is_shared())
            .await?;
        tracing::info!(volume = %handle, target = request.target_path, "published");
        if !zone_known {
            let note = "the node has no zone label: the mount works and prefers no zone's copies";
            self.node.events.warn(pod.as_ref(), "ZoneUnknown", note);
        }
        Ok(())
    }

    async fn do_unpublish(self, request: csi::NodeUnpublishVolumeRequest) -> Result<(), Refusal> {
        let handle = handle(&request.volume_id)?;
        let target = path(&request.target_path, "target_path")?;
        let _held = self.guards.take(&request.volume_id).await?;
        self.node.unpublish(handle.as_ref(), &target)?;
        tracing::info!(
            volume = request.volume_id,
            target = request.target_path,
            "unpublished"
        );
        Ok(())
    }

    async fn do_stats(
        self,
        request: csi::NodeGetVolumeStatsRequest,
    ) -> Result<csi::NodeGetVolumeStatsResponse, Refusal> {
        let handle = handle(&request.volume_id)?;
        if request.volume_path.is_empty() {
            return Err(Refusal::Invalid("the request has no volume_path".into()));
        }
        let known = handle
            .map(|handle| self.node.records.load(&handle))
            .transpose()?;
        let record = known.flatten().ok_or_else(|| unknown(&request.volume_id))?;
        let place: PathBuf = Path::new(&request.volume_path).components().collect();
        let usage = stats::usage(&record, &place).await?;
        Ok(csi::NodeGetVolumeStatsResponse { usage })
    }

    async fn do_health(
        self,
        request: csi::NodeGetVolumeHealthRequest,
    ) -> Result<csi::NodeGetVolumeHealthResponse, Refusal> {
        let handle = handle(&request.volume_id)?.ok_or_else(|| unknown(&request.volume_id))?;
        let record = self.node.records.load(&handle)?;
        let record = record.ok_or_else(|| unknown(&request.volume_id))?;
        let message = match self.node.standing(&handle, &record.staging).await {
            Ok(Staging::Alive(_)) => stats::usage(&record, &record.staging).await.err(),
            Ok(_) => Some(Refusal::Broken("the mount is dead; it is repaired".into())),
            Err(error) => Some(error),
        };
        let statuses = message.map(|message| csi::volume_health::VolumeHealthEntry {
            status: csi::VolumeHealthErrorType::Inaccessible.into(),
            reason: "MountNotServed".into(),
            message: message.to_string(),
        });
        Ok(csi::NodeGetVolumeHealthResponse {
            volume_health: Some(csi::VolumeHealth {
                volume_id: request.volume_id,
                health_statuses: statuses.into_iter().collect(),
            }),
        })
    }
}

#[tonic::async_trait]
impl Service for NodeService {
    async fn node_stage_volume(
        &self,
        request: Request<csi::NodeStageVolumeRequest>,
    ) -> Result<Response<csi::NodeStageVolumeResponse>, Status> {
        within(STAGE_BUDGET, self.clone().do_stage(request.into_inner())).await?;
        Ok(Response::new(csi::NodeStageVolumeResponse {}))
    }

    async fn node_unstage_volume(
        &self,
        request: Request<csi::NodeUnstageVolumeRequest>,
    ) -> Result<Response<csi::NodeUnstageVolumeResponse>, Status> {
        within(STAGE_BUDGET, self.clone().do_unstage(request.into_inner())).await?;
        Ok(Response::new(csi::NodeUnstageVolumeResponse {}))
    }

    async fn node_publish_volume(
        &self,
        request: Request<csi::NodePublishVolumeRequest>,
    ) -> Result<Response<csi::NodePublishVolumeResponse>, Status> {
        within(STAGE_BUDGET, self.clone().do_publish(request.into_inner())).await?;
        Ok(Response::new(csi::NodePublishVolumeResponse {}))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<csi::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<csi::NodeUnpublishVolumeResponse>, Status> {
        within(ASK_BUDGET, self.clone().do_unpublish(request.into_inner())).await?;
        Ok(Response::new(csi::NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<csi::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<csi::NodeGetVolumeStatsResponse>, Status> {
        let stats = within(ASK_BUDGET, self.clone().do_stats(request.into_inner())).await?;
        Ok(Response::new(stats))
    }

    async fn node_get_volume_health(
        &self,
        request: Request<csi::NodeGetVolumeHealthRequest>,
    ) -> Result<Response<csi::NodeGetVolumeHealthResponse>, Status> {
        if !self.level.has_health() {
            return Err(Status::unimplemented(
                "volume health comes with --spec 1.13",
            ));
        }
        let health = within(ASK_BUDGET, self.clone().do_health(request.into_inner())).await?;
        Ok(Response::new(health))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<csi::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<csi::NodeGetCapabilitiesResponse>, Status> {
        let health = self.level.has_health().then_some(Type::GetVolumeHealth);
        let all = CAPABILITIES.into_iter().chain(health);
        let capabilities = all.map(|kind| {
            let rpc = Rpc {
                r#type: kind.into(),
            };
            let r#type = Some(Kind::Rpc(rpc));
            csi::NodeServiceCapability { r#type }
        });
        Ok(Response::new(csi::NodeGetCapabilitiesResponse {
            capabilities: capabilities.collect(),
        }))
    }

    async fn node_get_info(
        &self,
        _: Request<csi::NodeGetInfoRequest>,
    ) -> Result<Response<csi::NodeGetInfoResponse>, Status> {
        let labels = self.node.labels.borrow().clone();
        let topology = if self.topology {
            let segments = labels.segments()?;
            segments.map(|segments| csi::Topology {
                segments: segments.into_iter().collect(),
            })
        } else {
            None
        };
        Ok(Response::new(csi::NodeGetInfoResponse {
            node_id: labels.node,
            max_volumes_per_node: 0,
            accessible_topology: topology,
        }))
    }
}

/// How to reach the cluster of a staged volume.
#[must_use]
pub fn access_of(record: &Record) -> ClusterAccess {
    ClusterAccess {
        managers: record.managers.clone(),
        cluster: None,
        key: Default::default(),
    }
}

/// The pod a target is for, as the kubelet says with `podInfoOnMount`.
fn pod_of(context: &Map) -> Option<Pod> {
    let value = |key: &str| {
        context
            .get(&format!("csi.storage.k8s.io/pod.{key}"))
            .cloned()
    };
    Some(Pod {
        namespace: value("namespace")?,
        name: value("name")?,
        uid: value("uid")?,
    })
}

/// The handle of a request; `None` for one this driver has not given.
fn handle(text: &str) -> Result<Option<Handle>, Refusal> {
    if text.is_empty() {
        return Err(Refusal::Invalid("the request has no volume_id".into()));
    }
    Ok(Handle::parse(text))
}

fn unknown(handle: &str) -> Refusal {
    Refusal::NotFound(format!("there is no volume {handle}"))
}

fn path(text: &str, field: &str) -> Result<PathBuf, Refusal> {
    if text.is_empty() {
        return Err(Refusal::Invalid(format!("the request has no {field}")));
    }
    let path = Path::new(text);
    let plain = !path
        .components()
        .any(|part| part == std::path::Component::ParentDir);
    if !path.is_absolute() || !plain {
        return Err(Refusal::Invalid(format!(
            "{field} {text:?} is no absolute path"
        )));
    }
    // Without a slash at the end and doubled ones, as the kernel shows it.
    Ok(path.components().collect())
}

/// What the node offers at every level.
const CAPABILITIES: [Type; 4] = [
    Type::StageUnstageVolume,
    Type::GetVolumeStats,
    Type::SingleNodeMultiWriter,
    Type::VolumeMountGroup,
];
/// Directory of the cluster in the context of a volume that an administrator made.
const SUBDIRECTORY: &str = "subdirectory";
/// Time of a request that mounts; the kubelet waits two minutes.
const STAGE_BUDGET: Duration = Duration::from_secs(75);
/// Time of a request that only looks or unmounts.
const ASK_BUDGET: Duration = Duration::from_secs(15);
