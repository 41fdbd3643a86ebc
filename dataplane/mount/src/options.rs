//! What stands after `-o`.

use std::time::Duration;

use hither_labels::{MountOption, PreferredLabels, split_mount_options};

/// One option for the table in `--help` and the documentation.
#[derive(Debug, Clone, Copy)]
pub struct Described {
    /// Name, with `=` where it takes a value.
    pub name: &'static str,
    /// Default, as text.
    pub default: &'static str,
    /// What it does.
    pub effect: &'static str,
}

/// All options this mount knows, in the order they are shown.
pub const TABLE: &[Described] = &[
    Described {
        name: "preflabels=",
        default: "none",
        effect: "label expressions of the servers to prefer, most preferred first, separated by ';' (or ',')",
    },
    Described {
        name: "mfspreflabels=",
        default: "none",
        effect: "another name of preflabels",
    },
    Described {
        name: "clientZone=",
        default: "unknown",
        effect: "zone this mount runs in: orders servers that are preferred alike by distance",
    },
    Described {
        name: "clientRegion=",
        default: "unknown",
        effect: "region this mount runs in, for the locality counters",
    },
    Described {
        name: "clientNode=",
        default: "unknown",
        effect: "node this mount runs on, for the locality counters",
    },
    Described {
        name: "ro",
        default: "off",
        effect: "refuse everything that changes something",
    },
    Described {
        name: "exclusive",
        default: "off",
        effect: "claim the directory: no other mount with this option gets it, and this one ends with its session",
    },
    Described {
        name: "evict=",
        default: "none",
        effect: "with exclusive: session (`hither session ls`) to end if it has the claim",
    },
    Described {
        name: "allow_other",
        default: "off",
        effect: "let other users use the mount",
    },
    Described {
        name: "default_permissions",
        default: "on",
        effect: "let the kernel check permissions by mode and owner",
    },
    Described {
        name: "noexec",
        default: "off",
        effect: "let nothing on the mount be executed",
    },
    Described {
        name: "sync",
        default: "off",
        effect: "answer a write when it is on stable storage; dirsync: so for changes of directories",
    },
    Described {
        name: "dirsync",
        default: "off",
        effect: "see sync",
    },
    Described {
        name: "failureMemory=",
        default: "on",
        effect: "ask servers that failed last until they answer again; off: the order of the list alone",
    },
    Described {
        name: "hedge=",
        default: "on",
        effect: "ask a second server when the first is slower than usual",
    },
    Described {
        name: "timeout=",
        default: "30s",
        effect: "longest wait of an operation for the cluster; then it fails",
    },
    Described {
        name: "writeCache=",
        default: "64MiB",
        effect: "bytes written that may wait for the chunkservers",
    },
    Described {
        name: "unsyncedCache=",
        default: "64MiB",
        effect: "bytes kept for resending until they are on stable storage",
    },
    Described {
        name: "readAhead=",
        default: "64MiB",
        effect: "bytes read ahead of sequential readers; 0: none",
    },
    Described {
        name: "cachedInodes=",
        default: "200000",
        effect: "inodes whose attributes and names are kept",
    },
    Described {
        name: "kernelReadAhead=",
        default: "1MiB",
        effect: "bytes the kernel reads ahead of a file",
    },
    Described {
        name: "threads=",
        default: "2",
        effect: "threads that take requests from the kernel",
    },
];

/// Options other programs pass that mean nothing here.
const IGNORED: &[&str] = &[
    "defaults", "auto", "noauto", "user", "nouser", "users", "_netdev", "nofail", "nosuid", "suid",
    "nodev", "dev", "noatime", "relatime", "atime", "fsname", "subtype",
];

/// Options of every mount that say the opposite of one in [`TABLE`], or the usual.
const OPPOSITES: &[&str] = &["rw", "exec", "async"];

/// The options of one mount.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "described in TABLE")]
pub struct Options {
    pub preferred: PreferredLabels,
    pub zone: String,
    pub region: String,
    pub node: String,
    pub read_only: bool,
    pub exclusive: bool,
    pub evict: Option<u64>,
    pub allow_other: bool,
    pub no_exec: bool,
    pub sync: bool,
    pub dir_sync: bool,
    pub default_permissions: bool,
    pub failure_memory: bool,
    pub hedge: bool,
    pub timeout: Duration,
    pub write_cache_bytes: usize,
    pub unsynced_bytes: usize,
    pub read_ahead_bytes: usize,
    pub cached_inodes: usize,
    pub kernel_read_ahead_bytes: u32,
    pub threads: usize,
    /// Tokens behind commas that were taken as further expressions of the preference.
    pub continued_by: Vec<String>,
    /// Things to tell the user that do not stop the mount.
    pub warnings: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            preferred: PreferredLabels::NONE,
            zone: String::new(),
            region: String::new(),
            node: String::new(),
            read_only: false,
            exclusive: false,
            evict: None,
            allow_other: false,
            no_exec: false,
            sync: false,
            dir_sync: false,
            default_permissions: true,
            failure_memory: true,
            hedge: true,
            timeout: Duration::from_secs(30),
            write_cache_bytes: 64 << 20,
            unsynced_bytes: 64 << 20,
            read_ahead_bytes: 64 << 20,
            cached_inodes: 200_000,
            kernel_read_ahead_bytes: 1 << 20,
            threads: 2,
            continued_by: Vec::new(),
            warnings: Vec::new(),
        }
    }
}

/// Why the options cannot be used. The text says where and what to write instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OptionsError(String);

impl Options {
    /// Reads what stands after `-o`.
    ///
    /// # Errors
    /// [`OptionsError`]: nothing may be mounted then.
    pub fn parse(text: &str) -> Result<Self, OptionsError> {
        let mut options = Self::default();
        if text.is_empty() {
            return Ok(options);
        }
        let split = split_mount_options(text, is_known).map_err(|e| OptionsError(e.to_string()))?;
        for option in &split {
            options.take(option)?;
        }
        if options.evict.is_some() && !options.exclusive {
            return Err(OptionsError(
                "evict is for a mount that claims its directory: write exclusive too".into(),
            ));
        }
        Ok(options)
    }

    fn take(&mut self, option: &MountOption) -> Result<(), OptionsError> {
        if option.is_preferred_labels() {
            return self.take_preferred(option);
        }
        let value = option.value.as_deref().unwrap_or("");
        let name = option.name.as_str();
        match name {
            "clientZone" => self.zone = value.to_owned(),
            "clientRegion" => self.region = value.to_owned(),
            "clientNode" => self.node = value.to_owned(),
            "ro" => self.read_only = switch(name, value)?,
            "rw" => self.read_only = !switch(name, value)?,
            "exclusive" => self.exclusive = switch(name, value)?,
            "evict" => {
                let session = value.parse().map_err(|_| {
                    OptionsError(format!(
                        "evict={value}: write the number of a session, from `hither session ls`"
                    ))
                })?;
                self.evict = Some(session);
            }
            "allow_other" => self.allow_other = switch(name, value)?,
            "default_permissions" => self.default_permissions = switch(name, value)?,
            "noexec" => self.no_exec = switch(name, value)?,
            "exec" => self.no_exec = !switch(name, value)?,
            "sync" => self.sync = switch(name, value)?,
            "async" => self.sync = !switch(name, value)?,
            "dirsync" => self.dir_sync = switch(name, value)?,
            "failureMemory" => self.failure_memory = switch(name, value)?,
            "hedge" => self.hedge = switch(name, value)?,
            "timeout" => {
                self.timeout = duration(name, value)?;
                if self.timeout.is_zero() {
                    return Err(OptionsError(format!(
                        "{name}={value}: write the time an operation may take, such as 30s"
                    )));
                }
            }
            "writeCache" => self.write_cache_bytes = size(name, value)?,
            "unsyncedCache" => self.unsynced_bytes = size(name, value)?,
            "readAhead" => self.read_ahead_bytes = size(name, value)?,
            "cachedInodes" => self.cached_inodes = size(name, value)?,
            "kernelReadAhead" => {
                let bytes = size(name, value)?;
                self.kernel_read_ahead_bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
            }
            "threads" => self.threads = size(name, value)?.clamp(1, 64),
            _ if IGNORED.contains(&name) || name.starts_with("x-") => {}
            _ => {
                return Err(OptionsError(format!(
                    "unknown mount option {name:?}: `hither mount --help` lists all"
                )));
            }
        }
        Ok(())
    }

    fn take_preferred(&mut self, option: &MountOption) -> Result<(), OptionsError> {
        let value = option.value.as_deref().unwrap_or("");
        let parsed = PreferredLabels::parse(value)
            .map_err(|e| OptionsError(format!("{}:\n{e}", option.name)))?;
        self.preferred = parsed.value;
        self.continued_by.clone_from(&option.continued_by);
        self.warnings
            .extend(parsed.warnings.iter().map(ToString::to_string));
        Ok(())
    }
}

fn is_known(name: &str) -> bool {
    let ours = TABLE
        .iter()
        .any(|known| known.name.trim_end_matches('=') == name);
    ours || OPPOSITES.contains(&name) || IGNORED.contains(&name) || name.starts_with("x-")
}

fn switch(name: &str, value: &str) -> Result<bool, OptionsError> {
    match value {
        "on" | "yes" | "true" | "1" | "" => Ok(true),
        "off" | "no" | "false" | "0" => Ok(false),
        _ => Err(OptionsError(format!("{name}={value}: write on or off"))),
    }
}

/// A number with a unit of 1024 or none, such as `64MiB`.
///
/// # Errors
/// [`OptionsError`] that names the option.
pub fn size(name: &str, value: &str) -> Result<usize, OptionsError> {
    let bytes = hither_proto::size::bytes_of(value).and_then(|bytes| usize::try_from(bytes).ok());
    bytes.ok_or_else(|| {
        OptionsError(format!(
            "{name}={value}: write a number such as 64MiB, 64Mi, 64M or 200000"
        ))
    })
}

fn duration(name: &str, value: &str) -> Result<Duration, OptionsError> {
    let wrong = || {
        OptionsError(format!(
            "{name}={value}: write a time such as 30s, 500ms or 2m"
        ))
    };
    let digits = value.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    match &value[digits.len()..] {
        "ms" => Ok(Duration::from_millis(number)),
        "" | "s" => Ok(Duration::from_secs(number)),
        "m" => number
            .checked_mul(60)
            .map(Duration::from_secs)
            .ok_or_else(wrong),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preference_list_survives_commas() {
        let options = Options::parse("ro,preflabels=A,B,zone=eu-1a;C,timeout=500ms").unwrap();
        assert_eq!(options.preferred.expressions().len(), 4);
        assert!(options.read_only);
        assert_eq!(options.timeout, Duration::from_millis(500));
        assert_eq!(
            Options::parse("mfspreflabels=N;S;R")
                .unwrap()
                .preferred
                .expressions()
                .len(),
            3
        );
    }

    #[test]
    fn a_list_that_does_not_parse_shows_a_caret() {
        let error = Options::parse("preflabels=A&").unwrap_err().to_string();
        assert!(error.contains('^'), "{error}");
        assert!(Options::parse("preflabels=@4+1").is_err());
        let error = Options::parse("cahce=4").unwrap_err().to_string();
        assert!(error.contains("cahce"), "{error}");
        assert!(Options::parse("timeout=soon").is_err());
        let error = Options::parse("timeout=0").unwrap_err().to_string();
        assert!(error.contains("such as 30s"), "{error}");
        assert!(Options::parse("hedge=maybe").is_err());
        assert!(Options::parse("exclusive,evict=me").is_err());
        assert!(Options::parse("evict=5").is_err());
        let claims = Options::parse("exclusive,evict=5").unwrap();
        assert_eq!((claims.exclusive, claims.evict), (true, Some(5)));
        assert!(Options::parse("writeCache=1Q").is_err());
        let bytes = Options::parse("writeCache=32Mi").unwrap().write_cache_bytes;
        assert_eq!(bytes, 32 << 20);
    }

    #[test]
    fn a_switch_can_be_said_to_be_off() {
        let options = Options::parse("ro=off,exclusive=off,allow_other=off,noexec=no").unwrap();
        assert_eq!(options, Options::default());
        let options = Options::parse("default_permissions=off,noexec,sync,dirsync").unwrap();
        assert!(!options.default_permissions && options.no_exec);
        assert!(options.sync && options.dir_sync);
        let options = Options::parse("noexec,sync,ro,exec,async,rw").unwrap();
        assert_eq!(options, Options::default());
        assert!(Options::parse("ro=perhaps").is_err());
    }

    #[test]
    fn the_documentation_has_the_same_table() {
        let page = include_str!("../../../docs/commands.md");
        for Described {
            name,
            default,
            effect,
        } in TABLE
        {
            let row = format!("| `{name}` | {default} | {effect} |");
            assert!(page.contains(&row), "docs/commands.md lacks: {row}");
        }
    }

    #[test]
    fn what_fstab_adds_is_ignored() {
        let options = Options::parse("rw,nosuid,nodev,_netdev,x-systemd.automount").unwrap();
        assert_eq!(options, Options::default());
    }
}
