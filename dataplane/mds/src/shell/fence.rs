//! Fences: a session that is gone is shut out at every chunkserver before what it held is given to
//! others.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::future::join_all;
use hither_clustermap::ClusterView;
use hither_metastore::MetaStore;
use hither_proto::chunk::{Fence, FenceReply};
use hither_proto::ids::{ChunkId, ChunkserverId, Epoch, GroupId, InodeId, LeaseId, SessionId};
use hither_proto::kind::Kind;
use hither_proto::map::{MemberState, ServerState};

use super::Shared;
use super::chunks::Complaint;
use super::reach::{About, CALL_TIMEOUT};
use crate::core::{Event, SealChunk};

/// What a session had open, as servers list it.
type Open = BTreeSet<(InodeId, ChunkId, GroupId)>;

/// Fences a session at every chunkserver that is not down, then tells the core what it had open.
pub(crate) async fn fence<S: MetaStore>(shared: Arc<Shared<S>>, session: SessionId) {
    let mut fenced: BTreeSet<ChunkserverId> = BTreeSet::new();
    let mut open = Open::new();
    let mut complaint = Complaint::new();
    loop {
        let map = Arc::clone(&shared.map.borrow());
        // Who is silent and in no chain any more acknowledges nothing either.
        let missing: Vec<ChunkserverId> = not_down(&map)
            .filter(|id| !fenced.contains(id))
            .filter(|id| !shared.silences.is_long(*id) || acknowledges(&map, *id))
            .collect();
        if missing.is_empty() {
            break;
        }
        fence_at(&shared, &map, session, &missing, &mut fenced, &mut open).await;
        let missing = missing.into_iter();
        let silent: Vec<ChunkserverId> = missing.filter(|id| !fenced.contains(id)).collect();
        if silent.is_empty() {
            continue;
        }
        leave_out(&shared, &map, &silent).await;
        if let Some(waited_s) = complaint.due() {
            tracing::warn!(
                %session,
                ?silent,
                waited_s,
                "a session cannot be fenced: what it wrote is locked until these servers answer or \
                 are down"
            );
        }
        shared.pause().await;
    }
    let open = open
        .into_iter()
        .map(|(ino, chunk, group)| {
            let seal = SealChunk {
                chunk,
                group,
                index: None,
                lease: LeaseId(0),
                length_max: u32::MAX,
            };
            (ino, seal)
        })
        .collect();
    shared.send(Event::Fenced(session, open));
}

async fn fence_at<S: MetaStore>(
    shared: &Shared<S>,
    map: &ClusterView,
    session: SessionId,
    servers: &[ChunkserverId],
    fenced: &mut BTreeSet<ChunkserverId>,
    open: &mut Open,
) {
    let fence = Fence { session: session.0 };
    let (about, kind) = (everywhere(map), Kind::FENCE_SESSION);
    let calls = servers
        .iter()
        .map(|server| shared.ask(about, *server, kind, &fence, CALL_TIMEOUT));
    for (server, result) in servers.iter().zip(join_all(calls).await) {
        let Ok(reply) = result else { continue };
        let Ok(reply) = reply.decode::<FenceReply>() else {
            continue;
        };
        fenced.insert(*server);
        open.extend(reply.open.into_iter().map(|chunk| {
            (
                InodeId(chunk.inode),
                ChunkId(chunk.chunk),
                GroupId(chunk.group),
            )
        }));
    }
}

/// Has the groups of servers go on without them when they have been silent for long and most of the
/// others answer: a rank that is cut off itself would leave out all of them.
async fn leave_out<S: MetaStore>(shared: &Shared<S>, map: &ClusterView, silent: &[ChunkserverId]) {
    let about = everywhere(map);
    let away = shared.out_of_reach(about, silent).await;
    if away.is_empty() {
        return;
    }
    let all: Vec<ChunkserverId> = not_down(map).collect();
    let asked = all.iter().copied().filter(|id| !away.contains(id));
    let asked: Vec<ChunkserverId> = asked.collect();
    let answering = shared.answering(about, &asked).await.len();
    for server in away {
        // Of the others: it does not answer itself.
        if answering * 2 > all.len() - 1 {
            shared.report(about, server, true);
        }
    }
}

fn everywhere(map: &ClusterView) -> About<'_> {
    About {
        map,
        group: GroupId(0),
        epoch: Epoch(0),
    }
}

/// A server that is down acknowledges nothing: its groups have gone on without it.
fn not_down(map: &ClusterView) -> impl Iterator<Item = ChunkserverId> {
    let down = i32::from(ServerState::Down);
    map.servers()
        .filter(move |(_, server)| server.chunkserver.state != down)
        .map(|(id, _)| id)
}

/// Whether a server stands in a chain of any group.
fn acknowledges(map: &ClusterView, server: ChunkserverId) -> bool {
    let lagging = i32::from(MemberState::Lagging);
    let mut members = map.groups().flat_map(|(_, group)| &group.members);
    members.any(|member| member.server == server.0 && member.state != lagging)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::bench::{Member, bench, map_of};
    use super::*;

    fn serving() -> Option<Member> {
        Some(Member::default())
    }

    /// Without an end, while the manager reaches a server that this rank does not reach.
    #[tokio::test]
    async fn a_fence_leaves_a_server_out_that_most_others_are_reached_without() {
        let mut bench = bench(Duration::ZERO, vec![serving(), None, serving()]).await;
        let fencing = tokio::spawn(fence(Arc::clone(&bench.shared), SessionId(9)));
        let report = bench.left_out().await;
        assert_eq!((report.to, report.group), (2, 0));
        bench.let_lag(&[2]);
        assert!(matches!(
            bench.event().await,
            Event::Fenced(SessionId(9), _)
        ));
        fencing.await.unwrap();
    }

    /// A rank that is cut off from all servers but its neighbour had them leave all their groups.
    #[tokio::test]
    async fn a_rank_that_reaches_few_servers_leaves_none_out() {
        let mut bench = bench(Duration::ZERO, vec![serving(), None, None]).await;
        let fencing = tokio::spawn(fence(Arc::clone(&bench.shared), SessionId(9)));
        for _ in 0..6 {
            assert!(!bench.report().await.needs_all);
        }
        fencing.abort();
    }

    #[test]
    fn who_only_lags_acknowledges_nothing() {
        let map = map_of(3, &["h:1".into(), "h:2".into()], &[2]);
        assert!(acknowledges(&map, ChunkserverId(1)));
        assert!(!acknowledges(&map, ChunkserverId(2)));
    }
}
