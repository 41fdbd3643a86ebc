//! A manager of few words, chunkservers around it, and a client.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "not every test uses everything"
)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hither_chunkserver::{ChunkServer, ChunkServerConfig};
use hither_clustermap::{ClusterView, delta_between, snapshot_of};
use hither_net::{
    Connection, Handler, Identity, Incoming, Listener, NetError, NoHandler, Pool, Reply, Responder,
};
use hither_proto::checksum::{piece_checksums, pieces_match};
use hither_proto::chunk::{Applied, Flush, Hop, Read, ReadReply, Target, Write};
use hither_proto::common::Role;
use hither_proto::kind::Kind;
use hither_proto::manager::{Heartbeat, HeartbeatReply, MapFetch};
use hither_proto::map::{ClusterMap, Group, Member, MemberState};
use hither_proto::status::Status;
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::watch;

pub(crate) const GROUP: u32 = 7;
pub(crate) const WAIT: Duration = Duration::from_secs(20);
pub(crate) const CLUSTER: &[u8] = b"test cluster";

/// Answers heartbeats, keeps a map, and makes filling members in-sync when they say they are.
pub(crate) struct FakeManager {
    state: Mutex<State>,
    changed: watch::Sender<u64>,
    /// How often each server has said that it lives.
    beats: watch::Sender<BTreeMap<u64, u64>>,
}

struct State {
    map: ClusterMap,
    next_server: u64,
    followers: Vec<Arc<Connection>>,
    /// Changes are kept to fetches.
    silent: bool,
    /// Reports of filling members change the group.
    promotes: bool,
    duplicates: Vec<u64>,
    reports: u64,
}

impl FakeManager {
    pub(crate) async fn start() -> (Arc<Self>, Listener, String) {
        let manager = Arc::new(Self {
            state: Mutex::new(State {
                map: ClusterMap {
                    cluster_id: Bytes::from_static(CLUSTER),
                    version: 1,
                    ..ClusterMap::default()
                },
                next_server: 1,
                followers: Vec::new(),
                silent: false,
                promotes: true,
                duplicates: Vec::new(),
                reports: 0,
            }),
            changed: watch::channel(1).0,
            beats: watch::channel(BTreeMap::new()).0,
        });
        let identity = Identity {
            role: Role::Manager,
            cluster_id: Bytes::from_static(CLUSTER),
            ..Identity::default()
        };
        let listener = Listener::bind(
            "127.0.0.1:0",
            identity,
            Arc::new(Served(Arc::clone(&manager))),
        )
        .await
        .unwrap();
        let address = listener.address().to_string();
        manager.change(|map| map.managers = vec![address.clone()]);
        (manager, listener, address)
    }

    /// Changes the map and tells everybody.
    pub(crate) fn change(&self, change: impl FnOnce(&mut ClusterMap)) -> u64 {
        let mut state = self.state.lock();
        let before = ClusterView::from_snapshot(&state.map);
        change(&mut state.map);
        state.map.version += 1;
        let after = ClusterView::from_snapshot(&state.map);
        let delta = delta_between(&before, &after);
        if !state.silent {
            for follower in &state.followers {
                let _ = follower.push(Kind::MAP_PUSH, &delta);
            }
        }
        let version = state.map.version;
        drop(state);
        self.changed.send_replace(version);
        version
    }

    pub(crate) fn silent(&self, silent: bool) {
        self.state.lock().silent = silent;
    }

    pub(crate) fn promotes(&self, promotes: bool) {
        self.state.lock().promotes = promotes;
    }

    pub(crate) fn reports(&self) -> u64 {
        self.state.lock().reports
    }

    pub(crate) fn declare_duplicate(&self, server: u64) {
        self.state.lock().duplicates.push(server);
    }

    /// Sets the members of the group; the epoch rises.
    pub(crate) fn set_group(&self, members: &[(u64, MemberState)], min_write_copies: u32) -> u64 {
        self.change(|map| {
            let epoch = map.groups.first().map_or(1, |group| group.epoch + 1);
            let members = members.iter().map(|(server, state)| Member {
                server: *server,
                disk: 0,
                state: (*state).into(),
            });
            map.groups = vec![Group {
                id: GROUP,
                epoch,
                members: members.collect(),
                definition: 1,
                min_write_copies,
            }];
        });
        self.epoch()
    }

    pub(crate) fn map(&self) -> ClusterMap {
        self.state.lock().map.clone()
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.state.lock().map.groups[0].epoch
    }

    /// Waits until the map is as wanted.
    pub(crate) async fn until(&self, wanted: impl Fn(&ClusterMap) -> bool) {
        let mut changed = self.changed.subscribe();
        let wait = async {
            while !wanted(&self.map()) {
                changed.changed().await.unwrap();
            }
        };
        tokio::time::timeout(WAIT, wait)
            .await
            .expect("the map becomes as wanted");
    }

    pub(crate) async fn until_in_sync(&self, server: u64) {
        let in_sync = i32::from(MemberState::InSync);
        self.until(|map| {
            map.groups[0]
                .members
                .iter()
                .any(|member| member.server == server && member.state == in_sync)
        })
        .await;
    }

    /// Waits for a heartbeat that was begun after this call, and for what it says to be done.
    pub(crate) async fn until_beat(&self, server: u64) {
        let mut beats = self.beats.subscribe();
        let seen = |beats: &BTreeMap<u64, u64>| beats.get(&server).copied().unwrap_or(0);
        // One may be under way.
        let wanted = seen(&beats.borrow()) + 2;
        let wait = beats.wait_for(|beats| seen(beats) >= wanted);
        tokio::time::timeout(WAIT, wait)
            .await
            .expect("the server beats")
            .expect("the manager lives");
    }

    fn beat(&self, beat: &Heartbeat, responder: Responder) {
        let mut description = beat.description.clone().unwrap_or_default();
        let (id, known) = {
            let mut state = self.state.lock();
            let id = match beat.server {
                0 => {
                    state.next_server += 1;
                    state.next_server - 1
                }
                id => id,
            };
            if state.duplicates.contains(&id) {
                return responder.ok(&HeartbeatReply {
                    server: id,
                    duplicate: true,
                    ..HeartbeatReply::default()
                });
            }
            description.id = id;
            for disk in &mut description.disks {
                disk.free_bytes = 0;
            }
            (id, state.map.chunkservers.contains(&description))
        };
        if !known {
            self.change(|map| {
                map.chunkservers.retain(|server| server.id != id);
                map.chunkservers.push(description);
            });
        }
        for report in beat.reports.iter().filter(|report| report.caught_up) {
            let due = {
                let mut state = self.state.lock();
                state.reports += 1;
                let group = &state.map.groups[0];
                let filling = i32::from(MemberState::Filling);
                state.promotes
                    && group.epoch == report.epoch
                    && group
                        .members
                        .iter()
                        .any(|m| m.server == id && m.state == filling)
            };
            if due {
                self.change(|map| {
                    let group = &mut map.groups[0];
                    group.epoch += 1;
                    for member in &mut group.members {
                        if member.server == id {
                            member.state = MemberState::InSync.into();
                        }
                    }
                });
            }
        }
        self.beats
            .send_modify(|beats| *beats.entry(id).or_default() += 1);
        responder.ok(&HeartbeatReply {
            server: id,
            map_version: self.map().version,
            interval_ms: 100,
            duplicate: false,
        });
    }
}

struct Served(Arc<FakeManager>);

impl Handler for Served {
    fn request(&self, connection: &Arc<Connection>, incoming: Incoming, responder: Responder) {
        match incoming.header.kind {
            Kind::HEARTBEAT => self.0.beat(&incoming.decode().unwrap(), responder),
            Kind::MAP_FETCH | Kind::MAP_SUBSCRIBE => {
                let _: MapFetch = incoming.decode().unwrap();
                let mut state = self.0.state.lock();
                responder.ok(&snapshot_of(&ClusterView::from_snapshot(&state.map)));
                if incoming.header.kind == Kind::MAP_SUBSCRIBE {
                    state.followers.push(Arc::clone(connection));
                }
            }
            _ => responder.fail(Status::UNSUPPORTED, "not served here"),
        }
    }
}

/// A manager, servers on directories of their own, and a client.
pub(crate) struct Cluster {
    pub(crate) manager: Arc<FakeManager>,
    _listener: Listener,
    manager_address: String,
    temp: tempfile::TempDir,
    pub(crate) servers: BTreeMap<u64, ChunkServer>,
    pub(crate) client: Client,
    /// Changes every server's settings.
    pub(crate) adjust: fn(&mut ChunkServerConfig),
}

impl Cluster {
    /// Starts servers 1 to `count`, all in-sync members of the group.
    pub(crate) async fn start(count: u64) -> Self {
        Self::adjusted(count, |_| {}).await
    }

    pub(crate) async fn adjusted(count: u64, adjust: fn(&mut ChunkServerConfig)) -> Self {
        let (manager, listener, manager_address) = FakeManager::start().await;
        let mut cluster = Self {
            client: Client::new(&manager),
            manager,
            _listener: listener,
            manager_address,
            temp: tempfile::tempdir().unwrap(),
            servers: BTreeMap::new(),
            adjust,
        };
        for number in 1..=count {
            assert_eq!(cluster.start_server(number).await, number);
        }
        let members: Vec<_> = (1..=count).map(|id| (id, MemberState::InSync)).collect();
        cluster.manager.set_group(&members, 1);
        cluster
    }

    /// A client of the same cluster that owns none of its servers.
    pub(crate) fn beside(&self) -> Client {
        Client::new(&self.manager)
    }

    pub(crate) fn config(&self, number: u64) -> ChunkServerConfig {
        let mut config = ChunkServerConfig {
            listen: "127.0.0.1:0".into(),
            disks: vec![self.disk(number)],
            zone: format!("zone{number}"),
            managers: vec![self.manager_address.clone()],
            start_timeout_ms: 10_000,
            beat_ms: 100,
            floor_bytes: 0,
            log_segment_bytes: 1 << 20,
            log_segments_max: 8,
            ..ChunkServerConfig::default()
        };
        (self.adjust)(&mut config);
        config
    }

    pub(crate) fn disk(&self, number: u64) -> std::path::PathBuf {
        self.temp.path().join(format!("disk{number}"))
    }

    /// Starts the server on directory `number`; its id.
    pub(crate) async fn start_server(&mut self, number: u64) -> u64 {
        let server = ChunkServer::start(self.config(number)).await.unwrap();
        let id = server.id().0;
        self.servers.insert(id, server);
        id
    }

    pub(crate) async fn stop_server(&mut self, id: u64) {
        self.servers.remove(&id).unwrap().shutdown().await.unwrap();
    }
}

impl std::ops::Deref for Cluster {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

/// A client that knows the manager's map.
pub(crate) struct Client {
    manager: Arc<FakeManager>,
    pub(crate) pool: Pool,
}

impl Client {
    fn new(manager: &Arc<FakeManager>) -> Self {
        let identity = Identity {
            role: Role::Client,
            cluster_id: Bytes::from_static(CLUSTER),
            ..Identity::default()
        };
        Self {
            manager: Arc::clone(manager),
            pool: Pool::new(identity, Arc::new(NoHandler)),
        }
    }

    pub(crate) fn map(&self) -> ClusterMap {
        self.manager.map()
    }

    pub(crate) fn address(&self, id: u64) -> String {
        let map = self.manager.map();
        map.chunkservers
            .iter()
            .find(|server| server.id == id)
            .unwrap()
            .addresses[0]
            .clone()
    }

    pub(crate) fn hops(&self, ids: &[u64]) -> Vec<Hop> {
        ids.iter()
            .map(|id| Hop {
                server: *id,
                address: self.address(*id),
            })
            .collect()
    }

    pub(crate) fn target(&self, chunk: u64, lease: u64) -> Target {
        Target {
            chunk,
            group: GROUP,
            epoch: self.manager.epoch(),
            lease,
            ..Target::default()
        }
    }

    pub(crate) async fn call(
        &self,
        id: u64,
        kind: Kind,
        message: &impl Message,
    ) -> Result<Reply, NetError> {
        self.pool
            .call(&self.address(id), kind, message, &[], WAIT)
            .await
    }

    /// Writes along a chain.
    pub(crate) async fn write(&self, chain: &[u64], put: Put) -> Result<Applied, NetError> {
        let write = Write {
            target: Some(self.target(put.chunk, put.lease)),
            offset: put.offset,
            checksums: piece_checksums(put.offset, &put.bytes),
            chain_number: 1,
            rest: self.hops(&chain[1..]),
            inode: put.chunk + 100,
            may_create: true,
            sync: put.sync,
            session: put.session,
        };
        self.send(chain[0], &write, put.bytes).await
    }

    pub(crate) async fn send(
        &self,
        id: u64,
        write: &Write,
        bytes: Bytes,
    ) -> Result<Applied, NetError> {
        let address = self.address(id);
        self.pool
            .call(&address, Kind::CHUNK_WRITE, write, &[bytes], WAIT)
            .await?
            .decode()
    }

    pub(crate) async fn flush(&self, chain: &[u64], chunks: &[u64]) -> Result<Applied, NetError> {
        let flush = Flush {
            group: GROUP,
            epoch: self.manager.epoch(),
            chunks: chunks.to_vec(),
            rest: self.hops(&chain[1..]),
        };
        self.call(chain[0], Kind::CHUNK_FLUSH, &flush)
            .await?
            .decode()
    }

    pub(crate) async fn read(
        &self,
        id: u64,
        chunk: u64,
        offset: u32,
        length: u32,
    ) -> Result<(Bytes, ReadReply), NetError> {
        let read = Read {
            target: Some(self.target(chunk, 0)),
            offset,
            length,
        };
        let reply = self.call(id, Kind::CHUNK_READ, &read).await?;
        let message: ReadReply = reply.decode()?;
        assert!(pieces_match(offset, reply.payload(), &message.checksums));
        Ok((reply.payload().clone(), message))
    }

    /// The whole copy, read in pieces.
    pub(crate) async fn content(&self, id: u64, chunk: u64) -> Result<Vec<u8>, NetError> {
        let mut all = Vec::new();
        loop {
            let offset = u32::try_from(all.len()).unwrap();
            let length = (1 << 20).min((64 << 20) - offset);
            let (bytes, reply) = self.read(id, chunk, offset, length).await?;
            all.extend_from_slice(&bytes);
            if bytes.is_empty() || all.len() == reply.copy_length as usize {
                return Ok(all);
            }
        }
    }
}

/// A write of patterned bytes.
#[derive(Debug, Clone)]
pub(crate) struct Put {
    pub(crate) chunk: u64,
    pub(crate) lease: u64,
    pub(crate) offset: u32,
    pub(crate) bytes: Bytes,
    pub(crate) sync: bool,
    pub(crate) session: u64,
}

pub(crate) fn put(chunk: u64, lease: u64, version: u64, offset: u32, length: usize) -> Put {
    Put {
        chunk,
        lease,
        offset,
        bytes: pattern(chunk, version, offset, length).into(),
        sync: false,
        session: 5,
    }
}

/// Bytes that tell chunk, offset and version apart; never zero.
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

#[track_caller]
pub(crate) fn refused<T: std::fmt::Debug>(
    outcome: Result<T, NetError>,
) -> (Status, hither_proto::common::Failure) {
    match outcome {
        Err(NetError::Refused { status, failure }) => (status, *failure),
        other => panic!("not refused: {other:?}"),
    }
}
