//! What a disk answers, one case at a time.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};

use hither_chunkstore::{
    ClusterId, Doubt, Error, Medium, Regions, SettleOp, Store, StoreOptions, TrimOp, WriteOp,
};
use hither_log::crash::CrashDisk;
use hither_proto::checksum::crc32c;
use hither_proto::ids::{
    ChainNumber, ChunkId, ChunkserverId, DiskIndex, Epoch, InodeId, LeaseId, SessionId,
};

use support::{
    GROUP, Room, cluster, content, medium, open, options, pattern, read, same, synced, write,
};

fn trim(chunk: u64, lease: u64, offset: u32, length: u32) -> TrimOp {
    TrimOp {
        chunk: ChunkId(chunk),
        group: GROUP,
        lease: LeaseId(lease),
        epoch: Epoch(3),
        offset,
        length,
    }
}

#[test]
fn small_and_large_writes_read_back_before_and_after_moving_and_restart() {
    let memory = CrashDisk::new();
    let (store, disk) = open(&memory);
    let mut expected = vec![0; 500_000];
    let mut put =
        |disk: &hither_chunkstore::Disk, version: u64, offset: u32, length: usize, sync: bool| {
            let bytes = pattern(1, version, offset, length);
            expected[offset as usize..offset as usize + length].copy_from_slice(&bytes);
            let op = write(1, 10, offset, bytes);
            disk.write_wait(if sync { synced(op) } else { op }).unwrap();
            let range = offset as usize..offset as usize + length;
            same(&content(disk, 1).unwrap()[range.clone()], &expected[range]);
        };
    put(&disk, 1, 0, 100, true);
    put(&disk, 2, 50, 5000, false);
    put(&disk, 3, 3000, 200_000, false);
    put(&disk, 4, 100_001, 30_000, true);
    put(&disk, 5, 90_000, 100_000, true);
    disk.tidy().unwrap();
    put(&disk, 6, 250_000, 64 << 10, false);
    put(&disk, 7, 310_000, 190_000, false);
    put(&disk, 8, 4096, 4096, true);
    same(&content(&disk, 1).unwrap(), &expected);
    for (offset, length) in [
        (0, 1),
        (4095, 2),
        (4096, 8192),
        (203_000, 60_000),
        (499_999, 100),
    ] {
        let bytes = read(&disk, 1, offset, length).unwrap();
        let end = (offset + length).min(500_000) as usize;
        same(&bytes, &expected[offset as usize..end]);
    }
    let entry = disk.entry(ChunkId(1)).unwrap();
    assert_eq!(entry.open.unwrap().session, SessionId(77));
    store.close().unwrap();
    drop((store, disk));
    let (_store, disk) = open(&memory);
    same(&content(&disk, 1).unwrap(), &expected);
    assert_eq!(disk.counters().torn_blocks, 0);
}

#[test]
fn an_absent_chunk_is_never_zeros() {
    let (_store, disk) = open(&CrashDisk::new());
    let absent = Err(Error::NoSuchChunk(ChunkId(9)));
    assert_eq!(read(&disk, 9, 0, 10), absent);
    let op = WriteOp {
        may_create: false,
        ..write(9, 1, 0, vec![1])
    };
    assert_eq!(disk.write_wait(op), Err(Error::NoSuchChunk(ChunkId(9))));
    // There is nothing to make stable.
    disk.flush_wait(&[ChunkId(9)]).unwrap();
}

#[test]
fn lower_leases_and_chains_are_refused() {
    let memory = CrashDisk::new();
    let (store, disk) = open(&memory);
    disk.write_wait(write(1, 10, 0, vec![1; 10])).unwrap();
    let newer_chain = WriteOp {
        chain: ChainNumber(3),
        ..write(1, 10, 0, vec![2; 10])
    };
    disk.write_wait(newer_chain).unwrap();
    let stale = |lease, chain| Error::StaleLease {
        chunk: ChunkId(1),
        lease: LeaseId(lease),
        chain: ChainNumber(chain),
    };
    let refused = disk.write_wait(write(1, 10, 0, vec![3; 10]));
    assert_eq!(refused, Err(stale(10, 3)));
    let sealed = disk.seal(ChunkId(1), GROUP, LeaseId(12)).unwrap();
    assert_eq!(
        (sealed.exists, sealed.copy_length, sealed.lease_before),
        (true, 10, LeaseId(10))
    );
    let mut block = vec![2; 10];
    block.resize(4096, 0);
    assert_eq!(sealed.touched.len(), 1);
    assert_eq!(
        (sealed.touched[0].block, sealed.touched[0].checksum),
        (0, crc32c(&block))
    );
    // Asked again, it says the same.
    assert_eq!(disk.seal(ChunkId(1), GROUP, LeaseId(12)).unwrap(), sealed);
    assert_eq!(
        disk.write_wait(write(1, 11, 0, vec![3; 10])),
        Err(stale(12, 0))
    );
    assert_eq!(disk.seal(ChunkId(1), GROUP, LeaseId(11)), Err(stale(12, 0)));
    assert_eq!(disk.trim(&trim(1, 11, 0, 0)), Err(stale(12, 0)));
    // Power goes: the seal stays.
    drop((store, disk));
    let (_store, disk) = open(&memory.power_loss(3));
    assert_eq!(
        disk.write_wait(write(1, 11, 0, vec![3; 10])),
        Err(stale(12, 0))
    );
    disk.write_wait(write(1, 12, 0, vec![4; 10])).unwrap();
}

#[test]
fn a_sealed_absence_refuses_the_late_first_write() {
    let memory = CrashDisk::new();
    let (store, disk) = open(&memory);
    let sealed = disk.seal(ChunkId(4), GROUP, LeaseId(6)).unwrap();
    assert!(!sealed.exists);
    drop((store, disk));
    let (_store, disk) = open(&memory.power_loss(1));
    assert!(matches!(
        disk.write_wait(write(4, 5, 0, vec![1])),
        Err(Error::StaleLease { .. })
    ));
    assert_eq!(content(&disk, 4), Err(Error::NoSuchChunk(ChunkId(4))));
    assert_eq!(disk.list(GROUP, ChunkId(0), 10), (vec![], false));
    disk.write_wait(write(4, 6, 0, vec![1])).unwrap();
    assert_eq!(content(&disk, 4).unwrap()[..], [1]);
}

#[test]
fn trims_zero_and_cut_and_old_bytes_do_not_come_back() {
    let memory = CrashDisk::new();
    let (store, disk) = open(&memory);
    let mut expected = pattern(1, 1, 0, 300_000);
    disk.write_wait(write(1, 1, 0, expected.clone())).unwrap();
    disk.write_wait(write(1, 1, 100, vec![9; 50])).unwrap();
    expected[100..150].fill(9);
    disk.trim(&trim(1, 2, 120, 50_000)).unwrap();
    expected[120..50_120].fill(0);
    same(&content(&disk, 1).unwrap(), &expected);
    disk.trim(&trim(1, 3, 200_001, 0)).unwrap();
    expected.truncate(200_001);
    same(&content(&disk, 1).unwrap(), &expected);
    disk.write_wait(write(1, 4, 299_000, vec![5; 10])).unwrap();
    expected.resize(299_000, 0);
    expected.resize(299_010, 5);
    same(&content(&disk, 1).unwrap(), &expected);
    disk.trim(&trim(1, 5, 500_000, 10)).unwrap();
    store.close().unwrap();
    drop((store, disk));
    let (_store, disk) = open(&memory);
    same(&content(&disk, 1).unwrap(), &expected);
    disk.trim(&trim(1, 6, 0, 0)).unwrap();
    assert!(content(&disk, 1).unwrap().is_empty());
}

#[test]
fn a_deleted_chunk_stays_deleted() {
    let memory = CrashDisk::new();
    let (store, disk) = open(&memory);
    disk.write_wait(synced(write(1, 1, 0, vec![7; 100_000])))
        .unwrap();
    disk.write_wait(synced(write(2, 1, 0, vec![7; 100])))
        .unwrap();
    disk.delete(&[ChunkId(1), ChunkId(2), ChunkId(3)]).unwrap();
    for chunk in 1..=3 {
        let late = disk.write_wait(write(chunk, 9, 0, vec![1]));
        assert_eq!(late, Err(Error::Deleted(ChunkId(chunk))));
        assert!(matches!(content(&disk, chunk), Err(Error::NoSuchChunk(_))));
    }
    drop((store, disk));
    let memory = memory.power_loss(2);
    for _ in 0..2 {
        let (store, disk) = open(&memory);
        for chunk in 1..=3 {
            let late = disk.write_wait(write(chunk, 9, 0, vec![1]));
            assert_eq!(late, Err(Error::Deleted(ChunkId(chunk))));
        }
        assert_eq!(
            memory
                .content("chunks/01/0000000000000001")
                .unwrap_err()
                .kind(),
            std::io::ErrorKind::NotFound
        );
        store.close().unwrap();
    }
}

#[test]
fn bad_blocks_are_named_and_repaired() {
    let memory = CrashDisk::new();
    let (store, disk) = open(&memory);
    let good = pattern(1, 1, 0, 100_000);
    disk.write_wait(synced(write(1, 1, 0, good.clone())))
        .unwrap();
    store.close().unwrap();
    drop((store, disk));
    let path = "chunks/01/0000000000000001";
    memory
        .damage(path, |bytes| bytes[(128 << 10) + 5 * 4096 + 17] ^= 1)
        .unwrap();
    memory
        .damage(path, |bytes| bytes[(128 << 10) + 99_999] ^= 1)
        .unwrap();
    let (_store, disk) = open(&memory);
    let bad = |block| Error::BadBlock {
        chunk: ChunkId(1),
        block,
    };
    same(&read(&disk, 1, 0, 5 * 4096).unwrap(), &good[..5 * 4096]);
    assert_eq!(read(&disk, 1, 4096, 60_000), Err(bad(5)));
    // A short piece cannot be merged with a bad block in place, and must not hide it in the log.
    let large = pattern(1, 2, 5 * 4096 + 1000, 70_000);
    assert_eq!(
        disk.write_wait(write(1, 1, 5 * 4096 + 1000, large)),
        Err(bad(5))
    );
    disk.write_wait(write(1, 1, 5 * 4096 + 100, vec![3; 50]))
        .unwrap();
    assert_eq!(read(&disk, 1, 5 * 4096, 10), Err(bad(5)));
    let block = good[5 * 4096..6 * 4096].to_vec().into();
    assert!(disk.repair_block(ChunkId(1), 5, &block).unwrap());
    assert!(!disk.repair_block(ChunkId(1), 5, &block).unwrap());
    assert!(
        disk.repair_block(ChunkId(1), 24, &good[24 * 4096..].to_vec().into())
            .unwrap()
    );
    let mut expected = good;
    expected[5 * 4096 + 100..5 * 4096 + 150].fill(3);
    same(&content(&disk, 1).unwrap(), &expected);
    disk.tidy().unwrap();
    same(&content(&disk, 1).unwrap(), &expected);
}

#[test]
fn scrubbing_names_all_damaged_blocks_of_a_range() {
    let memory = CrashDisk::new();
    let (store, disk) = open(&memory);
    disk.write_wait(synced(write(1, 1, 0, pattern(1, 1, 0, 200_000))))
        .unwrap();
    store.close().unwrap();
    drop((store, disk));
    for block in [0, 7, 30] {
        memory
            .damage("chunks/01/0000000000000001", |bytes| {
                bytes[(128 << 10) + block * 4096 + 1] ^= 1;
            })
            .unwrap();
    }
    let (_store, disk) = open(&memory);
    let scrub = |offset, length| disk.scrub(ChunkId(1), offset, length).unwrap();
    assert_eq!(scrub(0, 1 << 20).bad, [0, 7, 30]);
    assert_eq!(scrub(4096, 100_000).bad, [7]);
    assert_eq!(scrub(0, 1 << 20).copy_length, 200_000);
    assert_eq!(disk.scrub(ChunkId(2), 0, 1 << 20).unwrap().copy_length, 0);
    // What lies over a damaged block as a whole hides it.
    disk.write_wait(write(1, 1, 7 * 4096, vec![1; 4096]))
        .unwrap();
    assert_eq!(scrub(0, 1 << 20).bad, [0, 30]);
    assert_eq!(disk.next_copy(ChunkId(1)).unwrap().0, ChunkId(1));
    assert_eq!(disk.next_copy(ChunkId(2)), None);
    assert_eq!(disk.copy_bytes(), 200_000);
}

#[test]
fn a_bad_block_under_logged_bytes_stays_bad_until_repaired() {
    let memory = CrashDisk::new();
    let (store, disk) = open(&memory);
    let good = pattern(1, 1, 0, 8192);
    disk.write_wait(synced(write(1, 1, 0, good.clone())))
        .unwrap();
    disk.tidy().unwrap();
    store.close().unwrap();
    drop((store, disk));
    memory
        .damage("chunks/01/0000000000000001", |bytes| {
            bytes[(128 << 10) + 17] ^= 1;
        })
        .unwrap();
    let (_store, disk) = open(&memory);
    disk.write_wait(synced(write(1, 1, 100, vec![3; 50])))
        .unwrap();
    disk.tidy().unwrap();
    assert_eq!(disk.counters().overlay_bytes, 0);
    assert!(matches!(
        content(&disk, 1),
        Err(Error::BadBlock { block: 0, .. })
    ));
    let mut from_other = good[..4096].to_vec();
    from_other[100..150].fill(3);
    assert!(
        disk.repair_block(ChunkId(1), 0, &from_other.clone().into())
            .unwrap()
    );
    same(&content(&disk, 1).unwrap()[..4096], &from_other);
}

#[test]
fn settling_makes_a_copy_equal_and_clears_its_mark() {
    let memory = CrashDisk::new();
    let (store, disk) = open(&memory);
    let mut expected = pattern(1, 1, 0, 200_000);
    disk.write_wait(write(1, 1, 0, expected.clone())).unwrap();
    disk.seal(ChunkId(1), GROUP, LeaseId(2)).unwrap();
    let other = pattern(1, 5, 0, 4096);
    let op = SettleOp {
        chunk: ChunkId(1),
        group: GROUP,
        inode: InodeId(1),
        lease: LeaseId(2),
        epoch: Epoch(3),
        runs: vec![
            (0, other.clone().into()),
            (40, other[..100].to_vec().into()),
        ],
        length: 40 * 4096 + 100,
        clear_open: true,
    };
    disk.settle_blocks(&op).unwrap();
    expected[..4096].copy_from_slice(&other);
    expected.truncate(40 * 4096);
    expected.extend_from_slice(&other[..100]);
    same(&content(&disk, 1).unwrap(), &expected);
    assert_eq!(disk.entry(ChunkId(1)).unwrap().open, None);
    assert!(
        disk.seal(ChunkId(1), GROUP, LeaseId(3))
            .unwrap()
            .touched
            .is_empty()
    );
    drop((store, disk));
    let (_store, disk) = open(&memory.power_loss(9));
    same(&content(&disk, 1).unwrap(), &expected);
}

#[test]
fn close_clears_the_mark_of_its_lease_only() {
    let (_store, disk) = open(&CrashDisk::new());
    disk.write_wait(write(1, 5, 0, vec![1; 100])).unwrap();
    disk.close_marks(&[ChunkId(1), ChunkId(2)], LeaseId(4))
        .unwrap();
    assert_eq!(disk.open_chunks(Some(SessionId(77))).len(), 1);
    assert_eq!(disk.open_chunks(Some(SessionId(78))).len(), 0);
    disk.close_marks(&[ChunkId(1)], LeaseId(5)).unwrap();
    assert!(disk.open_chunks(None).is_empty());
}

#[test]
fn wrong_bytes_and_wrong_ranges_are_refused() {
    let (_store, disk) = open(&CrashDisk::new());
    let mut op = write(1, 1, 0, vec![1; 5000]);
    op.checksums[1] ^= 1;
    assert_eq!(disk.write_wait(op.clone()), Err(Error::BadChecksum));
    op.checksums.pop();
    assert_eq!(disk.write_wait(op), Err(Error::BadChecksum));
    for (offset, length) in [(64 << 20, 1), (u32::MAX, 1), ((64 << 20) - 1, 2), (0, 0)] {
        let op = write(1, 1, offset, vec![1; length]);
        assert!(matches!(disk.write_wait(op), Err(Error::BadRequest(_))));
    }
    assert!(matches!(
        read(&disk, 1, 64 << 20, 1),
        Err(Error::BadRequest(_))
    ));
    assert!(matches!(read(&disk, 1, 0, 10), Err(Error::NoSuchChunk(_))));
    let group = WriteOp {
        group: hither_proto::ids::GroupId(6),
        ..write(1, 1, 0, vec![1])
    };
    disk.write_wait(write(1, 1, 0, vec![1])).unwrap();
    assert!(matches!(
        disk.write_wait(group),
        Err(Error::WrongGroup { .. })
    ));
}

#[test]
fn far_below_the_floor_there_are_no_new_copies_but_old_ones_take_writes() {
    let memory = CrashDisk::new();
    let room = Arc::new(Room(AtomicU64::new(1 << 30)));
    let medium = Medium {
        probe: Arc::clone(&room) as _,
        ..medium(&memory)
    };
    let store = Store::open(vec![medium], Some(cluster()), &options()).unwrap();
    let disk = store.disk(DiskIndex(0)).unwrap();
    disk.write_wait(write(1, 1, 0, vec![1; 10])).unwrap();
    // It says that it is full before it refuses: whoever chooses disks hears of it a little later.
    room.0.store(options().floor_bytes - 1, Ordering::Relaxed);
    assert!(disk.is_full(&disk.space().unwrap()));
    disk.write_wait(write(2, 1, 0, vec![1; 10])).unwrap();
    room.0.store(1000, Ordering::Relaxed);
    assert!(
        disk.is_full(&disk.space().unwrap()),
        "asked with every sign of life"
    );
    assert_eq!(
        disk.write_wait(write(3, 1, 0, vec![1; 10])),
        Err(Error::NoSpace(DiskIndex(0)))
    );
    disk.write_wait(write(1, 1, 10, vec![1; 10])).unwrap();
}

#[test]
fn an_io_error_fails_the_disk_and_is_named() {
    let memory = CrashDisk::new();
    let (_store, disk) = open(&memory);
    disk.write_wait(write(1, 1, 0, vec![1; 10])).unwrap();
    memory.fail_at(memory.steps() + 1);
    let failed = disk.write_wait(synced(write(1, 1, 0, vec![1; 10])));
    assert!(
        matches!(failed, Err(Error::DiskFailed { .. })),
        "{failed:?}"
    );
    assert!(disk.failure().unwrap().contains("injected"));
    assert!(matches!(content(&disk, 1), Err(Error::DiskFailed { .. })));
}

#[test]
fn writes_of_one_chunk_keep_their_order() {
    let (_store, disk) = open(&CrashDisk::new());
    let (sender, receiver) = mpsc::channel();
    for version in 0..203u64 {
        let length = if version % 7 == 3 { 70_000 } else { 3000 };
        let sender = sender.clone();
        disk.write(
            write(1, 1, 0, pattern(1, version, 0, length)),
            move |outcome| {
                sender.send(outcome).unwrap();
            },
        );
    }
    for _ in 0..203 {
        receiver.recv().unwrap().unwrap();
    }
    let all = content(&disk, 1).unwrap();
    same(&all[..3000], &pattern(1, 202, 0, 3000));
    same(&all[3000..], &pattern(1, 199, 0, 70_000)[3000..]);
}

#[test]
fn chunks_are_listed_by_group_in_pages() {
    let (_store, disk) = open(&CrashDisk::new());
    for chunk in [3, 1, 2, 300] {
        disk.write_wait(write(chunk, chunk, 0, vec![1; 10]))
            .unwrap();
    }
    let (page, more) = disk.list(GROUP, ChunkId(2), 2);
    let ids: Vec<u64> = page.iter().map(|(chunk, _)| chunk.0).collect();
    assert_eq!((ids, more), (vec![2, 3], true));
    assert_eq!(page[0].1.lease, LeaseId(2));
    assert_eq!(disk.groups(), [GROUP]);
}

#[test]
fn disks_of_others_are_refused_by_name() {
    let temp = tempfile::tempdir().unwrap();
    let at = |name: &str| Medium::real(temp.path().join(name)).unwrap();
    let small = StoreOptions {
        floor_bytes: 0,
        ..options()
    };
    let open = |names: &[&str], cluster| {
        Store::open(names.iter().map(|name| at(name)).collect(), cluster, &small)
    };
    let one = ClusterId::new(b"one");
    assert!(matches!(open(&["a"], None), Err(Error::NoClusterId { .. })));
    let store = open(&["a", "b"], one).unwrap();
    assert_eq!(store.server(), ChunkserverId(0));
    assert!(matches!(open(&["a"], one), Err(Error::InUse { path }) if path.ends_with("/a")));
    store.assign(ChunkserverId(7)).unwrap();
    assert!(matches!(
        store.assign(ChunkserverId(8)),
        Err(Error::ForeignServer { .. })
    ));
    store.close().unwrap();
    drop(store);
    let two = ClusterId::new(b"two");
    assert!(
        matches!(open(&["b"], two), Err(Error::ForeignCluster { path, .. }) if path.ends_with("/b"))
    );

    let other = open(&["c"], one).unwrap();
    other.assign(ChunkserverId(9)).unwrap();
    drop(other);
    assert!(
        matches!(open(&["a", "c"], one), Err(Error::ForeignServer { path, .. }) if path.ends_with("/c"))
    );

    // A new disk takes the next number, also when the last one is away.
    let store = open(&["a", "d"], None).unwrap();
    let numbers: Vec<u16> = store.disks().map(|disk| disk.index().0).collect();
    assert_eq!((numbers, store.server()), (vec![0, 2], ChunkserverId(7)));
    store.decommission(DiskIndex(2)).unwrap();
    drop(store);
    assert!(matches!(
        open(&["a", "d"], one),
        Err(Error::Decommissioned { .. })
    ));

    std::fs::create_dir(temp.path().join("e")).unwrap();
    std::fs::write(temp.path().join("e/precious"), "x").unwrap();
    assert!(matches!(open(&["e"], one), Err(Error::NotADisk { .. })));
}

fn doubt(chunk: u64, lease: u64, range: std::ops::Range<u32>) -> Doubt {
    Doubt {
        chunk: ChunkId(chunk),
        group: GROUP,
        lease: LeaseId(lease),
        session: SessionId(77),
        epoch: Epoch(3),
        regions: Regions::of(&range),
    }
}

#[test]
fn a_copy_in_doubt_keeps_its_mark_until_it_is_sealed() {
    let memory = CrashDisk::new();
    let (store, disk) = open(&memory);
    let chunk = ChunkId(1);
    disk.write_wait(write(1, 5, 0, vec![1; 5000])).unwrap();
    disk.doubt(&doubt(1, 5, 0..100)).unwrap();
    // Another member may have grown by this one.
    disk.doubt(&doubt(1, 5, 3 << 20..(3 << 20) + 10)).unwrap();
    assert_eq!(disk.close_marks(&[chunk], LeaseId(5)), Ok(vec![chunk]));
    drop((store, disk));
    let (_store, disk) = open(&memory.power_loss(1));
    assert_eq!(disk.close_marks(&[chunk], LeaseId(5)), Ok(vec![chunk]));
    // The next writer's clean end is none for the one before.
    disk.write_wait(write(1, 6, 0, vec![2; 100])).unwrap();
    assert_eq!(disk.close_marks(&[chunk], LeaseId(6)), Ok(vec![chunk]));
    let sealed = disk.seal(chunk, GROUP, LeaseId(7)).unwrap();
    let blocks: Vec<u32> = sealed.touched.iter().map(|touched| touched.block).collect();
    assert_eq!(
        blocks,
        [0..256, 768..1024]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
    );
    // A late failure of what was sealed changes nothing.
    disk.doubt(&doubt(1, 6, 0..100)).unwrap();
    assert_eq!(disk.close_marks(&[chunk], LeaseId(7)), Ok(vec![]));
    let entry = disk.entry(chunk).unwrap();
    assert!(entry.open.is_none() && !entry.is_in_doubt());
}

#[test]
fn settling_ends_the_doubt_and_an_absent_copy_can_be_in_doubt_too() {
    let (_store, disk) = open(&CrashDisk::new());
    let chunk = ChunkId(1);
    disk.doubt(&doubt(1, 5, 0..100)).unwrap();
    assert_eq!(disk.entry(chunk), None);
    assert_eq!(disk.close_marks(&[chunk], LeaseId(5)), Ok(vec![chunk]));
    assert!(!disk.seal(chunk, GROUP, LeaseId(7)).unwrap().exists);
    disk.settle_blocks(&SettleOp {
        chunk,
        group: GROUP,
        inode: InodeId(1001),
        lease: LeaseId(7),
        epoch: Epoch(3),
        runs: vec![(0, vec![9; 100].into())],
        length: 100,
        clear_open: true,
    })
    .unwrap();
    let entry = disk.entry(chunk).unwrap();
    assert!(entry.open.is_none() && !entry.is_in_doubt());
    same(&content(&disk, 1).unwrap(), &[9; 100]);
}
