//! The controller service: volumes are made, changed, listed and removed.

use std::sync::Arc;
use std::time::Duration;

use tonic::{Request, Response, Status};

use crate::clusters::{Cluster, Clusters};
use crate::decide::access::Access;
use crate::decide::parameters::{Mutable, Parameters};
use crate::decide::volume::{Creation, Volume, VolumeRecord, create, expand};
use crate::error::Refusal;
use crate::guard::{Guards, within};
use crate::ids::{Handle, VolumeId};
use crate::kill::point;
use crate::listing::{self, Page};
use crate::rpc::csi;
use crate::rpc::csi::controller_server::Controller;
use crate::rpc::csi::controller_service_capability::{Rpc, Type as Kind, rpc::Type};
use crate::secret::ClusterAccess;
use crate::volumes::{Located, Volumes};

/// The controller service.
#[derive(Debug, Clone)]
pub struct ControllerService {
    clusters: Arc<Clusters>,
    guards: Guards,
    topology: bool,
}

impl ControllerService {
    /// Serves volumes of these clusters; with `topology` they may be pinned to a zone.
    #[must_use]
    pub fn new(clusters: Arc<Clusters>, topology: bool) -> Self {
        Self {
            clusters,
            guards: Guards::default(),
            topology,
        }
    }

    /// Empties the trash of all known clusters, now and then; never returns.
    pub async fn tidy(self) {
        let mut ticks = tokio::time::interval(TIDY_EACH);
        loop {
            ticks.tick().await;
            match self.clusters.each().await {
                Ok(each) => {
                    for cluster in each.into_iter().flatten() {
                        self.purge(&cluster).await;
                    }
                }
                Err(error) => tracing::warn!(%error, "no cluster is tidied"),
            }
        }
    }

    async fn purge(&self, cluster: &Cluster) {
        let Ok(_held) = self.guards.take(&format!("trash of {}", cluster.id)).await else {
            return;
        };
        match Volumes::new(cluster.client.clone()).purge().await {
            Ok(true) => point("delete.purged"),
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, cluster = %cluster.id, "the trash is not empty"),
        }
    }

    async fn do_create(self, request: csi::CreateVolumeRequest) -> Result<csi::Volume, Refusal> {
        if request.name.is_empty() {
            return Err(Refusal::Invalid("the volume has no name".into()));
        }
        Access::all(&request.volume_capabilities)?;
        if request.volume_content_source.is_some() {
            return Err(Refusal::Invalid(
                "volumes are not made from snapshots or other volumes yet".into(),
            ));
        }
        let parameters = Parameters::parse(&request.parameters, &request.mutable_parameters)?;
        if parameters.pin_to_zone && !self.topology {
            return Err(Refusal::Invalid(
                "pinToZone needs the chart's value csi.topology.enabled".into(),
            ));
        }
        let wanted = VolumeRecord::new(&request.name, &parameters);
        let range = request.capacity_range.as_ref();
        create(range, &wanted, None)?;
        let id = VolumeId::of_name(&request.name);
        let _held = self.guards.take(id.as_str()).await?;
        let cluster = match ClusterAccess::of_secrets(&request.secrets)? {
            Some(access) => self.clusters.of_request(Some(&access), None).await?,
            None => self.clusters.named(parameters.cluster.as_deref()).await?,
        };
        if let Some(name) = &parameters.cluster {
            self.clusters.learn(name, &cluster.id);
        }
        let volumes = Volumes::new(cluster.client.clone());
        let there = volumes.find(&id).await?.map(|located| located.volume);
        let size = match create(range, &wanted, there.as_ref())? {
            Creation::IsThere => there.map_or(0, |there| there.size),
            Creation::Make { size } => {
                volumes.make(&id, &wanted, size).await?;
                tracing::info!(volume = %id, name = request.name, size, "made");
                size
            }
        };
        let handle = Handle {
            cluster: cluster.id,
            volume: id,
        };
        let zones = request.accessibility_requirements.unwrap_or_default();
        let zones = zones.preferred.into_iter().chain(zones.requisite);
        let pinned = zones.take(usize::from(parameters.pin_to_zone));
        Ok(csi::Volume {
            accessible_topology: pinned.collect(),
            ..shown(&handle, size)
        })
    }

    async fn do_delete(self, request: csi::DeleteVolumeRequest) -> Result<(), Refusal> {
        let handle = named(&request.volume_id)?;
        // Whatever else has such a handle, this driver has not made it.
        let Some(handle) = Handle::parse(handle) else {
            return Ok(());
        };
        let _held = self.guards.take(handle.volume.as_str()).await?;
        let access = ClusterAccess::of_secrets(&request.secrets)?;
        let found = self
            .clusters
            .of_request(access.as_ref(), Some(&handle.cluster));
        let cluster = found.await?;
        let volumes = Volumes::new(cluster.client.clone());
        volumes.remove(&handle.volume).await?;
        tracing::info!(volume = %handle, "removed");
        let this = self.clone();
        tokio::spawn(async move { this.purge(&cluster).await });
        Ok(())
    }

    /// The volume of a handle, in its cluster.
    async fn located(
        &self,
        handle: &str,
        secrets: &std::collections::BTreeMap<String, String>,
    ) -> Result<(Handle, Volumes, Located), Refusal> {
        let gone = || Refusal::NotFound(format!("there is no volume {handle}"));
        let parsed = Handle::parse(named(handle)?).ok_or_else(gone)?;
        let access = ClusterAccess::of_secrets(secrets)?;
        let found = self
            .clusters
            .of_request(access.as_ref(), Some(&parsed.cluster));
        let volumes = Volumes::new(found.await?.client);
        let located = volumes.find(&parsed.volume).await?.ok_or_else(gone)?;
        Ok((parsed, volumes, located))
    }

    async fn do_expand(self, request: csi::ControllerExpandVolumeRequest) -> Result<u64, Refusal> {
        named(&request.volume_id)?;
        if let Some(capability) = &request.volume_capability {
            Access::of(Some(capability))?;
        }
        let range = request.capacity_range.as_ref();
        expand(range, 0)?;
        let _held = self.guards.take(&request.volume_id).await?;
        let (handle, volumes, located) = self.located(&request.volume_id, &request.secrets).await?;
        let size = located.volume.size;
        let Some(larger) = expand(range, size)? else {
            return Ok(size);
        };
        volumes.resize(&located, larger).await?;
        tracing::info!(volume = %handle, size = larger, "expanded");
        Ok(larger)
    }

    async fn do_modify(self, request: csi::ControllerModifyVolumeRequest) -> Result<(), Refusal> {
        named(&request.volume_id)?;
        let change = Mutable::parse(&request.mutable_parameters)?;
        let _held = self.guards.take(&request.volume_id).await?;
        let (handle, volumes, located) = self.located(&request.volume_id, &request.secrets).await?;
        volumes.modify(&located, &change).await?;
        tracing::info!(volume = %handle, ?change, "changed");
        Ok(())
    }

    async fn do_validate(
        self,
        request: csi::ValidateVolumeCapabilitiesRequest,
    ) -> Result<csi::ValidateVolumeCapabilitiesResponse, Refusal> {
        named(&request.volume_id)?;
        if request.volume_capabilities.is_empty() {
            return Err(Refusal::Invalid(
                "the request has no volume capability".into(),
            ));
        }
        self.located(&request.volume_id, &request.secrets).await?;
        let fits = Access::all(&request.volume_capabilities).and_then(|_| {
            Parameters::parse(&request.parameters, &request.mutable_parameters).map(|_| ())
        });
        Ok(match fits {
            Ok(()) => csi::ValidateVolumeCapabilitiesResponse {
                confirmed: Some(csi::validate_volume_capabilities_response::Confirmed {
                    volume_context: request.volume_context,
                    volume_capabilities: request.volume_capabilities,
                    parameters: request.parameters,
                    mutable_parameters: request.mutable_parameters,
                }),
                message: String::new(),
            },
            Err(why) => csi::ValidateVolumeCapabilitiesResponse {
                confirmed: None,
                message: why.to_string(),
            },
        })
    }

    async fn do_list(self, request: csi::ListVolumesRequest) -> Result<Page, Refusal> {
        let after = listing::after(&request.starting_token)?;
        let most = listing::limit(request.max_entries)?;
        let mut all: Vec<(Handle, Volume)> = Vec::new();
        for cluster in self.clusters.all().await? {
            let listed = Volumes::new(cluster.client).list().await?;
            all.extend(listed.into_iter().map(|(volume, what)| {
                let cluster = cluster.id.clone();
                (Handle { cluster, volume }, what)
            }));
        }
        Ok(listing::page(all, after.as_ref(), most))
    }

    async fn do_capacity(self, request: csi::GetCapacityRequest) -> Result<u64, Refusal> {
        if !request.volume_capabilities.is_empty()
            && Access::all(&request.volume_capabilities).is_err()
        {
            // Nothing can be made with these.
            return Ok(0);
        }
        let none = std::collections::BTreeMap::new();
        let parameters = Parameters::parse(&request.parameters, &none)?;
        let cluster = self.clusters.named(parameters.cluster.as_deref()).await?;
        let class = parameters.mutable.class.unwrap_or_default();
        Volumes::new(cluster.client).capacity(&class).await
    }
}

#[tonic::async_trait]
impl Controller for ControllerService {
    async fn create_volume(
        &self,
        request: Request<csi::CreateVolumeRequest>,
    ) -> Result<Response<csi::CreateVolumeResponse>, Status> {
        let work = self.clone().do_create(request.into_inner());
        let volume = Some(within(BUDGET, work).await?);
        Ok(Response::new(csi::CreateVolumeResponse { volume }))
    }

    async fn delete_volume(
        &self,
        request: Request<csi::DeleteVolumeRequest>,
    ) -> Result<Response<csi::DeleteVolumeResponse>, Status> {
        within(BUDGET, self.clone().do_delete(request.into_inner())).await?;
        Ok(Response::new(csi::DeleteVolumeResponse {}))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<csi::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<csi::ValidateVolumeCapabilitiesResponse>, Status> {
        let work = self.clone().do_validate(request.into_inner());
        Ok(Response::new(within(BUDGET, work).await?))
    }

    async fn list_volumes(
        &self,
        request: Request<csi::ListVolumesRequest>,
    ) -> Result<Response<csi::ListVolumesResponse>, Status> {
        let page = within(BUDGET, self.clone().do_list(request.into_inner())).await?;
        let entries = page.volumes.iter().map(|(handle, volume)| {
            let volume = Some(shown(handle, volume.size));
            let status = None;
            csi::list_volumes_response::Entry { volume, status }
        });
        Ok(Response::new(csi::ListVolumesResponse {
            entries: entries.collect(),
            next_token: page.next_token,
        }))
    }

    async fn get_capacity(
        &self,
        request: Request<csi::GetCapacityRequest>,
    ) -> Result<Response<csi::GetCapacityResponse>, Status> {
        let bytes = within(BUDGET, self.clone().do_capacity(request.into_inner())).await?;
        Ok(Response::new(csi::GetCapacityResponse {
            available_capacity: signed(bytes),
            ..Default::default()
        }))
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<csi::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<csi::ControllerGetCapabilitiesResponse>, Status> {
        let capabilities = CAPABILITIES.iter().map(|kind| {
            let rpc = Rpc {
                r#type: (*kind).into(),
            };
            let r#type = Some(Kind::Rpc(rpc));
            csi::ControllerServiceCapability { r#type }
        });
        Ok(Response::new(csi::ControllerGetCapabilitiesResponse {
            capabilities: capabilities.collect(),
        }))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<csi::ControllerExpandVolumeRequest>,
    ) -> Result<Response<csi::ControllerExpandVolumeResponse>, Status> {
        let size = within(BUDGET, self.clone().do_expand(request.into_inner())).await?;
        Ok(Response::new(csi::ControllerExpandVolumeResponse {
            capacity_bytes: signed(size),
            node_expansion_required: false,
        }))
    }

    async fn controller_get_volume(
        &self,
        request: Request<csi::ControllerGetVolumeRequest>,
    ) -> Result<Response<csi::ControllerGetVolumeResponse>, Status> {
        let this = self.clone();
        let handle = request.into_inner().volume_id;
        let work = async move { this.located(&handle, &Default::default()).await };
        let (handle, _, located) = within(BUDGET, work).await?;
        Ok(Response::new(csi::ControllerGetVolumeResponse {
            volume: Some(shown(&handle, located.volume.size)),
            status: Some(csi::controller_get_volume_response::VolumeStatus::default()),
        }))
    }

    async fn controller_modify_volume(
        &self,
        request: Request<csi::ControllerModifyVolumeRequest>,
    ) -> Result<Response<csi::ControllerModifyVolumeResponse>, Status> {
        within(BUDGET, self.clone().do_modify(request.into_inner())).await?;
        Ok(Response::new(csi::ControllerModifyVolumeResponse {}))
    }
}

/// A volume as Kubernetes is told of it. Nothing that can change later is in its context.
fn shown(handle: &Handle, size: u64) -> csi::Volume {
    csi::Volume {
        capacity_bytes: signed(size),
        volume_id: handle.to_string(),
        ..csi::Volume::default()
    }
}

fn named(handle: &str) -> Result<&str, Refusal> {
    if handle.is_empty() {
        return Err(Refusal::Invalid("the request has no volume id".into()));
    }
    Ok(handle)
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// What the controller offers.
const CAPABILITIES: [Type; 7] = [
    Type::CreateDeleteVolume,
    Type::ListVolumes,
    Type::GetCapacity,
    Type::ExpandVolume,
    Type::GetVolume,
    Type::SingleNodeMultiWriter,
    Type::ModifyVolume,
];
/// Time of one request; the sidecars are told to wait longer.
const BUDGET: Duration = Duration::from_secs(25);
/// How often the trash is looked at.
const TIDY_EACH: Duration = Duration::from_secs(60);
