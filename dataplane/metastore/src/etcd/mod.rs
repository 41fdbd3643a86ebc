//! The metadata store in etcd (3.4 and later).
//!
//! A batch is one transaction as long as it fits one; a larger one goes through a redo record
//! (see the module `commits`). etcd's revisions are the store's. Everything is below one prefix,
//! so several stores, and others, may share an etcd cluster.

mod commits;
#[cfg(feature = "test-util")]
mod faults;
mod keys;
mod redo;
mod rpc;
mod watching;

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Client, ConnectOptions, GetOptions, KeyValue, Txn, TxnOp};

use crate::batch::Batch;
use crate::error::Error;
use crate::etcd::keys::{Keys, decode, revision};
use crate::etcd::rpc::{CallError, Rpc, failure, get, get_range};
use crate::store::{MetaStore, Snapshot};
use crate::types::{
    Entry, KeyRange, Revision, SCAN_BYTES_MAX, SCAN_ENTRIES_MAX, ScanPage, Versioned,
};
use crate::watch::Watch;

#[cfg(feature = "test-util")]
pub use crate::etcd::faults::EtcdFaults;

/// How to reach etcd.
#[derive(Clone)]
pub struct EtcdOptions {
    /// Addresses of the members, such as `http://127.0.0.1:2379`; at least one.
    pub endpoints: Vec<String>,
    /// What all keys of this store begin with, such as `/hither/NAME/`. Nothing else may use it.
    pub prefix: Vec<u8>,
    /// User name and password, if etcd wants any.
    pub user: Option<(String, String)>,
    /// How to encrypt, for addresses that begin with `https://`.
    #[cfg(feature = "etcd-tls")]
    pub tls: Option<EtcdTls>,
    /// A call that takes longer has failed. Default 5 s.
    pub request_timeout: Duration,
    /// A connection that does not answer for so long is given up; half of it is the interval at
    /// which it is asked. Default 6 s.
    pub keep_alive_timeout: Duration,
}

impl EtcdOptions {
    /// The defaults for the store below `prefix`.
    #[must_use]
    pub fn new(endpoints: Vec<String>, prefix: impl Into<Vec<u8>>) -> Self {
        Self {
            endpoints,
            prefix: prefix.into(),
            user: None,
            #[cfg(feature = "etcd-tls")]
            tls: None,
            request_timeout: Duration::from_secs(5),
            keep_alive_timeout: Duration::from_secs(6),
        }
    }
}

/// How to encrypt the connections to etcd. All certificates and keys are PEM.
#[cfg(feature = "etcd-tls")]
#[derive(Clone)]
pub struct EtcdTls {
    /// The authorities whose certificates a member may have.
    pub authorities: Vec<u8>,
    /// Our certificate and its key, if etcd asks for one.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
    /// The name that a member's certificate must have; by default the host of its address.
    pub server_name: Option<String>,
}

#[cfg(feature = "etcd-tls")]
impl EtcdTls {
    fn options(&self) -> etcd_client::TlsOptions {
        let authorities = etcd_client::Certificate::from_pem(&self.authorities);
        let mut options = etcd_client::TlsOptions::new().ca_certificate(authorities);
        if let Some((certificate, key)) = &self.identity {
            options = options.identity(etcd_client::Identity::from_pem(certificate, key));
        }
        match &self.server_name {
            Some(name) => options.domain_name(name),
            None => options,
        }
    }
}

/// Shows no key.
#[cfg(feature = "etcd-tls")]
impl std::fmt::Debug for EtcdTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdTls")
            .field("server_name", &self.server_name)
            .finish_non_exhaustive()
    }
}

/// A metadata store in etcd. Any number of processes may have it open.
pub struct EtcdStore {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    rpc: Rpc,
    keys: Keys,
    options: EtcdOptions,
}

impl EtcdStore {
    /// Connects to etcd, and makes the store if there is none below the prefix.
    ///
    /// Fails with [`Error::Unavailable`] if no member answers, and with [`Error::Corrupt`] if a
    /// newer release has written the store.
    pub async fn connect(options: EtcdOptions) -> Result<Self, Error> {
        let mut connect = ConnectOptions::new()
            .with_connect_timeout(options.request_timeout)
            .with_keep_alive(
                options.keep_alive_timeout / 2,
                options.keep_alive_timeout / 2,
            )
            .with_require_leader(true);
        if let Some((name, password)) = &options.user {
            connect = connect
                .with_user(name, password)
                .with_auto_token_refresh(true);
        }
        #[cfg(feature = "etcd-tls")]
        if let Some(tls) = &options.tls {
            connect = connect.with_tls(tls.options());
        }
        let client = Client::connect(&options.endpoints, Some(connect)).await;
        let client = client.map_err(|error| failure(&error).into_unavailable())?;
        let keys = Keys::new(&options.prefix);
        let rpc = Rpc::new(client, options.request_timeout);
        let inner = Inner { rpc, keys, options };
        inner.check_version().await?;
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// The faults that tests let happen.
    #[cfg(feature = "test-util")]
    #[must_use]
    pub fn faults(&self) -> &EtcdFaults {
        &self.inner.rpc.faults
    }

    /// Executes the call that [`EtcdFaults::hold_back`] has held back; says whether there was one.
    #[cfg(feature = "test-util")]
    pub async fn let_go(&self) -> Result<bool, Error> {
        self.inner.rpc.let_go().await
    }
}

impl MetaStore for EtcdStore {
    type Snapshot = EtcdSnapshot;

    async fn get(&self, key: &[u8]) -> Result<Option<Versioned>, Error> {
        loop {
            let gets = vec![
                get(self.inner.keys.pending()),
                get(self.inner.keys.data(key)),
            ];
            let mut answer = self.inner.rpc.read(gets).await?;
            if answer.take_one(0).is_some() {
                self.inner.finish().await?;
                continue;
            }
            let found = answer.take_one(1);
            let found = found.map(|entry| decode(entry.value(), entry.mod_revision()));
            return Ok(found.transpose()?.map(|stored| stored.versioned));
        }
    }

    async fn scan(&self, range: &KeyRange, limit: usize) -> Result<ScanPage, Error> {
        self.inner.scan(range, limit, None).await
    }

    async fn commit(&self, batch: Batch) -> Result<Revision, Error> {
        self.inner.commit(&batch).await
    }

    async fn watch(&self, prefix: &[u8], after: Revision) -> Result<Watch, Error> {
        Ok(watching::watch(Arc::clone(&self.inner), prefix, after))
    }

    async fn snapshot(&self) -> Result<EtcdSnapshot, Error> {
        let revision = self.inner.settled_revision().await?;
        Ok(EtcdSnapshot {
            inner: Arc::clone(&self.inner),
            revision,
        })
    }
}

/// The store in etcd as it was at one moment. etcd forgets the past when it is compacted; reading
/// fails with [`Error::Unavailable`] then.
pub struct EtcdSnapshot {
    inner: Arc<Inner>,
    revision: i64,
}

impl Snapshot for EtcdSnapshot {
    fn revision(&self) -> Revision {
        revision(self.revision)
    }

    async fn scan(&self, range: &KeyRange, limit: usize) -> Result<ScanPage, Error> {
        self.inner.scan(range, limit, Some(self.revision)).await
    }
}

impl Inner {
    async fn check_version(&self) -> Result<(), Error> {
        let name = self.keys.version();
        let txn = Txn::new()
            .when([commits::absent(name.clone())])
            .and_then([TxnOp::put(name.clone(), FORMAT_VERSION, None)])
            .or_else([get(name)]);
        let answer = self
            .rpc
            .change(txn)
            .await
            .map_err(CallError::into_unavailable);
        match answer?.take_one(0) {
            Some(found) if found.value() != FORMAT_VERSION => {
                let found = String::from_utf8_lossy(found.value()).into_owned();
                Err(Error::Corrupt {
                    cause: format!("the store has format version {found}"),
                })
            }
            _ => Ok(()),
        }
    }

    /// The present revision, at which no large batch is under way.
    async fn settled_revision(&self) -> Result<i64, Error> {
        loop {
            let mut answer = self.rpc.read(vec![get(self.keys.pending())]).await?;
            if answer.take_one(0).is_none() {
                return Ok(answer.revision);
            }
            self.finish().await?;
        }
    }

    async fn scan(
        &self,
        range: &KeyRange,
        limit: usize,
        at: Option<i64>,
    ) -> Result<ScanPage, Error> {
        let limit = if limit == 0 {
            SCAN_ENTRIES_MAX
        } else {
            limit.min(SCAN_ENTRIES_MAX)
        };
        let mut at = match at {
            None if range.is_empty() => Some(self.settled_revision().await?),
            at => at,
        };
        let mut page = ScanPage {
            revision: revision(at.unwrap_or_default()),
            ..Default::default()
        };
        let (mut rest, mut bytes) = (range.clone(), 0);
        while !rest.is_empty() {
            let wanted = wanted_entries(limit - page.entries.len(), page.entries.len(), bytes);
            let Some((entries, more, number)) = self.read_range(&rest, wanted, at).await? else {
                self.finish().await?;
                continue;
            };
            (at, page.revision) = (Some(number), revision(number));
            for entry in entries {
                let stored = decode(entry.value(), entry.mod_revision())?;
                let Some(key) = self.keys.key(entry.key()) else {
                    continue;
                };
                bytes += key.len() + stored.versioned.value.len();
                page.entries.push(Entry {
                    key,
                    versioned: stored.versioned,
                });
            }
            let last = page.entries.last().filter(|_| more);
            let Some(last) = last else { return Ok(page) };
            rest = rest.from_key([&last.key[..], &[0]].concat().into());
            if page.entries.len() >= limit || bytes > SCAN_BYTES_MAX {
                page.resume = Some(rest.start);
                return Ok(page);
            }
        }
        Ok(page)
    }

    /// Reads the first entries of a range, now or at an earlier revision; also whether there are
    /// more, and the revision. `None` if a large batch has to be finished first.
    async fn read_range(
        &self,
        range: &KeyRange,
        limit: i64,
        at: Option<i64>,
    ) -> Result<Option<(Vec<KeyValue>, bool, i64)>, Error> {
        let options = GetOptions::new().with_limit(limit);
        let options = options.with_revision(at.unwrap_or(0));
        let mut gets = vec![get_range(self.keys.data_range(range), options)];
        if at.is_none() {
            gets.push(get(self.keys.pending()));
        }
        let mut answer = self.rpc.read(gets).await?;
        if answer.take_one(1).is_some() {
            return Ok(None);
        }
        let found = answer.take(0);
        let number = at.unwrap_or(answer.revision);
        Ok(Some((found.entries, found.more, number)))
    }
}

/// How many entries to ask for next: etcd bounds an answer by their number only, so the first
/// ones tell how large the others may be.
fn wanted_entries(wanted: usize, seen: usize, bytes: usize) -> i64 {
    let count = match bytes.checked_div(seen) {
        None => wanted.min(FIRST_ENTRIES),
        Some(average) => wanted.min(SCAN_BYTES_MAX.saturating_sub(bytes) / average.max(1) + 1),
    };
    i64::try_from(count.max(1)).unwrap_or(i64::MAX)
}

/// Shows no password.
impl std::fmt::Debug for EtcdOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdOptions")
            .field("endpoints", &self.endpoints)
            .field("prefix", &self.prefix)
            .field("user", &self.user.as_ref().map(|(name, _)| name))
            .field("request_timeout", &self.request_timeout)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdStore")
            .field("endpoints", &self.inner.options.endpoints)
            .field("prefix", &self.inner.options.prefix)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for EtcdSnapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdSnapshot")
            .field("revision", &self.revision)
            .finish_non_exhaustive()
    }
}

const FORMAT_VERSION: &[u8] = b"1";
/// How many entries a scan asks for before it knows their size.
const FIRST_ENTRIES: usize = 64;
