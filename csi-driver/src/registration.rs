//! Registration of the node plugin with the kubelet, by itself.

use tonic::{Request, Response, Status};

use crate::DRIVER;
use crate::rpc::registration::registration_server::Registration;
use crate::rpc::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};

/// What the kubelet finds at the socket in its `plugins_registry`.
#[derive(Debug, Clone)]
pub struct RegistrationService {
    endpoint: String,
}

impl RegistrationService {
    /// Names the plugin's socket, as the kubelet sees it.
    #[must_use]
    pub fn new(endpoint: String) -> Self {
        Self { endpoint }
    }
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "CSIPlugin".into(),
            name: DRIVER.into(),
            endpoint: self.endpoint.clone(),
            supported_versions: vec!["1.0.0".into()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        if status.plugin_registered {
            tracing::info!("registered with the kubelet");
        } else {
            // The mounts that stand are served on; the kubelet tries again when the socket is new.
            tracing::error!(error = status.error, "the kubelet refuses the plugin");
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
