//! What a disk stands on: a directory, and how much room there is.

use std::fmt::Debug;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use hither_log::{LogDir, RealDir};

/// Room on a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Size of the file system in bytes.
    pub total_bytes: u64,
    /// Bytes that this process may still use.
    pub free_bytes: u64,
}

/// Tells how much room a disk has.
pub trait Probe: Debug + Send + Sync + 'static {
    /// Room now.
    fn space(&self) -> io::Result<Space>;
}

/// What a disk stands on.
#[derive(Debug, Clone)]
pub struct Medium {
    /// Where it is, for messages.
    pub path: String,
    /// The directory.
    pub dir: Arc<dyn LogDir>,
    /// How much room there is.
    pub probe: Arc<dyn Probe>,
}

impl Medium {
    /// The directory at `path`, made when it is missing.
    pub fn real(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        Ok(Self {
            path: path.display().to_string(),
            dir: Arc::new(RealDir::open(&path)?),
            probe: Arc::new(RealProbe { path }),
        })
    }
}

#[derive(Debug)]
struct RealProbe {
    path: PathBuf,
}

impl Probe for RealProbe {
    fn space(&self) -> io::Result<Space> {
        let found = rustix::fs::statvfs(&self.path)?;
        Ok(Space {
            total_bytes: found.f_blocks.saturating_mul(found.f_frsize),
            free_bytes: found.f_bavail.saturating_mul(found.f_frsize),
        })
    }
}
