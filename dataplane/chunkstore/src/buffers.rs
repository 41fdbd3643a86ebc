//! Memory for reads, used again and again: fresh memory costs more than reading into it.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;

/// Buffers that wait to be used again.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    free: Arc<Mutex<Vec<Vec<u8>>>>,
}

/// A buffer with unspecified content.
#[derive(Debug)]
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    length: usize,
    home: Option<Arc<Mutex<Vec<Vec<u8>>>>>,
}

impl Buffers {
    /// A buffer of this length. What it holds is left over from earlier uses.
    pub(crate) fn take(&self, length: usize) -> Buffer {
        if !(POOLED_LEN_MIN..=POOLED_LEN_MAX).contains(&length) {
            return Buffer {
                bytes: vec![0; length],
                length,
                home: None,
            };
        }
        let pooled = self.free.lock().pop();
        Buffer {
            bytes: pooled.unwrap_or_else(|| vec![0; POOLED_LEN_MAX]),
            length,
            home: Some(Arc::clone(&self.free)),
        }
    }
}

impl Buffer {
    /// The bytes to be filled.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.length]
    }

    /// The same as shared bytes; the buffer goes home when the last of them is dropped.
    pub(crate) fn into_bytes(self) -> Bytes {
        if self.home.is_some() {
            return Bytes::from_owner(self);
        }
        let mut this = self;
        Bytes::from(std::mem::take(&mut this.bytes))
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(home) = &self.home else { return };
        let mut free = home.lock();
        if free.len() < FREE_MAX {
            free.push(std::mem::take(&mut self.bytes));
        }
    }
}

/// Shorter reads get memory from the allocator, which keeps such sizes at hand by itself.
const POOLED_LEN_MIN: usize = 64 << 10;
/// Length of the pooled buffers: the usual read of 1 MiB with a block at each end.
const POOLED_LEN_MAX: usize = (1 << 20) + 8192;
/// Buffers kept: about 32 MiB.
const FREE_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_home() {
        let buffers = Buffers::default();
        let mut buffer = buffers.take(100_000);
        buffer.bytes_mut().fill(7);
        let bytes = buffer.into_bytes();
        assert_eq!(bytes.len(), 100_000);
        let part = bytes.slice(10..20);
        drop(bytes);
        assert_eq!(buffers.free.lock().len(), 0);
        assert_eq!(part[..], [7; 10]);
        drop(part);
        assert_eq!(buffers.free.lock().len(), 1);
        assert_eq!(buffers.take(90_000).bytes_mut().len(), 90_000);
        assert_eq!(buffers.take(10).into_bytes().len(), 10);
        assert_eq!(
            buffers.take(POOLED_LEN_MAX + 1).into_bytes().len(),
            POOLED_LEN_MAX + 1
        );
    }
}
