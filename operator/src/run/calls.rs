//! Asking and changing: every call has an end, and nothing is changed without the lease.

use std::time::Duration;

use tokio::time::timeout;

use super::Context;
use super::lease::Lease;
use crate::error::Error;

/// A question to the API server.
///
/// # Errors
/// What it says, or that it says nothing in time.
pub(super) async fn ask<T>(
    what: impl Into<String>,
    call: impl Future<Output = kube::Result<T>>,
) -> Result<T, Error> {
    within(PATIENCE, what.into(), call).await
}

async fn within<T>(
    patience: Duration,
    what: String,
    call: impl Future<Output = kube::Result<T>>,
) -> Result<T, Error> {
    match timeout(patience, call).await {
        Ok(answer) => answer.map_err(Error::kubernetes(what)),
        Err(_) => Err(Error::Silent { what }),
    }
}

impl Lease {
    /// A change of what the API server has; for as long as the lease is ours and no longer.
    ///
    /// # Errors
    /// As [`ask`], or that the lease is lost.
    pub(super) async fn change<T>(
        &self,
        what: impl Into<String>,
        call: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Error> {
        let patience = self.left().ok_or(Error::NotLeader)?.min(PATIENCE);
        within(patience, what.into(), call).await
    }

    /// A change of what a manager has; for as long as the lease is ours and no longer.
    ///
    /// # Errors
    /// What the manager says, or that the lease is lost.
    pub(super) async fn command<T>(
        &self,
        call: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let patience = self.left().ok_or(Error::NotLeader)?;
        timeout(patience, call)
            .await
            .unwrap_or(Err(Error::NotLeader))
    }
}

impl Context {
    /// See [`Lease::change`].
    pub(super) async fn change<T>(
        &self,
        what: impl Into<String>,
        call: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Error> {
        self.lease.change(what, call).await
    }
}

/// Time the API server gets to answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
