//! What a mount knows about its files: asked of the mount itself, through attributes named
//! `hither.*`.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, bail};
use indicatif::ProgressBar;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::args::Quota;
use crate::output::{Output, bytes, percent, table};

/// A chunk as the mount describes it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Chunk {
    index: u32,
    chunk: u64,
    group: u32,
    epoch: u64,
    /// Its group is one of those that new chunks of the file's class go to or are kept in. Older
    /// mounts do not say.
    #[serde(default = "yes")]
    as_class_asks: bool,
    servers: Vec<Server>,
}

fn yes() -> bool {
    true
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Server {
    server: u64,
    address: String,
    zone: String,
    labels: String,
    rank: usize,
    distance: u32,
    in_flight: u32,
    suspect: bool,
    state: String,
    why: String,
}

/// Counters as the mount keeps them. One of another version may lack some, and before camelCase they
/// were named as they are here.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Locality {
    #[serde(alias = "by_locality")]
    by_locality: BTreeMap<String, Traffic>,
    #[serde(alias = "by_server")]
    by_server: BTreeMap<String, Traffic>,
    detours: BTreeMap<String, Traffic>,
    failovers: u64,
    hedges: u64,
    #[serde(alias = "hedge_wins")]
    hedge_wins: u64,
    spills: u64,
    suspicions: u64,
    #[serde(alias = "memory_read_bytes")]
    memory_read_bytes: u64,
    #[serde(alias = "write_back_waits")]
    write_back_waits: u64,
    #[serde(alias = "write_back_wait_us")]
    write_back_wait_us: u64,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Traffic {
    reads: u64,
    #[serde(alias = "read_bytes")]
    read_bytes: u64,
    writes: u64,
    #[serde(alias = "write_bytes")]
    write_bytes: u64,
}

/// `hither where`.
pub(crate) fn places(path: &Path, output: Output) -> anyhow::Result<()> {
    if path.is_dir() {
        let class = attribute(path, "hither.class")?;
        bail!(
            "{} is a directory, and only files have chunks; new files in it get storage class \
             {class} (`hither sclass show {class}`): name a file",
            path.display()
        );
    }
    let mut chunks: Vec<Chunk> = Vec::new();
    loop {
        let text = attribute(path, &format!("hither.where.{}", chunks.len()))?;
        let more: Vec<Chunk> = serde_json::from_str(&text).context("read the mount's answer")?;
        if more.is_empty() {
            break;
        }
        chunks.extend(more);
    }
    let class = if chunks.iter().all(|chunk| chunk.as_class_asks) {
        String::new()
    } else {
        attribute(path, "hither.class")?
    };
    output.print(&chunks, |chunks| show_places(path, chunks, &class))
}

/// Where a file's chunks are, as a table, and in how many the copies are not those of its class.
fn show_places(path: &Path, chunks: &[Chunk], class: &str) -> String {
    if chunks.is_empty() {
        return format!("{} is empty: it has no chunks", path.display());
    }
    let mut rows = Vec::new();
    for chunk in chunks {
        if chunk.servers.is_empty() {
            let mut row = vec![chunk.index.to_string(), "hole".into()];
            row.resize(8, String::new());
            rows.push(row.try_into().unwrap_or_default());
        }
        for (place, server) in chunk.servers.iter().enumerate() {
            rows.push([
                chunk.index.to_string(),
                format!("{:x}", chunk.chunk),
                (place + 1).to_string(),
                format!("{} {}", server.server, server.address),
                server.labels.clone(),
                server.rank.to_string(),
                server.distance.to_string(),
                server.why.clone(),
            ]);
        }
    }
    let mut text = table(
        [
            "PIECE", "CHUNK", "ORDER", "SERVER", "LABELS", "RANK", "DISTANCE", "WHY",
        ],
        rows,
    );
    let others = chunks.iter().filter(|chunk| !chunk.as_class_asks).count();
    if others > 0 {
        text.push_str(&format!(
            "\n\n{others} of {} written before the file had storage class {class} as it is now: {} \
             with the copies shown here; a copy of the file (`cp`) gets those of the class",
            counted(chunks.len() as u64, "piece was", "pieces were"),
            if others == 1 { "it stays" } else { "they stay" },
        ));
    }
    text
}

/// `hither locality`.
pub(crate) fn locality(mount: &Path, output: Output) -> anyhow::Result<()> {
    let text = attribute(mount, "hither.locality")?;
    let report: Locality = serde_json::from_str(&text).context("read the mount's answer")?;
    output.print(&report, |report| {
        let all: u64 = report.by_locality.values().map(|t| t.read_bytes).sum();
        let rows = report
            .by_locality
            .iter()
            .map(|(name, t)| {
                [
                    name.clone(),
                    t.reads.to_string(),
                    bytes(t.read_bytes),
                    percent(t.read_bytes, all),
                    t.writes.to_string(),
                    bytes(t.write_bytes),
                ]
            })
            .collect();
        let table = table(
            ["LOCALITY", "READS", "READ", "SHARE", "WRITES", "WRITTEN"],
            rows,
        );
        format!(
            "{table}\n\n{}failovers {}, hedges {} (won {}), spills {}, suspicions {}, from memory {}\n\
             reads that waited for another mount's write-back: {} ({} ms)",
            detours(&report.detours, all),
            report.failovers,
            report.hedges,
            report.hedge_wins,
            report.spills,
            report.suspicions,
            bytes(report.memory_read_bytes),
            report.write_back_waits,
            report.write_back_wait_us.div_ceil(1000),
        )
    })
}

/// Why reads went farther than the nearest copy, if any did.
fn detours(by_reason: &BTreeMap<String, Traffic>, all: u64) -> String {
    if by_reason.is_empty() {
        return String::new();
    }
    let reasons: Vec<String> = by_reason
        .iter()
        .map(|(why, t)| {
            let share = percent(t.read_bytes, all);
            format!("{why} {} ({}, {share})", t.reads, bytes(t.read_bytes))
        })
        .collect();
    format!("farther than the nearest copy: {}\n", reasons.join(", "))
}

/// A directory's quota and what it is for.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct QuotaShown {
    path: String,
    /// Limit in bytes, 0 for none.
    bytes: u64,
    /// Limit in inodes, 0 for none.
    inodes: u64,
    /// Bytes of everything below.
    used_bytes: u64,
    /// Inodes of everything below.
    used_inodes: u64,
}

/// `hither quota`.
pub(crate) fn quota(quota: &Quota, output: Output) -> anyhow::Result<()> {
    let path = quota.path.display().to_string();
    if !quota.path.is_dir() {
        bail!("{path} is no directory: quotas are of directories, for everything below them");
    }
    let set = |name: &str, value: Option<u64>| match value {
        Some(value) => set_attribute(&quota.path, name, &value.to_string()),
        None => Ok(()),
    };
    set("hither.quota.bytes", quota.bytes)?;
    set("hither.quota.inodes", quota.inodes)?;
    let number = |text: &str| -> anyhow::Result<u64> {
        text.parse()
            .with_context(|| format!("read {text:?} as a number"))
    };
    let limit = |name: &str| number(&attribute(&quota.path, name)?);
    let used = attribute(&quota.path, "hither.quota.used")?;
    let (used_bytes, used_inodes) = used.split_once(' ').context("read what is used")?;
    let shown = QuotaShown {
        path,
        bytes: limit("hither.quota.bytes")?,
        inodes: limit("hither.quota.inodes")?,
        used_bytes: number(used_bytes)?,
        used_inodes: number(used_inodes)?,
    };
    output.print(&shown, |shown| {
        let row = |name: &str, used: u64, limit: u64, text: fn(u64) -> String| {
            let (limit_text, share) = match limit {
                0 => ("no limit".to_owned(), "-".to_owned()),
                _ => (text(limit), percent(used, limit)),
            };
            [name.to_owned(), text(used), limit_text, share]
        };
        let rows = vec![
            row("bytes", shown.used_bytes, shown.bytes, bytes),
            row("inodes", shown.used_inodes, shown.inodes, |n| n.to_string()),
        ];
        table([shown.path.as_str(), "used", "limit", "share"], rows)
    })
}

/// `hither sclass set NAME PATH`.
pub(crate) fn set_class(
    path: &Path,
    name: &str,
    recursive: bool,
    output: Output,
) -> anyhow::Result<()> {
    let (mut count, mut kept) = (0u64, 0u64);
    let progress = ProgressBar::new_spinner();
    let mut todo = vec![path.to_owned()];
    while let Some(path) = todo.pop() {
        let about = path.symlink_metadata()?;
        let has_data = about.is_file() && about.len() > 0;
        let stays = has_data && attribute(&path, "hither.class")? != name;
        set_attribute(&path, "hither.class", name)?;
        count += 1;
        kept += u64::from(stays);
        progress.set_message(format!("{count} set"));
        progress.tick();
        if recursive && about.is_dir() {
            for entry in std::fs::read_dir(&path)? {
                let entry = entry?;
                if !entry.file_type()?.is_symlink() {
                    todo.push(entry.path());
                }
            }
        }
    }
    progress.finish_and_clear();
    output.done(&class_given(name, count, kept));
    Ok(())
}

/// What giving so many files and directories a class did, `kept` of which have data.
fn class_given(name: &str, count: u64, kept: u64) -> String {
    let all = counted(count, "file or directory", "files and directories");
    let mut text = format!(
        "{all} now {} class {name}",
        if count == 1 { "has" } else { "have" }
    );
    if kept > 0 {
        text.push_str(&format!(
            "\n{} of another class: what is written stays with the copies it has, and only new \
             64 MiB pieces get those of {name}; a copy of the file (`cp`) gets them for all",
            counted(kept, "file has data", "files have data"),
        ));
    }
    text
}

fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

fn attribute(path: &Path, name: &str) -> anyhow::Result<String> {
    let mut value = vec![0; VALUE_BYTES_MAX];
    match rustix::fs::getxattr(path, name, &mut value[..]) {
        Ok(length) => {
            value.truncate(length);
            Ok(String::from_utf8(value)?)
        }
        Err(error) => Err(explain(path, error)),
    }
}

fn set_attribute(path: &Path, name: &str, value: &str) -> anyhow::Result<()> {
    let flags = rustix::fs::XattrFlags::empty();
    match rustix::fs::setxattr(path, name, value.as_bytes(), flags) {
        Ok(()) => Ok(()),
        Err(Errno::NOENT) if path.exists() => bail!("there is no storage class {value:?}"),
        Err(error) => Err(explain(path, error)),
    }
}

fn explain(path: &Path, error: Errno) -> anyhow::Error {
    let path = path.display();
    match error {
        Errno::OPNOTSUPP | Errno::NODATA => anyhow::anyhow!("{path} is not on a mount of hither"),
        other => anyhow::anyhow!("{path}: {other}"),
    }
}

/// Largest value the kernel passes.
const VALUE_BYTES_MAX: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    /// A mount that was made before an update could not be asked any more.
    #[test]
    fn counters_of_an_older_mount_are_read() {
        let old = r#"{"by_locality": {"own": {"reads": 3, "read_bytes": 70}}, "hedge_wins": 2}"#;
        let read: Locality = serde_json::from_str(old).unwrap();
        assert_eq!(read.by_locality["own"].read_bytes, 70);
        assert_eq!((read.hedge_wins, read.write_back_waits), (2, 0));
        let new = r#"{"byLocality": {"own": {"readBytes": 70}}, "writeBackWaits": 5}"#;
        let read: Locality = serde_json::from_str(new).unwrap();
        assert_eq!(read.by_locality["own"].read_bytes, 70);
        assert_eq!(read.write_back_waits, 5);
    }

    #[test]
    fn data_that_keeps_its_copies_is_told() {
        assert_eq!(
            class_given("s1", 1, 0),
            "1 file or directory now has class s1"
        );
        let text = class_given("s1", 5, 2);
        assert!(text.contains("5 files and directories now have"), "{text}");
        assert!(
            text.contains("2 files have data of another class"),
            "{text}"
        );
        assert!(text.contains("stays with the copies it has"), "{text}");
    }

    fn chunk(index: u32, as_class_asks: bool) -> Chunk {
        let text = format!(
            r#"{{"index": {index}, "chunk": 7, "group": 1, "epoch": 1, "servers": [],
                 "asClassAsks": {as_class_asks}}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn copies_that_are_not_those_of_the_class_are_told_and_so_is_an_empty_file() {
        let path = Path::new("/mnt/f");
        let empty = show_places(path, &[], "");
        assert!(empty.contains("/mnt/f is empty"), "{empty}");
        let text = show_places(path, &[chunk(0, true)], "");
        assert!(!text.contains("storage class"), "{text}");
        let text = show_places(path, &[chunk(0, false), chunk(1, true)], "s1");
        assert!(text.contains("1 of 2 pieces were written before"), "{text}");
        assert!(text.contains("storage class s1"), "{text}");
        let old = r#"{"index": 0, "chunk": 0, "group": 0, "epoch": 0, "servers": []}"#;
        let old: Chunk = serde_json::from_str(old).unwrap();
        assert!(old.as_class_asks, "an older mount does not say");
    }
}
