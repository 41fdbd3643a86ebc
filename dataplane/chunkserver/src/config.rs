//! Settings of a chunkserver.

use std::path::PathBuf;

use hither_chunkstore::StoreOptions;
use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// Settings of a chunkserver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ChunkServerConfig {
    /// Where to listen, `host:port`; port 0 takes a free one. Default `0.0.0.0:7420`.
    pub listen: String,
    /// Address that clients and other servers are told; empty: the address bound to.
    pub advertise: String,
    /// Directories, each one disk. A new empty one is formatted.
    pub disks: Vec<PathBuf>,
    /// Zone of the server, empty: none.
    pub zone: String,
    /// Region of the server, empty: none.
    pub region: String,
    /// Node (machine) the server runs on, empty: the host of its address.
    pub node: String,
    /// What whoever runs the server calls it, such as the name of its pod; empty: nothing.
    pub name: String,
    /// Labels: letters `A` to `Z` and `key=value`.
    pub labels: Vec<String>,
    /// Addresses of the managers, any order.
    pub managers: Vec<String>,
    /// Time in which a manager has to be found at the start, milliseconds. Default 60 000.
    pub start_timeout_ms: u64,
    /// Time between signs of life, milliseconds. Default 500.
    pub beat_ms: u64,
    /// Free bytes below which a disk is full: new chunks go elsewhere. Below half of them new chunks
    /// and longer copies are refused, below a quarter holes inside copies stay holes too. Should be
    /// more than four times what the log of the disk may have and `overlay_bytes_max` together. Default 1 GiB.
    #[serde(deserialize_with = "size")]
    pub floor_bytes: u64,
    /// Bytes of one segment of a disk's log, a multiple of 4096, at least 256 KiB, fixed when the
    /// disk is formatted. Default 32 MiB.
    #[serde(deserialize_with = "size")]
    pub log_segment_bytes: u64,
    /// Segments the log of a disk may have, at least 3. Default 8.
    pub log_segments_max: u32,
    /// Bytes of small writes that one disk keeps in memory until they are in place. Default 64 MiB.
    #[serde(deserialize_with = "size")]
    pub overlay_bytes_max: usize,
    /// Threads of one disk for reads and writes, and as many for syncs. Default 4.
    pub disk_threads: usize,
    /// Requests that may be under way; beyond, the answer is `BUSY`. Default 4096.
    pub requests_max: usize,
    /// Bytes of payload that may be under way, of reads too; beyond, the answer is `BUSY`.
    /// Default 256 MiB.
    #[serde(deserialize_with = "size")]
    pub request_bytes_max: usize,
    /// Bytes a second that this server fetches to fill groups; 0: no limit. Default 0.
    #[serde(deserialize_with = "size")]
    pub fill_bytes_per_second: u64,
    /// Days in which every copy is read and verified once; 0: never. Default 14.
    pub scrub_days: u32,
    /// Copies that are fetched at the same time. Default 4.
    pub fill_parallel: usize,
    /// Time one member of a chain gets to answer, milliseconds, for each member behind it once
    /// more. Default 1000.
    pub link_timeout_ms: u64,
}

impl Default for ChunkServerConfig {
    fn default() -> Self {
        let store = StoreOptions::default();
        Self {
            listen: "0.0.0.0:7420".into(),
            advertise: String::new(),
            disks: Vec::new(),
            zone: String::new(),
            region: String::new(),
            node: String::new(),
            name: String::new(),
            labels: Vec::new(),
            managers: Vec::new(),
            start_timeout_ms: 60_000,
            beat_ms: 500,
            floor_bytes: store.floor_bytes,
            log_segment_bytes: store.log_segment_bytes,
            log_segments_max: store.log_segments_max,
            overlay_bytes_max: store.overlay_bytes_max,
            disk_threads: store.threads,
            requests_max: 4096,
            request_bytes_max: 256 << 20,
            fill_bytes_per_second: 0,
            scrub_days: 14,
            fill_parallel: 4,
            link_timeout_ms: 1000,
        }
    }
}

impl ChunkServerConfig {
    /// What of it concerns the disks.
    pub(crate) fn store_options(&self) -> StoreOptions {
        StoreOptions {
            floor_bytes: self.floor_bytes,
            log_segment_bytes: self.log_segment_bytes,
            log_segments_max: self.log_segments_max.max(3),
            overlay_bytes_max: self.overlay_bytes_max,
            threads: self.disk_threads,
            jobs_max: self.requests_max,
            ..StoreOptions::default()
        }
    }
}

/// A size: a number of bytes, or a text such as `10GiB`.
fn size<'de, D: Deserializer<'de>, N: TryFrom<u64>>(source: D) -> Result<N, D::Error> {
    struct Size;
    impl Visitor<'_> for Size {
        type Value = u64;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a size such as 1073741824 or 1GiB")
        }

        fn visit_u64<E: Error>(self, bytes: u64) -> Result<u64, E> {
            Ok(bytes)
        }

        fn visit_i64<E: Error>(self, bytes: i64) -> Result<u64, E> {
            u64::try_from(bytes).map_err(|_| E::invalid_value(Unexpected::Signed(bytes), &self))
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<u64, E> {
            hither_proto::size::bytes_of(text)
                .ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
        }
    }
    let bytes = source.deserialize_any(Size)?;
    N::try_from(bytes).map_err(|_| D::Error::invalid_value(Unexpected::Unsigned(bytes), &Size))
}

#[cfg(test)]
mod tests {
    use serde::de::IntoDeserializer as _;
    use serde::de::value::{Error, MapDeserializer, StrDeserializer, U64Deserializer};

    use super::*;

    #[test]
    fn a_setting_that_does_not_exist_is_told() {
        let written = [("floor_byts", 5u64)];
        let fields: MapDeserializer<'_, _, Error> = MapDeserializer::new(written.into_iter());
        let error = ChunkServerConfig::deserialize(fields).unwrap_err();
        assert!(error.to_string().contains("floor_byts"), "{error}");
    }

    #[test]
    fn sizes_are_numbers_or_have_a_unit() {
        let text: StrDeserializer<'_, Error> = "2Gi".into_deserializer();
        assert_eq!(size::<_, u64>(text), Ok(2 << 30));
        let number: U64Deserializer<Error> = 4096u64.into_deserializer();
        assert_eq!(size::<_, usize>(number), Ok(4096));
        let wrong: StrDeserializer<'_, Error> = "2Qi".into_deserializer();
        let error = size::<_, u64>(wrong).unwrap_err().to_string();
        assert!(error.contains("1GiB"), "{error}");
    }
}
