//! Streaming the whole store out: a piece with every request of the same connection.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use hither_metastore::{MetaStore, dump};
use hither_net::{Connection, Responder};
use hither_proto::common::Empty;
use hither_proto::status::{Errno, Status};
use tokio::io::AsyncReadExt as _;
use tokio::sync::mpsc;

/// Dumps under way, by connection; each ends with its connection.
#[derive(Default)]
pub(crate) struct Dumps {
    open: BTreeMap<u64, mpsc::Sender<Responder>>,
}

impl Dumps {
    /// Answers with the next piece; an empty one is the end.
    pub(crate) fn next<S: MetaStore>(&mut self, store: &Arc<S>, responder: Responder) {
        let connection = Arc::clone(responder.connection());
        self.open.retain(|_, requests| !requests.is_closed());
        if !self.open.contains_key(&connection.id()) && self.open.len() >= DUMPS_MAX {
            return responder.fail(Status::BUSY, "too many dumps are under way");
        }
        let requests = self.open.entry(connection.id()).or_insert_with(|| {
            let (requests, inbox) = mpsc::channel(1);
            tokio::spawn(stream(Arc::clone(store), connection, inbox));
            requests
        });
        if let Err(
            mpsc::error::TrySendError::Full(responder)
            | mpsc::error::TrySendError::Closed(responder),
        ) = requests.try_send(responder)
        {
            responder.fail(
                Errno::EIO.into(),
                "the dump has failed or one piece is still awaited",
            );
        }
    }
}

async fn stream<S: MetaStore>(
    store: Arc<S>,
    connection: Arc<Connection>,
    mut requests: mpsc::Receiver<Responder>,
) {
    let (mut reader, mut writer) = tokio::io::duplex(PIECE_BYTES);
    let dumping = tokio::spawn(async move { dump(&*store, &mut writer).await });
    loop {
        let responder = tokio::select! {
            next = requests.recv() => match next {
                Some(responder) => responder,
                None => break,
            },
            () = connection.closed() => break,
        };
        let mut piece = Vec::with_capacity(PIECE_BYTES);
        let read = (&mut reader)
            .take(PIECE_BYTES as u64)
            .read_to_end(&mut piece)
            .await;
        match read {
            Ok(0) => {
                match dumping.await {
                    Ok(Ok(_)) => responder.ok(&Empty {}),
                    Ok(Err(error)) => responder.fail(Errno::EIO.into(), error.to_string()),
                    Err(_) => responder.fail(Errno::EIO.into(), "the dump was given up"),
                }
                return;
            }
            Ok(_) => responder.ok_with(&Empty {}, &[Bytes::from(piece)]),
            Err(error) => responder.fail(Errno::EIO.into(), error.to_string()),
        }
    }
    dumping.abort();
}

/// Bytes of one piece.
const PIECE_BYTES: usize = 1 << 20;
/// Dumps under way at the same time.
const DUMPS_MAX: usize = 4;
