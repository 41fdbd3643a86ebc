//! The CSI driver beside a cluster: its processes, and what a kubelet and a provisioner ask them.
//!
//! `HITHER_CSI_BIN` names the binary under test, built with the feature `kill-points`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hither_csi::rpc::csi;
use hither_csi::rpc::csi::controller_client::ControllerClient;
use hither_csi::rpc::csi::node_client::NodeClient;
use hither_csi::rpc::csi::volume_capability::{
    AccessMode, AccessType, MountVolume, access_mode::Mode,
};
use hither_csi::rpc::registration::registration_client::RegistrationClient;
use hither_csi::rpc::registration::{InfoRequest, PluginInfo};
use hyper_util::rt::TokioIo;
use rustix::process::{Pid, Signal, kill_process};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::{Cluster, eventually};

/// The driver's processes beside a cluster, with a kubelet's directory of its own.
#[derive(Debug)]
pub struct Driver {
    dir: PathBuf,
    secrets: BTreeMap<String, String>,
    runtime: tokio::runtime::Runtime,
    processes: Vec<(Part, Child)>,
    node: String,
    /// More arguments of the node plugin.
    node_arguments: Vec<String>,
}

/// A process of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The controller.
    Controller,
    /// The node plugin.
    Node,
    /// The daemon that serves mounts.
    Mounter,
}

impl Driver {
    /// Starts all three.
    ///
    /// # Panics
    /// When one does not start.
    #[must_use]
    pub fn start(cluster: &Cluster, node_arguments: &[&str]) -> Self {
        Self::start_on("n1", cluster, node_arguments)
    }

    /// Starts all three on another node.
    ///
    /// # Panics
    /// When one does not start.
    #[must_use]
    pub fn start_on(node: &str, cluster: &Cluster, node_arguments: &[&str]) -> Self {
        let dir = cluster.dir().join(node);
        let status = cluster.admin(&["status"]);
        let id = status["cluster"].as_str().expect("an id").to_owned();
        let secret = dir.join("clusters/demo");
        std::fs::create_dir_all(&secret).expect("a directory");
        std::fs::create_dir_all(dir.join("kubelet")).expect("a directory");
        let secrets = [("managers", &cluster.address), ("clusterID", &id)];
        for (key, value) in secrets {
            std::fs::write(secret.join(key), value).expect("a secret");
        }
        let mut driver = Self {
            node: node.to_owned(),
            dir,
            secrets: secrets
                .map(|(key, value)| (key.to_owned(), value.clone()))
                .into(),
            runtime: tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime"),
            processes: Vec::new(),
            node_arguments: node_arguments.iter().map(|a| (*a).to_owned()).collect(),
        };
        for part in [Part::Mounter, Part::Controller, Part::Node] {
            driver.run(part, None);
        }
        driver
    }

    /// The secrets of a request.
    #[must_use]
    pub fn secrets(&self) -> BTreeMap<String, String> {
        self.secrets.clone()
    }

    /// A path in the kubelet's directory.
    #[must_use]
    pub fn kubelet(&self, path: &str) -> PathBuf {
        self.dir.join("kubelet").join(path)
    }

    /// Socket of a part.
    #[must_use]
    pub fn socket(&self, part: Part) -> PathBuf {
        self.dir.join(match part {
            Part::Controller => "controller.sock",
            Part::Node => "node.sock",
            Part::Mounter => "mounter.sock",
        })
    }

    /// The directory that `--clusters-dir` names.
    #[must_use]
    pub fn clusters_dir(&self) -> PathBuf {
        self.dir.join("clusters")
    }

    /// Starts a part; with `kill_at` it ends at that place.
    ///
    /// # Panics
    /// When it does not start.
    pub fn run(&mut self, part: Part, kill_at: Option<&str>) {
        let socket = self.socket(part);
        std::fs::remove_file(&socket).ok();
        let endpoint = format!("unix://{}", socket.display());
        let clusters = self.clusters_dir().display().to_string();
        let mut command = match part {
            Part::Mounter => {
                let mut command = Command::new(crate::binary());
                command.args(["mounter", "--socket"]).arg(&socket);
                command
            }
            Part::Controller => {
                let mut command = Command::new(binary());
                command.args([
                    "controller",
                    "--endpoint",
                    &endpoint,
                    "--clusters-dir",
                    &clusters,
                ]);
                command
            }
            Part::Node => {
                let mut command = Command::new(binary());
                command.args(["node", "--endpoint", &endpoint, "--clusters-dir", &clusters]);
                command.args(["--node-name", &self.node, "--no-kubernetes", "--zone", "a"]);
                command.arg("--kubelet-dir").arg(self.kubelet(""));
                command
                    .arg("--mounter-socket")
                    .arg(self.socket(Part::Mounter));
                command.args(&self.node_arguments);
                command
            }
        };
        let log = self.log_of(part);
        let log = std::fs::File::options().create(true).append(true).open(log);
        let log = log.expect("a log");
        command.stdout(Stdio::null()).stderr(log);
        if let Some(place) = kill_at {
            command.env("HITHER_CSI_KILL", place);
        }
        self.processes
            .push((part, command.spawn().expect("it starts")));
        eventually(LONG, "the part listens", || socket.exists());
    }

    fn log_of(&self, part: Part) -> PathBuf {
        self.dir.join(format!("{part:?}.log"))
    }

    /// What a part has logged.
    ///
    /// # Panics
    /// When it cannot be read.
    #[must_use]
    pub fn log(&self, part: Part) -> String {
        std::fs::read_to_string(self.log_of(part)).expect("a log")
    }

    /// Kills a part.
    ///
    /// # Panics
    /// When there is none.
    pub fn kill(&mut self, part: Part) {
        let child = self.child(part);
        child.kill().ok();
        child.wait().expect("it ends");
        self.processes.retain(|(of, _)| *of != part);
    }

    /// Stops a part, or lets it go on.
    ///
    /// # Panics
    /// When there is none.
    pub fn pause(&mut self, part: Part, stop: bool) {
        let child = self.child(part);
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let signal = if stop { Signal::STOP } else { Signal::CONT };
        kill_process(pid.expect("an id"), signal).expect("it is signalled");
    }

    /// Waits until a part has ended by itself.
    ///
    /// # Panics
    /// When it does not.
    pub fn wait_ended(&mut self, part: Part) {
        let child = self.child(part);
        let mut ended = || child.try_wait().expect("it can be waited for").is_some();
        eventually(LONG, "the part has ended", &mut ended);
        self.processes.retain(|(of, _)| *of != part);
    }

    fn child(&mut self, part: Part) -> &mut Child {
        let found = self.processes.iter_mut().find(|(of, _)| *of == part);
        &mut found.expect("a running part").1
    }

    fn channel(&self, part: Part) -> Result<Channel, Status> {
        self.channel_to(self.socket(part))
    }

    fn channel_to(&self, socket: PathBuf) -> Result<Channel, Status> {
        let connector = tower::service_fn(move |_: tonic::transport::Uri| {
            let socket = socket.clone();
            async move {
                tokio::net::UnixStream::connect(socket)
                    .await
                    .map(TokioIo::new)
            }
        });
        let endpoint = Endpoint::from_static("http://localhost").timeout(LONG);
        let connected = self
            .runtime
            .block_on(endpoint.connect_with_connector(connector));
        connected.map_err(|error| Status::unavailable(error.to_string()))
    }

    /// Asks the controller.
    ///
    /// # Errors
    /// What it answers.
    pub fn controller<T>(
        &self,
        ask: impl AsyncFnOnce(&mut ControllerClient<Channel>) -> Result<tonic::Response<T>, Status>,
    ) -> Result<T, Status> {
        let mut client = ControllerClient::new(self.channel(Part::Controller)?);
        let answer = self.runtime.block_on(ask(&mut client))?;
        Ok(answer.into_inner())
    }

    /// Asks the node plugin.
    ///
    /// # Errors
    /// What it answers.
    pub fn node<T>(
        &self,
        ask: impl AsyncFnOnce(&mut NodeClient<Channel>) -> Result<tonic::Response<T>, Status>,
    ) -> Result<T, Status> {
        let mut client = NodeClient::new(self.channel(Part::Node)?);
        let answer = self.runtime.block_on(ask(&mut client))?;
        Ok(answer.into_inner())
    }

    /// Asks for a volume.
    ///
    /// # Errors
    /// What the controller answers.
    pub fn create(&self, name: &str, bytes: i64) -> Result<csi::Volume, Status> {
        let request = csi::CreateVolumeRequest {
            name: name.into(),
            capacity_range: size(bytes),
            volume_capabilities: vec![capability(Mode::MultiNodeMultiWriter)],
            secrets: self.secrets(),
            ..Default::default()
        };
        let made = self.controller(async |c| c.create_volume(request).await)?;
        Ok(made.volume.unwrap_or_default())
    }

    /// Removes a volume.
    ///
    /// # Errors
    /// What the controller answers.
    pub fn delete(&self, handle: &str) -> Result<(), Status> {
        let request = csi::DeleteVolumeRequest {
            volume_id: handle.into(),
            secrets: self.secrets(),
        };
        self.controller(async |c| c.delete_volume(request).await)
            .map(|_| ())
    }

    /// Expands a volume.
    ///
    /// # Errors
    /// What the controller answers.
    pub fn expand(&self, handle: &str, bytes: i64) -> Result<i64, Status> {
        let request = csi::ControllerExpandVolumeRequest {
            volume_id: handle.into(),
            capacity_range: size(bytes),
            secrets: self.secrets(),
            ..Default::default()
        };
        let answer = self.controller(async |c| c.controller_expand_volume(request).await)?;
        Ok(answer.capacity_bytes)
    }

    /// Changes a volume.
    ///
    /// # Errors
    /// What the controller answers.
    pub fn modify(&self, handle: &str, name: &str, value: &str) -> Result<(), Status> {
        let request = csi::ControllerModifyVolumeRequest {
            volume_id: handle.into(),
            secrets: self.secrets(),
            mutable_parameters: [(name.to_owned(), value.to_owned())].into(),
        };
        self.controller(async |c| c.controller_modify_volume(request).await)
            .map(|_| ())
    }

    /// Where a volume is staged: the kubelet makes the directory.
    #[must_use]
    pub fn staging(&self, handle: &str) -> PathBuf {
        self.kubelet(&format!("plugins/kubernetes.io/csi/{handle}/globalmount"))
    }

    /// Stages a volume.
    ///
    /// # Errors
    /// What the node plugin answers.
    ///
    /// # Panics
    /// When the directory cannot be made.
    pub fn stage(&self, handle: &str, mode: Mode) -> Result<(), Status> {
        let staging = self.staging(handle);
        make_directory(&staging);
        let request = csi::NodeStageVolumeRequest {
            volume_id: handle.into(),
            staging_target_path: staging.display().to_string(),
            volume_capability: Some(capability(mode)),
            secrets: self.secrets(),
            ..Default::default()
        };
        self.node(async |c| c.node_stage_volume(request).await)
            .map(|_| ())
    }

    /// Stages a volume as a request says.
    ///
    /// # Errors
    /// What the node plugin answers.
    ///
    /// # Panics
    /// When the directory cannot be made.
    pub fn stage_as(&self, mut request: csi::NodeStageVolumeRequest) -> Result<(), Status> {
        let staging = self.staging(&request.volume_id);
        make_directory(&staging);
        request.staging_target_path = staging.display().to_string();
        request.secrets = self.secrets();
        self.node(async |c| c.node_stage_volume(request).await)
            .map(|_| ())
    }

    /// What the kubelet finds in its registry.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn registered(&self) -> Result<PluginInfo, Status> {
        let socket = self.kubelet("plugins_registry/csi.hither.dev-reg.sock");
        let mut client = RegistrationClient::new(self.channel_to(socket)?);
        let answer = self.runtime.block_on(client.get_info(InfoRequest {}))?;
        Ok(answer.into_inner())
    }

    /// Takes a volume's mount away.
    ///
    /// # Errors
    /// What the node plugin answers.
    pub fn unstage(&self, handle: &str) -> Result<(), Status> {
        let request = csi::NodeUnstageVolumeRequest {
            volume_id: handle.into(),
            staging_target_path: self.staging(handle).display().to_string(),
        };
        self.node(async |c| c.node_unstage_volume(request).await)
            .map(|_| ())
    }

    /// Where a pod has a volume: the kubelet makes the directory above.
    #[must_use]
    pub fn target(&self, pod: &str) -> PathBuf {
        self.kubelet(&format!("pods/{pod}/mount"))
    }

    /// Gives a pod a volume.
    ///
    /// # Errors
    /// What the node plugin answers.
    ///
    /// # Panics
    /// When the directory above cannot be made.
    pub fn publish(
        &self,
        handle: &str,
        pod: &str,
        mode: Mode,
        readonly: bool,
    ) -> Result<PathBuf, Status> {
        let target = self.target(pod);
        std::fs::create_dir_all(target.parent().expect("a parent")).expect("a directory");
        let request = csi::NodePublishVolumeRequest {
            volume_id: handle.into(),
            staging_target_path: self.staging(handle).display().to_string(),
            target_path: target.display().to_string(),
            volume_capability: Some(capability(mode)),
            readonly,
            ..Default::default()
        };
        self.node(async |c| c.node_publish_volume(request).await)?;
        Ok(target)
    }

    /// Takes a volume from a pod.
    ///
    /// # Errors
    /// What the node plugin answers.
    pub fn unpublish(&self, handle: &str, pod: &str) -> Result<(), Status> {
        let request = csi::NodeUnpublishVolumeRequest {
            volume_id: handle.into(),
            target_path: self.target(pod).display().to_string(),
        };
        self.node(async |c| c.node_unpublish_volume(request).await)
            .map(|_| ())
    }

    /// Use of a volume at a path: total and used bytes.
    ///
    /// # Errors
    /// What the node plugin answers.
    pub fn stats(&self, handle: &str, path: &Path) -> Result<(i64, i64), Status> {
        let request = csi::NodeGetVolumeStatsRequest {
            volume_id: handle.into(),
            volume_path: path.display().to_string(),
            ..Default::default()
        };
        let answer = self.node(async |c| c.node_get_volume_stats(request).await)?;
        let bytes = answer.usage.first().copied().unwrap_or_default();
        Ok((bytes.total, bytes.used))
    }

    /// Mounts of the kubelet's directory.
    #[must_use]
    pub fn mounts(&self) -> Vec<String> {
        let all = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let own = self.kubelet("").display().to_string();
        let own = own.trim_end_matches('/').to_owned();
        let lines = all.lines().filter(|line| line.contains(&own));
        lines.map(str::to_owned).collect()
    }

    /// Records of the node plugin.
    #[must_use]
    pub fn records(&self) -> Vec<PathBuf> {
        let directory = self.kubelet("plugins/csi.hither.dev/volumes");
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    }

    /// The daemon's mounts.
    ///
    /// # Panics
    /// When it does not answer.
    #[must_use]
    pub fn served(&self) -> Vec<hither_mounter_proto::Mount> {
        let list = hither_mounter_proto::Request::List;
        let reply = hither_mounter_proto::call(&self.socket(Part::Mounter), &list, None, LONG);
        reply.expect("the daemon answers").mounts
    }

    /// Checks that nothing of any volume is left on the node.
    ///
    /// # Panics
    /// When something is.
    pub fn assert_nothing_left(&self) {
        assert_eq!(self.mounts(), Vec::<String>::new(), "mounts are left");
        assert_eq!(self.records(), Vec::<PathBuf>::new(), "records are left");
        eventually(LONG, "the daemon serves nothing", || {
            self.served().is_empty()
        });
        let pods = std::fs::read_dir(self.kubelet("pods"))
            .into_iter()
            .flatten()
            .flatten();
        for pod in pods {
            assert!(!pod.path().join("mount").exists(), "{pod:?} is left");
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        for line in self.mounts() {
            if let Some(at) = line.split(' ').nth(4) {
                Command::new("umount").args(["-l", at]).output().ok();
            }
        }
        for (_, child) in &mut self.processes {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

/// A capability of a mode.
#[must_use]
pub fn capability(mode: Mode) -> csi::VolumeCapability {
    csi::VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

/// The code of an answer.
///
/// # Panics
/// When the answer is no refusal.
pub fn code<T: std::fmt::Debug>(answer: Result<T, Status>) -> Code {
    answer.expect_err("a refusal").code()
}

/// Asks again while the answer is that it has to be asked again, as a kubelet does.
///
/// # Errors
/// Any other refusal, or the last one.
pub fn insist<T>(mut ask: impl FnMut() -> Result<T, Status>) -> Result<T, Status> {
    let limit = Instant::now() + LONG;
    loop {
        match ask() {
            Err(error)
                if [Code::Aborted, Code::Unavailable].contains(&error.code())
                    && Instant::now() < limit =>
            {
                std::thread::sleep(Duration::from_millis(100));
            }
            other => return other,
        }
    }
}

/// Makes a directory. A dead mount there is left to the driver, as the kubelet leaves it.
fn make_directory(at: &Path) {
    match std::fs::create_dir_all(at) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            panic!("make {}: {error}", at.display())
        }
        _ => {}
    }
}

fn size(bytes: i64) -> Option<csi::CapacityRange> {
    Some(csi::CapacityRange {
        required_bytes: bytes,
        limit_bytes: 0,
    })
}

fn binary() -> String {
    std::env::var("HITHER_CSI_BIN")
        .expect("HITHER_CSI_BIN names the driver under test: run these tests with e2e/run.sh")
}

/// Longest wait for an answer.
const LONG: Duration = Duration::from_secs(90);
