//! Asking disks for their room without waiting for one that hangs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hither_chunkstore::{Space, Store};
use hither_proto::ids::DiskIndex;
use hither_proto::map::Disk as ShownDisk;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

/// What is known of the room of each disk. A disk is asked by a thread of its own, one at a time:
/// nobody can take back a question to a disk that hangs.
#[derive(Debug, Default)]
pub(crate) struct Probes {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    disks: Mutex<BTreeMap<DiskIndex, Known>>,
    answered: Notify,
}

#[derive(Debug, Default, Clone, Copy)]
struct Known {
    /// When the question was asked that is not answered yet.
    asked: Option<Instant>,
    /// The last answer; `None` when there was none, or an error.
    space: Option<Space>,
    /// That it hangs was said.
    told: bool,
}

impl Known {
    fn hangs(&self) -> bool {
        self.asked
            .is_some_and(|asked| asked.elapsed() >= HUNG_AFTER)
    }
}

impl Probes {
    /// Describes all disks as they are now, or, of those that do not answer soon, as they were.
    pub(crate) async fn describe(&self, store: &Store) -> Vec<ShownDisk> {
        for disk in store.disks() {
            let asked = disk.clone();
            self.ask(disk.index(), move || asked.space().ok());
        }
        self.answers().await;
        let mut known = self.shared.disks.lock();
        let open = store.disks().map(|disk| {
            let known = known.entry(disk.index()).or_default();
            let space = known.space;
            if known.hangs() && !std::mem::replace(&mut known.told, true) {
                let path = disk.path();
                tracing::warn!(disk = disk.index().0, path, "disk does not answer");
            }
            ShownDisk {
                index: u32::from(disk.index().0),
                total_bytes: space.map_or(0, |space| space.total_bytes),
                free_bytes: space.map_or(0, |space| space.free_bytes),
                failed: disk.failure().is_some() || known.hangs(),
                full: space.is_none_or(|space| disk.is_full(&space)),
                copy_bytes: disk.copy_bytes(),
            }
        });
        let absent = store.states().into_iter().filter_map(|state| {
            let index = state.index.filter(|index| store.disk(*index).is_none())?;
            Some(ShownDisk {
                index: u32::from(index.0),
                failed: true,
                full: true,
                ..ShownDisk::default()
            })
        });
        open.chain(absent).collect::<Vec<_>>()
    }

    /// Asks a disk, unless it has not answered yet.
    fn ask(&self, disk: DiskIndex, question: impl FnOnce() -> Option<Space> + Send + 'static) {
        {
            let mut disks = self.shared.disks.lock();
            let known = disks.entry(disk).or_default();
            if known.asked.is_some() {
                return;
            }
            known.asked = Some(Instant::now());
        }
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("disk-probe".to_owned());
        let spawned = thread.spawn(move || shared.answer(disk, question()));
        if let Err(error) = spawned {
            tracing::warn!(%error, "a disk cannot be asked for its room");
            let last = self.shared.disks.lock().get(&disk).copied();
            self.shared.answer(disk, last.and_then(|known| known.space));
        }
    }

    /// Waits until all disks have answered, or for so long as a heartbeat can wait.
    pub(crate) async fn answers(&self) {
        let all = async {
            loop {
                let answered = self.shared.answered.notified();
                tokio::pin!(answered);
                answered.as_mut().enable();
                let mut disks = self.shared.disks.lock().clone().into_values();
                if disks.all(|known| known.asked.is_none() || known.hangs()) {
                    return;
                }
                answered.await;
            }
        };
        // What was known before has to do then.
        let _ = tokio::time::timeout(ANSWER_WAIT, all).await;
    }
}

impl Shared {
    fn answer(&self, disk: DiskIndex, space: Option<Space>) {
        let known = Known {
            space,
            ..Known::default()
        };
        self.disks.lock().insert(disk, known);
        self.answered.notify_waiters();
    }
}

/// Time a heartbeat waits for the disks.
const ANSWER_WAIT: Duration = Duration::from_millis(200);
/// A disk that has not answered for so long is reported as failed until it does.
const HUNG_AFTER: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn known(probes: &Probes) -> Known {
        probes.shared.disks.lock()[&DiskIndex(0)]
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_hangs_is_asked_once_and_reported_until_it_answers() {
        let probes = Probes::default();
        let space = |free_bytes| Space {
            total_bytes: 100,
            free_bytes,
        };
        probes.ask(DiskIndex(0), move || Some(space(50)));
        while known(&probes).asked.is_some() {
            std::thread::yield_now();
        }
        let (release, released) = mpsc::channel::<()>();
        probes.ask(DiskIndex(0), move || {
            released.recv().unwrap();
            Some(space(40))
        });
        probes.answers().await;
        assert!(!known(&probes).hangs());
        assert_eq!(known(&probes).space, Some(space(50)));
        tokio::time::advance(HUNG_AFTER).await;
        probes.ask(DiskIndex(0), || panic!("asked twice"));
        probes.answers().await;
        assert!(known(&probes).hangs());
        release.send(()).unwrap();
        while known(&probes).asked.is_some() {
            std::thread::yield_now();
        }
        assert!(!known(&probes).hangs());
        assert_eq!(known(&probes).space, Some(space(40)));
    }
}
