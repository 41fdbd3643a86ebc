//! Whose data it is: etcd's log begins with the id of the member that writes it.
//!
//! Each file of the log is a row of records: eight bytes with its length (and, in the highest byte,
//! how much it is padded), then a protobuf message. A sum comes first, then who writes.

use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, ensure};
use prost::Message as _;

/// The directory of the log in a data directory.
#[must_use]
pub fn log_of(data: &Path) -> std::path::PathBuf {
    data.join("member").join("wal")
}

/// The member whose data this is; `None` if no log was begun.
///
/// # Errors
/// When the log cannot be read, or is none.
pub fn member(data: &Path) -> anyhow::Result<Option<u64>> {
    let log = log_of(data);
    let files = match std::fs::read_dir(&log) {
        Ok(files) => files,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("read {}", log.display())),
    };
    let mut first = None;
    for file in files {
        let path = file
            .with_context(|| format!("read {}", log.display()))?
            .path();
        // Others are not finished, or were found broken.
        if path.extension().is_some_and(|ending| ending == "wal") {
            first = Some(first.map_or(path.clone(), |first| path.min(first)));
        }
    }
    let Some(first) = first else {
        return Ok(None);
    };
    let mut head = Vec::new();
    std::fs::File::open(&first)
        .and_then(|file| file.take(HEAD_BYTES).read_to_end(&mut head))
        .with_context(|| format!("read {}", first.display()))?;
    writer(&head)
        .map(Some)
        .with_context(|| format!("{} does not begin as etcd's log", first.display()))
}

/// The member that wrote the log with this beginning.
fn writer(mut head: &[u8]) -> anyhow::Result<u64> {
    loop {
        let (length, rest) = head.split_first_chunk::<8>().context("it ends early")?;
        let length = u64::from_le_bytes(*length);
        let padded = length >> 63 == 1;
        let padding = if padded { length >> 56 & 7 } else { 0 };
        let bytes = usize::try_from(length & (u64::MAX >> 8))?;
        ensure!(bytes <= rest.len(), "it ends early");
        let (record, rest) = rest.split_at(bytes);
        let record = Record::decode(record)?;
        match record.kind {
            METADATA => return Ok(Writer::decode(&record.data[..])?.member),
            SUM => {}
            other => anyhow::bail!("a record of kind {other} comes first"),
        }
        head = rest
            .get(usize::try_from(padding)?..)
            .context("it ends early")?;
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct Record {
    #[prost(int64, tag = "1")]
    kind: i64,
    #[prost(uint32, tag = "2")]
    sum: u32,
    #[prost(bytes = "vec", tag = "3")]
    data: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Writer {
    #[prost(uint64, tag = "1")]
    member: u64,
    #[prost(uint64, tag = "2")]
    cluster: u64,
}

const METADATA: i64 = 1;
const SUM: i64 = 4;
/// The first two records are far shorter.
const HEAD_BYTES: u64 = 4096;

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn framed(record: &Record) -> Vec<u8> {
        let bytes = record.encode_to_vec();
        let padding = (8 - bytes.len() % 8) % 8;
        let mut length = bytes.len() as u64;
        if padding > 0 {
            length |= (0x80 | padding as u64) << 56;
        }
        let mut framed = length.to_le_bytes().to_vec();
        framed.extend(bytes);
        framed.extend(std::iter::repeat_n(0, padding));
        framed
    }

    fn begin(member: u64) -> Vec<u8> {
        let sum = Record {
            kind: SUM,
            ..Record::default()
        };
        let who = Record {
            kind: METADATA,
            sum: 7,
            data: Writer { member, cluster: 5 }.encode_to_vec(),
        };
        [framed(&sum), framed(&who)].concat()
    }

    /// A log that this member has begun.
    pub(in crate::etcd) fn write(data: &Path, member: u64) {
        let log = log_of(data);
        std::fs::create_dir_all(&log).unwrap();
        std::fs::write(
            log.join("0000000000000000-0000000000000000.wal"),
            begin(member),
        )
        .unwrap();
    }

    #[test]
    fn a_log_says_who_writes_it() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(member(dir.path()).unwrap(), None);
        let log = log_of(dir.path());
        std::fs::create_dir_all(&log).unwrap();
        std::fs::write(log.join("0.tmp"), "").unwrap();
        assert_eq!(member(dir.path()).unwrap(), None, "it is not begun");
        write(dir.path(), 0x2963_5285_fc45_714a);
        assert_eq!(member(dir.path()).unwrap(), Some(0x2963_5285_fc45_714a));
    }

    #[test]
    fn what_is_no_log_is_an_error() {
        let whole = begin(u64::MAX);
        assert_eq!(writer(&whole).unwrap(), u64::MAX);
        for end in 0..whole.len() - 8 {
            assert!(writer(&whole[..end]).is_err(), "{end}");
        }
        assert!(writer(&[0xff; 64]).is_err());
        assert!(writer(&[0; 64]).is_err());
    }
}
