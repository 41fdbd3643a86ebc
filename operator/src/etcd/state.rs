//! What is recorded about the members outside of them, in a ConfigMap that no one owns.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context as _;

/// What is recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// Whether there was a quorum: then no member without data may begin anew.
    pub established: bool,
    /// The member that goes on without the others, until it has done so.
    pub alone: Option<String>,
    /// How often one went on without the others: what those had before counts no more.
    pub round: u64,
}

impl State {
    /// As the ConfigMap has it.
    #[must_use]
    pub fn data(&self) -> BTreeMap<String, String> {
        let state = if self.established { EXISTING } else { NEW };
        let mut data = BTreeMap::from([
            (STATE.to_owned(), state.to_owned()),
            (ROUND.to_owned(), self.round.to_string()),
        ]);
        data.extend(self.alone.clone().map(|alone| (ALONE.to_owned(), alone)));
        data
    }

    /// From a ConfigMap.
    #[must_use]
    pub fn of(data: &BTreeMap<String, String>) -> Self {
        let get = |key: &str| data.get(key).map(|value| value.trim());
        Self {
            established: get(STATE) == Some(EXISTING),
            alone: get(ALONE).map(str::to_owned),
            round: get(ROUND).and_then(|round| round.parse().ok()).unwrap_or(0),
        }
    }

    /// From a ConfigMap's files.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn read(dir: &Path) -> anyhow::Result<Self> {
        let mut data = BTreeMap::new();
        for key in [STATE, ALONE, ROUND] {
            let path = dir.join(key);
            match std::fs::read_to_string(&path) {
                Ok(text) => drop(data.insert(key.to_owned(), text)),
                Err(error) if key == ALONE && error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("read {}", path.display()));
                }
            }
        }
        Ok(Self::of(&data))
    }
}

const STATE: &str = "state";
const NEW: &str = "new";
const EXISTING: &str = "existing";
const ALONE: &str = "alone";
const ROUND: &str = "round";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_comes_back_as_it_was() {
        for state in [
            State::default(),
            State {
                established: true,
                alone: Some("e-1".into()),
                round: 3,
            },
        ] {
            let data = state.data();
            assert_eq!(State::of(&data), state);
            let dir = tempfile::tempdir().unwrap();
            assert!(State::read(dir.path()).is_err(), "it has to be there");
            for (key, value) in &data {
                std::fs::write(dir.path().join(key), value).unwrap();
            }
            assert_eq!(State::read(dir.path()).unwrap(), state);
        }
    }
}
