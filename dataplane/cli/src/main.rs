//! The `hither` command: every role of a cluster, and what people ask of it.
#![forbid(unsafe_code)]

mod admin;
mod args;
mod cluster;
mod output;
mod playground;
mod roles;

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser as _;

use args::{Args, Command};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let args = Args::parse_from(args::as_mount_helper(std::env::args_os()));
    start_log();
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hither: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    let output = output::Output { json: args.json };
    match args.command {
        // Its parent part must not run threads: it becomes the mount's keeper.
        Command::Mount(mount) => roles::mount::run(mount, args.cluster.as_deref(), output),
        command => {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(worker_threads())
                .enable_all()
                .build()?;
            let done = runtime.block_on(dispatch(command, args.cluster, output));
            if done.is_err() {
                // The system may still be looking for a name that nobody knows.
                runtime.shutdown_timeout(LINGER);
            }
            done
        }
    }
}

async fn dispatch(
    command: Command,
    cluster: Option<String>,
    output: output::Output,
) -> anyhow::Result<()> {
    match command {
        Command::Manager(manager) => roles::manager::run(manager).await,
        Command::Mds(mds) => roles::mds::run(mds).await,
        Command::Chunkserver(chunkserver) => roles::chunkserver::run(chunkserver).await,
        Command::Mount(_) => Ok(()),
        Command::Mounter(mounter) => roles::mounter::run(&mounter.socket, mounter.memory).await,
        Command::Playground(playground) => playground::run(playground, output).await,
        Command::Where { path } => admin::paths::places(&path, output),
        Command::Locality { mount } => admin::paths::locality(&mount, output),
        Command::Quota(quota) => admin::paths::quota(&quota, output),
        Command::Meta(meta) => admin::meta::run(meta, cluster, output).await,
        Command::Status => admin::status::run(cluster, output).await,
        Command::Cs(cs) => admin::cs::run(cs, cluster, output).await,
        Command::Sclass(sclass) => admin::sclass::run(sclass, cluster, output).await,
        Command::Session(session) => admin::session::run(session, cluster, output).await,
    }
}

/// Two threads serve small machines as well as one per core would.
fn worker_threads() -> usize {
    std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8))
}

fn start_log() {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_env("HITHER_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

/// Time for what a failed command has left behind.
const LINGER: Duration = Duration::from_millis(100);
