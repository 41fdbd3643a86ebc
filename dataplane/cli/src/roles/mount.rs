//! The mount, in the foreground or as a process of its own.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use hither_mount::options::Options;
use hither_mount::{MountError, Mounted};

use super::{Signals, announce, ending};
use crate::args;
use crate::cluster;
use crate::output::Output;

/// Set for the process that stays: it says so on its standard output when it is ready.
const STAYS: &str = "HITHER_MOUNT_STAYS";
const READY: &str = "ready";

/// Mounts; returns when the mount stands (or, in the foreground, when it has ended).
pub(crate) fn run(mount: args::Mount, cluster: Option<&str>, output: Output) -> anyhow::Result<()> {
    // A list that does not parse stops here, before anything is started or mounted.
    let options = Options::parse(&mount.options)?;
    let source = Source::of(mount.source.as_deref(), cluster)?;
    let stays = std::env::var_os(STAYS).is_some();
    for warning in options.warnings.iter().filter(|_| !stays) {
        eprintln!("hither: warning: {warning}");
    }
    if !mount.directory.is_dir() {
        bail!("{} is no directory to mount at", mount.directory.display());
    }
    if !mount.foreground && !stays {
        return in_background(&mount, output);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8)))
        .enable_all()
        .build()?;
    let done = runtime.block_on(serve(mount, &source, &options, stays));
    if done.is_err() {
        // The system may still be looking for a name that nobody knows.
        runtime.shutdown_timeout(LINGER);
    }
    done
}

/// Starts the process that stays and waits until it is ready or has failed.
fn in_background(mount: &args::Mount, output: Output) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("find this program")?;
    let mut child = Command::new(program)
        .args(
            args::as_mount_helper(std::env::args_os())
                .into_iter()
                .skip(1),
        )
        .env(STAYS, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .context("start the mount's process")?;
    let stdout = child
        .stdout
        .take()
        .context("read from the mount's process")?;
    let mut is_ready = false;
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        if line == READY {
            is_ready = true;
            break;
        }
        eprintln!("hither: {line}");
    }
    if is_ready {
        output.done(&format!(
            "mounted at {} (process {})",
            mount.directory.display(),
            child.id()
        ));
        return Ok(());
    }
    let failed = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&failed.stderr);
    bail!("{}", said.trim().trim_start_matches("hither: "));
}

async fn serve(
    mount: args::Mount,
    source: &Source,
    options: &Options,
    stays: bool,
) -> anyhow::Result<()> {
    let directory: PathBuf = std::fs::canonicalize(&mount.directory)?;
    // What goes wrong with it has to be said before the mount stands.
    let log = if stays {
        Some(log_file(mount.log.as_deref())?)
    } else {
        None
    };
    if !mount.wait {
        let (at_most, refused_for) = if mount.patient {
            // That nobody listens says more than that nobody answered in time.
            (options.timeout, options.timeout.mul_f32(0.9))
        } else {
            let at_most = cluster::REACH_IN.min(options.timeout);
            (at_most, cluster::REFUSED_FOR)
        };
        cluster::reach(&source.managers, at_most, refused_for).await?;
    }
    // From here on no signal ends the process where it stands: the mount point would be dead.
    let mut signals = Signals::listen()?;
    let mounted = tokio::select! {
        mounted = mount_at(&mount, source, &directory, options) => mounted?,
        never = tell_waiting(source, stays) => match never {},
        // What waits has not mounted yet.
        () = signals.next() => bail!("asked to end before it was mounted"),
    };
    for advice in mounted.advice() {
        tell(stays, &format!("warning: {advice}"));
    }
    let ended = asked_to_end(signals, mount.stay_mounted);
    match log {
        Some(log) => {
            tell(true, READY);
            if let Err(error) = leave_terminal(&log) {
                tracing::warn!(%error, "the log cannot be written to");
            }
            for warning in options.warnings.iter().chain(mounted.advice()) {
                tracing::warn!("{warning}");
            }
        }
        None => announce(&format!("mounted at {}", directory.display())),
    }
    let asked = tokio::select! {
        () = mounted.gone() => false,
        () = ended => true,
    };
    ending(mounted.unmount(), asked)
        .await?
        .map_err(|error| anyhow::anyhow!("data could not be stored: {error}"))
}

/// Mounts; with `--wait`, as soon as the cluster can be used.
async fn mount_at(
    mount: &args::Mount,
    source: &Source,
    directory: &Path,
    options: &Options,
) -> anyhow::Result<Mounted> {
    loop {
        let managers = source.managers.clone();
        let attempt = hither_mount::mount(managers, &source.directory, directory, options).await;
        match attempt {
            Ok(mounted) => return Ok(mounted),
            Err(MountError::Start(error)) if mount.wait => {
                tracing::info!(%error, "waiting for the cluster");
                tokio::time::sleep(RETRY).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Says after a moment what the mount waits for.
async fn tell_waiting(source: &Source, stays: bool) -> std::convert::Infallible {
    tokio::time::sleep(NOTICE_AFTER).await;
    let managers = source.managers.join(", ");
    tell(stays, &format!("waiting for the cluster at {managers}"));
    std::future::pending().await
}

/// A line for whoever mounts: the process that stays says it to the one that started it. Where nobody
/// listens the mount is made, and goes on, all the same.
fn tell(stays: bool, line: &str) {
    if stays {
        announce(line);
    } else if let Err(error) = writeln!(std::io::stderr(), "hither: {line}") {
        tracing::debug!(%error, line, "nobody reads the standard error");
    }
}

/// Waits for a signal that ends the mount. One that stays takes signals and goes on: without a
/// process the mount point would be dead for everybody who uses it.
async fn asked_to_end(mut signals: Signals, stays_mounted: bool) {
    loop {
        signals.next().await;
        if !stays_mounted {
            return;
        }
        tracing::info!("stays mounted until it is unmounted");
    }
}

/// Where a mount in the background writes to.
fn log_file(path: Option<&Path>) -> anyhow::Result<File> {
    let mut options = OpenOptions::new();
    let path = match path {
        Some(path) => {
            options.create(true).append(true);
            path
        }
        None => {
            options.write(true);
            Path::new("/dev/null")
        }
    };
    let opened = options.open(path);
    opened.with_context(|| format!("open the log {}", path.display()))
}

/// Whoever started the mount must not wait for its output.
fn leave_terminal(log: &File) -> anyhow::Result<()> {
    rustix::stdio::dup2_stdout(log)?;
    rustix::stdio::dup2_stderr(log)?;
    Ok(())
}

/// What is mounted.
#[derive(Debug, PartialEq, Eq)]
struct Source {
    managers: Vec<String>,
    /// Directory inside the cluster, empty for its root.
    directory: String,
}

impl Source {
    /// Reads `HOST:PORT[,HOST:PORT…][:/SUBDIR]`; the addresses may be those of `--cluster`.
    fn of(source: Option<&str>, cluster: Option<&str>) -> anyhow::Result<Self> {
        let source = source.unwrap_or(":/");
        if source.contains("://") {
            bail!("{source:?} is no source: write HOST:PORT[:/SUBDIR] without a scheme");
        }
        let (managers, directory) = split_source(source);
        let managers = match (managers.as_str(), cluster) {
            ("", Some(cluster)) => cluster,
            ("", None) => bail!(
                "which cluster? write HOST:PORT before the directory, give --cluster HOST:PORT or \
                 set HITHER_CLUSTER"
            ),
            (managers, _) => managers,
        };
        Ok(Self {
            managers: cluster::manager_addresses(managers)?,
            directory,
        })
    }
}

fn split_source(source: &str) -> (String, String) {
    match source.split_once(":/") {
        Some((managers, subdirectory)) => (managers.to_owned(), format!("/{subdirectory}")),
        None => (source.to_owned(), String::new()),
    }
}

/// Pause before the cluster is looked for again.
const RETRY: Duration = Duration::from_millis(500);
/// After this long it is said what the mount waits for.
const NOTICE_AFTER: Duration = Duration::from_secs(2);
/// Time for what a failed mount has left behind.
const LINGER: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources() {
        let split = |text: &str| split_source(text);
        assert_eq!(split("h:1"), ("h:1".into(), String::new()));
        assert_eq!(
            split("h:1,g:2:/data/x"),
            ("h:1,g:2".into(), "/data/x".into())
        );
        assert_eq!(split("[::1]:7650:/"), ("[::1]:7650".into(), "/".into()));
    }

    #[test]
    fn the_cluster_of_the_environment_is_mounted_when_none_is_named() {
        let source = |source, cluster| Source::of(source, cluster);
        let made = |managers: &[&str], directory: &str| Source {
            managers: managers.iter().map(|&m| m.to_owned()).collect(),
            directory: directory.into(),
        };
        assert_eq!(
            source(None, Some("h:1,g:2")).unwrap(),
            made(&["h:1", "g:2"], "/")
        );
        assert_eq!(
            source(Some(":/data"), Some("h:1")).unwrap(),
            made(&["h:1"], "/data")
        );
        assert_eq!(
            source(Some("x:9:/data"), Some("h:1")).unwrap(),
            made(&["x:9"], "/data")
        );
        assert_eq!(source(Some("x:9"), None).unwrap(), made(&["x:9"], ""));
        let error = source(None, None).unwrap_err().to_string();
        assert!(error.contains("HITHER_CLUSTER"), "{error}");
        assert!(source(Some("nonsense"), None).is_err());
    }
}
