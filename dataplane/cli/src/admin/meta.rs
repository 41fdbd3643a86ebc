//! `hither meta`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use hither_log::{LogDir, RealDir};
use hither_metastore::{EmbeddedOptions, EmbeddedStore, MetaStore, check_dump, load};
use hither_net::{NoHandler, connect};
use hither_proto::common::Empty;
use hither_proto::ids::MapVersion;
use hither_proto::kind::Kind;
use indicatif::{ProgressBar, ProgressStyle};
use jiff::Timestamp;
use tokio::io::{AsyncSeekExt as _, AsyncWriteExt as _};

use crate::args::Meta;
use crate::cluster::{self, PATIENCE, patiently};
use crate::output::Output;

pub(crate) async fn run(meta: Meta, cluster: Option<String>, output: Output) -> anyhow::Result<()> {
    match meta {
        Meta::Dump { file, keep } => {
            let target = Target::of(file, keep)?;
            dump(&target.file, cluster, output).await?;
            target.keep()
        }
        Meta::Load {
            file,
            dir,
            etcd,
            etcd_tls,
        } => match (dir, etcd) {
            (Some(dir), _) => restore(&file, &dir, output).await,
            (None, Some(urls)) => restore_etcd(&file, &urls, etcd_tls.as_deref(), output).await,
            (None, None) => bail!("give --dir or --etcd"),
        },
    }
}

/// Where a dump goes.
struct Target {
    file: PathBuf,
    /// Directory of files named by their time, and how many of them stay.
    series: Option<(PathBuf, usize)>,
}

impl Target {
    fn of(path: PathBuf, keep: Option<u32>) -> anyhow::Result<Self> {
        if !path.is_dir() {
            if keep.is_some() {
                bail!("--keep is for a directory: {} is none", path.display());
            }
            return Ok(Self {
                file: path,
                series: None,
            });
        }
        let time = Timestamp::now().strftime("%Y%m%dT%H%M%SZ");
        let keep = keep.and_then(|keep| usize::try_from(keep).ok());
        Ok(Self {
            file: path.join(format!("{PREFIX}{time}{SUFFIX}")),
            series: keep.map(|keep| (path, keep)),
        })
    }

    /// Removes the oldest that are too many.
    fn keep(&self) -> anyhow::Result<()> {
        let Some((dir, keep)) = &self.series else {
            return Ok(());
        };
        let mut names = Vec::new();
        for entry in std::fs::read_dir(dir).with_context(|| format!("read {}", dir.display()))? {
            let name = entry?.file_name();
            let text = name.to_string_lossy();
            if text.starts_with(PREFIX) && text.ends_with(SUFFIX) {
                names.push(name);
            } else if text.starts_with(PREFIX) && text.ends_with(PARTIAL) {
                // Of one that was interrupted: ours has its name by now.
                remove(&dir.join(name))?;
            }
        }
        // The names are times: the oldest come first.
        names.sort();
        let many = names.len().saturating_sub(*keep);
        for name in names.into_iter().take(many) {
            remove(&dir.join(name))?;
        }
        Ok(())
    }
}

fn remove(file: &Path) -> anyhow::Result<()> {
    std::fs::remove_file(file).with_context(|| format!("remove {}", file.display()))
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
    // Under its own name only once it is whole and stable; what is no file (a pipe, a device) has
    // no other name.
    let partial = match file.metadata() {
        Ok(there) if !there.is_file() => None,
        _ => Some(partial_of(file)),
    };
    let at = partial.as_deref().unwrap_or(file);
    let mut target = tokio::fs::OpenOptions::new()
        .write(true)
        .create(partial.is_some())
        .truncate(partial.is_some())
        .open(at)
        .await
        .with_context(|| format!("write to {}", at.display()))?;
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
    if let Some(partial) = &partial {
        target.sync_all().await?;
        tokio::fs::rename(partial, file).await?;
        let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty());
        let dir = tokio::fs::File::open(dir.unwrap_or(Path::new("."))).await?;
        dir.sync_all().await?;
    }
    let done = format!("{total} bytes written to {}", file.display());
    match partial {
        Some(_) => output.done(&done),
        // Standard output may be where it went.
        None => eprintln!("{done}"),
    }
    Ok(())
}

/// Name of a dump that is not whole yet: its own with more behind it.
fn partial_of(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".");
    name.push(PARTIAL);
    name.into()
}

async fn restore(file: &Path, dir: &Path, output: Output) -> anyhow::Result<()> {
    let source = checked(file).await?;
    let dir: Arc<dyn LogDir> = Arc::new(RealDir::open(dir)?);
    let store = EmbeddedStore::open(&dir, EmbeddedOptions::default())
        .context("open the store (is its manager still running?)")?;
    fill(&store, source, output).await
}

#[cfg(feature = "etcd")]
async fn restore_etcd(
    file: &Path,
    urls: &str,
    tls: Option<&Path>,
    output: Output,
) -> anyhow::Result<()> {
    let source = checked(file).await?;
    let opened = tokio::time::timeout(PATIENCE, crate::roles::etcd::open(urls, tls)).await;
    let store =
        opened.map_err(|_| anyhow::anyhow!("no etcd answers at {urls}: is it running?"))??;
    fill(&store, source, output).await
}

#[cfg(not(feature = "etcd"))]
async fn restore_etcd(_: &Path, _: &str, _: Option<&Path>, _: Output) -> anyhow::Result<()> {
    std::future::ready(()).await;
    bail!("this build has no etcd backend: build with `--features etcd`")
}

/// The file, once it was read from end to end: a wrong one leaves no store behind.
async fn checked(file: &Path) -> anyhow::Result<tokio::fs::File> {
    let mut source = tokio::fs::File::open(file)
        .await
        .with_context(|| format!("open {}", file.display()))?;
    let checked = check_dump(&mut source).await;
    checked.with_context(|| format!("read {}", file.display()))?;
    source.rewind().await?;
    Ok(source)
}

async fn fill(
    store: &impl MetaStore,
    mut source: tokio::fs::File,
    output: Output,
) -> anyhow::Result<()> {
    match load(store, &mut source).await {
        Ok(summary) => {
            output.done(&format!(
                "{} entries, {} bytes loaded",
                summary.entries, summary.bytes
            ));
            Ok(())
        }
        Err(hither_metastore::Error::NotEmpty) => {
            bail!("the store is not empty: restore into a new one")
        }
        Err(error) => Err(error.into()),
    }
}

/// Names of dumps in a directory.
const PREFIX: &str = "hither-";
const SUFFIX: &str = ".dump";
/// How the name of one that is being written ends.
const PARTIAL: &str = "partial";
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

    #[test]
    fn in_a_directory_the_newest_are_kept() {
        let at = tempfile::tempdir().unwrap();
        let dir = at.path().to_owned();
        for name in [
            "hither-20200101T000000Z.dump",
            "hither-20210101T000000Z.dump",
            "hither-20210201T000000Z.partial",
            "other",
        ] {
            std::fs::write(dir.join(name), "").unwrap();
        }
        let target = Target::of(dir.clone(), Some(2)).unwrap();
        std::fs::write(&target.file, "").unwrap();
        target.keep().unwrap();
        assert!(!dir.join("hither-20200101T000000Z.dump").exists());
        assert!(!dir.join("hither-20210201T000000Z.partial").exists());
        assert!(dir.join("hither-20210101T000000Z.dump").exists());
        assert!(target.file.exists() && dir.join("other").exists());
        let plain = Target::of(dir.join("file"), None).unwrap();
        assert_eq!(plain.file, dir.join("file"));
        assert!(Target::of(dir.join("file"), Some(2)).is_err());
    }
}
