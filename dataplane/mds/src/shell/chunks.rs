//! Seals and trims on the chunkservers. Each goes on until it has succeeded on every in-sync member
//! of the newest map: nothing else may be done with the chunk meanwhile. A member that does not
//! answer for long is reported, and the manager takes it out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use hither_clustermap::ClusterView;
use hither_metastore::MetaStore;
use hither_proto::chunk::{Close, Hop, Seal, SealReply, Settle, Target, Trim};
use hither_proto::ids::{ChunkserverId, Epoch, GroupId, InodeId};
use hither_proto::kind::Kind;
use tokio::time::Instant;

use super::Shared;
use super::reach::{About, CALL_TIMEOUT, Outcome};
use crate::core::{Event, SealChunk};

/// Why an attempt failed; the next one looks at the map anew.
#[derive(Debug, PartialEq)]
enum Failed {
    Again,
    /// A member knows a later lease: the chunk is another seal's.
    Superseded,
}

/// Says from time to time that something is still not done.
pub(super) struct Complaint {
    begun: Instant,
    next: Duration,
}

impl Complaint {
    pub(super) fn new() -> Self {
        Self {
            begun: Instant::now(),
            next: COMPLAINT_FIRST,
        }
    }

    /// Seconds it has taken so far, when it is time to say so.
    pub(super) fn due(&mut self) -> Option<u64> {
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

/// Cuts the copies of a chunk, then tells the core.
pub(crate) async fn trim<S: MetaStore>(shared: Arc<Shared<S>>, ino: InodeId, chunk: SealChunk) {
    let mut complaint = Complaint::new();
    loop {
        if let Ok(epoch) = trim_once(&shared, &chunk).await {
            return shared.send(Event::Trimmed(ino, chunk.group, epoch));
        }
        complaint.about("cut", ino, &chunk);
        shared.pause().await;
    }
}

async fn trim_once<S: MetaStore>(shared: &Shared<S>, chunk: &SealChunk) -> Result<Epoch, Failed> {
    let map = Arc::clone(&shared.map.borrow());
    let (epoch, members) = members(&map, chunk.group)?;
    let about = About {
        map: &map,
        group: chunk.group,
        epoch,
    };
    let trim = Trim {
        target: Some(target(chunk, epoch)),
        offset: chunk.length_max,
        length: 0,
    };
    for result in shared
        .ask_all(about, &members, Kind::CHUNK_TRIM, &trim)
        .await
    {
        match result {
            Ok(_) | Err(Outcome::NoSuchChunk) => {}
            Err(_) => return Err(Failed::Again),
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
    let mut done = Vec::with_capacity(chunks.len());
    for chunk in chunks {
        let mut complaint = Complaint::new();
        loop {
            match seal_once(&shared, &chunk).await {
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
) -> Result<(bool, Epoch), Failed> {
    let map = Arc::clone(&shared.map.borrow());
    let (epoch, members) = members(&map, chunk.group)?;
    let about = About {
        map: &map,
        group: chunk.group,
        epoch,
    };
    let seal = Seal {
        target: Some(target(chunk, epoch)),
    };
    let results = shared
        .ask_all(about, &members, Kind::CHUNK_SEAL, &seal)
        .await;
    let mut states: BTreeMap<ChunkserverId, SealReply> = BTreeMap::new();
    for (member, result) in members.iter().zip(results) {
        let state = match result {
            Ok(reply) => reply.decode::<SealReply>().map_err(|_| Failed::Again)?,
            Err(Outcome::NoSuchChunk) => SealReply::default(),
            Err(Outcome::Superseded) => return Err(Failed::Superseded),
            Err(_) => return Err(Failed::Again),
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
        let closed = shared.ask(about, *member, Kind::CHUNK_CLOSE, &close, CALL_TIMEOUT);
        match closed.await {
            Ok(_) | Err(Outcome::NoSuchChunk) => {}
            Err(Outcome::Superseded) => return Err(Failed::Superseded),
            Err(_) => return Err(Failed::Again),
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
        let at_most = settle_timeout(plan.length);
        let settled = shared.ask(about, *member, Kind::CHUNK_SETTLE, &settle, at_most);
        match settled.await {
            Ok(_) => {}
            Err(Outcome::Superseded) => return Err(Failed::Superseded),
            Err(_) => return Err(Failed::Again),
        }
    }
    Ok(())
}

/// Time a member gets to take what differs, at most the whole copy of `length` bytes. The source
/// passes it on to members that are being filled.
fn settle_timeout(length: u32) -> Duration {
    CALL_TIMEOUT + Duration::from_millis(u64::from(length / SETTLE_BYTES_PER_MS))
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

/// What a member takes from another at least, in a settle.
const SETTLE_BYTES_PER_MS: u32 = 4096;
/// What is not done after this time is said in the log, and again after every further one.
const COMPLAINT_FIRST: Duration = Duration::from_secs(10);
const COMPLAINT_EVERY: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use hither_proto::chunk::TouchedBlock;
    use hither_proto::ids::{ChunkId, LeaseId};

    use super::super::bench::{Bench, Member, bench};
    use super::*;

    fn chunk() -> SealChunk {
        SealChunk {
            chunk: ChunkId(11),
            group: GroupId(7),
            index: Some(0),
            lease: LeaseId(9),
            length_max: 100,
        }
    }

    fn serving() -> Option<Member> {
        Some(Member::default())
    }

    fn begin(bench: &Bench) -> tokio::task::JoinHandle<()> {
        let shared = Arc::clone(&bench.shared);
        tokio::spawn(seal(shared, InodeId(5), vec![chunk()]))
    }

    async fn sealed(bench: &mut Bench) -> Vec<(SealChunk, bool, Epoch)> {
        match bench.event().await {
            Event::Sealed(_, done) => done,
            other => panic!("not sealed: {other:?}"),
        }
    }

    /// The manager reaches the member, the metadata server does not: the seal went on for ever.
    #[tokio::test]
    async fn a_seal_goes_on_without_a_member_that_is_out_of_reach_for_long() {
        let mut bench = bench(Duration::ZERO, vec![serving(), None]).await;
        let sealing = begin(&bench);
        let report = bench.left_out().await;
        assert_eq!((report.to, report.group, report.epoch), (2, 7, 3));
        bench.let_lag(&[2]);
        assert_eq!(sealed(&mut bench).await, [(chunk(), true, Epoch(4))]);
        sealing.await.unwrap();
    }

    /// Before its time a member that does not answer is reported as ever.
    #[tokio::test]
    async fn a_member_gets_its_time_before_it_is_left_out() {
        let mut bench = bench(Duration::from_secs(15), vec![serving(), None]).await;
        let sealing = begin(&bench);
        for _ in 0..3 {
            assert!(!bench.report().await.needs_all);
        }
        sealing.abort();
    }

    /// A rank that is cut off itself had every member left out, one after the other.
    #[tokio::test]
    async fn a_rank_that_reaches_nobody_leaves_nobody_out() {
        let mut bench = bench(Duration::ZERO, vec![None, None]).await;
        let sealing = begin(&bench);
        for _ in 0..6 {
            assert!(!bench.report().await.needs_all);
        }
        sealing.abort();
    }

    /// Connections that were lost late in a job had a healthy member left out.
    #[tokio::test]
    async fn a_member_that_answers_a_ping_is_not_left_out() {
        let flaky = Member {
            loses: AtomicU32::new(3),
            ..Member::default()
        };
        let mut bench = bench(Duration::ZERO, vec![serving(), Some(flaky)]).await;
        let sealing = begin(&bench);
        assert_eq!(sealed(&mut bench).await, [(chunk(), true, Epoch(3))]);
        assert!(!bench.has_left_out());
        sealing.await.unwrap();
    }

    /// The members refuse a seal that a later one has overtaken: it went on for ever.
    #[tokio::test]
    async fn a_seal_that_was_overtaken_ends_and_says_nothing_of_the_chunk() {
        let overtaken = Member {
            knows_later: true,
            ..Member::default()
        };
        let mut bench = bench(Duration::ZERO, vec![Some(overtaken)]).await;
        begin(&bench).await.unwrap();
        assert_eq!(sealed(&mut bench).await, []);
    }

    /// A whole chunk did not get through in the time of a small call.
    #[test]
    fn a_settle_gets_time_for_what_it_moves() {
        assert_eq!(settle_timeout(0), CALL_TIMEOUT);
        assert!(settle_timeout(64 << 20) > Duration::from_secs(20));
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
}
