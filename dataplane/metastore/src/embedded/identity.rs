//! The file that says whose directory it is and keeps other processes out.

use std::sync::Arc;

use hither_log::{LogDir, LogFile, LogId};

use crate::error::Error;

/// The locked identity file of a store's directory.
#[derive(Debug)]
pub(crate) struct Identity {
    file: Arc<dyn LogFile>,
    pub(crate) id: LogId,
    pub(crate) state: StoreState,
}

/// How the store was left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreState {
    /// Its creation did not come to the end: parts may be missing.
    New,
    /// It was open, and all its parts must be there.
    Open,
    /// It was closed in good order.
    Closed,
}

impl Identity {
    /// Opens and locks the identity of the store in `dir`; gives it one when it has none.
    pub(crate) fn open(dir: &dyn LogDir) -> Result<Self, Error> {
        let io = |error: std::io::Error| Error::Failed {
            cause: format!("open {FILE}: {error}"),
        };
        let entries = dir.list().map_err(io)?;
        let exists = entries.iter().any(|entry| entry.name == FILE);
        let file = if exists {
            dir.open(FILE)
        } else {
            dir.create(FILE)
        }
        .map_err(io)?;
        if !file.try_lock().map_err(io)? {
            return Err(Error::InUse);
        }
        let found = read(&file)?;
        // The identity is durable before anything else is made.
        if found.is_none() && entries.iter().any(|entry| entry.name != FILE) {
            let cause = format!("{FILE} is damaged, or the directory belongs to something else");
            return Err(Error::Corrupt { cause });
        }
        let (id, state) = found.unwrap_or_else(|| (LogId(rand::random()), StoreState::New));
        let identity = Self { file, id, state };
        // Even if it was found: an earlier process may have failed to make it durable.
        identity.write()?;
        dir.sync_dir().map_err(io)?;
        Ok(identity)
    }

    /// Notes how the store is now.
    pub(crate) fn set_state(&mut self, state: StoreState) -> Result<(), Error> {
        self.state = state;
        self.write()
    }

    fn write(&self) -> Result<(), Error> {
        let io = |error| Error::Failed {
            cause: format!("write {FILE}: {error}"),
        };
        let bytes = encode(self.id, self.state);
        self.file.write_at(&bytes, 0).map_err(io)?;
        self.file.sync_data().map_err(io)
    }
}

fn read(file: &Arc<dyn LogFile>) -> Result<Option<(LogId, StoreState)>, Error> {
    let io = |error| Error::Failed {
        cause: format!("read {FILE}: {error}"),
    };
    let mut bytes = [0; FILE_BYTES];
    if file.size().map_err(io)? != FILE_BYTES as u64 {
        return Ok(None);
    }
    file.read_at(&mut bytes, 0).map_err(io)?;
    decode(&bytes)
}

fn encode(id: LogId, state: StoreState) -> [u8; FILE_BYTES] {
    let mut bytes = [0; FILE_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    bytes[16..24].copy_from_slice(&id.0.to_le_bytes());
    let crc = checksum(&bytes);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes[STATE_OFFSET..].copy_from_slice(match state {
        StoreState::New => &[0; 8],
        StoreState::Open => STATE_OPEN,
        StoreState::Closed => STATE_CLOSED,
    });
    bytes
}

/// Id and state; `None` if the file is not intact.
fn decode(bytes: &[u8; FILE_BYTES]) -> Result<Option<(LogId, StoreState)>, Error> {
    let (mut version, mut crc, mut id) = ([0; 4], [0; 4], [0; 8]);
    version.copy_from_slice(&bytes[8..12]);
    crc.copy_from_slice(&bytes[12..16]);
    id.copy_from_slice(&bytes[16..24]);
    if bytes[..8] != MAGIC || u32::from_le_bytes(crc) != checksum(bytes) {
        return Ok(None);
    }
    let version = u32::from_le_bytes(version);
    if version != FORMAT_VERSION {
        let cause = format!("{FILE} has format version {version}");
        return Err(Error::Corrupt { cause });
    }
    let state = match &bytes[STATE_OFFSET..] {
        state if state == STATE_CLOSED => StoreState::Closed,
        [0, ..] => StoreState::New,
        // Also a torn one: what is written over zeros comes after the end of the creation.
        _ => StoreState::Open,
    };
    Ok(Some((LogId(u64::from_le_bytes(id)), state)))
}

fn checksum(bytes: &[u8; FILE_BYTES]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    digest.update(&bytes[8..12]);
    digest.update(&bytes[16..24]);
    u32::try_from(digest.finalize()).expect("a 32-bit checksum fits 32 bits")
}

const FILE: &str = "identity";
const FILE_BYTES: usize = 1024;
const MAGIC: [u8; 8] = *b"HITHMETA";
const FORMAT_VERSION: u32 = 1;
/// In another sector than the identity, so that tearing one leaves the other.
const STATE_OFFSET: usize = FILE_BYTES - 8;
const STATE_OPEN: &[u8; 8] = b"IN USE..";
const STATE_CLOSED: &[u8; 8] = b"CLOSED..";

const _: () = assert!(STATE_OFFSET / 512 > 24 / 512);

#[cfg(test)]
mod tests {
    use hither_log::crash::CrashDisk;

    use super::*;

    #[test]
    fn an_identity_stays_and_belongs_to_one_process() {
        let disk = CrashDisk::new();
        let mut first = Identity::open(disk.root().as_ref()).unwrap();
        assert_eq!(first.state, StoreState::New);
        assert_eq!(
            Identity::open(disk.root().as_ref()).unwrap_err(),
            Error::InUse
        );
        for state in [StoreState::Open, StoreState::Closed] {
            first.set_state(state).unwrap();
            let id = first.id;
            drop(first);
            first = Identity::open(disk.root().as_ref()).unwrap();
            assert_eq!((first.id, first.state), (id, state));
        }
    }

    #[test]
    fn a_damaged_identity_and_a_foreign_directory_are_refused() {
        let disk = CrashDisk::new();
        drop(Identity::open(disk.root().as_ref()).unwrap());
        disk.root().create("other").unwrap();
        disk.damage(FILE, |bytes| bytes[17] ^= 1).unwrap();
        let refused = Identity::open(disk.root().as_ref());
        assert!(matches!(refused, Err(Error::Corrupt { .. })), "{refused:?}");
    }
}
