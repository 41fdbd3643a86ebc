//! Conditions: keyed by type, with the time of the last change of status.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// A condition before it has a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// Its type.
    pub type_: &'static str,
    /// `None` is `Unknown`.
    pub status: Option<bool>,
    /// Stable word.
    pub reason: &'static str,
    /// For people; may be empty.
    pub message: String,
}

/// Says a condition.
#[must_use]
pub fn said(
    type_: &'static str,
    status: impl Into<Option<bool>>,
    reason: &'static str,
    message: impl Into<String>,
) -> Said {
    Said {
        type_,
        status: status.into(),
        reason,
        message: message.into(),
    }
}

/// The conditions as they are stored: one that says what it said keeps its time.
#[must_use]
pub fn stored(
    old: &[Condition],
    new: &[Said],
    generation: Option<i64>,
    now: Timestamp,
) -> Vec<Condition> {
    let one = |said: &Said| {
        let status = match said.status {
            Some(true) => "True",
            Some(false) => "False",
            None => "Unknown",
        };
        let before = old
            .iter()
            .find(|old| old.type_ == said.type_ && old.status == status);
        Condition {
            type_: said.type_.into(),
            status: status.into(),
            reason: said.reason.into(),
            message: shortened(&said.message),
            observed_generation: generation,
            last_transition_time: before.map_or(Time(now), |old| old.last_transition_time.clone()),
        }
    };
    new.iter().map(one).collect()
}

/// The conditions that say something else than before, for events.
pub fn changed<'a>(
    old: &'a [Condition],
    new: &'a [Condition],
) -> impl Iterator<Item = &'a Condition> {
    new.iter().filter(|new| {
        let before = old.iter().find(|old| old.type_ == new.type_);
        before.is_none_or(|old| old.status != new.status || old.reason != new.reason)
    })
}

fn shortened(text: &str) -> String {
    if text.chars().count() <= MESSAGE_MAX {
        return text.to_owned();
    }
    let kept: String = text.chars().take(MESSAGE_MAX - 1).collect();
    format!("{kept}…")
}

/// Longest message, characters; the API server takes 32 768.
const MESSAGE_MAX: usize = 2000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_change_of_status_has_a_new_time() {
        let (then, now) = (Timestamp::UNIX_EPOCH, Timestamp::MAX);
        let first = stored(&[], &[said("Ready", false, "Starting", "")], Some(1), then);
        let second = stored(
            &first,
            &[said("Ready", false, "Waiting", "x")],
            Some(2),
            now,
        );
        assert_eq!(second[0].last_transition_time, Time(then));
        assert_eq!(changed(&first, &second).count(), 1);
        let third = stored(&second, &[said("Ready", true, "Ready", "")], Some(2), now);
        assert_eq!(third[0].last_transition_time, Time(now));
    }
}
