//! The steps with etcd's members on real etcds of this machine, over TLS with the operator's own
//! certificates: a cluster begins, a member loses its data and is replaced.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hither_operator::etcd::ask::{Credentials, Link, Peer};
use hither_operator::etcd::certificates::{Certificates, Names, Pair};
use hither_operator::etcd::plan::{LetIn, Place, Plan, Step, World, is_whole, plan};
use hither_operator::etcd::wal;
use jiff::Timestamp;

/// A member as a pod would have it.
struct Member {
    name: String,
    client: u16,
    peer: u16,
    dir: PathBuf,
    process: Option<Child>,
    /// It has lost its data and was not let in.
    waits: bool,
    /// The member whose data it has lost.
    lost: Option<u64>,
}

struct Cluster {
    dir: tempfile::TempDir,
    members: Vec<Member>,
    certificates: Certificates,
    established: bool,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for process in self
            .members
            .iter_mut()
            .filter_map(|one| one.process.as_mut())
        {
            // It may have ended by itself.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Cluster {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let names = Names {
            member: "test-etcd".into(),
            client: "test-etcd-client".into(),
            hosts: vec!["localhost".into()],
        };
        let certificates = Certificates::default()
            .renewed(Timestamp::now(), &names)
            .unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let Pair { certificate, key } = certificates.member.clone().unwrap();
        write("ca.crt", &certificates.trusted());
        write("tls.crt", &certificate);
        write("tls.key", &key);
        // Held until all are known, so that no two are the same.
        let ports: Vec<TcpListener> = (0..6)
            .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
            .collect();
        let port = |at: usize| ports[at].local_addr().unwrap().port();
        let members = (0..3).map(|at| Member {
            name: format!("e-{at}"),
            client: port(at),
            peer: port(at + 3),
            dir: dir.path().join(format!("data-{at}")),
            process: None,
            waits: false,
            lost: None,
        });
        Self {
            members: members.collect(),
            dir,
            certificates,
            established: false,
        }
    }

    fn peer(&self, at: usize) -> String {
        format!("https://localhost:{}", self.members[at].peer)
    }

    fn start(&mut self, at: usize, state: &str) {
        let initial: Vec<String> = (0..3)
            .map(|at| format!("{}={}", self.members[at].name, self.peer(at)))
            .collect();
        let file = |name: &str| self.dir.path().join(name).display().to_string();
        let own_peer = self.peer(at);
        let member = &self.members[at];
        let client = format!("https://localhost:{}", member.client);
        let log = std::fs::File::create(self.dir.path().join(format!("log-{at}"))).unwrap();
        let listen = |port| format!("https://127.0.0.1:{port}");
        let process = Command::new("etcd")
            .args(["--name", &member.name])
            .arg("--data-dir")
            .arg(&member.dir)
            .args(["--listen-client-urls", &listen(member.client)])
            .args(["--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &listen(member.peer)])
            .args(["--initial-advertise-peer-urls", &own_peer])
            .args(["--initial-cluster", &initial.join(",")])
            .args(["--initial-cluster-state", state])
            .args([
                "--cert-file",
                &file("tls.crt"),
                "--key-file",
                &file("tls.key"),
            ])
            .args(["--trusted-ca-file", &file("ca.crt"), "--client-cert-auth"])
            .args(["--peer-cert-file", &file("tls.crt")])
            .args(["--peer-key-file", &file("tls.key")])
            .args([
                "--peer-trusted-ca-file",
                &file("ca.crt"),
                "--peer-client-cert-auth",
            ])
            .args(["--peer-cert-allowed-cn", "test-etcd"])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("run etcd: apt-get install etcd-server");
        self.members[at].process = Some(process);
    }

    /// Kills a member and takes its data, as the loss of a volume does.
    fn lose(&mut self, at: usize) {
        self.kill(at);
        let member = &mut self.members[at];
        member.lost = wal::member(&member.dir).unwrap();
        std::fs::remove_dir_all(&member.dir).unwrap();
        member.waits = true;
    }

    fn kill(&mut self, at: usize) {
        if let Some(mut process) = self.members[at].process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    async fn link(&self, at: usize) -> Link {
        let client = self.certificates.client.clone().unwrap();
        let credentials = Credentials {
            trusted: self.certificates.trusted().into_bytes(),
            certificate: client.certificate.into_bytes(),
            key: client.key.into_bytes(),
        };
        let peer = Peer {
            url: format!("https://127.0.0.1:{}", self.members[at].client),
            server_name: Some("localhost".into()),
        };
        Link::to(&peer, &credentials).await.unwrap()
    }

    /// What is seen, and the link of a member with a quorum behind it.
    async fn look(&self) -> (World, Option<Link>) {
        let mut world = World {
            established: self.established,
            ..World::default()
        };
        let mut asked = None;
        for (at, member) in self.members.iter().enumerate() {
            let mut said = None;
            if member.process.is_some() {
                let link = self.link(at).await;
                said = link.said().await.ok();
                if asked.is_none()
                    && said.is_some()
                    && let Ok(members) = link.members().await
                {
                    world.full = !link.full().await.unwrap().is_empty();
                    world.members = Some(members);
                    asked = Some(link);
                }
            }
            world.places.push(Place {
                pod: member.name.clone(),
                peer: self.peer(at),
                waits: member.waits,
                lost: member.lost,
                let_in: (!member.waits).then(|| LetIn {
                    member: wal::member(&member.dir).unwrap(),
                    seconds: 0,
                }),
                said,
                ..Place::default()
            });
        }
        (world, asked)
    }

    /// Takes steps, as the operator does, until nothing is to be done and all vote.
    async fn until_whole(&mut self) -> Vec<Step> {
        let begun = Instant::now();
        let mut steps = Vec::new();
        loop {
            let (world, asked) = self.look().await;
            let plan = plan(&world);
            if plan == Plan::default() && is_whole(&world) {
                return steps;
            }
            assert!(
                begun.elapsed() < PATIENCE,
                "{world:#?} {plan:#?}\n{}",
                self.logs()
            );
            if let (Some(step), Some(asked)) = (plan.step, asked)
                && self.take(&step, &asked).await
            {
                steps.push(step);
                continue;
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn take(&mut self, step: &Step, asked: &Link) -> bool {
        match step {
            Step::Establish => self.established = true,
            Step::Remove(id) => return asked.remove(*id).await.unwrap(),
            Step::AddLearner(peer) => {
                if !asked.add_learner(peer.clone()).await.unwrap() {
                    return false;
                }
                let at = (0..3).find(|at| self.peer(*at) == *peer).unwrap();
                self.members[at].waits = false;
                self.members[at].lost = None;
                self.start(at, "existing");
            }
            Step::Again(pod) => {
                let at = (0..3).find(|at| self.members[*at].name == *pod).unwrap();
                self.kill(at);
                // As its admission does.
                let of = wal::member(&self.members[at].dir).unwrap().unwrap();
                let listed = asked.members().await.unwrap();
                assert!(listed.iter().all(|member| member.id != of));
                std::fs::remove_dir_all(&self.members[at].dir).unwrap();
                self.members[at].waits = true;
            }
            Step::Promote(id) => return asked.promote(*id).await.unwrap(),
            _ => panic!("{step:?}"),
        }
        true
    }

    fn logs(&self) -> String {
        let of = |at: usize| std::fs::read_to_string(self.dir.path().join(format!("log-{at}")));
        let tail = |text: String| {
            let lines: Vec<&str> = text.lines().rev().take(15).collect();
            lines.into_iter().rev().collect::<Vec<_>>().join("\n")
        };
        (0..3)
            .map(|at| format!("member {at}:\n{}\n", tail(of(at).unwrap_or_default())))
            .collect()
    }
}

#[tokio::test]
async fn a_member_that_lost_its_data_is_replaced_and_without_quorum_nothing_is_done() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let mut cluster = Cluster::new();
    (0..3).for_each(|at| cluster.start(at, "new"));
    assert_eq!(cluster.until_whole().await, [Step::Establish]);
    let before = cluster.look().await.0.members.unwrap();
    let lost = before
        .iter()
        .find(|member| member.name == "e-1")
        .unwrap()
        .id;

    cluster.lose(1);
    let steps = cluster.until_whole().await;
    let after = cluster.look().await.0.members.unwrap();
    let new = after.iter().find(|member| member.name == "e-1").unwrap().id;
    assert_ne!(new, lost);
    assert_eq!(
        steps,
        [
            Step::Remove(lost),
            Step::AddLearner(cluster.peer(1)),
            Step::Promote(new)
        ]
    );
    // A file can be made smaller, and a full etcd is no matter for members that are not.
    let link = cluster.link(0).await;
    link.defragment().await.unwrap();
    link.disarm().await.unwrap();

    cluster.lose(0);
    cluster.kill(2);
    let (world, asked) = cluster.look().await;
    assert!(asked.is_none());
    let decided = plan(&world);
    assert_eq!(decided.step, None);
    assert!(decided.lost.unwrap().contains("1 of 3 members answer"));
    // The one that is back makes a quorum with the one that has its data: the other is replaced.
    cluster.start(2, "existing");
    let steps = cluster.until_whole().await;
    assert!(
        matches!(
            steps[..],
            [Step::Remove(_), Step::AddLearner(_), Step::Promote(_)]
        ),
        "{steps:?}"
    );
}

#[tokio::test]
async fn a_member_that_was_taken_off_the_list_while_it_ran_joins_again() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let mut cluster = Cluster::new();
    (0..3).for_each(|at| cluster.start(at, "new"));
    cluster.until_whole().await;
    let id = wal::member(&cluster.members[1].dir).unwrap().unwrap();
    let link = cluster.link(0).await;
    let begun = Instant::now();
    while !link.remove(id).await.unwrap() {
        assert!(begun.elapsed() < PATIENCE, "{}", cluster.logs());
        tokio::time::sleep(AGAIN).await;
    }
    // Its container starts again in the same pod, without an admission.
    cluster.kill(1);
    cluster.start(1, "existing");
    let steps = cluster.until_whole().await;
    let new = wal::member(&cluster.members[1].dir).unwrap().unwrap();
    assert_ne!(new, id);
    assert_eq!(
        steps,
        [
            Step::Again("e-1".into()),
            Step::AddLearner(cluster.peer(1)),
            Step::Promote(new)
        ]
    );
}

#[tokio::test]
async fn whom_the_authority_does_not_know_is_not_answered() {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let mut cluster = Cluster::new();
    (0..3).for_each(|at| cluster.start(at, "new"));
    cluster.until_whole().await;
    let stranger = Cluster::new();
    let link = {
        let client = stranger.certificates.client.clone().unwrap();
        let credentials = Credentials {
            trusted: cluster.certificates.trusted().into_bytes(),
            certificate: client.certificate.into_bytes(),
            key: client.key.into_bytes(),
        };
        let peer = Peer {
            url: format!("https://127.0.0.1:{}", cluster.members[0].client),
            server_name: Some("localhost".into()),
        };
        Link::to(&peer, &credentials).await.unwrap()
    };
    assert!(link.said().await.is_err());
    assert!(Path::new(&cluster.members[0].dir).exists());
}

/// Time between looks.
const AGAIN: Duration = Duration::from_millis(200);
/// Time for anything to come about.
const PATIENCE: Duration = Duration::from_secs(90);
