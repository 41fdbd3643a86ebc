//! Closing open marks: a lease is over (or idle) and everything under it flushed, so a member that
//! restarts need not compare its chunks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hither_clustermap::ClusterView;
use hither_net::NetError;
use hither_proto::chunk::Close;
use hither_proto::ids::{Epoch, GroupId, InodeId, LeaseId};
use hither_proto::kind::Kind;
use hither_proto::status::Status;
use hither_proto::stored::ChunkRef;

use crate::client::Inner;
use crate::error::FsError;
use crate::file::Lease;

impl Inner {
    /// Closes marks of one group on all members. Returns the chunks of which a member says that its
    /// copy may differ by a write that failed: those have to be sealed. What is not closed for
    /// another reason makes a restart compare more, and nothing else.
    pub(crate) async fn close_marks(
        &self,
        map: &ClusterView,
        (group, epoch): (GroupId, Epoch),
        marks: &[(u64, LeaseId)],
        timeout: Duration,
    ) -> Vec<u64> {
        let close = Close {
            group: group.0,
            epoch: epoch.0,
            chunks: marks.iter().map(|(chunk, _)| *chunk).collect(),
            leases: marks.iter().map(|(_, lease)| lease.0).collect(),
            ..Close::default()
        };
        let members = self.servers.chain(map, group);
        let closing = members.iter().map(|member| {
            let (address, pool) = (&member.address, &self.servers.pool);
            pool.call(address, Kind::CHUNK_CLOSE, &close, &[], timeout)
        });
        let mut in_doubt = Vec::new();
        for closed in futures::future::join_all(closing).await {
            match closed {
                Ok(_) => {}
                Err(NetError::Refused {
                    status: Status::NEEDS_SEAL,
                    failure,
                }) => in_doubt.extend(failure.chunks),
                Err(error) => tracing::debug!(%group, %error, "open marks stay"),
            }
        }
        in_doubt
    }

    /// Closes the marks of a lease that was given back.
    pub(crate) fn close_marks_soon(&self, ino: InodeId, chunks: Vec<ChunkRef>, lease: LeaseId) {
        let Some(inner) = self.me.upgrade().filter(|_| !chunks.is_empty()) else {
            return;
        };
        tokio::spawn(async move {
            let map = inner.link.map();
            let mut groups: BTreeMap<GroupId, Vec<(u64, LeaseId)>> = BTreeMap::new();
            for chunk in &chunks {
                let marks = groups.entry(GroupId(chunk.group)).or_default();
                marks.push((chunk.chunk, lease));
            }
            let mut in_doubt = Vec::new();
            for (group, marks) in groups {
                if let Some(epoch) = map.epoch(group) {
                    let group = (group, epoch);
                    in_doubt.extend(inner.close_marks(&map, group, &marks, CLOSE_TIMEOUT).await);
                }
            }
            let doubted = chunks
                .iter()
                .filter(|chunk| in_doubt.contains(&chunk.chunk));
            let indices: Vec<u32> = doubted.map(|chunk| chunk.index).collect();
            if indices.is_empty() {
                return;
            }
            tracing::info!(%ino, chunks = indices.len(), "copies in doubt are to be sealed");
            if let Err(error) = inner.seal_chunks(ino, &indices, &in_doubt).await {
                // The next writer's close finds them in doubt still.
                tracing::warn!(%ino, %error, "copies in doubt are sealed later");
            }
        });
    }

    /// Takes the lease once more and gives it back as torn: the metadata server seals the chunks.
    async fn seal_chunks(
        self: &Arc<Self>,
        ino: InodeId,
        indices: &[u32],
        chunks: &[u64],
    ) -> Result<(), FsError> {
        let file = self.file(ino);
        {
            let _held = self.hold(&file, true, self.deadline()).await?;
            let tenure = file.data.lock().tenure;
            for index in indices {
                self.need_refs(&file, tenure, *index, *index).await?;
            }
            // What was cut off meanwhile is none of the file's any more.
            file.data.lock().note_torn(chunks);
        }
        let _alone = file.gate.write().await;
        self.give_back(&file, Lease::None).await
    }
}

/// Time a member has to close the marks of a lease that is over.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
