//! The frame: a fixed 32-byte header, a small message, a payload.
//!
//! ```text
//!  offset size field (little-endian)
//!       0    4 magic 0x48746872 ("rhtH" on the wire)
//!       4    1 version of the frame layout, 1
//!       5    1 class: 1 request, 2 reply, 3 push (no reply), 4 cancel
//!       6    2 kind: what the message is (kind.rs)
//!       8    2 flags: bit 0 the receiver may drop the frame if it does not know the kind
//!      10    2 status: 0 in requests; a Status in replies
//!      12    4 header length: bytes of the message that follows
//!      16    4 payload length: bytes after the message
//!      20    4 CRC32C of bytes 0..20, the request id and the message
//!      24    8 request id: chosen by the requester, unique among its unanswered requests
//! ```
//! Payloads carry their own checksums in their messages (see `chunk.proto`).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::checksum::crc32c_parts;
use crate::kind::Kind;
use crate::status::Status;

/// First four bytes of every frame.
pub const MAGIC: u32 = 0x4874_6872;
/// Version of the frame layout.
pub const FRAME_VERSION: u8 = 1;
/// Bytes of the fixed header.
pub const HEADER_SIZE: usize = 32;
/// Longest message of a frame; a longer one closes the connection.
pub const MESSAGE_BYTES_MAX: u32 = 16 << 20;
/// Longest payload of a frame; a longer one closes the connection.
pub const PAYLOAD_BYTES_MAX: u32 = 8 << 20;
/// Lowest and highest protocol version this build speaks.
pub const PROTOCOL_VERSIONS: (u32, u32) = (1, 1);

/// What a frame is in the exchange.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// Takes back an unanswered request of the same id.
    Cancel,
    /// Needs no answer.
    Push,
    /// Answers the request of the same id.
    Reply,
    /// Wants exactly one reply.
    Request,
}

/// The header as fields.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHeader {
    /// What the frame is in the exchange.
    pub class: Class,
    /// What the message is.
    pub kind: Kind,
    /// Bit 0: an unknown kind may be dropped.
    pub flags: u16,
    /// Outcome, in replies.
    pub status: Status,
    /// Bytes of the message.
    pub message_length: u32,
    /// Bytes of the payload.
    pub payload_length: u32,
    /// Matches replies to requests.
    pub request_id: u64,
}

/// Why a header cannot be used. The connection has to be closed: its framing is lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The peer does not speak this protocol.
    #[error("not a hither frame (magic {0:#010x})")]
    BadMagic(u32),
    /// The peer uses another frame layout.
    #[error("frame layout version {0} is not supported")]
    BadVersion(u8),
    /// No such class.
    #[error("unknown frame class {0}")]
    BadClass(u8),
    /// Header or message were damaged on the way.
    #[error("frame checksum mismatch")]
    BadChecksum,
    /// Longer than any frame may be.
    #[error("frame of {message} + {payload} bytes is too long")]
    TooLong {
        /// Message bytes announced.
        message: u32,
        /// Payload bytes announced.
        payload: u32,
    },
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Raw {
    magic: U32,
    version: u8,
    class: u8,
    kind: U16,
    flags: U16,
    status: U16,
    message_length: U32,
    payload_length: U32,
    checksum: U32,
    request_id: U64,
}

const _: () = assert!(
    size_of::<Raw>() == HEADER_SIZE,
    "the header's size is part of the protocol"
);

impl FrameHeader {
    /// Encodes the header for a frame with this message.
    #[must_use]
    pub fn encode(&self, message: &[u8]) -> [u8; HEADER_SIZE] {
        let mut raw = Raw {
            magic: MAGIC.into(),
            version: FRAME_VERSION,
            class: match self.class {
                Class::Request => 1,
                Class::Reply => 2,
                Class::Push => 3,
                Class::Cancel => 4,
            },
            kind: self.kind.0.into(),
            flags: self.flags.into(),
            status: self.status.0.into(),
            message_length: self.message_length.into(),
            payload_length: self.payload_length.into(),
            checksum: 0.into(),
            request_id: self.request_id.into(),
        };
        raw.checksum = checksum(&raw, message).into();
        let mut out = [0; HEADER_SIZE];
        out.copy_from_slice(raw.as_bytes());
        out
    }

    /// Reads a header. The checksum is checked by [`verify`](Self::verify) once the message is there.
    ///
    /// # Errors
    /// Any [`FrameError`] but `BadChecksum`.
    pub fn decode(bytes: &[u8; HEADER_SIZE]) -> Result<Self, FrameError> {
        let raw = parse(bytes);
        if raw.magic.get() != MAGIC {
            return Err(FrameError::BadMagic(raw.magic.get()));
        }
        if raw.version != FRAME_VERSION {
            return Err(FrameError::BadVersion(raw.version));
        }
        let class = match raw.class {
            1 => Class::Request,
            2 => Class::Reply,
            3 => Class::Push,
            4 => Class::Cancel,
            other => return Err(FrameError::BadClass(other)),
        };
        let (message, payload) = (raw.message_length.get(), raw.payload_length.get());
        if message > MESSAGE_BYTES_MAX || payload > PAYLOAD_BYTES_MAX {
            return Err(FrameError::TooLong { message, payload });
        }
        Ok(Self {
            class,
            kind: Kind(raw.kind.get()),
            flags: raw.flags.get(),
            status: Status(raw.status.get()),
            message_length: message,
            payload_length: payload,
            request_id: raw.request_id.get(),
        })
    }

    /// Checks header and message against the header's checksum.
    ///
    /// # Errors
    /// `BadChecksum`.
    pub fn verify(bytes: &[u8; HEADER_SIZE], message: &[u8]) -> Result<(), FrameError> {
        let raw = parse(bytes);
        if checksum(&raw, message) == raw.checksum.get() {
            Ok(())
        } else {
            Err(FrameError::BadChecksum)
        }
    }
}

fn parse(bytes: &[u8; HEADER_SIZE]) -> Raw {
    zerocopy::transmute!(*bytes)
}

fn checksum(raw: &Raw, message: &[u8]) -> u32 {
    let header = raw.as_bytes();
    crc32c_parts(&[&header[..20], &header[24..], message])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(class: Class, kind: u16, status: u16, id: u64, message: &[u8]) -> FrameHeader {
        FrameHeader {
            class,
            kind: Kind(kind),
            flags: 1,
            status: Status(status),
            message_length: u32::try_from(message.len()).unwrap(),
            payload_length: 77,
            request_id: id,
        }
    }

    proptest! {
        #[test]
        fn round_trip(kind: u16, status: u16, id: u64, message: Vec<u8>, class in 0usize..4) {
            let class = [Class::Request, Class::Reply, Class::Push, Class::Cancel][class];
            let header = header(class, kind, status, id, &message);
            let bytes = header.encode(&message);
            prop_assert_eq!(FrameHeader::decode(&bytes), Ok(header));
            prop_assert_eq!(FrameHeader::verify(&bytes, &message), Ok(()));
        }

        #[test]
        fn a_flipped_bit_is_seen(bit in 0usize..(HEADER_SIZE + 8) * 8) {
            let message = *b"message!";
            let mut all = header(Class::Request, 3, 0, 9, &message).encode(&message).to_vec();
            all.extend_from_slice(&message);
            all[bit / 8] ^= 1 << (bit % 8);
            let bytes: [u8; HEADER_SIZE] = all[..HEADER_SIZE].try_into().unwrap();
            let seen = FrameHeader::decode(&bytes)
                .and_then(|_| FrameHeader::verify(&bytes, &all[HEADER_SIZE..]));
            prop_assert!(seen.is_err());
        }

        #[test]
        fn random_bytes_never_panic(bytes: [u8; HEADER_SIZE]) {
            let _ = FrameHeader::decode(&bytes);
        }
    }

    #[test]
    fn layout_is_as_documented() {
        let bytes = header(Class::Reply, 0x0201, 5, 0x1122_3344_5566_7788, b"").encode(b"");
        assert_eq!(bytes[..4], *b"rhtH");
        assert_eq!(bytes[4..8], [1, 2, 1, 2]);
        assert_eq!(bytes[8..12], [1, 0, 5, 0]);
        assert_eq!(bytes[16..20], [77, 0, 0, 0]);
        assert_eq!(
            bytes[24..],
            [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]
        );
    }
}
