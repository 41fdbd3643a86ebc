//! Loads, commits and counters on the metadata store.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use hither_metastore::{Batch, Error, KeyRange, MetaStore, ScanPage, Versioned};
use hither_proto::fragment::Fragment;
use hither_proto::ids::{BatchNumber, NameHash};
use hither_proto::stored::{
    BackPointer, ChunkPage, Counter as Stored, Dentry, FragmentHead, RankState,
};
use prost::Message;

use super::Shared;
use crate::core::{Commit, CommitOutcome, Counter, EntryKey, LoadKey, Loaded};
use crate::keys;

/// Commits until the outcome is known.
pub(crate) async fn commit<S: MetaStore>(
    shared: &Shared<S>,
    commit: Commit,
) -> (BatchNumber, CommitOutcome) {
    let number = commit.batch;
    let batch = batch_of(&commit);
    let mut pause = PAUSE_MIN;
    let mut in_doubt = false;
    loop {
        match shared.store.commit(batch.clone()).await {
            Ok(_) => {
                shared.batches.fetch_add(1, Ordering::Relaxed);
                return (number, CommitOutcome::Done);
            }
            Err(Error::PreconditionFailed { .. }) if !in_doubt => {
                return (number, CommitOutcome::Fenced);
            }
            // An attempt nobody heard of may be what stands in the way of this one.
            Err(Error::PreconditionFailed { .. }) => {
                return (number, outcome(shared, number).await);
            }
            Err(Error::Unknown { cause }) => {
                // The batch requires its predecessor's record: it happens once at most.
                in_doubt = true;
                tracing::warn!(batch = number.0, cause, "outcome of a commit is unknown");
            }
            Err(Error::Unavailable { cause }) => {
                tracing::warn!(
                    batch = number.0,
                    cause,
                    "the metadata store does not answer"
                );
            }
            Err(error @ Error::TooLarge { .. }) => {
                // The core closes batches long before: a fault of ours, no loss of authority.
                tracing::error!(batch = number.0, %error, "the batch is larger than the store takes");
                return (number, CommitOutcome::TooLarge);
            }
            Err(error) => {
                // Nothing more can be written: serving on would promise what cannot be kept.
                tracing::error!(batch = number.0, %error, "commit failed for good");
                return (number, CommitOutcome::Fenced);
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// What became of a batch that cannot be carried out (any more): ours is the rank's last, or
/// another process has the rank.
async fn outcome<S: MetaStore>(shared: &Shared<S>, number: BatchNumber) -> CommitOutcome {
    let ours = RankState {
        batch: number.0,
        epoch: shared.epoch.0,
    };
    loop {
        match shared.store.get(&keys::rank_state(shared.rank)).await {
            Ok(Some(found)) if RankState::decode(found.value.clone()) == Ok(ours) => {
                return CommitOutcome::Done;
            }
            Ok(_) => return CommitOutcome::Fenced,
            Err(error) => tracing::warn!(%error, "the rank's last batch cannot be read"),
        }
        tokio::time::sleep(PAUSE_MAX).await;
    }
}

fn batch_of(commit: &Commit) -> Batch {
    let mut batch = Batch::new();
    for (key, value) in &commit.unchanged {
        batch.require_value(key.clone(), value.clone());
    }
    for (from, to) in &commit.delete_ranges {
        batch.delete_range(KeyRange::new(from.clone(), to.clone()));
    }
    for (key, value) in &commit.writes {
        match value {
            Some(value) => batch.put(key.clone(), value.clone()),
            None => batch.delete(key.clone()),
        };
    }
    batch
}

/// Reserves the next block of a counter.
pub(crate) async fn reserve<S: MetaStore>(store: &S, counter: Counter) -> Range<u64> {
    loop {
        match try_reserve(store, counter).await {
            Ok(block) => return block,
            // Another rank was faster, or nobody knows: a block that was taken in vain is lost,
            // which costs nothing.
            Err(Error::PreconditionFailed { .. } | Error::Unknown { .. }) => {}
            Err(error) => {
                tracing::warn!(counter = counter.name(), %error, "no numbers can be reserved");
                tokio::time::sleep(PAUSE_MAX).await;
            }
        }
    }
}

async fn try_reserve<S: MetaStore>(store: &S, counter: Counter) -> Result<Range<u64>, Error> {
    let key = keys::counter(counter.name());
    let found = store.get(&key).await?;
    let first = match &found {
        Some(Versioned { value, .. }) => {
            Stored::decode(value.clone())
                .map_err(|e| Error::Corrupt {
                    cause: format!("counter {}: {e}", counter.name()),
                })?
                .next
        }
        None => FIRST_NUMBER,
    };
    let end = first.saturating_add(counter.block());
    let mut batch = Batch::new();
    match &found {
        Some(found) => batch.require_revision(key.clone(), found.revision),
        None => batch.require_absent(key.clone()),
    };
    batch.put(key, Stored { next: end }.encode_to_vec());
    store.commit(batch).await?;
    Ok(first..end)
}

/// Loads without waiting, where the store can.
pub(crate) fn try_load<S: MetaStore>(store: &S, key: &LoadKey) -> Option<Loaded> {
    if let LoadKey::Directory(_, after) = key {
        let found = store.try_scan(&range_of(key)?, PAGE_ENTRIES)?;
        return Some(found.map_or_else(
            |error| failed(&error),
            |page| read_page(page, after.as_ref()),
        ));
    }
    let found = store.try_get(&key_of(key))?;
    Some(found.map_or_else(|error| failed(&error), |value| read(key, value)))
}

/// Loads.
pub(crate) async fn load<S: MetaStore>(store: &S, key: &LoadKey) -> Loaded {
    if let (LoadKey::Directory(_, after), Some(range)) = (key, range_of(key)) {
        let found = store.scan(&range, PAGE_ENTRIES).await;
        return found.map_or_else(
            |error| failed(&error),
            |page| read_page(page, after.as_ref()),
        );
    }
    let found = store.get(&key_of(key)).await;
    found.map_or_else(|error| failed(&error), |value| read(key, value))
}

fn key_of(key: &LoadKey) -> Bytes {
    match key {
        LoadKey::BackPointer(ino) => keys::back_pointer(*ino),
        LoadKey::Entry(dir, entry) => keys::dentry(*dir, entry.hash, &entry.name),
        LoadKey::Head(dir) => keys::fragment_head(*dir, Fragment::WHOLE),
        LoadKey::Page(ino, page) => keys::chunk_page(*ino, *page),
        LoadKey::Directory(dir, _) => keys::dentry(*dir, NameHash(0), b""),
    }
}

fn range_of(key: &LoadKey) -> Option<KeyRange> {
    let LoadKey::Directory(dir, after) = key else {
        return None;
    };
    let from = match after {
        // The first key after that entry: one zero byte more.
        Some(after) => {
            let name = [&after.name[..], b"\0"].concat();
            keys::dentry(*dir, after.hash, &name)
        }
        None => keys::dentry(*dir, NameHash(0), b""),
    };
    Some(KeyRange::new(from, keys::dentry_end(*dir)))
}

fn read(key: &LoadKey, found: Option<Versioned>) -> Loaded {
    let value = found.map(|found| found.value);
    let result = match key {
        LoadKey::BackPointer(_) => decode::<BackPointer>(value).map(Loaded::BackPointer),
        LoadKey::Entry(..) => decode::<Dentry>(value).map(Loaded::Entry),
        LoadKey::Head(_) => decode::<FragmentHead>(value).map(Loaded::Head),
        LoadKey::Page(..) => {
            decode::<ChunkPage>(value).map(|page| Loaded::Page(page.unwrap_or_default()))
        }
        LoadKey::Directory(..) => return Loaded::Failed,
    };
    result.unwrap_or_else(|reason| {
        tracing::error!(?key, %reason, "a value of the metadata store cannot be read");
        Loaded::Failed
    })
}

fn decode<M: Message + Default>(value: Option<Bytes>) -> Result<Option<M>, prost::DecodeError> {
    value.map(M::decode).transpose()
}

fn read_page(page: ScanPage, after: Option<&EntryKey>) -> Loaded {
    let more = page.more();
    let mut entries = Vec::with_capacity(page.entries.len());
    for entry in page.entries {
        let Some((_, hash, name)) = keys::parse_dentry(&entry.key) else {
            continue;
        };
        match Dentry::decode(entry.versioned.value) {
            Ok(dentry) => entries.push((EntryKey { hash, name }, dentry)),
            Err(reason) => {
                tracing::error!(?name, %reason, "a directory entry cannot be read");
                return Loaded::Failed;
            }
        }
    }
    debug_assert!(entries.first().is_none_or(|(first, _)| Some(first) > after));
    Loaded::Directory(entries, more)
}

fn failed(error: &Error) -> Loaded {
    tracing::warn!(%error, "the metadata store cannot be read");
    Loaded::Failed
}

/// Entries read at a time.
const PAGE_ENTRIES: usize = 1024;
/// First number of every counter: lower ones mean something special.
const FIRST_NUMBER: u64 = 16;
/// First and longest pause between attempts.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
