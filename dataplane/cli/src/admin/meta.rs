//! `hither meta`.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use hither_log::{LogDir, RealDir};
use hither_metastore::{EmbeddedOptions, EmbeddedStore, check_dump, load};
use hither_net::{NoHandler, connect};
use hither_proto::common::Empty;
use hither_proto::ids::MapVersion;
use hither_proto::kind::Kind;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::io::{AsyncSeekExt as _, AsyncWriteExt as _};

use crate::args::Meta;
use crate::cluster::{self, PATIENCE, patiently};
use crate::output::Output;

pub(crate) async fn run(meta: Meta, cluster: Option<String>, output: Output) -> anyhow::Result<()> {
    match meta {
        Meta::Dump { file } => dump(&file, cluster, output).await,
        Meta::Load { file, dir } => restore(&file, &dir, output).await,
    }
}

async fn dump(file: &Path, cluster: Option<String>, output: Output) -> anyhow::Result<()> {
    let link = cluster::link(cluster.as_deref()).await?;
    let map = patiently(
        "a manager that leads",
        link.at_least(MapVersion(1), PATIENCE),
    )
    .await
    .context("find the cluster")?;
    let leader = map.managers().first().context("the map names no manager")?;
    let connection = connect(leader, &cluster::admin(), Arc::new(NoHandler), PATIENCE).await?;
    // Under its own name only once it is whole and stable.
    let partial = file.with_extension("partial");
    let mut target = tokio::fs::File::create(&partial)
        .await
        .with_context(|| format!("create {}", partial.display()))?;
    let progress = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {bytes} ({bytes_per_sec})") {
        progress.set_style(style);
    }
    loop {
        let piece = connection
            .call(Kind::META_DUMP, &Empty {}, &[], PIECE_PATIENCE)
            .await?;
        if piece.payload().is_empty() {
            break;
        }
        target.write_all(piece.payload()).await?;
        progress.inc(piece.payload().len() as u64);
    }
    let total = progress.position();
    progress.finish_and_clear();
    target.flush().await?;
    target.sync_all().await?;
    tokio::fs::rename(&partial, file).await?;
    output.done(&format!("{total} bytes written to {}", file.display()));
    Ok(())
}

async fn restore(file: &Path, dir: &Path, output: Output) -> anyhow::Result<()> {
    let mut source = tokio::fs::File::open(file)
        .await
        .with_context(|| format!("open {}", file.display()))?;
    // A wrong file leaves no store behind.
    let checked = check_dump(&mut source).await;
    checked.with_context(|| format!("read {}", file.display()))?;
    source.rewind().await?;
    let dir: Arc<dyn LogDir> = Arc::new(RealDir::open(dir)?);
    let store = EmbeddedStore::open(&dir, EmbeddedOptions::default())
        .context("open the store (is its manager still running?)")?;
    match load(&store, &mut source).await {
        Ok(summary) => {
            output.done(&format!(
                "{} entries, {} bytes loaded",
                summary.entries, summary.bytes
            ));
            Ok(())
        }
        Err(hither_metastore::Error::NotEmpty) => {
            bail!("the store is not empty: restore into a new directory")
        }
        Err(error) => Err(error.into()),
    }
}

/// Time for one piece of a dump.
const PIECE_PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_wrong_file_leaves_no_store_behind() {
        let at = tempfile::tempdir().unwrap();
        let (file, dir) = (at.path().join("file"), at.path().join("store"));
        let text: Vec<u8> = (0..=255).cycle().take(5000).collect();
        std::fs::write(&file, text).unwrap();
        let quiet = Output { json: true };
        let error = restore(&file, &dir, quiet).await.unwrap_err();
        assert!(
            format!("{error:#}").contains("this is no dump"),
            "{error:#}"
        );
        assert!(!dir.exists());
    }
}
