//! Requests whose `:authority` is a socket's path.
//!
//! gRPC clients in Go that dial a path say `%2Fvar%2Frun%2Fx.sock` there, the kubelet when a plugin
//! registers among them. `h2` takes that for no authority and resets the stream. Here, in front of it,
//! header blocks are read and written anew with an authority it takes; nothing else is changed.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, BufMut as _, BytesMut};
use loona_hpack::Decoder;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

/// A connection whose requests have a legal `:authority`.
pub struct Legal<S> {
    inner: S,
    input: BytesMut,
    output: BytesMut,
    rewriter: Rewriter,
}

impl<S> Legal<S> {
    /// Reads from and writes to this connection.
    #[must_use]
    pub fn new(inner: S) -> Self {
        Self {
            inner,
            input: BytesMut::new(),
            output: BytesMut::new(),
            rewriter: Rewriter::default(),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Legal<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.output.is_empty() {
            let mut chunk = [0; CHUNK_BYTES];
            let mut read = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut this.inner).poll_read(cx, &mut read))?;
            if read.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            this.input.extend_from_slice(read.filled());
            this.rewriter.take(&mut this.input, &mut this.output)?;
        }
        let length = this.output.len().min(into.remaining());
        into.put_slice(&this.output[..length]);
        this.output.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Legal<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

impl<S> Connected for Legal<S> {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

/// Cuts what a client sends into frames, and writes those with headers anew.
#[derive(Default)]
struct Rewriter {
    is_begun: bool,
    headers: Decoder<'static>,
    block: Option<Block>,
}

/// A header block that has not come whole.
struct Block {
    stream: u32,
    ends_stream: bool,
    bytes: Vec<u8>,
}

impl Rewriter {
    /// Moves what is complete.
    fn take(&mut self, input: &mut BytesMut, output: &mut BytesMut) -> io::Result<()> {
        if !self.is_begun {
            if input.len() < PREFACE_BYTES {
                return Ok(());
            }
            output.put(input.split_to(PREFACE_BYTES));
            self.is_begun = true;
        }
        while let Some(head) = input.get(..FRAME_HEAD) {
            let length =
                usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
            if length > FRAME_BYTES_MAX {
                return Err(nonsense("a frame is too long"));
            }
            if input.len() < FRAME_HEAD + length {
                return Ok(());
            }
            let frame = input.split_to(FRAME_HEAD + length);
            match frame[3] {
                HEADERS => self.begin(&frame, output)?,
                CONTINUATION => self.go_on(&frame, output)?,
                _ => output.put(frame),
            }
        }
        Ok(())
    }

    fn begin(&mut self, frame: &[u8], output: &mut BytesMut) -> io::Result<()> {
        let (flags, payload) = (frame[4], &frame[FRAME_HEAD..]);
        let mut from = 0;
        let mut padding = 0;
        if flags & PADDED != 0 {
            padding = usize::from(*payload.first().ok_or_else(|| nonsense("no padding"))?);
            from = 1;
        }
        if flags & PRIORITY != 0 {
            from += PRIORITY_BYTES;
        }
        let until = payload.len().saturating_sub(padding);
        let fragment = payload
            .get(from..until)
            .ok_or_else(|| nonsense("a header frame is cut short"))?;
        self.block = Some(Block {
            stream: stream_of(frame),
            ends_stream: flags & END_STREAM != 0,
            bytes: fragment.to_vec(),
        });
        self.end(flags, output)
    }

    fn go_on(&mut self, frame: &[u8], output: &mut BytesMut) -> io::Result<()> {
        let block = self.block.as_mut();
        let block = block.filter(|block| block.stream == stream_of(frame));
        let block = block.ok_or_else(|| nonsense("a continuation of nothing"))?;
        block.bytes.extend_from_slice(&frame[FRAME_HEAD..]);
        if block.bytes.len() > BLOCK_BYTES_MAX {
            return Err(nonsense("too many headers"));
        }
        self.end(frame[4], output)
    }

    /// Writes the block anew if it is whole.
    fn end(&mut self, flags: u8, output: &mut BytesMut) -> io::Result<()> {
        if flags & END_HEADERS == 0 {
            return Ok(());
        }
        let Some(block) = self.block.take() else {
            return Ok(());
        };
        let headers = self.headers.decode(&block.bytes);
        let headers = headers.map_err(|_| nonsense("headers that cannot be decoded"))?;
        let mut written = Vec::with_capacity(block.bytes.len() * 2);
        for (name, value) in headers {
            let illegal = &name[..] == AUTHORITY && !is_legal(&value);
            literal(
                &mut written,
                &name,
                if illegal { LOCALHOST } else { &value },
            );
        }
        let mut parts = written.chunks(PART_BYTES).peekable();
        let mut kind = HEADERS;
        while let Some(part) = parts.next() {
            let mut flags = if parts.peek().is_none() {
                END_HEADERS
            } else {
                0
            };
            if kind == HEADERS && block.ends_stream {
                flags |= END_STREAM;
            }
            let length = u32::try_from(part.len()).unwrap_or(u32::MAX);
            output.put_uint(u64::from(length), 3);
            output.put_u8(kind);
            output.put_u8(flags);
            output.put_u32(block.stream);
            output.put_slice(part);
            kind = CONTINUATION;
        }
        Ok(())
    }
}

fn stream_of(frame: &[u8]) -> u32 {
    u32::from_be_bytes([frame[5], frame[6], frame[7], frame[8]])
}

/// Host and port as `h2` takes them.
fn is_legal(authority: &[u8]) -> bool {
    let fits = |byte: &u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(byte);
    !authority.is_empty() && authority.iter().all(fits)
}

/// A header that enters no table (RFC 7541, 6.2.2), so that the reader's table stays empty.
fn literal(into: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    into.push(0);
    for text in [name, value] {
        length(into, text.len());
        into.extend_from_slice(text);
    }
}

/// A length behind a clear bit (RFC 7541, 5.1).
fn length(into: &mut Vec<u8>, value: usize) {
    let Ok(short) = u8::try_from(value) else {
        return long_length(into, value);
    };
    if short < 127 {
        into.push(short);
    } else {
        long_length(into, value);
    }
}

fn long_length(into: &mut Vec<u8>, value: usize) {
    into.push(127);
    let mut rest = value - 127;
    while rest >= 128 {
        into.push(u8::try_from(rest % 128).unwrap_or(0) | 128);
        rest /= 128;
    }
    into.push(u8::try_from(rest).unwrap_or(0));
}

fn nonsense(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

const AUTHORITY: &[u8] = b":authority";
const LOCALHOST: &[u8] = b"localhost";
/// Read at once.
const CHUNK_BYTES: usize = 8 << 10;
/// What a client says first (RFC 9113, 3.4), and the head of a frame (4.1).
const PREFACE_BYTES: usize = 24;
const FRAME_HEAD: usize = 9;
const PRIORITY_BYTES: usize = 5;
/// Kinds of frames and their flags (RFC 9113, 6.2 and 6.10).
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;
const PRIORITY: u8 = 32;
/// Longest frame and header block; the server says 16 KiB and closes sooner.
const FRAME_BYTES_MAX: usize = 1 << 20;
const BLOCK_BYTES_MAX: usize = 64 << 10;
/// Header bytes of a frame that is written: every reader takes as many.
const PART_BYTES: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use loona_hpack::Encoder;

    use super::*;

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let mut frame = Vec::new();
        frame.put_uint(payload.len() as u64, 3);
        frame.push(kind);
        frame.push(flags);
        frame.put_u32(stream);
        frame.extend_from_slice(payload);
        frame
    }

    fn headers_of(frame: &[u8], decoder: &mut Decoder<'_>) -> Vec<(String, String)> {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let decoded = decoder.decode(&frame[FRAME_HEAD..]).unwrap();
        let pairs = decoded.into_iter();
        pairs
            .map(|(name, value)| (text(name), text(value)))
            .collect()
    }

    #[test]
    fn a_path_becomes_localhost_and_the_rest_stays() {
        let long = "x".repeat(300);
        let request = |authority: &'static str| {
            [
                (":method", "POST"),
                (":authority", authority),
                ("grpc-timeout", "1S"),
                ("x-long", long.as_str()),
            ]
        };
        let mut encoder = Encoder::new();
        let mut encode = |headers: [(&str, &str); 4]| {
            encoder.encode(headers.iter().map(|(n, v)| (n.as_bytes(), v.as_bytes())))
        };
        let preface = [b'P'; PREFACE_BYTES];
        let path = encode(request("%2Fvar%2Frun%2Fx.sock"));
        let name = encode(request("node-a:80"));
        let settings = frame(4, 0, 0, &[1, 2, 3, 4, 5, 6]);
        let mut padded = vec![2, 0, 0, 0, 0, 9];
        padded.extend_from_slice(&name[..5]);
        padded.extend_from_slice(&[0, 0]);
        let mut input = BytesMut::new();
        for part in [
            preface.to_vec(),
            settings.clone(),
            frame(HEADERS, END_HEADERS | END_STREAM, 1, &path),
            frame(HEADERS, PADDED | PRIORITY, 3, &padded),
            frame(CONTINUATION, END_HEADERS, 3, &name[5..]),
            frame(0, END_STREAM, 3, b"data"),
        ] {
            input.extend_from_slice(&part);
        }
        // One byte at a time: whatever comes is cut anywhere.
        let (mut rewriter, mut some, mut output) =
            (Rewriter::default(), BytesMut::new(), BytesMut::new());
        for byte in input {
            some.put_u8(byte);
            rewriter.take(&mut some, &mut output).unwrap();
        }
        assert_eq!(output.split_to(PREFACE_BYTES)[..], preface);
        assert_eq!(output.split_to(settings.len())[..], settings[..]);
        let mut decoder = Decoder::new();
        for (stream, authority, flags) in [
            (1, "localhost", END_HEADERS | END_STREAM),
            (3, "node-a:80", END_HEADERS),
        ] {
            let length = output[..3]
                .iter()
                .fold(0, |n, byte| n << 8 | usize::from(*byte));
            let one = output.split_to(FRAME_HEAD + length);
            assert_eq!((one[3], one[4], stream_of(&one)), (HEADERS, flags, stream));
            let own = |(n, v): (&str, &str)| (n.to_owned(), v.to_owned());
            let expected: Vec<_> = request(authority).map(own).to_vec();
            assert_eq!(headers_of(&one, &mut decoder), expected);
        }
        assert_eq!(output[..], frame(0, END_STREAM, 3, b"data")[..]);
    }

    #[test]
    fn nonsense_ends_the_connection() {
        for bad in [
            frame(CONTINUATION, END_HEADERS, 1, b""),
            frame(HEADERS, PADDED | END_HEADERS, 1, &[200, 1]),
            frame(HEADERS, END_HEADERS, 1, &[0xff; 9]),
            vec![0xff; 9],
        ] {
            let mut rewriter = Rewriter {
                is_begun: true,
                ..Rewriter::default()
            };
            let taken = rewriter.take(&mut BytesMut::from(&bad[..]), &mut BytesMut::new());
            assert!(taken.is_err(), "{bad:?}");
        }
    }
}
