//! Starting, watching and ending processes, each told from others by id and start time.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::state::{Process, log_path};

/// Starts a process in the background.
pub(super) fn spawn(dir: &Path, process: &mut Process) -> anyhow::Result<()> {
    let log = log_path(dir, &process.name);
    if let Some(parent) = log.parent() {
        std::fs::create_dir_all(parent)?;
    }
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(log)?;
    let program = if process.program.is_empty() {
        std::env::current_exe().context("find this program")?
    } else {
        process.program.clone().into()
    };
    let child = Command::new(program)
        .args(&process.args)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()
        .with_context(|| format!("start {}: is it installed?", process.name))?;
    process.pid = child.id();
    process.started = start_time(process.pid).unwrap_or(0);
    Ok(())
}

/// Whether this very process is there (and not merely a zombie).
pub(super) fn is_running(process: &Process) -> bool {
    is_there(process) && (!matches!(letter(process.pid), None | Some('Z' | 'X')) || ends(process))
}

/// Whether the process has an entry in the system's table.
fn is_there(process: &Process) -> bool {
    process.pid != 0 && start_time(process.pid) == Some(process.started)
}

/// Whether other threads of a process whose first one is a zombie are still at work, such as one
/// that waits for a disk: until they are done the process has its files and locks.
fn ends(process: &Process) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{}/task", process.pid));
    threads.is_ok_and(|threads| threads.count() > 1)
}

/// What a process does, in a word.
pub(super) fn state_of(process: &Process) -> &'static str {
    if !is_running(process) {
        return "ended";
    }
    match letter(process.pid) {
        Some('T' | 't') => "paused",
        _ => "running",
    }
}

/// Sends a signal to this very process.
pub(super) fn send(process: &Process, signal: Signal) -> anyhow::Result<()> {
    if !is_running(process) {
        return Ok(());
    }
    let pid = i32::try_from(process.pid)
        .ok()
        .and_then(Pid::from_raw)
        .context("process id")?;
    match kill_process(pid, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("signal {}", process.name)),
    }
}

/// Waits until the process is gone.
pub(super) fn wait_gone(process: &Process, at_most: Duration) -> anyhow::Result<()> {
    let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw);
    if !is_there(process) {
        return Ok(());
    }
    let Some(pid) = pid else { return Ok(()) };
    // A descriptor of the process becomes readable when it ends: no polling.
    let descriptor = match rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
        Ok(descriptor) => descriptor,
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let mut watched = [rustix::event::PollFd::new(
        &descriptor,
        rustix::event::PollFlags::IN,
    )];
    let timeout = rustix::event::Timespec::try_from(at_most)?;
    let ready = rustix::event::poll(&mut watched, Some(&timeout))?;
    if ready == 0 {
        bail!(
            "{} has not ended within {} s",
            process.name,
            at_most.as_secs()
        );
    }
    Ok(())
}

fn letter(pid: u32) -> Option<char> {
    stat_fields(pid)?.first()?.chars().next()
}

fn start_time(pid: u32) -> Option<u64> {
    // Field 22 of /proc/PID/stat; the list begins with field 3.
    stat_fields(pid)?.get(19)?.parse().ok()
}

fn stat_fields(pid: u32) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, after_name) = text.rsplit_once(')')?;
    Some(after_name.split_whitespace().map(str::to_owned).collect())
}
