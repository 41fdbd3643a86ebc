//! Manager and metadata server of one file.

use std::collections::VecDeque;
use std::sync::Arc;

use hither_net::{Connection, Handler, Identity, Incoming, Listener, NetError, Responder};
use hither_proto::common::{Empty, Role};
use hither_proto::kind::Kind;
use hither_proto::map::{Chunkserver, ClusterMap, Group, Member, MemberState, Rank, ServerState};
use hither_proto::meta::{
    Recall, RecallReply, Reply, Request, Safe, SessionOpen, SessionOpenReply, WriteReport,
    request::Op,
};
use hither_proto::status::Status;
use hither_proto::stored::{ChunkRef, Inode};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::{FILE, GROUP};

pub(crate) struct Metadata {
    state: Mutex<State>,
    changed: watch::Sender<u64>,
    listener: Mutex<Option<Listener>>,
}

#[derive(Default)]
pub(crate) struct State {
    map: ClusterMap,
    connection: Option<Arc<Connection>>,
    session: u64,
    forgotten: bool,
    lease: u64,
    pub(crate) exclusive: bool,
    pub(crate) inode: Inode,
    chunks: Vec<ChunkRef>,
    reserved: u64,
    /// Reports taken, in order.
    pub(crate) reports: Vec<WriteReport>,
    /// Changes are answered before they are safe.
    pub(crate) early: bool,
    /// A recall follows each grant at once.
    pub(crate) greedy: bool,
    pub(crate) grants: u64,
    /// Requests that were sent again by number, to a successor.
    pub(crate) replays: u64,
    epoch: u64,
    takes_over: bool,
    /// Times somebody waited for the store.
    pub(crate) barriers: u64,
    /// Grants say that they waited for a writer.
    pub(crate) behind_writer: bool,
    /// A report that is to be safe is carried out, and answered by a test.
    pub(crate) hold_safe: bool,
    held: Vec<(Responder, Reply)>,
    /// Reports under a lease that had been given back.
    pub(crate) late_reports: u64,
    /// The connection breaks instead of an answer to the next report.
    pub(crate) break_at_report: bool,
    recalls: VecDeque<Result<RecallReply, NetError>>,
}

impl Metadata {
    /// Server `n` stands in zone `zn`.
    pub(crate) async fn start(servers: &[String]) -> Arc<Self> {
        let chunkservers = servers.iter().zip(1..).map(|(address, id)| Chunkserver {
            id,
            addresses: vec![address.clone()],
            state: ServerState::Up.into(),
            zone: format!("z{id}"),
            ..Chunkserver::default()
        });
        let members = (1..=servers.len() as u64).map(|server| Member {
            server,
            disk: 0,
            state: MemberState::InSync.into(),
        });
        let map = ClusterMap {
            cluster_id: b"test".as_slice().into(),
            version: 1,
            chunkservers: chunkservers.collect(),
            groups: vec![Group {
                id: GROUP,
                epoch: 1,
                members: members.collect(),
                definition: 1,
                min_write_copies: 1,
            }],
            session_lease_ms: 15_000,
            ..ClusterMap::default()
        };
        let metadata = Arc::new(Self {
            state: Mutex::new(State {
                map,
                lease: 10,
                epoch: 1,
                inode: Inode {
                    ino: FILE.0,
                    mode: 0o100_644,
                    nlink: 1,
                    ..Inode::default()
                },
                ..State::default()
            }),
            changed: watch::channel(0).0,
            listener: Mutex::default(),
        });
        let identity = Identity {
            role: Role::Manager,
            ..Identity::default()
        };
        let front = Arc::new(Front(Arc::clone(&metadata)));
        let listener = Listener::bind("127.0.0.1:0", identity, front)
            .await
            .unwrap();
        let address = listener.address().to_string();
        {
            let map = &mut metadata.state.lock().map;
            map.managers = vec![address.clone()];
            map.ranks = vec![Rank {
                rank: 0,
                address,
                epoch: 1,
            }];
        }
        *metadata.listener.lock() = Some(listener);
        metadata
    }

    pub(crate) fn address(&self) -> String {
        self.listener.lock().as_ref().unwrap().address().to_string()
    }

    pub(crate) fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock());
    }

    pub(crate) fn get<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.state.lock())
    }

    /// The server forgets the session, as after an eviction, and the connection breaks.
    pub(crate) fn forget_session(&self) {
        let mut state = self.state.lock();
        state.forgotten = true;
        state.exclusive = false;
        if let Some(connection) = &state.connection {
            connection.close();
        }
    }

    /// Another process takes the rank over, and has committed much since: its batches are others.
    pub(crate) fn take_over(&self) {
        let mut state = self.state.lock();
        state.epoch += 1;
        state.takes_over = true;
        if let Some(connection) = &state.connection {
            connection.close();
        }
    }

    /// Everything is in the store: what waited for that is answered.
    pub(crate) fn release(&self) {
        let held = {
            let mut state = self.state.lock();
            state.hold_safe = false;
            std::mem::take(&mut state.held)
        };
        for (responder, reply) in held {
            responder.ok(&reply);
        }
    }

    pub(crate) async fn until(&self, wanted: impl Fn(&State) -> bool) {
        let mut changed = self.changed.subscribe();
        super::soon("the metadata server sees what is waited for", async {
            while !wanted(&self.state.lock()) {
                changed.changed().await.unwrap();
            }
        })
        .await;
    }

    /// Recalls the file's data lease; the acknowledgement.
    pub(crate) async fn recall(&self) -> Result<RecallReply, NetError> {
        let (connection, recall) = {
            let state = self.state.lock();
            (state.connection.clone().unwrap(), state.recall())
        };
        let reply = connection
            .call(Kind::RECALL, &recall, &[], super::WAIT)
            .await?;
        reply.decode()
    }

    fn request(self: &Arc<Self>, request: Request, responder: Responder) {
        let mut state = self.state.lock();
        if request.session != state.session {
            return responder.fail(Status::NO_SESSION, "another session");
        }
        if request.number > 0 && request.number < request.ack_below {
            return responder.fail(Status::BAD_REQUEST, "answered before");
        }
        state.replays += u64::from(request.replay);
        let mut reply = Reply {
            inode: Some(state.inode.clone()),
            batch: if state.early && request.number > 0 && !request.safe {
                request.number
            } else {
                0
            },
            ..Reply::default()
        };
        match request.op.unwrap() {
            Op::Acquire(op) => {
                if !state.exclusive {
                    state.lease += 1;
                }
                state.exclusive |= op.exclusive;
                state.grants += 1;
                reply.data_lease = if state.exclusive { state.lease } else { 1 };
                reply.data_exclusive = state.exclusive;
                reply.behind_writer = state.behind_writer;
                reply.chunks = state.chunks.clone();
                let recall = state.recall();
                let connection = Arc::clone(responder.connection());
                responder.ok(&reply);
                if state.greedy {
                    let this = Arc::clone(self);
                    tokio::spawn(async move {
                        let answer = connection
                            .call(Kind::RECALL, &recall, &[], super::WAIT)
                            .await;
                        let answer = answer.and_then(|reply| reply.decode());
                        let mut state = this.state.lock();
                        state.exclusive = false;
                        state.recalls.push_back(answer);
                    });
                }
                return;
            }
            Op::AllocChunks(op) => {
                for index in op.indices {
                    state.reserved += 1;
                    reply.chunks.push(ChunkRef {
                        index,
                        chunk: 100 + state.reserved,
                        group: GROUP,
                        written: false,
                    });
                }
            }
            Op::WriteReport(report) => {
                let held = state.exclusive && report.lease == state.lease;
                if !held && !request.replay {
                    state.late_reports += 1;
                    return responder.fail(Status::STALE_LEASE, "held no more");
                }
                if std::mem::take(&mut state.break_at_report) {
                    responder.connection().close();
                    return;
                }
                state.inode.size = report.size;
                for chunk in &report.written {
                    state.chunks.retain(|known| known.index != chunk.index);
                    state.chunks.push(ChunkRef {
                        written: true,
                        ..*chunk
                    });
                }
                state.exclusive &= !report.release;
                state.reports.push(report);
                reply.inode = Some(state.inode.clone());
                if request.safe && state.hold_safe {
                    state.held.push((responder, reply));
                    drop(state);
                    return self.changed.send_modify(|n| *n += 1);
                }
            }
            Op::Barrier(_) => state.barriers += 1,
            _ => {}
        }
        responder.ok(&reply);
        drop(state);
        self.changed.send_modify(|n| *n += 1);
    }
}

impl State {
    fn recall(&self) -> Recall {
        Recall {
            ino: FILE.0,
            data_lease: if self.exclusive { self.lease } else { 1 },
            ..Recall::default()
        }
    }

    fn open(&mut self, open: &SessionOpen, connection: &Arc<Connection>) -> SessionOpenReply {
        let known = open.session != 0 && open.session == self.session && !self.forgotten;
        if open.session == 0 {
            self.session += 1;
            self.forgotten = false;
        }
        self.connection = Some(Arc::clone(connection));
        SessionOpenReply {
            session: self.session,
            lease_ms: 15_000,
            resumed: known,
            reclaim: self.takes_over,
            epoch: self.epoch,
            root: 1,
        }
    }
}

struct Front(Arc<Metadata>);

impl Handler for Front {
    fn request(&self, connection: &Arc<Connection>, incoming: Incoming, responder: Responder) {
        match incoming.header.kind {
            Kind::MAP_FETCH | Kind::MAP_SUBSCRIBE => responder.ok(&self.0.state.lock().map),
            Kind::SESSION_OPEN => {
                let open: SessionOpen = incoming.decode().unwrap();
                let opened = self.0.state.lock().open(&open, connection);
                responder.ok(&opened);
                if opened.reclaim {
                    let safe = Safe {
                        batch: 1000,
                        epoch: opened.epoch,
                    };
                    connection.push(Kind::SAFE, &safe).unwrap();
                }
            }
            Kind::META_REQUEST => self.0.request(incoming.decode().unwrap(), responder),
            _ => responder.ok(&Empty {}),
        }
    }
}
