//! The roles of a cluster.

pub(crate) mod chunkserver;
pub(crate) mod manager;
pub(crate) mod mds;
pub(crate) mod mount;

use std::path::Path;

use anyhow::{Context as _, bail};
use serde::de::DeserializeOwned;
use tokio::signal::unix::{Signal, SignalKind, signal};

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

/// Refuses to tell others an address at which nobody can be reached.
pub(crate) fn told_address(listen: &str, advertise: &str) -> anyhow::Result<()> {
    let told = if advertise.is_empty() {
        listen
    } else {
        advertise
    };
    let host = told.rsplit_once(':').map_or(told, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let anywhere = host
        .parse::<std::net::IpAddr>()
        .is_ok_and(|address| address.is_unspecified());
    if anywhere {
        bail!("{told} is no address others could use: give --advertise HOST:PORT");
    }
    Ok(())
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
    }
}
