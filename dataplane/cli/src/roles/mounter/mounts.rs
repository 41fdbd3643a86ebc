//! The mounts of a mounter: one of a name at a time, from the request to the last byte stored.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hither_client::{Budget, Client};
use hither_labels::PreferredLabels;
use hither_mount::options::Options;
use hither_mount::{MountError, Mounted, advice};
use hither_mounter_proto::{Holder, Kind, Mount, Reply, Rerank, Serve};
use hither_proto::ids::ClassId;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::{Instant, timeout_at};

/// All mounts of this process.
#[derive(Default)]
pub(super) struct Mounts {
    served: Mutex<BTreeMap<String, Served>>,
    /// What could not be stored of mounts that have ended, until somebody was told.
    lost: Mutex<BTreeMap<String, String>>,
    /// A mount is ending or has ended.
    changed: Notify,
    /// No further mounts.
    ending: AtomicBool,
    /// Memory they share.
    budget: Option<Budget>,
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
        class: ClassId,
    },
    /// The kernel's connection has ended: what was written is being stored.
    Ending,
}

impl Mounts {
    /// Mounts that keep no more than so many bytes together.
    pub(super) fn within(memory_bytes: Option<u64>) -> Self {
        let bytes = memory_bytes.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        Self {
            budget: bytes.map(Budget::of),
            ..Self::default()
        }
    }

    /// Resolves when a mount is ending or has ended after this call.
    pub(super) fn fewer(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// It was told to end, and no mount is left.
    pub(super) fn has_ended(&self) -> bool {
        self.ending.load(Ordering::Acquire) && self.served.lock().is_empty()
    }

    /// Takes no further mounts.
    pub(super) fn end_after_last(&self) {
        self.ending.store(true, Ordering::Release);
    }

    pub(super) fn len(&self) -> usize {
        self.served.lock().len()
    }

    pub(super) async fn serve(
        self: &Arc<Self>,
        serve: Serve,
        descriptor: Option<OwnedFd>,
    ) -> Reply {
        let Some(descriptor) = descriptor.filter(is_fuse) else {
            return Reply::refused(Kind::Internal, "no descriptor of /dev/fuse came along");
        };
        let options = match Options::parse(&serve.options) {
            Ok(options) => options,
            Err(error) => return Reply::refused(Kind::BadOptions, error.to_string()),
        };
        if let Err(refused) = self.begin(&serve, &descriptor).await {
            return refused;
        }
        let mounted = hither_mount::serve_connection(
            serve.managers,
            &serve.subdirectory,
            Path::new(&serve.staging),
            descriptor,
            &options,
            self.budget.clone(),
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
                Reply {
                    holder: holder_of(&error),
                    ..Reply::refused(kind_of(&error), error.to_string())
                }
            }
        }
    }

    /// Takes the name, once a mount of the same name that is ending has ended.
    async fn begin(&self, serve: &Serve, descriptor: &OwnedFd) -> Result<(), Reply> {
        let limit = Instant::now() + ENDING_PATIENCE;
        loop {
            let changed = self.changed.notified();
            if self.ending.load(Ordering::Acquire) {
                return Err(Reply::refused(Kind::Ending, "this mounter is ending"));
            }
            let (waits, state) = {
                let mut served = self.served.lock();
                match served.get(&serve.mount).map(|served| &served.state) {
                    None => {
                        served.insert(serve.mount.clone(), starting(serve, descriptor));
                        return Ok(());
                    }
                    Some(State::Ending) => (true, "is still storing what was written"),
                    Some(State::Starting) => (false, "is being made"),
                    Some(State::Stands { .. }) => (false, "stands"),
                }
            };
            if !waits || timeout_at(limit, changed).await.is_err() {
                let text = format!("a mount named {} {state}", serve.mount);
                return Err(Reply::refused(Kind::Busy, text));
            }
        }
    }

    /// The mount stands until its connection ends.
    fn stands(self: &Arc<Self>, name: &str, mounted: Mounted) {
        self.set(
            name,
            State::Stands {
                client: mounted.client().clone(),
                class: mounted.class(),
            },
        );
        let (mounts, name) = (Arc::clone(self), name.to_owned());
        tokio::spawn(async move {
            mounted.gone().await;
            mounts.set(&name, State::Ending);
            if let Err(error) = mounted.unmount().await {
                tracing::error!(mount = name, %error, "data could not be stored");
                mounts.lose(&name, &error.to_string());
            }
            tracing::info!(mount = name, "mount ended");
            mounts.remove(&name);
        });
    }

    fn set(&self, name: &str, state: State) {
        if let Some(served) = self.served.lock().get_mut(name) {
            served.state = state;
        }
        self.changed.notify_waiters();
    }

    fn remove(&self, name: &str) {
        self.served.lock().remove(name);
        self.changed.notify_waiters();
    }

    fn lose(&self, name: &str, what: &str) {
        let mut lost = self.lost.lock();
        if lost.len() >= LOST_MAX {
            // Nobody came to hear of it; the log has it.
            lost.pop_first();
        }
        lost.insert(name.to_owned(), what.to_owned());
    }

    pub(super) fn rerank(&self, rerank: &Rerank) -> Reply {
        let preferred = match rerank.preferred.as_deref().map(PreferredLabels::parse) {
            None => None,
            Some(Ok(parsed)) => Some(parsed),
            Some(Err(error)) => return Reply::refused(Kind::BadOptions, error.to_string()),
        };
        let (client, class) = match self.served.lock().get(&rerank.mount).map(|s| &s.state) {
            Some(State::Stands { client, class }) => (client.clone(), *class),
            Some(State::Starting) => {
                let text = format!("{} is being made", rerank.mount);
                return Reply::refused(Kind::Busy, text);
            }
            Some(State::Ending) | None => {
                let text = format!("no mount is named {}", rerank.mount);
                return Reply::refused(Kind::NoSuchMount, text);
            }
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
        let mut told = Vec::new();
        if let Some(preferred) = preferred {
            told.extend(preferred.warnings.iter().map(ToString::to_string));
            standpoint.preferred = preferred.value;
        }
        let options = Options {
            preferred: standpoint.preferred.clone(),
            zone: standpoint.zone.clone(),
            ..Options::default()
        };
        told.extend(advice(&options, &client.map(), class));
        client.stand(standpoint);
        Reply {
            advice: told,
            ..Reply::done()
        }
    }

    pub(super) fn list(&self) -> Reply {
        let served = self.served.lock();
        let mounts = served.values().filter_map(|served| {
            let State::Stands { client, .. } = &served.state else {
                return None;
            };
            Some(Mount {
                preferred: client.standpoint().preferred.to_string(),
                over: client.is_over(),
                ..served.shown.clone()
            })
        });
        Reply {
            mounts: mounts.collect(),
            ..Reply::done()
        }
    }

    pub(super) async fn end(&self, name: &str) -> Reply {
        let begun = Instant::now();
        loop {
            let changed = self.changed.notified();
            let (why, limit) = match self.served.lock().get(name).map(|served| &served.state) {
                None => break,
                // It ends by itself when the cluster has taken nothing for the mount's `timeout`;
                // whoever asked has gone by then, and its place is another's.
                Some(State::Ending) => {
                    ("is still storing what was written", begun + STORE_PATIENCE)
                }
                Some(State::Starting) => ("is being made", begun + UNMOUNT_PATIENCE),
                // The kernel tells of the end of its connection a moment after it was unmounted.
                Some(State::Stands { .. }) => {
                    ("is still mounted, or open", begun + UNMOUNT_PATIENCE)
                }
            };
            if timeout_at(limit, changed).await.is_err() {
                return Reply::refused(Kind::Busy, format!("{name} {why}"));
            }
        }
        match self.lost.lock().remove(name) {
            Some(what) => Reply::refused(Kind::DataLost, format!("data was lost: {what}")),
            None => Reply::done(),
        }
    }
}

fn starting(serve: &Serve, descriptor: &OwnedFd) -> Served {
    Served {
        shown: Mount {
            mount: serve.mount.clone(),
            staging: serve.staging.clone(),
            device: device_of(descriptor).unwrap_or_default(),
            options: serve.options.clone(),
            preferred: String::new(),
            over: false,
        },
        state: State::Starting,
    }
}

fn holder_of(error: &MountError) -> Option<Holder> {
    match error {
        MountError::Taken { holder, .. } => Some(Holder {
            session: holder.session,
            host: holder.host.clone(),
            mount_point: holder.mount_point.clone(),
        }),
        _ => None,
    }
}

fn kind_of(error: &MountError) -> Kind {
    match error {
        MountError::Start(_) => Kind::Unreachable,
        MountError::Subdirectory { .. } => Kind::NoSuchDirectory,
        MountError::Taken { .. } => Kind::Taken,
        _ => Kind::Internal,
    }
}

/// Whether a descriptor is one of `/dev/fuse`; anything else might never say a word.
fn is_fuse(descriptor: &OwnedFd) -> bool {
    rustix::fs::fstat(descriptor).is_ok_and(|stat| {
        let device = stat.st_rdev;
        (rustix::fs::major(device), rustix::fs::minor(device)) == FUSE_DEVICE
    })
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

/// Major and minor number of `/dev/fuse`.
const FUSE_DEVICE: (u32, u32) = (10, 229);
/// Time a mount that is ending has before another of its name is refused.
const ENDING_PATIENCE: Duration = Duration::from_secs(60);
/// Time the kernel has to end a connection whose mount was taken away.
const UNMOUNT_PATIENCE: Duration = Duration::from_secs(5);
/// Time a mount that is ending has to store everything before its end is not waited for; the plugin
/// waits a little longer, and asks again.
const STORE_PATIENCE: Duration = Duration::from_secs(20);
/// Mounts whose loss nobody has asked for.
const LOST_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_end_of_a_mount_that_stores_on_is_not_waited_for_for_ever() {
        let mounts = Mounts::default();
        let served = |state| Served {
            shown: Mount {
                mount: "a".into(),
                staging: String::new(),
                device: String::new(),
                options: String::new(),
                preferred: String::new(),
                over: false,
            },
            state,
        };
        mounts
            .served
            .lock()
            .insert("a".into(), served(State::Ending));
        let begun = Instant::now();
        let reply = mounts.end("a").await;
        assert_eq!(reply.kind, Some(Kind::Busy));
        assert_eq!(begun.elapsed(), STORE_PATIENCE);
        mounts
            .served
            .lock()
            .insert("a".into(), served(State::Starting));
        assert_eq!(mounts.end("a").await.kind, Some(Kind::Busy));
        assert_eq!(begun.elapsed(), STORE_PATIENCE + UNMOUNT_PATIENCE);
        mounts.served.lock().clear();
        assert!(mounts.end("a").await.ok);
    }
}
