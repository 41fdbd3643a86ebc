//! The receiving side: decodes on the connection's task and puts into the core's inbox. Both are on
//! the rank's thread.

use std::collections::BTreeMap;
use std::sync::Arc;

use hither_net::{Connection, Handler, NetError, Responder};
use hither_proto::ids::SessionId;
use hither_proto::kind::Kind;
use hither_proto::meta::{Reclaim, Request, SessionClose, SessionEvict, SessionOpen, SessionRenew};
use hither_proto::status::Status;
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::{mpsc, oneshot};

use crate::core::Event;

/// What the core's thread receives.
pub(crate) enum Incoming {
    /// Somebody wants an answer.
    Ask(Ask, Responder),
    /// Something that was started has come back.
    Event(Event),
    /// The requester of (connection, request) waits no more.
    Cancel(u64, u64),
    /// A connection has ended.
    Closed(u64),
    /// Commit what there is, then stop.
    Shutdown(oneshot::Sender<()>),
    /// Stop now.
    Stop,
}

/// What somebody wants an answer to.
pub(crate) enum Ask {
    Open(SessionOpen),
    Renew(SessionRenew),
    Close(SessionClose),
    Reclaim(SessionId, Reclaim),
    Request(Box<Request>),
    Evict(SessionEvict),
    List,
    Status,
}

/// The connection each session is reached at, and the session of each connection.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    by_session: Mutex<BTreeMap<SessionId, Arc<Connection>>>,
    by_connection: Mutex<BTreeMap<u64, SessionId>>,
}

impl Sessions {
    pub(crate) fn bind(&self, session: SessionId, connection: &Arc<Connection>) {
        self.by_session
            .lock()
            .insert(session, Arc::clone(connection));
        self.by_connection.lock().insert(connection.id(), session);
    }

    pub(crate) fn connection(&self, session: SessionId) -> Option<Arc<Connection>> {
        let connection = self.by_session.lock().get(&session).cloned();
        connection.filter(|connection| !connection.is_closed())
    }

    /// Ends all connections: their clients look for the rank elsewhere.
    pub(crate) fn close_all(&self) {
        let all = std::mem::take(&mut *self.by_session.lock());
        for connection in all.values() {
            connection.close();
        }
    }

    fn session(&self, connection: &Connection) -> Option<SessionId> {
        self.by_connection.lock().get(&connection.id()).copied()
    }

    /// Whether the session is served over this connection: the latest it was opened on.
    fn is_bound(&self, session: SessionId, connection: &Connection) -> bool {
        let sessions = self.by_session.lock();
        sessions
            .get(&session)
            .is_some_and(|bound| bound.id() == connection.id())
    }

    fn closed(&self, connection: &Connection) {
        let Some(session) = self.by_connection.lock().remove(&connection.id()) else {
            return;
        };
        let mut sessions = self.by_session.lock();
        if sessions
            .get(&session)
            .is_some_and(|bound| bound.id() == connection.id())
        {
            sessions.remove(&session);
        }
    }
}

/// Serves the connections of clients.
pub(crate) struct Front {
    events: mpsc::UnboundedSender<Incoming>,
    sessions: Arc<Sessions>,
}

impl Front {
    pub(crate) fn new(events: mpsc::UnboundedSender<Incoming>, sessions: Arc<Sessions>) -> Self {
        Self { events, sessions }
    }

    fn read(
        &self,
        connection: &Connection,
        incoming: &hither_net::Incoming,
    ) -> Result<Ask, NetError> {
        Ok(match incoming.header.kind {
            Kind::META_REQUEST => Ask::Request(Box::new(decode::<Request>(incoming)?)),
            Kind::SESSION_OPEN => Ask::Open(decode(incoming)?),
            Kind::SESSION_RENEW => Ask::Renew(decode(incoming)?),
            Kind::SESSION_CLOSE => Ask::Close(decode(incoming)?),
            Kind::SESSION_EVICT => Ask::Evict(decode(incoming)?),
            Kind::SESSION_LIST => Ask::List,
            Kind::MDS_STATUS => Ask::Status,
            Kind::RECLAIM => {
                let session = self.sessions.session(connection);
                let session = session
                    .ok_or_else(|| NetError::Protocol("no session on this connection".into()))?;
                Ask::Reclaim(session, decode(incoming)?)
            }
            other => return Err(NetError::Protocol(format!("{other} is not served here"))),
        })
    }
}

impl Handler for Front {
    fn request(
        &self,
        connection: &Arc<Connection>,
        incoming: hither_net::Incoming,
        responder: Responder,
    ) {
        match self.read(connection, &incoming) {
            Ok(Ask::Request(request))
                if !self
                    .sessions
                    .is_bound(SessionId(request.session), connection) =>
            {
                // What still comes over an old one would overtake what is resent over the new one.
                responder.fail(Status::RETRY, "the session has another connection");
            }
            Ok(ask) => {
                if let Err(mpsc::error::SendError(Incoming::Ask(_, responder))) =
                    self.events.send(Incoming::Ask(ask, responder))
                {
                    responder.fail(Status::RETRY, "the rank has stopped");
                    connection.close();
                }
            }
            Err(error) => responder.fail(Status::BAD_REQUEST, error.to_string()),
        }
    }

    fn cancel(&self, connection: &Arc<Connection>, request_id: u64) {
        // A rank that has stopped waits for nothing.
        let _ = self
            .events
            .send(Incoming::Cancel(connection.id(), request_id));
    }

    fn closed(&self, connection: &Arc<Connection>) {
        self.sessions.closed(connection);
        // A rank that has stopped waits for nothing.
        let _ = self.events.send(Incoming::Closed(connection.id()));
    }
}

fn decode<M: Message + Default>(incoming: &hither_net::Incoming) -> Result<M, NetError> {
    incoming.decode()
}
