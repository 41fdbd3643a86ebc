//! Seals, trims and fences on the chunkservers. Each goes on until it has succeeded on every
//! in-sync member of the newest map: nothing else may be done with the chunk meanwhile. A member
//! that does not answer for long is reported, and the manager takes it out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use hither_clustermap::ClusterView;
use hither_metastore::MetaStore;
use hither_net::{NetError, Reply};
use hither_proto::chunk::{Close, Fence, FenceReply, Hop, Seal, SealReply, Settle, Target, Trim};
use hither_proto::ids::{ChunkId, ChunkserverId, Epoch, GroupId, InodeId, LeaseId, SessionId};
use hither_proto::kind::Kind;
use hither_proto::manager::ReportUnreachable;
use hither_proto::map::{MemberState, ServerState};
use hither_proto::status::Status;
use prost::Message;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Shared;
use crate::core::{Event, SealChunk};

/// Why an attempt failed; the next one looks at the map anew.
#[derive(Debug, PartialEq)]
enum Failed {
    Again,
    /// A member knows a later lease: the chunk is another seal's.
    Superseded,
}

/// Says from time to time that something is still not done.
struct Complaint {
    begun: Instant,
    next: Duration,
}

impl Complaint {
    fn new() -> Self {
        Self {
            begun: Instant::now(),
            next: COMPLAINT_FIRST,
        }
    }

    /// Whether members that did not answer all the while are to be left out.
    fn is_long(&self, patience: Duration) -> bool {
        self.begun.elapsed() >= patience
    }

    /// Seconds it has taken so far, when it is time to say so.
    fn due(&mut self) -> Option<u64> {
        let waited = self.begun.elapsed();
        (waited >= self.next).then(|| {
            self.next = waited + COMPLAINT_EVERY;
            waited.as_secs()
        })
    }

    fn about(&mut self, what: &str, ino: InodeId, chunk: &SealChunk) {
        if let Some(waited_s) = self.due() {
            tracing::warn!(
                %ino,
                chunk = %chunk.chunk,
                group = %chunk.group,
                waited_s,
                "the copies of a chunk cannot be {what}: a member does not answer, the file waits"
            );
        }
    }
}

/// What a call is about, for the report when the member does not answer.
#[derive(Clone, Copy)]
pub(crate) struct About<'a> {
    pub(crate) map: &'a ClusterView,
    pub(crate) group: GroupId,
    pub(crate) epoch: Epoch,
    /// It has been tried for so long that the group had better go on without the member.
    pub(crate) needs_all: bool,
}

/// Cuts the copies of a chunk, then tells the core.
pub(crate) async fn trim<S: MetaStore>(shared: Arc<Shared<S>>, ino: InodeId, chunk: SealChunk) {
    let mut complaint = Complaint::new();
    loop {
        let needs_all = complaint.is_long(MEMBER_PATIENCE);
        if let Ok(epoch) = trim_once(&shared, &chunk, needs_all).await {
            return shared.send(Event::Trimmed(ino, chunk.group, epoch));
        }
        complaint.about("cut", ino, &chunk);
        shared.pause().await;
    }
}

async fn trim_once<S: MetaStore>(
    shared: &Shared<S>,
    chunk: &SealChunk,
    needs_all: bool,
) -> Result<Epoch, Failed> {
    let map = Arc::clone(&shared.map.borrow());
    let (epoch, members) = members(&map, chunk.group)?;
    let about = About {
        map: &map,
        group: chunk.group,
        epoch,
        needs_all,
    };
    let trim = Trim {
        target: Some(target(chunk, epoch)),
        offset: chunk.length_max,
        length: 0,
    };
    let calls = members
        .iter()
        .map(|member| shared.ask(about, *member, Kind::CHUNK_TRIM, &trim));
    for result in join_all(calls).await {
        match result {
            Ok(_) | Err(Outcome::NoSuchChunk) => {}
            Err(Outcome::Superseded | Outcome::Again) => return Err(Failed::Again),
        }
    }
    Ok(epoch)
}

/// Seals chunks one after the other, then tells the core what exists.
pub(crate) async fn seal<S: MetaStore>(
    shared: Arc<Shared<S>>,
    ino: InodeId,
    chunks: Vec<SealChunk>,
) {
    seal_within(&shared, ino, chunks, MEMBER_PATIENCE).await;
}

async fn seal_within<S: MetaStore>(
    shared: &Shared<S>,
    ino: InodeId,
    chunks: Vec<SealChunk>,
    patience: Duration,
) {
    let mut done = Vec::with_capacity(chunks.len());
    for chunk in chunks {
        let mut complaint = Complaint::new();
        loop {
            let needs_all = complaint.is_long(patience);
            match seal_once(shared, &chunk, needs_all).await {
                Ok((exists, epoch)) => {
                    done.push((chunk, exists, epoch));
                    break;
                }
                // A later seal of the file has taken the chunk over, and says what exists.
                Err(Failed::Superseded) => {
                    tracing::debug!(%ino, chunk = %chunk.chunk, "sealed by a later one");
                    break;
                }
                Err(Failed::Again) => {
                    complaint.about("sealed", ino, &chunk);
                    shared.pause().await;
                }
            }
        }
    }
    shared.send(Event::Sealed(ino, done));
}

async fn seal_once<S: MetaStore>(
    shared: &Shared<S>,
    chunk: &SealChunk,
    needs_all: bool,
) -> Result<(bool, Epoch), Failed> {
    let map = Arc::clone(&shared.map.borrow());
    let (epoch, members) = members(&map, chunk.group)?;
    let about = About {
        map: &map,
        group: chunk.group,
        epoch,
        needs_all,
    };
    let seal = Seal {
        target: Some(target(chunk, epoch)),
    };
    let calls = members
        .iter()
        .map(|member| shared.ask(about, *member, Kind::CHUNK_SEAL, &seal));
    let mut states: BTreeMap<ChunkserverId, SealReply> = BTreeMap::new();
    for (member, result) in members.iter().zip(join_all(calls).await) {
        let state = match result {
            Ok(reply) => reply.decode::<SealReply>().map_err(|_| Failed::Again)?,
            Err(Outcome::NoSuchChunk) => SealReply::default(),
            Err(Outcome::Superseded) => return Err(Failed::Superseded),
            Err(Outcome::Again) => return Err(Failed::Again),
        };
        states.insert(*member, state);
    }
    let plan = settle_plan(&states, chunk.length_max);
    if let Some(plan) = &plan {
        settle(shared, about, chunk, plan).await?;
    }
    let close = Close {
        group: chunk.group.0,
        epoch: epoch.0,
        chunks: vec![chunk.chunk.0],
        lease: chunk.lease.0,
        ..Close::default()
    };
    for member in &members {
        match shared.ask(about, *member, Kind::CHUNK_CLOSE, &close).await {
            Ok(_) | Err(Outcome::NoSuchChunk) => {}
            Err(Outcome::Superseded) => return Err(Failed::Superseded),
            Err(Outcome::Again) => return Err(Failed::Again),
        }
    }
    Ok((plan.is_some(), epoch))
}

/// How the members are made equal: one is the source, the others take what differs from it.
#[derive(Debug, PartialEq)]
struct SettlePlan {
    source: ChunkserverId,
    length: u32,
    /// Members with the blocks they have to take; an empty list still cuts to the length.
    others: BTreeMap<ChunkserverId, Vec<u32>>,
}

/// `None`: no member has the chunk.
fn settle_plan(states: &BTreeMap<ChunkserverId, SealReply>, length_max: u32) -> Option<SettlePlan> {
    let having = states.iter().filter(|(_, state)| state.exists);
    let (source, best) = having.max_by_key(|(_, state)| (state.lease_before, state.copy_length))?;
    let mut blocks: BTreeSet<u32> = BTreeSet::new();
    for state in states.values() {
        blocks.extend(state.touched.iter().map(|touched| touched.block));
    }
    let sums = |state: &SealReply| -> BTreeMap<u32, u32> {
        state
            .touched
            .iter()
            .map(|touched| (touched.block, touched.checksum))
            .collect()
    };
    let source_sums = sums(best);
    let length = best.copy_length.min(length_max);
    let others = states
        .iter()
        .filter(|(member, _)| *member != source)
        .filter_map(|(member, state)| {
            let theirs = sums(state);
            let differing: Vec<u32> = if state.exists {
                blocks
                    .iter()
                    .copied()
                    .filter(|block| theirs.get(block) != source_sums.get(block))
                    .collect()
            } else {
                (0..length.div_ceil(hither_proto::ids::CHECKSUM_BLOCK)).collect()
            };
            let same = differing.is_empty() && state.exists && state.copy_length == length;
            (!same).then_some((*member, differing))
        })
        .collect();
    Some(SettlePlan {
        source: *source,
        length,
        others,
    })
}

async fn settle<S: MetaStore>(
    shared: &Shared<S>,
    about: About<'_>,
    chunk: &SealChunk,
    plan: &SettlePlan,
) -> Result<(), Failed> {
    let address = about
        .map
        .address(plan.source)
        .ok_or(Failed::Again)?
        .to_owned();
    let source = Hop {
        server: plan.source.0,
        address,
    };
    let base = Settle {
        target: Some(target(chunk, about.epoch)),
        source: Some(source),
        blocks: Vec::new(),
        length: plan.length,
    };
    let own = std::iter::once((&plan.source, &[][..]));
    let others = plan
        .others
        .iter()
        .map(|(member, blocks)| (member, &blocks[..]));
    for (member, blocks) in own.chain(others) {
        let settle = Settle {
            blocks: blocks.to_vec(),
            ..base.clone()
        };
        match shared
            .ask(about, *member, Kind::CHUNK_SETTLE, &settle)
            .await
        {
            Ok(_) => {}
            Err(Outcome::Superseded) => return Err(Failed::Superseded),
            Err(_) => return Err(Failed::Again),
        }
    }
    Ok(())
}

/// Fences a session at every chunkserver that is not down, then tells the core what it had open.
pub(crate) async fn fence<S: MetaStore>(shared: Arc<Shared<S>>, session: SessionId) {
    let fence = Fence { session: session.0 };
    let mut fenced: BTreeSet<ChunkserverId> = BTreeSet::new();
    let mut open: BTreeSet<(InodeId, ChunkId, GroupId)> = BTreeSet::new();
    let mut complaint = Complaint::new();
    loop {
        let map = Arc::clone(&shared.map.borrow());
        // Who is in no chain any more acknowledges nothing either.
        let needs_all = complaint.is_long(MEMBER_PATIENCE);
        let down = i32::from(ServerState::Down);
        // A server that is down acknowledges nothing: its groups have gone on without it.
        let missing: Vec<ChunkserverId> = map
            .servers()
            .filter(|(id, server)| server.chunkserver.state != down && !fenced.contains(id))
            .map(|(id, _)| id)
            .filter(|id| !needs_all || acknowledges(&map, *id))
            .collect();
        if missing.is_empty() {
            break;
        }
        let about = About {
            map: &map,
            group: GroupId(0),
            epoch: Epoch(0),
            needs_all,
        };
        let calls = missing
            .iter()
            .map(|member| shared.ask(about, *member, Kind::FENCE_SESSION, &fence));
        for (member, result) in missing.iter().zip(join_all(calls).await) {
            let Ok(reply) = result else { continue };
            let Ok(reply) = reply.decode::<FenceReply>() else {
                continue;
            };
            fenced.insert(*member);
            for chunk in reply.open {
                open.insert((
                    InodeId(chunk.inode),
                    ChunkId(chunk.chunk),
                    GroupId(chunk.group),
                ));
            }
        }
        let silent: Vec<ChunkserverId> = missing
            .into_iter()
            .filter(|member| !fenced.contains(member))
            .collect();
        if !silent.is_empty() {
            if let Some(waited_s) = complaint.due() {
                tracing::warn!(
                    %session,
                    ?silent,
                    waited_s,
                    "a session cannot be fenced: what it wrote is locked until these servers answer \
                     or are down"
                );
            }
            shared.pause().await;
        }
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

/// Whether a server stands in a chain of any group.
fn acknowledges(map: &ClusterView, server: ChunkserverId) -> bool {
    let lagging = i32::from(MemberState::Lagging);
    let mut members = map.groups().flat_map(|(_, group)| &group.members);
    members.any(|member| member.server == server.0 && member.state != lagging)
}

/// A call that gave no OK.
pub(crate) enum Outcome {
    /// The member has no such copy.
    NoSuchChunk,
    /// The member knows a later lease.
    Superseded,
    /// Later, with a newer map.
    Again,
}

impl<S: MetaStore> Shared<S> {
    /// Asks a chunkserver; reports one that does not answer.
    pub(crate) async fn ask(
        &self,
        about: About<'_>,
        member: ChunkserverId,
        kind: Kind,
        message: &impl Message,
    ) -> Result<Reply, Outcome> {
        let address = about.map.address(member).ok_or(Outcome::Again)?;
        match self
            .pool
            .call(address, kind, message, &[], CALL_TIMEOUT)
            .await
        {
            Ok(reply) => Ok(reply),
            Err(NetError::Refused {
                status: Status::NO_SUCH_CHUNK,
                ..
            }) => Err(Outcome::NoSuchChunk),
            Err(NetError::Refused {
                status: Status::STALE_LEASE,
                ..
            }) => Err(Outcome::Superseded),
            Err(error) => {
                tracing::debug!(%member, %kind, %error, "chunkserver call failed");
                if error.is_silence() {
                    (self.unreachable)(ReportUnreachable {
                        to: member.0,
                        group: about.group.0,
                        epoch: about.epoch.0,
                        needs_all: about.needs_all,
                        ..ReportUnreachable::default()
                    });
                }
                Err(Outcome::Again)
            }
        }
    }

    /// Waits for the next map, or a moment: what failed is then tried again.
    pub(crate) async fn pause(&self) {
        pause(&self.map).await;
    }
}

async fn pause<T>(map: &watch::Receiver<T>) {
    let mut map = map.clone();
    // A clone has seen what its original has, and that is never asked.
    map.mark_unchanged();
    let news = async {
        if map.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    // Out of time is as good as a new map: both end the pause.
    let _ = tokio::time::timeout(PAUSE, news).await;
}

fn members(map: &ClusterView, group: GroupId) -> Result<(Epoch, Vec<ChunkserverId>), Failed> {
    let epoch = map.epoch(group).ok_or(Failed::Again)?;
    let members: Vec<ChunkserverId> = map.in_sync(group).collect();
    if members.is_empty() {
        Err(Failed::Again)
    } else {
        Ok((epoch, members))
    }
}

fn target(chunk: &SealChunk, epoch: Epoch) -> Target {
    Target {
        chunk: chunk.chunk.0,
        group: chunk.group.0,
        epoch: epoch.0,
        lease: chunk.lease.0,
        ..Target::default()
    }
}

/// After this long without an answer of a member the group goes on without it: the manager, which
/// reaches it, could wait for ever.
const MEMBER_PATIENCE: Duration = Duration::from_secs(15);
/// Time a chunkserver gets for one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// What is not done after this time is said in the log, and again after every further one.
const COMPLAINT_FIRST: Duration = Duration::from_secs(10);
const COMPLAINT_EVERY: Duration = Duration::from_secs(60);
/// Pause before another attempt.
const PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use std::sync::atomic::AtomicU64;

    use hither_metastore::{EmbeddedOptions, EmbeddedStore};
    use hither_net::Responder;
    use hither_net::{Connection, Handler, Identity, Incoming, Listener, NoHandler, Pool};
    use hither_proto::chunk::TouchedBlock;
    use hither_proto::common::Empty;
    use hither_proto::ids::RankId;
    use hither_proto::map::{Chunkserver, ClusterMap, Group, Member as MapMember};
    use tokio::sync::{Notify, mpsc};

    use super::*;

    /// Chunkservers that have sealed what they are asked to seal, or know a later lease.
    struct Member {
        knows_later: bool,
    }

    impl Handler for Member {
        fn request(&self, _: &Arc<Connection>, incoming: Incoming, responder: Responder) {
            match incoming.header.kind {
                Kind::CHUNK_SEAL if self.knows_later => {
                    responder.fail(Status::STALE_LEASE, "a later one");
                }
                Kind::CHUNK_SEAL => responder.ok(&state(7, 100, &[])),
                _ => responder.ok(&Empty {}),
            }
        }
    }

    /// A group of a member that answers and of one that nobody can reach, unless it lags.
    fn group_of_two(epoch: u64, address: &str, second: MemberState) -> Arc<ClusterView> {
        let server = |id: u64, address: &str| Chunkserver {
            id,
            addresses: vec![address.to_owned()],
            ..Chunkserver::default()
        };
        let member = |server, state: MemberState| MapMember {
            server,
            disk: 0,
            state: state.into(),
        };
        Arc::new(ClusterView::from_snapshot(&ClusterMap {
            version: epoch,
            chunkservers: vec![server(1, address), server(2, "127.0.0.1:1")],
            groups: vec![Group {
                id: 7,
                epoch,
                members: vec![member(1, MemberState::InSync), member(2, second)],
                ..Group::default()
            }],
            ..ClusterMap::default()
        }))
    }

    struct Bench {
        shared: Arc<Shared<EmbeddedStore>>,
        map: watch::Sender<Arc<ClusterView>>,
        address: String,
        reports: mpsc::UnboundedReceiver<ReportUnreachable>,
        events: mpsc::UnboundedReceiver<crate::shell::handler::Incoming>,
        _listener: Listener,
    }

    async fn bench(knows_later: bool, second: MemberState) -> Bench {
        let front = Arc::new(Member { knows_later });
        let listener = Listener::bind("127.0.0.1:0", Identity::default(), front)
            .await
            .unwrap();
        let address = listener.address().to_string();
        let (map, followed) = watch::channel(group_of_two(3, &address, second));
        let (report, reports) = mpsc::unbounded_channel();
        let (events, seen) = mpsc::unbounded_channel();
        let disk = hither_log::crash::CrashDisk::new();
        let store = EmbeddedStore::open(&disk.root(), EmbeddedOptions::default()).unwrap();
        let shared = Shared {
            store: Arc::new(store),
            map: followed,
            pool: Pool::new(Identity::default(), Arc::new(NoHandler)),
            events,
            reaper_wake: Notify::new(),
            rank: RankId(0),
            epoch: Epoch(1),
            unreachable: Box::new(move |said| {
                // After the test nobody listens.
                let _ = report.send(said);
            }),
            batches: AtomicU64::new(0),
        };
        Bench {
            shared: Arc::new(shared),
            map,
            address,
            reports,
            events: seen,
            _listener: listener,
        }
    }

    fn chunk() -> SealChunk {
        SealChunk {
            chunk: ChunkId(11),
            group: GroupId(7),
            index: Some(0),
            lease: LeaseId(9),
            length_max: 100,
        }
    }

    async fn sealed(bench: &mut Bench) -> Vec<(SealChunk, bool, Epoch)> {
        match bench.events.recv().await {
            Some(crate::shell::handler::Incoming::Event(Event::Sealed(_, done))) => done,
            _ => panic!("not sealed"),
        }
    }

    /// The manager reaches the member, the metadata server does not: the seal went on for ever.
    #[tokio::test]
    async fn a_seal_goes_on_without_a_member_that_is_out_of_reach_for_long() {
        let mut bench = bench(false, MemberState::InSync).await;
        let shared = Arc::clone(&bench.shared);
        let sealing = tokio::spawn(async move {
            seal_within(&shared, InodeId(5), vec![chunk()], Duration::ZERO).await;
        });
        let report = bench.reports.recv().await.unwrap();
        assert_eq!((report.to, report.group, report.epoch), (2, 7, 3));
        assert!(report.needs_all, "no chain goes around it");
        let without = group_of_two(4, &bench.address, MemberState::Lagging);
        bench.map.send_replace(without);
        assert_eq!(sealed(&mut bench).await, [(chunk(), true, Epoch(4))]);
        sealing.await.unwrap();
    }

    /// Before its time a member that does not answer is reported as ever.
    #[tokio::test]
    async fn a_member_gets_its_time_before_it_is_left_out() {
        let mut bench = bench(false, MemberState::InSync).await;
        let shared = Arc::clone(&bench.shared);
        let sealing = tokio::spawn(seal(shared, InodeId(5), vec![chunk()]));
        assert!(!bench.reports.recv().await.unwrap().needs_all);
        sealing.abort();
    }

    /// The members refuse a seal that a later one has overtaken: it went on for ever.
    #[tokio::test]
    async fn a_seal_that_was_overtaken_ends_and_says_nothing_of_the_chunk() {
        let mut bench = bench(true, MemberState::Lagging).await;
        let shared = Arc::clone(&bench.shared);
        seal(shared, InodeId(5), vec![chunk()]).await;
        assert_eq!(sealed(&mut bench).await, []);
    }

    #[test]
    fn who_only_lags_acknowledges_nothing() {
        let map = group_of_two(3, "h:1", MemberState::Lagging);
        assert!(acknowledges(&map, ChunkserverId(1)));
        assert!(!acknowledges(&map, ChunkserverId(2)));
    }

    fn state(lease: u64, length: u32, touched: &[(u32, u32)]) -> SealReply {
        SealReply {
            exists: true,
            copy_length: length,
            lease_before: lease,
            touched: touched
                .iter()
                .map(|(block, checksum)| TouchedBlock {
                    block: *block,
                    checksum: *checksum,
                })
                .collect(),
            boot_id: 1,
        }
    }

    #[test]
    fn members_take_what_differs_from_the_one_that_saw_most() {
        let states = BTreeMap::from([
            (ChunkserverId(1), state(7, 9000, &[(0, 1), (1, 2), (2, 3)])),
            (ChunkserverId(2), state(7, 5000, &[(0, 1), (1, 9)])),
            (ChunkserverId(3), SealReply::default()),
        ]);
        let plan = settle_plan(&states, 8192).unwrap();
        assert_eq!(plan.source, ChunkserverId(1));
        assert_eq!(plan.length, 8192);
        assert_eq!(plan.others[&ChunkserverId(2)], vec![1, 2]);
        assert_eq!(plan.others[&ChunkserverId(3)], vec![0, 1]);
    }

    #[test]
    fn equal_members_have_nothing_to_take_and_absent_ones_no_plan() {
        let same = state(7, 100, &[(0, 1)]);
        let states = BTreeMap::from([(ChunkserverId(1), same.clone()), (ChunkserverId(2), same)]);
        assert!(settle_plan(&states, 4096).unwrap().others.is_empty());
        let none = BTreeMap::from([(ChunkserverId(1), SealReply::default())]);
        assert_eq!(settle_plan(&none, 4096), None);
    }

    /// It did not pause at all once the map had changed: whoever waited for a store or a server
    /// that was away spun.
    #[tokio::test]
    async fn a_pause_waits_for_news_and_not_for_what_is_known() {
        let (map, receiver) = watch::channel(1);
        map.send_replace(2);
        assert!(pause(&receiver).now_or_never().is_none());
        let mut waiting = Box::pin(pause(&receiver));
        assert!((&mut waiting).now_or_never().is_none());
        map.send_replace(3);
        assert!(waiting.now_or_never().is_some());
        drop(map);
        assert!(pause(&receiver).now_or_never().is_none());
    }
}
