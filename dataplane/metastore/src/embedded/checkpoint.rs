//! Moving committed changes from memory into the engine, so that log space is free again.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::embedded::Inner;
use crate::embedded::layer::Layer;
use crate::embedded::ordered::Applied;
use crate::embedded::view::Frozen;
use crate::error::Error;

/// How the checkpoint thread is told that there is work.
#[derive(Debug, Default)]
pub(crate) struct Trigger {
    state: Mutex<TriggerState>,
    work: Condvar,
}

#[derive(Debug, Default)]
struct TriggerState {
    wanted: bool,
    closing: bool,
}

impl Trigger {
    /// Asks for a checkpoint.
    pub(crate) fn pull(&self) {
        self.state.lock().wanted = true;
        self.work.notify_one();
    }

    /// Ends the thread after what it is doing.
    pub(crate) fn close(&self) {
        self.state.lock().closing = true;
        self.work.notify_one();
    }

    /// Waits for work; `false` when there will be none.
    fn wait(&self) -> bool {
        let mut state = self.state.lock();
        while !state.wanted && !state.closing {
            self.work.wait(&mut state);
        }
        state.wanted = false;
        !state.closing
    }
}

/// The checkpoint thread.
pub(crate) fn run(inner: &Arc<Inner>) {
    while inner.trigger.wait() {
        if let Err(error) = checkpoint(inner) {
            tracing::error!(%error, "metadata checkpoint failed, the store takes no more commits");
            inner.fail(error);
            return;
        }
    }
}

/// Makes everything committed until now part of the engine, a few layers at a time, so that
/// commits that wait for memory need not wait for all of it.
pub(crate) fn checkpoint(inner: &Inner) -> Result<(), Error> {
    // One at a time.
    let mut done = inner.checkpointing.lock();
    let last = {
        let mut view = inner.view.write();
        view.freeze();
        view.committed
    };
    while *done < last {
        let (layers, mut applied) = oldest(
            &inner.view.read().frozen,
            inner.options.memory_bytes_max / 2,
        );
        if layers.is_empty() {
            // Even commits that changed nothing have numbers that must not be given again.
            applied = last;
        }
        let count = layers.iter().map(|layer| layer.cell_count()).sum();
        let progress = |done| inner.admit(done, count);
        progress(0);
        inner.engine.apply(&layers, applied, &progress)?;
        let base = inner.engine.snapshot()?;
        {
            let mut view = inner.view.write();
            view.base = base;
            view.frozen.drain(..layers.len());
        }
        *done = applied;
        inner.log.release(applied.lsn.next());
        inner.admit(1, 1);
    }
    Ok(())
}

/// The oldest layers, as many as make up one checkpoint, and how far they go.
fn oldest(frozen: &[Frozen], bytes_max: usize) -> (Vec<Arc<Layer>>, Applied) {
    let (mut layers, mut applied, mut bytes) = (Vec::new(), Applied::default(), 0);
    for frozen in frozen {
        bytes += frozen.layer.memory_bytes();
        if !layers.is_empty() && bytes > bytes_max {
            break;
        }
        layers.push(Arc::clone(&frozen.layer));
        applied = frozen.last;
    }
    (layers, applied)
}
