//! Labels of running chunkservers: what to change. Pure.

use std::collections::BTreeSet;

use hither_labels::{Label, LabelSet};

/// The changes that lead from the labels a server shows to those it is to have; the words that come
/// from where it runs stay.
#[must_use]
pub fn changes(shown: &[String], wanted: &[String]) -> Vec<String> {
    let (shown, wanted) = (set(shown), set(wanted));
    let place = |label: &Label| matches!(label, Label::Word(word) if PLACE.contains(&word.key()));
    let wanted_keys: BTreeSet<String> = wanted
        .iter()
        .filter_map(|label| match label {
            Label::Word(word) => Some(word.key().to_owned()),
            Label::Letter(_) => None,
        })
        .collect();
    let mut changes = Vec::new();
    for label in shown
        .iter()
        .filter(|label| !place(label) && !wanted.contains(label))
    {
        match &label {
            Label::Letter(letter) => changes.push(format!("-{}", letter.as_char())),
            // Another value replaces it.
            Label::Word(word) if wanted_keys.contains(word.key()) => {}
            Label::Word(word) => changes.push(format!("-{}", word.key())),
        }
    }
    for label in wanted.iter().filter(|label| !shown.contains(label)) {
        match &label {
            Label::Letter(letter) => changes.push(format!("+{}", letter.as_char())),
            Label::Word(_) => changes.push(label.to_string()),
        }
    }
    changes
}

fn set(labels: &[String]) -> LabelSet {
    let mut set = LabelSet::default();
    for label in labels {
        if let Ok(label) = label.parse::<Label>() {
            // A set beyond its bound keeps what fits.
            let _ = set.insert(label);
        }
    }
    set
}

/// Words that say where a server runs.
const PLACE: [&str; 3] = ["zone", "region", "node"];

#[cfg(test)]
mod tests {
    use super::*;

    fn said(shown: &str, wanted: &str) -> Vec<String> {
        let list = |text: &str| {
            text.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        changes(&list(shown), &list(wanted))
    }

    #[test]
    fn nothing_is_changed_when_nothing_differs() {
        assert!(said("A media=ssd zone=a region=r node=n", "media=ssd A").is_empty());
    }

    #[test]
    fn letters_and_words_come_go_and_change() {
        assert_eq!(
            said("A media=ssd tier=1 zone=a", "B media=hdd"),
            ["-A", "-tier", "+B", "media=hdd"]
        );
    }
}
