//! Access modes and capabilities of a request.

use std::collections::BTreeSet;

use hither_mount::options::Options;

use crate::error::Refusal;
use crate::rpc::csi::VolumeCapability;
use crate::rpc::csi::volume_capability::{AccessType, MountVolume, access_mode::Mode};

/// One capability, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    /// The mode.
    pub mode: Mode,
    /// Options for the mount, as written.
    pub flags: Vec<String>,
    /// Group the volume's root is given.
    pub group: Option<u32>,
}

impl Access {
    /// Checks a capability.
    ///
    /// # Errors
    /// `Invalid` for what is not offered, with the reason.
    pub fn of(capability: Option<&VolumeCapability>) -> Result<Self, Refusal> {
        let missing = || Refusal::Invalid("the request has no volume capability".into());
        let capability = capability.ok_or_else(missing)?;
        let mount = match &capability.access_type {
            Some(AccessType::Mount(mount)) => mount,
            Some(AccessType::Block(_)) => {
                return Err(Refusal::Invalid(
                    "raw block volumes are not offered: use volumeMode Filesystem".into(),
                ));
            }
            None => return Err(Refusal::Invalid("the capability has no access type".into())),
        };
        let mode = capability.access_mode.unwrap_or_default().mode();
        match mode {
            Mode::Unknown => return Err(Refusal::Invalid("the capability has no mode".into())),
            Mode::MultiNodeSingleWriter => {
                return Err(Refusal::Invalid(
                    "one writing node beside reading ones is not offered: \
                     use ReadWriteMany or ReadWriteOnce"
                        .into(),
                ));
            }
            _ => {}
        }
        check_type(mount)?;
        let flags = mount.mount_flags.clone();
        flags.iter().try_for_each(|flag| check_flag(flag))?;
        let access = Self {
            mode,
            flags,
            group: group(mount)?,
        };
        // The mount daemon would refuse them only when a pod is to start.
        Options::parse(&access.fuse_options().join(","))
            .map_err(|error| Refusal::Invalid(error.to_string()))?;
        Ok(access)
    }

    /// Checks all capabilities of a request.
    ///
    /// # Errors
    /// As [`of`](Self::of); `Invalid` when there are none.
    pub fn all(capabilities: &[VolumeCapability]) -> Result<Vec<Self>, Refusal> {
        if capabilities.is_empty() {
            return Err(Refusal::Invalid(
                "the request has no volume capability".into(),
            ));
        }
        capabilities.iter().map(|one| Self::of(Some(one))).collect()
    }

    /// Whether nothing may be written.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        matches!(
            self.mode,
            Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly
        )
    }

    /// Whether several pods of a node may have the volume at a time.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        matches!(
            self.mode,
            Mode::MultiNodeReaderOnly | Mode::MultiNodeMultiWriter | Mode::SingleNodeMultiWriter
        )
    }

    /// Whether one node may have the volume at a time.
    #[must_use]
    pub fn is_of_one_node(mode: Mode) -> bool {
        !matches!(mode, Mode::MultiNodeReaderOnly | Mode::MultiNodeMultiWriter)
    }

    /// Options of the FUSE mount: the flags without those of the bind mounts.
    #[must_use]
    pub fn fuse_options(&self) -> Vec<&str> {
        let is_bind = |flag: &&str| BIND_FLAGS.contains(flag);
        let flags = self.flags.iter().flat_map(|flag| flag.split(','));
        flags
            .map(str::trim)
            .filter(|flag| !flag.is_empty() && !is_bind(flag))
            .collect()
    }

    /// Options of the bind mounts.
    #[must_use]
    pub fn bind_options(&self) -> BTreeSet<&str> {
        let flags = self.flags.iter().flat_map(|flag| flag.split(','));
        flags
            .map(str::trim)
            .filter(|flag| BIND_FLAGS.contains(flag))
            .collect()
    }
}

fn check_type(mount: &MountVolume) -> Result<(), Refusal> {
    match mount.fs_type.as_str() {
        // Old provisioners fill in a default of their own for class parameters that say nothing.
        "" | "hither" | "fuse.hither" | "ext4" => Ok(()),
        other => Err(Refusal::Invalid(format!(
            "file system type {other:?}: leave it out, a volume is a directory of the cluster"
        ))),
    }
}

fn check_flag(flags: &str) -> Result<(), Refusal> {
    for flag in flags.split(',').map(str::trim) {
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (flag, None),
        };
        let known = flag.is_empty()
            || BIND_FLAGS.contains(&flag)
            || value.is_some_and(|value| !value.is_empty()) && FUSE_OPTIONS.contains(&name);
        if !known {
            let names = FUSE_OPTIONS.map(|name| format!("{name}=")).join(", ");
            return Err(Refusal::Invalid(format!(
                "mount option {flag:?} is not known: there are {names}, {}",
                BIND_FLAGS.join(", ")
            )));
        }
    }
    Ok(())
}

fn group(mount: &MountVolume) -> Result<Option<u32>, Refusal> {
    match mount.volume_mount_group.as_str() {
        "" => Ok(None),
        text => text.parse().map(Some).map_err(|_| {
            Refusal::Invalid(format!("volume mount group {text:?} is no group number"))
        }),
    }
}

/// Options of the bind mount of each pod.
const BIND_FLAGS: [&str; 12] = [
    "ro",
    "rw",
    "nosuid",
    "suid",
    "nodev",
    "dev",
    "noexec",
    "exec",
    "noatime",
    "relatime",
    "atime",
    "nodiratime",
];
/// Options of the mount of each node.
const FUSE_OPTIONS: [&str; 9] = [
    "timeout",
    "hedge",
    "failureMemory",
    "writeCache",
    "unsyncedCache",
    "readAhead",
    "cachedInodes",
    "kernelReadAhead",
    "threads",
];

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::rpc::csi::volume_capability::{AccessMode, BlockVolume};

    pub(crate) fn capability(mode: Mode, flags: &[&str], group: &str) -> VolumeCapability {
        VolumeCapability {
            access_mode: Some(AccessMode { mode: mode.into() }),
            access_type: Some(AccessType::Mount(MountVolume {
                fs_type: String::new(),
                mount_flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
                volume_mount_group: group.into(),
            })),
        }
    }

    #[test]
    fn values_of_options_are_checked_before_a_volume_is_made() {
        let of = |flags: &[&str]| {
            Access::of(Some(&capability(Mode::MultiNodeMultiWriter, flags, ""))).map(|_| ())
        };
        assert_eq!(of(&["timeout=5s", "noexec,hedge=off"]), Ok(()));
        let refused = of(&["timeout=abc"]);
        let text = "timeout=abc: write a time such as 30s, 500ms or 2m";
        assert_eq!(refused, Err(Refusal::Invalid(text.into())));
    }

    #[test]
    fn modes() {
        for (mode, read_only, shared) in [
            (Mode::SingleNodeWriter, false, false),
            (Mode::SingleNodeReaderOnly, true, false),
            (Mode::MultiNodeReaderOnly, true, true),
            (Mode::MultiNodeMultiWriter, false, true),
            (Mode::SingleNodeSingleWriter, false, false),
            (Mode::SingleNodeMultiWriter, false, true),
        ] {
            let access = Access::of(Some(&capability(mode, &[], ""))).unwrap();
            assert_eq!(
                (access.is_read_only(), access.is_shared()),
                (read_only, shared)
            );
        }
        for mode in [Mode::Unknown, Mode::MultiNodeSingleWriter] {
            assert!(Access::of(Some(&capability(mode, &[], ""))).is_err());
        }
        let mut block = capability(Mode::SingleNodeWriter, &[], "");
        block.access_type = Some(AccessType::Block(BlockVolume {}));
        assert!(Access::of(Some(&block)).is_err());
        assert!(Access::of(None).is_err());
        assert!(Access::all(&[]).is_err());
    }

    #[test]
    fn options_go_where_they_belong() {
        let flags = ["timeout=5s,noexec", "nosuid", "readAhead=0"];
        let access = Access::of(Some(&capability(
            Mode::MultiNodeMultiWriter,
            &flags,
            "2000",
        )));
        let access = access.unwrap();
        assert_eq!(access.fuse_options(), ["timeout=5s", "readAhead=0"]);
        assert_eq!(access.bind_options(), BTreeSet::from(["noexec", "nosuid"]));
        assert_eq!(access.group, Some(2000));
        for bad in [
            "tiemout=5s",
            "timeout",
            "hedge=",
            "preflabels=A",
            "allow_other",
            "fd=3",
        ] {
            let capability = capability(Mode::MultiNodeMultiWriter, &[bad], "");
            let error = Access::of(Some(&capability)).unwrap_err().to_string();
            assert!(error.contains(bad), "{error}");
        }
        let bad_group = capability(Mode::MultiNodeMultiWriter, &[], "staff");
        assert!(Access::of(Some(&bad_group)).is_err());
    }
}
