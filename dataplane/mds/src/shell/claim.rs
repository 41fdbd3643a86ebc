//! Taking a rank over: fence whoever had it, read what it needs.

use bytes::Bytes;
use hither_metastore::{Batch, Error, KeyRange, MetaStore, Versioned};
use hither_proto::clock::WallNanos;
use hither_proto::fragment::Fragment;
use hither_proto::ids::{BatchNumber, Epoch, InodeId, ROOT, RankId};
use hither_proto::stored::{LockTable, RankState, SessionState, SubtreeRoot};
use prost::Message;

use super::RankError;
use crate::core::{Core, Restored};
use crate::keys;

/// Authority over the subtrees of a rank.
#[derive(Debug)]
pub(crate) struct Authority {
    pub(crate) epoch: Epoch,
    /// Keys and values that every batch of the rank requires.
    roots: Vec<(Bytes, Bytes)>,
}

/// Takes the rank of a store that no other process can open.
pub(crate) async fn claim<S: MetaStore>(
    store: &S,
    rank: RankId,
    class: u32,
) -> Result<Authority, RankError> {
    for _ in 0..ATTEMPTS {
        match raise_epochs(store, rank, class, Batch::new()).await {
            Err(RankError::Store(Error::PreconditionFailed { .. } | Error::Unknown { .. })) => {}
            result => return result,
        }
    }
    Err(RankError::Store(Error::Unavailable {
        cause: "others keep claiming the rank".into(),
    }))
}

/// Raises the epoch of the rank's subtrees, which fences a predecessor, in one batch with what
/// `batch` holds already. A new cluster gets its root directory here.
pub(crate) async fn raise_epochs<S: MetaStore>(
    store: &S,
    rank: RankId,
    class: u32,
    mut batch: Batch,
) -> Result<Authority, RankError> {
    let mut authority = Authority {
        epoch: Epoch(0),
        roots: Vec::new(),
    };
    let roots = read_all::<S, SubtreeRoot>(store, b"s/").await?;
    if roots.is_empty() {
        let key = keys::subtree(ROOT, Fragment::WHOLE);
        let root = SubtreeRoot {
            rank: 0,
            epoch: 1,
            pin_plus_one: 0,
        };
        let value = Bytes::from(root.encode_to_vec());
        batch
            .require_absent(key.clone())
            .put(key.clone(), value.clone());
        for (key, value) in Core::bootstrap_writes(class, WallNanos::now().0) {
            batch.put(key, value);
        }
        if rank == RankId(0) {
            authority.roots.push((key, value));
        }
        authority.epoch = Epoch(1);
    }
    for (key, found, root) in roots {
        if root.rank != u32::from(rank.0) {
            continue;
        }
        let raised = SubtreeRoot {
            epoch: root.epoch + 1,
            ..root
        };
        authority.epoch = authority.epoch.max(Epoch(raised.epoch));
        let value = Bytes::from(raised.encode_to_vec());
        batch
            .require_revision(key.clone(), found.revision)
            .put(key.clone(), value.clone());
        authority.roots.push((key, value));
    }
    adopt_last_batch(store, rank, authority.epoch, &mut batch).await?;
    store.commit(batch).await?;
    Ok(authority)
}

/// Makes the record of the rank's last batch ours: batches of a predecessor that are still on
/// their way come too late, and ours begin after it.
async fn adopt_last_batch<S: MetaStore>(
    store: &S,
    rank: RankId,
    epoch: Epoch,
    batch: &mut Batch,
) -> Result<(), RankError> {
    let key = keys::rank_state(rank);
    let found = store.get(&key).await?;
    let mut state = match &found {
        Some(found) => parse::<RankState>(&key, found.value.clone())?,
        None => RankState::default(),
    };
    match found {
        Some(found) => batch.require_revision(key.clone(), found.revision),
        None => batch.require_absent(key.clone()),
    };
    state.epoch = epoch.0;
    batch.put(key, state.encode_to_vec());
    Ok(())
}

/// Reads what the rank needs to go on.
pub(crate) async fn restore<S: MetaStore>(
    store: &S,
    rank: RankId,
    authority: Authority,
) -> Result<Restored, RankError> {
    let sessions = read_all::<S, SessionState>(store, b"o/").await?;
    let locks = read_all::<S, LockTable>(store, b"l/").await?;
    let subtrees = read_all::<S, SubtreeRoot>(store, b"s/").await?;
    let state = store.get(&keys::rank_state(rank)).await?;
    let last_batch = match state {
        Some(found) => parse::<RankState>(&keys::rank_state(rank), found.value)?.batch,
        None => 0,
    };
    Ok(Restored {
        sessions: sessions.into_iter().map(|(_, _, state)| state).collect(),
        locks: locks
            .into_iter()
            .filter_map(|(key, _, table)| Some((InodeId(keys::parse_number(&key)?), table)))
            .collect(),
        last_batch: BatchNumber(last_batch),
        authority: authority.roots,
        subtrees: subtrees
            .into_iter()
            .filter_map(|(key, _, root)| {
                let dir = InodeId(keys::parse_number(&key)?);
                let fragment = u64::from_be_bytes(key.get(10..18)?.try_into().ok()?);
                let rank = RankId(u16::try_from(root.rank).ok()?);
                Some((dir, Fragment::from_wire(fragment)?, rank, Epoch(root.epoch)))
            })
            .collect(),
        ..Restored::default()
    })
}

async fn read_all<S: MetaStore, M: Message + Default>(
    store: &S,
    prefix: &'static [u8],
) -> Result<Vec<(Bytes, Versioned, M)>, RankError> {
    let mut all = Vec::new();
    let mut range = KeyRange::prefix(prefix);
    loop {
        let page = store.scan(&range, 0).await?;
        let resume = page.resume.clone();
        for entry in page.entries {
            let message = parse(&entry.key, entry.versioned.value.clone())?;
            all.push((entry.key, entry.versioned, message));
        }
        match resume {
            Some(key) => range = range.from_key(key),
            None => return Ok(all),
        }
    }
}

fn parse<M: Message + Default>(key: &Bytes, value: Bytes) -> Result<M, RankError> {
    M::decode(value).map_err(|e| RankError::Damaged {
        key: format!("{key:?}"),
        reason: e.to_string(),
    })
}

/// Attempts to raise the epochs while others do the same.
const ATTEMPTS: usize = 10;
