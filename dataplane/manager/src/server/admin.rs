//! What people and the operator ask for.

use hither_metastore::MetaStore;
use hither_net::{Incoming, NetError, Responder};
use hither_proto::common::Empty;
use hither_proto::ids::{ChunkserverId, ClassId};
use hither_proto::kind::Kind;
use hither_proto::manager::{
    ClassName, ClassSet, ClusterStatus, DistanceSet, GroupHealth, ServerForget, ServerLabel,
    ServerMaintenance,
};
use hither_proto::map::MemberState;
use hither_proto::status::{Errno, Status};

use super::Task;
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
            Kind::CLASS_DELETE => {
                let name: ClassName = incoming.decode()?;
                if let Some(ClassId(id)) = self.class_id(&name.name) {
                    tracing::info!(class = name.name, id, "class is removed");
                }
                let next = decide::class_deleted(&self.state, &name.name);
                self.answer_change(next, responder).await;
            }
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
                })
                .collect(),
            leader: self.address.clone(),
            store: self.config.store_name.clone(),
            revision: self.raw_revision().await,
        }
    }
}
