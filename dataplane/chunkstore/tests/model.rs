//! Random operations against a plain model in memory, with restarts in between.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::collections::BTreeMap;

use hither_chunkstore::{Disk, Error, SettleOp, Store, TrimOp, WriteOp};
use hither_log::crash::CrashDisk;
use hither_proto::ids::{ChainNumber, ChunkId, Epoch, InodeId, LeaseId};
use proptest::prelude::*;

use support::{GROUP, content, open, pattern, read, same, synced, write};

#[derive(Debug, Clone)]
enum Op {
    Write {
        chunk: u64,
        offset: u32,
        length: u32,
        sync: bool,
    },
    Trim {
        chunk: u64,
        offset: u32,
        length: u32,
    },
    Read {
        chunk: u64,
        offset: u32,
        length: u32,
    },
    Settle {
        chunk: u64,
        block: u32,
        length: u32,
    },
    Seal {
        chunk: u64,
    },
    Close {
        chunk: u64,
    },
    Delete {
        chunk: u64,
    },
    Flush {
        chunk: u64,
    },
    Tidy,
    Restart,
    /// The process is killed, the machine goes on.
    Kill,
}

fn op() -> impl Strategy<Value = Op> {
    let chunk = 1u64..4;
    let offset = prop_oneof![
        0u32..300_000,
        (0u32..70).prop_map(|block| block * 4096),
        Just(1_048_000)
    ];
    let length = prop_oneof![4 => 1u32..9_000, 2 => 60_000u32..200_000, 1 => (1u32..40).prop_map(|blocks| blocks * 4096)];
    prop_oneof![
        12 => (chunk.clone(), offset.clone(), length.clone(), any::<bool>()).prop_map(|(chunk, offset, length, sync)| Op::Write { chunk, offset, length, sync }),
        2 => (chunk.clone(), offset.clone(), prop_oneof![Just(0u32), length.clone()]).prop_map(|(chunk, offset, length)| Op::Trim { chunk, offset, length }),
        6 => (chunk.clone(), offset, length).prop_map(|(chunk, offset, length)| Op::Read { chunk, offset, length }),
        1 => (chunk.clone(), 0u32..80, 0u32..330_000).prop_map(|(chunk, block, length)| Op::Settle { chunk, block, length }),
        1 => chunk.clone().prop_map(|chunk| Op::Seal { chunk }),
        1 => chunk.clone().prop_map(|chunk| Op::Close { chunk }),
        1 => (1u64..40).prop_map(|chunk| Op::Delete { chunk }),
        2 => chunk.prop_map(|chunk| Op::Flush { chunk }),
        2 => Just(Op::Tidy),
        1 => Just(Op::Restart),
        1 => Just(Op::Kill),
    ]
}

#[derive(Default, Clone)]
struct Copy {
    bytes: Vec<u8>,
    /// What a kill leaves at least.
    stable: Option<Vec<u8>>,
    open: bool,
    deleted: bool,
}

struct Run {
    memory: CrashDisk,
    opened: Option<(Store, Disk)>,
    model: BTreeMap<u64, Copy>,
    lease: u64,
}

impl Run {
    fn disk(&self) -> &Disk {
        &self.opened.as_ref().unwrap().1
    }

    fn apply(&mut self, version: u64, op: &Op) {
        match *op {
            Op::Write {
                chunk,
                offset,
                length,
                sync,
            } => self.write(version, chunk, offset, length, sync),
            Op::Trim {
                chunk,
                offset,
                length,
            } => {
                self.lease += 1;
                let op = TrimOp {
                    chunk: ChunkId(chunk),
                    group: GROUP,
                    lease: LeaseId(self.lease),
                    epoch: Epoch(3),
                    offset,
                    length,
                };
                let copy = self.model.entry(chunk).or_default();
                let outcome = self.opened.as_ref().unwrap().1.trim(&op);
                if copy.deleted {
                    assert_eq!(outcome, Err(Error::Deleted(ChunkId(chunk))));
                    return;
                }
                outcome.unwrap();
                for bytes in std::iter::once(&mut copy.bytes).chain(&mut copy.stable) {
                    if length == 0 {
                        bytes.truncate(offset as usize);
                    } else {
                        let end = (offset + length).min(u32::try_from(bytes.len()).unwrap());
                        bytes[offset.min(end) as usize..end as usize].fill(0);
                    }
                }
            }
            Op::Read {
                chunk,
                offset,
                length,
            } => {
                let copy = self.model.entry(chunk).or_default().clone();
                match read(self.disk(), chunk, offset, length) {
                    Ok(bytes) => {
                        let all = u32::try_from(copy.bytes.len()).unwrap();
                        let range = offset.min(all)..(offset + length).min(all);
                        same(
                            &bytes,
                            &copy.bytes[range.start as usize..range.end as usize],
                        );
                    }
                    Err(error) => {
                        assert_eq!(error, Error::NoSuchChunk(ChunkId(chunk)));
                        assert!(copy.bytes.is_empty());
                    }
                }
            }
            Op::Settle {
                chunk,
                block,
                length,
            } => self.settle(version, chunk, block, length),
            Op::Seal { chunk } => {
                self.lease += 1;
                let copy = self.model.entry(chunk).or_default();
                let sealed = self.opened.as_ref().unwrap().1.seal(
                    ChunkId(chunk),
                    GROUP,
                    LeaseId(self.lease),
                );
                if copy.deleted {
                    assert_eq!(sealed, Err(Error::Deleted(ChunkId(chunk))));
                    return;
                }
                let sealed = sealed.unwrap();
                assert_eq!(sealed.copy_length as usize, copy.bytes.len());
                assert!(!sealed.touched.is_empty() || !copy.open || copy.bytes.is_empty());
                for touched in sealed.touched {
                    let start = touched.block as usize * 4096;
                    let mut bytes = copy.bytes[start..copy.bytes.len().min(start + 4096)].to_vec();
                    bytes.resize(4096, 0);
                    assert_eq!(touched.checksum, hither_proto::checksum::crc32c(&bytes));
                }
            }
            Op::Close { chunk } => {
                self.disk()
                    .close_marks(&[ChunkId(chunk)], LeaseId(self.lease))
                    .unwrap();
                let copy = self.model.entry(chunk).or_default();
                if std::mem::take(&mut copy.open) {
                    copy.stable = Some(copy.bytes.clone());
                }
            }
            Op::Delete { chunk } => {
                self.disk().delete(&[ChunkId(chunk)]).unwrap();
                let copy = self.model.entry(chunk).or_default();
                *copy = Copy {
                    deleted: true,
                    ..Copy::default()
                };
            }
            Op::Flush { chunk } => {
                let copy = self.model.entry(chunk).or_default();
                let flushed = self
                    .opened
                    .as_ref()
                    .unwrap()
                    .1
                    .flush_wait(&[ChunkId(chunk)]);
                flushed.unwrap();
                copy.stable = Some(copy.bytes.clone());
            }
            Op::Tidy => {
                self.disk().tidy().unwrap();
                assert_eq!(self.disk().counters().overlay_bytes, 0);
            }
            Op::Restart => {
                self.opened.as_ref().unwrap().0.close().unwrap();
                self.opened = None;
                self.opened = Some(open(&self.memory));
                self.check();
            }
            Op::Kill => {
                let memory = self.memory.process_death();
                self.opened = None;
                self.memory = memory;
                self.opened = Some(open(&self.memory));
                self.check_after_kill();
            }
        }
    }

    fn write(&mut self, version: u64, chunk: u64, offset: u32, length: u32, sync: bool) {
        self.lease += version % 2;
        let bytes = pattern(chunk, version, offset, length as usize);
        let op = WriteOp {
            chain: ChainNumber(u32::try_from(version).unwrap()),
            ..write(chunk, self.lease, offset, bytes.clone())
        };
        let outcome = self.disk().write_wait(if sync { synced(op) } else { op });
        let copy = self.model.entry(chunk).or_default();
        if copy.deleted {
            assert_eq!(outcome, Err(Error::Deleted(ChunkId(chunk))));
            return;
        }
        outcome.unwrap();
        let end = (offset + length) as usize;
        if copy.bytes.len() < end {
            copy.bytes.resize(end, 0);
        }
        copy.bytes[offset as usize..end].copy_from_slice(&bytes);
        copy.open = true;
        copy.stable = None;
    }

    fn settle(&mut self, version: u64, chunk: u64, block: u32, length: u32) {
        self.lease += 1;
        let bytes = pattern(chunk, version, 0, 4096);
        let op = SettleOp {
            chunk: ChunkId(chunk),
            group: GROUP,
            inode: InodeId(chunk),
            lease: LeaseId(self.lease),
            epoch: Epoch(3),
            runs: vec![(block, bytes.clone().into())],
            length: length.max(block * 4096 + 4096),
            clear_open: true,
        };
        let outcome = self.disk().settle_blocks(&op);
        let copy = self.model.entry(chunk).or_default();
        if copy.deleted {
            assert_eq!(outcome, Err(Error::Deleted(ChunkId(chunk))));
            return;
        }
        outcome.unwrap();
        copy.bytes.resize(op.length as usize, 0);
        let start = block as usize * 4096;
        copy.bytes[start..start + 4096].copy_from_slice(&bytes);
        copy.open = false;
        copy.stable = Some(copy.bytes.clone());
    }

    fn check(&self) {
        for (chunk, copy) in &self.model {
            match content(self.disk(), *chunk) {
                Ok(bytes) => same(&bytes, &copy.bytes),
                Err(error) => {
                    assert_eq!(error, Error::NoSuchChunk(ChunkId(*chunk)));
                    assert!(copy.bytes.is_empty());
                }
            }
            let entry = self.disk().entry(ChunkId(*chunk));
            assert_eq!(entry.is_some_and(|entry| entry.open.is_some()), copy.open);
        }
    }

    /// Only what was stable is sure to be there: the rest of the model is taken as it is found.
    fn check_after_kill(&mut self) {
        let chunks: Vec<u64> = self.model.keys().copied().collect();
        for chunk in chunks {
            let found = content(self.disk(), chunk);
            let open = self
                .disk()
                .entry(ChunkId(chunk))
                .is_some_and(|entry| entry.open.is_some());
            let copy = self.model.get_mut(&chunk).unwrap();
            if copy.deleted {
                assert_eq!(found, Err(Error::NoSuchChunk(ChunkId(chunk))));
                continue;
            }
            let found = found.unwrap_or_default();
            if let Some(stable) = &copy.stable {
                same(&found, stable);
            }
            copy.bytes = found.to_vec();
            copy.open = open;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, max_shrink_iters: 400, ..ProptestConfig::default() })]

    #[test]
    fn as_the_model(ops in prop::collection::vec(op(), 1..60)) {
        let memory = CrashDisk::new();
        let opened = Some(open(&memory));
        let mut run = Run { memory, opened, model: BTreeMap::new(), lease: 1 };
        for (version, op) in ops.iter().enumerate() {
            run.apply(version as u64 + 1, op);
        }
        run.check();
    }
}
