//! The bytes of the log: record headers and the control file (`docs/formats/log.md`).

use std::fmt;
use std::io::IoSlice;

use crc_fast::{CrcAlgorithm, Digest};

/// Number of a record: the first is 1, each append takes the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Lsn(pub u64);

impl Lsn {
    /// The number of the record after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// The number of the record before this one; that of the first is 0, which no record has.
    #[must_use]
    pub fn previous(self) -> Self {
        Self(self.0.saturating_sub(1))
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a record means to its owner; the log only carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordKind(pub u16);

/// Whose log it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogId(pub u64);

impl fmt::Display for LogId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Number of an opening of the log. Never used twice, so what an earlier opening left unflushed
/// cannot pass for a record of a later one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Incarnation(pub(crate) u32);

/// Number of a filling of a segment file. The segments of the log, in order, count up by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SegmentUse(pub(crate) u32);

/// The header of a record, without magic and checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) lsn: Lsn,
    /// The last record known durable when this one was appended.
    pub(crate) durable: Lsn,
    pub(crate) incarnation: Incarnation,
    pub(crate) segment_use: SegmentUse,
    pub(crate) payload_bytes: u32,
    pub(crate) kind: RecordKind,
}

impl Header {
    /// Bytes from the start of this record to the start of the next.
    pub(crate) fn record_bytes(&self) -> usize {
        record_bytes(self.payload_bytes as usize)
    }

    /// Encodes the header of a record whose payload went into `payload` (see [`payload_digest`]).
    pub(crate) fn encode(&self, mut payload: Digest, id: LogId) -> [u8; RECORD_HEADER_BYTES] {
        let mut bytes = [0; RECORD_HEADER_BYTES];
        put(&mut bytes, 0, RECORD_MAGIC.to_le_bytes());
        put(&mut bytes, 8, self.lsn.0.to_le_bytes());
        put(&mut bytes, 16, self.durable.0.to_le_bytes());
        put(&mut bytes, 24, self.incarnation.0.to_le_bytes());
        put(&mut bytes, 28, self.segment_use.0.to_le_bytes());
        put(&mut bytes, 32, self.payload_bytes.to_le_bytes());
        put(&mut bytes, 36, self.kind.0.to_le_bytes());
        payload.update(&covered(&bytes, id));
        put(&mut bytes, 4, crc32(&payload).to_le_bytes());
        bytes
    }

    /// Decodes the record that starts at the first of `bytes`; `None` if there is no whole, intact
    /// record of log `id`.
    pub(crate) fn decode(bytes: &[u8], id: LogId) -> Option<Self> {
        let head: &[u8; RECORD_HEADER_BYTES] = bytes.first_chunk()?;
        if u32_at(head, 0) != RECORD_MAGIC {
            return None;
        }
        let header = Self {
            lsn: Lsn(u64_at(head, 8)),
            durable: Lsn(u64_at(head, 16)),
            incarnation: Incarnation(u32_at(head, 24)),
            segment_use: SegmentUse(u32_at(head, 28)),
            payload_bytes: u32_at(head, 32),
            kind: RecordKind(u16::from_le_bytes(array_at(head, 36))),
        };
        let payload = header.payload(bytes)?;
        let mut digest = new_digest();
        digest.update(payload);
        digest.update(&covered(head, id));
        (crc32(&digest) == u32_at(head, 4)).then_some(header)
    }

    /// The payload of the record that starts at the first of `bytes`.
    pub(crate) fn payload<'a>(&self, bytes: &'a [u8]) -> Option<&'a [u8]> {
        let end = RECORD_HEADER_BYTES.checked_add(usize::try_from(self.payload_bytes).ok()?)?;
        bytes.get(RECORD_HEADER_BYTES..end)
    }
}

/// What the control file says: one of its two slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Control {
    pub(crate) id: LogId,
    /// Counts the writes of the control file; its parity is the slot.
    pub(crate) counter: u64,
    pub(crate) segment_bytes: u64,
    /// The oldest record that is still needed.
    pub(crate) needed: Lsn,
    /// The last record known durable.
    pub(crate) durable: Lsn,
    pub(crate) incarnation: Incarnation,
}

impl Control {
    /// Where the slot of this counter starts in the control file.
    pub(crate) fn offset(&self) -> u64 {
        (self.counter % CONTROL_SLOTS) * PAGE_BYTES
    }

    pub(crate) fn encode(&self) -> [u8; CONTROL_SLOT_BYTES] {
        let mut bytes = [0; CONTROL_SLOT_BYTES];
        put(&mut bytes, 0, CONTROL_MAGIC);
        put(&mut bytes, 12, FORMAT_VERSION.to_le_bytes());
        put(&mut bytes, 16, self.id.0.to_le_bytes());
        put(&mut bytes, 24, self.counter.to_le_bytes());
        put(&mut bytes, 32, self.segment_bytes.to_le_bytes());
        put(&mut bytes, 40, self.needed.0.to_le_bytes());
        put(&mut bytes, 48, self.durable.0.to_le_bytes());
        put(&mut bytes, 56, self.incarnation.0.to_le_bytes());
        let crc = control_crc(&bytes);
        put(&mut bytes, 8, crc.to_le_bytes());
        bytes
    }

    /// Decodes a slot: `Ok(None)` if it is not intact, `Err(version)` if it is of a newer release.
    pub(crate) fn decode(bytes: &[u8; CONTROL_SLOT_BYTES]) -> Result<Option<Self>, u32> {
        if bytes[..8] != CONTROL_MAGIC || u32_at(bytes, 8) != control_crc(bytes) {
            return Ok(None);
        }
        let version = u32_at(bytes, 12);
        if version != FORMAT_VERSION {
            return Err(version);
        }
        Ok(Some(Self {
            id: LogId(u64_at(bytes, 16)),
            counter: u64_at(bytes, 24),
            segment_bytes: u64_at(bytes, 32),
            needed: Lsn(u64_at(bytes, 40)),
            durable: Lsn(u64_at(bytes, 48)),
            incarnation: Incarnation(u32_at(bytes, 56)),
        }))
    }
}

/// Bytes of a whole record with a payload of this size.
pub(crate) fn record_bytes(payload_bytes: usize) -> usize {
    (RECORD_HEADER_BYTES + payload_bytes).next_multiple_of(RECORD_ALIGN)
}

/// The checksum state after a payload. Separate from the header's encoding because it needs no
/// lock, while the header's numbers are known only under it.
pub(crate) fn payload_digest(payload: &[IoSlice<'_>]) -> Digest {
    let mut digest = new_digest();
    for part in payload {
        digest.update(part);
    }
    digest
}

fn new_digest() -> Digest {
    Digest::new(CrcAlgorithm::Crc32Iscsi)
}

/// The part of the header that the checksum covers, and the log's id, which is not stored.
fn covered(header: &[u8; RECORD_HEADER_BYTES], id: LogId) -> [u8; RECORD_HEADER_BYTES] {
    let mut bytes = [0; RECORD_HEADER_BYTES];
    bytes[..32].copy_from_slice(&header[8..]);
    bytes[32..].copy_from_slice(&id.0.to_le_bytes());
    bytes
}

fn control_crc(slot: &[u8; CONTROL_SLOT_BYTES]) -> u32 {
    let mut digest = new_digest();
    digest.update(&slot[12..]);
    crc32(&digest)
}

fn crc32(digest: &Digest) -> u32 {
    u32::try_from(digest.finalize()).expect("a 32-bit checksum fits 32 bits")
}

fn put<const N: usize>(bytes: &mut [u8], at: usize, field: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&field);
}

/// Callers pass constant offsets inside fixed-size arrays, so the range always exists.
fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// Bytes of a record before its payload.
pub const RECORD_HEADER_BYTES: usize = 40;
/// Every record starts at a multiple of this.
pub(crate) const RECORD_ALIGN: usize = 8;
/// Flushes write whole pages of this size, so that the kernel never has to read one first.
pub(crate) const PAGE_BYTES: u64 = 4096;
pub(crate) const CONTROL_SLOT_BYTES: usize = 64;
pub(crate) const CONTROL_SLOTS: u64 = 2;
pub(crate) const CONTROL_FILE: &str = "control";
const CONTROL_MAGIC: [u8; 8] = *b"HITHLOGC";
const RECORD_MAGIC: u32 = u32::from_le_bytes(*b"HLR1");
const FORMAT_VERSION: u32 = 1;

const _: () = assert!(RECORD_HEADER_BYTES.is_multiple_of(RECORD_ALIGN));
const _: () = assert!(RECORD_HEADER_BYTES == 4 + 4 + 8 + 8 + 4 + 4 + 4 + 2 + 2);
// A slot must fit a sector, so that tearing one cannot touch the other.
const _: () = assert!(CONTROL_SLOT_BYTES <= 512 && CONTROL_SLOT_BYTES as u64 <= PAGE_BYTES);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn encode(header: Header, payload: &[u8], id: LogId) -> Vec<u8> {
        let mut bytes = header
            .encode(payload_digest(&[IoSlice::new(payload)]), id)
            .to_vec();
        bytes.extend_from_slice(payload);
        bytes.resize(bytes.len().next_multiple_of(RECORD_ALIGN), 0);
        bytes
    }

    prop_compose! {
        fn records()(
            lsn in 1u64.., durable in any::<u64>(), incarnation in any::<u32>(),
            segment_use in any::<u32>(), kind in any::<u16>(),
            payload in proptest::collection::vec(any::<u8>(), 0..300), id in any::<u64>(),
        ) -> (Header, Vec<u8>, LogId) {
            let header = Header {
                lsn: Lsn(lsn), durable: Lsn(durable), incarnation: Incarnation(incarnation),
                segment_use: SegmentUse(segment_use), kind: RecordKind(kind),
                payload_bytes: u32::try_from(payload.len()).unwrap(),
            };
            (header, payload, LogId(id))
        }
    }

    proptest! {
        #[test]
        fn a_record_decodes_to_what_was_encoded((header, payload, id) in records()) {
            let bytes = encode(header, &payload, id);
            prop_assert_eq!(bytes.len(), header.record_bytes());
            let decoded = Header::decode(&bytes, id).unwrap();
            prop_assert_eq!(decoded, header);
            prop_assert_eq!(decoded.payload(&bytes).unwrap(), &payload[..]);
        }

        #[test]
        fn a_flipped_bit_or_another_log_is_no_record(
            (header, payload, id) in records(), flip in any::<prop::sample::Index>(), bit in 0..8u8,
        ) {
            let mut bytes = encode(header, &payload, id);
            prop_assert_eq!(Header::decode(&bytes, LogId(!id.0)), None);
            let at = flip.index(RECORD_HEADER_BYTES + payload.len());
            bytes[at] ^= 1 << bit;
            // The two reserved bytes are covered too, so every flip is seen.
            prop_assert_eq!(Header::decode(&bytes, id), None);
        }

        #[test]
        fn random_bytes_never_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..200), with_magic in any::<bool>(),
        ) {
            if with_magic && bytes.len() >= 4 {
                put(&mut bytes, 0, RECORD_MAGIC.to_le_bytes());
            }
            prop_assert_eq!(Header::decode(&bytes, LogId(1)), None);
        }

        #[test]
        fn a_control_slot_decodes_to_what_was_encoded(
            id in any::<u64>(), counter in any::<u64>(), needed in any::<u64>(),
            durable in any::<u64>(), incarnation in any::<u32>(), at in 0..CONTROL_SLOT_BYTES,
        ) {
            let control = Control {
                id: LogId(id), counter, segment_bytes: 65536, needed: Lsn(needed),
                durable: Lsn(durable), incarnation: Incarnation(incarnation),
            };
            let mut bytes = control.encode();
            prop_assert_eq!(Control::decode(&bytes), Ok(Some(control)));
            bytes[at] ^= 0x10;
            prop_assert_eq!(Control::decode(&bytes), Ok(None));
        }
    }
}
