//! Asking a controller what it knows, as Kubernetes does: for people and tests.

use std::path::PathBuf;

use anyhow::Context as _;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

use crate::rpc::csi;
use crate::rpc::csi::controller_client::ControllerClient;

/// A volume as a controller lists it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Listed {
    /// Its handle.
    pub handle: String,
    /// Its size.
    pub size_bytes: i64,
}

/// All volumes of the clusters that the controller at a socket knows.
///
/// # Errors
/// What the controller says, or that nobody listens there.
pub async fn volumes(socket: PathBuf) -> anyhow::Result<Vec<Listed>> {
    let mut controller = ControllerClient::new(connect(socket).await?);
    let mut listed = Vec::new();
    let mut starting_token = String::new();
    loop {
        let request = csi::ListVolumesRequest {
            starting_token,
            ..Default::default()
        };
        let page = controller.list_volumes(request).await?.into_inner();
        let volumes = page.entries.into_iter().filter_map(|entry| entry.volume);
        listed.extend(volumes.map(|volume| Listed {
            handle: volume.volume_id,
            size_bytes: volume.capacity_bytes,
        }));
        if page.next_token.is_empty() {
            return Ok(listed);
        }
        starting_token = page.next_token;
    }
}

/// One volume, by its handle.
///
/// # Errors
/// As [`volumes`].
pub async fn volume(socket: PathBuf, handle: &str) -> anyhow::Result<Listed> {
    let mut controller = ControllerClient::new(connect(socket).await?);
    let request = csi::ControllerGetVolumeRequest {
        volume_id: handle.to_owned(),
    };
    let answer = controller.controller_get_volume(request).await?;
    let volume = answer.into_inner().volume.unwrap_or_default();
    Ok(Listed {
        handle: volume.volume_id,
        size_bytes: volume.capacity_bytes,
    })
}

/// Bytes that can still be given to volumes of a class of a cluster.
///
/// # Errors
/// As [`volumes`].
pub async fn capacity(socket: PathBuf, cluster: &str, class: &str) -> anyhow::Result<i64> {
    let mut controller = ControllerClient::new(connect(socket).await?);
    let parameters = [("cluster", cluster), ("class", class)];
    let parameters = parameters.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let request = csi::GetCapacityRequest {
        parameters: parameters.into(),
        ..Default::default()
    };
    let answer = controller.get_capacity(request).await?.into_inner();
    Ok(answer.available_capacity)
}

async fn connect(socket: PathBuf) -> anyhow::Result<Channel> {
    let shown = socket.display().to_string();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    let connected = endpoint.connect_with_connector(connector).await;
    connected.with_context(|| format!("reach a controller at {shown}"))
}
