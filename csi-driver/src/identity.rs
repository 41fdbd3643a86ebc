//! The identity service.

use tonic::{Request, Response, Status};

use crate::DRIVER;
use crate::rpc::csi;
use crate::rpc::csi::identity_server::Identity;
use crate::rpc::csi::plugin_capability::{
    Service, Type, VolumeExpansion, service, volume_expansion,
};

/// The identity service, the same beside controller and node.
#[derive(Debug, Clone, Copy)]
pub struct IdentityService {
    topology: bool,
}

impl IdentityService {
    /// With `topology`, volumes may be pinned to a zone.
    #[must_use]
    pub fn new(topology: bool) -> Self {
        Self { topology }
    }
}

#[tonic::async_trait]
impl Identity for IdentityService {
    async fn get_plugin_info(
        &self,
        _: Request<csi::GetPluginInfoRequest>,
    ) -> Result<Response<csi::GetPluginInfoResponse>, Status> {
        Ok(Response::new(csi::GetPluginInfoResponse {
            name: DRIVER.into(),
            vendor_version: env!("CARGO_PKG_VERSION").into(),
            ..Default::default()
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<csi::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<csi::GetPluginCapabilitiesResponse>, Status> {
        let service = |kind: service::Type| {
            Type::Service(Service {
                r#type: kind.into(),
            })
        };
        let expansion = VolumeExpansion {
            r#type: volume_expansion::Type::Online.into(),
        };
        let topology = self
            .topology
            .then(|| service(service::Type::VolumeAccessibilityConstraints));
        let all = [
            service(service::Type::ControllerService),
            Type::VolumeExpansion(expansion),
        ];
        let capabilities = all.into_iter().chain(topology).map(|kind| {
            let r#type = Some(kind);
            csi::PluginCapability { r#type }
        });
        Ok(Response::new(csi::GetPluginCapabilitiesResponse {
            capabilities: capabilities.collect(),
        }))
    }

    /// Says that this process serves. Whether clusters answer is no reason to restart it.
    async fn probe(
        &self,
        _: Request<csi::ProbeRequest>,
    ) -> Result<Response<csi::ProbeResponse>, Status> {
        Ok(Response::new(csi::ProbeResponse { ready: Some(true) }))
    }
}
