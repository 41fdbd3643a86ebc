//! What a user should be told of a preference before wondering why it does nothing.

use hither_clustermap::ClusterView;
use hither_labels::{
    LabelExpr, LabelSet, LocationView, PreferenceWarning, PreferredLabels, StorageClass,
    check_preference, effective_labels,
};
use hither_proto::ids::ClassId;

use crate::options::Options;

/// Preferred expressions that match no chunkserver, or no copy of the class of the directory that
/// is mounted. Nothing fails because of them.
#[must_use]
pub fn advice(options: &Options, map: &ClusterView, class: ClassId) -> Vec<String> {
    let preferred = &options.preferred;
    let servers: Vec<&LabelSet> = map
        .servers()
        .map(|(_, server)| {
            let own = !map.locations() || server.chunkserver.zone == options.zone;
            let view = if own {
                LocationView::Own
            } else {
                LocationView::Other
            };
            effective_labels(&server.labels, view)
        })
        .collect();
    if preferred.is_empty() || servers.is_empty() {
        return Vec::new();
    }
    let idle = |expr: &LabelExpr| !servers.iter().any(|labels| expr.matches(labels));
    let mut advice = Vec::new();
    let mut matching = Vec::new();
    for (index, expr) in preferred.expressions().iter().enumerate() {
        if idle(expr) {
            let mut text = format!(
                "the preferred expression {}, `{expr}`, matches no chunkserver of the cluster \
                 (`hither cs ls` shows their labels)",
                index + 1
            );
            if let Some(token) = continued_by(options, expr) {
                text.push_str(&format!(
                    "; `{token}` was taken as a part of the list because it follows its comma: if \
                     it was meant as a mount option, `hither mount --help` has the right name"
                ));
            }
            advice.push(text);
        } else {
            matching.push(expr.clone());
        }
    }
    // What no chunkserver matches was said.
    let matching = PreferredLabels::from_expressions(matching).unwrap_or_default();
    let Some(stored) = map.class(class) else {
        return advice;
    };
    let Ok(keep) = stored.keep.parse() else {
        return advice;
    };
    let mut class = StorageClass::new(stored.name.clone(), keep);
    class.create = stored.create.parse().ok();
    let servers: Vec<LabelSet> = servers.into_iter().cloned().collect();
    for warning in check_preference(&class, &matching, &servers) {
        // Places count in the list as it was given.
        advice.push(match warning {
            PreferenceWarning::ExpressionNeverMatches {
                class, expression, ..
            } => format!(
                "the preferred expression `{expression}` matches no server that may hold a copy of \
                 class `{class}`"
            ),
            other => other.to_string(),
        });
    }
    advice
}

/// The token behind a comma of the mount options that an expression came from.
fn continued_by<'a>(options: &'a Options, expr: &LabelExpr) -> Option<&'a str> {
    let tokens = options.continued_by.iter().map(String::as_str);
    tokens.into_iter().find(|token| {
        let list: Option<PreferredLabels> = token.parse().ok();
        list.is_some_and(|list| list.expressions().contains(expr))
    })
}

#[cfg(test)]
mod tests {
    use hither_proto::map::{Chunkserver, ClusterMap, StorageClass as Stored};

    use super::*;

    fn map(keep: &str) -> ClusterView {
        let servers = ["a", "b", "c"].iter().enumerate().map(|(at, zone)| {
            let id = at as u64 + 1;
            Chunkserver {
                id,
                zone: (*zone).to_owned(),
                labels: vec![format!("zone={zone}")],
                ..Chunkserver::default()
            }
        });
        ClusterView::from_snapshot(&ClusterMap {
            version: 1,
            chunkservers: servers.collect(),
            classes: vec![Stored {
                id: 1,
                name: "default".into(),
                keep: keep.into(),
                ..Stored::default()
            }],
            ..ClusterMap::default()
        })
    }

    fn said(options: &str, map: &ClusterView) -> Vec<String> {
        advice(&Options::parse(options).unwrap(), map, ClassId(1))
    }

    #[test]
    fn a_preference_that_matches_is_fine() {
        let map = map("zone=a,zone=b");
        assert_eq!(said("preflabels=zone=a;zone=b", &map), Vec::<String>::new());
        assert_eq!(said("preflabels=*", &map), Vec::<String>::new());
        assert_eq!(said("ro", &map), Vec::<String>::new());
        let empty = ClusterView::default();
        assert_eq!(said("preflabels=zone=x", &empty), Vec::<String>::new());
    }

    #[test]
    fn what_matches_no_chunkserver_is_named_with_its_place() {
        let found = said("preflabels=zone=a;media=ssd", &map("zone=a,zone=b"));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("expression 2, `media=ssd`"), "{found:?}");
    }

    #[test]
    fn what_matches_no_copy_of_the_class_is_named_with_the_class() {
        let found = said("preflabels=zone=c;zone=a", &map("zone=a,zone=b"));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("`zone=c`"), "{found:?}");
        assert!(found[0].contains("class `default`"), "{found:?}");
        let found = said("preflabels=zone=c", &map("zone=a,zone=b"));
        assert!(found[0].contains("as if no preference"), "{found:?}");
    }

    #[test]
    fn a_mistyped_option_behind_the_list_is_told_from_a_label() {
        // Reads as the letters R and W.
        let found = said("preflabels=zone=a,RW", &map("zone=a,zone=b"));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("`RW` was taken as a part"), "{found:?}");
        let found = said("preflabels=zone=a;RW", &map("zone=a,zone=b"));
        assert!(!found[0].contains("taken as a part"), "{found:?}");
    }

    #[test]
    fn labels_that_do_not_count_from_here_match_nothing() {
        let with_locations = {
            let mut message = ClusterMap {
                version: 1,
                locations: true,
                ..ClusterMap::default()
            };
            for (id, zone) in [(1, "a"), (2, "b")] {
                message.chunkservers.push(Chunkserver {
                    id,
                    zone: zone.into(),
                    labels: vec!["S".into()],
                    ..Chunkserver::default()
                });
            }
            ClusterView::from_snapshot(&message)
        };
        assert!(said("preflabels=S,clientZone=a", &with_locations).is_empty());
        assert_eq!(said("preflabels=S,clientZone=x", &with_locations).len(), 1);
    }
}
