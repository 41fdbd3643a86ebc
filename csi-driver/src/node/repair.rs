//! Repair: what the records say beside what the kernel shows, at start and now and then.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::StreamExt as _;
use parking_lot::Mutex;
use tokio::time::MissedTickBehavior;

use crate::decide::publish::Staging;
use crate::error::Refusal;
use crate::ids::Handle;
use crate::node::kernel;
use crate::node::labels::Standpoint;
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
        // A round that takes long is no reason for the next one to follow at once.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let ranked = Ranked::default();
        let mut round: u32 = 0;
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                changed = labels.changed() => {
                    if changed.is_err() {
                        // Nobody follows the labels any more.
                        ticks.tick().await;
                    }
                }
            }
            let ask = round.is_multiple_of(ASK_ROUNDS);
            round = round.wrapping_add(1);
            self.round(&ranked, ask).await;
        }
    }

    /// Looks at all volumes, several at a time: one whose cluster does not answer keeps no other.
    async fn round(&self, ranked: &Ranked, ask: bool) {
        let handles = match self.node.records.handles() {
            Ok(handles) => handles,
            Err(error) => return tracing::error!(%error, "nothing can be repaired"),
        };
        ranked.keep(&handles);
        let looks = handles
            .into_iter()
            .map(|handle| self.look(handle, ranked, ask));
        let mut looks = futures::stream::iter(looks).buffer_unordered(AT_ONCE);
        while looks.next().await.is_some() {}
    }

    /// Looks at one volume, unless a request has it: then in the next round.
    async fn look(&self, handle: Handle, ranked: &Ranked, ask: bool) {
        let look = async {
            if let Err(error) = self.repair(&handle).await {
                tracing::warn!(volume = %handle, %error, "not repaired");
            } else if let Err(error) = self.rerank(&handle, ranked, ask).await {
                tracing::warn!(volume = %handle, %error, "not re-ranked");
            }
        };
        self.guards.lightly(&handle.to_string(), look).await;
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
        let standing = self.node.standing(handle, &record.staging).await?;
        let is_alive = matches!(standing, Staging::Alive(_));
        let device = match standing {
            Staging::Alive(device) => device,
            Staging::Foreign(what) => {
                return Err(Refusal::NotNow(format!("staging is taken by {what}")));
            }
            Staging::Dead | Staging::Bare => {
                tracing::warn!(volume = %handle, "the mount is dead: mounting anew");
                self.node.mount(handle, &record).await?
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
        if !is_alive {
            self.tell_pods(&record);
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

    fn tell_pods(&self, record: &Record) {
        let note = "the volume's mount was lost and has been made anew: \
                    the containers see it after a restart";
        for target in record.targets.iter().filter(|target| target.published) {
            self.node
                .events
                .warn(target.pod.as_ref(), "VolumeRemounted", note);
        }
    }

    /// Lets the mount follow what its node and, where it is asked, its cluster say.
    async fn rerank(&self, handle: &Handle, ranked: &Ranked, ask: bool) -> Result<(), Refusal> {
        let Some(mut record) = self.node.records.load(handle)? else {
            return Ok(());
        };
        if !record.staged {
            return Ok(());
        }
        if ask {
            let asked = self.template_of(handle, &record);
            // A cluster that does not answer changes nothing.
            if let Ok(Ok(Some(template))) = tokio::time::timeout(ASK_PATIENCE, asked).await
                && template != record.template
            {
                record.template = template;
                self.node.records.store(handle, &record)?;
            }
        }
        let standpoint = self.node.labels.borrow().standpoint(&record.template)?;
        let Staging::Alive(device) = self.node.standing(handle, &record.staging).await? else {
            return Ok(());
        };
        if ranked.is(handle, &device, &standpoint) {
            return Ok(());
        }
        self.node
            .mounter
            .rerank(&record.handle, &standpoint)
            .await?;
        tracing::info!(volume = %handle, preferred = standpoint.preferred, "ranked");
        ranked.note(handle, device, standpoint);
        Ok(())
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

/// What each mount was last told of its standpoint. It is told again until it has heard: a volume
/// that was busy when the node moved hears of it later.
#[derive(Debug, Default)]
struct Ranked {
    told: Mutex<BTreeMap<Handle, (String, Standpoint)>>,
}

impl Ranked {
    fn is(&self, handle: &Handle, device: &str, standpoint: &Standpoint) -> bool {
        let told = self.told.lock();
        told.get(handle)
            .is_some_and(|(to, what)| to == device && what == standpoint)
    }

    fn note(&self, handle: &Handle, device: String, standpoint: Standpoint) {
        let mut told = self.told.lock();
        told.insert(handle.clone(), (device, standpoint));
    }

    /// Forgets volumes that are here no more.
    fn keep(&self, handles: &[Handle]) {
        self.told
            .lock()
            .retain(|handle, _| handles.contains(handle));
    }
}

/// Volumes that are looked at at the same time.
const AT_ONCE: usize = 8;
/// How often mounts are looked at.
const REPAIR_EACH: Duration = Duration::from_secs(10);
/// Longest wait for a cluster to say what has changed.
const ASK_PATIENCE: Duration = Duration::from_secs(3);
/// Every how many rounds the cluster is asked for what can change.
const ASK_ROUNDS: u32 = 3;
