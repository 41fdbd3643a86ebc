//! A metadata server of its own, where the store is outside the manager.

use anyhow::bail;

use crate::args;

/// Runs until SIGTERM.
#[cfg(not(feature = "etcd"))]
pub(crate) async fn run(_: args::Mds) -> anyhow::Result<()> {
    std::future::ready(()).await;
    bail!(
        "with the embedded store the manager carries the metadata ranks; this build has no etcd \
         backend (build with `--features etcd`)"
    )
}
