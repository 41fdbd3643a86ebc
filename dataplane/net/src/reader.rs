//! The reading side: cuts the byte stream into frames and hands them on.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::{Bytes, BytesMut};
use hither_proto::common::Empty;
use hither_proto::frame::{Class, FrameHeader, HEADER_SIZE};
use hither_proto::kind::Kind;
use hither_proto::status::Status;

use crate::connection::{Connection, UNANSWERED_MAX};
use crate::error::NetError;
use crate::handler::{Incoming, Responder};

pub(crate) async fn run(connection: Arc<Connection>) {
    let end = read_frames(&connection).await;
    if let Err(error) = &end {
        tracing::debug!(peer = connection.address(), %error, "connection ended");
    }
    if let Err(NetError::Protocol(reason)) = end {
        tracing::warn!(
            peer = connection.address(),
            reason,
            "peer sent no valid frame"
        );
    }
    connection.close();
    connection.handler.closed(&connection);
}

async fn read_frames(connection: &Arc<Connection>) -> Result<(), NetError> {
    let mut buffer = BytesMut::with_capacity(BUFFER_BYTES);
    loop {
        let Some(incoming) = read_frame(connection, &mut buffer).await? else {
            return Ok(());
        };
        dispatch(connection, incoming);
        wait_until_fewer_unanswered(connection).await;
        tokio::task::coop::consume_budget().await;
    }
}

/// `None`: the peer closed between two frames.
async fn read_frame(
    connection: &Connection,
    buffer: &mut BytesMut,
) -> Result<Option<Incoming>, NetError> {
    if !fill(connection, buffer, HEADER_SIZE).await? {
        return if buffer.is_empty() {
            Ok(None)
        } else {
            Err(lost("inside a frame"))
        };
    }
    let mut fixed = [0; HEADER_SIZE];
    fixed.copy_from_slice(&buffer[..HEADER_SIZE]);
    let header = FrameHeader::decode(&fixed)?;
    let head_length = HEADER_SIZE + header.message_length as usize;
    if !fill(connection, buffer, head_length).await? {
        return Err(lost("inside a frame"));
    }
    let message = buffer.split_to(head_length).freeze().slice(HEADER_SIZE..);
    FrameHeader::verify(&fixed, &message)?;
    let payload = read_payload(connection, buffer, header.payload_length as usize).await?;
    Ok(Some(Incoming {
        header,
        message,
        payload,
    }))
}

async fn read_payload(
    connection: &Connection,
    buffer: &mut BytesMut,
    length: usize,
) -> Result<Bytes, NetError> {
    if length <= buffer.len() || length <= SMALL_PAYLOAD {
        if !fill(connection, buffer, length).await? {
            return Err(lost("inside a frame"));
        }
        return Ok(buffer.split_to(length).freeze());
    }
    // A large payload gets memory of its own, so that it is copied once and pins nothing else.
    let mut payload = BytesMut::with_capacity(length);
    payload.extend_from_slice(&buffer.split());
    while payload.len() < length {
        let mut rest = payload.split_off(payload.len());
        let want = length - payload.len();
        debug_assert!(rest.capacity() >= want);
        let mut limited = bytes::BufMut::limit(&mut rest, want);
        let read = read_some(connection, &mut limited).await?;
        if read == 0 {
            return Err(lost("inside a frame"));
        }
        payload.unsplit(rest);
    }
    Ok(payload.freeze())
}

/// Reads until the buffer holds `wanted` bytes. False: the stream ended before.
async fn fill(
    connection: &Connection,
    buffer: &mut BytesMut,
    wanted: usize,
) -> Result<bool, NetError> {
    while buffer.len() < wanted {
        if buffer.capacity() - buffer.len() < wanted - buffer.len() || buffer.capacity() < 4096 {
            buffer.reserve(BUFFER_BYTES.max(wanted - buffer.len()));
        }
        if read_some(connection, buffer).await? == 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

async fn read_some(
    connection: &Connection,
    buffer: &mut impl bytes::BufMut,
) -> Result<usize, NetError> {
    loop {
        match connection.stream.try_read_buf(buffer) {
            Ok(read) => {
                connection.hears(read);
                return Ok(read);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                connection
                    .stream
                    .readable()
                    .await
                    .map_err(|e| lost(&e.to_string()))?;
            }
            Err(error) => return Err(lost(&error.to_string())),
        }
    }
}

fn dispatch(connection: &Arc<Connection>, incoming: Incoming) {
    let header = incoming.header;
    match header.class {
        Class::Request => {
            connection.unanswered.fetch_add(1, Ordering::AcqRel);
            let responder = Responder::new(Arc::clone(connection), header.kind, header.request_id);
            if header.kind == Kind::PING {
                responder.ok(&Empty {});
            } else if connection.peer().is_none() && header.kind != Kind::HELLO {
                responder.fail(Status::BAD_REQUEST, "say hello first");
                connection.close();
            } else {
                connection.handler.request(connection, incoming, responder);
            }
        }
        Class::Reply => {
            connection.handler.reply(connection, &incoming);
            connection.complete(incoming);
        }
        Class::Push => connection.handler.push(connection, incoming),
        Class::Cancel => connection.handler.cancel(connection, header.request_id),
    }
}

/// A peer that asks more than we answer is read no further: its socket fills and it waits.
async fn wait_until_fewer_unanswered(connection: &Connection) {
    loop {
        let unanswered = connection.unanswered.load(Ordering::Acquire);
        let many =
            unanswered > UNANSWERED_MAX as u64 || (unanswered > 0 && connection.queue_is_high());
        if !many || connection.is_closed() {
            return;
        }
        connection.unanswered_less.notified().await;
    }
}

fn lost(reason: &str) -> NetError {
    NetError::Lost(reason.to_owned())
}

/// Bytes read ahead; what of a large payload lies among them is copied once more.
const BUFFER_BYTES: usize = 64 << 10;
/// Payloads up to this size share the read buffer.
const SMALL_PAYLOAD: usize = 32 << 10;
