//! Names of volumes: the handle Kubernetes keeps, and the id inside the cluster.

use std::fmt;

use xxhash_rust::xxh3::xxh3_128;

/// Id of a volume inside its cluster, and the name of its directory. Opaque to callers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(String);

impl VolumeId {
    /// The id of the volume that is asked for under this name: the same name, the same volume.
    #[must_use]
    pub fn of_name(name: &str) -> Self {
        Self(format!("v{:032x}", xxh3_128(name.as_bytes())))
    }

    /// Reads an id; `None` for what no volume of this driver is called. What is accepted is a
    /// plain name: no `/`, no leading dot.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let plain = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
        let fits = (1..=ID_BYTES_MAX).contains(&text.len());
        (fits && text.bytes().all(plain)).then(|| Self(text.to_owned()))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Random id of a cluster, as hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterId(String);

impl ClusterId {
    /// Reads an id.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let fits = (1..=CLUSTER_BYTES_MAX).contains(&text.len());
        let hex = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
        (fits && text.bytes().all(hex)).then(|| Self(text.to_owned()))
    }

    /// From the bytes in the cluster map.
    #[must_use]
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What Kubernetes calls a volume: `<cluster id>.<volume id>`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle {
    /// The cluster.
    pub cluster: ClusterId,
    /// The volume.
    pub volume: VolumeId,
}

impl Handle {
    /// Reads a handle; `None` for one this driver did not give.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (cluster, volume) = text.split_once('.')?;
        Some(Self {
            cluster: ClusterId::parse(cluster)?,
            volume: VolumeId::parse(volume)?,
        })
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.cluster, self.volume)
    }
}

/// Longest volume id: with a cluster's id and the dot it fits into 128 bytes.
const ID_BYTES_MAX: usize = 63;
/// Longest cluster id.
const CLUSTER_BYTES_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_that_leaves_the_directory_of_volumes_is_an_id() {
        for bad in ["", ".", "..", ".trash", "a/b", "A", "a\0", "a b"] {
            assert_eq!(VolumeId::parse(bad), None, "{bad:?}");
        }
        for bad in ["", "abc", "abc.", ".abc", "xyz.v1", "ab.c.d", "ab/.c"] {
            assert_eq!(Handle::parse(bad), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn a_name_gives_one_handle_that_is_read_back(name in ".{0,200}", bytes in any::<[u8; 16]>()) {
            let volume = VolumeId::of_name(&name);
            prop_assert_eq!(&volume, &VolumeId::of_name(&name));
            let handle = Handle { cluster: ClusterId::of_bytes(&bytes), volume };
            prop_assert!(handle.to_string().len() <= 128);
            prop_assert_eq!(Handle::parse(&handle.to_string()), Some(handle));
        }

        #[test]
        fn any_text_is_read_without_harm(text in ".*") {
            if let Some(handle) = Handle::parse(&text) {
                prop_assert_eq!(handle.to_string(), text);
            }
        }
    }
}
