//! Encrypted connections.

use std::path::Path;
use std::process::Command;

use hither_metastore::{Batch, Error, EtcdOptions, EtcdStore, EtcdTls, MetaStore};

use crate::server::Server;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_those_who_know_each_other_talk() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let read = |name: &str| std::fs::read(path(name)).unwrap();
    authority(dir.path(), "ca");
    authority(dir.path(), "other");
    certificate(dir.path(), "server");
    certificate(dir.path(), "client");
    let server = Server::start_with(
        "https",
        &[
            "--cert-file",
            &path("server.crt"),
            "--key-file",
            &path("server.key"),
            "--client-cert-auth",
            "--trusted-ca-file",
            &path("ca.crt"),
        ],
    );
    let connect = |authorities, identity| {
        let tls = EtcdTls {
            authorities,
            identity,
            server_name: None,
        };
        let endpoint = format!("https://127.0.0.1:{}", server.port());
        EtcdStore::connect(EtcdOptions {
            tls: Some(tls),
            request_timeout: std::time::Duration::from_secs(2),
            ..EtcdOptions::new(vec![endpoint], "/tls/")
        })
    };
    let identity = || Some((read("client.crt"), read("client.key")));
    let store = connect(read("ca.crt"), identity()).await.unwrap();
    store
        .commit(Batch::new().put("a", "1").clone())
        .await
        .unwrap();
    assert_eq!(&store.get(b"a").await.unwrap().unwrap().value[..], b"1");
    for (authorities, identity) in [(read("ca.crt"), None), (read("other.crt"), identity())] {
        let refused = connect(authorities, identity).await.map(drop);
        assert!(
            matches!(refused, Err(Error::Unavailable { .. })),
            "{refused:?}"
        );
    }
}

fn authority(dir: &Path, name: &str) {
    openssl(
        dir,
        &format!(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={name} \
         -keyout {name}.key -out {name}.crt"
        ),
    );
}

/// A certificate for 127.0.0.1 from the authority `ca`.
fn certificate(dir: &Path, name: &str) {
    std::fs::write(dir.join("names"), "subjectAltName=IP:127.0.0.1").unwrap();
    openssl(
        dir,
        &format!(
            "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={name} \
         -keyout {name}.key -out {name}.csr"
        ),
    );
    openssl(
        dir,
        &format!(
            "x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 \
         -extfile names -out {name}.crt"
        ),
    );
}

fn openssl(dir: &Path, arguments: &str) {
    let output = Command::new("openssl")
        .args(arguments.split_whitespace())
        .current_dir(dir)
        .output();
    let output = output.unwrap_or_else(|error| {
        panic!("cannot run openssl ({error}); install it: apt-get install openssl")
    });
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
