//! Asking other members.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hither_net::NetError;
use hither_proto::checksum::pieces_match;
use hither_proto::chunk::{Copy, Fetch, List, ListReply, ReadReply};
use hither_proto::ids::{ChunkId, ChunkserverId, Epoch, GroupId};
use hither_proto::kind::Kind;
use prost::Message;

use crate::server::Inner;

/// A member of a group at an epoch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) member: ChunkserverId,
    pub(crate) group: GroupId,
    pub(crate) epoch: Epoch,
}

/// Bytes of another member's copy.
pub(crate) struct Fetched {
    pub(crate) bytes: Bytes,
}

/// Fetches a range of a copy and verifies it; shorter at the end of the copy.
pub(crate) async fn fetch_range(
    inner: &Inner,
    place: Place,
    chunk: ChunkId,
    offset: u32,
    length: u32,
) -> Result<Fetched, NetError> {
    let fetch = Fetch {
        chunk: chunk.0,
        group: place.group.0,
        epoch: place.epoch.0,
        offset,
        length,
        checksums_only: false,
    };
    let reply = ask(inner, place.member, Kind::CHUNK_FETCH, &fetch).await?;
    let sums: ReadReply = reply.decode()?;
    let bytes = reply.payload().clone();
    let sound = bytes.len() <= length as usize && pieces_match(offset, &bytes, &sums.checksums);
    if !sound {
        return Err(NetError::Protocol(format!(
            "chunkserver {} sent bytes that do not match their checksums",
            place.member
        )));
    }
    Ok(Fetched { bytes })
}

/// Fetches the checksums of a range of a copy, cut at the 4 KiB boundaries of the chunk.
pub(crate) async fn fetch_checksums(
    inner: &Inner,
    place: Place,
    chunk: ChunkId,
    offset: u32,
    length: u32,
) -> Result<Vec<u32>, NetError> {
    let fetch = Fetch {
        chunk: chunk.0,
        group: place.group.0,
        epoch: place.epoch.0,
        offset,
        length,
        checksums_only: true,
    };
    let reply = ask(inner, place.member, Kind::CHUNK_FETCH, &fetch).await?;
    Ok(reply.decode::<ReadReply>()?.checksums)
}

/// What another member knows of a copy; `None` when it has none.
pub(crate) async fn copy_of(
    inner: &Inner,
    place: Place,
    chunk: ChunkId,
) -> Result<Option<Copy>, NetError> {
    let (copies, _) = list_page(inner, place, chunk, 1).await?;
    Ok(copies.into_iter().find(|copy| copy.chunk == chunk.0))
}

/// A page of another member's copies, and whether there are more.
pub(crate) async fn list_page(
    inner: &Inner,
    place: Place,
    from: ChunkId,
    limit: u32,
) -> Result<(Vec<Copy>, bool), NetError> {
    let list = List {
        group: place.group.0,
        epoch: place.epoch.0,
        from: from.0,
        limit,
    };
    let reply = ask(inner, place.member, Kind::CHUNK_LIST, &list).await?;
    let reply: ListReply = reply.decode()?;
    Ok((reply.copies, reply.more))
}

/// Asks a chunkserver at the address the map gives.
pub(crate) async fn ask(
    inner: &Inner,
    member: ChunkserverId,
    kind: Kind,
    message: &impl Message,
) -> Result<hither_net::Reply, NetError> {
    let map = Arc::clone(&inner.link.map());
    let address = map.address(member).ok_or_else(|| NetError::Connect {
        address: format!("chunkserver {member}"),
        reason: "it is not in the map".into(),
    })?;
    inner
        .pool
        .call(address, kind, message, &[], ASK_TIMEOUT)
        .await
}

/// Time another member gets to answer.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);
