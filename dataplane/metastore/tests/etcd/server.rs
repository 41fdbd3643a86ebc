//! An etcd of our own, as a child process.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// A running etcd; ended when the last test that uses it is done.
pub(crate) struct Server {
    child: Mutex<Child>,
    port: u16,
    _data: tempfile::TempDir,
}

impl Server {
    /// The one that other tests use at this moment, or a new one.
    pub(crate) fn shared() -> Arc<Self> {
        static SHARED: Mutex<Weak<Server>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock();
        shared.upgrade().unwrap_or_else(|| {
            let server = Arc::new(Self::start());
            *shared = Arc::downgrade(&server);
            server
        })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Lets etcd forget everything before a revision.
    pub(crate) async fn compact(&self, revision: u64) {
        let endpoint = format!("http://127.0.0.1:{}", self.port);
        let mut client = etcd_client::Client::connect([endpoint], None)
            .await
            .unwrap();
        client
            .compact(i64::try_from(revision).unwrap(), None)
            .await
            .unwrap();
    }

    /// One that nobody else uses.
    pub(crate) fn start() -> Self {
        Self::start_with("http", &[])
    }

    /// One that nobody else uses, with more arguments.
    pub(crate) fn start_with(scheme: &str, arguments: &[&str]) -> Self {
        // Another process can take a port between its choice and its use.
        (0..5)
            .find_map(|_| Self::try_start(scheme, arguments))
            .expect("etcd does not start")
    }

    fn try_start(scheme: &str, arguments: &[&str]) -> Option<Self> {
        // In memory where there is such a place: these tests are not about etcd's disk.
        let data = tempfile::tempdir_in("/dev/shm")
            .or_else(|_| tempfile::tempdir())
            .unwrap();
        let [port, peer_port] = free_ports();
        let (url, peer_url) = (
            format!("{scheme}://127.0.0.1:{port}"),
            format!("http://127.0.0.1:{peer_port}"),
        );
        let child = Command::new("etcd")
            .arg("--data-dir")
            .arg(data.path())
            .args([
                "--listen-client-urls",
                &url,
                "--advertise-client-urls",
                &url,
            ])
            .args([
                "--listen-peer-urls",
                &peer_url,
                "--initial-advertise-peer-urls",
                &peer_url,
            ])
            .args(["--initial-cluster", &format!("default={peer_url}")])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = child.unwrap_or_else(|error| {
            panic!("cannot run etcd ({error}); install it: apt-get install etcd-server")
        });
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let ready = lines
            .any(|line| line.is_ok_and(|line| line.contains("ready to serve client requests")));
        if !ready {
            child.kill().ok();
            child.wait().ok();
            return None;
        }
        // etcd must not wait for somebody to read what it says.
        std::thread::spawn(move || lines.for_each(drop));
        Some(Self {
            child: Mutex::new(child),
            port,
            _data: data,
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let child = self.child.get_mut();
        child.kill().ok();
        child.wait().ok();
    }
}

fn free_ports() -> [u16; 2] {
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}
