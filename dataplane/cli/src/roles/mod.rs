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

/// Addresses separated by commas.
pub(crate) fn addresses(text: &str) -> Vec<String> {
    text.split(',')
        .map(str::trim)
        .filter(|a| !a.is_empty())
        .map(str::to_owned)
        .collect()
}
