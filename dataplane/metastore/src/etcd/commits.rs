//! Committing batches: small ones in one transaction, large ones through a redo record.
//!
//! At most one large batch is under way in a store. While it is, the pending key exists: every
//! other transaction compares it to be absent, so nothing changes between the moment when the
//! batch is proposed and the one when it is wholly applied or refused, and reads that find it
//! finish the batch first. Each step of a large batch compares the revision of the pending key
//! and moves it on, so any number of helpers apply each piece exactly once.

use bytes::{Bytes, BytesMut};
use etcd_client::{Compare, CompareOp, DeleteOptions, GetOptions, KeyValue, Txn, TxnOp};

use crate::batch::{Batch, Precondition};
use crate::error::Error;
use crate::etcd::Inner;
use crate::etcd::keys::{RedoId, decode, etcd_revision, plain, revision, stamped};
use crate::etcd::redo::{Head, Outcome, Piece, Redo, Stage};
use crate::etcd::rpc::{Answer, CallError, get, get_range};
use crate::types::{KeyRange, Revision};

impl Inner {
    pub(crate) async fn commit(&self, batch: &Batch) -> Result<Revision, Error> {
        batch.check()?;
        match self.small(batch) {
            Some(operations) => self.commit_small(batch, operations).await,
            None => self.commit_large(batch).await,
        }
    }

    /// The operations of a batch that fits one transaction.
    fn small(&self, batch: &Batch) -> Option<Vec<TxnOp>> {
        if batch.preconditions().len() > SMALL_OPERATIONS_MAX {
            return None;
        }
        let mut operations = Vec::new();
        for range in batch.range_deletes() {
            self.delete_around(range, batch, &mut operations)?;
        }
        for (key, value) in batch.changes() {
            if operations.len() >= SMALL_OPERATIONS_MAX {
                return None;
            }
            operations.push(match value {
                Some(value) => TxnOp::put(self.keys.data(key), plain(value), None),
                None => TxnOp::delete(self.keys.data(key), None),
            });
        }
        let count = batch.preconditions().len() + operations.len();
        let bytes = batch.size_bytes() + count * OPERATION_OVERHEAD_BYTES;
        (bytes <= SMALL_BYTES_MAX).then_some(operations)
    }

    /// Deletes a range but for the keys that the batch changes: etcd takes no put inside a range
    /// that the same transaction deletes.
    fn delete_around(
        &self,
        range: &KeyRange,
        batch: &Batch,
        operations: &mut Vec<TxnOp>,
    ) -> Option<()> {
        let mut start = range.start.clone();
        for (key, _) in batch.changes().range::<[u8], _>(range.bounds()) {
            self.delete_range(&KeyRange::new(start, key.clone()), operations);
            if operations.len() >= SMALL_OPERATIONS_MAX {
                return None;
            }
            start = [&key[..], &[0]].concat().into();
        }
        self.delete_range(
            &KeyRange {
                start,
                end: range.end.clone(),
            },
            operations,
        );
        Some(())
    }

    fn delete_range(&self, range: &KeyRange, operations: &mut Vec<TxnOp>) {
        if !range.is_empty() {
            operations.push(delete_range(self.keys.data_range(range)));
        }
    }

    async fn commit_small(&self, batch: &Batch, operations: Vec<TxnOp>) -> Result<Revision, Error> {
        let conditions = batch.preconditions();
        let mut compares: Vec<_> = conditions.iter().map(|c| self.compare(c)).collect();
        for _ in 0..ATTEMPTS_MAX {
            let mut all = vec![absent(self.keys.pending())];
            all.append(&mut compares.clone());
            let txn = Txn::new()
                .when(all)
                .and_then(operations.clone())
                .or_else([get(self.keys.pending())]);
            let mut answer = self
                .rpc
                .change(txn)
                .await
                .map_err(CallError::into_unknown)?;
            if answer.succeeded {
                return Ok(revision(answer.revision));
            }
            if answer.take_one(0).is_some() {
                self.finish().await?;
                continue;
            }
            // Either a precondition does not hold, or a key has a value of a large batch, to which
            // only its present revision can be compared.
            let now = self.read_keys(conditions, Some(answer.revision)).await?;
            if let Some(index) = first_failing(conditions, &now)? {
                return Err(Error::PreconditionFailed { index });
            }
            let exact = conditions.iter().zip(&now);
            compares = exact
                .map(|(c, now)| self.compare_exactly(c, now.as_ref()))
                .collect();
        }
        Err(Error::Unavailable {
            cause: "too many others change the same keys".to_owned(),
        })
    }

    fn compare(&self, condition: &Precondition) -> Compare {
        let name = self.keys.data(condition.key());
        match condition {
            Precondition::Absent(_) => absent(name),
            Precondition::AtRevision(_, revision) => {
                Compare::mod_revision(name, CompareOp::Equal, etcd_revision(*revision))
            }
            Precondition::ValueEquals(_, value) => {
                Compare::value(name, CompareOp::Equal, plain(value))
            }
        }
    }

    /// A condition that held for `now` holds as long as nobody writes the key.
    fn compare_exactly(&self, condition: &Precondition, now: Option<&KeyValue>) -> Compare {
        let name = self.keys.data(condition.key());
        match now {
            None => absent(name),
            Some(now) => Compare::mod_revision(name, CompareOp::Equal, now.mod_revision()),
        }
    }

    /// What the keys of some preconditions have, now or at an earlier revision.
    async fn read_keys(
        &self,
        conditions: &[Precondition],
        at: Option<i64>,
    ) -> Result<Vec<Option<KeyValue>>, Error> {
        let mut found = Vec::with_capacity(conditions.len());
        for some in conditions.chunks(READ_KEYS_MAX) {
            let options = GetOptions::new().with_revision(at.unwrap_or(0));
            let gets = some.iter().map(|condition| {
                TxnOp::get(self.keys.data(condition.key()), Some(options.clone()))
            });
            let mut answer = self.rpc.read(gets.collect()).await?;
            found.extend((0..some.len()).map(|index| answer.take_one(index)));
        }
        Ok(found)
    }

    async fn commit_large(&self, batch: &Batch) -> Result<Revision, Error> {
        let record = Redo::encode(batch);
        let id = RedoId(rand::random());
        for _ in 0..ATTEMPTS_MAX {
            let Some(revision) = self.propose(id, &record).await? else {
                continue;
            };
            // From here on it may be finished by others, whatever happens to us.
            let unknown = |error: Error| Error::Unknown {
                cause: error.to_string(),
            };
            self.finish().await.map_err(unknown)?;
            return self.outcome(revision, id).await;
        }
        Err(Error::Unavailable {
            cause: "too many large batches at once".to_owned(),
        })
    }

    /// Uploads the record and makes it pending: the commit point, if its preconditions hold. `None`
    /// if another large batch came first, which took our parts with it.
    async fn propose(&self, id: RedoId, record: &Bytes) -> Result<Option<Revision>, Error> {
        let mut compares = vec![absent(self.keys.pending())];
        let mut parts = 0;
        for chunk in record.chunks(PART_BYTES) {
            let name = self.keys.part(id, parts);
            let put = TxnOp::put(name.clone(), chunk, None);
            let answer = self.rpc.change(Txn::new().and_then([put])).await;
            // Whatever was uploaded goes with the next large batch of anybody.
            let answer = answer.map_err(CallError::into_unavailable)?;
            compares.push(Compare::mod_revision(
                name,
                CompareOp::Equal,
                answer.revision,
            ));
            parts += 1;
        }
        let head = Head {
            id,
            parts,
            stage: Stage::Proposed,
        };
        let txn = Txn::new().when(compares).and_then([TxnOp::put(
            self.keys.pending(),
            head.encode(),
            None,
        )]);
        match self.rpc.change(txn).await {
            Ok(answer) if answer.succeeded => Ok(Some(revision(answer.revision))),
            Ok(_) => {
                self.finish().await?;
                Ok(None)
            }
            Err(CallError::Refused(error)) => Err(error),
            Err(CallError::Lost(cause)) => self.settle_proposal(id, cause).await,
        }
    }

    /// Finds out whether a proposal whose answer was lost has taken place, and makes sure that it
    /// will not if it has not.
    async fn settle_proposal(&self, id: RedoId, cause: String) -> Result<Option<Revision>, Error> {
        let unknown = |_| Error::Unknown {
            cause: cause.clone(),
        };
        for _ in 0..ATTEMPTS_MAX {
            // Without its parts it cannot become pending any more.
            let txn = Txn::new()
                .when([absent(self.keys.pending())])
                .and_then([
                    delete_range(self.keys.parts(id)),
                    get_range(self.keys.outcomes(), GetOptions::new()),
                ])
                .or_else([get(self.keys.pending())]);
            let answer = self
                .rpc
                .change(txn)
                .await
                .map_err(CallError::into_unavailable);
            let mut answer = answer.map_err(unknown)?;
            if answer.succeeded {
                return match self.find_outcome(id, &mut answer) {
                    Some(revision) => Ok(Some(revision)),
                    None => Err(Error::Unavailable { cause }),
                };
            }
            let Some(pending) = answer.take_one(0) else {
                continue;
            };
            if Head::decode(pending.value())?.id == id {
                return Ok(Some(revision(pending.create_revision())));
            }
            self.finish().await.map_err(unknown)?;
        }
        Err(unknown(Error::Closed))
    }

    /// The revision of a large batch that has an outcome.
    fn find_outcome(&self, id: RedoId, answer: &mut Answer) -> Option<Revision> {
        let outcomes = answer.take(0).entries;
        outcomes.into_iter().find_map(|outcome| {
            // A batch ends after it was proposed, so the number in the name tells which it was.
            let name = outcome.key();
            let number = name.len().checked_sub(16)?;
            let revision = Revision(u64::from_be_bytes(
                name.get(number..number + 8)?.try_into().ok()?,
            ));
            (self.keys.outcome(revision, id) == name).then_some(revision)
        })
    }

    /// Reads how a large batch ended.
    async fn outcome(&self, revision: Revision, id: RedoId) -> Result<Revision, Error> {
        let unknown = |cause: String| Error::Unknown { cause };
        let name = self.keys.outcome(revision, id);
        let answer = self.rpc.read(vec![get(name.clone())]).await;
        let mut answer = answer.map_err(|error| unknown(error.to_string()))?;
        let Some(found) = answer.take_one(0) else {
            return Err(unknown(
                "others have committed too much meanwhile".to_owned(),
            ));
        };
        let outcome = Outcome::decode(found.value())?;
        // It would go by itself later on.
        let delete = Txn::new().and_then([TxnOp::delete(name, None)]);
        drop(self.rpc.change(delete).await);
        match outcome {
            Outcome::Committed => Ok(revision),
            Outcome::Failed(index) => Err(Error::PreconditionFailed {
                index: usize::try_from(index).unwrap_or(usize::MAX),
            }),
        }
    }

    /// Finishes the large batch that is under way, if there is one, whoever has proposed it.
    pub(crate) async fn finish(&self) -> Result<(), Error> {
        let mut loaded: Option<(Revision, Redo)> = None;
        loop {
            let mut answer = self.rpc.read(vec![get(self.keys.pending())]).await?;
            let Some(pending) = answer.take_one(0) else {
                return Ok(());
            };
            let number = revision(pending.create_revision());
            if loaded.as_ref().is_none_or(|(loaded, _)| *loaded != number) {
                let head = Head::decode(pending.value())?;
                let Some(redo) = self.load(head, &pending, None).await? else {
                    continue;
                };
                loaded = Some((number, redo));
            }
            if let Some((_, redo)) = &loaded {
                self.step(&pending, redo).await?;
            }
        }
    }

    /// Reads the record of a pending batch, now or as of an earlier revision. `None` if the batch
    /// has ended meanwhile.
    pub(crate) async fn load(
        &self,
        head: Head,
        pending: &KeyValue,
        at: Option<i64>,
    ) -> Result<Option<Redo>, Error> {
        let options = GetOptions::new().with_revision(at.unwrap_or(0));
        let pending_now = TxnOp::get(self.keys.pending(), Some(options.clone()));
        let parts = get_range(self.keys.parts(head.id), options);
        let mut answer = self.rpc.read(vec![pending_now, parts]).await?;
        let same = answer
            .take_one(0)
            .is_some_and(|now| now.create_revision() == pending.create_revision());
        if !same {
            return Ok(None);
        }
        let mut record = BytesMut::new();
        for part in answer.take(1).entries {
            record.extend_from_slice(part.value());
        }
        Redo::decode(record.freeze(), revision(pending.create_revision())).map(Some)
    }

    /// Takes a pending batch one step on. Harmless if somebody else has done so meanwhile.
    async fn step(&self, pending: &KeyValue, redo: &Redo) -> Result<(), Error> {
        let head = Head::decode(pending.value())?;
        let pieces = redo.pieces();
        let number = redo.commit.revision;
        let mut operations = match head.stage {
            Stage::Proposed => {
                // Nothing changes while it is pending; if it no longer is, the compare fails.
                let now = self.read_keys(&redo.preconditions, None).await?;
                match first_failing(&redo.preconditions, &now)? {
                    None => vec![self.advance(head, 0)],
                    Some(index) => {
                        let index = u32::try_from(index).unwrap_or(u32::MAX);
                        self.conclude(head, number, Outcome::Failed(index))
                    }
                }
            }
            Stage::Applying(next) => {
                match pieces.get(usize::try_from(next).unwrap_or(usize::MAX)) {
                    Some(Piece::RangeDeletes(ranges)) => {
                        let mut operations = vec![self.advance(head, next + 1)];
                        for range in *ranges {
                            self.delete_range(range, &mut operations);
                        }
                        operations
                    }
                    Some(Piece::Changes(changes)) => {
                        let mut operations = vec![self.advance(head, next + 1)];
                        operations.extend(changes.iter().map(|(key, value)| match value {
                            Some(value) => {
                                TxnOp::put(self.keys.data(key), stamped(number, value), None)
                            }
                            None => TxnOp::delete(self.keys.data(key), None),
                        }));
                        operations
                    }
                    None => self.conclude(head, number, Outcome::Committed),
                }
            }
        };
        let unchanged = Compare::mod_revision(
            self.keys.pending(),
            CompareOp::Equal,
            pending.mod_revision(),
        );
        let txn = Txn::new()
            .when([unchanged])
            .and_then(std::mem::take(&mut operations));
        let answer = self.rpc.change(txn).await;
        answer.map(drop).map_err(CallError::into_unavailable)
    }

    fn advance(&self, head: Head, next: u32) -> TxnOp {
        let head = Head {
            stage: Stage::Applying(next),
            ..head
        };
        TxnOp::put(self.keys.pending(), head.encode(), None)
    }

    /// Ends a large batch: notes the outcome, and clears away its record, abandoned uploads, and
    /// outcomes that nobody has asked for in a long time.
    fn conclude(&self, head: Head, number: Revision, outcome: Outcome) -> Vec<TxnOp> {
        let old = Revision(number.0.saturating_sub(OUTCOME_REVISIONS));
        vec![
            TxnOp::delete(self.keys.pending(), None),
            delete_range(self.keys.all_parts()),
            delete_range(self.keys.outcomes_before(old)),
            TxnOp::put(self.keys.outcome(number, head.id), outcome.encode(), None),
        ]
    }
}

fn delete_range((start, end): (Vec<u8>, Vec<u8>)) -> TxnOp {
    TxnOp::delete(start, Some(DeleteOptions::new().with_range(end)))
}

pub(crate) fn absent(name: Vec<u8>) -> Compare {
    Compare::version(name, CompareOp::Equal, 0)
}

fn first_failing(
    conditions: &[Precondition],
    now: &[Option<KeyValue>],
) -> Result<Option<usize>, Error> {
    for (index, (condition, now)) in conditions.iter().zip(now).enumerate() {
        let now = now
            .as_ref()
            .map(|now| decode(now.value(), now.mod_revision()))
            .transpose()?;
        if !condition.holds(now.as_ref().map(|now| &now.versioned)) {
            return Ok(Some(index));
        }
    }
    Ok(None)
}

/// etcd takes 128 comparisons and 128 operations by default.
const SMALL_OPERATIONS_MAX: usize = 120;
/// etcd takes requests of 1.5 MiB by default.
const SMALL_BYTES_MAX: usize = 1280 << 10;
/// What an operation takes beside its key and value, prefix included.
const OPERATION_OVERHEAD_BYTES: usize = 128;
const PART_BYTES: usize = 1 << 20;
/// So many keys are read at once.
const READ_KEYS_MAX: usize = 100;
/// After so many tries in vain others are to blame.
const ATTEMPTS_MAX: usize = 1000;
/// An outcome is kept for so many revisions.
const OUTCOME_REVISIONS: u64 = 100_000;
