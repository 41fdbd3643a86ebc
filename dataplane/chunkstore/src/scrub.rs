//! Looking for decay: every block is read from the device and compared with its checksum.

use hither_proto::checksum::crc32c;
use hither_proto::ids::ChunkId;

use crate::core::{Core, How};
use crate::entry::Entry;
use crate::error::Error;
use crate::geometry::{BLOCK_LEN, CHUNK_BYTES, blocks_of, bytes_of};

/// What a look at a part of a copy has found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Scrubbed {
    /// Numbers of damaged blocks.
    pub bad: Vec<u32>,
    /// Bytes of the copy; 0 when it is gone.
    pub copy_length: u32,
}

impl Core {
    /// Verifies the blocks of a range of a copy as the device has them.
    pub(crate) fn scrub(
        &self,
        chunk: ChunkId,
        offset: u32,
        length: u32,
    ) -> Result<Scrubbed, Error> {
        if offset
            .checked_add(length)
            .is_none_or(|end| end > CHUNK_BYTES)
        {
            return Err(Error::BadRequest("the range is not inside a chunk"));
        }
        let live = self.lives.get(chunk);
        let opened = self.with_room(&live, |core, state| {
            let entry = core.settled_entry(How::Blocking, &live, state)?;
            Ok((entry, core.file(chunk, state, &entry)?))
        });
        let (entry, file) = match opened {
            Err(Error::NoSuchChunk(_)) => return Ok(Scrubbed::default()),
            other => other?,
        };
        let mut scrubbed = Scrubbed {
            bad: Vec::new(),
            copy_length: entry.length,
        };
        let Some(file) = file else {
            return Ok(scrubbed);
        };
        let io = |error| self.io("read a copy", &error);
        if offset == 0 {
            // Reads are to show what the device has, not what memory has of it.
            file.drop_cache().map_err(io)?;
        }
        let range = offset.min(entry.length)..(offset + length).min(entry.length);
        let blocks = blocks_of(&range);
        let around = bytes_of(&blocks);
        let mut buffer = self.buffers.take(around.len());
        let state = live.state.read();
        file.read(buffer.bytes_mut(), around.start).map_err(io)?;
        let table = file.table(&blocks).map_err(io)?;
        for ((number, block), checksum) in
            blocks.zip(buffer.bytes_mut().chunks(BLOCK_LEN)).zip(table)
        {
            let over = state.overlay.get(number);
            let hidden = over.is_some_and(|over| over.whole().is_some());
            if !hidden && crc32c(block) != checksum {
                self.bad_block(chunk, number);
                scrubbed.bad.push(number);
            }
        }
        Ok(scrubbed)
    }

    /// The first copy from `chunk` on.
    pub(crate) fn next_copy(&self, chunk: ChunkId) -> Option<(ChunkId, Entry)> {
        self.index.lock().next(chunk)
    }
}
