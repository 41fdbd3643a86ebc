//! Frees the chunks that unlinks and cuts have put on the list.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hither_metastore::{Batch, KeyRange, MetaStore};
use hither_proto::chunk::Delete;
use hither_proto::ids::{ChunkId, ChunkserverId, GroupId};
use hither_proto::kind::Kind;
use hither_proto::map::MemberState;

use super::Shared;
use super::reach::{About, CALL_TIMEOUT, Outcome};
use crate::keys;

/// Works the list off whenever something was put on it. Ends with the rank.
pub(crate) async fn run<S: MetaStore>(shared: Arc<Shared<S>>) {
    loop {
        shared.reaper_wake.notified().await;
        // Company for the first one: removing a tree frees many.
        tokio::time::sleep(COMPANY).await;
        while !work_off(&shared).await {
            shared.pause().await;
        }
    }
}

/// One pass over the list; false when something is left that could not be freed now.
async fn work_off<S: MetaStore>(shared: &Shared<S>) -> bool {
    let mut range = KeyRange::prefix(&b"q/"[..]);
    let mut clean = true;
    loop {
        let page = match shared.store.scan(&range, PASS_CHUNKS).await {
            Ok(page) => page,
            Err(error) => {
                tracing::warn!(%error, "the list of chunks to free cannot be read");
                return false;
            }
        };
        let resume = page.resume.clone();
        let mut by_group: BTreeMap<GroupId, Vec<(ChunkId, Bytes)>> = BTreeMap::new();
        for entry in page.entries {
            if let Some((group, chunk)) = keys::parse_free_chunk(&entry.key) {
                by_group.entry(group).or_default().push((chunk, entry.key));
            }
        }
        for (group, chunks) in by_group {
            clean &= free(shared, group, &chunks).await;
        }
        match resume {
            Some(key) => range = range.from_key(key),
            None => return clean,
        }
    }
}

/// Members that are in-sync or filling have to confirm; a lagging one drops what the others no
/// longer have when it catches up.
async fn free<S: MetaStore>(
    shared: &Shared<S>,
    group: GroupId,
    chunks: &[(ChunkId, Bytes)],
) -> bool {
    let map = Arc::clone(&shared.map.borrow());
    let Some(epoch) = map.epoch(group) else {
        return false;
    };
    let mut members: Vec<ChunkserverId> = map.in_sync(group).collect();
    members.extend(map.members_in(group, MemberState::Filling));
    let delete = Delete {
        group: group.0,
        epoch: epoch.0,
        chunks: chunks.iter().map(|(chunk, _)| chunk.0).collect(),
    };
    for member in members {
        let about = About {
            map: &map,
            group,
            epoch,
        };
        let deleted = shared.ask(about, member, Kind::CHUNK_DELETE, &delete, CALL_TIMEOUT);
        match deleted.await {
            Ok(_) | Err(Outcome::NoSuchChunk) => {}
            Err(_) => return false,
        }
    }
    let mut batch = Batch::new();
    for (_, key) in chunks {
        batch.delete(key.clone());
    }
    match shared.store.commit(batch).await {
        Ok(_) => true,
        Err(error) => {
            tracing::warn!(%error, "freed chunks stay on the list");
            false
        }
    }
}

/// Pause after the first chunk was put on the list.
const COMPANY: Duration = Duration::from_millis(500);
/// Chunks in one request at most.
const PASS_CHUNKS: usize = 512;
