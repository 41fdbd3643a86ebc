//! A whole cluster as processes on this machine.

mod processes;
mod state;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use hither_managerlink::ManagerLink;
use hither_proto::map::ServerState;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tokio::time::Instant;

use crate::args::{Playground, PlaygroundDown, PlaygroundUp};
use crate::cluster;
use crate::output::{Output, table};
use crate::roles::terminated;
use processes::{is_running, send, spawn, wait_gone};
use state::{Process, State};

/// Time the cluster has to get ready.
const READY_IN: Duration = Duration::from_secs(60);
/// Time a process has to end by itself.
const END_IN: Duration = Duration::from_secs(20);
/// A process that ends sooner was not started.
const LIVES_FOR: Duration = Duration::from_millis(300);
/// Time the cluster has to say where it is mounted.
const MOUNTS_IN: Duration = Duration::from_secs(2);

pub(crate) async fn run(playground: Playground, output: Output) -> anyhow::Result<()> {
    match playground {
        Playground::Up(up) => start(up, output).await,
        Playground::Status(at) => status(&at.dir, output),
        Playground::Kill(n) => signal_each(
            &n.at.dir,
            &n.name,
            rustix::process::Signal::KILL,
            true,
            output,
        ),
        Playground::Pause(n) => signal_each(
            &n.at.dir,
            &n.name,
            rustix::process::Signal::STOP,
            false,
            output,
        ),
        Playground::Resume(n) => signal_each(
            &n.at.dir,
            &n.name,
            rustix::process::Signal::CONT,
            false,
            output,
        ),
        Playground::Start(n) => restart(&n.at.dir, &n.name, output).await,
        Playground::Down(down) => stop(&down, output).await,
    }
}

async fn start(up: PlaygroundUp, output: Output) -> anyhow::Result<()> {
    match up.store.as_str() {
        "embedded" => {}
        "etcd" if cfg!(feature = "etcd") => {}
        "etcd" => bail!("this build has no etcd backend: build with `--features etcd`"),
        other => bail!("there is no store {other:?}: use embedded or etcd"),
    }
    if up.zones.is_empty() || up.chunkservers_per_zone == 0 {
        bail!("a cluster needs at least one zone and one chunkserver in each");
    }
    check_zones(&up.zones)?;
    let dir = &up.at.dir;
    let mut state = match State::load(dir)? {
        Some(state) => {
            if state.processes.iter().any(is_running) {
                bail!(
                    "a playground is running in {}: end it with `hither playground down --dir {}`",
                    dir.display(),
                    dir.display()
                );
            }
            state
        }
        None => State::new(&up)?,
    };
    let all: Vec<String> = state.processes.iter().map(|p| p.name.clone()).collect();
    start_each(dir, &mut state, &all, LIVES_FOR)?;
    wait_ready(dir, &state).await?;
    output.print(&state, |state| {
        format!(
            "cluster ready: {} processes, manager at {}\n\n\
             export HITHER_CLUSTER={}\n\
             hither status\n\
             hither mount {} DIRECTORY -o preflabels=zone={}",
            state.processes.len(),
            state.cluster,
            state.cluster,
            state.cluster,
            state.zones.first().map_or("a", String::as_str),
        )
    })?;
    if up.foreground {
        terminated().await?;
        let down = PlaygroundDown {
            at: up.at,
            delete: false,
        };
        return stop(&down, output).await;
    }
    Ok(())
}

/// Waits until the manager leads, a rank serves and every chunkserver is up.
async fn wait_ready(dir: &Path, state: &State) -> anyhow::Result<()> {
    let link: ManagerLink = cluster::link_to(cluster::manager_addresses(&state.cluster)?);
    let wanted = state.processes.iter().filter(|p| p.zone.is_some()).count();
    let progress = ProgressBar::new(wanted as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} chunkservers up") {
        progress.set_style(style);
    }
    let deadline = Instant::now() + READY_IN;
    let mut map = link.watch();
    loop {
        let (up, served, grouped) = {
            let map = map.borrow_and_update();
            let up = map
                .servers()
                .filter(|(_, s)| s.chunkserver.state == i32::from(ServerState::Up))
                .count();
            (
                up,
                map.ranks().next().is_some(),
                map.groups().next().is_some(),
            )
        };
        progress.set_position(up as u64);
        if up >= wanted && served && grouped {
            progress.finish_and_clear();
            return Ok(());
        }
        if let Some(dead) = state.processes.iter().find(|p| !is_running(p)) {
            bail!("{}", has_ended(dir, dead));
        }
        let changed = tokio::time::timeout(Duration::from_millis(500), map.changed()).await;
        if changed.is_err() && Instant::now() >= deadline {
            bail!(
                "the cluster is not ready after {} s: see the logs in {}",
                READY_IN.as_secs(),
                dir.join("log").display()
            );
        }
    }
}

/// A process as `status` shows it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    name: String,
    zone: String,
    address: String,
    pid: u32,
    state: String,
}

fn status(dir: &Path, output: Output) -> anyhow::Result<()> {
    let state = State::load(dir)?.with_context(|| no_playground(dir))?;
    let all: Vec<Shown> = state
        .processes
        .iter()
        .map(|process| Shown {
            name: process.name.clone(),
            zone: process.zone.clone().unwrap_or_default(),
            address: process.address.clone(),
            pid: process.pid,
            state: processes::state_of(process).to_owned(),
        })
        .collect();
    output.print(&all, |all| {
        let rows = all
            .iter()
            .map(|p| {
                [
                    p.name.clone(),
                    p.zone.clone(),
                    p.address.clone(),
                    p.pid.to_string(),
                    p.state.clone(),
                ]
            })
            .collect();
        table(["NAME", "ZONE", "ADDRESS", "PID", "STATE"], rows)
    })
}

fn signal_each(
    dir: &Path,
    name: &str,
    signal: rustix::process::Signal,
    ends: bool,
    output: Output,
) -> anyhow::Result<()> {
    let state = State::load(dir)?.with_context(|| no_playground(dir))?;
    let chosen = Chosen::of(&state, name)?;
    if chosen.running.is_empty() {
        bail!("{}", are(&chosen.ended, "not running"));
    }
    let to: Vec<&Process> = state
        .processes
        .iter()
        .filter(|process| chosen.running.contains(&process.name))
        .collect();
    for process in &to {
        send(process, signal)?;
    }
    if ends {
        for process in &to {
            wait_gone(process, END_IN)?;
        }
    }
    let others = but(&chosen.ended, "not running");
    output.done(&format!("{}: done{others}", chosen.running.join(", ")));
    Ok(())
}

async fn restart(dir: &Path, name: &str, output: Output) -> anyhow::Result<()> {
    let mut state = State::load(dir)?.with_context(|| no_playground(dir))?;
    let chosen = Chosen::of(&state, name)?;
    if chosen.ended.is_empty() {
        bail!("{}", are(&chosen.running, "running already"));
    }
    start_each(dir, &mut state, &chosen.ended, LIVES_FOR)?;
    if state.processes.iter().all(is_running) {
        wait_ready(dir, &state).await?;
    }
    let others = but(&chosen.running, "running already");
    output.done(&format!("{}: started{others}", chosen.ended.join(", ")));
    Ok(())
}

/// Starts processes and sees that they live. Whatever becomes of them, those that were started are
/// in the state: `down` ends them.
fn start_each(
    dir: &Path,
    state: &mut State,
    names: &[String],
    lives_for: Duration,
) -> anyhow::Result<()> {
    let mut failed = None;
    for process in state.processes.iter_mut() {
        if names.contains(&process.name)
            && let Err(error) = spawn(dir, process)
        {
            failed = Some(error);
            break;
        }
    }
    state.save(dir)?;
    if let Some(error) = failed {
        return Err(error);
    }
    let until = Instant::now() + lives_for;
    for process in state.processes.iter().filter(|p| names.contains(&p.name)) {
        let left = until.saturating_duration_since(Instant::now());
        if wait_gone(process, left).is_ok() {
            bail!("{}", has_ended(dir, process));
        }
    }
    Ok(())
}

fn has_ended(dir: &Path, process: &Process) -> String {
    let log = state::log_path(dir, &process.name);
    format!("{} has ended: see {}", process.name, log.display())
}

/// Names of the processes somebody asked for.
#[derive(Debug, PartialEq, Eq)]
struct Chosen {
    running: Vec<String>,
    ended: Vec<String>,
}

impl Chosen {
    /// The process of that name, or all chunkservers of a zone.
    fn of(state: &State, name: &str) -> anyhow::Result<Self> {
        let (running, ended): (Vec<_>, Vec<_>) =
            state.chosen(name)?.into_iter().partition(|p| is_running(p));
        let names = |of: Vec<&Process>| of.iter().map(|p| p.name.clone()).collect();
        Ok(Self {
            running: names(running),
            ended: names(ended),
        })
    }
}

/// `a, b are running`.
fn are(names: &[String], what: &str) -> String {
    let are = if names.len() == 1 { "is" } else { "are" };
    format!("{} {are} {what}", names.join(", "))
}

/// What is to be added about those nothing was done to.
fn but(names: &[String], what: &str) -> String {
    if names.is_empty() {
        String::new()
    } else {
        format!(" ({})", are(names, what))
    }
}

async fn stop(down: &PlaygroundDown, output: Output) -> anyhow::Result<()> {
    let dir = &down.at.dir;
    let state = State::load(dir)?.with_context(|| no_playground(dir))?;
    let mounts = open_mounts(&state).await;
    if !mounts.is_empty() {
        eprintln!("hither: warning: {}", left_open(&mounts, dir, down.delete));
    }
    // The store last: what others have not written yet they write before they end.
    let (store, others): (Vec<&Process>, Vec<&Process>) =
        state.processes.iter().partition(|p| p.is_store());
    end_all(&others)?;
    end_all(&store)?;
    if down.delete {
        std::fs::remove_dir_all(dir).with_context(|| format!("remove {}", dir.display()))?;
    }
    output.done("playground ended");
    Ok(())
}

/// Where the cluster is mounted; nowhere, as far as a cluster says that does not answer any more.
async fn open_mounts(state: &State) -> Vec<String> {
    if !state.processes.iter().any(is_running) {
        return Vec::new();
    }
    let Ok(addresses) = cluster::manager_addresses(&state.cluster) else {
        return Vec::new();
    };
    let link = cluster::link_to(addresses);
    let asked = crate::admin::session::mounts(&link, MOUNTS_IN);
    match tokio::time::timeout(MOUNTS_IN, asked).await {
        Ok(Ok(mounts)) => mounts,
        Ok(Err(_)) | Err(_) => Vec::new(),
    }
}

/// What becomes of mounts whose cluster ends.
fn left_open(mounts: &[String], dir: &Path, delete: bool) -> String {
    let (count, places) = (mounts.len(), mounts.join(", "));
    let have = if count == 1 { "mount is" } else { "mounts are" };
    let fate = if delete {
        "what was not stored yet is lost, and what is done there fails until it is unmounted".into()
    } else {
        format!(
            "what is done there waits, and fails after the mount's timeout, until `hither \
             playground up --dir {}` starts the cluster again; `umount` ends a mount",
            dir.display()
        )
    };
    format!("{count} {have} still open ({places}): {fate}")
}

/// Zones become labels: their names follow the rule for those, and each is there once.
fn check_zones(zones: &[String]) -> anyhow::Result<()> {
    for (at, zone) in zones.iter().enumerate() {
        hither_labels::WordLabel::new("zone", zone)
            .with_context(|| format!("zone {zone:?} (--zones)"))?;
        if zones[..at].contains(zone) {
            bail!("zone {zone:?} is named twice (--zones)");
        }
    }
    Ok(())
}

/// Ends processes and waits for them.
fn end_all(processes: &[&Process]) -> anyhow::Result<()> {
    // Chunkservers first: the manager need not watch them go.
    for process in processes.iter().rev().filter(|p| is_running(p)) {
        send(process, rustix::process::Signal::CONT)?;
        send(process, rustix::process::Signal::TERM)?;
    }
    for process in processes.iter().rev() {
        if wait_gone(process, END_IN).is_err() {
            eprintln!(
                "hither: {} does not end by itself: killing it",
                process.name
            );
            send(process, rustix::process::Signal::KILL)?;
            wait_gone(process, END_IN)?;
        }
    }
    Ok(())
}

fn no_playground(dir: &Path) -> String {
    format!(
        "there is no playground in {}: `hither playground up` makes one",
        dir.display()
    )
}

impl State {
    /// The process of that name, or all chunkservers of a zone.
    fn chosen(&self, name: &str) -> anyhow::Result<Vec<&Process>> {
        let named: Vec<&Process> = self.processes.iter().filter(|p| p.name == name).collect();
        if !named.is_empty() {
            return Ok(named);
        }
        let zone: Vec<&Process> = self
            .processes
            .iter()
            .filter(|p| p.zone.as_deref() == Some(name))
            .collect();
        if zone.is_empty() {
            let names: Vec<&str> = self.processes.iter().map(|p| p.name.as_str()).collect();
            bail!("there is no {name:?}: there are {}", names.join(", "));
        }
        Ok(zone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zones_are_labels_and_differ() {
        let check = |zones: &[&str]| {
            let zones: Vec<String> = zones.iter().map(|&z| z.to_owned()).collect();
            check_zones(&zones).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(check(&["a", "eu-1a", "B.2_x"]), Ok(()));
        for wrong in ["", "a b", "a/b", "zone=a", "ü", &"x".repeat(64)] {
            let error = check(&["a", wrong]).unwrap_err();
            assert!(error.contains("--zones"), "{error}");
        }
        assert!(check(&["a", "b", "a"]).unwrap_err().contains("twice"));
    }

    fn sleeper(name: &str, program: &str) -> Process {
        Process {
            name: name.into(),
            zone: Some("a".into()),
            address: String::new(),
            program: program.into(),
            args: vec!["600".into()],
            pid: 0,
            started: 0,
        }
    }

    fn zone_a(dir: &Path, programs: &[&str]) -> State {
        let names = ["cs-a1", "cs-a2"];
        let state = State {
            cluster: "127.0.0.1:1".into(),
            zones: vec!["a".into()],
            processes: names
                .iter()
                .zip(programs)
                .map(|(name, program)| sleeper(name, program))
                .collect(),
        };
        state.save(dir).unwrap();
        state
    }

    fn stored(dir: &Path) -> State {
        State::load(dir).unwrap().unwrap()
    }

    const QUIET: Output = Output { json: true };

    /// One of two ran: the other was started, and forgotten at once.
    #[tokio::test]
    async fn of_a_zone_what_is_down_is_started_and_what_runs_is_signalled() {
        let at = tempfile::tempdir().unwrap();
        let dir = at.path();
        let mut state = zone_a(dir, &["sleep", "sleep"]);
        // A process that never runs keeps the zone from being waited for.
        state.processes.push(sleeper("manager", "sleep"));
        state.processes[2].zone = None;
        start_each(dir, &mut state, &["cs-a2".into()], LIVES_FOR).unwrap();
        restart(dir, "a", QUIET).await.unwrap();
        let now = stored(dir);
        assert!(now.processes[..2].iter().all(is_running), "{now:?}");
        assert_eq!(now.processes[1].pid, state.processes[1].pid, "left alone");
        let again = restart(dir, "a", QUIET).await.unwrap_err().to_string();
        assert_eq!(again, "cs-a1, cs-a2 are running already");
        let kill = rustix::process::Signal::KILL;
        signal_each(dir, "cs-a1", kill, true, QUIET).unwrap();
        signal_each(dir, "a", kill, true, QUIET).unwrap();
        assert!(!stored(dir).processes.iter().any(is_running));
        let again = signal_each(dir, "a", kill, true, QUIET).unwrap_err();
        assert!(again.to_string().contains("are not running"), "{again}");
    }

    #[test]
    fn what_was_started_is_known_whatever_became_of_the_others() {
        let at = tempfile::tempdir().unwrap();
        let dir = at.path();
        let cases = [
            (["true", "sleep"], 1, "cs-a1 has ended"),
            (["sleep", "/no/such/program"], 0, "start cs-a2"),
        ];
        for (programs, lives, said) in cases {
            let mut state = zone_a(dir, &programs);
            let both = ["cs-a1".to_owned(), "cs-a2".to_owned()];
            let error = start_each(dir, &mut state, &both, END_IN).unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
            let state = stored(dir);
            let living = &state.processes[lives];
            assert!(is_running(living), "{state:?}");
            send(living, rustix::process::Signal::KILL).unwrap();
            wait_gone(living, END_IN).unwrap();
        }
    }

    #[test]
    fn mounts_that_stay_open_are_named_with_what_becomes_of_them() {
        let mounts = ["/mnt/a on here".to_owned(), "/mnt/b on there".to_owned()];
        let text = left_open(&mounts, Path::new("play"), false);
        assert!(text.contains("2 mounts are still open (/mnt/a on here, /mnt/b on there)"));
        assert!(text.contains("playground up --dir play"), "{text}");
        assert!(left_open(&mounts[..1], Path::new("play"), true).contains("lost"));
    }
}
