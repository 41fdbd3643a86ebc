//! Talking with members of a managed etcd, each of them alone.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use etcd_client::{
    AlarmAction, AlarmOptions, AlarmType, Certificate, Client, ConnectOptions, Identity,
    MemberAddOptions, TlsOptions,
};

use super::plan::{Member, Said};

/// How to show who we are, and whom to trust; all PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The authorities that are trusted.
    pub trusted: Vec<u8>,
    /// Our certificate.
    pub certificate: Vec<u8>,
    /// Its key.
    pub key: Vec<u8>,
}

/// Shows no key.
impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

impl Credentials {
    /// From the files of a secret.
    ///
    /// # Errors
    /// When one cannot be read.
    pub fn read(dir: &Path) -> anyhow::Result<Self> {
        let read = |name: &str| {
            let path = dir.join(name);
            std::fs::read(&path).with_context(|| format!("read {}", path.display()))
        };
        Ok(Self {
            trusted: read("ca.crt")?,
            certificate: read("tls.crt")?,
            key: read("tls.key")?,
        })
    }
}

/// A member to talk with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Its address.
    pub url: String,
    /// The name its certificate has to have; absent: the host of its address.
    pub server_name: Option<String>,
}

/// A connection to one member.
#[derive(Clone)]
pub struct Link {
    client: Client,
}

/// What went wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// It refused, or the connection failed.
    #[error("{0}")]
    Etcd(#[from] etcd_client::Error),
    /// It did not answer in time.
    #[error("no answer within {} s", .0.as_secs())]
    Late(Duration),
}

impl Link {
    /// A connection to a member; it is made with the first question.
    ///
    /// # Errors
    /// When the certificates cannot be used.
    pub async fn to(peer: &Peer, credentials: &Credentials) -> Result<Self, AskError> {
        let mut tls = TlsOptions::new()
            .ca_certificate(Certificate::from_pem(&credentials.trusted))
            .identity(Identity::from_pem(
                &credentials.certificate,
                &credentials.key,
            ));
        if let Some(name) = &peer.server_name {
            tls = tls.domain_name(name);
        }
        let options = ConnectOptions::new()
            .with_connect_timeout(PATIENCE)
            .with_tls(tls);
        // Boxed: it is large, and part of every pass.
        let connecting = Box::pin(Client::connect([&peer.url], Some(options)));
        let client = within(PATIENCE, connecting).await?;
        Ok(Self { client })
    }

    /// What it says of itself.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn said(&self) -> Result<Said, AskError> {
        let mut client = self.client.maintenance_client();
        let status = within(PATIENCE, client.status()).await?;
        Ok(Said {
            id: status.header().map_or(0, |header| header.member_id()),
            leader: status.leader(),
            file_bytes: status.db_size(),
            used_bytes: status.raft_used_db_size(),
            quota_bytes: status.db_size_quota(),
        })
    }

    /// The list of members; only from one that has a quorum behind it.
    ///
    /// # Errors
    /// When it does not answer, or has no quorum.
    pub async fn members(&self) -> Result<Vec<Member>, AskError> {
        // The list itself is read from what the member has; this read makes sure that it has all.
        let mut keys = self.client.kv_client();
        within(PATIENCE, keys.get(NO_KEY, None)).await?;
        let mut client = self.client.cluster_client();
        let list = within(PATIENCE, client.member_list()).await?;
        let one = |member: &etcd_client::Member| Member {
            id: member.id(),
            name: member.name().to_owned(),
            started: !member.client_urls().is_empty(),
            peer: member.peer_urls().first().cloned().unwrap_or_default(),
            learner: member.is_learner(),
        };
        Ok(list.members().iter().map(one).collect())
    }

    /// The members that were full; while there is one, etcd takes no changes.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn full(&self) -> Result<Vec<u64>, AskError> {
        let mut client = self.client.maintenance_client();
        let asked = client.alarm(AlarmAction::Get, AlarmType::None, None);
        let alarms = within(PATIENCE, asked).await?;
        let full = alarms.alarms().iter();
        let full = full.filter(|alarm| alarm.alarm() == AlarmType::Nospace);
        Ok(full.map(|alarm| alarm.member_id()).collect())
    }

    /// Takes a member off the list; false while etcd finds its members too shaky for that.
    ///
    /// # Errors
    /// When etcd refuses for another reason.
    pub async fn remove(&self, id: u64) -> Result<bool, AskError> {
        let mut client = self.client.cluster_client();
        taken(within(CHANGE_PATIENCE, client.member_remove(id)).await)
    }

    /// Puts a member on the list, without a vote; false while etcd finds its members too shaky.
    ///
    /// # Errors
    /// When etcd refuses for another reason.
    pub async fn add_learner(&self, peer: String) -> Result<bool, AskError> {
        let mut client = self.client.cluster_client();
        let options = MemberAddOptions::new().with_is_learner();
        taken(within(CHANGE_PATIENCE, client.member_add([peer], Some(options))).await)
    }

    /// Gives a member its vote; false while it lacks too much.
    ///
    /// # Errors
    /// When etcd refuses for another reason.
    pub async fn promote(&self, id: u64) -> Result<bool, AskError> {
        let mut client = self.client.cluster_client();
        taken(within(CHANGE_PATIENCE, client.member_promote(id)).await)
    }

    /// Makes the member's file smaller; it answers nothing else meanwhile.
    ///
    /// # Errors
    /// When etcd refuses, or needs very long.
    pub async fn defragment(&self) -> Result<(), AskError> {
        let mut client = self.client.maintenance_client();
        within(DEFRAGMENT_PATIENCE, client.defragment()).await?;
        Ok(())
    }

    /// Lets etcd take changes again.
    ///
    /// # Errors
    /// When etcd refuses.
    pub async fn disarm(&self) -> Result<(), AskError> {
        for member in self.full().await? {
            let mut client = self.client.maintenance_client();
            let mut options = AlarmOptions::new();
            options.with_member(member);
            let asked = client.alarm(AlarmAction::Deactivate, AlarmType::Nospace, Some(options));
            within(CHANGE_PATIENCE, asked).await?;
        }
        Ok(())
    }
}

/// The list of members, asked once.
///
/// # Errors
/// When the member does not answer, or has no quorum.
pub async fn members(peer: &Peer, credentials: &Credentials) -> Result<Vec<Member>, AskError> {
    Link::to(peer, credentials).await?.members().await
}

/// Whether a change of the members was made; it is not while it is too early.
fn taken<T>(answer: Result<T, AskError>) -> Result<bool, AskError> {
    match answer {
        Ok(_) => Ok(true),
        Err(AskError::Etcd(etcd_client::Error::GRpcStatus(status)))
            if TOO_EARLY.iter().any(|text| status.message().contains(text)) =>
        {
            tracing::debug!(reason = status.message(), "too early");
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

async fn within<T>(
    patience: Duration,
    asked: impl Future<Output = Result<T, etcd_client::Error>>,
) -> Result<T, AskError> {
    match tokio::time::timeout(patience, asked).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(AskError::Late(patience)),
    }
}

/// What etcd says when a change of the members would be right a little later.
const TOO_EARLY: [&str; 3] = [
    "unhealthy cluster",
    "not enough started members",
    "in sync with leader",
];
/// A key that nobody has.
const NO_KEY: &str = "hither-operator";
/// Time a member gets to answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// Time a change of the members gets.
const CHANGE_PATIENCE: Duration = Duration::from_secs(10);
/// Time a file gets to become smaller.
const DEFRAGMENT_PATIENCE: Duration = Duration::from_secs(300);
