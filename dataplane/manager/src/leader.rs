//! Leader election through the store: compare-and-swap on one key, time on one's own clock.

use std::time::Duration;

use bytes::Bytes;
use hither_metastore::{Batch, Error, MetaStore, Revision};
use hither_proto::stored::LeaderRecord;
use prost::Message;

use crate::state::{LEADER_KEY, TERM_KEY};

/// Leadership as long as it is renewed.
#[derive(Debug)]
pub(crate) struct Leadership {
    record: LeaderRecord,
}

/// Outcome of one look at the election.
pub(crate) enum Election {
    /// We lead.
    Won(Leadership),
    /// Another one leads; its address.
    Other(String, Revision),
}

/// Looks who leads, and takes over from a leader whose record has been the same `unchanged`
/// revision for long enough (the caller measures that), from itself, or if there is none.
pub(crate) async fn stand<S: MetaStore>(
    store: &S,
    boot_id: u64,
    address: &str,
    unchanged: Option<Revision>,
) -> Result<Election, Error> {
    let found = store.get(LEADER_KEY).await?;
    let mut batch = Batch::new();
    let term = match &found {
        Some(found) => {
            let other = LeaderRecord::decode(found.value.clone()).map_err(|e| Error::Corrupt {
                cause: format!("m/leader: {e}"),
            })?;
            // Our own record is of an attempt whose outcome was not known, or of a term that was
            // over: nobody leads.
            let vacant = other.boot_id == boot_id || other.boot_id == NOBODY;
            if !vacant && unchanged != Some(found.revision) {
                return Ok(Election::Other(other.address, found.revision));
            }
            batch.require_revision(Bytes::from_static(LEADER_KEY), found.revision);
            other.term + 1
        }
        None => {
            batch.require_absent(Bytes::from_static(LEADER_KEY));
            1
        }
    };
    let record = LeaderRecord {
        boot_id,
        address: address.to_owned(),
        term,
        beat: 0,
    };
    batch.put(Bytes::from_static(LEADER_KEY), record.encode_to_vec());
    // The term fences commits of a predecessor that does not know yet.
    batch.put(Bytes::from_static(TERM_KEY), term_value(&record));
    store.commit(batch).await?;
    Ok(Election::Won(Leadership { record }))
}

impl Leadership {
    /// The precondition of every commit of this leader.
    pub(crate) fn require(&self, batch: &mut Batch) {
        batch.require_value(Bytes::from_static(TERM_KEY), term_value(&self.record));
    }

    /// Shows that we still lead.
    ///
    /// # Errors
    /// `PreconditionFailed` when another one leads now.
    pub(crate) async fn renew<S: MetaStore>(&mut self, store: &S) -> Result<(), Error> {
        let next = LeaderRecord {
            beat: self.record.beat + 1,
            ..self.record.clone()
        };
        let mut batch = Batch::new();
        // The term, not the record: a renewal nobody heard of changes nothing about who leads.
        self.require(&mut batch);
        batch.put(Bytes::from_static(LEADER_KEY), next.encode_to_vec());
        // A number is used once: others tell by it that the record has changed.
        self.record = next;
        store.commit(batch).await?;
        Ok(())
    }
}

impl Leadership {
    /// Gives the lead up at the end, so that nobody has to wait for it to run out.
    pub(crate) async fn release<S: MetaStore>(self, store: &S) {
        let mut batch = Batch::new();
        self.require(&mut batch);
        let vacant = LeaderRecord {
            boot_id: NOBODY,
            address: String::new(),
            beat: self.record.beat + 1,
            term: self.record.term,
        };
        batch.put(Bytes::from_static(LEADER_KEY), vacant.encode_to_vec());
        if let Err(error) = store.commit(batch).await {
            tracing::debug!(%error, "the lead could not be given up: it runs out");
        }
    }
}

fn term_value(record: &LeaderRecord) -> Bytes {
    Bytes::from(format!("{} {}", record.term, record.boot_id))
}

/// Boot id of the record of a leader that has ended.
const NOBODY: u64 = 0;
/// A leader renews this often.
pub(crate) const RENEW: Duration = Duration::from_secs(1);
/// A record that did not change for this long belongs to a leader that is gone; the leader itself
/// stops acting before.
pub(crate) const LEADER_LOST_AFTER: Duration = Duration::from_secs(4);
