//! Mounting and unmounting.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use fuser::{MountOption, Session, SessionACL, SessionUnmounter};
use hither_client::{
    Budget, ClaimError, Client, ClientConfig, FsError, Holder, Standpoint, StartError,
};
use hither_proto::ids::{ClassId, InodeId, ROOT};
use hither_proto::status::Errno;
use rustix::mount::UnmountFlags;
use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::advice::advice;
use crate::front::{End, Front};
use crate::notify::Kernel;
use crate::options::Options;
use crate::serve::Shared;

/// Why nothing was mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The cluster cannot be used.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The directory inside the cluster cannot be used.
    #[error("{path} inside the cluster: {error}")]
    Subdirectory {
        /// The directory.
        path: String,
        /// What the cluster says.
        error: FsError,
    },
    /// Another mount has claimed the directory.
    #[error(
        "{path} inside the cluster: it is claimed by {holder}: unmount that one, or end it with \
         -o exclusive,evict={}",
        holder.session
    )]
    Taken {
        /// The directory.
        path: String,
        /// The other mount.
        holder: Holder,
    },
    /// The kernel refuses.
    #[error("mount at {directory}: {error} (is /dev/fuse there, and is the directory free?)")]
    Kernel {
        /// Where.
        directory: String,
        /// What the system says.
        error: std::io::Error,
    },
}

/// A mount that stands.
pub struct Mounted {
    client: Client,
    advice: Vec<String>,
    class: ClassId,
    directory: PathBuf,
    unmounter: SessionUnmounter,
    ended: watch::Receiver<bool>,
}

impl std::fmt::Debug for Mounted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mounted({:?})", self.client)
    }
}

/// Mounts the cluster (or a directory of it) at `directory`. Requests are served on the current
/// runtime.
///
/// # Errors
/// [`MountError`]; nothing is mounted then.
pub async fn mount(
    managers: Vec<String>,
    subdirectory: &str,
    directory: &Path,
    options: &Options,
) -> Result<Mounted, MountError> {
    let config = client_config(managers, directory, options, None);
    let prepared = prepare(config, subdirectory, directory, options).await?;
    let (front, end) = prepared.front(true);
    let session = Session::new(front, directory, &fuse_config(options));
    let session = session.map_err(|error| refused(directory, error))?;
    let read_ahead = options.kernel_read_ahead_bytes;
    match crate::readahead::widen(directory, read_ahead) {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            tracing::debug!(%error, "the kernel's own read-ahead stays");
        }
        Err(error) => tracing::warn!(%error, "set the kernel's read-ahead"),
        Ok(()) => {}
    }
    prepared.serve(session, end)
}

/// Serves a connection to the kernel that somebody else has opened and mounted at `directory`,
/// and will unmount. `budget` is memory it shares with other mounts of the process.
///
/// # Errors
/// [`MountError`]; the connection is closed then.
pub async fn serve_connection(
    managers: Vec<String>,
    subdirectory: &str,
    directory: &Path,
    connection: OwnedFd,
    options: &Options,
    budget: Option<Budget>,
) -> Result<Mounted, MountError> {
    let config = client_config(managers, directory, options, budget);
    let prepared = prepare(config, subdirectory, directory, options).await?;
    let (front, end) = prepared.front(false);
    let mut config = fuse_config(options);
    // Each thread has a descriptor of its own, where this process may open the device.
    let device = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(DEVICE);
    config.clone_fd = device.is_ok();
    // The kernel's first question is answered in here: it waits for whoever mounted.
    let session = tokio::task::spawn_blocking(move || {
        let acl = config.acl;
        Session::from_fd(front, connection, acl, config)
    });
    let session = session.await.map_err(std::io::Error::other).flatten();
    prepared.serve(session.map_err(|error| refused(directory, error))?, end)
}

/// A client of the cluster with the directory to be mounted.
struct Prepared {
    client: Client,
    kernel: Arc<Kernel>,
    root: InodeId,
    advice: Vec<String>,
    class: ClassId,
    directory: PathBuf,
    read_only: bool,
    read_ahead_bytes: u32,
    ended: watch::Receiver<bool>,
    tell: watch::Sender<bool>,
}

async fn prepare(
    config: ClientConfig,
    subdirectory: &str,
    directory: &Path,
    options: &Options,
) -> Result<Prepared, MountError> {
    let kernel = Arc::new(Kernel::default());
    let client = Client::start(config, Arc::clone(&kernel) as _).await?;
    let root = find_root(&client, subdirectory).await?;
    if options.exclusive
        && let Err(error) = client.claim(root, options.evict).await
    {
        // Nothing was written: there is nothing to tell of the end.
        let _ = client.close().await;
        return Err(not_claimed(subdirectory, error));
    }
    // A preference is no reason not to mount, nor is what cannot be said of it.
    let class = client.attributes(root).await;
    let class = class.map_or_else(|_| ClassId(0), |known| ClassId(known.inode.class));
    let advice = advice(options, &client.map(), class);
    let (tell, ended) = watch::channel(false);
    Ok(Prepared {
        client,
        kernel,
        root,
        advice,
        class,
        directory: directory.to_owned(),
        read_only: options.read_only,
        read_ahead_bytes: options.kernel_read_ahead_bytes,
        ended,
        tell,
    })
}

impl Prepared {
    /// What answers the kernel; `unmounts`: the transport unmounts when its session ends.
    fn front(&self, unmounts: bool) -> (Front<Shared>, Arc<End>) {
        let server = Shared::new(
            self.client.clone(),
            Arc::clone(&self.kernel),
            self.read_only,
            Handle::current(),
        );
        let end = Arc::new(End {
            serving: AtomicBool::new(false),
            unmounts,
            tell: self.tell.clone(),
        });
        let front = Front::new(
            Arc::new(server),
            self.root,
            self.read_ahead_bytes,
            Arc::clone(&end),
        );
        (front, end)
    }

    fn serve(
        self,
        mut session: Session<Front<Shared>>,
        end: Arc<End>,
    ) -> Result<Mounted, MountError> {
        let device = session.as_fd().try_clone_to_owned();
        let device = device.map_err(|error| refused(&self.directory, error))?;
        self.kernel.attach(session.notifier(), device, self.root);
        let unmounter = session.unmount_callable();
        std::thread::Builder::new()
            .name("fuse".into())
            .spawn(move || {
                end.serving.store(true, Ordering::Release);
                if let Err(error) = session.run() {
                    tracing::warn!(%error, "the kernel's connection ended");
                }
                end.tell.send_replace(true);
            })
            .map_err(|error| refused(&self.directory, error))?;
        Ok(Mounted {
            client: self.client,
            advice: self.advice,
            class: self.class,
            directory: self.directory,
            unmounter,
            ended: self.ended,
        })
    }
}

fn refused(directory: &Path, error: std::io::Error) -> MountError {
    MountError::Kernel {
        directory: directory.display().to_string(),
        error,
    }
}

impl Mounted {
    /// The client behind the mount.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// What the user should know of the preference; see `hither sclass check`.
    #[must_use]
    pub fn advice(&self) -> &[String] {
        &self.advice
    }

    /// Storage class of the directory that is mounted, as it was then.
    #[must_use]
    pub fn class(&self) -> ClassId {
        self.class
    }

    /// Waits until the mount is taken away from outside (`umount`).
    pub async fn gone(&self) {
        let mut ended = self.ended.clone();
        // A thread that is gone has ended the mount as well.
        let _ = ended.wait_for(|ended| *ended).await;
    }

    /// Unmounts (if that has not happened), writes everything back and ends the session with the
    /// cluster.
    ///
    /// # Errors
    /// The first error of data that could not be stored.
    pub async fn unmount(self) -> Result<(), FsError> {
        if !*self.ended.borrow() {
            let (unmounter, directory) = (self.unmounter, self.directory);
            // The kernel may write mapped pages back meanwhile, which this process serves.
            let gone = tokio::task::spawn_blocking(move || take_away(unmounter, &directory)).await;
            if let Err(error) = gone {
                tracing::error!(%error, "the unmounting thread ended");
            }
        }
        self.client.close().await
    }
}

/// Unmounts; a mount point in use is detached: nobody new gets in, and the directory is usable
/// again instead of dead.
fn take_away(mut unmounter: SessionUnmounter, directory: &Path) {
    let gone = match unmounter.unmount() {
        Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
            tracing::warn!(directory = %directory.display(), "in use: detached");
            rustix::mount::unmount(directory, UnmountFlags::DETACH).map_err(Into::into)
        }
        other => other,
    };
    if let Err(error) = gone {
        tracing::warn!(%error, directory = %directory.display(), "not unmounted");
    }
}

fn client_config(
    managers: Vec<String>,
    directory: &Path,
    options: &Options,
    budget: Option<Budget>,
) -> ClientConfig {
    let uname = rustix::system::uname();
    // A node's name is what others know it by.
    let host = match options.node.as_str() {
        "" => uname.nodename().to_string_lossy().into_owned(),
        node => node.to_owned(),
    };
    ClientConfig {
        managers,
        standpoint: Standpoint {
            zone: options.zone.clone(),
            region: options.region.clone(),
            node: host.clone(),
            preferred: options.preferred.clone(),
        },
        host,
        mount_point: directory.display().to_string(),
        failure_memory: options.failure_memory,
        hedge: options.hedge,
        timeout: options.timeout,
        dirty_bytes_max: options.write_cache_bytes,
        unsynced_bytes_max: options.unsynced_bytes,
        read_ahead_bytes_max: options.read_ahead_bytes,
        cached_inodes_max: options.cached_inodes,
        budget,
    }
}

async fn find_root(client: &Client, subdirectory: &str) -> Result<InodeId, MountError> {
    let mut at = ROOT;
    for name in subdirectory.split('/').filter(|name| !name.is_empty()) {
        let name = Bytes::copy_from_slice(name.as_bytes());
        let found = client.lookup(at, &name).await;
        let found = found.map_err(|error| MountError::Subdirectory {
            path: subdirectory.to_owned(),
            error,
        })?;
        if found.attributes.inode.mode & TYPE_MASK != DIRECTORY {
            return Err(MountError::Subdirectory {
                path: subdirectory.to_owned(),
                error: FsError::new(Errno::ENOTDIR, "it is no directory"),
            });
        }
        at = InodeId(found.attributes.inode.ino);
    }
    Ok(at)
}

fn not_claimed(subdirectory: &str, error: ClaimError) -> MountError {
    let path = subdirectory.to_owned();
    match error {
        ClaimError::Taken(holder) => MountError::Taken { path, holder },
        ClaimError::Failed(error) => MountError::Subdirectory { path, error },
        other => MountError::Subdirectory {
            path,
            error: FsError::new(Errno::EIO, other.to_string()),
        },
    }
}

fn fuse_config(options: &Options) -> fuser::Config {
    let mut config = fuser::Config::default();
    config
        .mount_options
        .push(MountOption::FSName("hither".into()));
    config
        .mount_options
        .push(MountOption::Subtype("hither".into()));
    if options.default_permissions {
        config.mount_options.push(MountOption::DefaultPermissions);
    }
    let flags = [
        (options.read_only, MountOption::RO),
        (options.no_exec, MountOption::NoExec),
        (options.sync, MountOption::Sync),
        (options.dir_sync, MountOption::DirSync),
    ];
    let wanted = flags.into_iter().filter(|(wanted, _)| *wanted);
    config.mount_options.extend(wanted.map(|(_, flag)| flag));
    config.acl = if options.allow_other {
        SessionACL::All
    } else {
        SessionACL::Owner
    };
    config.n_threads = Some(options.threads);
    config.clone_fd = true;
    config
}

const DEVICE: &str = "/dev/fuse";
/// File type bits of a mode, and those of a directory.
const TYPE_MASK: u32 = 0o170_000;
const DIRECTORY: u32 = 0o040_000;
