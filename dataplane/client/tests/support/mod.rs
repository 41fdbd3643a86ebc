//! A cluster of few words around a real client: one file, one metadata server that also is the
//! manager, and chunkservers with a live and a durable image, all of which a test can hold up, make
//! refuse and kill.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "not every test uses everything"
)]

pub(crate) mod chunks;
pub(crate) mod metadata;

use std::sync::Arc;
use std::time::Duration;

use hither_client::{Client, ClientConfig, NoKernelCaches, OpenFile, Standpoint};
use hither_proto::ids::InodeId;

pub(crate) use chunks::Chunks;
pub(crate) use metadata::Metadata;

pub(crate) const GROUP: u32 = 7;
pub(crate) const FILE: InodeId = InodeId(5);
pub(crate) const WAIT: Duration = Duration::from_secs(10);

pub(crate) struct Cluster {
    pub(crate) metadata: Arc<Metadata>,
    pub(crate) chunks: Arc<Chunks>,
    pub(crate) client: Client,
}

impl Cluster {
    pub(crate) async fn start(servers: usize) -> Self {
        Self::start_at(servers, Standpoint::default()).await
    }

    /// With a client that stands there.
    pub(crate) async fn start_at(servers: usize, standpoint: Standpoint) -> Self {
        let chunks = Chunks::start(servers).await;
        let metadata = Metadata::start(&chunks.addresses()).await;
        let config = ClientConfig {
            managers: vec![metadata.address()],
            timeout: Duration::from_secs(5),
            standpoint,
            ..ClientConfig::default()
        };
        let client = Client::start(config, Arc::new(NoKernelCaches))
            .await
            .unwrap();
        Self {
            metadata,
            chunks,
            client,
        }
    }

    pub(crate) async fn open(&self) -> Arc<OpenFile> {
        self.client.open(FILE, false, false).await.unwrap()
    }

    /// Writes whole frames, so that they are sent at once, and waits until they are applied.
    pub(crate) async fn write_applied(&self, open: &OpenFile, offset: u64, byte: u8) {
        let before = self.chunks.applied();
        let frame = vec![byte; FRAME];
        self.client.write(open, offset, frame.into()).await.unwrap();
        self.chunks.until(|state| state.applied > before).await;
    }
}

/// Bytes that are sent without waiting for more.
pub(crate) const FRAME: usize = 1 << 20;

/// Fails the test when something takes too long.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(WAIT, future).await {
        Ok(value) => value,
        Err(_) => panic!("takes too long: {what}"),
    }
}
