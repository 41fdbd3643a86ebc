//! Claiming: one client alone has a directory, and ends with its session.

use std::sync::atomic::Ordering;
use std::time::Duration;

use hither_proto::ids::InodeId;
use hither_proto::status::Errno;
use hither_proto::stored::HeldLock;

use crate::client::Client;
use crate::error::FsError;

/// Why a directory was not claimed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ClaimError {
    /// Another client has it.
    #[error("it is claimed by {0}")]
    Taken(Holder),
    /// The cluster refuses, or does not answer.
    #[error(transparent)]
    Failed(#[from] FsError),
}

/// Who has a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its session.
    pub session: u64,
    /// Its host, as it said itself.
    pub host: String,
    /// Where it is mounted there.
    pub mount_point: String,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            session,
            host,
            mount_point,
        } = self;
        write!(f, "the mount {mount_point} on {host} (session {session})")
    }
}

impl Client {
    /// Claims a directory for as long as the session lives. From then on the client ends with its
    /// session: when the server has ended it, because nothing was heard of it for too long or
    /// somebody wanted so, everything fails with `ENOTCONN`, and no new session is opened that
    /// could write beside whoever claims the directory next.
    ///
    /// A claim keeps off other claims of the same directory and nothing else. `evict` names a
    /// session that is ended if it has the claim: fenced at the chunkservers first, for all that the
    /// rank of the directory serves. A subtree below it that another rank serves is not fenced by
    /// this.
    ///
    /// # Errors
    /// [`ClaimError`].
    pub async fn claim(&self, dir: InodeId, evict: Option<u64>) -> Result<(), ClaimError> {
        self.inner.ends_with_session.store(true, Ordering::Release);
        loop {
            match self.set_lock(dir, CLAIM, false, false).await {
                Err(error) if error.errno == Errno::EAGAIN => {}
                other => return Ok(other?),
            }
            let Some(holder) = self.holder(dir, CLAIM).await? else {
                // Given up meanwhile.
                continue;
            };
            if evict != Some(holder.session) {
                return Err(ClaimError::Taken(holder));
            }
            let metadata = self.inner.session_for(dir);
            let deadline = self.inner.deadline();
            metadata.evict(holder.session, deadline).await?;
            let freed = self.set_lock(dir, CLAIM, false, true);
            match tokio::time::timeout(FENCE_PATIENCE, freed).await {
                Ok(claimed) => return Ok(claimed?),
                Err(_) => return Err(ClaimError::Taken(holder)),
            }
        }
    }

    /// Whether the session this client ends with has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.inner.over.load(Ordering::Acquire)
    }
}

/// Files take locks of descriptors; no descriptor of a directory can have one of this kind.
const CLAIM: HeldLock = HeldLock {
    session: 0,
    owner: 0,
    flock: false,
    exclusive: true,
    start: 0,
    end: u64::MAX,
    pid: 0,
};
/// Longest wait for an evicted session to be fenced at the chunkservers.
const FENCE_PATIENCE: Duration = Duration::from_secs(15);
