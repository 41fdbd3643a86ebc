//! How to reach a cluster: what the secrets of a request say. Nothing of them is ever printed.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use crate::error::Refusal;
use crate::ids::ClusterId;
use crate::rpc::csi;

/// A text that is not printed.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Hidden(String);

impl Hidden {
    /// Hides a text.
    #[must_use]
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// The text, for the one who has to send it.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hidden)")
    }
}

/// How to reach a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterAccess {
    /// Addresses of managers, `host:port`.
    pub managers: Vec<String>,
    /// The cluster that has to answer there; `None`: whichever does.
    pub cluster: Option<ClusterId>,
    /// The cluster's key.
    pub key: Hidden,
}

impl ClusterAccess {
    /// From the secrets of a request; `None` when they name no managers.
    ///
    /// # Errors
    /// `Invalid` when a value cannot be what it should be. The value is not in the message.
    pub fn of_secrets(secrets: &BTreeMap<String, String>) -> Result<Option<Self>, Refusal> {
        let Some(managers) = secrets.get(MANAGERS) else {
            return Ok(None);
        };
        let text = |key: &str| secrets.get(key).map(String::as_str);
        Self::of_texts(managers, text(CLUSTER_ID), text(KEY)).map(Some)
    }
}

impl ClusterAccess {
    /// From a directory with a file for each key, as Kubernetes mounts a Secret.
    ///
    /// # Errors
    /// `Invalid` when a value cannot be what it should be, `Broken` when a file cannot be read.
    pub fn of_directory(directory: &Path) -> Result<Self, Refusal> {
        let read = |key: &str| match std::fs::read_to_string(directory.join(key)) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Refusal::of_io("read a secret", &error)),
        };
        let managers = read(MANAGERS)?.unwrap_or_default();
        Self::of_texts(
            &managers,
            read(CLUSTER_ID)?.as_deref(),
            read(KEY)?.as_deref(),
        )
    }

    fn of_texts(managers: &str, cluster: Option<&str>, key: Option<&str>) -> Result<Self, Refusal> {
        let managers: Vec<String> = managers
            .split([',', ' ', '\n'])
            .map(str::trim)
            .filter(|address| !address.is_empty())
            .map(str::to_owned)
            .collect();
        let named = managers.iter().all(|address| {
            let port = address
                .rsplit_once(':')
                .map(|(_, port)| port.parse::<u16>());
            matches!(port, Some(Ok(1..)))
        });
        if managers.is_empty() || !named {
            return Err(Refusal::Invalid(format!(
                "the secret's {MANAGERS} is no list of host:port"
            )));
        }
        let cluster = match cluster.map(str::trim).filter(|id| !id.is_empty()) {
            None => None,
            Some(id) => Some(ClusterId::parse(id).ok_or_else(|| {
                Refusal::Invalid(format!("the secret's {CLUSTER_ID} is no cluster id"))
            })?),
        };
        Ok(Self {
            managers,
            cluster,
            key: Hidden::new(key.unwrap_or_default().trim().to_owned()),
        })
    }
}

/// Generated messages that carry secrets show everything else.
macro_rules! shown_without_secrets {
    ($($message:ident: $($field:ident),*;)*) => {
        $(impl fmt::Debug for csi::$message {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($message))
                    $(.field(stringify!($field), &self.$field))*
                    .field("secrets", &format_args!("({} hidden)", self.secrets.len()))
                    .finish()
            }
        })*
    };
}

shown_without_secrets! {
    CreateVolumeRequest: name, capacity_range, volume_capabilities, parameters,
        volume_content_source, accessibility_requirements, mutable_parameters;
    DeleteVolumeRequest: volume_id;
    ValidateVolumeCapabilitiesRequest: volume_id, volume_context, volume_capabilities, parameters,
        mutable_parameters;
    ControllerExpandVolumeRequest: volume_id, capacity_range, volume_capability;
    ControllerModifyVolumeRequest: volume_id, mutable_parameters;
    NodeStageVolumeRequest: volume_id, publish_context, staging_target_path, volume_capability,
        volume_context;
    NodePublishVolumeRequest: volume_id, publish_context, staging_target_path, target_path,
        volume_capability, readonly, volume_context;
}

/// Keys of a secret.
pub const MANAGERS: &str = "managers";
/// See [`MANAGERS`].
pub const CLUSTER_ID: &str = "clusterID";
/// See [`MANAGERS`].
pub const KEY: &str = "key";

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets(pairs: &[(&str, &str)]) -> csi::CreateVolumeRequest {
        csi::CreateVolumeRequest {
            name: "pvc".into(),
            secrets: pairs
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect(),
            ..Default::default()
        }
    }

    #[test]
    fn no_secret_is_ever_printed() {
        let request = secrets(&[
            (MANAGERS, "10.0.0.1:9421, m.example:9421"),
            (CLUSTER_ID, "00ff"),
            (KEY, "s3cr3t-key"),
            ("other", "s3cr3t-other"),
        ]);
        let access = ClusterAccess::of_secrets(&request.secrets)
            .unwrap()
            .unwrap();
        assert_eq!(access.managers, ["10.0.0.1:9421", "m.example:9421"]);
        assert_eq!(access.key.reveal(), "s3cr3t-key");
        for shown in [
            format!("{request:?}"),
            format!("{access:?}"),
            format!("{access:#?}"),
        ] {
            assert!(!shown.contains("s3cr3t"), "{shown}");
        }
        assert!(format!("{request:?}").contains("4 hidden"));
    }

    #[test]
    fn a_bad_secret_is_named_and_not_shown() {
        for pairs in [
            &[(MANAGERS, "s3cr3t")][..],
            &[(MANAGERS, "s3cr3t:port")],
            &[(MANAGERS, "a:1"), (CLUSTER_ID, "S3cr3t")],
        ] {
            let error = ClusterAccess::of_secrets(&secrets(pairs).secrets).unwrap_err();
            assert!(
                !error.to_string().to_lowercase().contains("s3cr3t"),
                "{error}"
            );
        }
        assert_eq!(ClusterAccess::of_secrets(&secrets(&[]).secrets), Ok(None));
    }
}
