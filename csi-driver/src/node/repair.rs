//! Repair: what the records say beside what the kernel shows, at start and now and then.

use std::time::Duration;

use crate::decide::publish::Staging;
use crate::error::Refusal;
use crate::ids::Handle;
use crate::node::kernel;
use crate::node::mountinfo::at;
use crate::node::record::Record;
use crate::node::service::{NodeService, access_of};
use crate::node::volume::bind;
use crate::volumes::Volumes;

impl NodeService {
    /// Repairs and re-ranks mounts; never returns.
    pub async fn maintain(self) {
        let mut labels = self.node.labels.clone();
        let mut ticks = tokio::time::interval(REPAIR_EACH);
        let mut round: u32 = 0;
        loop {
            let moved = tokio::select! {
                _ = ticks.tick() => false,
                changed = labels.changed() => changed.is_ok(),
            };
            let ask = moved || round.is_multiple_of(ASK_ROUNDS);
            round = round.wrapping_add(1);
            self.round(moved, ask).await;
        }
    }

    async fn round(&self, moved: bool, ask: bool) {
        let handles = match self.node.records.handles() {
            Ok(handles) => handles,
            Err(error) => return tracing::error!(%error, "nothing can be repaired"),
        };
        for handle in handles {
            // A volume with a request under way is looked at in the next round.
            let Ok(_held) = self.guards.take(&handle.to_string()) else {
                continue;
            };
            if let Err(error) = self.repair(&handle).await {
                tracing::warn!(volume = %handle, %error, "not repaired");
            } else if ask && let Err(error) = self.rerank(&handle, moved).await {
                tracing::warn!(volume = %handle, %error, "not re-ranked");
            }
        }
    }

    /// Makes one volume's mounts what its record says.
    async fn repair(&self, handle: &Handle) -> Result<(), Refusal> {
        let Some(record) = self.node.records.load(handle)? else {
            // Of another boot: its mounts went with it.
            return self.node.records.remove(handle);
        };
        if !record.staged {
            return self.clear(handle, &record).await;
        }
        let device = match self.node.standing(handle, &record.staging).await? {
            Staging::Alive(device) => device,
            Staging::Foreign(what) => {
                return Err(Refusal::NotNow(format!("staging is taken by {what}")));
            }
            Staging::Dead | Staging::Bare => {
                tracing::warn!(volume = %handle, "the mount is dead: mounting anew");
                let device = self.node.mount(handle, &record).await?;
                self.tell_pods(&record).await;
                device
            }
        };
        let mounts = kernel::mounts()?;
        for target in record.targets.iter().filter(|target| target.published) {
            // A directory that went without an unpublish: nobody is there. Asked only where
            // nothing is mounted, since a mount may not answer.
            if at(&mounts, &target.path).is_empty() && !target.path.is_dir() {
                continue;
            }
            bind(&record, target, &device)?;
        }
        Ok(())
    }

    /// Staging was cut off. The kubelet repeats it or takes it back, and should not meet a dead
    /// mount on the way.
    async fn clear(&self, handle: &Handle, record: &Record) -> Result<(), Refusal> {
        let standing = self.node.standing(handle, &record.staging).await?;
        if standing == Staging::Dead {
            kernel::detach_all(&record.staging)?;
        }
        Ok(())
    }

    async fn tell_pods(&self, record: &Record) {
        let note = "the volume's mount was lost and has been made anew: \
                    the containers see it after a restart";
        for target in record.targets.iter().filter(|target| target.published) {
            self.events
                .warn(target.pod.as_ref(), "VolumeRemounted", note)
                .await;
        }
    }

    /// Asks what can change and lets the mount follow it.
    async fn rerank(&self, handle: &Handle, moved: bool) -> Result<(), Refusal> {
        let Some(mut record) = self.node.records.load(handle)? else {
            return Ok(());
        };
        if !record.staged {
            return Ok(());
        }
        let asked = tokio::time::timeout(ASK_PATIENCE, self.template_of(handle, &record)).await;
        let changed = match asked {
            Ok(Ok(Some(template))) if template != record.template => {
                record.template = template;
                true
            }
            // A cluster that does not answer changes nothing, and requests wait for this.
            _ => false,
        };
        if !changed && !moved {
            return Ok(());
        }
        let standpoint = self.node.labels.borrow().standpoint(&record.template)?;
        self.node
            .mounter
            .rerank(&record.handle, &standpoint)
            .await?;
        tracing::info!(volume = %handle, preferred = standpoint.preferred, "re-ranked");
        self.node.records.store(handle, &record)
    }

    async fn template_of(
        &self,
        handle: &Handle,
        record: &Record,
    ) -> Result<Option<String>, Refusal> {
        let access = access_of(record);
        let found = self
            .clusters
            .of_request(Some(&access), Some(&handle.cluster));
        let volumes = Volumes::new(found.await?.client);
        let located = volumes.find(&handle.volume).await?;
        Ok(located.map(|located| volumes.template(&located)))
    }
}

/// How often mounts are looked at.
const REPAIR_EACH: Duration = Duration::from_secs(10);
/// Longest wait for a cluster to say what has changed.
const ASK_PATIENCE: Duration = Duration::from_secs(3);
/// Every how many rounds the cluster is asked for what can change.
const ASK_ROUNDS: u32 = 3;
