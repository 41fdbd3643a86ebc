//! What people and the operator ask for.

use std::sync::Arc;

use hither_metastore::{Error, MetaStore};
use hither_net::{Incoming, NetError, Responder};
use hither_proto::common::Empty;
use hither_proto::ids::{ChunkserverId, ClassId};
use hither_proto::kind::Kind;
use hither_proto::manager::{
    ClassName, ClassSet, ClusterStatus, DistanceSet, GroupHealth, ServerDrain, ServerForget,
    ServerLabel, ServerMaintenance,
};
use hither_proto::map::MemberState;
use hither_proto::status::{Errno, Status};

use super::uses::{Uses, uses};
use super::{Message, Task};
use crate::decide;
use crate::state::State;

impl<S: MetaStore> Task<S> {
    pub(super) async fn administer(
        &mut self,
        incoming: &Incoming,
        responder: Responder,
    ) -> Result<(), NetError> {
        match incoming.header.kind {
            Kind::CLUSTER_STATUS => {
                let status = self.status().await;
                responder.ok(&status);
            }
            Kind::CLASS_SET => {
                let set: ClassSet = incoming.decode()?;
                match decide::class_set(&self.state, &set) {
                    Ok(outcome) => {
                        if let Some(next) = outcome.next {
                            self.adopt(next).await;
                        }
                        responder.ok(&outcome.reply);
                    }
                    Err(text) => responder.fail(Errno::EINVAL.into(), text),
                }
            }
            Kind::CLASS_DELETE => self.class_delete(incoming.decode()?, responder),
            Kind::SERVER_LABEL => {
                let change: ServerLabel = incoming.decode()?;
                let id = ChunkserverId(change.server);
                let next = decide::labels_changed(&self.state, id, &change.changes);
                self.answer_change(next, responder).await;
            }
            Kind::SERVER_MAINTENANCE => {
                let change: ServerMaintenance = incoming.decode()?;
                let id = ChunkserverId(change.server);
                let next = decide::maintenance_changed(&self.state, id, change.on);
                self.answer_change(next, responder).await;
            }
            Kind::SERVER_DRAIN => {
                let change: ServerDrain = incoming.decode()?;
                let id = ChunkserverId(change.server);
                let next = decide::draining_changed(&self.state, id, change.on);
                self.answer_change(next, responder).await;
            }
            Kind::SERVER_FORGET => {
                let forget: ServerForget = incoming.decode()?;
                let next = decide::server_forgotten(&self.state, ChunkserverId(forget.server));
                self.answer_change(next, responder).await;
            }
            Kind::DISTANCE_SET => {
                let set: DistanceSet = incoming.decode()?;
                let next = State {
                    distances: set.distances,
                    ..self.state.clone()
                };
                self.answer_change(Ok(next), responder).await;
            }
            Kind::META_DUMP => self.dumps.next(&self.store, responder),
            other => {
                responder.fail(
                    Status::UNSUPPORTED,
                    format!("{other} is not served by a manager"),
                );
            }
        }
        Ok(())
    }

    /// Looks for what names the class; the answer comes when the whole store has been read.
    fn class_delete(&self, class: ClassName, responder: Responder) {
        // Without a search if it is refused anyway.
        if let Err(text) = decide::class_deleted(&self.state, &class.name) {
            return responder.fail(Errno::EINVAL.into(), text);
        }
        let (Some(id), Some(inbox)) = (self.class_id(&class.name), self.inbox.upgrade()) else {
            return responder.fail(Status::RETRY, "the manager ends");
        };
        let Ok(alone) = Arc::clone(&self.class_scan).try_lock_owned() else {
            let text = "another storage class is being removed: try again when that is done";
            return responder.fail(Status::BUSY, text);
        };
        let store = Arc::clone(&self.store);
        tokio::spawn(async move {
            let found = uses(&*store, id).await;
            drop(alone);
            // A manager that has stopped drops the responder, which asks the caller to try again.
            let _ = inbox
                .send(Message::ClassUsed(id, class.name, found, responder))
                .await;
        });
    }

    pub(super) async fn class_used(
        &mut self,
        id: ClassId,
        name: &str,
        uses: Result<Uses, Error>,
        responder: Responder,
    ) {
        if !self.leads() {
            return responder.fail(Status::NOT_LEADER, "this manager does not lead any more");
        }
        let refusal = match uses {
            Ok(uses) => uses.refusal(name),
            Err(error) => Some(format!(
                "whether storage class {name:?} is in use cannot be told: {error}"
            )),
        };
        if let Some(text) = refusal {
            return responder.fail(Errno::EBUSY.into(), text);
        }
        let next = decide::class_unused(&self.state, id, name);
        if next.is_ok() {
            tracing::info!(class = name, "storage class is removed");
        }
        self.answer_change(next, responder).await;
    }

    async fn answer_change(&mut self, next: Result<State, String>, responder: Responder) {
        match next {
            Ok(next) => {
                self.adopt(next).await;
                responder.ok(&Empty {});
            }
            Err(text) => responder.fail(Errno::EINVAL.into(), text),
        }
    }

    async fn status(&self) -> ClusterStatus {
        let count = |group: &hither_proto::map::Group, state: MemberState| {
            let of = group
                .members
                .iter()
                .filter(|m| m.state == i32::from(state))
                .count();
            u32::try_from(of).unwrap_or(u32::MAX)
        };
        ClusterStatus {
            map: Some(self.state.map()),
            groups: self
                .state
                .groups
                .values()
                .map(|group| GroupHealth {
                    group: group.id,
                    in_sync: count(group, MemberState::InSync),
                    filling: count(group, MemberState::Filling),
                    lagging: count(group, MemberState::Lagging),
                    wanted: decide::members_wanted(&self.state, group),
                })
                .collect(),
            leader: self.address.clone(),
            store: self.config.store_name.clone(),
            revision: self.raw_revision().await,
        }
    }
}
