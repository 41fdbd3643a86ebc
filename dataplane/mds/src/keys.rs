//! Keys of the metadata store. Big-endian numbers, so that ranges sort. See
//! `docs/formats/metadata.md`.

use bytes::{BufMut, Bytes, BytesMut};
use hither_proto::fragment::Fragment;
use hither_proto::ids::{ChunkId, GroupId, InodeId, NameHash, RankId, SessionId};

/// `d/<dir>/<hash>/<name>`: a directory entry.
#[must_use]
pub fn dentry(dir: InodeId, hash: NameHash, name: &[u8]) -> Bytes {
    let mut key = BytesMut::with_capacity(18 + name.len());
    key.put_slice(b"d/");
    key.put_u64(dir.0);
    key.put_u64(hash.0);
    key.put_slice(name);
    key.freeze()
}

/// First key of a directory at or after a position.
#[must_use]
pub fn dentry_from(dir: InodeId, hash: NameHash, name: &[u8]) -> Bytes {
    dentry(dir, hash, name)
}

/// First key after all entries of a directory.
#[must_use]
pub fn dentry_end(dir: InodeId) -> Bytes {
    let mut key = BytesMut::with_capacity(10);
    key.put_slice(b"d/");
    key.put_u64(dir.0 + 1);
    key.freeze()
}

/// Reads hash and name back from a dentry key; `None` when it is none.
#[must_use]
pub fn parse_dentry(key: &Bytes) -> Option<(InodeId, NameHash, Bytes)> {
    if key.len() < 18 || &key[..2] != b"d/" {
        return None;
    }
    let number = |at: usize| key[at..at + 8].try_into().map(u64::from_be_bytes).ok();
    Some((InodeId(number(2)?), NameHash(number(10)?), key.slice(18..)))
}

/// `f/<dir>/<fragment>`: head of a fragment.
#[must_use]
pub fn fragment_head(dir: InodeId, fragment: Fragment) -> Bytes {
    two(b"f/", dir.0, fragment.to_wire())
}

/// `p/<ino>`: back-pointer.
#[must_use]
pub fn back_pointer(ino: InodeId) -> Bytes {
    one(b"p/", ino.0)
}

/// `c/<ino>/<page>`: page of chunk references.
#[must_use]
pub fn chunk_page(ino: InodeId, page: u32) -> Bytes {
    two(b"c/", ino.0, u64::from(page))
}

/// Range of all pages of a file.
#[must_use]
pub fn chunk_pages(ino: InodeId) -> (Bytes, Bytes) {
    (two(b"c/", ino.0, 0), two(b"c/", ino.0 + 1, 0))
}

/// `s/<dir>/<fragment>`: authority.
#[must_use]
pub fn subtree(dir: InodeId, fragment: Fragment) -> Bytes {
    two(b"s/", dir.0, fragment.to_wire())
}

/// `b/<rank>`: last batch of a rank.
#[must_use]
pub fn rank_state(rank: RankId) -> Bytes {
    one(b"b/", u64::from(rank.0))
}

/// `r/<rank>`: who holds a rank.
#[must_use]
pub fn rank_lease(rank: RankId) -> Bytes {
    one(b"r/", u64::from(rank.0))
}

/// `o/<session>`: a session.
#[must_use]
pub fn session(session: SessionId) -> Bytes {
    one(b"o/", session.0)
}

/// `o/<session>/<page>`: results of the session's requests, by their numbers.
#[must_use]
pub fn session_page(session: SessionId, page: u64) -> Bytes {
    two(b"o/", session.0, page)
}

/// Range of everything stored of a session.
#[must_use]
pub fn session_range(of: SessionId) -> (Bytes, Bytes) {
    (session(of), session(SessionId(of.0.saturating_add(1))))
}

/// `q/<group>/<chunk>`: a chunk to be freed.
#[must_use]
pub fn free_chunk(group: GroupId, chunk: ChunkId) -> Bytes {
    two(b"q/", u64::from(group.0), chunk.0)
}

/// Reads group and chunk back from a `q/` key.
#[must_use]
pub fn parse_free_chunk(key: &[u8]) -> Option<(GroupId, ChunkId)> {
    let body = key.strip_prefix(b"q/")?;
    let (group, chunk) = body.split_at_checked(8)?;
    let group = u64::from_be_bytes(group.try_into().ok()?);
    let chunk = u64::from_be_bytes(chunk.try_into().ok()?);
    Some((GroupId(u32::try_from(group).ok()?), ChunkId(chunk)))
}

/// `n/<name>`: a cluster-wide counter.
#[must_use]
pub fn counter(name: &str) -> Bytes {
    Bytes::from(format!("n/{name}"))
}

/// `l/<ino>`: locks.
#[must_use]
pub fn locks(ino: InodeId) -> Bytes {
    one(b"l/", ino.0)
}

/// The inode number of an `l/` or session number of an `o/` key.
#[must_use]
pub fn parse_number(key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(key.get(2..10)?.try_into().ok()?))
}

/// First key after every key that starts with a two-byte prefix such as `o/`.
#[must_use]
pub fn prefix_end(prefix: &[u8]) -> Bytes {
    let mut end = prefix.to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end.into()
}

fn one(prefix: &[u8; 2], number: u64) -> Bytes {
    let mut key = BytesMut::with_capacity(10);
    key.put_slice(prefix);
    key.put_u64(number);
    key.freeze()
}

fn two(prefix: &[u8; 2], first: u64, second: u64) -> Bytes {
    let mut key = BytesMut::with_capacity(18);
    key.put_slice(prefix);
    key.put_u64(first);
    key.put_u64(second);
    key.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dentries_sort_by_hash_and_parse_back() {
        let low = dentry(InodeId(7), NameHash(1), b"zz");
        let high = dentry(InodeId(7), NameHash(2), b"aa");
        assert!(low < high && high < dentry_end(InodeId(7)));
        assert!(dentry(InodeId(6), NameHash(u64::MAX), b"x") < low);
        let parsed = parse_dentry(&low).unwrap();
        assert_eq!(parsed, (InodeId(7), NameHash(1), Bytes::from_static(b"zz")));
        assert_eq!(parse_dentry(&Bytes::from_static(b"d/short")), None);
    }

    #[test]
    fn free_chunks_parse_back() {
        let key = free_chunk(GroupId(3), ChunkId(9));
        assert_eq!(parse_free_chunk(&key), Some((GroupId(3), ChunkId(9))));
        assert_eq!(parse_free_chunk(b"q/x"), None);
        assert_eq!(parse_number(&session(SessionId(5))), Some(5));
        assert_eq!(&prefix_end(b"o/")[..], b"o0");
    }
}
