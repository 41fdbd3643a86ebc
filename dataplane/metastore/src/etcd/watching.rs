//! Following changes in etcd, over broken connections and with large batches in one piece.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use etcd_client::{Event, EventType, GetOptions, TxnOp, WatchOptions, WatchStream};
use futures::StreamExt;

use crate::codec::changes_within;
use crate::error::Error;
use crate::etcd::Inner;
use crate::etcd::keys::{decode, etcd_revision, revision};
use crate::etcd::redo::Head;
use crate::etcd::rpc::{CallError, MESSAGE_BYTES_MAX, failure};
use crate::types::{KeyRange, Revision};
use crate::watch::{Change, Watch, WatchItem};

/// One watch and where it is.
struct Follower {
    inner: Arc<Inner>,
    prefix: KeyRange,
    /// Nothing up to here is to be reported, since the caller knows it.
    after: Revision,
    /// etcd's revision up to which events were read.
    read_up_to: i64,
    stream: Option<WatchStream>,
    ready: VecDeque<WatchItem>,
    ended: bool,
    backoff: Duration,
}

pub(crate) fn watch(inner: Arc<Inner>, prefix: &[u8], after: Revision) -> Watch {
    let follower = Follower {
        inner,
        prefix: KeyRange::prefix(Bytes::copy_from_slice(prefix)),
        after,
        read_up_to: etcd_revision(after),
        stream: None,
        ready: VecDeque::new(),
        ended: false,
        backoff: BACKOFF_MIN,
    };
    let items = futures::stream::unfold(follower, |mut follower| async {
        let item = follower.next().await?;
        follower.ended |= matches!(item, Ok(WatchItem::Compacted) | Err(_));
        Some((item, follower))
    });
    Watch::new(items.boxed())
}

impl Follower {
    async fn next(&mut self) -> Option<Result<WatchItem, Error>> {
        while !self.ended {
            if let Some(item) = self.ready.pop_front() {
                return Some(Ok(item));
            }
            match self.read_on().await {
                Ok(()) => self.backoff = BACKOFF_MIN,
                Err(Trouble::Compacted) => return Some(Ok(WatchItem::Compacted)),
                Err(Trouble::Broken) => {
                    self.stream = None;
                    tokio::time::sleep(self.backoff).await;
                    self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
                }
                Err(Trouble::Fatal(error)) => return Some(Err(error)),
            }
        }
        None
    }

    /// Reads the next message and puts what is to be reported into `ready`.
    async fn read_on(&mut self) -> Result<(), Trouble> {
        let stream = match &mut self.stream {
            Some(stream) => stream,
            None => {
                let stream = self.connect().await?;
                self.stream.insert(stream)
            }
        };
        let message = stream.message().await.map_err(|error| trouble(&error))?;
        let message = message.ok_or(Trouble::Broken)?;
        if message.compact_revision() > 0 {
            return Err(Trouble::Compacted);
        }
        if message.canceled() {
            return Err(Trouble::Broken);
        }
        let events = message.events();
        let mut start = 0;
        while start < events.len() {
            // All events of one transaction come together.
            let number = mod_revision(&events[start]);
            let same = events[start..]
                .iter()
                .take_while(|e| mod_revision(e) == number)
                .count();
            self.take(number, &events[start..start + same]).await?;
            self.read_up_to = self.read_up_to.max(number);
            start += same;
        }
        Ok(())
    }

    async fn connect(&self) -> Result<WatchStream, Trouble> {
        let (start, end) = self.inner.keys.data_range(&self.prefix);
        let options = WatchOptions::new()
            .with_range(end)
            .with_start_revision(self.read_up_to.saturating_add(1));
        let client = self.inner.rpc.client.watch_client();
        let mut client = client.max_decoding_message_size(MESSAGE_BYTES_MAX);
        let watch = client.watch(start, Some(options));
        match tokio::time::timeout(self.inner.options.request_timeout, watch).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => Err(trouble(&error)),
            Err(_) => Err(Trouble::Broken),
        }
    }

    /// Takes the events of the transaction `number`.
    async fn take(&mut self, number: i64, events: &[Event]) -> Result<(), Trouble> {
        if number <= self.read_up_to {
            return Ok(());
        }
        let mut changes = Vec::with_capacity(events.len());
        let mut large = None;
        for event in events {
            let Some(entry) = event.kv() else { continue };
            let Some(key) = self.inner.keys.key(entry.key()) else {
                continue;
            };
            changes.push(match event.event_type() {
                EventType::Delete => Change::Deleted { key },
                EventType::Put => {
                    let stored = decode(entry.value(), number).map_err(Trouble::Fatal)?;
                    if stored.stamped {
                        large = Some(stored.versioned.revision);
                    }
                    Change::Put {
                        key,
                        value: stored.versioned.value,
                    }
                }
            });
        }
        let only_deletes = changes
            .iter()
            .all(|change| matches!(change, Change::Deleted { .. }));
        if large.is_some() || only_deletes {
            // A piece of a large batch, or perhaps one: the whole batch is reported at its first
            // piece, and the others are passed over.
            match self.large_batch(number, large).await? {
                Some(Piece::Known) => return Ok(()),
                Some(Piece::First(number, whole)) => {
                    self.report(number, whole);
                    return Ok(());
                }
                None => {}
            }
        }
        self.report(revision(number), changes);
        Ok(())
    }

    fn report(&mut self, revision: Revision, changes: Vec<Change>) {
        self.after = self.after.max(revision);
        if !changes.is_empty() {
            self.ready
                .push_back(WatchItem::Commit { revision, changes });
        }
    }

    /// Whether the transaction `number` was a piece of a large batch: then the pending key was
    /// there before it. `known` is the batch if an event has said which.
    async fn large_batch(
        &self,
        number: i64,
        known: Option<Revision>,
    ) -> Result<Option<Piece>, Trouble> {
        if known.is_some_and(|known| known <= self.after) {
            return Ok(Some(Piece::Known));
        }
        let before = number - 1;
        let options = GetOptions::new().with_revision(before);
        let pending = TxnOp::get(self.inner.keys.pending(), Some(options));
        let mut answer = self.inner.rpc.read(vec![pending]).await.map_err(historic)?;
        let Some(pending) = answer.take_one(0) else {
            return Ok(None);
        };
        let batch = revision(pending.create_revision());
        if batch <= self.after {
            return Ok(Some(Piece::Known));
        }
        let head = Head::decode(pending.value()).map_err(Trouble::Fatal)?;
        let redo = self
            .inner
            .load(head, &pending, Some(before))
            .await
            .map_err(historic)?;
        let redo = redo.ok_or(Trouble::Broken)?;
        Ok(Some(Piece::First(
            batch,
            changes_within(&redo.commit, &self.prefix),
        )))
    }
}

enum Piece {
    /// Of a batch that was reported, or that the caller has seen.
    Known,
    First(Revision, Vec<Change>),
}

enum Trouble {
    /// Connect again.
    Broken,
    Compacted,
    Fatal(Error),
}

fn trouble(error: &etcd_client::Error) -> Trouble {
    match failure(error) {
        CallError::Lost(_) => Trouble::Broken,
        CallError::Refused(_) if is_compacted(&error.to_string()) => Trouble::Compacted,
        CallError::Refused(error) => Trouble::Fatal(error),
    }
}

/// The failure of a read in the past.
fn historic(error: Error) -> Trouble {
    match error {
        Error::Unavailable { cause } if is_compacted(&cause) => Trouble::Compacted,
        Error::Unavailable { .. } => Trouble::Broken,
        other => Trouble::Fatal(other),
    }
}

fn is_compacted(cause: &str) -> bool {
    cause.contains("required revision has been compacted")
}

fn mod_revision(event: &Event) -> i64 {
    event.kv().map_or(0, etcd_client::KeyValue::mod_revision)
}

const BACKOFF_MIN: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_secs(1);
