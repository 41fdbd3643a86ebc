//! What stands at a staging or target path, and what is to be done there.

use std::path::Path;

use hither_mounter_proto::Mount as Served;

use crate::error::Refusal;
use crate::node::mountinfo::{Mount, at};
use crate::node::record::Target;

/// What stands at a staging path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Staging {
    /// The volume's mount, served; with its device number.
    Alive(String),
    /// The volume's mount, and nobody serves it.
    Dead,
    /// Nothing: a bare directory, or none.
    Bare,
    /// Something that is not this volume's.
    Foreign(String),
}

/// What a target path needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Publishing {
    /// Nothing: the volume is there with its options.
    Done,
    /// The volume is there and lacks its options.
    Options,
    /// The volume has to be bound there.
    Bind,
    /// What is there of the volume is dead or stacked: away with it, then bind.
    Anew,
}

/// What the volume's mounts are called in the kernel's table.
#[must_use]
pub fn source(handle: &str) -> String {
    format!("hither:{handle}")
}

/// What stands at a volume's staging path.
#[must_use]
pub fn staging(handle: &str, place: &Path, mounts: &[Mount], served: &[Served]) -> Staging {
    let there = at(mounts, place);
    if let Some(foreign) = there.iter().find(|mount| !is_of(mount, handle)) {
        return Staging::Foreign(format!("{} ({})", foreign.source, foreign.fs_type));
    }
    match &there[..] {
        [] => Staging::Bare,
        [only] => {
            let is_served = served.iter().any(|one| {
                let same = one.device.is_empty() || one.device == only.device;
                one.mount == handle && Path::new(&one.staging) == place && same && !one.over
            });
            if is_served {
                Staging::Alive(only.device.clone())
            } else {
                Staging::Dead
            }
        }
        _ => Staging::Dead,
    }
}

/// What a target path needs so that the volume with this device is there with these options.
///
/// # Errors
/// `NotNow` when something else is mounted there.
pub fn target(
    handle: &str,
    device: &str,
    target: &Target,
    mounts: &[Mount],
) -> Result<Publishing, Refusal> {
    let there = at(mounts, &target.path);
    if let Some(foreign) = there.iter().find(|mount| !is_of(mount, handle)) {
        return Err(Refusal::NotNow(format!(
            "{} is taken by {} ({})",
            target.path.display(),
            foreign.source,
            foreign.fs_type
        )));
    }
    Ok(match &there[..] {
        [] => Publishing::Bind,
        [only] if only.device == device => {
            if has_options(only, target) {
                Publishing::Done
            } else {
                Publishing::Options
            }
        }
        _ => Publishing::Anew,
    })
}

/// Checks that a pod may have the volume beside those that have it on this node.
///
/// # Errors
/// `Exists` for the same place with other options, `NotNow` for a second place of a volume that
/// only one pod may have.
pub fn beside(
    wanted: &Target,
    shared: bool,
    known: &[Target],
    handle: &str,
    mounts: &[Mount],
) -> Result<(), Refusal> {
    for other in known {
        if other.path == wanted.path {
            if other.options != wanted.options {
                return Err(Refusal::Exists(format!(
                    "{} is published already with other options",
                    wanted.path.display()
                )));
            }
            continue;
        }
        let is_there = at(mounts, &other.path)
            .iter()
            .any(|mount| is_of(mount, handle));
        if !shared && is_there {
            return Err(Refusal::NotNow(format!(
                "one pod has the volume already, at {}, and its access mode allows no other",
                other.path.display()
            )));
        }
    }
    Ok(())
}

fn is_of(mount: &Mount, handle: &str) -> bool {
    mount.fs_type == crate::node::kernel::FS_TYPE && mount.source == source(handle)
}

/// Whether a bind mount has what its target asks for, as far as the table shows it.
fn has_options(mount: &Mount, target: &Target) -> bool {
    let asked = |option: &str| target.options.iter().any(|has| has == option);
    ["ro", "noexec", "noatime", "nodiratime"]
        .iter()
        .all(|option| mount.has(option) == asked(option))
        && ["suid", "dev"]
            .iter()
            .all(|option| !asked(option) || !mount.has(&format!("no{option}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HANDLE: &str = "00ff.v1";

    fn mount(place: &str, device: &str, options: &str) -> Mount {
        Mount {
            device: device.into(),
            root: "/".into(),
            at: place.into(),
            options: options.split(',').map(str::to_owned).collect(),
            fs_type: "fuse.hither".into(),
            source: source(HANDLE),
        }
    }

    fn other(place: &str) -> Mount {
        Mount {
            source: source("00ff.v2"),
            ..mount(place, "0:9", "rw")
        }
    }

    fn served(device: &str) -> Served {
        Served {
            mount: HANDLE.into(),
            staging: "/s".into(),
            device: device.into(),
            options: String::new(),
            preferred: String::new(),
            over: false,
        }
    }

    fn wanted(options: &[&str]) -> Target {
        Target {
            path: "/t".into(),
            options: options.iter().map(|o| (*o).to_owned()).collect(),
            published: false,
            pod: None,
        }
    }

    #[test]
    fn a_bare_directory_is_never_taken_for_the_volume() {
        let of =
            |mounts: &[Mount], served: &[Served]| staging(HANDLE, Path::new("/s"), mounts, served);
        let ours = mount("/s", "0:5", "rw");
        assert_eq!(of(&[], &[served("0:5")]), Staging::Bare);
        assert_eq!(
            of(&[mount("/x", "0:5", "rw")], &[served("0:5")]),
            Staging::Bare
        );
        assert_eq!(of(std::slice::from_ref(&ours), &[]), Staging::Dead);
        assert_eq!(
            of(std::slice::from_ref(&ours), &[served("0:6")]),
            Staging::Dead
        );
        let alive = Staging::Alive("0:5".into());
        assert_eq!(of(std::slice::from_ref(&ours), &[served("0:5")]), alive);
        assert_eq!(of(std::slice::from_ref(&ours), &[served("")]), alive);
        let stacked = [ours.clone(), mount("/s", "0:6", "rw")];
        assert_eq!(of(&stacked, &[served("0:6")]), Staging::Dead);
        assert!(matches!(
            of(&[ours, other("/s")], &[served("0:5")]),
            Staging::Foreign(_)
        ));
    }

    #[test]
    fn targets() {
        let of =
            |mounts: &[Mount], options: &[&str]| target(HANDLE, "0:5", &wanted(options), mounts);
        let ours = mount("/t", "0:5", "rw,nosuid,nodev,relatime");
        assert_eq!(of(&[], &[]), Ok(Publishing::Bind));
        assert_eq!(of(std::slice::from_ref(&ours), &[]), Ok(Publishing::Done));
        assert_eq!(
            of(std::slice::from_ref(&ours), &["ro"]),
            Ok(Publishing::Options)
        );
        assert_eq!(
            of(std::slice::from_ref(&ours), &["suid"]),
            Ok(Publishing::Options)
        );
        assert_eq!(of(&[ours.clone(), ours], &[]), Ok(Publishing::Anew));
        assert_eq!(of(&[mount("/t", "0:4", "rw")], &[]), Ok(Publishing::Anew));
        assert!(matches!(of(&[other("/t")], &[]), Err(Refusal::NotNow(_))));
    }

    #[test]
    fn second_pods() {
        let first = Target {
            path: "/first".into(),
            ..wanted(&[])
        };
        let known = [first];
        let mounts = [mount("/first", "0:5", "rw")];
        let of = |shared, mounts: &[Mount]| beside(&wanted(&[]), shared, &known, HANDLE, mounts);
        assert_eq!(of(true, &mounts), Ok(()));
        assert!(matches!(of(false, &mounts), Err(Refusal::NotNow(_))));
        assert_eq!(of(false, &[]), Ok(()), "nothing is there of the first");
        let same = [wanted(&["ro"])];
        let again = beside(&wanted(&[]), true, &same, HANDLE, &mounts);
        assert!(matches!(again, Err(Refusal::Exists(_))));
    }
}
