//! Messages on a unix stream socket, with at most one descriptor.

use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Reply, Request};

/// Longest message, bytes.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Why a message did not arrive.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The other side is not there, has gone, or takes too long. A retry may help.
    #[error("the mounter's socket: {0}")]
    Io(#[from] io::Error),
    /// What came is no message. A retry does not help.
    #[error("no message of the mounter's protocol: {0}")]
    Nonsense(String),
}

/// Sends a request to the mounter at `socket` and waits for its reply; blocks for `timeout` at most.
///
/// # Errors
/// [`WireError`]; whether the request was carried out is unknown then.
pub fn call(
    socket: &Path,
    request: &Request,
    descriptor: Option<BorrowedFd<'_>>,
    timeout: Duration,
) -> Result<Reply, WireError> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_write_timeout(Some(timeout))?;
    stream.set_read_timeout(Some(timeout))?;
    send(&mut stream, request, descriptor)?;
    let (reply, _) = take(&mut stream)?;
    Ok(reply)
}

/// Takes a request with the descriptor that came along.
///
/// # Errors
/// [`WireError`].
pub fn receive(stream: &mut UnixStream) -> Result<(Request, Option<OwnedFd>), WireError> {
    take(stream)
}

/// Sends the reply.
///
/// # Errors
/// [`WireError`].
pub fn reply(stream: &mut UnixStream, reply: &Reply) -> Result<(), WireError> {
    send(stream, reply, None)
}

fn send(
    stream: &mut UnixStream,
    message: &impl Serialize,
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<(), WireError> {
    let json = serde_json::to_vec(message).map_err(|e| WireError::Nonsense(e.to_string()))?;
    let length = u32::try_from(json.len())
        .ok()
        .filter(|_| json.len() <= MESSAGE_BYTES_MAX)
        .ok_or_else(|| WireError::Nonsense(format!("{} bytes are too many", json.len())))?;
    let head = length.to_le_bytes();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.map(|one| [one]);
    if let Some(one) = &descriptors {
        ancillary.push(SendAncillaryMessage::ScmRights(one));
    }
    let sent = sendmsg(
        &*stream,
        &[IoSlice::new(&head)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )
    .map_err(io::Error::from)?;
    stream.write_all(&head[sent..])?;
    stream.write_all(&json)?;
    Ok(())
}

fn take<M: DeserializeOwned>(stream: &mut UnixStream) -> Result<(M, Option<OwnedFd>), WireError> {
    let mut head = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(
        &*stream,
        &mut [IoSliceMut::new(&mut head)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )
    .map_err(io::Error::from)?;
    if got.bytes == 0 {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    let mut descriptor = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            descriptor = descriptors.into_iter().last().or(descriptor);
        }
    }
    stream.read_exact(&mut head[got.bytes..])?;
    let length = u32::from_le_bytes(head) as usize;
    if length > MESSAGE_BYTES_MAX {
        return Err(WireError::Nonsense(format!("{length} bytes are too many")));
    }
    let mut json = vec![0; length];
    stream.read_exact(&mut json)?;
    let message = serde_json::from_slice(&json).map_err(|e| WireError::Nonsense(e.to_string()))?;
    Ok((message, descriptor))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::{Kind, Serve};

    const WAIT: Duration = Duration::from_secs(10);

    #[test]
    fn a_descriptor_rides_along() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let text = dir.path().join("text");
        std::fs::write(&text, "of the other").unwrap();
        let file = File::open(&text).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let (request, descriptor) = receive(&mut stream).unwrap();
            let mut said = String::new();
            File::from(descriptor.unwrap())
                .read_to_string(&mut said)
                .unwrap();
            reply(&mut stream, &Reply::refused(Kind::Busy, said)).unwrap();
            request
        });
        let request = Request::Serve(Serve {
            mount: "m".into(),
            managers: Vec::new(),
            subdirectory: "x".repeat(40_000),
            options: String::new(),
            staging: String::new(),
        });
        let reply = call(&socket, &request, Some(file.as_fd()), WAIT).unwrap();
        assert_eq!(reply, Reply::refused(Kind::Busy, "of the other"));
        assert_eq!(server.join().unwrap(), request);
    }

    #[test]
    fn nonsense_is_told_from_silence() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(matches!(receive(&mut ours), Err(WireError::Nonsense(_))));
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"\x02\x00\x00\x00{}").unwrap();
        assert!(matches!(receive(&mut ours), Err(WireError::Nonsense(_))));
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert!(matches!(receive(&mut ours), Err(WireError::Io(_))));
        let (mut ours, _theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_millis(1)))
            .unwrap();
        assert!(matches!(receive(&mut ours), Err(WireError::Io(_))));
    }
}
