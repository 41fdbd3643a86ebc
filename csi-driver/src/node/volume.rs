//! One volume on this node: the steps of staging, publishing and their inverses.
//!
//! Each step can be repeated, and what a killed process has left is found in the kernel's table
//! and in the records alone. The caller holds the volume's guard.

use std::path::Path;
use std::sync::Arc;

use hither_mounter_proto::Serve;
use tokio::sync::watch;

use crate::decide::access::Access;
use crate::decide::publish::{Publishing, Staging, beside, source, staging, target};
use crate::error::Refusal;
use crate::ids::Handle;
use crate::kill::point;
use crate::node::events::Events;
use crate::node::fencing::Nodes;
use crate::node::kernel;
use crate::node::labels::NodeLabels;
use crate::node::mounter::Mounter;
use crate::node::mountinfo::at;
use crate::node::record::{Record, Records, Target};
use crate::rpc::csi::volume_capability::access_mode::Mode;

/// What all volumes of this node share.
#[derive(Debug, Clone)]
pub struct Node {
    /// What is known of them.
    pub records: Records,
    /// Who serves their mounts.
    pub mounter: Arc<dyn Mounter>,
    /// Where the node stands.
    pub labels: watch::Receiver<NodeLabels>,
    /// Whom a volume may be taken from.
    pub nodes: Nodes,
    /// Events on pods.
    pub events: Events,
}

impl Node {
    /// What stands at a volume's staging path.
    ///
    /// # Errors
    /// `Unreachable` when the mount daemon does not answer.
    pub async fn standing(&self, handle: &Handle, place: &Path) -> Result<Staging, Refusal> {
        let served = self.mounter.list().await?;
        Ok(staging(
            &handle.to_string(),
            place,
            &kernel::mounts()?,
            &served,
        ))
    }

    /// Mounts a volume at its staging path, in place of what is left there of it, and keeps its
    /// record. After a final error nothing is left.
    ///
    /// # Errors
    /// What the daemon says; `Busy` when something may remain.
    pub async fn stage(&self, handle: &Handle, mut record: Record) -> Result<String, Refusal> {
        record.staged = false;
        record.waited = 0;
        self.records.store(handle, &record)?;
        point("stage.recorded");
        match self.mount(handle, &record).await {
            Ok(device) => {
                record.staged = true;
                self.records.store(handle, &record)?;
                point("stage.confirmed");
                Ok(device)
            }
            Err(error) => {
                let undone = self.unstage(handle, &record.staging).await;
                match undone {
                    Ok(()) if !record.targets.is_empty() => {
                        // Pods of an earlier staging are still to be taken from.
                        self.records.store(handle, &record)?;
                        Err(error)
                    }
                    Ok(()) => Err(error),
                    Err(left) => Err(Refusal::Busy(format!(
                        "{error}; and not everything is undone ({left}): repeat"
                    ))),
                }
            }
        }
    }

    /// Mounts what a record describes; answers the device number.
    ///
    /// # Errors
    /// What the daemon says; `Taken` when a mount of another node has the volume, and that node is
    /// not known to be gone. The mount may be left, dead.
    pub async fn mount(&self, handle: &Handle, record: &Record) -> Result<String, Refusal> {
        self.end_over(&record.handle).await?;
        match self.mount_once(record, None).await {
            Err(Refusal::Taken { text, holder }) => {
                if !self.nodes.may_fence(&holder).await? {
                    return Err(Refusal::Taken { text, holder });
                }
                tracing::warn!(volume = %handle, host = holder.host, session = holder.session,
                    "the mount that had the volume is fenced off");
                self.mount_once(record, Some(holder.session)).await?;
            }
            other => other?,
        }
        match self.standing(handle, &record.staging).await? {
            Staging::Alive(device) => Ok(device),
            other => Err(Refusal::Busy(format!(
                "the mount went away at once: {other:?}"
            ))),
        }
    }

    /// Ends the connection of a mount that has lost its claim: pods may have it open for ever.
    async fn end_over(&self, handle: &str) -> Result<(), Refusal> {
        let served = self.mounter.list().await?;
        match served.iter().find(|one| one.mount == handle && one.over) {
            Some(over) => kernel::end_connection(&over.device),
            None => Ok(()),
        }
    }

    async fn mount_once(&self, record: &Record, evict: Option<u64>) -> Result<(), Refusal> {
        kernel::detach_all(&record.staging)?;
        match self.mounter.end(&record.handle).await {
            Err(Refusal::DataLost(text)) => self.tell_lost(record, &text),
            other => other?,
        }
        let standpoint = self.labels.borrow().standpoint(&record.template)?;
        let device = kernel::mount_fuse(&source(&record.handle), &record.staging)?;
        point("stage.mounted");
        let mut options = record.options.clone();
        if is_of_one_node(record.mode) {
            options.push("exclusive".into());
            options.extend(evict.map(|session| format!("evict={session}")));
        }
        let serve = Serve {
            mount: record.handle.clone(),
            managers: record.managers.clone(),
            subdirectory: record.subdirectory.clone(),
            options: standpoint.options(&options, is_read_only(record.mode)),
            staging: record.staging.display().to_string(),
        };
        self.mounter.serve(serve, device).await?;
        point("stage.served");
        Ok(())
    }

    /// Takes a volume's mount away. Works on dead mounts, without a record and without a daemon:
    /// then the kernel has ended the connection already.
    ///
    /// # Errors
    /// `Broken` when the kernel refuses; `Busy`, a few times, while the daemon still stores what was
    /// written.
    pub async fn unstage(&self, handle: &Handle, place: &Path) -> Result<(), Refusal> {
        kernel::detach_all(place)?;
        if let Some(record) = self.records.load(handle).ok().flatten()
            && record.staging != place
        {
            kernel::detach_all(&record.staging)?;
        }
        point("unstage.detached");
        let record = self.records.load(handle).ok().flatten();
        match self.mounter.end(&handle.to_string()).await {
            Ok(()) => {}
            Err(Refusal::DataLost(text)) => match &record {
                Some(record) => self.tell_lost(record, &text),
                None => tracing::error!(volume = %handle, text, "data was lost"),
            },
            // Its last bytes are on their way.
            Err(error @ (Refusal::Busy(_) | Refusal::TooSlow(_))) => {
                if let Some(mut record) = record
                    && record.waited < WAITS_MAX
                {
                    record.waited += 1;
                    self.records.store(handle, &record)?;
                    return Err(Refusal::Busy(error.to_string()));
                }
                tracing::error!(volume = %handle, %error, "the end of the mount is not waited for");
            }
            Err(error) => {
                tracing::warn!(volume = %handle, %error, "nobody serves the mount that goes");
            }
        }
        point("unstage.ended");
        self.records.remove(handle)?;
        point("unstage.forgotten");
        Ok(())
    }

    fn tell_lost(&self, record: &Record, text: &str) {
        tracing::error!(volume = record.handle, text, "data was lost");
        let note = format!("what was written and not synced is lost: {text}");
        for pod in &record.pods {
            self.events.warn(Some(pod), "VolumeDataLost", &note);
        }
    }

    /// Gives a pod the volume at a path. `record` is the volume's, staged.
    ///
    /// # Errors
    /// `NotNow` when staging is not this volume's mount or the path is taken.
    pub async fn publish(
        &self,
        handle: &Handle,
        record: &mut Record,
        wanted: Target,
        shared: bool,
    ) -> Result<(), Refusal> {
        let device = match self.standing(handle, &record.staging).await? {
            Staging::Alive(device) => device,
            // The daemon has been replaced: as repair does it.
            Staging::Dead | Staging::Bare if record.staged => self.mount(handle, record).await?,
            other => {
                return Err(Refusal::NotNow(format!(
                    "{} is not this volume's mount: {other:?}",
                    record.staging.display()
                )));
            }
        };
        let mounts = kernel::mounts()?;
        beside(&wanted, shared, &record.targets, &record.handle, &mounts)?;
        target(&record.handle, &device, &wanted, &mounts)?;
        let path = wanted.path.clone();
        if !record.targets.iter().any(|known| known.path == path) {
            record.note_pod(wanted.pod.as_ref());
            record.targets.push(wanted);
            self.records.store(handle, record)?;
        }
        point("publish.recorded");
        kernel::make_directory(&path)?;
        point("publish.directory");
        let place = record.targets.iter().position(|known| known.path == path);
        let place = place.ok_or_else(|| Refusal::Broken("a target was not kept".into()))?;
        bind(record, &record.targets[place], &device)?;
        if !record.targets[place].published {
            record.targets[place].published = true;
            self.records.store(handle, record)?;
        }
        Ok(())
    }

    /// Takes the volume from a pod. Works on dead mounts and without a record; a path that is not
    /// there is done.
    ///
    /// # Errors
    /// `Broken` when the kernel refuses or the directory holds something.
    pub fn unpublish(&self, handle: Option<&Handle>, path: &Path) -> Result<(), Refusal> {
        kernel::detach_all(path)?;
        point("unpublish.detached");
        kernel::remove_directory(path)?;
        point("unpublish.removed");
        let Some(handle) = handle else {
            return Ok(());
        };
        if let Some(mut record) = self.records.load(handle)? {
            let before = record.targets.len();
            record.targets.retain(|target| target.path != path);
            if record.targets.len() != before {
                self.records.store(handle, &record)?;
            }
        }
        point("unpublish.recorded");
        Ok(())
    }
}

/// Makes a target show the volume of this device with its options, whatever is there of it.
///
/// # Errors
/// `NotNow` when something else is there, `Broken` when the kernel refuses.
pub fn bind(record: &Record, wanted: &Target, device: &str) -> Result<(), Refusal> {
    let needs = target(&record.handle, device, wanted, &kernel::mounts()?)?;
    if needs == Publishing::Anew {
        kernel::detach_all(&wanted.path)?;
    }
    if matches!(needs, Publishing::Anew | Publishing::Bind) {
        kernel::bind(&record.staging, &wanted.path)?;
        point("publish.bound");
        // Between the look and the bind the mount may have gone: a bare directory was bound then.
        let mounts = kernel::mounts()?;
        let is_ours = at(&mounts, &wanted.path)
            .iter()
            .all(|mount| mount.device == device);
        if !is_ours {
            kernel::detach_all(&wanted.path)?;
            return Err(Refusal::Busy(
                "the mount went away meanwhile: repeat".into(),
            ));
        }
    }
    if target(&record.handle, device, wanted, &kernel::mounts()?)? == Publishing::Options {
        kernel::set_options(&wanted.path, &wanted.options)?;
    }
    point("publish.options");
    Ok(())
}

/// How often an unstage waits for a mount to end.
const WAITS_MAX: u32 = 4;

/// Whether a stored access mode lets one node have the volume at a time.
fn is_of_one_node(mode: i32) -> bool {
    Mode::try_from(mode).is_ok_and(Access::is_of_one_node)
}

/// Whether a stored access mode lets nothing be written.
#[must_use]
pub fn is_read_only(mode: i32) -> bool {
    [Mode::SingleNodeReaderOnly, Mode::MultiNodeReaderOnly]
        .iter()
        .any(|read_only| i32::from(*read_only) == mode)
}
