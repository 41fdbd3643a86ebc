//! The disks of one server.

use std::collections::BTreeMap;
use std::sync::Arc;

use hither_log::LogFile;
use hither_proto::ids::{ChunkserverId, DiskIndex};
use parking_lot::Mutex;

use crate::disk::Disk;
use crate::error::Error;
use crate::identity::{ClusterId, Identity};
use crate::medium::Medium;
use crate::options::StoreOptions;
use crate::recover;

/// The disks of one server.
#[derive(Debug)]
pub struct Store {
    disks: BTreeMap<DiskIndex, Disk>,
    failed: Vec<DiskState>,
    cluster: ClusterId,
    server: Mutex<ChunkserverId>,
}

/// A disk that could not be opened, or one that was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskState {
    /// Where it is.
    pub path: String,
    /// Its number, if that is known.
    pub index: Option<DiskIndex>,
    /// Why it does not serve; `None` if it does.
    pub failure: Option<String>,
}

/// A disk whose identity was read.
struct Found {
    medium: Medium,
    lock: Arc<dyn LogFile>,
    identity: Option<Identity>,
    /// What an interrupted formatting was to make of it.
    prepared: Option<Identity>,
}

impl Store {
    /// Opens all disks, and formats those that are empty directories. A disk that cannot be read
    /// is left out and named in [`Store::states`]; one that belongs to somebody else is an error.
    ///
    /// `cluster` is the cluster this server belongs to; `None` takes it from the disks.
    ///
    /// # Errors
    /// `ForeignCluster`, `ForeignServer`, `Decommissioned`, `SameDisk`, `InUse`, `NotADisk`,
    /// `NoClusterId`.
    pub fn open(
        media: Vec<Medium>,
        cluster: Option<ClusterId>,
        options: &StoreOptions,
    ) -> Result<Self, Error> {
        let mut failed = Vec::new();
        let mut found = Vec::new();
        for medium in media {
            match find(&medium) {
                Ok(disk) => found.push(disk),
                Err(Error::Unusable { path, cause }) => {
                    tracing::error!(path, cause, "disk left out");
                    failed.push(DiskState {
                        path,
                        index: None,
                        failure: Some(cause),
                    });
                }
                Err(error) => return Err(error),
            }
        }
        let (cluster, server) = check_owner(&found, cluster)?;
        let mut next = check_numbers(&found)?;
        let mut store = Self {
            disks: BTreeMap::new(),
            failed,
            cluster,
            server: Mutex::new(server),
        };
        for disk in found {
            let fresh = disk.identity.is_none();
            let identity = match (disk.identity, disk.prepared) {
                (Some(identity), _) => identity,
                (None, prepared) => {
                    let drawn = Identity::fresh(cluster, server, next);
                    next = drawn.next_index;
                    format(&disk.medium, drawn, prepared)?
                }
            };
            store.open_disk(disk, identity, options, fresh)?;
        }
        store.note_numbers(next, server)?;
        Ok(store)
    }

    fn open_disk(
        &mut self,
        disk: Found,
        identity: Identity,
        options: &StoreOptions,
        fresh: bool,
    ) -> Result<(), Error> {
        let opened =
            recover::open(&disk.medium, identity, disk.lock, options, fresh).and_then(|core| {
                if fresh {
                    // Last of all: a disk with an identity is whole.
                    let stored = Identity::commit(disk.medium.dir.as_ref());
                    stored.map_err(|error| core.io("write the identity", &error))?;
                }
                Disk::start(core)
            });
        match opened {
            Ok(opened) => {
                self.disks.insert(identity.index, opened);
            }
            Err(error) if fresh => return Err(error),
            Err(error) => {
                tracing::error!(path = disk.medium.path, %error, "disk left out");
                self.failed.push(DiskState {
                    path: disk.medium.path,
                    index: Some(identity.index),
                    failure: Some(error.to_string()),
                });
            }
        }
        Ok(())
    }

    /// Writes the server's number and the next free disk number to disks that do not have them.
    fn note_numbers(&self, next: DiskIndex, server: ChunkserverId) -> Result<(), Error> {
        for disk in self.disks.values() {
            let identity = disk.identity();
            if identity.next_index != next || identity.server != server {
                disk.store_identity(Identity {
                    next_index: next,
                    server,
                    ..identity
                })?;
            }
        }
        Ok(())
    }

    /// The cluster the disks belong to.
    #[must_use]
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// The server's number; 0 until it was assigned.
    #[must_use]
    pub fn server(&self) -> ChunkserverId {
        *self.server.lock()
    }

    /// Stores the number that the manager has given the server with all its disks. Set once.
    ///
    /// # Errors
    /// `ForeignServer` when the disks carry another number already, `DiskFailed`.
    pub fn assign(&self, server: ChunkserverId) -> Result<(), Error> {
        let mut own = self.server.lock();
        if *own == server {
            return Ok(());
        }
        if *own != ChunkserverId(0) {
            let path = self
                .disks
                .values()
                .next()
                .map(|disk| disk.path().to_owned());
            return Err(Error::ForeignServer {
                path: path.unwrap_or_default(),
                found: *own,
                expected: server,
            });
        }
        for disk in self.disks.values() {
            disk.store_identity(Identity {
                server,
                ..disk.identity()
            })?;
        }
        *own = server;
        Ok(())
    }

    /// Takes a disk out of service for good: it is refused at the next start.
    ///
    /// # Errors
    /// `BadRequest` when there is no such disk, `DiskFailed`.
    pub fn decommission(&self, index: DiskIndex) -> Result<(), Error> {
        let disk = self
            .disk(index)
            .ok_or(Error::BadRequest("there is no such disk"))?;
        disk.store_identity(Identity {
            decommissioned: true,
            ..disk.identity()
        })
    }

    /// The disk of this number.
    #[must_use]
    pub fn disk(&self, index: DiskIndex) -> Option<&Disk> {
        self.disks.get(&index)
    }

    /// All open disks.
    pub fn disks(&self) -> impl Iterator<Item = &Disk> {
        self.disks.values()
    }

    /// Every disk there should be, those that do not serve too.
    #[must_use]
    pub fn states(&self) -> Vec<DiskState> {
        let open = self.disks.values().map(|disk| DiskState {
            path: disk.path().to_owned(),
            index: Some(disk.index()),
            failure: disk.failure(),
        });
        open.chain(self.failed.iter().cloned()).collect()
    }

    /// Closes all disks.
    ///
    /// # Errors
    /// The first error; all are closed anyway.
    pub fn close(&self) -> Result<(), Error> {
        let outcomes: Vec<_> = self.disks.values().map(Disk::close).collect();
        outcomes.into_iter().collect()
    }
}

fn find(medium: &Medium) -> Result<Found, Error> {
    let failed = |error: std::io::Error| Error::Unusable {
        path: medium.path.clone(),
        cause: error.to_string(),
    };
    let identity = load_identity(medium)?;
    let mut prepared = None;
    if identity.is_none() {
        prepared = Identity::load_prepared(medium.dir.as_ref()).map_err(failed)?;
        let names = medium.dir.list().map_err(failed)?;
        let expected = match prepared {
            Some(_) => &HALF_MADE_NAMES[..],
            // A disk that has lost its identity must not be taken for a new one.
            None => &EMPTY_NAMES[..],
        };
        if names
            .iter()
            .any(|entry| !expected.contains(&entry.name.as_str()))
        {
            return Err(Error::NotADisk {
                path: medium.path.clone(),
            });
        }
    }
    if identity.is_some_and(|identity| identity.decommissioned) {
        return Err(Error::Decommissioned {
            path: medium.path.clone(),
        });
    }
    let lock = match medium.dir.create(LOCK_FILE) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            medium.dir.open(LOCK_FILE)
        }
        other => other,
    };
    let lock = lock.map_err(failed)?;
    if !lock.try_lock().map_err(failed)? {
        return Err(Error::InUse {
            path: medium.path.clone(),
        });
    }
    Ok(Found {
        medium: medium.clone(),
        lock,
        identity,
        prepared,
    })
}

/// Begins to make a new disk: under the log's id that was drawn before if that was interrupted.
fn format(medium: &Medium, drawn: Identity, prepared: Option<Identity>) -> Result<Identity, Error> {
    let identity = Identity {
        log: prepared.map_or(drawn.log, |prepared| prepared.log),
        uuid: prepared.map_or(drawn.uuid, |prepared| prepared.uuid),
        ..drawn
    };
    let written = match prepared {
        Some(prepared) if prepared == identity => Ok(()),
        _ => identity.prepare(medium.dir.as_ref()),
    };
    written.map_err(|error| Error::Unusable {
        path: medium.path.clone(),
        cause: error.to_string(),
    })?;
    Ok(identity)
}

fn load_identity(medium: &Medium) -> Result<Option<Identity>, Error> {
    let unusable = |cause: String| Error::Unusable {
        path: medium.path.clone(),
        cause,
    };
    match Identity::load(medium.dir.as_ref()) {
        Ok(None) => Ok(None),
        Ok(Some(Ok(identity))) => Ok(Some(identity)),
        Ok(Some(Err(cause))) => Err(unusable(cause.to_owned())),
        Err(error) => Err(unusable(error.to_string())),
    }
}

/// The cluster and the server that all disks belong to.
fn check_owner(
    found: &[Found],
    cluster: Option<ClusterId>,
) -> Result<(ClusterId, ChunkserverId), Error> {
    let mut cluster = cluster;
    let mut server = ChunkserverId(0);
    for disk in found {
        let Some(identity) = disk.identity else {
            continue;
        };
        let expected = *cluster.get_or_insert(identity.cluster);
        if expected != identity.cluster {
            return Err(Error::ForeignCluster {
                path: disk.medium.path.clone(),
                found: identity.cluster,
                expected,
            });
        }
        if server == ChunkserverId(0) {
            server = identity.server;
        }
        if identity.server != ChunkserverId(0) && identity.server != server {
            return Err(Error::ForeignServer {
                path: disk.medium.path.clone(),
                found: identity.server,
                expected: server,
            });
        }
    }
    let first = found.first().map(|disk| disk.medium.path.clone());
    let cluster = cluster.ok_or(Error::NoClusterId {
        path: first.unwrap_or_default(),
    })?;
    Ok((cluster, server))
}

/// The next free disk number.
fn check_numbers(found: &[Found]) -> Result<DiskIndex, Error> {
    let mut paths: BTreeMap<DiskIndex, &str> = BTreeMap::new();
    let mut next = DiskIndex(0);
    for disk in found {
        let Some(identity) = disk.identity else {
            continue;
        };
        if let Some(other) = paths.insert(identity.index, &disk.medium.path) {
            return Err(Error::SameDisk {
                path: disk.medium.path.clone(),
                other: other.to_owned(),
                index: identity.index,
            });
        }
        let after = DiskIndex(identity.index.0.saturating_add(1));
        next = next.max(identity.next_index).max(after);
    }
    Ok(next)
}

const LOCK_FILE: &str = "lock";
/// What an interrupted formatting can leave.
const HALF_MADE_NAMES: [&str; 7] = [
    "lock",
    "index",
    "index.new",
    "log",
    "chunks",
    "identity.new",
    "lost+found",
];
/// What is in a directory that may be formatted.
const EMPTY_NAMES: [&str; 3] = ["lock", "identity.new", "lost+found"];
