//! The kernel's table of mounts, read from text.

use std::path::{Path, PathBuf};

/// One line of `/proc/self/mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// `major:minor` of the superblock.
    pub device: String,
    /// Directory of the superblock that is mounted.
    pub root: String,
    /// Where.
    pub at: PathBuf,
    /// Options of this mount.
    pub options: Vec<String>,
    /// Type, with the subtype behind a dot.
    pub fs_type: String,
    /// What the one who mounted called it.
    pub source: String,
}

impl Mount {
    /// Whether nothing may be written through this mount.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.has("ro")
    }

    /// Whether the mount has an option.
    #[must_use]
    pub fn has(&self, option: &str) -> bool {
        self.options.iter().any(|has| has == option)
    }
}

/// Reads the table. Lines that do not have the known form are left out.
#[must_use]
pub fn parse(text: &str) -> Vec<Mount> {
    text.lines().filter_map(line).collect()
}

/// Mounts at exactly this place, lowest first.
#[must_use]
pub fn at<'a>(mounts: &'a [Mount], place: &Path) -> Vec<&'a Mount> {
    mounts.iter().filter(|mount| mount.at == place).collect()
}

fn line(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let left: Vec<&str> = left.split(' ').collect();
    let [_, _, device, root, at, options, ..] = left[..] else {
        return None;
    };
    let mut right = right.split(' ');
    let (fs_type, source) = (right.next()?, right.next()?);
    Some(Mount {
        device: device.to_owned(),
        root: unescape(root),
        at: PathBuf::from(unescape(at)),
        options: options.split(',').map(str::to_owned).collect(),
        fs_type: fs_type.to_owned(),
        source: unescape(source),
    })
}

/// The kernel writes blanks, tabs, line ends and backslashes as octal numbers.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part
            .get(..3)
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) if code.is_ascii() => {
                out.push(char::from(code));
                out.push_str(&part[3..]);
            }
            _ => {
                out.push('\\');
                out.push_str(part);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TABLE: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
90 22 0:55 / /k/plugins/a/globalmount rw,nosuid,nodev shared:7 - fuse.hither hither:00.v1 rw,user_id=0\n\
91 22 0:55 / /k/pods/a\\040b/mount ro,nosuid shared:7 master:2 - fuse.hither hither:00.v1 rw\n\
not a line\n";

    #[test]
    fn lines() {
        let mounts = parse(TABLE);
        assert_eq!(mounts.len(), 3);
        assert_eq!(mounts[1].device, "0:55");
        assert_eq!(mounts[1].source, "hither:00.v1");
        assert!(mounts[1].has("nosuid") && !mounts[1].is_read_only());
        assert_eq!(mounts[2].at, Path::new("/k/pods/a b/mount"));
        assert!(mounts[2].is_read_only());
        assert_eq!(at(&mounts, Path::new("/k/pods/a b/mount")).len(), 1);
        assert_eq!(at(&mounts, Path::new("/k/pods")).len(), 0);
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_harm(text in ".*") {
            prop_assert!(parse(&text).len() <= text.lines().count());
            prop_assert!(unescape(&text).len() <= text.len());
        }
    }
}
