//! Chunkservers: what they hold, what of it is durable, and what a test makes of them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use hither_net::{Connection, Handler, Identity, Incoming, Listener, Responder};
use hither_proto::checksum::piece_checksums;
use hither_proto::chunk::{Ack, Applied, Close, Flush, Hop, Read, ReadReply, Write};
use hither_proto::common::{Empty, Failure, Role};
use hither_proto::kind::Kind;
use hither_proto::status::Status;
use parking_lot::Mutex;
use tokio::sync::watch;

/// What a test decides about a request: its kind, the server, the message's frame.
type Rule = Box<dyn FnMut(Kind, u64, &[Hop]) -> Option<(Status, Failure)> + Send>;

pub(crate) struct Chunks {
    state: Mutex<State>,
    changed: watch::Sender<u64>,
    listeners: Mutex<Vec<Listener>>,
}

#[derive(Default)]
pub(crate) struct State {
    /// Live image, by server and chunk.
    live: BTreeMap<(u64, u64), Vec<u8>>,
    durable: BTreeMap<(u64, u64), Vec<u8>>,
    boots: BTreeMap<u64, u64>,
    /// Writes applied so far.
    pub(crate) applied: u64,
    /// Every request that arrived: kind, server, chain number of a write.
    pub(crate) seen: Vec<(Kind, u64, u32)>,
    /// Chunks whose marks were closed.
    pub(crate) closed: Vec<u64>,
    held_kind: Option<Kind>,
    /// Only these servers hold up what is held; none: all.
    held_at: Vec<u64>,
    held: VecDeque<(u64, Incoming, Responder)>,
    rule: Option<Rule>,
}

impl Chunks {
    pub(crate) async fn start(servers: usize) -> Arc<Self> {
        let chunks = Arc::new(Self {
            state: Mutex::default(),
            changed: watch::channel(0).0,
            listeners: Mutex::default(),
        });
        for server in 1..=servers as u64 {
            chunks.state.lock().boots.insert(server, 1);
            let identity = Identity {
                role: Role::Chunkserver,
                server_id: server,
                ..Identity::default()
            };
            let front = Arc::new(Front {
                server,
                chunks: Arc::clone(&chunks),
            });
            let listener = Listener::bind("127.0.0.1:0", identity, front)
                .await
                .unwrap();
            chunks.listeners.lock().push(listener);
        }
        chunks
    }

    pub(crate) fn addresses(&self) -> Vec<String> {
        let listeners = self.listeners.lock();
        listeners.iter().map(|l| l.address().to_string()).collect()
    }

    pub(crate) fn applied(&self) -> u64 {
        self.state.lock().applied
    }

    /// Requests of this kind wait from now on.
    pub(crate) fn hold(&self, kind: Kind) {
        self.state.lock().held_kind = Some(kind);
    }

    /// Requests of this kind wait from now on at this server, as at those it was said of before.
    pub(crate) fn hold_at(&self, server: u64, kind: Kind) {
        let mut state = self.state.lock();
        state.held_kind = Some(kind);
        state.held_at.push(server);
    }

    /// Lets everything go on that waits.
    pub(crate) fn release(&self) {
        let held = {
            let mut state = self.state.lock();
            state.held_kind = None;
            state.held_at.clear();
            std::mem::take(&mut state.held)
        };
        for (server, incoming, responder) in held {
            self.serve(server, &incoming, responder);
        }
    }

    /// Requests for which the rule says so are refused.
    pub(crate) fn refuse(
        &self,
        rule: impl FnMut(Kind, u64, &[Hop]) -> Option<(Status, Failure)> + Send + 'static,
    ) {
        self.state.lock().rule = Some(Box::new(rule));
    }

    pub(crate) fn refuse_nothing(&self) {
        self.state.lock().rule = None;
    }

    /// The server loses power: only what was flushed is there, under another boot id.
    pub(crate) fn power_loss(&self, server: u64) {
        let mut state = self.state.lock();
        let durable = state.durable.clone();
        state.live.retain(|(at, _), _| *at != server);
        let kept = durable.into_iter().filter(|((at, _), _)| *at == server);
        state.live.extend(kept);
        *state.boots.get_mut(&server).unwrap() += 1;
    }

    pub(crate) fn durable(&self, server: u64) -> Vec<u8> {
        let state = self.state.lock();
        let found = state.durable.iter().find(|((at, _), _)| *at == server);
        found.map(|(_, bytes)| bytes.clone()).unwrap_or_default()
    }

    pub(crate) fn count(&self, kind: Kind) -> usize {
        let state = self.state.lock();
        state.seen.iter().filter(|(k, _, _)| *k == kind).count()
    }

    pub(crate) async fn until(&self, wanted: impl Fn(&State) -> bool) {
        let mut changed = self.changed.subscribe();
        super::soon("the chunkservers see what is waited for", async {
            while !wanted(&self.state.lock()) {
                changed.changed().await.unwrap();
            }
        })
        .await;
    }

    pub(crate) async fn until_held(&self) {
        self.until(|state| !state.held.is_empty()).await;
    }

    fn serve(&self, server: u64, incoming: &Incoming, responder: Responder) {
        match incoming.header.kind {
            Kind::PING => responder.ok(&Empty {}),
            Kind::CHUNK_WRITE => self.write(server, incoming, responder),
            Kind::CHUNK_FLUSH => {
                let flush: Flush = incoming.decode().unwrap();
                let servers = chain(server, &flush.rest);
                let mut state = self.state.lock();
                for at in servers.iter().copied() {
                    for chunk in &flush.chunks {
                        let Some(live) = state.live.get(&(at, *chunk)).cloned() else {
                            return responder.fail(Status::NO_SUCH_CHUNK, "none here");
                        };
                        state.durable.insert((at, *chunk), live);
                    }
                }
                responder.ok(&state.acks(&servers));
            }
            Kind::CHUNK_READ => self.read(server, incoming, responder),
            Kind::CHUNK_CLOSE => {
                let close: Close = incoming.decode().unwrap();
                self.state.lock().closed.extend(close.chunks);
                responder.ok(&Empty {});
            }
            other => responder.fail(Status::UNSUPPORTED, other.to_string()),
        }
        self.changed.send_modify(|n| *n += 1);
    }

    fn write(&self, server: u64, incoming: &Incoming, responder: Responder) {
        let write: Write = incoming.decode().unwrap();
        let servers = chain(server, &write.rest);
        let chunk = write.target.as_ref().unwrap().chunk;
        let mut state = self.state.lock();
        let from = write.offset as usize;
        for at in servers.iter().copied() {
            if !state.live.contains_key(&(at, chunk)) && !write.may_create {
                return responder.fail(Status::NO_SUCH_CHUNK, "none here");
            }
            let copy = state.live.entry((at, chunk)).or_default();
            let end = from + incoming.payload.len();
            if copy.len() < end {
                copy.resize(end, 0);
            }
            copy[from..end].copy_from_slice(&incoming.payload);
            if write.sync {
                let copy = copy.clone();
                state.durable.insert((at, chunk), copy);
            }
        }
        state.applied += 1;
        responder.ok(&state.acks(&servers));
    }

    fn read(&self, server: u64, incoming: &Incoming, responder: Responder) {
        let read: Read = incoming.decode().unwrap();
        let chunk = read.target.as_ref().unwrap().chunk;
        let state = self.state.lock();
        let Some(copy) = state.live.get(&(server, chunk)) else {
            return responder.fail(Status::NO_SUCH_CHUNK, "none here");
        };
        let from = (read.offset as usize).min(copy.len());
        let to = (from + read.length as usize).min(copy.len());
        let bytes = bytes::Bytes::copy_from_slice(&copy[from..to]);
        let reply = ReadReply {
            checksums: piece_checksums(read.offset, &bytes),
            copy_length: u32::try_from(copy.len()).unwrap(),
            repaired: false,
        };
        responder.ok_with(&reply, &[bytes]);
    }
}

impl State {
    fn acks(&self, servers: &[u64]) -> Applied {
        let acks = servers.iter().map(|server| Ack {
            server: *server,
            boot_id: self.boots[server],
        });
        Applied {
            acks: acks.collect(),
        }
    }
}

fn chain(head: u64, rest: &[Hop]) -> Vec<u64> {
    std::iter::once(head)
        .chain(rest.iter().map(|hop| hop.server))
        .collect()
}

struct Front {
    server: u64,
    chunks: Arc<Chunks>,
}

impl Handler for Front {
    fn request(&self, _: &Arc<Connection>, incoming: Incoming, responder: Responder) {
        let kind = incoming.header.kind;
        let mut state = self.chunks.state.lock();
        let (rest, number) = match kind {
            Kind::CHUNK_WRITE => {
                let write: Write = incoming.decode().unwrap();
                (write.rest, write.chain_number)
            }
            Kind::CHUNK_FLUSH => (incoming.decode::<Flush>().unwrap().rest, 0),
            _ => (Vec::new(), 0),
        };
        state.seen.push((kind, self.server, number));
        let refused = state
            .rule
            .as_mut()
            .and_then(|rule| rule(kind, self.server, &rest));
        if let Some((status, failure)) = refused {
            responder.refuse(status, &failure);
        } else if state.held_kind == Some(kind)
            && (state.held_at.is_empty() || state.held_at.contains(&self.server))
        {
            state.held.push_back((self.server, incoming, responder));
        } else {
            drop(state);
            return self.chunks.serve(self.server, &incoming, responder);
        }
        drop(state);
        self.chunks.changed.send_modify(|n| *n += 1);
    }
}
