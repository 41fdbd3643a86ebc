//! A chunkserver.

use anyhow::bail;

use crate::args;

/// Runs until SIGTERM.
pub(crate) async fn run(_: args::Chunkserver) -> anyhow::Result<()> {
    std::future::ready(()).await;
    bail!("not here yet")
}
