//! Taking a copy over from another member while writes to it go on.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use hither_chunkstore::{BaseCopy, Disk, Error, WriteOp};
use hither_log::crash::CrashDisk;
use hither_proto::ids::{ChainNumber, ChunkId, Epoch, InodeId, LeaseId};
use proptest::prelude::*;

use support::{GROUP, content, open, pattern, same, write};

const CHUNK: ChunkId = ChunkId(1);
const EPOCH: Epoch = Epoch(3);

fn begin(disk: &Disk, epoch: u64) -> Result<(), Error> {
    disk.fill_begin(CHUNK, GROUP, InodeId(9), Epoch(epoch))
}

fn base(length: u32, lease: u64) -> BaseCopy {
    BaseCopy {
        lease: LeaseId(lease),
        length,
        inode: InodeId(9),
        changed_epoch: Epoch(2),
        open: false,
    }
}

fn chain_write(epoch: u64, offset: u32, bytes: Vec<u8>) -> WriteOp {
    WriteOp {
        may_create: false,
        filling: true,
        epoch: Epoch(epoch),
        ..write(1, 5, offset, bytes)
    }
}

#[test]
fn the_base_goes_only_where_no_write_has_been() {
    let memory = CrashDisk::new();
    let (store, disk) = open(&memory);
    let mut expected = pattern(1, 1, 0, 300_000);
    let new = pattern(1, 2, 100_000, 70_000);
    disk.write_wait(chain_write(3, 100_000, new.clone()))
        .unwrap();
    disk.write_wait(chain_write(3, 10, vec![7; 5])).unwrap();
    assert_eq!(content(&disk, 1), Err(Error::Incomplete(CHUNK)));
    assert_eq!(disk.partial(GROUP), [CHUNK]);
    begin(&disk, 3).unwrap();
    disk.fill_base(CHUNK, 0, &expected[..150_000].to_vec().into(), EPOCH)
        .unwrap();
    disk.fill_base(CHUNK, 150_000, &expected[150_000..].to_vec().into(), EPOCH)
        .unwrap();
    let past_end = pattern(1, 4, 310_000, 10);
    disk.write_wait(chain_write(3, 310_000, past_end.clone()))
        .unwrap();
    disk.fill_end(CHUNK, &base(300_000, 4), EPOCH).unwrap();
    expected[100_000..170_000].copy_from_slice(&new);
    expected[10..15].fill(7);
    expected.resize(310_000, 0);
    expected.extend_from_slice(&past_end);
    same(&content(&disk, 1).unwrap(), &expected);
    let entry = disk.entry(CHUNK).unwrap();
    assert_eq!((entry.lease, entry.inode), (LeaseId(5), InodeId(9)));
    assert!(entry.open.is_some() && disk.partial(GROUP).is_empty());
    // From now on it is like any other in this epoch.
    disk.write_wait(chain_write(3, 0, vec![8; 3])).unwrap();
    expected[..3].fill(8);
    same(&content(&disk, 1).unwrap(), &expected);
    disk.flush_all().unwrap();
    drop((store, disk));
    let (_store, disk) = open(&memory.power_loss(5));
    same(&content(&disk, 1).unwrap(), &expected);
}

#[test]
fn a_stale_copy_becomes_that_of_the_other_member() {
    let (_store, disk) = open(&CrashDisk::new());
    disk.write_wait(write(1, 2, 0, pattern(1, 9, 0, 200_000)))
        .unwrap();
    begin(&disk, 3).unwrap();
    let good = pattern(1, 1, 0, 120_000);
    disk.fill_base(CHUNK, 0, &good.clone().into(), EPOCH)
        .unwrap();
    disk.fill_end(CHUNK, &base(120_000, 7), EPOCH).unwrap();
    same(&content(&disk, 1).unwrap(), &good);
    let entry = disk.entry(CHUNK).unwrap();
    assert_eq!(
        (entry.lease, entry.chain, entry.open),
        (LeaseId(7), ChainNumber(0), None)
    );
}

/// The file was cut while this member was away, and written again further on while it fills: between
/// the two there is nothing but zeros.
#[test]
fn behind_the_base_nothing_of_a_stale_copy_is_left() {
    let memory = CrashDisk::new();
    let (store, disk) = open(&memory);
    disk.write_wait(write(1, 2, 0, pattern(1, 9, 0, 200_000)))
        .unwrap();
    disk.write_wait(write(1, 2, 90_000, vec![5; 100])).unwrap();
    disk.write_wait(chain_write(3, 150_000, vec![7; 1000]))
        .unwrap();
    begin(&disk, 3).unwrap();
    disk.write_wait(chain_write(3, 160_000, vec![8; 1000]))
        .unwrap();
    let good = pattern(1, 1, 0, 80_000);
    disk.fill_base(CHUNK, 0, &good.clone().into(), EPOCH)
        .unwrap();
    disk.fill_end(CHUNK, &base(80_000, 4), EPOCH).unwrap();
    let mut expected = good;
    expected.resize(161_000, 0);
    expected[150_000..151_000].fill(7);
    expected[160_000..].fill(8);
    same(&content(&disk, 1).unwrap(), &expected);
    disk.flush_all().unwrap();
    drop((store, disk));
    for seed in 0..10 {
        let (_store, disk) = open(&memory.power_loss(seed));
        same(&content(&disk, 1).unwrap(), &expected);
    }
}

#[test]
fn writes_of_an_older_epoch_do_not_keep_the_base_out() {
    let (_store, disk) = open(&CrashDisk::new());
    disk.write_wait(chain_write(3, 0, vec![1; 100])).unwrap();
    // The member was away, and what it has of epoch 3 may have been overwritten elsewhere.
    begin(&disk, 5).unwrap();
    disk.write_wait(chain_write(5, 50, vec![2; 10])).unwrap();
    disk.fill_base(CHUNK, 0, &vec![9; 100].into(), Epoch(5))
        .unwrap();
    disk.fill_end(CHUNK, &base(100, 5), Epoch(5)).unwrap();
    let mut expected = vec![9; 100];
    expected[50..60].fill(2);
    same(&content(&disk, 1).unwrap(), &expected);
}

/// A filling that is still under way when the group goes on to its next epoch puts nothing down.
#[test]
fn a_filling_of_an_older_epoch_has_ended() {
    let (_store, disk) = open(&CrashDisk::new());
    begin(&disk, 3).unwrap();
    disk.fill_base(CHUNK, 0, &vec![1; 100].into(), EPOCH)
        .unwrap();
    begin(&disk, 4).unwrap();
    let late = disk.fill_base(CHUNK, 0, &vec![9; 100].into(), EPOCH);
    assert!(matches!(late, Err(Error::BadRequest(_))), "{late:?}");
    let late = disk.fill_end(CHUNK, &base(100, 5), EPOCH);
    assert!(matches!(late, Err(Error::BadRequest(_))), "{late:?}");
    assert!(matches!(begin(&disk, 3), Err(Error::BadRequest(_))));
    disk.fill_base(CHUNK, 0, &vec![2; 100].into(), Epoch(4))
        .unwrap();
    disk.fill_end(CHUNK, &base(100, 5), Epoch(4)).unwrap();
    same(&content(&disk, 1).unwrap(), &[2; 100]);
    let late = disk.fill_base(CHUNK, 0, &vec![9; 100].into(), Epoch(4));
    assert!(matches!(late, Err(Error::BadRequest(_))), "{late:?}");
}

#[test]
fn filling_afresh_keeps_nothing() {
    let (_store, disk) = open(&CrashDisk::new());
    disk.write_wait(chain_write(3, 0, vec![1; 100])).unwrap();
    disk.refill_begin(CHUNK, GROUP, InodeId(9), EPOCH).unwrap();
    disk.fill_base(CHUNK, 0, &vec![9; 60].into(), EPOCH)
        .unwrap();
    disk.fill_end(CHUNK, &base(60, 6), EPOCH).unwrap();
    same(&content(&disk, 1).unwrap(), &[9; 60]);
}

#[test]
fn a_partial_copy_is_still_partial_after_a_crash() {
    let memory = CrashDisk::new();
    let (store, disk) = open(&memory);
    begin(&disk, 3).unwrap();
    disk.fill_base(CHUNK, 0, &pattern(1, 1, 0, 200_000).into(), EPOCH)
        .unwrap();
    disk.flush_wait(&[CHUNK]).unwrap();
    drop((store, disk));
    for seed in 0..10 {
        let (_store, disk) = open(&memory.power_loss(seed));
        assert_eq!(content(&disk, 1), Err(Error::Incomplete(CHUNK)));
        assert_eq!(disk.partial(GROUP), [CHUNK]);
        begin(&disk, 9).unwrap();
        disk.fill_base(CHUNK, 0, &vec![3; 1000].into(), Epoch(9))
            .unwrap();
        disk.fill_end(CHUNK, &base(1000, 3), Epoch(9)).unwrap();
        same(&content(&disk, 1).unwrap(), &[3; 1000]);
    }
}

#[test]
fn a_discarded_copy_may_come_again_under_a_later_lease() {
    let memory = CrashDisk::new();
    let (store, disk) = open(&memory);
    disk.write_wait(write(1, 5, 0, vec![1; 100_000])).unwrap();
    disk.discard(CHUNK).unwrap();
    disk.discard(CHUNK).unwrap();
    disk.discard(ChunkId(77)).unwrap();
    assert_eq!(content(&disk, 1), Err(Error::NoSuchChunk(CHUNK)));
    drop((store, disk));
    let (_store, disk) = open(&memory.power_loss(2));
    assert_eq!(content(&disk, 1), Err(Error::NoSuchChunk(CHUNK)));
    let old = disk.write_wait(write(1, 4, 0, vec![1; 10]));
    assert!(matches!(old, Err(Error::StaleLease { .. })), "{old:?}");
    disk.write_wait(write(1, 6, 5, vec![2; 10])).unwrap();
    let mut expected = vec![0; 5];
    expected.extend([2; 10]);
    same(&content(&disk, 1).unwrap(), &expected);
}

#[test]
fn a_deleted_chunk_is_not_filled() {
    let (_store, disk) = open(&CrashDisk::new());
    disk.delete(&[CHUNK]).unwrap();
    assert_eq!(begin(&disk, 3), Err(Error::Deleted(CHUNK)));
    assert_eq!(
        disk.write_wait(chain_write(3, 0, vec![1])),
        Err(Error::Deleted(CHUNK))
    );
}

#[test]
fn a_verified_copy_takes_writes_as_it_is() {
    let (_store, disk) = open(&CrashDisk::new());
    disk.write_wait(write(1, 5, 0, vec![1; 100])).unwrap();
    let seen = disk.entry(CHUNK).unwrap();
    assert!(disk.mark_verified(CHUNK, &seen, EPOCH));
    disk.write_wait(chain_write(3, 0, vec![2; 10])).unwrap();
    assert_eq!(content(&disk, 1).unwrap()[..10], [2; 10]);
    assert!(
        !disk.mark_verified(CHUNK, &seen, Epoch(4)),
        "it changed since"
    );
    // In the next epoch it counts as possibly stale again.
    disk.write_wait(chain_write(4, 0, vec![3; 10])).unwrap();
    assert_eq!(content(&disk, 1), Err(Error::Incomplete(CHUNK)));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Pieces of the base and chain writes in any order, over whatever was here before: the writes
    /// win, and of the old copy nothing is left.
    #[test]
    fn any_order_of_base_and_writes(
        old in 0usize..600_000,
        length in 1u32..300_000,
        steps in prop::collection::vec((any::<bool>(), 0u32..500_000, 1u32..120_000), 0..25),
    ) {
        let (_store, disk) = open(&CrashDisk::new());
        if old > 0 {
            disk.write_wait(write(1, 2, 0, pattern(1, 99, 0, old))).unwrap();
        }
        begin(&disk, 3).unwrap();
        let theirs = pattern(1, 0, 0, length as usize);
        let mut expected = theirs.clone();
        for (version, (chain, offset, size)) in (1u64..).zip(steps) {
            if chain {
                let bytes = pattern(1, version, offset, size as usize);
                let op = WriteOp { chain: ChainNumber(1), ..chain_write(3, offset, bytes.clone()) };
                disk.write_wait(op).unwrap();
                let end = (offset + size) as usize;
                expected.resize(expected.len().max(end), 0);
                expected[offset as usize..end].copy_from_slice(&bytes);
            } else {
                let range = offset.min(length) as usize..(offset + size).min(length) as usize;
                disk.fill_base(CHUNK, offset.min(length), &theirs[range].to_vec().into(), EPOCH).unwrap();
            }
        }
        for start in (0..length).step_by(100_000) {
            let range = start as usize..(start + 100_000).min(length) as usize;
            disk.fill_base(CHUNK, start, &theirs[range].to_vec().into(), EPOCH).unwrap();
        }
        disk.fill_end(CHUNK, &base(length, 1), EPOCH).unwrap();
        same(&content(&disk, 1).unwrap(), &expected);
    }
}
