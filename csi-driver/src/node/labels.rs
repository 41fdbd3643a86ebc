//! Where this node stands, and what a mount on it prefers.

use std::collections::BTreeMap;

use hither_labels::PreferenceTemplate;

use crate::error::Refusal;

/// What the node's labels say.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeLabels {
    /// Name of the node.
    pub node: String,
    /// Its zone; empty: not known.
    pub zone: String,
    /// Its region; empty: not known.
    pub region: String,
    /// The Node was read: what is empty, it does not say.
    pub known: bool,
}

/// Where a mount stands and what it prefers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Standpoint {
    /// Preferred labels, most preferred first; empty: none.
    pub preferred: String,
    /// See [`NodeLabels`].
    pub zone: String,
    /// See [`NodeLabels`].
    pub region: String,
    /// See [`NodeLabels`].
    pub node: String,
}

impl NodeLabels {
    /// From the labels of a Node, the lasting names before the old ones.
    #[must_use]
    pub fn of(node: &str, labels: &BTreeMap<String, String>) -> Self {
        let first = |names: [&str; 2]| {
            let mut values = names.iter().filter_map(|name| labels.get(*name));
            let value = values.find(|value| !value.is_empty());
            value.cloned().unwrap_or_default()
        };
        Self {
            node: node.to_owned(),
            zone: first(ZONE),
            region: first(REGION),
            known: true,
        }
    }

    /// What the node says of itself in topology, under the same keys as every other: nothing, where it
    /// lacks one of them.
    ///
    /// # Errors
    /// `Unreachable` before the Node was read: what is said once is never asked again.
    pub fn segments(&self) -> Result<Option<BTreeMap<String, String>>, Refusal> {
        if !self.known {
            return Err(Refusal::Unreachable(format!(
                "the labels of the node {} are not known yet: repeat",
                self.node
            )));
        }
        let segments = [(ZONE[0], &self.zone), (REGION[0], &self.region)];
        let all = segments.iter().all(|(_, value)| !value.is_empty());
        let segments = segments.map(|(key, value)| (key.to_owned(), value.clone()));
        Ok(all.then(|| segments.into()))
    }

    /// What a template comes to on this node. Expressions that name what the node does not have
    /// are dropped: without a zone a mount ranks nothing by zone, and works.
    ///
    /// # Errors
    /// `Invalid` for a template that does not parse.
    pub fn standpoint(&self, template: &str) -> Result<Standpoint, Refusal> {
        let wrong = |error: hither_labels::ParseError| {
            Refusal::Invalid(format!("the volume's preferred labels:\n{error}"))
        };
        let template = match template.trim() {
            "" => PreferenceTemplate::default(),
            text => PreferenceTemplate::parse(text).map_err(wrong)?,
        };
        let values = [
            ("node", &self.node),
            ("zone", &self.zone),
            ("region", &self.region),
        ];
        let values = values.map(|(name, value)| (name.to_owned(), value.clone()));
        let expansion = template.expand(&values.into()).map_err(wrong)?;
        let preferred = if expansion.preferred.is_empty() {
            String::new()
        } else {
            expansion.preferred.to_string()
        };
        Ok(Standpoint {
            preferred,
            zone: self.zone.clone(),
            region: self.region.clone(),
            node: self.node.clone(),
        })
    }
}

impl Standpoint {
    /// Mount options that say the same, behind those of the volume.
    #[must_use]
    pub fn options(&self, volume: &[String], read_only: bool) -> String {
        let own = [
            ("preflabels", &self.preferred),
            ("clientZone", &self.zone),
            ("clientRegion", &self.region),
            ("clientNode", &self.node),
        ];
        let own = own.into_iter().filter(|(_, value)| !value.is_empty());
        let own = own.map(|(name, value)| format!("{name}={value}"));
        let read_only = read_only.then(|| "ro".to_owned());
        let all: Vec<String> = own.chain(read_only).chain(volume.iter().cloned()).collect();
        all.join(",")
    }
}

const ZONE: [&str; 2] = [
    "topology.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/zone",
];
const REGION: [&str; 2] = [
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/region",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        let own = |(k, v): &(&str, &str)| ((*k).to_owned(), (*v).to_owned());
        pairs.iter().map(own).collect()
    }

    #[test]
    fn the_node_decides_what_a_template_comes_to() {
        let node = NodeLabels::of("n1", &labels(&[(ZONE[0], "eu-1a"), (REGION[1], "eu-1")]));
        let standpoint = node.standpoint("").unwrap();
        assert_eq!(standpoint.preferred, "node=n1;zone=eu-1a;region=eu-1");
        assert_eq!(
            standpoint.options(&["timeout=5s".into()], true),
            "preflabels=node=n1;zone=eu-1a;region=eu-1,clientZone=eu-1a,clientRegion=eu-1,\
             clientNode=n1,ro,timeout=5s"
        );
        let own = node
            .standpoint("zone={zone}&media=ssd; zone={zone}")
            .unwrap();
        assert_eq!(own.preferred, "zone=eu-1a&media=ssd;zone=eu-1a");
        assert!(node.standpoint("zone={").is_err());
    }

    #[test]
    fn without_a_zone_a_mount_works_unranked() {
        let node = NodeLabels::of("n1", &labels(&[(ZONE[0], "")]));
        let standpoint = node.standpoint("zone={zone}").unwrap();
        assert_eq!(standpoint.preferred, "");
        assert_eq!(standpoint.options(&[], false), "clientNode=n1");
    }

    #[test]
    fn topology_is_told_when_it_is_known() {
        let pairs = [(ZONE[0], "eu-1a"), (REGION[0], "eu-1")];
        let segments = NodeLabels::of("n1", &labels(&pairs)).segments().unwrap();
        assert_eq!(segments, Some(labels(&pairs)));
        let without = NodeLabels::of("n1", &labels(&pairs[..1])).segments();
        assert_eq!(without, Ok(None));
        let unread = NodeLabels::default().segments();
        assert!(matches!(unread, Err(Refusal::Unreachable(_))));
    }

    #[test]
    fn lasting_names_win_over_old_ones() {
        let both = labels(&[(ZONE[1], "old"), (ZONE[0], "new")]);
        assert_eq!(NodeLabels::of("n", &both).zone, "new");
    }
}
