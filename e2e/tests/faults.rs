//! Processes die and hang under a checksum-verified load: nobody gets an error, nothing is lost.
#![cfg(feature = "live")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![allow(
    clippy::disallowed_methods,
    reason = "tests of real processes measure real time"
)]

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hither_e2e::load::{Early, under_load};
use hither_e2e::{Cluster, Role, Store, eventually, pattern};
use hither_net::{Identity, NetError, NoHandler, Reply, connect};
use hither_proto::common::{Empty, Role as NetRole};
use hither_proto::kind::Kind;
use hither_proto::status::Status;

/// What happens to a process.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    Killed,
    Hangs,
    /// It is asked to end, and is started again.
    Ends,
}

impl Fault {
    fn begin(self, cluster: &Cluster, name: &str) {
        match self {
            Self::Killed => cluster.playground("kill", name),
            Self::Hangs => cluster.playground("pause", name),
            Self::Ends => cluster.end(name),
        }
    }

    fn end(self, cluster: &Cluster, name: &str) {
        let verb = match self {
            Self::Killed | Self::Ends => "start",
            Self::Hangs => "resume",
        };
        cluster.playground(verb, name);
    }
}

/// One test for each row.
macro_rules! rows {
    ($($name:ident: $store:ident $role:ident $fault:ident;)*) => {
        $(#[test] fn $name() { a_process_fails(Store::$store, Role::$role, Fault::$fault); })*
    };
}

rows! {
    embedded_chunkserver_is_killed: Embedded Chunkserver Killed;
    embedded_chunkserver_hangs: Embedded Chunkserver Hangs;
    embedded_manager_and_rank_are_killed: Embedded Manager Killed;
    embedded_manager_and_rank_hang: Embedded Manager Hangs;
    embedded_manager_and_rank_are_restarted: Embedded Manager Ends;
    etcd_chunkserver_is_killed: Etcd Chunkserver Killed;
    etcd_chunkserver_hangs: Etcd Chunkserver Hangs;
    etcd_leading_manager_is_killed: Etcd Manager Killed;
    etcd_leading_manager_hangs: Etcd Manager Hangs;
    etcd_metadata_server_is_killed: Etcd Mds Killed;
    etcd_leading_manager_is_restarted: Etcd Manager Ends;
    etcd_metadata_server_hangs: Etcd Mds Hangs;
    etcd_metadata_server_is_restarted: Etcd Mds Ends;
    etcd_itself_is_killed: Etcd Store Killed;
    etcd_itself_hangs: Etcd Store Hangs;
}

/// The load goes on while the process is away where another can stand in for it, and in any case
/// once it is back; what was answered early is kept; a process that was overtaken stays so.
fn a_process_fails(store: Store, role: Role, fault: Fault) {
    let mut cluster = Cluster::on(store, "a,b", 1);
    let mounts: Vec<PathBuf> = ["a", "b"]
        .iter()
        .map(|zone| cluster.mount(zone, &format!("preflabels=zone={zone}")))
        .collect();
    let stands_by = store == Store::Etcd && matches!(role, Role::Manager | Role::Mds);
    under_load(&mounts, |more| {
        let victim = cluster.name_of(role);
        let early = Early::write(&mounts[0], "early");
        fault.begin(&cluster, &victim);
        let begun = Instant::now();
        if role == Role::Mds {
            fs::create_dir(mounts[0].join("first")).unwrap();
            let waited = begun.elapsed();
            println!("first answer after {waited:?}");
            let limit = match fault {
                Fault::Killed | Fault::Ends => FIRST_ANSWER_IN,
                // Its clients cannot know by their connections: they wait for the map.
                Fault::Hangs => FIRST_ANSWER_IN * 2,
            };
            assert!(waited < limit, "first answer after {waited:?}");
        }
        if stands_by || role == Role::Chunkserver {
            more(40);
        } else if role == Role::Store && fault == Fault::Killed {
            // The cluster says what it waits for.
            let said = "the metadata store does not answer";
            eventually(Duration::from_secs(25), said, || {
                cluster.complaint(&["status"]).contains(said)
            });
        } else if fault == Fault::Hangs {
            // Longer than the cluster's own patience with servers and requests.
            std::thread::sleep(HANGS_FOR);
        }
        if stands_by {
            assert_ne!(cluster.name_of(role), victim, "another one has taken over");
        }
        // What a hanging server is asked now it finds when it wakes up and does not know yet.
        let asked =
            (fault == Fault::Hangs && stands_by).then(|| Asked::of(&cluster, &victim, role));
        fault.end(&cluster, &victim);
        if let Some(asked) = asked {
            asked.must_be_refused();
        }
        more(40);
        early.verify(&mounts[1]);
        if stands_by {
            assert_ne!(cluster.name_of(role), victim, "and keeps what it has");
            assert_eq!(cluster.state_of(&victim), "running", "it stands by");
            // The one that was overtaken can take over in turn.
            let early = Early::write(&mounts[1], "again");
            let second = cluster.name_of(role);
            fault.begin(&cluster, &second);
            more(20);
            early.verify(&mounts[0]);
            assert_eq!(cluster.name_of(role), victim, "and back");
            fault.end(&cluster, &second);
        }
    });
    cluster.wait_whole();
}

/// A question that waits in the socket of a server which has been overtaken.
struct Asked(JoinHandle<Result<Reply, NetError>>);

impl Asked {
    fn of(cluster: &Cluster, name: &str, role: Role) -> Self {
        let address = cluster.address_of(name);
        // Listed from memory, without a look at the store: a wrong answer would be easy.
        let kind = if role == Role::Mds {
            Kind::SESSION_LIST
        } else {
            Kind::CLUSTER_STATUS
        };
        Self(std::thread::spawn(move || ask(&address, kind)))
    }

    fn must_be_refused(self) {
        match self.0.join().unwrap() {
            Ok(_) => panic!("an overtaken server answers as if it were not"),
            Err(NetError::Refused { status, .. }) => {
                let plain = [Status::RETRY, Status::NOT_LEADER];
                assert!(plain.contains(&status), "{status}");
            }
            // It has closed its connections: as good.
            Err(_) => {}
        }
    }
}

fn ask(address: &str, kind: Kind) -> Result<Reply, NetError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let identity = Identity {
        role: NetRole::Admin,
        boot_id: 1,
        ..Identity::default()
    };
    runtime.block_on(async {
        let patience = Duration::from_secs(20);
        let connection = connect(address, &identity, Arc::new(NoHandler), patience).await?;
        connection.call(kind, &Empty {}, &[], patience).await
    })
}

/// One test for each store.
macro_rules! on_both_stores {
    ($($name:ident: $embedded:ident $etcd:ident;)*) => {
        $(#[test] fn $embedded() { $name(Store::Embedded); }
          #[test] fn $etcd() { $name(Store::Etcd); })*
    };
}

on_both_stores! {
    what_fsync_answered_survives_the_death_of_every_process:
        embedded_all_processes_die etcd_all_processes_die;
    a_dead_cluster_gives_errors_in_time_and_can_be_unmounted:
        embedded_cluster_is_dead etcd_cluster_is_dead;
}

fn names(cluster: &Cluster) -> Vec<String> {
    let all = cluster.processes();
    all.iter()
        .map(|p| p["name"].as_str().unwrap().to_owned())
        .collect()
}

fn kill_all(cluster: &Cluster) {
    for name in names(cluster).iter().rev() {
        cluster.playground("kill", name);
    }
}

fn start_all(cluster: &Cluster) {
    for name in names(cluster) {
        cluster.playground("start", &name);
    }
}

/// Everything is killed at once; what fsync answered is there afterwards.
fn what_fsync_answered_survives_the_death_of_every_process(store: Store) {
    let mut cluster = Cluster::on(store, "a,b", 1);
    let at = cluster.mount("m", "preflabels=zone=a,timeout=60s");
    for n in 0..50u64 {
        let mut file = fs::File::create(at.join(format!("f{n}"))).unwrap();
        file.write_all(&pattern(n, 0, 10_000 + usize::try_from(n).unwrap() * 3000))
            .unwrap();
        file.sync_all().unwrap();
    }
    kill_all(&cluster);
    start_all(&cluster);
    let other = cluster.mount("other", "preflabels=zone=b,timeout=60s");
    for n in 0..50u64 {
        let expected = pattern(n, 0, 10_000 + usize::try_from(n).unwrap() * 3000);
        assert!(
            fs::read(other.join(format!("f{n}"))).unwrap() == expected,
            "file {n}"
        );
    }
}

/// A cluster that is gone: operations fail after the configured time, and the mount can always be
/// taken away; a cluster that comes back is used again.
fn a_dead_cluster_gives_errors_in_time_and_can_be_unmounted(store: Store) {
    let mut cluster = Cluster::on(store, "a", 1);
    let at = cluster.mount("m", "timeout=2s");
    // Not synced: its mount still has it when the servers have lost it.
    fs::write(at.join("f"), pattern(1, 0, 1000)).unwrap();
    kill_all(&cluster);
    let error = fs::create_dir(at.join("d")).unwrap_err();
    assert_eq!(
        error.raw_os_error(),
        Some(rustix::io::Errno::TIMEDOUT.raw_os_error())
    );
    start_all(&cluster);
    eventually(Duration::from_secs(30), "the mount works again", || {
        fs::create_dir(at.join("d2")).is_ok()
    });
    assert!(fs::read(at.join("f")).unwrap() == pattern(1, 0, 1000));
    kill_all(&cluster);
    cluster.unmount(&at);
}

/// A rank is served again this soon after the death of its server.
const FIRST_ANSWER_IN: Duration = Duration::from_secs(5);
/// How long a process without a stand-in hangs.
const HANGS_FOR: Duration = Duration::from_secs(6);
