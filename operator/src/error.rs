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
    /// The API server did not answer in time.
    #[error("{what}: the API server does not answer")]
    Silent {
        /// What was asked.
        what: String,
    },
    /// Something of that name is not the cluster's.
    #[error("{title} is not this cluster's: another made it, and it is left alone")]
    NameConflict {
        /// Its kind and name.
        title: String,
    },
    /// Some objects could not be brought to what is asked for; the others were.
    #[error("{first}{}", and_more(*.more))]
    Several {
        /// The first of them.
        first: Box<Error>,
        /// How many more there are.
        more: usize,
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

fn and_more(count: usize) -> String {
    if count == 0 {
        return String::new();
    }
    format!(" (and {count} more)")
}

/// What went wrong with single objects while the others went on.
#[derive(Debug, Default)]
pub(crate) struct Failures(Vec<Error>);

impl Failures {
    /// Takes the outcome for one object.
    ///
    /// # Errors
    /// What would go wrong with every other object as well.
    pub(crate) fn take(&mut self, outcome: Result<(), Error>) -> Result<(), Error> {
        match outcome {
            Err(error) if error.concerns_one_object() => {
                self.0.push(error);
                Ok(())
            }
            other => other,
        }
    }

    /// The outcome for all.
    pub(crate) fn end(self) -> Result<(), Error> {
        let more = self.0.len().saturating_sub(1);
        match self.0.into_iter().next() {
            None => Ok(()),
            Some(first) => Err(Error::Several {
                first: Box::new(first),
                more,
            }),
        }
    }
}

impl Error {
    /// Whether others may succeed all the same.
    fn concerns_one_object(&self) -> bool {
        match self {
            Self::Kubernetes { source, .. } => matches!(**source, kube::Error::Api(_)),
            Self::NameConflict { .. } | Self::Several { .. } => true,
            Self::Manager { .. } | Self::Etcd { .. } | Self::Silent { .. } | Self::NotLeader => {
                false
            }
        }
    }

    /// From the API server's answer.
    pub(crate) fn kubernetes(what: impl Into<String>) -> impl FnOnce(kube::Error) -> Self {
        let what = what.into();
        move |source| Self::Kubernetes {
            what,
            source: Box::new(source),
        }
    }

    /// Nothing, when the object was gone already or has changed meanwhile.
    pub(crate) fn unless_gone(self) -> Result<(), Self> {
        match &self {
            Self::Kubernetes { source, .. } => match &**source {
                kube::Error::Api(status) if status.code == 404 || status.code == 409 => Ok(()),
                _ => Err(self),
            },
            _ => Err(self),
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
