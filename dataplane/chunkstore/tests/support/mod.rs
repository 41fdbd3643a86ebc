//! What the tests of the store share.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "not every test uses everything"
)]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use hither_chunkstore::{
    ClusterId, Disk, Error, Medium, Probe, Space, Store, StoreOptions, WriteOp,
};
use hither_log::crash::CrashDisk;
use hither_proto::checksum::piece_checksums;
use hither_proto::ids::{
    ChainNumber, ChunkId, DiskIndex, Epoch, GroupId, InodeId, LeaseId, SessionId,
};

pub(crate) const GROUP: GroupId = GroupId(5);

#[derive(Debug)]
pub(crate) struct Room(pub(crate) AtomicU64);

impl Probe for Room {
    fn space(&self) -> io::Result<Space> {
        Ok(Space {
            total_bytes: 1 << 40,
            free_bytes: self.0.load(Ordering::Relaxed),
        })
    }
}

pub(crate) fn cluster() -> ClusterId {
    ClusterId::new(b"test cluster").unwrap()
}

pub(crate) fn options() -> StoreOptions {
    StoreOptions {
        floor_bytes: 1 << 20,
        log_segment_bytes: 256 << 10,
        log_segments_max: 6,
        overlay_bytes_max: 1 << 20,
        threads: 2,
        files_max: 64,
        tick: None,
        ..StoreOptions::default()
    }
}

pub(crate) fn medium(disk: &CrashDisk) -> Medium {
    Medium {
        path: "memory".into(),
        dir: disk.root(),
        probe: Arc::new(Room(AtomicU64::new(1 << 30))),
    }
}

pub(crate) fn open_with(disk: &CrashDisk, options: &StoreOptions) -> Result<(Store, Disk), Error> {
    let store = Store::open(vec![medium(disk)], Some(cluster()), options)?;
    let opened = store.disk(DiskIndex(0)).cloned();
    match opened {
        Some(disk) => Ok((store, disk)),
        None => Err(Error::Unusable {
            path: "memory".into(),
            cause: format!("{:?}", store.states()),
        }),
    }
}

pub(crate) fn open(disk: &CrashDisk) -> (Store, Disk) {
    open_with(disk, &options()).unwrap()
}

pub(crate) fn write(chunk: u64, lease: u64, offset: u32, payload: Vec<u8>) -> WriteOp {
    WriteOp {
        chunk: ChunkId(chunk),
        group: GROUP,
        inode: InodeId(chunk + 1000),
        lease: LeaseId(lease),
        chain: ChainNumber(1),
        offset,
        checksums: piece_checksums(offset, &payload),
        payload: payload.into(),
        may_create: true,
        session: SessionId(77),
        epoch: Epoch(3),
        sync: false,
        filling: false,
    }
}

pub(crate) fn synced(op: WriteOp) -> WriteOp {
    WriteOp { sync: true, ..op }
}

/// Bytes that tell chunk, offset and version apart.
pub(crate) fn pattern(chunk: u64, version: u64, offset: u32, length: usize) -> Vec<u8> {
    (0..length as u64)
        .map(|at| {
            let at = at + u64::from(offset);
            let mixed = (at / 13)
                .wrapping_mul(0x9e37_79b9)
                .wrapping_add(at * 7 + chunk * 101 + version * 59);
            u8::try_from(mixed % 255).unwrap() + 1
        })
        .collect()
}

pub(crate) fn read(disk: &Disk, chunk: u64, offset: u32, length: u32) -> Result<Bytes, Error> {
    let data = disk.read(ChunkId(chunk), offset, length)?;
    assert_eq!(data.checksums, piece_checksums(offset, &data.bytes));
    if let Some(cached) = disk.try_read_cached(ChunkId(chunk), offset, length) {
        assert_eq!(cached.unwrap(), data);
    }
    Ok(data.bytes)
}

/// The whole copy.
pub(crate) fn content(disk: &Disk, chunk: u64) -> Result<Bytes, Error> {
    read(disk, chunk, 0, 64 << 20)
}

/// Compares bytes without printing all of them.
#[track_caller]
pub(crate) fn same(found: &[u8], expected: &[u8]) {
    let different = found.iter().zip(expected).position(|(a, b)| a != b);
    assert!(
        found.len() == expected.len() && different.is_none(),
        "{} and {} bytes differ first at {different:?}",
        found.len(),
        expected.len()
    );
}
