//! Members lose their power while writers go on; then the whole group does.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use hither_chunkserver::ChunkServer;
use hither_chunkstore::{Medium, Probe, Space};
use hither_log::crash::CrashDisk;
use hither_net::NetError;
use hither_proto::chunk::{Seal, SealReply, Settle, Write};
use hither_proto::kind::Kind;
use hither_proto::map::MemberState::{Filling, InSync, Lagging};
use hither_proto::status::Status;
use parking_lot::Mutex;
use tokio::sync::watch;

use support::{Client, Cluster, Put, WAIT, pattern, put, same};

#[derive(Debug)]
struct Plenty;

impl Probe for Plenty {
    fn space(&self) -> io::Result<Space> {
        Ok(Space {
            total_bytes: 1 << 40,
            free_bytes: 1 << 39,
        })
    }
}

/// Servers on disks that forget what was not synced.
struct Powered {
    cluster: Cluster,
    disks: BTreeMap<u64, CrashDisk>,
}

impl Powered {
    async fn start(count: u64) -> Self {
        let cluster = Cluster::adjusted(0, |config| {
            config.log_segment_bytes = 256 << 10;
            config.log_segments_max = 6;
            config.overlay_bytes_max = 1 << 20;
            config.disk_threads = 2;
            config.link_timeout_ms = 3000;
        })
        .await;
        let mut powered = Self {
            cluster,
            disks: BTreeMap::new(),
        };
        for id in 1..=count {
            powered.disks.insert(id, CrashDisk::new());
            powered.up(id).await;
        }
        let members: Vec<_> = (1..=count).map(|id| (id, InSync)).collect();
        powered.cluster.manager.set_group(&members, 1);
        powered
    }

    async fn up(&mut self, id: u64) {
        let medium = Medium {
            path: format!("memory {id}"),
            dir: self.disks[&id].root(),
            probe: Arc::new(Plenty),
        };
        let server = ChunkServer::start_on(self.cluster.config(id), vec![medium]).await;
        let server = server.unwrap_or_else(|error| panic!("server {id}: {error}"));
        assert_eq!(server.id().0, id);
        self.cluster.servers.insert(id, server);
    }

    /// The power of a server goes: nothing reaches its disk any more.
    fn down(&mut self, id: u64, seed: u64) {
        let disk = &self.disks[&id];
        disk.stop_at(disk.steps() + 1);
        let after = disk.power_loss(seed);
        drop(self.cluster.servers.remove(&id));
        self.disks.insert(id, after);
    }

    fn states(&self) -> BTreeMap<u64, i32> {
        let map = self.cluster.manager.map();
        let members = map.groups[0].members.iter();
        members
            .map(|member| (member.server, member.state))
            .collect()
    }
}

/// Writes until it is taken, along the chain of the newest map; `false` when told to stop.
async fn write_until_taken(
    cluster: &Client,
    wanted: &Put,
    chain_number: &AtomicU32,
    stop: &AtomicBool,
) -> bool {
    while !stop.load(Ordering::Relaxed) {
        let map = cluster.map();
        let in_state = |state: i32| {
            let members = map.groups[0].members.iter();
            members.filter(move |m| m.state == state).map(|m| m.server)
        };
        let chain: Vec<u64> = in_state(InSync.into())
            .chain(in_state(Filling.into()))
            .collect();
        let write = Write {
            target: Some(cluster.target(wanted.chunk, wanted.lease)),
            offset: wanted.offset,
            checksums: hither_proto::checksum::piece_checksums(wanted.offset, &wanted.bytes),
            rest: cluster.hops(&chain[1..]),
            may_create: true,
            session: wanted.session,
            inode: wanted.chunk + 100,
            sync: wanted.sync,
            chain_number: chain_number.load(Ordering::Relaxed),
        };
        match cluster.send(chain[0], &write, wanted.bytes.clone()).await {
            Ok(_) => return true,
            Err(NetError::Refused { status, failure }) => {
                let passing = [
                    Status::STALE_EPOCH,
                    Status::RETRY,
                    Status::NOT_MINE,
                    Status::BROKEN_LINK,
                    Status::DISK_FAILED,
                    Status::BUSY,
                ];
                assert!(passing.contains(&status), "{status}: {}", failure.text);
            }
            Err(_) => {}
        }
        chain_number.fetch_add(1, Ordering::Relaxed);
        // Answered as soon as the servers know the map, or one is up again.
        tokio::task::yield_now().await;
    }
    false
}

/// Waits until so many more writes were acknowledged.
async fn until_written(written: &watch::Sender<u64>, more: u64) {
    let mut written = written.subscribe();
    let wanted = *written.borrow() + more;
    let wait = written.wait_for(|count| *count >= wanted);
    let waited = tokio::time::timeout(WAIT, wait).await;
    waited.expect("writes go on").expect("there are writers");
}

type Contents = Arc<Mutex<BTreeMap<u64, Vec<u8>>>>;

fn apply(contents: &Contents, wanted: &Put) {
    let mut contents = contents.lock();
    let copy = contents.entry(wanted.chunk).or_default();
    let end = wanted.offset as usize + wanted.bytes.len();
    copy.resize(copy.len().max(end), 0);
    copy[wanted.offset as usize..end].copy_from_slice(&wanted.bytes);
}

fn random_put(chunk: u64, version: u64) -> Put {
    let mixed = (version * 8 + chunk).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    let offset = u32::try_from(mixed % 150_000).unwrap();
    let length = match mixed % 4 {
        0 => 65_536 + mixed % 50_000,
        1 => 4096,
        _ => mixed % 9000 + 1,
    };
    Put {
        sync: mixed.is_multiple_of(3),
        ..put(chunk, 1, version, offset, usize::try_from(length).unwrap())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_lose_power_one_after_the_other_and_no_acknowledged_byte_is_lost() {
    let mut powered = Powered::start(3).await;
    let stop = Arc::new(AtomicBool::new(false));
    let contents: Contents = Arc::default();
    // A client of its own: it lives on while servers change.
    let outside = Arc::new(powered.cluster.beside());
    let written = Arc::new(watch::channel(0).0);
    let mut writers = Vec::new();
    for chunk in 1..=4u64 {
        let written = Arc::clone(&written);
        let (stop, contents) = (Arc::clone(&stop), Arc::clone(&contents));
        let outside = Arc::clone(&outside);
        writers.push(tokio::spawn(async move {
            let chain_number = AtomicU32::new(1);
            let mut version = 1;
            let never = AtomicBool::new(false);
            while !stop.load(Ordering::Relaxed) {
                let wanted = random_put(chunk, version);
                // Once begun, it is written until it is taken: what was tried may be anywhere.
                assert!(write_until_taken(&outside, &wanted, &chain_number, &never).await);
                apply(&contents, &wanted);
                written.send_modify(|count| *count += 1);
                version += 1;
            }
            version
        }));
    }
    for round in 0..8u64 {
        let victim = round % 3 + 1;
        until_written(&written, 40).await;
        powered.down(victim, round);
        let mut members: Vec<_> = [1, 2, 3].map(|id| (id, InSync)).to_vec();
        for member in &mut members {
            if member.0 == victim {
                member.1 = Lagging;
            }
        }
        powered.cluster.manager.set_group(&members, 1);
        until_written(&written, 12).await;
        powered.up(victim).await;
        for member in &mut members {
            if member.0 == victim {
                member.1 = Filling;
            }
        }
        powered.cluster.manager.set_group(&members, 1);
        powered.cluster.manager.until_in_sync(victim).await;
    }
    stop.store(true, Ordering::Relaxed);
    for writer in writers {
        assert!(writer.await.unwrap() > 5);
    }
    assert!(
        powered
            .states()
            .values()
            .all(|state| *state == i32::from(InSync))
    );
    let contents = contents.lock().clone();
    for (chunk, expected) in &contents {
        for id in 1..=3 {
            same(
                &powered.cluster.content(id, *chunk).await.unwrap(),
                expected,
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_whole_group_loses_power_and_what_was_stable_is_there_and_equal() {
    for seed in 0..6u64 {
        let mut powered = Powered::start(2).await;
        let mut stable: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        for chunk in 1..=3u64 {
            let first = put(chunk, 1, 1, 0, 150_000);
            powered.cluster.write(&[1, 2], first.clone()).await.unwrap();
            powered.cluster.flush(&[1, 2], &[chunk]).await.unwrap();
            let contents: Contents = Arc::default();
            apply(&contents, &first);
            let small = Put {
                sync: true,
                ..put(chunk, 1, 2, 5000, 3000)
            };
            powered.cluster.write(&[1, 2], small.clone()).await.unwrap();
            apply(&contents, &small);
            stable.insert(chunk, contents.lock()[&chunk].clone());
            // Not stable, and behind what is: any part of it may survive on either side.
            for (version, length) in [(3, 100_000), (4, 2000)] {
                let late = put(chunk, 1, version, 150_000, length);
                powered.cluster.write(&[1, 2], late).await.unwrap();
            }
        }
        powered.down(1, seed * 2);
        powered.down(2, seed * 2 + 1);
        powered.up(1).await;
        powered.up(2).await;
        powered
            .cluster
            .manager
            .set_group(&[(1, InSync), (2, InSync)], 1);
        for (chunk, stable) in &stable {
            settle(&powered.cluster, *chunk).await;
            let one = powered.cluster.content(1, *chunk).await.unwrap();
            same(&one, &powered.cluster.content(2, *chunk).await.unwrap());
            same(&one[..stable.len()], stable);
            let late = pattern(*chunk, 3, 150_000, 100_000);
            let later = pattern(*chunk, 4, 150_000, 2000);
            for (at, byte) in one[150_000..].iter().enumerate() {
                let allowed = [0, late[at], later.get(at).copied().unwrap_or(0)];
                assert!(
                    allowed.contains(byte),
                    "seed {seed} chunk {chunk} byte {at}"
                );
            }
        }
    }
}

/// As a metadata server does: all members are made equal to the one that saw most.
async fn settle(cluster: &Cluster, chunk: u64) {
    let seal = Seal {
        target: Some(cluster.target(chunk, 9)),
    };
    let mut states: Vec<(u64, SealReply)> = Vec::new();
    for id in [1, 2] {
        let reply = cluster.call(id, Kind::CHUNK_SEAL, &seal).await.unwrap();
        states.push((id, reply.decode().unwrap()));
    }
    assert!(
        states
            .iter()
            .all(|(_, state)| state.exists && !state.touched.is_empty())
    );
    let longest = states
        .iter()
        .max_by_key(|(_, state)| state.copy_length)
        .unwrap();
    let sums = |state: &SealReply| -> BTreeMap<u32, u32> {
        let touched = state.touched.iter();
        touched
            .map(|touched| (touched.block, touched.checksum))
            .collect()
    };
    let (source, length) = (longest.0, longest.1.copy_length);
    let theirs = sums(&longest.1);
    for (id, state) in &states {
        let own = sums(state);
        let blocks = theirs.iter().chain(&own).map(|(block, _)| *block);
        let settle = Settle {
            target: Some(cluster.target(chunk, 9)),
            source: cluster.hops(&[source]).pop(),
            blocks: blocks
                .filter(|block| theirs.get(block) != own.get(block))
                .collect(),
            length,
        };
        cluster
            .call(*id, Kind::CHUNK_SETTLE, &settle)
            .await
            .unwrap();
    }
}
