//! The embedded store does what every backend has to do.

#![allow(clippy::unwrap_used, reason = "a failed helper fails its test")]

use std::sync::Arc;

use hither_log::crash::CrashDisk;
use hither_log::{LogDir, RealDir};
use hither_metastore::conformance::Harness;
use hither_metastore::{EmbeddedOptions, EmbeddedStore};

/// Stores in temporary directories, which go when the harness goes.
#[derive(Default)]
struct OnFiles {
    dirs: parking_lot::Mutex<Vec<tempfile::TempDir>>,
}

/// Stores in memory that checkpoint and fill their logs all the time.
struct Cramped;

impl Harness for OnFiles {
    type Store = EmbeddedStore;

    async fn store(&self) -> EmbeddedStore {
        let temp = tempfile::tempdir().unwrap();
        let dir: Arc<dyn LogDir> = Arc::new(RealDir::open(temp.path()).unwrap());
        self.dirs.lock().push(temp);
        let options = EmbeddedOptions {
            log_segment_bytes: 16 << 20,
            ..Default::default()
        };
        EmbeddedStore::open(&dir, options).unwrap()
    }
}

impl Harness for Cramped {
    type Store = EmbeddedStore;

    async fn store(&self) -> EmbeddedStore {
        let options = EmbeddedOptions {
            log_segment_bytes: 16 << 20,
            log_segments_max: 2,
            checkpoint_bytes: 2 << 10,
            memory_bytes_max: 64 << 10,
            cache_bytes: 1 << 20,
            ..Default::default()
        };
        EmbeddedStore::open(&CrashDisk::new().root(), options).unwrap()
    }
}

mod on_files {
    hither_metastore::conformance_tests!(super::OnFiles::default());
}

mod cramped {
    hither_metastore::conformance_tests!(super::Cramped);
}
