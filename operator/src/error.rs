//! What can go wrong while a cluster is brought to what is asked for.

use hither_net::NetError;

/// Why a pass over a cluster ended early. All of them are tried again, later and later.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The API server refused, or did not answer.
    #[error("{what}: {source}")]
    Kubernetes {
        /// What was asked.
        what: String,
        /// Why not.
        source: Box<kube::Error>,
    },
    /// The manager refused, or none answered.
    #[error("{what}: {reason}")]
    Manager {
        /// What was asked.
        what: &'static str,
        /// Why not.
        reason: String,
    },
    /// A member of a managed etcd refused, or did not answer.
    #[error("etcd: {what}: {reason}")]
    Etcd {
        /// What was asked.
        what: &'static str,
        /// Why not.
        reason: String,
    },
    /// The lease was lost: another operator is at work.
    #[error("another operator has the lease")]
    NotLeader,
}

impl Error {
    /// From the API server's answer.
    pub(crate) fn kubernetes(what: impl Into<String>) -> impl FnOnce(kube::Error) -> Self {
        let what = what.into();
        move |source| Self::Kubernetes {
            what,
            source: Box::new(source),
        }
    }

    /// From the manager's answer, in its own words when it has any.
    pub(crate) fn manager(what: &'static str) -> impl FnOnce(NetError) -> Self {
        move |error| Self::Manager {
            what,
            reason: reason(&error),
        }
    }
}

/// An error of the connection to the manager, in words.
pub(crate) fn reason(error: &NetError) -> String {
    match error {
        NetError::Refused { failure, .. } if !failure.text.is_empty() => failure.text.clone(),
        other => other.to_string(),
    }
}
