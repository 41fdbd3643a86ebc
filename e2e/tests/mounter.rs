//! Mounts made by one process and served by another.
#![cfg(feature = "live")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use hither_e2e::{Cluster, drop_caches, eventually, locality, pattern, read_bytes, write_stable};
use hither_mounter_proto::{Kind, Reply, Request, Rerank, Serve, call};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, Signal, kill_process};

const WAIT: Duration = Duration::from_secs(60);

/// A mounter process, and the mount points it serves; nothing is left when it is dropped.
struct Mounter {
    child: Child,
    socket: PathBuf,
    at: Vec<PathBuf>,
}

impl Mounter {
    fn start(dir: &Path) -> Self {
        let socket = dir.join("mounter.sock");
        let mut child = Command::new(std::env::var("HITHER_BIN").unwrap())
            .args(["mounter", "--socket"])
            .arg(&socket)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut said)
            .unwrap();
        assert!(said.starts_with("mounter ready"), "{said}");
        let at = Vec::new();
        Self { child, socket, at }
    }

    /// Mounts and hands over, as whoever has the right to mount does.
    fn mount(&mut self, name: &str, at: &Path, cluster: &Cluster, options: &str) -> Reply {
        fs::create_dir_all(at).unwrap();
        let device = File::options()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .unwrap();
        let data = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
            device.as_raw_fd()
        );
        let data = CString::new(data).unwrap();
        mount(
            "hither",
            at,
            "fuse.hither",
            MountFlags::NODEV,
            data.as_c_str(),
        )
        .unwrap();
        self.at.push(at.to_owned());
        let serve = Serve {
            mount: name.into(),
            managers: vec![cluster.address.clone()],
            subdirectory: "/".into(),
            options: options.into(),
            staging: at.display().to_string(),
        };
        call(
            &self.socket,
            &Request::Serve(serve),
            Some(device.as_fd()),
            WAIT,
        )
        .unwrap()
    }

    fn ask(&self, request: &Request) -> Reply {
        call(&self.socket, request, None, WAIT).unwrap()
    }

    fn end(&self, name: &str) -> Reply {
        let mount = name.to_owned();
        self.ask(&Request::End { mount })
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().try_into().unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }
}

impl Drop for Mounter {
    fn drop(&mut self) {
        for at in self.at.drain(..) {
            // What a test has unmounted is unmounted.
            let _ = unmount(&at, UnmountFlags::DETACH);
        }
        // What has ended has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn one_process_serves_what_another_mounts() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let other = cluster.mount("other", "");
    let dir = cluster.dir().to_owned();
    let mut mounter = Mounter::start(&dir);
    let (one, two) = (dir.join("one"), dir.join("two"));
    assert!(mounter.mount("1", &one, &cluster, "preflabels=zone=a").ok);
    assert!(mounter.mount("2", &two, &cluster, "ro").ok);

    fs::write(one.join("f"), pattern(1, 0, 300_000)).unwrap();
    assert_eq!(fs::read(other.join("f")).unwrap(), pattern(1, 0, 300_000));
    assert_eq!(fs::read(two.join("f")).unwrap(), pattern(1, 0, 300_000));
    assert!(fs::write(two.join("no"), "x").is_err(), "it is read-only");

    let listed = mounter.ask(&Request::List).mounts;
    let names: Vec<&str> = listed.iter().map(|mount| mount.mount.as_str()).collect();
    assert_eq!(names, ["1", "2"]);
    let minor = rustix::fs::minor(fs::metadata(&one).unwrap().dev());
    assert_eq!(listed[0].device, format!("0:{minor}"));
    assert_eq!(listed[0].preferred, "zone=a");

    // Unmounted by whoever mounted: what was written is stored, and the name is free again.
    fs::write(one.join("late"), pattern(2, 0, 5000)).unwrap();
    unmount(&one, UnmountFlags::empty()).unwrap();
    assert!(mounter.end("1").ok);
    assert_eq!(fs::read(other.join("late")).unwrap(), pattern(2, 0, 5000));
    assert_eq!(mounter.ask(&Request::List).mounts.len(), 1);
    assert!(mounter.end("1").ok, "twice is no error");
    assert!(mounter.mount("1", &one, &cluster, "").ok);

    // A signal does not take mounts away from whoever uses them.
    mounter.signal(Signal::TERM);
    assert_eq!(fs::read(two.join("f")).unwrap(), pattern(1, 0, 300_000));
    unmount(&one, UnmountFlags::empty()).unwrap();
    unmount(&two, UnmountFlags::empty()).unwrap();
    assert!(mounter.child.wait().unwrap().success());
    assert!(!mounter.socket.exists());
    assert_eq!(
        cluster.admin(&["session", "ls"]).as_array().unwrap().len(),
        1,
        "the sessions have ended"
    );
}

#[test]
fn a_running_mount_is_ranked_anew() {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let writer = cluster.mount("w", "");
    write_stable(&writer.join("f"), &pattern(3, 0, 1_000_000));
    let at = cluster.dir().join("m");
    let mut mounter = Mounter::start(cluster.dir());
    let options = "preflabels=zone=a,clientZone=a";
    assert!(mounter.mount("m", &at, &cluster, options).ok);
    assert!(fs::read(at.join("f")).unwrap() == pattern(3, 0, 1_000_000));
    assert_eq!(read_bytes(&at, &["remote"]), 0, "{}", locality(&at));
    let near = read_bytes(&at, &["zone"]);
    assert!(near >= 1_000_000);

    let moved = Rerank {
        mount: "m".into(),
        preferred: Some("zone=b".into()),
        zone: Some("b".into()),
        ..Rerank::default()
    };
    assert!(mounter.ask(&Request::Rerank(moved)).ok);
    drop_caches();
    assert!(fs::read(at.join("f")).unwrap() == pattern(3, 0, 1_000_000));
    assert_eq!(read_bytes(&at, &["remote"]), 0, "{}", locality(&at));
    assert!(read_bytes(&at, &["zone"]) >= near + 1_000_000);
    let listed = mounter.ask(&Request::List).mounts;
    assert_eq!(listed[0].preferred, "zone=b");

    let of_nobody = Rerank {
        mount: "x".into(),
        ..Rerank::default()
    };
    let refused = mounter.ask(&Request::Rerank(of_nobody));
    assert_eq!(refused.kind, Some(Kind::NoSuchMount));
    unmount(&at, UnmountFlags::empty()).unwrap();
    assert!(mounter.end("m").ok);
}

#[test]
fn the_end_waits_for_the_data_and_says_what_was_lost() {
    let cluster = Cluster::up("a", 1, &[]);
    let at = cluster.dir().join("m");
    let mut mounter = Mounter::start(cluster.dir());
    assert!(mounter.mount("m", &at, &cluster, "timeout=2s").ok);

    // Taken away while somebody has a file open: not before that is closed.
    let mut open = File::create(at.join("f")).unwrap();
    open.write_all(&pattern(1, 0, 10_000)).unwrap();
    unmount(&at, UnmountFlags::DETACH).unwrap();
    let busy = mounter.end("m");
    assert_eq!(busy.kind, Some(Kind::Busy), "{busy:?}");
    open.write_all(&pattern(1, 10_000, 10_000)).unwrap();
    drop(open);
    assert_eq!(mounter.end("m"), Reply::done());
    assert!(mounter.mount("m", &at, &cluster, "timeout=2s").ok);
    assert_eq!(fs::read(at.join("f")).unwrap(), pattern(1, 0, 20_000));

    // The chunkserver is gone for good: that the data is too is said, once.
    fs::write(at.join("g"), pattern(2, 0, 1000)).unwrap();
    cluster.playground("kill", "cs-a1");
    unmount(&at, UnmountFlags::DETACH).unwrap();
    let lost = mounter.end("m");
    assert_eq!(lost.kind, Some(Kind::DataLost), "{lost:?}");
    assert_eq!(mounter.end("m"), Reply::done());
}

#[test]
fn what_cannot_be_served_is_refused_and_leaves_nothing() {
    let cluster = Cluster::up("a", 1, &[]);
    let dir = cluster.dir().to_owned();
    let mut mounter = Mounter::start(&dir);
    let at = dir.join("m");
    assert!(mounter.mount("m", &at, &cluster, "").ok);
    let again = mounter.mount("m", &dir.join("n"), &cluster, "");
    assert_eq!(again.kind, Some(Kind::Busy), "{again:?}");
    let odd = mounter.mount("odd", &dir.join("o"), &cluster, "preflabels=A&&");
    assert_eq!(odd.kind, Some(Kind::BadOptions), "{odd:?}");
    assert!(odd.error.contains('^'), "{}", odd.error);
    // Nobody serves these any more: the kernel says so instead of waiting.
    for dead in ["n", "o"] {
        let error = fs::metadata(dir.join(dead)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(107), "{dead}: {error}");
    }
    assert_eq!(mounter.ask(&Request::List).mounts.len(), 1);

    // Killed: its mounts are dead, and can be taken away and made anew.
    mounter.signal(Signal::KILL);
    mounter.child.wait().unwrap();
    assert_eq!(fs::metadata(&at).unwrap_err().raw_os_error(), Some(107));
    unmount(&at, UnmountFlags::DETACH).unwrap();
    drop(mounter);
    let mut mounter = Mounter::start(&dir);
    assert!(mounter.mount("m", &at, &cluster, "").ok);
    fs::write(at.join("f"), "again").unwrap();
    unmount(&at, UnmountFlags::empty()).unwrap();
    assert!(mounter.end("m").ok);
    eventually(WAIT, "no mount is left", || {
        mounter.ask(&Request::List).mounts.is_empty()
    });
}
