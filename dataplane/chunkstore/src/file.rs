//! The file of a copy: header, checksum table, data (`docs/formats/chunk.md`).

use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;

use hither_log::{LogDir, LogFile};
use hither_proto::checksum::crc32c;
use rustix::io::{Errno, ReadWriteFlags};

use crate::geometry::{
    BLOCK, BLOCK_LEN, BLOCKS_MAX, CHUNK_BYTES, DATA_OFFSET, TABLE_OFFSET, ZERO_CHECKSUM, block_of,
    blocks_of, bytes_of, part_in_block, within,
};
use crate::header::{HEADER_BYTES, Header};

/// An open file of a copy.
#[derive(Debug)]
pub(crate) struct ChunkFile {
    file: Arc<dyn LogFile>,
}

impl ChunkFile {
    /// Makes the file with its header and no data. What an interrupted attempt left is replaced.
    pub(crate) fn create(dir: &dyn LogDir, name: &str, header: &Header) -> io::Result<Self> {
        let file = Self::begin(dir, name, header)?;
        file.complete()?;
        Ok(file)
    }

    /// Makes the file anew with these checksums for its first blocks and no data. Stable when this
    /// returns, but for its directory entry; before that it has no whole table.
    pub(crate) fn create_with_table(
        dir: &dyn LogDir,
        name: &str,
        header: &Header,
        checksums: &[u32],
    ) -> io::Result<Self> {
        let file = Self::begin(dir, name, header)?;
        file.put_table(0, checksums)?;
        file.sync()?;
        file.complete()?;
        file.sync()?;
        Ok(file)
    }

    fn begin(dir: &dyn LogDir, name: &str, header: &Header) -> io::Result<Self> {
        let file = match dir.create(name) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let file = dir.open(name)?;
                file.set_len(0)?;
                // Nothing of it is to be found below the new header after a crash.
                file.sync_data()?;
                file
            }
            other => other?,
        };
        file.write_at(&header.encode(), 0)?;
        Ok(Self { file })
    }

    /// Opens the file; `None` when there is none.
    pub(crate) fn open(dir: &dyn LogDir, name: &str) -> io::Result<Option<Self>> {
        match dir.open(name) {
            Ok(file) => Ok(Some(Self { file })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The header; `None` when it is not intact.
    pub(crate) fn header(&self) -> io::Result<Option<Header>> {
        let mut bytes = vec![0; HEADER_BYTES];
        self.read_padded(&mut bytes, 0)?;
        Ok(Header::decode(&bytes))
    }

    /// Whether the file has a whole table. What is missing of data shows by its checksums, what is
    /// missing of the table looks like zeros.
    pub(crate) fn has_table(&self) -> io::Result<bool> {
        Ok(self.file.size()? >= DATA_OFFSET)
    }

    /// Gives the file its whole table if a crash came between its making and that, so that one
    /// which is found shorter once it was synced was cut by somebody else.
    pub(crate) fn complete(&self) -> io::Result<()> {
        if self.has_table()? {
            return Ok(());
        }
        self.file.set_len(DATA_OFFSET)
    }

    /// Writes the header anew.
    pub(crate) fn put_header(&self, header: &Header) -> io::Result<()> {
        self.file.write_at(&header.encode(), 0)
    }

    /// Reads data; what is behind the end of the file is zeros.
    pub(crate) fn read(&self, buffer: &mut [u8], offset: u32) -> io::Result<()> {
        self.read_padded(buffer, DATA_OFFSET + u64::from(offset))
    }

    /// As [`ChunkFile::read`], but `false` when that would have to wait for the disk.
    pub(crate) fn read_cached(&self, buffer: &mut [u8], offset: u32) -> bool {
        self.try_padded(buffer, DATA_OFFSET + u64::from(offset))
    }

    /// Checksums of blocks.
    pub(crate) fn table(&self, blocks: &Range<u32>) -> io::Result<Vec<u32>> {
        let mut bytes = vec![0; blocks.len() * 4];
        self.read_padded(&mut bytes, table_at(blocks.start))?;
        Ok(decode_table(&bytes))
    }

    /// As [`ChunkFile::table`], but `None` when that would have to wait for the disk.
    pub(crate) fn table_cached(&self, blocks: &Range<u32>) -> Option<Vec<u32>> {
        let mut bytes = vec![0; blocks.len() * 4];
        self.try_padded(&mut bytes, table_at(blocks.start))
            .then(|| decode_table(&bytes))
    }

    /// Replaces the checksums of blocks from `first` on.
    pub(crate) fn put_table(&self, first: u32, checksums: &[u32]) -> io::Result<()> {
        let bytes: Vec<u8> = checksums
            .iter()
            .flat_map(|checksum| (checksum ^ ZERO_CHECKSUM).to_le_bytes())
            .collect();
        self.file.write_at(&bytes, table_at(first))
    }

    /// Writes data. The table is the caller's business.
    pub(crate) fn write(&self, data: &[u8], offset: u32) -> io::Result<()> {
        self.file.write_at(data, DATA_OFFSET + u64::from(offset))
    }

    /// One block and its checksum in the table.
    pub(crate) fn block(&self, block: u32) -> io::Result<(Vec<u8>, u32)> {
        let mut bytes = vec![0; BLOCK_LEN];
        self.read(&mut bytes, block * BLOCK)?;
        let table = self.table(&(block..block + 1))?;
        Ok((bytes, table.first().copied().unwrap_or_default()))
    }

    /// Makes everything from byte `length` on zeros, in data and table. The block that `length`
    /// cuts keeps its checksum: the caller knows whether its content changed.
    pub(crate) fn cut(&self, length: u32) -> io::Result<()> {
        let end = DATA_OFFSET + u64::from(length);
        if self.file.size()? > end {
            self.file.set_len(end)?;
        }
        let behind = length.div_ceil(BLOCK)..BLOCKS_MAX;
        let table = self.table(&behind)?;
        let Some(last) = table.iter().rposition(|&sum| sum != ZERO_CHECKSUM) else {
            return Ok(());
        };
        self.put_table(behind.start, &vec![ZERO_CHECKSUM; last + 1])
    }

    /// Makes a range zeros; all of its blocks have right checksums afterwards, even those that
    /// had not before.
    pub(crate) fn zero(&self, range: &Range<u32>) -> io::Result<()> {
        if range.end == CHUNK_BYTES {
            self.cut(range.start)?;
        } else if u64::from(range.start) + DATA_OFFSET < self.file.size()? {
            let (start, length) = (DATA_OFFSET + u64::from(range.start), range.len() as u64);
            match self.file.punch_hole(start, length) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                    self.fill_zero(range)?;
                }
                other => other?,
            }
        }
        let blocks = blocks_of(range);
        let whole = range.start.div_ceil(BLOCK)..range.end / BLOCK;
        if !whole.is_empty() && range.end != CHUNK_BYTES {
            self.put_table(whole.start, &vec![ZERO_CHECKSUM; whole.len()])?;
        }
        for block in [blocks.start, block_of(range.end.saturating_sub(1))] {
            if part_in_block(range, block).len() < BLOCK_LEN && blocks.contains(&block) {
                let (bytes, _) = self.block(block)?;
                self.put_table(block, &[crc32c(&bytes)])?;
            }
        }
        Ok(())
    }

    fn fill_zero(&self, range: &Range<u32>) -> io::Result<()> {
        let zeros = vec![0; ZERO_WRITE_LEN];
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min(at + ZERO_WRITE_BYTES);
            self.write(&zeros[within(&(at..end), at)], at)?;
            at = end;
        }
        Ok(())
    }

    /// Looks at blocks of a range whose checksums may be wrong because a crash came between the
    /// writing of data and table, and makes those right. Returns how many were wrong.
    pub(crate) fn settle(&self, range: &Range<u32>) -> io::Result<u64> {
        let blocks = blocks_of(range);
        let bytes = bytes_of(&blocks);
        let mut data = vec![0; bytes.len()];
        self.read(&mut data, bytes.start)?;
        let mut table = self.table(&blocks)?;
        let mut wrong = 0;
        for (block, checksum) in data.chunks(BLOCK_LEN).zip(&mut table) {
            let found = crc32c(block);
            // What was marked as lost stays so, whatever a crash left there.
            if found != *checksum && *checksum != BAD_CHECKSUM {
                *checksum = found;
                wrong += 1;
            }
        }
        if wrong > 0 {
            self.put_table(blocks.start, &table)?;
        }
        Ok(wrong)
    }

    /// Forgets what reads would find in memory: after a sync that failed in an earlier run the
    /// device may have less.
    pub(crate) fn drop_cache(&self) -> io::Result<()> {
        self.file.drop_cache()
    }

    /// Makes data, table and header stable.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn read_padded(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let Some(descriptor) = self.file.descriptor() else {
            let left = self.file.size()?.saturating_sub(offset);
            let have = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
            buffer[have..].fill(0);
            if have == 0 {
                return Ok(());
            }
            return self.file.read_at(&mut buffer[..have], offset);
        };
        let mut have = 0;
        while have < buffer.len() {
            match rustix::io::pread(descriptor, &mut buffer[have..], offset + have as u64) {
                Ok(0) => break,
                Ok(read) => have += read,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        buffer[have..].fill(0);
        Ok(())
    }

    fn try_padded(&self, buffer: &mut [u8], offset: u64) -> bool {
        let Some(descriptor) = self.file.descriptor() else {
            return self.read_padded(buffer, offset).is_ok();
        };
        let slices = &mut [IoSliceMut::new(buffer)];
        let read = rustix::io::preadv2(descriptor, slices, offset, ReadWriteFlags::NOWAIT);
        let Ok(have) = read else { return false };
        if have == buffer.len() {
            return true;
        }
        // Short: at the end of the file, or where the cache has a gap.
        let at_end = self
            .file
            .size()
            .is_ok_and(|size| offset + have as u64 >= size);
        buffer[have..].fill(0);
        at_end
    }
}

fn table_at(block: u32) -> u64 {
    TABLE_OFFSET + u64::from(block) * 4
}

fn decode_table(bytes: &[u8]) -> Vec<u32> {
    let (entries, _) = bytes.as_chunks::<4>();
    entries
        .iter()
        .map(|entry| u32::from_le_bytes(*entry) ^ ZERO_CHECKSUM)
        .collect()
}

const ZERO_WRITE_LEN: usize = 1 << 20;
const ZERO_WRITE_BYTES: u32 = 1 << 20;

/// Stands in the table for a block whose content is lost. A block that has this checksum by chance
/// (one in 2^32) would be taken for whole, so it is not that of zeros, which lost blocks often are.
pub(crate) const BAD_CHECKSUM: u32 = 0x6261_6421;

#[cfg(test)]
mod tests {
    use hither_log::crash::CrashDisk;
    use hither_proto::ids::{ChunkId, GroupId, InodeId};

    use super::*;

    fn file() -> ChunkFile {
        let header = Header {
            chunk: ChunkId(1),
            group: GroupId(2),
            inode: InodeId(3),
        };
        ChunkFile::create(CrashDisk::new().root().as_ref(), "a", &header).unwrap()
    }

    fn sound(file: &ChunkFile, blocks: Range<u32>) -> bool {
        blocks.into_iter().all(|block| {
            let (bytes, checksum) = file.block(block).unwrap();
            crc32c(&bytes) == checksum
        })
    }

    #[test]
    fn a_sparse_file_has_right_checksums() {
        let file = file();
        assert!(sound(&file, 0..4));
        assert!(file.header().unwrap().is_some());
    }

    /// A block that was lost was sound again, as zeros, after a crash beside it.
    #[test]
    fn settling_leaves_what_is_marked_as_lost() {
        let file = file();
        file.put_table(0, &[BAD_CHECKSUM, 7]).unwrap();
        assert_eq!(file.settle(&(0..2 * BLOCK)).unwrap(), 1);
        assert!(!sound(&file, 0..1));
        assert!(sound(&file, 1..2));
    }

    #[test]
    fn zeroing_keeps_the_table_right() {
        for range in [
            0..100,
            100..200,
            4000..9000,
            8192..12288,
            5000..CHUNK_BYTES,
            4096..CHUNK_BYTES,
        ] {
            let file = file();
            file.write(&[7; 16384], 0).unwrap();
            assert_eq!(file.settle(&(0..16384)).unwrap(), 4);
            file.zero(&range).unwrap();
            assert!(sound(&file, 0..5), "{range:?}");
            let mut bytes = vec![1; 16384];
            file.read(&mut bytes, 0).unwrap();
            for (at, byte) in (0u32..).zip(bytes) {
                assert_eq!(byte == 0, range.contains(&at), "{range:?} {at}");
            }
        }
    }
}
