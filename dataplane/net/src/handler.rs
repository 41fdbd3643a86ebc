//! The receiving side of a connection.

use std::sync::Arc;

use bytes::Bytes;
use hither_proto::common::Failure;
use hither_proto::frame::FrameHeader;
use hither_proto::kind::Kind;
use hither_proto::status::Status;
use prost::Message;

use crate::connection::Connection;
use crate::error::NetError;

/// A frame from the peer.
#[derive(Debug, Clone)]
pub struct Incoming {
    /// The fixed header.
    pub header: FrameHeader,
    /// The encoded message.
    pub message: Bytes,
    /// The bytes after the message.
    pub payload: Bytes,
}

impl Incoming {
    /// Decodes the message.
    ///
    /// # Errors
    /// `Protocol` when the bytes are no such message.
    pub fn decode<M: Message + Default>(&self) -> Result<M, NetError> {
        M::decode(self.message.clone())
            .map_err(|e| NetError::Protocol(format!("decode {}: {e}", self.header.kind)))
    }
}

/// Receives what the peer asks and pushes. Called on the connection's reading task, in the order
/// of arrival: it must not block, and what takes time goes to a task or thread of its own.
pub trait Handler: Send + Sync + 'static {
    /// A request; `responder` takes the one answer, at any time and from any thread.
    fn request(&self, connection: &Arc<Connection>, incoming: Incoming, responder: Responder);

    /// A push; there is no answer.
    fn push(&self, connection: &Arc<Connection>, incoming: Incoming) {
        let _ = (connection, incoming);
    }

    /// A reply, seen before the caller that waits for it gets it. For state that has to follow
    /// the order of arrival.
    fn reply(&self, connection: &Arc<Connection>, incoming: &Incoming) {
        let _ = (connection, incoming);
    }

    /// The peer takes back its unanswered request of this id.
    fn cancel(&self, connection: &Arc<Connection>, request_id: u64) {
        let _ = (connection, request_id);
    }

    /// The connection has ended; called once, last.
    fn closed(&self, connection: &Arc<Connection>) {
        let _ = connection;
    }
}

/// For callers that serve nothing.
#[derive(Debug, Default, Clone, Copy)]
pub struct NoHandler;

impl Handler for NoHandler {
    fn request(&self, _: &Arc<Connection>, incoming: Incoming, responder: Responder) {
        responder.fail(
            Status::UNSUPPORTED,
            format!("{} is not served here", incoming.header.kind),
        );
    }
}

/// Takes the one answer to a request. Dropped without an answer, the requester gets `RETRY`.
#[derive(Debug)]
pub struct Responder {
    connection: Arc<Connection>,
    kind: Kind,
    request_id: u64,
    answered: bool,
}

impl Responder {
    pub(crate) fn new(connection: Arc<Connection>, kind: Kind, request_id: u64) -> Self {
        Self {
            connection,
            kind,
            request_id,
            answered: false,
        }
    }

    /// The connection the request came from.
    #[must_use]
    pub fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Id of the request, as in [`Handler::cancel`].
    #[must_use]
    pub fn request_id(&self) -> u64 {
        self.request_id
    }

    /// Answers OK.
    pub fn ok(self, message: &impl Message) {
        self.ok_with(message, &[]);
    }

    /// Answers OK with a payload.
    pub fn ok_with(mut self, message: &impl Message, payload: &[Bytes]) {
        self.answer(Status::OK, message, payload);
    }

    /// Refuses with a text.
    pub fn fail(self, status: Status, text: impl Into<String>) {
        self.refuse(
            status,
            &Failure {
                text: text.into(),
                ..Failure::default()
            },
        );
    }

    /// Refuses with all that a [`Failure`] can say.
    pub fn refuse(mut self, status: Status, failure: &Failure) {
        self.answer(status, failure, &[]);
    }

    /// Passes an error on as it came from another server.
    pub fn fail_with(self, error: &NetError) {
        match error {
            NetError::Refused { status, failure } => self.refuse(*status, failure),
            other => self.fail(other.errno().into(), other.to_string()),
        }
    }

    fn answer(&mut self, status: Status, message: &impl Message, payload: &[Bytes]) {
        self.answered = true;
        // A requester that is gone needs no answer: its connection's end is told by `closed`.
        let _ = self
            .connection
            .send_reply(self.kind, self.request_id, status, message, payload);
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if !self.answered {
            let failure = Failure {
                text: "the server gave the request up".into(),
                retry_after_ms: 10,
                ..Failure::default()
            };
            self.answer(Status::RETRY, &failure, &[]);
        }
    }
}
