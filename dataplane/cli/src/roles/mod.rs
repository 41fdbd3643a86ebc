//! The roles of a cluster.

pub(crate) mod chunkserver;
#[cfg(feature = "etcd")]
pub(crate) mod etcd;
#[cfg(any(feature = "etcd", test))]
mod life;
pub(crate) mod manager;
pub(crate) mod mds;
pub(crate) mod mount;
pub(crate) mod mounter;
#[cfg(any(feature = "etcd", test))]
mod probes;

use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, bail};
use serde::de::DeserializeOwned;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cluster::check_address;

/// Reads a configuration file; keys nobody knows are told and ignored.
pub(crate) fn read_config<T: DeserializeOwned + Default>(path: Option<&Path>) -> anyhow::Result<T> {
    let Some(path) = path else {
        return Ok(T::default());
    };
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("read configuration {}", path.display()))?;
    serde_saphyr::from_str(&text)
        .with_context(|| format!("configuration {} cannot be used", path.display()))
}

/// Every copy in use keeps its file open, and every mount takes several descriptors: the usual soft
/// limit is a relic.
pub(crate) fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Resource::Nofile, raised)
    {
        tracing::warn!(%error, "the number of open files stays limited");
    }
}

/// SIGTERM and SIGINT, from the moment they are listened for.
pub(crate) struct Signals {
    term: Signal,
    int: Signal,
}

impl Signals {
    /// From here on the signals do not end the process by themselves.
    pub(crate) fn listen() -> anyhow::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next one.
    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
}

/// Waits for SIGTERM or SIGINT.
pub(crate) async fn terminated() -> anyhow::Result<()> {
    Signals::listen()?.next().await;
    Ok(())
}

/// Runs an ending to its end, or until SIGTERM or SIGINT has come twice: once to ask for the end
/// (`asked`, if that has happened), and once more to wait no longer.
pub(crate) async fn ending<T>(end: impl Future<Output = T>, asked: bool) -> anyhow::Result<T> {
    let mut signals = Signals::listen()?;
    let impatience = async {
        if !asked {
            signals.next().await;
            tracing::warn!("ending: what is left is being stored; a second signal ends at once");
        }
        signals.next().await;
    };
    tokio::select! {
        ended = end => Ok(ended),
        () = impatience => {
            bail!("asked twice to end: what was under way was not waited for")
        }
    }
}

/// The address to tell others, from the one listened at and the one given; empty for the one
/// listened at. A host alone, such as a pod's address, gets the port listened at, and an IPv6
/// address gets its brackets.
///
/// # Errors
/// When nobody could be reached there.
pub(crate) fn told_address(listen: &str, advertise: &str) -> anyhow::Result<String> {
    let (_, port) = listen.rsplit_once(':').unwrap_or((listen, ""));
    let told = with_port(advertise, port);
    let shown = if told.is_empty() { listen } else { &told };
    let host = host_of(shown);
    let anywhere = host
        .parse::<std::net::IpAddr>()
        .is_ok_and(|address| address.is_unspecified());
    if anywhere {
        bail!("{shown} is no address others could use: give --advertise HOST:PORT");
    }
    if !told.is_empty() {
        check_address(&told).context("the address to tell others (--advertise)")?;
        if is_loopback(host_of(listen)) && !is_loopback(host) {
            bail!(
                "{told} would be told to others, and at {listen} only this machine can connect: listen \
                 at 0.0.0.0:{port} or an address others reach (--listen)"
            );
        }
    }
    Ok(told)
}

fn is_loopback(host: &str) -> bool {
    let address = host.parse::<std::net::IpAddr>();
    address.map_or(host == "localhost", |address| address.is_loopback())
}

/// Says a line on the standard output; whoever read it may be gone, which ends nothing.
pub(crate) fn announce(line: &str) {
    let mut out = std::io::stdout();
    if let Err(error) = writeln!(out, "{line}").and_then(|()| out.flush()) {
        tracing::debug!(%error, line, "nobody reads the standard output");
    }
}

/// Host of an address, without brackets.
pub(crate) fn host_of(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']')
}

fn with_port(advertise: &str, port: &str) -> String {
    use std::net::Ipv6Addr;
    if advertise.is_empty() {
        return String::new();
    }
    // An address that was put before `:PORT` as it is, and would be one with the port too.
    if let Some((host, given)) = advertise.rsplit_once(':')
        && host.parse::<Ipv6Addr>().is_ok()
        && (given == port || advertise.parse::<Ipv6Addr>().is_err())
    {
        return format!("[{host}]:{given}");
    }
    if advertise.parse::<Ipv6Addr>().is_ok() {
        return format!("[{advertise}]:{port}");
    }
    let has_port = match advertise.strip_prefix('[') {
        Some(rest) => rest.contains("]:"),
        None => advertise.contains(':'),
    };
    if has_port {
        advertise.to_owned()
    } else {
        format!("{advertise}:{port}")
    }
}

/// Addresses separated by commas.
pub(crate) fn addresses(text: &str) -> Vec<String> {
    text.split(',')
        .map(str::trim)
        .filter(|a| !a.is_empty())
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_told_a_wildcard() {
        assert!(told_address("127.0.0.1:1", "").is_ok());
        assert!(told_address("0.0.0.0:1", "cs-0.example:1").is_ok());
        assert!(told_address("0.0.0.0:1", "").is_err());
        assert!(told_address("[::]:1", "").is_err());
        assert!(told_address("10.0.0.1:1", "0.0.0.0:1").is_err());
        assert!(told_address("0.0.0.0:1", "0.0.0.0").is_err());
    }

    /// A rank that listened at the default address was told with the pod's.
    #[test]
    fn nobody_is_told_what_only_this_machine_reaches() {
        for told in ["10.1.2.3", "10.1.2.3:7651", "mds-0.example:7651", "fd00::1"] {
            assert!(told_address("127.0.0.1:7651", told).is_err(), "{told}");
            assert!(told_address("[::1]:7651", told).is_err(), "{told}");
            assert!(told_address("10.1.2.3:7651", told).is_ok(), "{told}");
        }
        assert!(told_address("127.0.0.1:7651", "localhost").is_ok());
        assert!(told_address("127.0.0.1:7651", "127.0.0.2:99").is_ok());
        assert!(told_address("127.0.0.1:7651", "").is_ok());
    }

    #[test]
    fn a_pods_address_alone_gets_port_and_brackets() {
        let told = |advertise: &str| told_address("0.0.0.0:7650", advertise).unwrap();
        assert_eq!(told("10.1.2.3"), "10.1.2.3:7650");
        assert_eq!(told("10.1.2.3:99"), "10.1.2.3:99");
        assert_eq!(told("cs-0.cs.default.svc"), "cs-0.cs.default.svc:7650");
        assert_eq!(told("fd00::12"), "[fd00::12]:7650");
        assert_eq!(told("[fd00::12]"), "[fd00::12]:7650");
        assert_eq!(told("[fd00::12]:99"), "[fd00::12]:99");
        assert_eq!(told("fd00::12:7650"), "[fd00::12]:7650");
        assert_eq!(told_address("10.0.0.1:1", "").unwrap(), "");
        assert!(
            told_address("0.0.0.0:0", "10.1.2.3").is_err(),
            "which port?"
        );
        assert!(told_address("0.0.0.0:1", "http://h:1").is_err());
    }
}
