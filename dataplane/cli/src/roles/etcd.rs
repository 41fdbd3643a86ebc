//! The metadata store in etcd, as the roles open it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use hither_metastore::{Error, EtcdOptions, EtcdStore, EtcdTls};

use super::addresses;

/// Connects to etcd, waiting for it if need be; everything of the cluster is under one prefix.
///
/// `tls` is a directory with the authorities (`ca.crt`) and, if etcd asks for a certificate, ours
/// (`tls.crt`, `tls.key`), as a Kubernetes secret has them. They are read once: new ones need a
/// restart.
pub(crate) async fn open(urls: &str, tls: Option<&Path>) -> anyhow::Result<EtcdStore> {
    let mut options = EtcdOptions::new(endpoints(urls, tls.is_some())?, "hither/");
    options.tls = tls.map(certificates).transpose()?;
    let mut told = false;
    loop {
        match EtcdStore::connect(options.clone()).await {
            Ok(store) => return Ok(store),
            Err(error @ Error::Unavailable { .. }) => {
                if !std::mem::replace(&mut told, true) {
                    tracing::warn!(%error, urls, "etcd does not answer: waiting for it");
                }
                tokio::time::sleep(AGAIN).await;
            }
            Err(error) => {
                return Err(error).with_context(|| format!("use etcd at {urls}"));
            }
        }
    }
}

/// The addresses in full; without a scheme the one that goes with `encrypted`.
fn endpoints(urls: &str, encrypted: bool) -> anyhow::Result<Vec<String>> {
    let scheme = if encrypted { "https://" } else { "http://" };
    let full = |url: String| match url.split_once("://") {
        None => Ok(format!("{scheme}{url}")),
        Some(_) if url.starts_with(scheme) => Ok(url),
        Some(_) if encrypted => bail!("--etcd {url}: with --etcd-tls it is https://"),
        Some(_) => bail!("--etcd {url}: give --etcd-tls for https://"),
    };
    addresses(urls).into_iter().map(full).collect()
}

fn certificates(dir: &Path) -> anyhow::Result<EtcdTls> {
    let read = |name: &str| {
        let path = dir.join(name);
        std::fs::read(&path).with_context(|| format!("read {}", path.display()))
    };
    let identity = if dir.join(CERTIFICATE).exists() {
        Some((read(CERTIFICATE)?, read(KEY)?))
    } else {
        None
    };
    Ok(EtcdTls {
        authorities: read(AUTHORITIES)?,
        identity,
        server_name: None,
    })
}

const AUTHORITIES: &str = "ca.crt";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
/// Pause between attempts to reach etcd.
const AGAIN: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheme_says_whether_it_is_encrypted() {
        assert_eq!(
            endpoints("a:2379,http://b:2379", false).unwrap(),
            ["http://a:2379", "http://b:2379"]
        );
        assert_eq!(endpoints("a:1", true).unwrap(), ["https://a:1"]);
        assert!(endpoints("https://a:1", false).is_err());
        assert!(endpoints("http://a:1", true).is_err());
    }

    #[test]
    fn a_certificate_of_ours_comes_with_its_key() {
        let dir = tempfile::tempdir().unwrap();
        assert!(certificates(dir.path()).is_err());
        std::fs::write(dir.path().join(AUTHORITIES), "a").unwrap();
        assert!(certificates(dir.path()).unwrap().identity.is_none());
        std::fs::write(dir.path().join(CERTIFICATE), "c").unwrap();
        let error = certificates(dir.path()).unwrap_err();
        assert!(error.to_string().contains("tls.key"), "{error}");
    }
}
