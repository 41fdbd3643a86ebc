//! What the operator asks of a cluster's manager.

use std::time::Duration;

use hither_managerlink::ManagerLink;
use hither_net::Identity;
use hither_proto::common::{Empty, Role};
use hither_proto::kind::Kind;
use hither_proto::manager::{
    ClassName, ClassReply, ClassSet, ClusterStatus, DistanceSet, ServerDrain, ServerForget,
    ServerLabel,
};
use hither_proto::map::{Distance, StorageClass};
use prost::Message;

use crate::error::Error;

/// A link to the managers of one cluster; it follows the cluster map.
#[derive(Debug, Clone)]
pub struct Manager {
    link: ManagerLink,
    addresses: Vec<String>,
}

impl Manager {
    /// Begins to look for the leader at these addresses.
    #[must_use]
    pub fn at(addresses: Vec<String>) -> Self {
        let identity = Identity {
            role: Role::Admin,
            boot_id: rand::random(),
            ..Identity::default()
        };
        Self {
            link: ManagerLink::start(addresses.clone(), identity, ""),
            addresses,
        }
    }

    /// The addresses it was started with.
    #[must_use]
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Waits for a change of the cluster map.
    pub async fn changed(&self) {
        // The sender lives as long as the link.
        let _ = self.link.watch().changed().await;
    }

    /// Everything the leader knows.
    ///
    /// # Errors
    /// When none answers in time.
    pub async fn status(&self) -> Result<ClusterStatus, Error> {
        self.ask("ask for the status", Kind::CLUSTER_STATUS, &Empty {})
            .await
    }

    /// Changes labels, in the form of `hither cs label`.
    ///
    /// # Errors
    /// What the manager says.
    pub async fn label(&self, server: u64, changes: Vec<String>) -> Result<(), Error> {
        let message = ServerLabel { server, changes };
        self.tell("change labels", Kind::SERVER_LABEL, &message)
            .await
    }

    /// Begins to empty a chunkserver, or stops.
    ///
    /// # Errors
    /// What the manager says.
    pub async fn drain(&self, server: u64, on: bool) -> Result<(), Error> {
        let message = ServerDrain { server, on };
        self.tell("drain a chunkserver", Kind::SERVER_DRAIN, &message)
            .await
    }

    /// Forgets a chunkserver that is down.
    ///
    /// # Errors
    /// What the manager says.
    pub async fn forget(&self, server: u64) -> Result<(), Error> {
        let message = ServerForget { server };
        self.tell("forget a chunkserver", Kind::SERVER_FORGET, &message)
            .await
    }

    /// Sets the distances between zones.
    ///
    /// # Errors
    /// What the manager says.
    pub async fn distances(&self, distances: Vec<Distance>) -> Result<(), Error> {
        let message = DistanceSet { distances };
        self.tell("set distances", Kind::DISTANCE_SET, &message)
            .await
    }

    /// Makes or changes a class, or only says what that would mean.
    ///
    /// # Errors
    /// What the manager says.
    pub async fn class(
        &self,
        class: StorageClass,
        replace: bool,
        dry_run: bool,
    ) -> Result<ClassReply, Error> {
        let message = ClassSet {
            class: Some(class),
            replace,
            force: false,
            dry_run,
        };
        self.ask("set the storage class", Kind::CLASS_SET, &message)
            .await
    }

    /// Removes a class.
    ///
    /// # Errors
    /// What the manager says; a class in use is not removed.
    pub async fn remove_class(&self, name: String) -> Result<(), Error> {
        let message = ClassName { name };
        self.tell("remove the storage class", Kind::CLASS_DELETE, &message)
            .await
    }

    async fn ask<T: Message + Default>(
        &self,
        what: &'static str,
        kind: Kind,
        message: &impl Message,
    ) -> Result<T, Error> {
        let reply = self.link.call(kind, message, PATIENCE).await;
        reply
            .and_then(|reply| reply.decode())
            .map_err(Error::manager(what))
    }

    async fn tell(
        &self,
        what: &'static str,
        kind: Kind,
        message: &impl Message,
    ) -> Result<(), Error> {
        let reply = self.link.call(kind, message, PATIENCE).await;
        reply.map(|_| ()).map_err(Error::manager(what))
    }
}

/// Time a manager gets to answer.
const PATIENCE: Duration = Duration::from_secs(5);
