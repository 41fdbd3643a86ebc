//! What runs before a member's etcd: it lets etcd start where it has its data, where it may begin,
//! or where it is expected, and never under the identity of a member that has lost its data.
//!
//! A member that comes back without its data would have forgotten its votes and what it confirmed;
//! etcd itself would let it. So whoever has no data waits here until the others list it as a member
//! that has never started. The operator sees the wait, and replaces the member.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::ask::{Credentials, Peer, members};
use super::plan::Member;
use super::state::State;
use super::{CLIENT_PORT, HEALTH_PORT, NO_DATA, PEER_PORT};

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
    /// File that is there once [`NO_DATA`] was told.
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entry {
    /// It has its data.
    GoOn,
    /// It begins a new etcd, together with the others.
    Begin,
    /// It joins the etcd there is.
    Join,
    /// It is not let in.
    Wait(&'static str),
}

/// Decides it; `listed` is the list of a member with a quorum behind it, if one answers.
fn entry(has_data: bool, began: bool, peer: &str, listed: Option<&[Member]>) -> Entry {
    if has_data {
        return Entry::GoOn;
    }
    match listed {
        Some(members) => match members.iter().find(|member| member.peer == peer) {
            Some(member) if !member.started => Entry::Join,
            Some(_) => Entry::Wait("this member has data, and its volume has none"),
            None => Entry::Wait("this member is not on the list"),
        },
        None if began => Entry::Wait("no other member answers"),
        None => Entry::Begin,
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
/// When a file cannot be read or written; and the first time a member without data has to wait, so
/// that the message of the ended container tells everybody.
pub async fn admit(options: &Options) -> anyhow::Result<()> {
    let own = options.peer(&options.name);
    let mut said = "";
    loop {
        let state = State::read(&options.state)?;
        let alone =
            state.alone.as_ref() == Some(&options.name) && begin_round(options, state.round)?;
        let data = options.data(state.round);
        let has_data = has_data(&data)?;
        let mut listed = None;
        if !has_data {
            listed = ask_others(options).await?;
        }
        let mut start = Start {
            data: &data,
            members: &options.members,
            new: false,
            alone,
        };
        let joined;
        match entry(has_data, state.established, &own, listed.as_deref()) {
            Entry::GoOn => {}
            Entry::Begin => start.new = true,
            Entry::Join => {
                // etcd wants exactly those that are listed.
                joined = known(options, listed.as_deref().unwrap_or_default());
                start.members = &joined;
            }
            Entry::Wait(why) => {
                if !options.told.exists() {
                    write(&options.message, &format!("{NO_DATA}: {why}"))?;
                    write(&options.told, "")?;
                    bail!("{NO_DATA}: {why}");
                }
                if said != why {
                    tracing::warn!(why, "{NO_DATA}: waiting to be let in");
                    said = why;
                }
                tokio::time::sleep(AGAIN).await;
                continue;
            }
        }
        remove_older(options, state.round)?;
        tracing::info!(start.new, start.alone, "etcd may start");
        return write(
            &options.out,
            &format!("{:#}\n", configuration(options, start)),
        );
    }
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

/// Removes data of rounds that count no more.
fn remove_older(options: &Options, round: u64) -> anyhow::Result<()> {
    for data in (0..round).map(|round| options.data(round)) {
        if data.exists() {
            std::fs::remove_dir_all(&data).with_context(|| format!("remove {}", data.display()))?;
        }
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

/// Whether an etcd has ever begun here: it writes its log before it says or does anything.
fn has_data(data: &Path) -> anyhow::Result<bool> {
    let log = data.join("member").join("wal");
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

    #[test]
    fn who_has_data_goes_on_whatever_others_say() {
        assert_eq!(entry(true, true, "p", None), Entry::GoOn);
        assert_eq!(entry(true, false, "p", Some(&[])), Entry::GoOn);
    }

    #[test]
    fn a_new_etcd_begins_only_before_the_first_quorum_and_when_none_answers() {
        assert_eq!(entry(false, false, "p", None), Entry::Begin);
        assert!(matches!(entry(false, true, "p", None), Entry::Wait(_)));
        assert!(matches!(
            entry(false, false, "p", Some(&listed(true))),
            Entry::Wait(_)
        ));
    }

    #[test]
    fn without_data_only_a_member_that_never_started_joins() {
        assert_eq!(entry(false, true, "p", Some(&listed(false))), Entry::Join);
        assert_eq!(entry(false, false, "p", Some(&listed(false))), Entry::Join);
        assert!(matches!(
            entry(false, true, "p", Some(&listed(true))),
            Entry::Wait(_)
        ));
        assert!(matches!(entry(false, true, "p", Some(&[])), Entry::Wait(_)));
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
