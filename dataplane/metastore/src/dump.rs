//! A whole store as a file (`docs/formats/metastore.md`).

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{
    AsyncRead, AsyncReadExt, AsyncSeek, AsyncSeekExt, AsyncWrite, AsyncWriteExt, SeekFrom,
};

use crate::batch::Batch;
use crate::error::Error;
use crate::store::{MetaStore, Snapshot};
use crate::types::{Entry, KEY_BYTES_MAX, KeyRange, Revision, VALUE_BYTES_MAX};

/// What a dump holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DumpSummary {
    /// How many entries.
    pub entries: u64,
    /// Size of all keys and values in bytes.
    pub bytes: u64,
    /// The last commit that it shows, in the store that it came from.
    pub revision: Revision,
}

/// Writes the store as it is now to `writer`, while it goes on serving.
///
/// The caller makes the file durable, and names it only then.
pub async fn dump<S: MetaStore>(
    store: &S,
    writer: &mut (impl AsyncWrite + Unpin + Send),
) -> Result<DumpSummary, Error> {
    let snapshot = store.snapshot().await?;
    let mut output = Output {
        writer,
        block: Block::default(),
        blocks: 0,
        summary: DumpSummary {
            entries: 0,
            bytes: 0,
            revision: snapshot.revision(),
        },
    };
    output.write(&header(snapshot.revision())).await?;
    let mut range = KeyRange::all();
    loop {
        let page = snapshot.scan(&range, 0).await?;
        for entry in &page.entries {
            if entry.key == LOADING_KEY {
                let cause = "a load was interrupted; load again before dumping".to_owned();
                return Err(Error::Corrupt { cause });
            }
            output.add(entry).await?;
        }
        match page.resume {
            Some(start) => range = range.from_key(start),
            None => return output.finish().await,
        }
    }
}

/// Puts a dump into an empty store, after reading it once from end to end: nothing is loaded from
/// a file that is cut short or damaged anywhere.
///
/// While it runs the store has the key [`LOADING_KEY`]. If it is interrupted, that key stays and
/// tells everybody that the store is not whole; loading again then removes what was loaded and
/// starts from the beginning.
pub async fn load<S: MetaStore>(
    store: &S,
    reader: &mut (impl AsyncRead + AsyncSeek + Unpin + Send),
) -> Result<DumpSummary, Error> {
    let start = reader
        .stream_position()
        .await
        .map_err(|error| io("read", &error))?;
    let summary = Input::read(&mut *reader, |_| ()).await?;
    reader
        .seek(SeekFrom::Start(start))
        .await
        .map_err(|error| io("read", &error))?;

    let mut first = Batch::new();
    match store.get(LOADING_KEY).await? {
        Some(loading) => first.require_revision(LOADING_KEY, loading.revision),
        None if store.scan(&KeyRange::all(), 1).await?.entries.is_empty() => {
            first.require_absent(LOADING_KEY)
        }
        None => return Err(Error::NotEmpty),
    };
    first.delete_range(KeyRange::all()).put(LOADING_KEY, "");
    store.commit(first).await?;

    let (mut input, _) = Input::open(reader).await?;
    while let Some(entries) = input.next_block().await? {
        let mut batch = Batch::new();
        for entry in entries {
            batch.put(entry.0, entry.1);
        }
        store.commit(batch).await?;
    }
    let mut last = Batch::new();
    last.delete(LOADING_KEY);
    store.commit(last).await?;
    Ok(summary)
}

/// Reads a dump from end to end: what it holds, before there is a store to load it into.
///
/// # Errors
/// [`Error::DumpDamaged`] when it is none, or damaged anywhere; what reading says.
pub async fn check_dump(
    reader: &mut (impl AsyncRead + Unpin + Send),
) -> Result<DumpSummary, Error> {
    Input::read(reader, |_| ()).await
}

type Pair = (Bytes, Bytes);

struct Output<'a, W> {
    writer: &'a mut W,
    block: Block,
    blocks: u64,
    summary: DumpSummary,
}

#[derive(Default)]
struct Block {
    payload: BytesMut,
    count: u32,
}

impl<W: AsyncWrite + Unpin + Send> Output<'_, W> {
    async fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.writer
            .write_all(bytes)
            .await
            .map_err(|error| io("write", &error))
    }

    async fn add(&mut self, entry: &Entry) -> Result<(), Error> {
        let value = &entry.versioned.value;
        let key_bytes = u16::try_from(entry.key.len());
        let value_bytes = u32::try_from(value.len());
        let (Ok(key_bytes), Ok(value_bytes)) = (key_bytes, value_bytes) else {
            return Err(Error::Corrupt {
                cause: "an entry is larger than any can be".to_owned(),
            });
        };
        let payload = &mut self.block.payload;
        payload.put_u16_le(key_bytes);
        payload.put_u32_le(value_bytes);
        payload.put_slice(&entry.key);
        payload.put_slice(value);
        self.block.count += 1;
        self.summary.entries += 1;
        self.summary.bytes += (entry.key.len() + value.len()) as u64;
        if self.block.payload.len() >= BLOCK_PAYLOAD_BYTES {
            self.write_block().await?;
        }
        Ok(())
    }

    async fn write_block(&mut self) -> Result<(), Error> {
        let block = std::mem::take(&mut self.block);
        let mut rest = BytesMut::with_capacity(BLOCK_HEADER_BYTES);
        rest.put_u64_le(self.blocks);
        rest.put_u32_le(u32::try_from(block.payload.len()).unwrap_or(u32::MAX));
        rest.put_u32_le(block.count);
        let crc = checksum(&[&rest, &block.payload]);
        self.write(&framed(BLOCK_MAGIC, crc, &rest)).await?;
        self.write(&block.payload).await?;
        self.blocks += 1;
        Ok(())
    }

    async fn finish(mut self) -> Result<DumpSummary, Error> {
        if self.block.count > 0 {
            self.write_block().await?;
        }
        let mut rest = BytesMut::new();
        rest.put_u64_le(self.blocks);
        rest.put_u64_le(self.summary.entries);
        rest.put_u64_le(self.summary.bytes);
        rest.put_u64_le(self.summary.revision.0);
        let crc = checksum(&[&rest]);
        self.write(&framed(END_MAGIC, crc, &rest)).await?;
        self.writer
            .flush()
            .await
            .map_err(|error| io("write", &error))?;
        Ok(self.summary)
    }
}

/// Reads a dump block by block and checks everything on the way.
struct Input<R> {
    reader: R,
    offset: u64,
    blocks: u64,
    summary: DumpSummary,
    last_key: Bytes,
}

impl<R: AsyncRead + Unpin + Send> Input<R> {
    /// Reads a whole dump.
    async fn read(reader: R, mut each: impl FnMut(&Pair)) -> Result<DumpSummary, Error> {
        let (mut input, _) = Input::open(reader).await?;
        while let Some(entries) = input.next_block().await? {
            entries.iter().for_each(&mut each);
        }
        Ok(input.summary)
    }

    async fn open(reader: R) -> Result<(Self, Revision), Error> {
        let summary = DumpSummary {
            entries: 0,
            bytes: 0,
            revision: Revision(0),
        };
        let mut input = Self {
            reader,
            offset: 0,
            blocks: 0,
            summary,
            last_key: Bytes::new(),
        };
        let bytes = input.take(HEADER_BYTES).await?;
        let mut fields = &bytes[8..];
        let (crc, version) = (fields.get_u32_le(), fields.get_u32_le());
        if bytes[..8] != MAGIC {
            return Err(Error::DumpDamaged {
                offset: 0,
                reason: "this is no dump",
            });
        }
        if crc != checksum(&[&bytes[12..]]) {
            return Err(Error::DumpDamaged {
                offset: 0,
                reason: "the header is damaged",
            });
        }
        if version != FORMAT_VERSION {
            let reason = "the dump was written by a newer release";
            return Err(Error::DumpDamaged { offset: 12, reason });
        }
        let revision = Revision(fields.get_u64_le());
        input.summary.revision = revision;
        Ok((input, revision))
    }

    /// The entries of the next block; `None` after the last one, if the file ends well.
    async fn next_block(&mut self) -> Result<Option<Vec<Pair>>, Error> {
        let at = self.offset;
        let damaged = |reason| Error::DumpDamaged { offset: at, reason };
        let head = self.take(FRAME_BYTES).await?;
        let (magic, crc) = ((&head[..4]).get_u32_le(), (&head[4..]).get_u32_le());
        if magic == END_MAGIC {
            self.check_end(crc).await?;
            return Ok(None);
        }
        if magic != BLOCK_MAGIC {
            return Err(damaged("there is neither a block nor the end"));
        }
        let rest = self.take(BLOCK_HEADER_BYTES).await?;
        let mut fields = &rest[..];
        let index = fields.get_u64_le();
        let (payload_bytes, count) = (fields.get_u32_le(), fields.get_u32_le());
        let payload_bytes = usize::try_from(payload_bytes).unwrap_or(usize::MAX);
        if payload_bytes > BLOCK_PAYLOAD_BYTES_MAX {
            return Err(damaged("a block is too large"));
        }
        let payload = self.take(payload_bytes).await?;
        if crc != checksum(&[&rest, &payload]) {
            return Err(damaged("a block is damaged"));
        }
        if index != self.blocks {
            return Err(damaged("a block is missing or at the wrong place"));
        }
        self.blocks += 1;
        let entries = self.decode(payload, count);
        Ok(Some(entries.ok_or_else(|| {
            damaged("a block does not hold what it says")
        })?))
    }

    fn decode(&mut self, payload: Bytes, count: u32) -> Option<Vec<Pair>> {
        let mut rest = payload;
        let mut entries = Vec::new();
        for _ in 0..count {
            let key_bytes = usize::from(rest.try_get_u16_le().ok()?);
            let value_bytes = usize::try_from(rest.try_get_u32_le().ok()?).ok()?;
            let sizes_fit = key_bytes <= KEY_BYTES_MAX && value_bytes <= VALUE_BYTES_MAX;
            if !sizes_fit || rest.len() < key_bytes + value_bytes {
                return None;
            }
            let key = rest.split_to(key_bytes);
            if key <= self.last_key {
                return None;
            }
            self.last_key = key.clone();
            let value = rest.split_to(value_bytes);
            self.summary.entries += 1;
            self.summary.bytes += (key_bytes + value_bytes) as u64;
            entries.push((key, value));
        }
        rest.is_empty().then_some(entries)
    }

    async fn check_end(&mut self, crc: u32) -> Result<(), Error> {
        let at = self.offset;
        let damaged = |reason| Error::DumpDamaged { offset: at, reason };
        let rest = self.take(END_BYTES).await?;
        if crc != checksum(&[&rest]) {
            return Err(damaged("the end is damaged"));
        }
        let mut fields = &rest[..];
        let summary = self.summary;
        let expected = [
            self.blocks,
            summary.entries,
            summary.bytes,
            summary.revision.0,
        ];
        if expected
            .iter()
            .any(|&expected| fields.get_u64_le() != expected)
        {
            return Err(damaged("the counts at the end do not match"));
        }
        let more = self
            .reader
            .read(&mut [0])
            .await
            .map_err(|error| io("read", &error))?;
        if more > 0 {
            return Err(damaged("there is something behind the end"));
        }
        Ok(())
    }

    async fn take(&mut self, count: usize) -> Result<Bytes, Error> {
        let mut bytes = vec![0; count];
        match self.reader.read_exact(&mut bytes).await {
            Ok(_) => {
                self.offset += count as u64;
                Ok(bytes.into())
            }
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                Err(Error::DumpDamaged {
                    offset: self.offset,
                    reason: "the file is cut short",
                })
            }
            Err(error) => Err(io("read", &error)),
        }
    }
}

fn header(revision: Revision) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[12..16].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    bytes[16..24].copy_from_slice(&revision.0.to_le_bytes());
    let crc = checksum(&[&bytes[12..]]);
    bytes[8..12].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn framed(magic: u32, crc: u32, rest: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(FRAME_BYTES + rest.len());
    bytes.put_u32_le(magic);
    bytes.put_u32_le(crc);
    bytes.put_slice(rest);
    bytes.freeze()
}

fn checksum(parts: &[&[u8]]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    for part in parts {
        digest.update(part);
    }
    u32::try_from(digest.finalize()).expect("a 32-bit checksum fits 32 bits")
}

fn io(action: &'static str, error: &std::io::Error) -> Error {
    Error::DumpIo {
        action,
        cause: error.to_string(),
    }
}

/// Present while a dump is being loaded and after a load was interrupted: whoever opens a store
/// that has it must not use it. No other key sorts before it.
pub const LOADING_KEY: &[u8] = b"\0";

const MAGIC: [u8; 8] = *b"HITHDUMP";
const BLOCK_MAGIC: u32 = u32::from_le_bytes(*b"BLCK");
const END_MAGIC: u32 = u32::from_le_bytes(*b"END.");
const FORMAT_VERSION: u32 = 1;
const HEADER_BYTES: usize = 32;
/// Magic and checksum, before a block and before the end.
const FRAME_BYTES: usize = 8;
/// What follows the frame of a block, before its payload.
const BLOCK_HEADER_BYTES: usize = 16;
/// What follows the frame of the end.
const END_BYTES: usize = 32;
/// A block is closed when its payload has reached this size.
const BLOCK_PAYLOAD_BYTES: usize = 256 << 10;
const BLOCK_PAYLOAD_BYTES_MAX: usize = BLOCK_PAYLOAD_BYTES + KEY_BYTES_MAX + VALUE_BYTES_MAX + 6;

const _: () = assert!(BLOCK_PAYLOAD_BYTES_MAX <= crate::batch::BATCH_BYTES_MAX);
