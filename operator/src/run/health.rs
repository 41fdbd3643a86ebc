//! What probes are told: whether watches work and passes end.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::Key;

/// One watch.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Watch {
    pub(super) kind: String,
    /// `None`: all.
    pub(super) namespace: Option<String>,
}

impl fmt::Display for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            None => f.write_str(&self.kind),
            Some(namespace) => write!(f, "{} in {namespace}", self.kind),
        }
    }
}

/// Which watches fail, and which passes have not ended.
#[derive(Clone, Default)]
pub(super) struct Health {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    /// Every watch; since when it fails, if it does.
    watches: BTreeMap<Watch, Option<Failing>>,
    /// Since when the passes of now run.
    passes: BTreeMap<Key, Instant>,
}

#[derive(Clone, Copy)]
struct Failing {
    since: Instant,
    /// By the API server's word, not for want of an answer.
    refused: bool,
}

/// A pass that runs; it has ended with this.
pub(super) struct Pass {
    health: Health,
    key: Key,
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.health.inner.lock().passes.remove(&self.key);
    }
}

impl Health {
    /// There is such a watch, of which nothing has been heard yet.
    pub(super) fn begins(&self, watch: &Watch) {
        self.fails(watch, false);
    }

    /// It has said something.
    pub(super) fn works(&self, watch: &Watch) {
        self.inner.lock().watches.insert(watch.clone(), None);
    }

    /// It has failed.
    pub(super) fn fails(&self, watch: &Watch, refused: bool) {
        let mut inner = self.inner.lock();
        let known = inner.watches.entry(watch.clone()).or_default();
        let since = known.map_or_else(Instant::now, |failing| failing.since);
        *known = Some(Failing { since, refused });
    }

    /// A pass over a cluster begins.
    pub(super) fn pass(&self, key: &Key) -> Pass {
        let mut inner = self.inner.lock();
        inner.passes.insert(key.clone(), Instant::now());
        Pass {
            health: self.clone(),
            key: key.clone(),
        }
    }

    /// What has failed for too long, and may work in a new process.
    ///
    /// A namespace that was refused is none of that while another is not: its clusters wait, and
    /// those of the others go on.
    pub(super) fn complaint(&self) -> Option<String> {
        let inner = self.inner.lock();
        let mut passes = inner.passes.iter();
        if let Some((key, since)) = passes.find(|(_, since)| since.elapsed() > PASS_MAX) {
            let seconds = since.elapsed().as_secs();
            return Some(format!(
                "a pass over {}/{} runs for {seconds} s",
                key.0, key.1
            ));
        }
        let others = |watch: &Watch| {
            let mut all = inner.watches.iter();
            all.any(|(other, failing)| other.kind == watch.kind && failing.is_none())
        };
        let (watch, failing) = inner.watches.iter().find_map(|(watch, failing)| {
            let failing = (*failing)?;
            let counts = !failing.refused || !others(watch);
            (counts && failing.since.elapsed() > WATCH_FAILS_MAX).then_some((watch, failing))
        })?;
        let seconds = failing.since.elapsed().as_secs();
        Some(format!("the watch of {watch} has failed for {seconds} s"))
    }
}

/// A watch that fails for longer makes the process unhealthy.
const WATCH_FAILS_MAX: Duration = Duration::from_secs(300);
/// So does a pass that runs for longer; it should have been given up long before.
const PASS_MAX: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(namespace: &str) -> Watch {
        Watch {
            kind: "HitherCluster".into(),
            namespace: Some(namespace.into()),
        }
    }

    async fn later() {
        tokio::time::advance(WATCH_FAILS_MAX + Duration::from_secs(1)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_namespace_that_is_gone_is_no_complaint_while_another_works() {
        let health = Health::default();
        let (good, bad) = (watch("good"), watch("bad"));
        health.begins(&good);
        health.works(&good);
        health.fails(&bad, true);
        later().await;
        assert_eq!(health.complaint(), None);
        health.fails(&good, true);
        later().await;
        assert!(health.complaint().is_some(), "nothing works");
    }

    #[tokio::test(start_paused = true)]
    async fn a_lively_namespace_does_not_hide_one_that_hangs() {
        let health = Health::default();
        let (good, bad) = (watch("good"), watch("bad"));
        health.fails(&bad, false);
        later().await;
        health.works(&good);
        health.fails(&bad, false);
        assert!(health.complaint().unwrap().contains("in bad"));
        health.works(&bad);
        assert_eq!(health.complaint(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_never_says_anything_is_told() {
        let health = Health::default();
        health.begins(&watch("good"));
        assert_eq!(health.complaint(), None);
        later().await;
        assert!(health.complaint().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_pass_that_does_not_end_is_told() {
        let health = Health::default();
        let pass = health.pass(&("files".into(), "demo".into()));
        assert_eq!(health.complaint(), None);
        later().await;
        assert!(health.complaint().unwrap().contains("files/demo"));
        drop(pass);
        assert_eq!(health.complaint(), None);
    }
}
