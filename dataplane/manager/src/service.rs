//! The receiving side: requests go to the manager's one task, in the order of arrival.

use std::sync::Arc;

use hither_net::{Connection, Handler, Incoming, Responder};
use hither_proto::status::Status;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::server::Message;

/// Serves the connections of everybody.
pub(crate) struct Front {
    inbox: mpsc::Sender<Message>,
}

impl Front {
    pub(crate) fn new(inbox: mpsc::Sender<Message>) -> Self {
        Self { inbox }
    }
}

impl Handler for Front {
    fn request(&self, _: &Arc<Connection>, incoming: Incoming, responder: Responder) {
        let message = Message::Request(incoming, responder, Instant::now());
        match self.inbox.try_send(message) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(Message::Request(_, responder, _))) => {
                responder.fail(Status::BUSY, "the manager has too much to do");
            }
            // A manager that stops drops the responder, which asks the caller to try again.
            Err(_) => {}
        }
    }
}
