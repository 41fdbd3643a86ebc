//! Reading a copy, checksums verified.

use std::ops::Range;

use bytes::Bytes;
use hither_proto::checksum::crc32c;
use hither_proto::ids::ChunkId;
use parking_lot::RwLockWriteGuard;

use crate::core::{Core, How, Need, Stop, count};
use crate::entry::Entry;
use crate::error::Error;
use crate::geometry::{
    BLOCK, BLOCK_LEN, CHUNK_BYTES, ZERO_CHECKSUM, blocks_of, bytes_of, part_in_block, within,
};
use crate::live::ChunkState;

/// Bytes of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadData {
    /// The bytes; fewer than asked for only at the end of the copy.
    pub bytes: Bytes,
    /// CRC32C of each piece, cut at the 4 KiB boundaries of the chunk.
    pub checksums: Vec<u32>,
    /// Bytes of the copy.
    pub copy_length: u32,
}

impl Core {
    /// Reads from a copy.
    pub(crate) fn read(&self, chunk: ChunkId, offset: u32, length: u32) -> Result<ReadData, Error> {
        match self.read_how(How::Blocking, chunk, offset, length) {
            Ok(data) => Ok(data),
            Err(Stop::Failed(error)) => Err(error),
            Err(Stop::Needs(_)) => Err(Error::Busy(self.index_number)),
        }
    }

    /// As [`Core::read`], but `None` when that would have to wait.
    pub(crate) fn try_read_cached(
        &self,
        chunk: ChunkId,
        offset: u32,
        length: u32,
    ) -> Option<Result<ReadData, Error>> {
        match self.read_how(How::Inline, chunk, offset, length) {
            Ok(data) => Some(Ok(data)),
            Err(Stop::Failed(error)) => Some(Err(error)),
            Err(Stop::Needs(_)) => None,
        }
    }

    fn read_how(
        &self,
        how: How,
        chunk: ChunkId,
        offset: u32,
        length: u32,
    ) -> Result<ReadData, Stop> {
        self.check()?;
        if offset
            .checked_add(length)
            .is_none_or(|end| end > CHUNK_BYTES)
        {
            return Err(Error::BadRequest("the range is not inside a chunk").into());
        }
        let live = match how {
            How::Blocking if self.entry(chunk).is_none() => None,
            How::Blocking => Some(self.lives.get(chunk)),
            How::Inline => Some(self.lives.find(chunk).ok_or(Stop::Needs(Need::Thread))?),
        };
        let live = live.ok_or(Error::NoSuchChunk(chunk))?;
        let mut state = match how {
            How::Blocking => live.state.read(),
            How::Inline => live.state.try_read().ok_or(Stop::Needs(Need::Thread))?,
        };
        let mut entry = self.entry(chunk).ok_or(Error::NoSuchChunk(chunk))?;
        let looked = state.file.is_some() || state.no_file;
        if Self::is_unsettled(&state, &entry) || !looked {
            if how == How::Inline {
                return Err(Stop::Needs(Need::Thread));
            }
            drop(state);
            let mut exclusive = live.state.write();
            entry = self.settled_entry(how, &live, &mut exclusive)?;
            self.file(chunk, &mut exclusive, &entry)?;
            state = RwLockWriteGuard::downgrade(exclusive);
        }
        if !entry.exists() {
            return Err(Error::NoSuchChunk(chunk).into());
        }
        if entry.is_partial() {
            return Err(Error::Incomplete(chunk).into());
        }
        let range = offset.min(entry.length)..(offset + length).min(entry.length);
        let data = self.read_range(how, chunk, &state, &entry, range)?;
        count(&self.counts.reads, 1);
        count(&self.counts.read_bytes, data.bytes.len());
        Ok(data)
    }

    /// Reads a range that lies inside the copy, under the chunk's lock.
    pub(crate) fn read_range(
        &self,
        how: How,
        chunk: ChunkId,
        state: &ChunkState,
        entry: &Entry,
        range: Range<u32>,
    ) -> Result<ReadData, Stop> {
        if range.is_empty() {
            return Ok(ReadData {
                bytes: Bytes::new(),
                checksums: Vec::new(),
                copy_length: entry.length,
            });
        }
        let blocks = blocks_of(&range);
        let around = bytes_of(&blocks);
        let mut buffer = self.buffers.take(around.len());
        let bytes = buffer.bytes_mut();
        let mut table = self.read_base(how, state, &blocks, bytes)?;
        let numbers = blocks
            .clone()
            .zip(bytes.chunks_mut(BLOCK_LEN))
            .zip(&mut table);
        for ((number, block), checksum) in numbers {
            let over = state.overlay.get(number);
            if let Some((whole, its_checksum)) = over.and_then(|over| over.whole()) {
                block.copy_from_slice(whole);
                *checksum = its_checksum;
                continue;
            }
            if crc32c(block) != *checksum {
                return Err(self.bad_block(chunk, number).into());
            }
            if let Some(over) = over {
                over.lay_over(block);
                *checksum = crc32c(block);
            }
        }
        for number in [blocks.start, blocks.end - 1] {
            let part = part_in_block(&range, number);
            if part.len() < BLOCK_LEN {
                table[(number - blocks.start) as usize] =
                    crc32c(&bytes[within(&part, around.start)]);
            }
        }
        Ok(ReadData {
            bytes: buffer.into_bytes().slice(within(&range, around.start)),
            checksums: table,
            copy_length: entry.length,
        })
    }

    /// Reads what is in place, if anything of it shows, and its checksums.
    fn read_base(
        &self,
        how: How,
        state: &ChunkState,
        blocks: &Range<u32>,
        bytes: &mut [u8],
    ) -> Result<Vec<u32>, Stop> {
        let hidden = blocks.len() <= HIDDEN_BLOCKS_MAX
            && blocks.clone().all(|number| {
                let over = state.overlay.get(number);
                over.is_some_and(|over| over.whole().is_some())
            });
        let Some(file) = state.file.as_ref().filter(|_| !hidden) else {
            bytes.fill(0);
            return Ok(vec![ZERO_CHECKSUM; blocks.len()]);
        };
        let start = blocks.start * BLOCK;
        if how == How::Inline {
            if !file.read_cached(bytes, start) {
                return Err(Stop::Needs(Need::Thread));
            }
            return file.table_cached(blocks).ok_or(Stop::Needs(Need::Thread));
        }
        let io = |error| self.io("read a copy", &error);
        file.read(bytes, start).map_err(io)?;
        Ok(file.table(blocks).map_err(io)?)
    }
}

/// Reads of at most so many blocks look whether the file is needed at all.
const HIDDEN_BLOCKS_MAX: usize = 16;
