//! What runs before a member's etcd: it lets etcd start where it has its data, where it may begin,
//! or where it is expected, and never under the identity of a member that has lost its data.
//!
//! A member that comes back without its data would have forgotten its votes and what it confirmed;
//! etcd itself would let it. So whoever has no data waits here until the others list it as a member
//! that has never started. The operator sees the wait, and replaces the member.
//!
//! Data of a member that the others have taken off their list is no better than none: they reject
//! whoever goes on with it, for good. So it is set aside.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::ask::{Credentials, Peer, members};
use super::message::Message;
use super::plan::Member;
use super::state::State;
use super::{CLIENT_PORT, HEALTH_PORT, PEER_PORT, wal};

/// What a member is told.
#[derive(Debug, Clone)]
pub struct Options {
    /// Its name, which is its pod's.
    pub name: String,
    /// The names of all members.
    pub members: Vec<String>,
    /// What follows a member's name in its host name, such as `demo-etcd-peers.files.svc`.
    pub domain: String,
    /// What tells this etcd from others.
    pub token: String,
    /// Common name of members' certificates.
    pub subject: String,
    /// Directory of the volume.
    pub dir: PathBuf,
    /// Directory with the state's ConfigMap.
    pub state: PathBuf,
    /// Directory with the certificates.
    pub tls: PathBuf,
    /// Bytes at which it takes no more changes.
    pub quota_bytes: u64,
    /// Where etcd's configuration is written.
    pub out: PathBuf,
    /// File with what was told last of data that is not there.
    pub told: PathBuf,
    /// Where the container's last message is written.
    pub message: PathBuf,
}

impl Options {
    /// Address of a member for other members.
    #[must_use]
    pub fn peer(&self, name: &str) -> String {
        peer_url(name, &self.domain)
    }

    /// Where the data of a round is.
    fn data(&self, round: u64) -> PathBuf {
        self.dir.join(format!("data-{round}"))
    }

    /// Where data is that counts no more, until the member is let in.
    fn aside(&self) -> PathBuf {
        self.dir.join("aside")
    }
}

/// How etcd is to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Start<'a> {
    /// Where its data is.
    pub data: &'a Path,
    /// The members there are, as far as it has no data.
    pub members: &'a [String],
    /// Whether it begins a new etcd, as far as it has no data.
    pub new: bool,
    /// Whether it goes on with its data as the only member.
    pub alone: bool,
}

/// Address of a member for other members.
#[must_use]
pub fn peer_url(name: &str, domain: &str) -> String {
    format!("https://{name}.{domain}:{PEER_PORT}")
}

/// Address of a member for clients.
#[must_use]
pub fn client_url(name: &str, domain: &str) -> String {
    format!("https://{name}.{domain}:{CLIENT_PORT}")
}

/// What is decided about a member that wants to start.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Entry {
    /// It has its data.
    GoOn,
    /// Its data is of a member that is listed no more.
    SetAside,
    /// It begins a new etcd, together with the others.
    Begin,
    /// It joins the etcd there is, as this member.
    Join(u64),
    /// It is not let in.
    Wait {
        /// The member whose data it should have.
        lost: Option<u64>,
        /// Why.
        why: &'static str,
    },
}

/// What data there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Data {
    None,
    /// A member's, as far as its log says whose.
    Of(Option<u64>),
}

/// Decides it; `listed` is the list of a member with a quorum behind it, if one answers.
fn entry(data: Data, began: bool, peer: &str, listed: Option<&[Member]>) -> Entry {
    if let Data::Of(of) = data {
        return match (of, listed) {
            (Some(id), Some(members)) if members.iter().all(|member| member.id != id) => {
                Entry::SetAside
            }
            _ => Entry::GoOn,
        };
    }
    let wait = |lost, why| Entry::Wait { lost, why };
    match listed {
        Some(members) => match members.iter().find(|member| member.peer == peer) {
            Some(member) if !member.started => Entry::Join(member.id),
            Some(member) => wait(
                Some(member.id),
                "this member has data, and its volume has none",
            ),
            None => wait(None, "this member is not on the list"),
        },
        None if began => wait(None, "no other member answers"),
        None => Entry::Begin,
    }
}

/// Whether the container has to end to tell: the first time, and when it is known whose data is lost.
fn is_news(told: Option<&Message>, lost: Option<u64>) -> bool {
    match told {
        Some(Message::NoData { lost: before, .. }) => lost.is_some() && lost != *before,
        _ => true,
    }
}

/// etcd's configuration.
#[must_use]
pub fn configuration(options: &Options, start: Start<'_>) -> Value {
    let at = |name: &str| options.tls.join(name);
    let each = |name: &String| format!("{name}={}", options.peer(name));
    let initial: Vec<String> = start.members.iter().map(each).collect();
    json!({
        "name": options.name,
        "data-dir": start.data,
        "listen-client-urls": format!("https://0.0.0.0:{CLIENT_PORT}"),
        "advertise-client-urls": client_url(&options.name, &options.domain),
        "listen-peer-urls": format!("https://0.0.0.0:{PEER_PORT}"),
        "initial-advertise-peer-urls": options.peer(&options.name),
        "listen-metrics-urls": format!("http://0.0.0.0:{HEALTH_PORT}"),
        "initial-cluster": initial.join(","),
        "initial-cluster-state": if start.new { "new" } else { "existing" },
        "force-new-cluster": start.alone,
        "initial-cluster-token": options.token,
        "strict-reconfig-check": true,
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": HISTORY,
        "quota-backend-bytes": options.quota_bytes,
        // It would be a client of its own, with a certificate for servers.
        "enable-grpc-gateway": false,
        "client-transport-security": {
            "cert-file": at("tls.crt"),
            "key-file": at("tls.key"),
            "trusted-ca-file": at("ca.crt"),
            "client-cert-auth": true,
        },
        "peer-transport-security": {
            "cert-file": at("tls.crt"),
            "key-file": at("tls.key"),
            "trusted-ca-file": at("ca.crt"),
            "client-cert-auth": true,
            // Clients have certificates of the same authority, under another name.
            "allowed-cn": [options.subject],
            // A pod's address changes before everybody's name service knows.
            "skip-client-san-verification": true,
        },
    })
}

/// Waits until the member may start, and writes etcd's configuration.
///
/// # Errors
/// When a file cannot be read or written; and when a member without data has to wait, the first time
/// and when it is known whose data that is, so that the message of the ended container tells
/// everybody.
pub async fn admit(options: &Options) -> anyhow::Result<()> {
    let own = options.peer(&options.name);
    let mut said = "";
    loop {
        let state = State::read(&options.state)?;
        let chosen = state.alone.as_ref() == Some(&options.name);
        let alone = chosen && begin_round(options, state.round)?;
        let data = options.data(state.round);
        let there = data_in(&data)?;
        let mut listed = None;
        // Who goes on without the others does not ask them.
        if !(chosen && there != Data::None) {
            listed = ask_others(options).await?;
        }
        let mut start = Start {
            data: &data,
            members: &options.members,
            new: false,
            alone,
        };
        let mut member = None;
        let joined;
        match entry(there, state.established, &own, listed.as_deref()) {
            Entry::GoOn => {
                if let Data::Of(of) = there {
                    member = of;
                }
            }
            Entry::SetAside => {
                tracing::warn!(
                    ?there,
                    "the data is of a member that was taken off the list"
                );
                set_aside(options, &data)?;
                continue;
            }
            Entry::Begin => start.new = true,
            Entry::Join(id) => {
                member = Some(id);
                // etcd wants exactly those that are listed.
                joined = known(options, listed.as_deref().unwrap_or_default());
                start.members = &joined;
            }
            Entry::Wait { lost, why } => {
                if is_news(told(options)?.as_ref(), lost) {
                    let why = why.to_owned();
                    let message = Message::NoData { lost, why }.to_string();
                    write(&options.message, &message)?;
                    write(&options.told, &message)?;
                    bail!(message);
                }
                if said != why {
                    tracing::warn!(why, "no data: waiting to be let in");
                    said = why;
                }
                tokio::time::sleep(AGAIN).await;
                continue;
            }
        }
        remove_older(options, state.round)?;
        tracing::info!(start.new, start.alone, ?member, "etcd may start");
        write(
            &options.out,
            &format!("{:#}\n", configuration(options, start)),
        )?;
        return write(&options.message, &Message::LetIn { member }.to_string());
    }
}

/// What was told last.
fn told(options: &Options) -> anyhow::Result<Option<Message>> {
    match std::fs::read_to_string(&options.told) {
        Ok(text) => Ok(Message::of(&text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("read {}", options.told.display())),
    }
}

/// Moves data away that counts no more: at once, for half of it is worse than none.
fn set_aside(options: &Options, data: &Path) -> anyhow::Result<()> {
    let aside = options.aside();
    remove(&aside)?;
    std::fs::rename(data, &aside)
        .with_context(|| format!("rename {} to {}", data.display(), aside.display()))
}

/// Takes the data of an earlier round into this one, to go on with it as the only member: says
/// whether that is still to be done. It is done once: what the others have by the next time must not
/// be thrown away.
fn begin_round(options: &Options, round: u64) -> anyhow::Result<bool> {
    let data = options.data(round);
    if data.exists() {
        return Ok(false);
    }
    let earlier = (0..round).rev().map(|round| options.data(round));
    let Some(earlier) = earlier.into_iter().find(|data| data.exists()) else {
        return Ok(false);
    };
    std::fs::rename(&earlier, &data)
        .with_context(|| format!("rename {} to {}", earlier.display(), data.display()))?;
    Ok(true)
}

/// Removes data that counts no more: of earlier rounds, and what was set aside.
fn remove_older(options: &Options, round: u64) -> anyhow::Result<()> {
    for data in (0..round).map(|round| options.data(round)) {
        remove(&data)?;
    }
    remove(&options.aside())
}

fn remove(data: &Path) -> anyhow::Result<()> {
    if data.exists() {
        std::fs::remove_dir_all(data).with_context(|| format!("remove {}", data.display()))?;
    }
    Ok(())
}

/// The members on etcd's list, by name.
fn known(options: &Options, listed: &[Member]) -> Vec<String> {
    let is_listed = |name: &&String| {
        let peer = options.peer(name);
        listed.iter().any(|member| member.peer == peer)
    };
    options.members.iter().filter(is_listed).cloned().collect()
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

/// What an etcd that began here left: it writes its log before it says or does anything.
fn data_in(data: &Path) -> anyhow::Result<Data> {
    if !has_data(data)? {
        return Ok(Data::None);
    }
    // What to do about a log that cannot be read, etcd itself knows best.
    let of = wal::member(data).unwrap_or_else(|error| {
        tracing::warn!("whose data it is: {error:#}");
        None
    });
    Ok(Data::Of(of))
}

fn has_data(data: &Path) -> anyhow::Result<bool> {
    let log = wal::log_of(data);
    match std::fs::read_dir(&log) {
        Ok(mut files) => Ok(files.next().is_some()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("read {}", log.display())),
    }
}

/// The list of members, from the first of the others that answers.
async fn ask_others(options: &Options) -> anyhow::Result<Option<Vec<Member>>> {
    // Read each time: they may have been renewed.
    let credentials = Credentials::read(&options.tls)?;
    let others = options.members.iter().filter(|name| **name != options.name);
    let asked = others.map(|name| {
        let peer = Peer {
            url: client_url(name, &options.domain),
            server_name: None,
        };
        let credentials = &credentials;
        async move { members(&peer, credentials).await }
    });
    let answers = futures::future::join_all(asked).await;
    Ok(answers.into_iter().find_map(Result::ok))
}

/// Name of the file of [`Options::told`].
pub const NO_DATA_FILE: &str = "no-data";
/// How far back etcd keeps what keys were.
const HISTORY: &str = "5m";
/// Time between questions.
const AGAIN: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(started: bool) -> Vec<Member> {
        vec![Member {
            id: 1,
            // Those of the beginning have their names before they start.
            name: "e".into(),
            started,
            peer: "p".into(),
            learner: false,
        }]
    }

    fn waits(entry: &Entry) -> Option<Option<u64>> {
        match entry {
            Entry::Wait { lost, .. } => Some(*lost),
            _ => None,
        }
    }

    #[test]
    fn who_has_data_goes_on_unless_the_others_list_it_no_more() {
        let of = |id| Data::Of(Some(id));
        assert_eq!(entry(of(1), true, "p", None), Entry::GoOn);
        for started in [false, true] {
            let listed = listed(started);
            assert_eq!(entry(of(1), true, "p", Some(&listed)), Entry::GoOn);
            assert_eq!(entry(of(2), true, "p", Some(&listed)), Entry::SetAside);
            assert_eq!(entry(of(2), true, "q", Some(&listed)), Entry::SetAside);
            let unknown = Data::Of(None);
            assert_eq!(entry(unknown, true, "p", Some(&listed)), Entry::GoOn);
        }
    }

    #[test]
    fn a_new_etcd_begins_only_before_the_first_quorum_and_when_none_answers() {
        let begin =
            |began, listed: Option<Vec<Member>>| entry(Data::None, began, "p", listed.as_deref());
        assert_eq!(begin(false, None), Entry::Begin);
        assert_eq!(waits(&begin(true, None)), Some(None));
        assert_eq!(waits(&begin(false, Some(listed(true)))), Some(Some(1)));
    }

    #[test]
    fn without_data_only_a_member_that_never_started_joins() {
        let join =
            |began, listed: Option<Vec<Member>>| entry(Data::None, began, "p", listed.as_deref());
        assert_eq!(join(true, Some(listed(false))), Entry::Join(1));
        assert_eq!(join(false, Some(listed(false))), Entry::Join(1));
        assert_eq!(waits(&join(true, Some(listed(true)))), Some(Some(1)));
        assert_eq!(waits(&join(true, Some(Vec::new()))), Some(None));
    }

    #[test]
    fn it_is_told_once_and_again_when_it_is_known_whose_data_is_lost() {
        let told = |lost| Message::NoData {
            lost,
            why: String::new(),
        };
        assert!(is_news(None, None) && is_news(None, Some(1)));
        assert!(!is_news(Some(&told(None)), None));
        assert!(is_news(Some(&told(None)), Some(1)));
        assert!(!is_news(Some(&told(Some(1))), Some(1)));
        assert!(!is_news(Some(&told(Some(1))), None));
        assert!(is_news(Some(&told(Some(1))), Some(2)));
    }

    #[test]
    fn what_is_set_aside_is_removed_when_the_member_is_let_in() {
        let dir = tempfile::tempdir().unwrap();
        let options = options(dir.path());
        for id in [7, 8] {
            let data = options.data(1);
            wal::tests::write(&data, id);
            assert_eq!(data_in(&data).unwrap(), Data::Of(Some(id)));
            set_aside(&options, &data).unwrap();
            assert_eq!(data_in(&data).unwrap(), Data::None);
            assert_eq!(wal::member(&options.aside()).unwrap(), Some(id));
        }
        remove_older(&options, 1).unwrap();
        assert!(!options.aside().exists());
    }

    #[test]
    fn data_is_a_log_that_was_begun() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!has_data(dir.path()).unwrap());
        let log = dir.path().join("member/wal");
        std::fs::create_dir_all(&log).unwrap();
        assert!(!has_data(dir.path()).unwrap());
        std::fs::write(log.join("0.wal"), "").unwrap();
        assert!(has_data(dir.path()).unwrap());
        let unreadable = data_in(dir.path()).unwrap();
        assert_eq!(
            unreadable,
            Data::Of(None),
            "etcd says what is wrong with it"
        );
    }

    fn options(dir: &Path) -> Options {
        Options {
            name: "demo-etcd-1".into(),
            members: (0..3).map(|at| format!("demo-etcd-{at}")).collect(),
            domain: "demo-etcd-peers.files.svc".into(),
            token: "uid".into(),
            subject: "demo-etcd".into(),
            dir: dir.to_owned(),
            state: "/etc/hither-state".into(),
            tls: "/etc/hither-tls".into(),
            quota_bytes: 8 << 30,
            out: "/run/etcd/etcd.yaml".into(),
            told: "/run/etcd/no-data".into(),
            message: "/dev/termination-log".into(),
        }
    }

    #[test]
    fn the_configuration_is_this() {
        let options = options("/var/lib/etcd".as_ref());
        let start = Start {
            data: &options.data(0),
            members: &options.members,
            new: true,
            alone: false,
        };
        let text = format!("{:#}", configuration(&options, start));
        insta::assert_snapshot!("configuration", text);
    }

    #[test]
    fn a_member_goes_on_alone_once_in_each_round() {
        let dir = tempfile::tempdir().unwrap();
        let options = options(dir.path());
        assert!(
            !begin_round(&options, 1).unwrap(),
            "there is nothing to go on with"
        );
        std::fs::create_dir(options.data(0)).unwrap();
        assert!(begin_round(&options, 2).unwrap());
        assert!(options.data(2).exists() && !options.data(0).exists());
        assert!(!begin_round(&options, 2).unwrap(), "it did");
        assert!(begin_round(&options, 3).unwrap());
    }

    #[test]
    fn what_counts_no_more_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let options = options(dir.path());
        for round in 0..3 {
            std::fs::create_dir(options.data(round)).unwrap();
        }
        remove_older(&options, 2).unwrap();
        assert!(options.data(2).exists());
        assert!(!options.data(0).exists() && !options.data(1).exists());
    }

    #[test]
    fn who_joins_names_those_that_are_listed() {
        let options = options("/var/lib/etcd".as_ref());
        let member = |at: u64| Member {
            peer: options.peer(&format!("demo-etcd-{at}")),
            ..Member::default()
        };
        let known = known(&options, &[member(2), member(1)]);
        assert_eq!(known, ["demo-etcd-1", "demo-etcd-2"]);
    }
}
