//! `hither-operator`: keeps Hither clusters as their custom resources say.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use hither_operator::etcd::member;
use hither_operator::run::{self, Options};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// Keeps Hither clusters as their custom resources say.
#[derive(Debug, Parser)]
#[command(name = "hither-operator", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the operator
    Run(Run),
    /// Print the custom resource definitions
    Crds {
        /// Write each into a file of this directory instead
        #[arg(long)]
        dir: Option<PathBuf>,
    },
    /// Print every field of the custom resources as a page
    Fields,
    /// Let the etcd of a metadata store's member start where it may; runs in its pod
    Member(Member),
    /// Fail while a cluster or a volume of one exists: asked before the operator is uninstalled
    Guard,
}

#[derive(Debug, Args)]
struct Run {
    /// Namespace to watch, once for each; without it all are watched
    #[arg(long = "namespace", env = "HITHER_NAMESPACES", value_delimiter = ',')]
    namespaces: Vec<String>,
    /// Namespace of the lease
    #[arg(long, env = "POD_NAMESPACE", default_value = "default")]
    own_namespace: String,
    /// Who holds the lease; different for every process
    #[arg(long, env = "POD_NAME")]
    identity: Option<String>,
    /// Image of servers whose cluster names none
    #[arg(long, env = "HITHER_IMAGE")]
    image: String,
    /// Service account that provisions volumes, NAMESPACE/NAME: it may read the clusters' secrets
    #[arg(long, env = "HITHER_PROVISIONER")]
    provisioner: Option<String>,
    /// Labels of the pods that serve the nodes' mounts, in the lease's namespace: `MountsOutdated` tells
    /// which of them are of an older template
    #[arg(long, env = "HITHER_MOUNTERS", value_name = "SELECTOR")]
    mounters: Option<String>,
    /// Where probes are answered
    #[arg(long, default_value = "0.0.0.0:8081")]
    probes: SocketAddr,
}

#[derive(Debug, Args)]
struct Member {
    /// Name of the member
    #[arg(long)]
    name: String,
    /// Names of all members
    #[arg(long, value_delimiter = ',')]
    members: Vec<String>,
    /// What follows a member's name in its host name
    #[arg(long)]
    domain: String,
    /// What tells this etcd from others
    #[arg(long)]
    token: String,
    /// Common name of the members' certificates
    #[arg(long)]
    subject: String,
    /// Directory of the volume
    #[arg(long)]
    dir: PathBuf,
    /// Directory with the ConfigMap that says whether the members have begun
    #[arg(long)]
    state: PathBuf,
    /// Directory with ca.crt, tls.crt and tls.key
    #[arg(long)]
    tls: PathBuf,
    /// Bytes at which etcd takes no more changes
    #[arg(long)]
    quota_bytes: u64,
    /// Where etcd's configuration is written
    #[arg(long)]
    out: PathBuf,
    /// File with what was told last of data that is not there
    #[arg(long)]
    told: PathBuf,
    /// Where the container's last message is written
    #[arg(long, default_value = "/dev/termination-log")]
    message: PathBuf,
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Crds { dir } => {
            for (name, yaml) in hither_operator::crds::files()? {
                match &dir {
                    None => print!("---\n{yaml}"),
                    Some(dir) => std::fs::write(dir.join(&name), yaml)
                        .with_context(|| format!("write {name} in {}", dir.display()))?,
                }
            }
            Ok(())
        }
        Command::Fields => {
            print!("{}", hither_operator::reference::page());
            Ok(())
        }
        Command::Guard => runtime()?.block_on(async {
            let client = client().await?;
            run::guard(client).await
        }),
        Command::Member(of) => {
            log();
            let options = member::Options {
                name: of.name,
                members: of.members,
                domain: of.domain,
                token: of.token,
                subject: of.subject,
                dir: of.dir,
                state: of.state,
                tls: of.tls,
                quota_bytes: of.quota_bytes,
                out: of.out,
                told: of.told,
                message: of.message,
            };
            runtime()?.block_on(async {
                crypto();
                member::admit(&options).await
            })
        }
        Command::Run(run) => {
            log();
            runtime()?.block_on(serve(run))
        }
    }
}

fn log() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
}

fn crypto() {
    // A second provider would be a mistake in what this program is built from.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.enable_all().build()
}

async fn client() -> anyhow::Result<kube::Client> {
    crypto();
    kube::Client::try_default()
        .await
        .context("find the API server")
}

async fn serve(args: Run) -> anyhow::Result<()> {
    let client = client().await?;
    let identity = args
        .identity
        .unwrap_or_else(|| format!("{:016x}", rand::random::<u64>()));
    let provisioner = match &args.provisioner {
        None => None,
        Some(text) => {
            let (namespace, name) = text
                .split_once('/')
                .with_context(|| format!("--provisioner {text}: write NAMESPACE/NAME"))?;
            Some((namespace.to_owned(), name.to_owned()))
        }
    };
    let options = Options {
        namespaces: args
            .namespaces
            .into_iter()
            .filter(|name| !name.is_empty())
            .collect(),
        own_namespace: args.own_namespace,
        identity,
        image: args.image,
        provisioner,
        mounters: args.mounters,
        probes: args.probes,
    };
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    tokio::select! {
        ended = run::run(client, options) => ended,
        _ = term.recv() => Ok(()),
        _ = int.recv() => Ok(()),
    }
}
