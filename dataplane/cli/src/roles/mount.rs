//! The mount, in the foreground or as a process of its own.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use hither_mount::MountError;
use hither_mount::options::Options;

use super::{Signals, addresses, ending};
use crate::args;
use crate::output::Output;

/// Set for the process that stays: it says so on its standard output when it is ready.
const STAYS: &str = "HITHER_MOUNT_STAYS";
const READY: &str = "ready";

/// Mounts; returns when the mount stands (or, in the foreground, when it has ended).
pub(crate) fn run(mount: args::Mount, output: Output) -> anyhow::Result<()> {
    // A list that does not parse stops here, before anything is started or mounted.
    let options = Options::parse(&mount.options)?;
    for warning in &options.warnings {
        eprintln!("hither: warning: {warning}");
    }
    if !mount.directory.is_dir() {
        bail!("{} is no directory to mount at", mount.directory.display());
    }
    let stays = std::env::var_os(STAYS).is_some();
    if !mount.foreground && !stays {
        return in_background(&mount, output);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8)))
        .enable_all()
        .build()?;
    runtime.block_on(serve(mount, &options, stays))
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
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    if line.trim() == READY {
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

async fn serve(mount: args::Mount, options: &Options, stays: bool) -> anyhow::Result<()> {
    let (managers, subdirectory) = split_source(&mount.source);
    let managers = addresses(&managers);
    if managers.is_empty() {
        bail!(
            "{:?} names no manager: write HOST:PORT[:/SUBDIR]",
            mount.source
        );
    }
    let directory: PathBuf = std::fs::canonicalize(&mount.directory)?;
    let mounted = loop {
        let attempt =
            hither_mount::mount(managers.clone(), &subdirectory, &directory, options).await;
        match attempt {
            Ok(mounted) => break mounted,
            Err(MountError::Start(error)) if mount.wait => {
                tracing::info!(%error, "waiting for the cluster");
                tokio::time::sleep(RETRY).await;
            }
            Err(error) => return Err(error.into()),
        }
    };
    // From here on no signal ends the process where it stands.
    let ended = asked_to_end(mount.stay_mounted)?;
    if stays {
        let mut out = std::io::stdout();
        writeln!(out, "{READY}")?;
        out.flush()?;
        leave_terminal(mount.log.as_deref())?;
    } else {
        println!("mounted at {}", directory.display());
    }
    let asked = tokio::select! {
        () = mounted.gone() => false,
        () = ended => true,
    };
    ending(mounted.unmount(), asked)
        .await?
        .map_err(|error| anyhow::anyhow!("data could not be stored: {error}"))
}

/// Waits for a signal that ends the mount. One that stays takes signals and goes on: without a
/// process the mount point would be dead for everybody who uses it.
fn asked_to_end(stays_mounted: bool) -> anyhow::Result<impl Future<Output = ()>> {
    let mut signals = Signals::listen()?;
    Ok(async move {
        loop {
            signals.next().await;
            if !stays_mounted {
                return;
            }
            tracing::info!("stays mounted until it is unmounted");
        }
    })
}

/// Whoever started the mount must not wait for its output.
fn leave_terminal(log: Option<&std::path::Path>) -> anyhow::Result<()> {
    let target = match log {
        Some(path) => std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)?,
        None => std::fs::OpenOptions::new().write(true).open("/dev/null")?,
    };
    rustix::stdio::dup2_stdout(&target)?;
    rustix::stdio::dup2_stderr(&target)?;
    Ok(())
}

/// `HOST:PORT[,HOST:PORT…][:/SUBDIR]`.
fn split_source(source: &str) -> (String, String) {
    match source.split_once(":/") {
        Some((managers, subdirectory)) => (managers.to_owned(), format!("/{subdirectory}")),
        None => (source.to_owned(), String::new()),
    }
}

/// Pause before the cluster is looked for again.
const RETRY: Duration = Duration::from_millis(500);

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
}
