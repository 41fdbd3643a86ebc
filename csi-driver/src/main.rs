//! `hither-csi`: the controller and the node plugin.
#![forbid(unsafe_code)]

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use hither_csi::DRIVER;
use hither_csi::ask;
use hither_csi::clusters::Clusters;
use hither_csi::controller::ControllerService;
use hither_csi::guard::Guards;
use hither_csi::identity::IdentityService;
use hither_csi::level::SpecLevel;
use hither_csi::node::events::Events;
use hither_csi::node::fencing::Nodes;
use hither_csi::node::labels::NodeLabels;
use hither_csi::node::mounter::SocketMounter;
use hither_csi::node::record::Records;
use hither_csi::node::service::NodeService;
use hither_csi::node::volume::Node;
use hither_csi::node::{kernel, watching};
use hither_csi::registration::RegistrationService;
use hither_csi::rpc::csi::controller_server::ControllerServer;
use hither_csi::rpc::csi::identity_server::IdentityServer;
use hither_csi::rpc::csi::node_server::NodeServer;
use hither_csi::rpc::registration::registration_server::RegistrationServer;
use hither_csi::server::{listen, listen_by, liveness, socket_of};
use hither_csi::source::Source;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tonic::transport::Server;

/// Volumes of Hither clusters for Kubernetes.
#[derive(Debug, Parser)]
#[command(name = "hither-csi", version)]
struct Arguments {
    #[command(subcommand)]
    role: Role,
    /// Log in JSON, one object a line
    #[arg(long, global = true)]
    log_json: bool,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Make, change, list and remove volumes; beside provisioner and resizer
    Controller(Controller),
    /// Mount volumes on this node; registers itself with the kubelet
    Node(NodePlugin),
    /// Print the volumes that the controller knows, each a line of JSON: `kubectl exec` it there
    Volumes(Volumes),
    /// Print how many bytes volumes can still be given, as the controller says
    Capacity(Capacity),
}

#[derive(Debug, clap::Args)]
struct Volumes {
    #[command(flatten)]
    asked: Asked,
    /// Only this one
    handle: Option<String>,
}

#[derive(Debug, clap::Args)]
struct Capacity {
    #[command(flatten)]
    asked: Asked,
    /// The cluster, as its StorageClass names it
    #[arg(long)]
    cluster: String,
    /// Storage class of the cluster
    #[arg(long)]
    class: String,
}

#[derive(Debug, clap::Args)]
struct Asked {
    /// Socket of the controller
    #[arg(long, default_value = "unix:///csi/csi.sock")]
    endpoint: String,
}

#[derive(Debug, clap::Args)]
struct Common {
    /// Socket for requests, such as unix:///csi/csi.sock
    #[arg(long)]
    endpoint: String,
    /// Address at which GET answers while the process is alive, such as 0.0.0.0:9808
    #[arg(long)]
    liveness: Option<String>,
    /// A directory for each cluster, in it a file for each key of its secret (managers, clusterID,
    /// key): for requests that carry no secrets, as lists do
    #[arg(long)]
    clusters_dir: Option<PathBuf>,
    /// Version of the interface to offer: 1.13, or 1.12 for older sidecars and test suites
    #[arg(long, default_value = "1.13")]
    spec: SpecLevel,
    /// Offer topology: zones and regions of nodes, and volumes pinned to a zone
    #[arg(long)]
    topology: bool,
}

#[derive(Debug, clap::Args)]
struct Controller {
    #[command(flatten)]
    common: Common,
    /// Know the clusters whose secrets the StorageClasses of this driver name: for requests that
    /// carry no secrets, as lists do, and to free what was removed
    #[arg(long, conflicts_with = "clusters_dir")]
    storage_classes: bool,
}

#[derive(Debug, clap::Args)]
struct NodePlugin {
    #[command(flatten)]
    common: Common,
    /// The kubelet's directory, at the same path as on the host
    #[arg(long, default_value = "/var/lib/kubelet")]
    kubelet_dir: PathBuf,
    /// Name of this node
    #[arg(long, env = "NODE_NAME")]
    node_name: String,
    /// Socket of the daemon that serves this node's mounts (`hither mounter`)
    #[arg(long)]
    mounter_socket: PathBuf,
    /// Do not register with the kubelet
    #[arg(long)]
    no_registration: bool,
    /// Do not ask Kubernetes for the node's labels: take --zone and --region
    #[arg(long)]
    no_kubernetes: bool,
    /// Zone of this node, with --no-kubernetes
    #[arg(long, default_value = "")]
    zone: String,
    /// Region of this node, with --no-kubernetes
    #[arg(long, default_value = "")]
    region: String,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    log(arguments.log_json);
    // One provider for all connections to Kubernetes; a second install is no error that matters.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 4)))
        .enable_all()
        .build()?;
    runtime.block_on(async {
        match arguments.role {
            Role::Controller(controller) => run_controller(controller).await,
            Role::Node(node) => run_node(node).await,
            Role::Volumes(volumes) => show_volumes(volumes).await,
            Role::Capacity(capacity) => show_capacity(capacity).await,
        }
    })
}

async fn run_controller(arguments: Controller) -> anyhow::Result<()> {
    let common = arguments.common;
    let host = host();
    let source = if arguments.storage_classes {
        let client = kube::Client::try_default().await;
        Source::StorageClasses(client.context("reach Kubernetes")?)
    } else {
        directory(&common)
    };
    let clusters = Arc::new(Clusters::new(host, source));
    let service = ControllerService::new(Arc::clone(&clusters), common.topology);
    start_liveness(&common).await?;
    tokio::spawn(service.clone().tidy());
    let incoming = listen(&socket_of(&common.endpoint)).context("listen at the endpoint")?;
    tracing::info!(endpoint = common.endpoint, "the controller serves");
    Server::builder()
        .add_service(IdentityServer::new(IdentityService::new(common.topology)))
        .add_service(ControllerServer::new(service))
        .serve_with_incoming_shutdown(incoming, ended())
        .await
        .context("serve requests")?;
    clusters.close().await;
    Ok(())
}

async fn run_node(arguments: NodePlugin) -> anyhow::Result<()> {
    let common = &arguments.common;
    if !kernel::has_fuse() {
        anyhow::bail!("/dev/fuse cannot be opened: the plugin has to be privileged");
    }
    let own = arguments.kubelet_dir.join("plugins").join(DRIVER);
    let records = Records::open(&own.join("volumes"))?;
    let client = if arguments.no_kubernetes {
        None
    } else {
        Some(
            kube::Client::try_default()
                .await
                .context("reach Kubernetes")?,
        )
    };
    let mut first = NodeLabels {
        node: arguments.node_name.clone(),
        zone: arguments.zone.clone(),
        region: arguments.region.clone(),
        known: arguments.no_kubernetes,
    };
    if let Some(client) = &client {
        first = watching::read(client, &arguments.node_name)
            .await
            .unwrap_or(first);
    }
    let (tell, labels) = watch::channel(first);
    let clusters = Clusters::new(arguments.node_name.clone(), directory(common));
    let clusters = Arc::new(clusters);
    let service = NodeService {
        node: Node {
            records,
            mounter: Arc::new(SocketMounter::new(arguments.mounter_socket.clone())),
            labels,
            nodes: Nodes::new(arguments.node_name.clone(), client.clone()),
            events: Events::new(client.clone(), &arguments.node_name),
        },
        clusters: Arc::clone(&clusters),
        guards: Guards::default(),
        level: common.spec,
        topology: common.topology,
    };
    if let Some(client) = client {
        tokio::spawn(watching::follow(client, tell));
    } else {
        // Nobody changes them: the sender stays, so that the receivers wait.
        std::mem::forget(tell);
    }
    start_liveness(common).await?;
    tokio::spawn(service.clone().maintain());
    let socket = socket_of(&common.endpoint);
    let incoming = listen(&socket).context("listen at the endpoint")?;
    if !arguments.no_registration {
        let registry = arguments.kubelet_dir.join("plugins_registry");
        let at = registry.join(format!("{DRIVER}-reg.sock"));
        let registration = RegistrationService::new(socket.display().to_string());
        let beside = own.join("registration.new");
        let incoming = listen_by(&at, &beside).context("listen in the kubelet's registry")?;
        tokio::spawn(
            Server::builder()
                .add_service(RegistrationServer::new(registration))
                .serve_with_incoming(incoming),
        );
    }
    tracing::info!(
        endpoint = common.endpoint,
        node = arguments.node_name,
        "the node plugin serves"
    );
    Server::builder()
        .add_service(IdentityServer::new(IdentityService::new(common.topology)))
        .add_service(NodeServer::new(service))
        .serve_with_incoming_shutdown(incoming, ended())
        .await
        .context("serve requests")?;
    clusters.close().await;
    Ok(())
}

async fn show_volumes(arguments: Volumes) -> anyhow::Result<()> {
    let socket = socket_of(&arguments.asked.endpoint);
    let volumes = match &arguments.handle {
        Some(handle) => vec![ask::volume(socket, handle).await?],
        None => ask::volumes(socket).await?,
    };
    let mut out = std::io::stdout().lock();
    for volume in volumes {
        writeln!(out, "{}", serde_json::to_string(&volume)?)?;
    }
    Ok(())
}

async fn show_capacity(arguments: Capacity) -> anyhow::Result<()> {
    let socket = socket_of(&arguments.asked.endpoint);
    let bytes = ask::capacity(socket, &arguments.cluster, &arguments.class).await?;
    writeln!(std::io::stdout().lock(), "{bytes}")?;
    Ok(())
}

fn directory(common: &Common) -> Source {
    let directory = common.clusters_dir.clone();
    directory.map_or(Source::Requests, Source::Directory)
}

async fn start_liveness(common: &Common) -> anyhow::Result<()> {
    if let Some(address) = &common.liveness {
        let answered = liveness(address).await;
        tokio::spawn(answered.with_context(|| format!("answer for liveness at {address}"))?);
    }
    Ok(())
}

/// The end that is asked for. Nothing is unmounted: pods keep their volumes.
async fn ended() {
    let (Ok(mut term), Ok(mut int)) = (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
    ) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
}

fn host() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

fn log(json: bool) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    if json {
        log.json().init();
    } else {
        log.init();
    }
}
