//! The leader's office: standing for it, keeping it, and storing what is decided in it.

use std::time::Duration;

use bytes::Bytes;
use hither_metastore::{Batch, Error, KeyRange, MetaStore};
use hither_proto::fragment::Fragment;
use hither_proto::map::{StorageClass, Subtree};
use hither_proto::stored::SubtreeRoot;
use prost::Message as _;
use tokio::time::Instant;

use super::{ManagerError, Task};
use crate::decide::{self, Liveness};
use crate::leader::{self, Election};
use crate::state::{PREFIXES, STATE_KEY, State};

impl<S: MetaStore> Task<S> {
    pub(super) async fn stand(&mut self) {
        let unchanged = match self.leader_seen {
            Some((revision, since)) if since.elapsed() >= leader::LEADER_LOST_AFTER => {
                Some(revision)
            }
            Some((revision, _)) if self.config.store_is_exclusive => Some(revision),
            _ => None,
        };
        let asked = Instant::now();
        match leader::stand(&*self.store, self.boot_id, &self.address, unchanged).await {
            Ok(Election::Won(leadership)) => {
                self.store_is_away = false;
                self.leadership = Some(leadership);
                self.renewed = asked;
                if let Err(error) = self.take_office().await {
                    tracing::error!(%error, "the stored state cannot be used");
                    self.leadership = None;
                }
            }
            Ok(Election::Other(address, revision)) => {
                self.store_is_away = false;
                self.hint = address;
                if asked.elapsed() > leader::RENEW {
                    // A look that took so long says nothing about the leader.
                    self.leader_seen = None;
                    return;
                }
                let same = self.leader_seen.is_some_and(|(known, _)| known == revision);
                if !same {
                    self.leader_seen = Some((revision, Instant::now()));
                }
            }
            Err(Error::PreconditionFailed { .. }) => {
                tracing::debug!("another manager was faster");
            }
            Err(error) => {
                // The leader cannot renew either: its silence does not count.
                self.leader_seen = None;
                if !std::mem::replace(&mut self.store_is_away, true) {
                    tracing::warn!(%error, "the metadata store does not answer: waiting for it");
                }
            }
        }
    }

    pub(super) async fn renew(&mut self) {
        let Some(leadership) = &mut self.leadership else {
            return;
        };
        let asked = Instant::now();
        match leadership.renew(&*self.store).await {
            Ok(()) => self.renewed = asked,
            Err(Error::PreconditionFailed { .. }) => self.step_down("another manager leads"),
            Err(error) => {
                tracing::debug!(%error, "leadership could not be renewed");
                if !self.leads() {
                    self.step_down("the metadata store does not answer");
                }
            }
        }
    }

    pub(super) fn step_down(&mut self, why: &str) {
        tracing::warn!(why, "stepping down");
        self.leadership = None;
        self.leader_seen = None;
        self.subscribers.close_all();
    }

    /// Reads the state; a new cluster gets its first one.
    async fn take_office(&mut self) -> Result<(), ManagerError> {
        let mut entries = Vec::new();
        for prefix in PREFIXES {
            let mut range = KeyRange::prefix(prefix);
            loop {
                let page = self.store.scan(&range, 0).await?;
                entries.extend(page.entries.into_iter().map(|e| (e.key, e.versioned.value)));
                match page.resume {
                    Some(key) => range = range.from_key(key),
                    None => break,
                }
            }
        }
        let record = entries.iter().find(|(key, _)| key[..] == *STATE_KEY);
        self.stored = record.map(|(_, value)| value.clone());
        let mut state =
            State::restored(entries).map_err(|(key, reason)| ManagerError::Damaged {
                key: format!("{key:?}"),
                reason,
            })?;
        state.managers = vec![self.address.clone()];
        state.subtrees = self.read_subtrees().await?;
        self.state = state.clone();
        self.liveness = Liveness::fresh(&state, self.now());
        if state.cluster_id.is_empty() {
            state = self.first_state()?;
        }
        state.session_lease_ms =
            u32::try_from(self.config.session_lease.as_millis()).unwrap_or(u32::MAX);
        state.locations = self.config.locations;
        // A new leader's map is a new version, even if nothing in it has changed.
        self.install(decide::plan(&state)).await;
        tracing::info!(address = self.address, "leading");
        Ok(())
    }

    fn first_state(&self) -> Result<State, ManagerError> {
        let mut state = self.state.clone();
        state.cluster_id = rand::random::<[u8; 16]>().to_vec();
        let class = StorageClass {
            name: "default".into(),
            keep: self.config.default_class.clone(),
            ..StorageClass::default()
        };
        let set = hither_proto::manager::ClassSet {
            class: Some(class),
            ..Default::default()
        };
        let outcome = decide::class_set(&state, &set).map_err(ManagerError::DefaultClass)?;
        Ok(outcome.next.unwrap_or(state))
    }

    pub(super) async fn read_subtrees(&self) -> Result<Vec<Subtree>, Error> {
        let page = self.store.scan(&KeyRange::prefix(&b"s/"[..]), 0).await?;
        let read =
            |key: &[u8], at: usize| key.get(at..at + 8)?.try_into().ok().map(u64::from_be_bytes);
        Ok(page
            .entries
            .iter()
            .filter_map(|entry| {
                let root = SubtreeRoot::decode(entry.versioned.value.clone()).ok()?;
                let fragment = Fragment::from_wire(read(&entry.key, 10)?)?;
                Some(Subtree {
                    dir: read(&entry.key, 2)?,
                    fragment: fragment.to_wire(),
                    rank: root.rank,
                    epoch: root.epoch,
                })
            })
            .collect())
    }

    /// Plans, stores and publishes a new state. Nothing is believed before it is stored.
    pub(super) async fn adopt(&mut self, next: State) {
        let next = decide::plan(&next);
        if next != self.state {
            self.install(next).await;
        }
    }

    async fn install(&mut self, mut next: State) {
        next.version = self.state.version + 1;
        if self.store_state(&next).await {
            self.state = next;
            self.subscribers.publish(&self.state);
        }
    }

    async fn store_state(&mut self, next: &State) -> bool {
        let writes = next.writes_from(&self.state);
        let record = writes.iter().find(|(key, _)| key[..] == *STATE_KEY);
        let record = record.and_then(|(_, value)| value.clone());
        let mut in_doubt = false;
        for _ in 0..STORE_ATTEMPTS {
            let Some(leadership) = &self.leadership else {
                return false;
            };
            let mut batch = Batch::new();
            leadership.require(&mut batch);
            // An attempt that the store carries out late must find itself too late.
            let key = Bytes::from_static(STATE_KEY);
            match &self.stored {
                Some(record) => batch.require_value(key, record.clone()),
                None => batch.require_absent(key),
            };
            for (key, value) in &writes {
                match value {
                    Some(value) => batch.put(key.clone(), value.clone()),
                    None => batch.delete(key.clone()),
                };
            }
            match self.store.commit(batch).await {
                Ok(_) => {
                    self.stored = record;
                    return true;
                }
                // An attempt nobody heard of may be what stands in the way of this one.
                Err(Error::PreconditionFailed { .. })
                    if in_doubt && self.is_stored(&record).await =>
                {
                    self.stored = record;
                    return true;
                }
                Err(Error::PreconditionFailed { .. }) => {
                    self.step_down("another manager leads");
                    return false;
                }
                Err(error) => {
                    in_doubt |= matches!(error, Error::Unknown { .. });
                    tracing::warn!(%error, "the cluster map could not be stored");
                }
            }
            if !self.leads() {
                break;
            }
            tokio::time::sleep(STORE_PAUSE).await;
        }
        // What is in the store is not known any more: start over from there.
        self.step_down("the metadata store does not answer");
        false
    }

    /// Whether this record is in the store; false, too, when that cannot be told.
    async fn is_stored(&self, record: &Option<Bytes>) -> bool {
        let found = self.store.get(STATE_KEY).await;
        found.is_ok_and(|found| found.map(|found| found.value) == *record)
    }
}

/// Attempts to store a state, and the pause between them.
const STORE_ATTEMPTS: usize = 20;
const STORE_PAUSE: Duration = Duration::from_millis(100);
