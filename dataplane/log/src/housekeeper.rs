//! The thread that makes room: it records releases in the control file and creates segments.

use std::sync::Arc;

use crate::dir::{LogDir, LogFile};
use crate::error::Error;
use crate::format::Control;
use crate::segments::SegmentIndex;
use crate::state::Shared;

enum Job {
    /// Write the control file; then these segments are free.
    Release(Vec<SegmentIndex>, Control),
    Create(SegmentIndex),
}

/// Runs until the log is closed or poisoned.
pub(crate) fn run(shared: &Shared) {
    while let Some(job) = next_job(shared) {
        match job {
            Job::Release(segments, control) => {
                if let Err(error) = shared.control.lock().write(control) {
                    tracing::error!(%error, "log control file not written, the log takes no more");
                    shared.poison(error);
                    return;
                }
                shared.state.lock().segments.released(&segments);
            }
            Job::Create(index) => {
                match create_segment(shared.dir.as_ref(), index, shared.segment_bytes) {
                    Ok(file) => {
                        shared.files.write().insert(index, file);
                        shared.state.lock().segments.created(index);
                    }
                    Err(error) => {
                        tracing::warn!(%error, "log cannot grow, it stays as large as it is");
                        shared.state.lock().segments.creation_failed();
                    }
                }
            }
        }
        shared.room_has_changed();
    }
}

fn next_job(shared: &Shared) -> Option<Job> {
    let mut state = shared.state.lock();
    loop {
        if state.closing || state.poison.is_some() {
            return None;
        }
        let released = state.segments.take_releasing();
        if !released.is_empty() {
            let (needed, durable) = (state.needed(), state.durable);
            drop(state);
            let control = Control {
                needed,
                durable,
                ..shared.control.lock().written
            };
            return Some(Job::Release(released, control));
        }
        if let Some(index) = state.segments.to_create() {
            return Some(Job::Create(index));
        }
        shared.house_work.wait(&mut state);
    }
}

/// Makes a segment file full of zeros, so that later writes change nothing but its data. It gets
/// its name when it is durable; what an interrupted attempt left under the other name goes first.
pub(crate) fn create_segment(
    dir: &dyn LogDir,
    index: SegmentIndex,
    segment_bytes: u64,
) -> Result<Arc<dyn LogFile>, Error> {
    let name = index.to_string();
    let unfinished = format!("{name}{UNFINISHED_SUFFIX}");
    let io = |error| Error::io("create", &name, error);
    match dir.remove(&unfinished) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io(error)),
        _ => {}
    }
    let file = dir.create(&unfinished).map_err(io)?;
    let zeros = vec![0; ZERO_WRITE_BYTES.min(usize::try_from(segment_bytes).unwrap_or(usize::MAX))];
    let mut offset = 0;
    while offset < segment_bytes {
        let size_bytes = (zeros.len() as u64).min(segment_bytes - offset);
        let piece = usize::try_from(size_bytes).map_or(&zeros[..], |end| &zeros[..end]);
        file.write_at(piece, offset).map_err(io)?;
        offset += size_bytes;
    }
    file.sync_data().map_err(io)?;
    dir.rename(&unfinished, &name).map_err(io)?;
    dir.sync_dir().map_err(io)?;
    Ok(file)
}

/// Starts the thread.
pub(crate) fn spawn(shared: &Arc<Shared>) -> Result<std::thread::JoinHandle<()>, Error> {
    let shared = Arc::clone(shared);
    std::thread::Builder::new()
        .name("log-housekeeper".to_owned())
        .spawn(move || run(&shared))
        .map_err(|error| Error::io("start a thread for", "housekeeper", error))
}

const UNFINISHED_SUFFIX: &str = ".new";
const ZERO_WRITE_BYTES: usize = 1 << 20;
