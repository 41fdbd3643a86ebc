//! Whether a mount's preference can match anything that its class places.

use thiserror::Error;

use crate::class::{ChunkState, StorageClass};
use crate::definition::{DEFAULT_EC_DATA_PARTS, StorageDefinition};
use crate::label::clip;
use crate::preferred::PreferredLabels;
use crate::set::LabelSet;

/// A disagreement between a preference and a class. Nothing fails because of it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PreferenceWarning {
    /// No server that may hold a copy in this state satisfies any preferred expression.
    #[error(
        "the preferred labels `{preferred}` match no server that may hold a copy of class `{class}` \
         in state {state} (`{definition}`): these copies are contacted as if no preference was given"
    )]
    NoCopyMatches {
        /// The class.
        class: String,
        /// The state.
        state: ChunkState,
        /// The definition of the state.
        definition: String,
        /// The preference.
        preferred: String,
    },
    /// No server that may hold a copy in any state satisfies this expression.
    #[error(
        "the preferred expression {position}, `{expression}`, matches no server that may hold a \
         copy of class `{class}`"
    )]
    ExpressionNeverMatches {
        /// The class.
        class: String,
        /// Place of the expression in the list, counted from 1.
        position: usize,
        /// The expression.
        expression: String,
    },
}

/// Compares a preference with a class, given the labels of all present servers as the mount sees
/// them.
///
/// Only states with whole copies count, because parts are not ranked. Copies that spilled to other
/// servers are not foreseen. Without servers, or without a preference, there is nothing to say.
#[must_use]
pub fn check_preference(
    class: &StorageClass,
    preferred: &PreferredLabels,
    servers: &[LabelSet],
) -> Vec<PreferenceWarning> {
    let mut warnings = Vec::new();
    if preferred.is_empty() || servers.is_empty() {
        return warnings;
    }
    let mut is_used = vec![false; preferred.expressions().len()];
    let mut has_copies = false;
    for state in ChunkState::ALL {
        let Some(definition) = class.own_definition(state).filter(|d| !d.is_ec()) else {
            continue;
        };
        has_copies = true;
        let mut is_matched = false;
        for labels in holders(definition, servers) {
            for (expr, is_used) in preferred.expressions().iter().zip(&mut is_used) {
                let is_match = expr.matches(labels);
                *is_used |= is_match;
                is_matched |= is_match;
            }
        }
        if !is_matched {
            warnings.push(PreferenceWarning::NoCopyMatches {
                class: class.name.clone(),
                state,
                definition: clip(&definition.to_string()),
                preferred: clip(&preferred.to_string()),
            });
        }
    }
    if !has_copies || is_used.iter().all(|is_used| !is_used) {
        return warnings;
    }
    for (index, expr) in preferred.expressions().iter().enumerate() {
        if !is_used[index] {
            warnings.push(PreferenceWarning::ExpressionNeverMatches {
                class: class.name.clone(),
                position: index + 1,
                expression: clip(&expr.to_string()),
            });
        }
    }
    warnings
}

/// The servers that satisfy a term of the definition.
fn holders<'a>(
    definition: &StorageDefinition,
    servers: &'a [LabelSet],
) -> impl Iterator<Item = &'a LabelSet> {
    let terms = definition.terms(DEFAULT_EC_DATA_PARTS);
    servers
        .iter()
        .filter(move |labels| terms.iter().any(|term| term.matches(labels)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warnings(keep: &str, preferred: &str, servers: &[&str]) -> Vec<PreferenceWarning> {
        let class = StorageClass::new("rooms", keep.parse().unwrap());
        let servers: Vec<LabelSet> = servers.iter().map(|text| text.parse().unwrap()).collect();
        check_preference(&class, &preferred.parse().unwrap(), &servers)
    }

    #[test]
    fn a_preference_that_matches_a_copy_is_fine() {
        assert_eq!(warnings("A,B", "A", &["A", "B"]), []);
        assert_eq!(warnings("2*", "zone=a", &["zone=a", "zone=b"]), []);
        assert_eq!(warnings("A,B", "-", &["A", "B"]), []);
        assert_eq!(warnings("A,B", "Z", &[]), []);
    }

    #[test]
    fn a_preference_beside_the_class_is_reported() {
        // Servers with S exist, but the class puts no copy there.
        let found = warnings("H,H", "S", &["S", "H"]);
        assert!(
            matches!(&found[..], [PreferenceWarning::NoCopyMatches { state, .. }]
                if *state == ChunkState::Keep)
        );
        let found = warnings("A,B", "A;media=sdd", &["A,media=ssd", "B"]);
        assert_eq!(
            found,
            [PreferenceWarning::ExpressionNeverMatches {
                class: "rooms".to_owned(),
                position: 2,
                expression: "media=sdd".to_owned(),
            }]
        );
    }

    #[test]
    fn each_state_with_copies_is_checked_and_parts_are_not() {
        let mut class = StorageClass::new("cold", "S,H".parse().unwrap());
        class.archive = "2H".parse().ok();
        class.trash = "@4+1".parse().ok();
        let servers: Vec<LabelSet> = ["S", "H"].iter().map(|t| t.parse().unwrap()).collect();
        let found = check_preference(&class, &"S".parse().unwrap(), &servers);
        assert!(
            matches!(&found[..], [PreferenceWarning::NoCopyMatches { state, .. }]
                if *state == ChunkState::Archive)
        );
        assert!(found[0].to_string().contains("H,H"));
    }
}
