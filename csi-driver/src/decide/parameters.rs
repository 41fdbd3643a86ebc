//! Parameters of Kubernetes StorageClasses and VolumeAttributesClasses.

use std::collections::BTreeMap;

use hither_labels::PreferenceTemplate;

use crate::error::Refusal;

/// What a StorageClass says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Parameters {
    /// Name of the cluster, for people and for requests without secrets.
    pub cluster: Option<String>,
    /// Usable from the zone it was made for only.
    pub pin_to_zone: bool,
    /// Permission bits of the volume's root.
    pub root_mode: u32,
    /// Owner of the volume's root.
    pub root_uid: u32,
    /// Group of the volume's root.
    pub root_gid: u32,
    /// What can be changed later.
    pub mutable: Mutable,
}

/// What a VolumeAttributesClass can change; `None`: not named.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mutable {
    /// Storage class of the cluster, by name. Holds for what is written from then on.
    pub class: Option<String>,
    /// Template of preferred labels; empty: the class's.
    pub preferred_labels: Option<String>,
    /// Files and directories at most; 0: no limit.
    pub inode_quota: Option<u64>,
}

impl Parameters {
    /// Reads the parameters of a StorageClass, and on top of them those of the request's
    /// VolumeAttributesClass.
    ///
    /// # Errors
    /// `Invalid` for an unknown name or a value that cannot be.
    pub fn parse(
        fixed: &BTreeMap<String, String>,
        mutable: &BTreeMap<String, String>,
    ) -> Result<Self, Refusal> {
        let mut parsed = Self {
            root_mode: ROOT_MODE,
            ..Self::default()
        };
        for (name, value) in sorted(fixed) {
            match name {
                "cluster" => parsed.cluster = Some(value.to_owned()),
                "pinToZone" => parsed.pin_to_zone = switch(name, value)?,
                "rootMode" => parsed.root_mode = mode(value)?,
                "rootUid" => parsed.root_uid = number(name, value)?,
                "rootGid" => parsed.root_gid = number(name, value)?,
                _ if name.starts_with(PROVISIONER_PREFIX) => {}
                _ if parsed.mutable.take(name, value)? => {}
                _ => return Err(unknown(name)),
            }
        }
        let over = Mutable::parse(mutable)?;
        parsed.mutable.change(&over);
        Ok(parsed)
    }
}

impl Mutable {
    /// Reads the parameters of a VolumeAttributesClass.
    ///
    /// # Errors
    /// `Invalid` for an unknown name or a value that cannot be: nothing is changed then.
    pub fn parse(parameters: &BTreeMap<String, String>) -> Result<Self, Refusal> {
        let mut parsed = Self::default();
        for (name, value) in sorted(parameters) {
            if !parsed.take(name, value)? {
                return Err(unknown(name));
            }
        }
        Ok(parsed)
    }
}

impl Mutable {
    /// Replaces what the other names.
    pub fn change(&mut self, over: &Self) {
        let replace = |old: &mut Option<String>, new: &Option<String>| {
            if new.is_some() {
                old.clone_from(new);
            }
        };
        replace(&mut self.class, &over.class);
        replace(&mut self.preferred_labels, &over.preferred_labels);
        self.inode_quota = over.inode_quota.or(self.inode_quota);
    }

    /// False: not a name of these.
    fn take(&mut self, name: &str, value: &str) -> Result<bool, Refusal> {
        match name {
            "class" if value.is_empty() => {
                return Err(Refusal::Invalid("the parameter class is empty".into()));
            }
            "class" => self.class = Some(value.to_owned()),
            "preferredLabels" => {
                if !value.is_empty() {
                    PreferenceTemplate::parse(value).map_err(|error| {
                        Refusal::Invalid(format!("the parameter preferredLabels:\n{error}"))
                    })?;
                }
                self.preferred_labels = Some(value.to_owned());
            }
            "inodeQuota" => self.inode_quota = Some(number(name, value)?),
            _ => return Ok(false),
        }
        Ok(true)
    }
}

fn sorted(parameters: &BTreeMap<String, String>) -> BTreeMap<&str, &str> {
    let pairs = parameters.iter();
    pairs.map(|(k, v)| (k.as_str(), v.trim())).collect()
}

fn unknown(name: &str) -> Refusal {
    Refusal::Invalid(format!(
        "the parameter {name:?} is not known: docs/kubernetes/csi.md lists all"
    ))
}

fn switch(name: &str, value: &str) -> Result<bool, Refusal> {
    match value {
        "true" => Ok(true),
        "false" | "" => Ok(false),
        _ => Err(Refusal::Invalid(format!(
            "the parameter {name}={value:?}: write true or false"
        ))),
    }
}

fn number<N: std::str::FromStr>(name: &str, value: &str) -> Result<N, Refusal> {
    value
        .parse()
        .map_err(|_| Refusal::Invalid(format!("the parameter {name}={value:?}: write a number")))
}

fn mode(value: &str) -> Result<u32, Refusal> {
    match u32::from_str_radix(value, 8) {
        Ok(mode) if mode <= 0o7777 => Ok(mode),
        _ => Err(Refusal::Invalid(format!(
            "the parameter rootMode={value:?}: write octal permission bits such as 0770"
        ))),
    }
}

/// Permission bits of a volume's root when the class says nothing: pods run as anybody.
const ROOT_MODE: u32 = 0o777;
/// What the provisioner adds about the claim.
const PROVISIONER_PREFIX: &str = "csi.storage.k8s.io/";

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        let own = |(k, v): &(&str, &str)| ((*k).to_owned(), (*v).to_owned());
        pairs.iter().map(own).collect()
    }

    #[test]
    fn the_attributes_class_wins_over_the_storage_class() {
        let parsed = Parameters::parse(
            &map(&[
                ("cluster", "demo"),
                ("class", "two"),
                ("rootMode", "0750"),
                ("inodeQuota", "7"),
                ("csi.storage.k8s.io/pvc/name", "data"),
            ]),
            &map(&[("class", "three"), ("preferredLabels", "zone={zone}")]),
        );
        let parsed = parsed.unwrap();
        assert_eq!(parsed.mutable.class.as_deref(), Some("three"));
        assert_eq!(parsed.mutable.inode_quota, Some(7));
        assert_eq!(parsed.root_mode, 0o750);
        assert_eq!(
            parsed.mutable.preferred_labels.as_deref(),
            Some("zone={zone}")
        );
        let nothing = Parameters::parse(&map(&[]), &map(&[])).unwrap();
        assert_eq!((nothing.root_mode, nothing.root_uid), (0o777, 0));
    }

    #[test]
    fn what_is_not_known_or_cannot_be_is_refused() {
        for (name, value) in [
            ("clas", "x"),
            ("class", ""),
            ("pinToZone", "maybe"),
            ("rootMode", "999"),
            ("rootMode", "77777"),
            ("rootUid", "-1"),
            ("inodeQuota", "many"),
            ("preferredLabels", "zone={zone"),
        ] {
            let error = Parameters::parse(&map(&[(name, value)]), &map(&[])).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
        assert!(Mutable::parse(&map(&[("rootMode", "0777")])).is_err());
        assert!(Mutable::parse(&map(&[("cluster", "demo")])).is_err());
    }
}
