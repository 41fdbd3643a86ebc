//! Whose disk it is (`docs/formats/disk.md`).

use std::fmt;
use std::io;

use hither_log::{LogDir, LogId};
use hither_proto::checksum::crc32c;
use hither_proto::ids::{ChunkserverId, DiskIndex};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Id of a cluster: 1 to 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClusterId {
    bytes: [u8; 32],
    length: u8,
}

impl ClusterId {
    /// `None` when there are no bytes or more than 32.
    #[must_use]
    pub fn new(id: &[u8]) -> Option<Self> {
        let length = u8::try_from(id.len()).ok()?;
        let mut bytes = [0; 32];
        bytes.get_mut(..id.len())?.copy_from_slice(id);
        (length > 0).then_some(Self { bytes, length })
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }
}

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_bytes()
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClusterId({self})")
    }
}

/// What the file `identity` of a disk says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The cluster.
    pub cluster: ClusterId,
    /// The chunkserver; 0 until the manager has given it a number.
    pub server: ChunkserverId,
    /// Number of the disk inside the server.
    pub index: DiskIndex,
    /// The number that the next new disk of this server gets.
    pub next_index: DiskIndex,
    /// Random number of the disk.
    pub uuid: [u8; 16],
    /// Taken out of service for good.
    pub decommissioned: bool,
    /// Id of the disk's log.
    pub(crate) log: LogId,
}

impl Identity {
    /// The identity of a new disk.
    pub(crate) fn fresh(cluster: ClusterId, server: ChunkserverId, index: DiskIndex) -> Self {
        Self {
            cluster,
            server,
            index,
            next_index: DiskIndex(index.0.saturating_add(1)),
            uuid: rand::random(),
            decommissioned: false,
            log: LogId(rand::random()),
        }
    }

    /// Reads the file; `None` when there is none. The inner error says what is wrong with it.
    pub(crate) fn load(dir: &dyn LogDir) -> io::Result<Option<Result<Self, &'static str>>> {
        Self::load_from(dir, FILE)
    }

    /// The identity of a disk whose formatting was interrupted.
    pub(crate) fn load_prepared(dir: &dyn LogDir) -> io::Result<Option<Self>> {
        Ok(Self::load_from(dir, NEW_FILE)?.and_then(Result::ok))
    }

    fn load_from(dir: &dyn LogDir, name: &str) -> io::Result<Option<Result<Self, &'static str>>> {
        let file = match dir.open(name) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut bytes = [0; BYTES];
        match file.read_at(&mut bytes, 0) {
            Ok(()) => Ok(Some(Self::decode(&bytes))),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Ok(Some(Err("identity is too short")))
            }
            Err(error) => Err(error),
        }
    }

    /// Replaces the file; durable when this returns.
    pub(crate) fn store(&self, dir: &dyn LogDir) -> io::Result<()> {
        self.prepare(dir)?;
        Self::commit(dir)
    }

    /// Says what the disk will be once it is formatted; durable when this returns.
    pub(crate) fn prepare(&self, dir: &dyn LogDir) -> io::Result<()> {
        match dir.remove(NEW_FILE) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = dir.create(NEW_FILE)?;
        file.write_at(&self.encode(), 0)?;
        file.sync_data()?;
        dir.sync_dir()
    }

    /// Makes what was prepared the identity; durable when this returns.
    pub(crate) fn commit(dir: &dyn LogDir) -> io::Result<()> {
        dir.rename(NEW_FILE, FILE)?;
        dir.sync_dir()
    }

    fn encode(&self) -> [u8; BYTES] {
        let mut raw = Raw {
            magic: MAGIC,
            checksum: 0.into(),
            version: VERSION.into(),
            cluster: self.cluster.bytes,
            cluster_length: self.cluster.length,
            flags: u8::from(self.decommissioned),
            index: self.index.0.into(),
            next_index: self.next_index.0.into(),
            zero: [0; 2],
            server: self.server.0.into(),
            uuid: self.uuid,
            log: self.log.0.into(),
            reserved: [0; 40],
        };
        raw.checksum = crc32c(&raw.as_bytes()[12..]).into();
        zerocopy::transmute!(raw)
    }

    fn decode(bytes: &[u8; BYTES]) -> Result<Self, &'static str> {
        let raw: Raw = zerocopy::transmute!(*bytes);
        if raw.magic != MAGIC {
            return Err("identity is not that of a hither disk");
        }
        if raw.checksum.get() != crc32c(&bytes[12..]) {
            return Err("identity is damaged");
        }
        if raw.version.get() != VERSION {
            return Err("identity was written by a newer release");
        }
        let cluster = raw
            .cluster
            .get(..usize::from(raw.cluster_length))
            .and_then(ClusterId::new)
            .ok_or("identity names no cluster")?;
        Ok(Self {
            cluster,
            server: ChunkserverId(raw.server.get()),
            index: DiskIndex(raw.index.get()),
            next_index: DiskIndex(raw.next_index.get()),
            uuid: raw.uuid,
            decommissioned: raw.flags & 1 == 1,
            log: LogId(raw.log.get()),
        })
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    checksum: U32,
    version: U32,
    cluster: [u8; 32],
    cluster_length: u8,
    flags: u8,
    index: U16,
    next_index: U16,
    zero: [u8; 2],
    server: U64,
    uuid: [u8; 16],
    log: U64,
    reserved: [u8; 40],
}

const BYTES: usize = 128;
const FILE: &str = "identity";
const NEW_FILE: &str = "identity.new";
const MAGIC: [u8; 8] = *b"HITHDISK";
const VERSION: u32 = 1;

const _: () = assert!(
    size_of::<Raw>() == BYTES,
    "the identity's size is part of the format"
);

#[cfg(test)]
mod tests {
    use hither_log::crash::CrashDisk;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn stored_and_loaded() {
        let disk = CrashDisk::new();
        let dir = disk.root();
        assert_eq!(Identity::load(dir.as_ref()).unwrap(), None);
        let cluster = ClusterId::new(b"one").unwrap();
        let mut identity = Identity::fresh(cluster, ChunkserverId(0), DiskIndex(3));
        identity.store(dir.as_ref()).unwrap();
        identity.server = ChunkserverId(7);
        identity.store(dir.as_ref()).unwrap();
        let after = disk.power_loss(1).root();
        assert_eq!(Identity::load(after.as_ref()).unwrap(), Some(Ok(identity)));
    }

    #[test]
    fn cluster_ids() {
        assert_eq!(ClusterId::new(b""), None);
        assert_eq!(ClusterId::new(&[1; 33]), None);
        assert_eq!(ClusterId::new(&[1; 32]).unwrap().as_bytes(), [1; 32]);
    }

    proptest! {
        #[test]
        fn a_flipped_bit_is_seen(bit in 0usize..BYTES * 8) {
            let identity = Identity::fresh(ClusterId::new(b"x").unwrap(), ChunkserverId(1), DiskIndex(0));
            let mut bytes = identity.encode();
            prop_assert_eq!(Identity::decode(&bytes), Ok(identity));
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Identity::decode(&bytes).is_err());
        }
    }
}
