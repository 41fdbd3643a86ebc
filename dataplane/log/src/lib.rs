//! A segmented write-ahead log with group commit, and the file abstraction below it.
//!
//! The embedded metadata store and each chunkserver disk keep one [`Log`]: records are ordered and
//! copied into memory by [`Log::append`], one thread writes whatever has gathered and syncs it
//! once for everybody who waits in [`Log::flush`], and segments whose records are no longer needed
//! ([`Log::release`]) are written again. Segment files are filled with zeros when they are made,
//! so a flush never changes file metadata. `docs/formats/log.md` describes every byte.
//!
//! [`LogDir`] and [`LogFile`] are all that the log knows of the operating system. [`RealDir`] is
//! a directory; `CrashDisk` (feature `test-util`) is a disk in memory that loses what was not
//! synced, for the crash tests of this crate and of the crates above it.

#![forbid(unsafe_code)]

#[cfg(feature = "test-util")]
pub mod crash;
mod dir;
mod error;
mod flusher;
mod format;
mod housekeeper;
mod log;
mod options;
mod recover;
mod segments;
mod state;

pub use crate::dir::{DirEntry, LogDir, LogFile, RealDir};
pub use crate::error::Error;
pub use crate::format::{LogId, Lsn, RECORD_HEADER_BYTES, RecordKind};
pub use crate::log::{Appended, Log, LogSpace, Place};
pub use crate::options::LogOptions;
pub use crate::recover::{Record, Recovered};
