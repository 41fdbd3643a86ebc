//! Calls to etcd, with a deadline, and what their failures mean.

use std::time::Duration;

use etcd_client::{Client, GetOptions, KeyValue, KvClient, Txn, TxnOp, TxnOpResponse, TxnResponse};

use crate::error::Error;

/// Why a call failed.
#[derive(Debug)]
pub(crate) enum CallError {
    /// etcd did not execute it.
    Refused(Error),
    /// Nobody knows whether etcd has executed it.
    Lost(String),
}

impl CallError {
    /// For calls that change nothing, or nothing that matters.
    pub(crate) fn into_unavailable(self) -> Error {
        match self {
            Self::Refused(error) => error,
            Self::Lost(cause) => Error::Unavailable { cause },
        }
    }

    /// For calls that commit a batch.
    pub(crate) fn into_unknown(self) -> Error {
        match self {
            Self::Refused(error) => error,
            Self::Lost(cause) => Error::Unknown { cause },
        }
    }
}

/// The connection to etcd.
pub(crate) struct Rpc {
    pub(crate) client: Client,
    kv: KvClient,
    timeout: Duration,
    #[cfg(feature = "test-util")]
    pub(crate) faults: super::EtcdFaults,
}

impl Rpc {
    pub(crate) fn new(client: Client, timeout: Duration) -> Self {
        let kv = client
            .kv_client()
            .max_decoding_message_size(MESSAGE_BYTES_MAX);
        Self {
            client,
            kv,
            timeout,
            #[cfg(feature = "test-util")]
            faults: super::EtcdFaults::default(),
        }
    }

    /// Executes a transaction that may change something.
    #[cfg(not(feature = "test-util"))]
    pub(crate) async fn change(&self, txn: Txn) -> Result<Answer, CallError> {
        self.call(txn).await
    }

    /// Executes a transaction that may change something, unless a test wants something else.
    #[cfg(feature = "test-util")]
    pub(crate) async fn change(&self, txn: Txn) -> Result<Answer, CallError> {
        use super::faults::Fate;
        match self.faults.next()? {
            Fate::Normal => self.call(txn).await,
            Fate::AnswerLost => {
                self.call(txn).await?;
                Err(CallError::Lost("the answer was lost on purpose".to_owned()))
            }
            Fate::Late => Err(self.faults.keep(txn)),
        }
    }

    /// Executes the transaction that a test has held back; says whether there was one.
    #[cfg(feature = "test-util")]
    pub(crate) async fn let_go(&self) -> Result<bool, Error> {
        let Some(txn) = self.faults.take() else {
            return Ok(false);
        };
        let answer = self.call(txn).await;
        answer.map(|_| true).map_err(CallError::into_unavailable)
    }

    /// Reads several things as they are at one moment.
    pub(crate) async fn read(&self, gets: Vec<TxnOp>) -> Result<Answer, Error> {
        let answer = self.call(Txn::new().and_then(gets)).await;
        answer.map_err(CallError::into_unavailable)
    }

    async fn call(&self, txn: Txn) -> Result<Answer, CallError> {
        let mut kv = self.kv.clone();
        match tokio::time::timeout(self.timeout, kv.txn(txn)).await {
            Ok(Ok(response)) => Answer::new(&response),
            Ok(Err(error)) => Err(failure(&error)),
            Err(_) => Err(CallError::Lost("etcd has not answered in time".to_owned())),
        }
    }
}

/// The answer to a transaction.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) succeeded: bool,
    /// The store's revision when the transaction was executed; its own if it changed something.
    pub(crate) revision: i64,
    /// What each get has found, in order.
    pub(crate) found: Vec<Found>,
}

/// What a get has found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) entries: Vec<KeyValue>,
    /// Whether the limit left something out.
    pub(crate) more: bool,
}

impl Answer {
    fn new(response: &TxnResponse) -> Result<Self, CallError> {
        let Some(header) = response.header() else {
            return Err(CallError::Lost("etcd's answer has no header".to_owned()));
        };
        let found = response
            .op_responses()
            .into_iter()
            .filter_map(|response| match response {
                TxnOpResponse::Get(mut get) => Some(Found {
                    more: get.more(),
                    entries: get.take_kvs(),
                }),
                _ => None,
            });
        Ok(Self {
            succeeded: response.succeeded(),
            revision: header.revision(),
            found: found.collect(),
        })
    }

    /// What the get number `index` has found.
    pub(crate) fn take(&mut self, index: usize) -> Found {
        self.found
            .get_mut(index)
            .map(std::mem::take)
            .unwrap_or_default()
    }

    /// The only entry that the get number `index` can have found.
    pub(crate) fn take_one(&mut self, index: usize) -> Option<KeyValue> {
        self.take(index).entries.into_iter().next()
    }
}

/// Reads a single key.
pub(crate) fn get(name: Vec<u8>) -> TxnOp {
    TxnOp::get(name, None)
}

/// Reads a range.
pub(crate) fn get_range((start, end): (Vec<u8>, Vec<u8>), options: GetOptions) -> TxnOp {
    TxnOp::get(start, Some(options.with_range(end)))
}

pub(crate) fn failure(error: &etcd_client::Error) -> CallError {
    let cause = error.to_string();
    match error {
        etcd_client::Error::GRpcStatus(status) => match status.code() as i32 {
            PERMISSION_DENIED | UNAUTHENTICATED | RESOURCE_EXHAUSTED | INVALID_ARGUMENT
            | FAILED_PRECONDITION | OUT_OF_RANGE | NOT_FOUND | UNIMPLEMENTED => {
                CallError::Refused(Error::Unavailable { cause })
            }
            _ => CallError::Lost(cause),
        },
        _ => CallError::Lost(cause),
    }
}

/// Answers to reads may be as large as many of the largest values.
pub(crate) const MESSAGE_BYTES_MAX: usize = 512 << 20;
// gRPC status codes that say that the request was not executed.
const INVALID_ARGUMENT: i32 = 3;
const NOT_FOUND: i32 = 5;
const PERMISSION_DENIED: i32 = 7;
const RESOURCE_EXHAUSTED: i32 = 8;
const FAILED_PRECONDITION: i32 = 9;
const OUT_OF_RANGE: i32 = 11;
const UNIMPLEMENTED: i32 = 12;
const UNAUTHENTICATED: i32 = 16;
