//! What the command line takes.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// A zone-aware distributed file system.
#[derive(Debug, Parser)]
#[command(name = "hither", version, about, max_term_width = 100)]
pub(crate) struct Args {
    /// Addresses of managers, host:port, separated by commas
    #[arg(long, global = true, env = "HITHER_CLUSTER")]
    pub(crate) cluster: Option<String>,
    /// Print JSON instead of tables
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// A whole cluster as processes on this machine
    #[command(subcommand)]
    Playground(Playground),
    /// Mount the cluster, or a directory of it
    Mount(Mount),
    /// Serve mounts that another process makes and hands over (the mount pod of a node)
    Mounter(Mounter),
    /// Run a manager (with the embedded store: and the metadata ranks)
    Manager(Manager),
    /// Run a metadata server (with a store outside the manager)
    Mds(Mds),
    /// Run a chunkserver
    Chunkserver(Chunkserver),
    /// How the cluster is
    Status,
    /// Chunkservers
    #[command(subcommand)]
    Cs(Cs),
    /// Storage classes
    #[command(subcommand)]
    Sclass(Sclass),
    /// Where a file's chunks are, in the order its mount would read them
    Where {
        /// A file on a mount
        path: PathBuf,
    },
    /// Where a mount's reads and writes went
    Locality {
        /// A mount point, or anything on it
        mount: PathBuf,
    },
    /// Show or set a directory's quota
    Quota(Quota),
    /// Back up and restore the metadata
    #[command(subcommand)]
    Meta(Meta),
    /// Sessions of mounts
    #[command(subcommand)]
    Session(Session),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Playground {
    /// Start a cluster
    Up(PlaygroundUp),
    /// Show its processes
    Status(PlaygroundDir),
    /// Kill a process at once (SIGKILL)
    Kill(PlaygroundName),
    /// Stop a process where it stands (SIGSTOP)
    Pause(PlaygroundName),
    /// Let a paused process go on
    Resume(PlaygroundName),
    /// Start a process that was killed
    Start(PlaygroundName),
    /// End all processes; data stays unless --delete
    Down(PlaygroundDown),
}

#[derive(Debug, clap::Args)]
pub(crate) struct PlaygroundDir {
    /// Directory of the playground
    #[arg(long, default_value = "hither-playground")]
    pub(crate) dir: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(crate) struct PlaygroundUp {
    #[command(flatten)]
    pub(crate) at: PlaygroundDir,
    /// Zones, separated by commas
    #[arg(long, default_value = "a,b,c", value_delimiter = ',')]
    pub(crate) zones: Vec<String>,
    /// Chunkservers in each zone
    #[arg(long, default_value_t = 2)]
    pub(crate) chunkservers_per_zone: u32,
    /// Address the processes listen at
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) address: String,
    /// Where the metadata is kept: embedded, or etcd (a server of Debian's etcd-server)
    #[arg(long, default_value = "embedded")]
    pub(crate) store: String,
    /// Storage class of new files; default: a copy in each zone
    #[arg(long)]
    pub(crate) class: Option<String>,
    /// Stay until interrupted, then end everything
    #[arg(long)]
    pub(crate) foreground: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct PlaygroundName {
    /// Name of a process as `status` shows it, or a zone for all its chunkservers
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) at: PlaygroundDir,
}

#[derive(Debug, clap::Args)]
pub(crate) struct PlaygroundDown {
    #[command(flatten)]
    pub(crate) at: PlaygroundDir,
    /// Remove the data as well
    #[arg(long)]
    pub(crate) delete: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Mounter {
    /// Unix socket at which mounts are handed over; made anew
    #[arg(long)]
    pub(crate) socket: PathBuf,
    /// Bytes that all mounts together keep in memory, about; without it three quarters of the
    /// process's memory limit, or a quarter of the machine's memory
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub(crate) memory: Option<u64>,
}

#[derive(Debug, clap::Args)]
#[command(after_help = mount_options(), allow_missing_positional = true)]
pub(crate) struct Mount {
    /// Addresses of managers (host:port, separated by commas), and a directory: ADDR[:/SUBDIR];
    /// without ADDR, or without all of it, that of --cluster or HITHER_CLUSTER
    pub(crate) source: Option<String>,
    /// Where to mount
    pub(crate) directory: PathBuf,
    /// Mount options, separated by commas (see below)
    #[arg(short, long, default_value = "")]
    pub(crate) options: String,
    /// Stay in the foreground
    #[arg(short, long)]
    pub(crate) foreground: bool,
    /// Wait for the cluster for as long as it takes
    #[arg(long)]
    pub(crate) wait: bool,
    /// Try an address that refuses connections for as long as an operation may take: at boot the
    /// cluster may be starting as well
    #[arg(long, hide = true)]
    pub(crate) patient: bool,
    /// Stay mounted on SIGTERM (for supervisors that hand the mount over)
    #[arg(long)]
    pub(crate) stay_mounted: bool,
    /// File to which a mount in the background appends its log
    #[arg(long)]
    pub(crate) log: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Manager {
    /// Configuration file (YAML); flags win
    #[arg(long)]
    pub(crate) config: Option<PathBuf>,
    /// Directory of the embedded store
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
    /// etcd endpoints, separated by commas, instead of the embedded store
    #[arg(long)]
    pub(crate) etcd: Option<String>,
    /// Directory with ca.crt and, if etcd asks for one, tls.crt and tls.key: TLS with etcd
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) etcd_tls: Option<PathBuf>,
    /// Address to listen at
    #[arg(long)]
    pub(crate) listen: Option<String>,
    /// Address to tell others: HOST:PORT, or HOST with the port listened at
    #[arg(long, env = "HITHER_ADVERTISE")]
    pub(crate) advertise: Option<String>,
    /// Address the metadata ranks in this process listen at (embedded store)
    #[arg(long)]
    pub(crate) mds_listen: Option<String>,
    /// Address of these ranks to tell others: HOST:PORT, or HOST with the port listened at;
    /// without it, the host of --advertise
    #[arg(long)]
    pub(crate) mds_advertise: Option<String>,
    /// Metadata ranks in this process (embedded store)
    #[arg(long)]
    pub(crate) ranks: Option<u16>,
    /// Storage class of the root directory of a new cluster
    #[arg(long)]
    pub(crate) default_class: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Mds {
    /// Configuration file (YAML); flags win
    #[arg(long)]
    pub(crate) config: Option<PathBuf>,
    /// Rank to serve
    #[arg(long)]
    pub(crate) rank: Option<u16>,
    /// etcd endpoints, separated by commas
    #[arg(long)]
    pub(crate) etcd: Option<String>,
    /// Directory with ca.crt and, if etcd asks for one, tls.crt and tls.key: TLS with etcd
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) etcd_tls: Option<PathBuf>,
    /// Address to listen at
    #[arg(long)]
    pub(crate) listen: Option<String>,
    /// Address to tell others: HOST:PORT, or HOST with the port listened at
    #[arg(long, env = "HITHER_ADVERTISE")]
    pub(crate) advertise: Option<String>,
    /// Addresses of managers, separated by commas
    #[arg(long)]
    pub(crate) managers: Option<String>,
    /// Address that answers probes: /livez while nothing hangs, /readyz while it serves or stands by
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) probes: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Chunkserver {
    /// Configuration file (YAML); flags win
    #[arg(long)]
    pub(crate) config: Option<PathBuf>,
    /// Directories of disks; once for each
    #[arg(long = "disk")]
    pub(crate) disks: Vec<PathBuf>,
    /// Address to listen at
    #[arg(long)]
    pub(crate) listen: Option<String>,
    /// Address to tell others: HOST:PORT, or HOST with the port listened at
    #[arg(long, env = "HITHER_ADVERTISE")]
    pub(crate) advertise: Option<String>,
    /// Addresses of managers, separated by commas
    #[arg(long)]
    pub(crate) managers: Option<String>,
    /// Zone
    #[arg(long)]
    pub(crate) zone: Option<String>,
    /// Region
    #[arg(long)]
    pub(crate) region: Option<String>,
    /// Node
    #[arg(long)]
    pub(crate) node: Option<String>,
    /// What whoever runs it calls it, such as the name of its pod
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Labels: letters and key=value, separated by commas
    #[arg(long)]
    pub(crate) labels: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Cs {
    /// List chunkservers
    Ls,
    /// What each chunkserver has done since it was started
    Stat,
    /// Change labels: +A, -B, key=value, -key
    Label {
        /// Chunkserver id
        #[arg(value_parser = server_id)]
        id: u64,
        /// Changes
        #[arg(required = true, allow_hyphen_values = true)]
        changes: Vec<String>,
    },
    /// Maintenance on or off
    Maintenance {
        /// Chunkserver id
        #[arg(value_parser = server_id)]
        id: u64,
        /// on or off
        #[arg(value_parser = ["on", "off"])]
        state: String,
    },
    /// Empty a chunkserver: its copies are made elsewhere and it takes no new ones, until it is off
    Drain {
        /// Chunkserver id
        #[arg(value_parser = server_id)]
        id: u64,
        /// on or off
        #[arg(value_parser = ["on", "off"])]
        state: String,
    },
    /// Forget a chunkserver that is down and will not come back: its copies are made elsewhere
    Forget {
        /// Chunkserver id
        #[arg(value_parser = server_id)]
        id: u64,
    },
}

#[derive(Debug, Default, PartialEq, clap::Args)]
pub(crate) struct ClassFields {
    /// Where copies stay, for example zone=a,zone=b,zone=c
    #[arg(long)]
    pub(crate) keep: Option<String>,
    /// Where new copies are written, if elsewhere
    #[arg(long)]
    pub(crate) create: Option<String>,
    /// strict, std or loose
    #[arg(long)]
    pub(crate) mode: Option<String>,
    /// Text for people
    #[arg(long)]
    pub(crate) description: Option<String>,
    /// Template of preferred labels
    #[arg(long)]
    pub(crate) preferred_labels: Option<String>,
    /// Smallest number of copies that may acknowledge a write
    #[arg(long)]
    pub(crate) min_write_copies: Option<u32>,
    /// Make it although its mode is strict and no present servers satisfy it
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Sclass {
    /// Make a class
    Create {
        /// Name
        name: String,
        #[command(flatten)]
        fields: ClassFields,
    },
    /// List classes
    Ls,
    /// Show a class
    Show {
        /// Name
        name: String,
    },
    /// Change a class's definition, or give a file or directory a class; data that is written
    /// already stays with the copies it has
    Set {
        /// Name of the class
        name: String,
        /// A file or directory on a mount to give the class to
        path: Option<PathBuf>,
        /// And everything below it
        #[arg(short, long, requires = "path")]
        recursive: bool,
        #[command(flatten)]
        fields: ClassFields,
    },
    /// Whether a preference can match the copies of a class
    Check {
        /// Name
        name: String,
        /// Preferred labels as a mount would have them
        preferred: String,
    },
    /// What would be copied if data followed a change of a class
    DryRun {
        /// Name
        name: String,
        #[command(flatten)]
        fields: ClassFields,
    },
    /// Remove a class
    Delete {
        /// Name
        name: String,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct Quota {
    /// A directory on a mount
    pub(crate) path: PathBuf,
    /// Limit in bytes, such as 10GiB (0: none)
    #[arg(long, value_parser = size)]
    pub(crate) bytes: Option<u64>,
    /// Limit in inodes (0: none)
    #[arg(long)]
    pub(crate) inodes: Option<u64>,
}

fn server_id(text: &str) -> Result<u64, String> {
    let id = text.parse();
    id.map_err(|_| "name a chunkserver by its number: `hither cs ls` shows them all".to_owned())
}

fn size(text: &str) -> Result<u64, String> {
    hither_proto::size::bytes_of(text)
        .ok_or_else(|| "write a number of bytes such as 10GiB, 10Gi, 10G or 4096".to_owned())
}

#[derive(Debug, Subcommand)]
pub(crate) enum Meta {
    /// Write the whole metadata store to a file, while the cluster serves
    Dump {
        /// File to write; in a directory a new one, named by the time
        file: PathBuf,
        /// Of the files so named, keep this many; the oldest go once the new one is there
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
        keep: Option<u32>,
    },
    /// Fill an empty store from a file
    Load {
        /// File to read
        file: PathBuf,
        /// Directory of the embedded store
        #[arg(long, required_unless_present = "etcd", conflicts_with = "etcd")]
        dir: Option<PathBuf>,
        /// etcd endpoints, separated by commas, instead of the embedded store
        #[arg(long)]
        etcd: Option<String>,
        /// Directory with ca.crt and, if etcd asks for one, tls.crt and tls.key: TLS with etcd
        #[arg(long, value_name = "DIRECTORY", requires = "etcd")]
        etcd_tls: Option<PathBuf>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Session {
    /// List sessions
    Ls,
    /// End a session; what it held is given to others after it is fenced
    Evict {
        /// Session id
        id: u64,
    },
}

/// Called as `mount.fuse.hither SOURCE DIRECTORY -o OPTIONS` (by mount(8), from fstab), this is
/// `hither mount`. What it made itself it leaves as it is.
pub(crate) fn as_mount_helper(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<OsString> = args.collect();
    let helper = args.first().is_some_and(|name| {
        let name = name.to_string_lossy();
        name.rsplit('/').next() == Some("mount.fuse.hither")
    });
    // A mount's process starts itself with what it was given: then all is there.
    let done = [OsString::from("mount"), "--patient".into()];
    if helper && args.get(1..3) != Some(&done[..]) {
        // Flags of mount(8) that mean nothing here.
        args.retain(|arg| !["-n", "-s", "-v"].iter().any(|flag| arg == flag));
        args.splice(1..1, done);
    }
    args
}

fn mount_options() -> String {
    let mut text = String::from("Mount options:\n");
    for option in hither_mount::options::TABLE {
        text.push_str(&format!(
            "  {:<22} {} (default: {})\n",
            option.name, option.effect, option.default
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn mount_helpers_arguments_are_understood() {
        let words = [
            "/sbin/mount.fuse.hither",
            "host:1:/data",
            "/mnt",
            "-n",
            "-o",
            "ro,preflabels=A",
        ];
        let args = as_mount_helper(words.iter().map(OsString::from));
        // A copy of that name, no link, starts itself under it.
        assert_eq!(as_mount_helper(args.clone().into_iter()), args);
        let Command::Mount(mount) = Args::try_parse_from(args).unwrap().command else {
            panic!("not a mount");
        };
        assert_eq!(
            (mount.source.as_deref(), mount.options.as_str()),
            (Some("host:1:/data"), "ro,preflabels=A")
        );
        assert!(mount.patient, "at boot the cluster may be starting");
    }

    #[test]
    fn a_chunkserver_is_named_by_its_number() {
        let wrong = ["hither", "cs", "label", "cs-a1", "+S"];
        let error = Args::try_parse_from(wrong).unwrap_err().to_string();
        assert!(error.contains("`hither cs ls`"), "{error}");
        assert!(Args::try_parse_from(["hither", "cs", "label", "1", "-S"]).is_ok());
    }
}
