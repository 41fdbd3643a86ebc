//! The mounter: serves mounts that another process makes, and hands over by a unix socket.
//!
//! It never unmounts: whoever mounted does. A mount ends here when its kernel connection has ended,
//! or when it is asked for. Signals end the process only when no mount is left: without it all of
//! them would be dead.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use hither_client::Client;
use hither_labels::PreferredLabels;
use hither_mount::options::Options;
use hither_mount::{MountError, Mounted};
use hither_mounter_proto::{Kind, Mount, Reply, Request, Rerank, Serve, receive, reply};
use parking_lot::Mutex;
use tokio::net::UnixListener;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};

use super::Signals;

/// Serves the socket until a signal comes and no mount is left.
pub(crate) async fn run(socket: &Path) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let listener = listen(socket)?;
    let mounts = Arc::new(Mounts::default());
    println!("mounter ready at {}", socket.display());
    let room = Arc::new(Semaphore::new(REQUESTS_MAX));
    let mut ending = false;
    loop {
        let fewer = mounts.fewer.notified();
        if ending && mounts.is_empty() {
            break;
        }
        tokio::select! {
            taken = listener.accept() => match taken {
                Ok((stream, _)) => {
                    let stream = stream.into_std()?;
                    stream.set_nonblocking(false)?;
                    // Who comes when all places are taken is told so.
                    let place = Arc::clone(&room).try_acquire_owned().ok();
                    tokio::spawn(answer(Arc::clone(&mounts), stream, place));
                }
                Err(error) => tracing::warn!(%error, "a connection was not taken"),
            },
            () = signals.next() => {
                ending = true;
                tracing::info!(mounts = mounts.len(), "ends when the last mount has ended");
            }
            () = fewer => {}
        }
    }
    std::fs::remove_file(socket).with_context(|| format!("remove {}", socket.display()))
}

/// Listens in place of a process that is gone.
fn listen(socket: &Path) -> anyhow::Result<UnixListener> {
    if socket.exists() {
        if UnixStream::connect(socket).is_ok() {
            anyhow::bail!("another mounter serves {}", socket.display());
        }
        std::fs::remove_file(socket).with_context(|| format!("remove {}", socket.display()))?;
    }
    let listener =
        UnixListener::bind(socket).with_context(|| format!("listen at {}", socket.display()))?;
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

async fn answer(mounts: Arc<Mounts>, stream: UnixStream, place: Option<OwnedSemaphorePermit>) {
    let taken = tokio::task::spawn_blocking(move || {
        let mut stream = stream;
        stream.set_read_timeout(Some(TALK_TIMEOUT))?;
        stream.set_write_timeout(Some(TALK_TIMEOUT))?;
        let (request, descriptor) = receive(&mut stream)?;
        Ok::<_, hither_mounter_proto::WireError>((stream, request, descriptor))
    });
    let (mut stream, request, descriptor) = match taken.await {
        Ok(Ok(taken)) => taken,
        Ok(Err(error)) => return tracing::debug!(%error, "no request came"),
        Err(error) => return tracing::error!(%error, "take a request"),
    };
    let answer = match (&place, request) {
        (None, _) => Reply::refused(Kind::Overloaded, "too many requests at a time"),
        (_, Request::Serve(serve)) => mounts.serve(serve, descriptor).await,
        (_, Request::Rerank(rerank)) => mounts.rerank(&rerank),
        (_, Request::List) => mounts.list(),
        (_, Request::End { mount }) => mounts.end(&mount).await,
        (_, _) => Reply::refused(Kind::Internal, "this mounter does not know the request"),
    };
    let sent = tokio::task::spawn_blocking(move || reply(&mut stream, &answer)).await;
    if let Ok(Err(error)) = sent {
        // Whoever asked has gone; it asks for the list when it is back.
        tracing::debug!(%error, "a reply was not taken");
    }
}

/// All mounts of this process.
#[derive(Default)]
struct Mounts {
    served: Mutex<BTreeMap<String, Served>>,
    /// A mount has ended.
    fewer: Notify,
}

/// One mount.
struct Served {
    shown: Mount,
    state: State,
}

enum State {
    /// Being made.
    Starting,
    Stands {
        client: Client,
        /// Set to ask for the end.
        end: watch::Sender<bool>,
    },
}

impl Mounts {
    fn is_empty(&self) -> bool {
        self.served.lock().is_empty()
    }

    fn len(&self) -> usize {
        self.served.lock().len()
    }

    async fn serve(self: &Arc<Self>, serve: Serve, descriptor: Option<OwnedFd>) -> Reply {
        let Some(descriptor) = descriptor else {
            return Reply::refused(Kind::Internal, "no descriptor of /dev/fuse came along");
        };
        let options = match Options::parse(&serve.options) {
            Ok(options) => options,
            Err(error) => return Reply::refused(Kind::BadOptions, error.to_string()),
        };
        if !self.begin(&serve, &descriptor) {
            let text = format!("a mount named {} stands", serve.mount);
            return Reply::refused(Kind::Busy, text);
        }
        let mounted = hither_mount::serve_connection(
            serve.managers,
            &serve.subdirectory,
            Path::new(&serve.staging),
            descriptor,
            &options,
        );
        match mounted.await {
            Ok(mounted) => {
                tracing::info!(mount = serve.mount, staging = serve.staging, "mount served");
                let mut advice = options.warnings;
                advice.extend_from_slice(mounted.advice());
                self.stands(&serve.mount, mounted);
                Reply {
                    advice,
                    ..Reply::done()
                }
            }
            Err(error) => {
                self.remove(&serve.mount);
                Reply::refused(kind_of(&error), error.to_string())
            }
        }
    }

    /// Takes the name; false where another mount has it.
    fn begin(&self, serve: &Serve, descriptor: &OwnedFd) -> bool {
        let mut served = self.served.lock();
        if served.contains_key(&serve.mount) {
            return false;
        }
        let shown = Mount {
            mount: serve.mount.clone(),
            staging: serve.staging.clone(),
            device: device_of(descriptor).unwrap_or_default(),
            options: serve.options.clone(),
            preferred: String::new(),
        };
        let state = State::Starting;
        served.insert(serve.mount.clone(), Served { shown, state });
        true
    }

    /// The mount stands, until its connection ends or it is asked to end.
    fn stands(self: &Arc<Self>, name: &str, mounted: Mounted) {
        let (end, mut asked) = watch::channel(false);
        if let Some(served) = self.served.lock().get_mut(name) {
            let client = mounted.client().clone();
            served.state = State::Stands { client, end };
        }
        let (mounts, name) = (Arc::clone(self), name.to_owned());
        tokio::spawn(async move {
            tokio::select! {
                () = mounted.gone() => {}
                _ = asked.wait_for(|asked| *asked) => {}
            }
            if let Err(error) = mounted.unmount().await {
                tracing::error!(mount = name, %error, "data could not be stored");
            }
            tracing::info!(mount = name, "mount ended");
            mounts.remove(&name);
        });
    }

    fn remove(&self, name: &str) {
        self.served.lock().remove(name);
        self.fewer.notify_waiters();
    }

    fn rerank(&self, rerank: &Rerank) -> Reply {
        let preferred = match rerank.preferred.as_deref().map(PreferredLabels::parse) {
            None => None,
            Some(Ok(parsed)) => Some(parsed),
            Some(Err(error)) => return Reply::refused(Kind::BadOptions, error.to_string()),
        };
        let served = self.served.lock();
        let Some(State::Stands { client, .. }) = served.get(&rerank.mount).map(|s| &s.state) else {
            let text = format!("no mount is named {}", rerank.mount);
            return Reply::refused(Kind::NoSuchMount, text);
        };
        let mut standpoint = (*client.standpoint()).clone();
        let set = |place: &mut String, new: &Option<String>| {
            if let Some(new) = new {
                place.clone_from(new);
            }
        };
        set(&mut standpoint.zone, &rerank.zone);
        set(&mut standpoint.region, &rerank.region);
        set(&mut standpoint.node, &rerank.node);
        if let Some(preferred) = preferred {
            standpoint.preferred = preferred.value;
        }
        client.stand(standpoint);
        Reply::done()
    }

    fn list(&self) -> Reply {
        let served = self.served.lock();
        let mounts = served.values().map(|served| {
            let mut shown = served.shown.clone();
            if let State::Stands { client, .. } = &served.state {
                shown.preferred = client.standpoint().preferred.to_string();
            }
            shown
        });
        Reply {
            mounts: mounts.collect(),
            ..Reply::done()
        }
    }

    async fn end(&self, name: &str) -> Reply {
        loop {
            let fewer = self.fewer.notified();
            match self.served.lock().get(name).map(|served| &served.state) {
                None => return Reply::done(),
                Some(State::Stands { end, .. }) => {
                    end.send_replace(true);
                }
                Some(State::Starting) => {
                    return Reply::refused(Kind::Busy, format!("{name} is being mounted"));
                }
            }
            fewer.await;
        }
    }
}

fn kind_of(error: &MountError) -> Kind {
    match error {
        MountError::Start(_) => Kind::Unreachable,
        MountError::Subdirectory { .. } => Kind::NoSuchDirectory,
        _ => Kind::Internal,
    }
}

/// The device number the kernel gave to the mount behind a descriptor of `/dev/fuse`.
fn device_of(descriptor: &OwnedFd) -> Option<String> {
    let info = format!("/proc/self/fdinfo/{}", descriptor.as_raw_fd());
    let text = std::fs::read_to_string(info).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("fuse_connection:"))?;
    Some(format!("0:{}", line.trim()))
}

/// Requests under way at a time.
const REQUESTS_MAX: usize = 64;
/// Time to say a request, and to take a reply.
const TALK_TIMEOUT: Duration = Duration::from_secs(5);
