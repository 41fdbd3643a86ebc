//! Faults that tests let happen between this store and etcd.

use std::sync::atomic::{AtomicU64, Ordering};

use etcd_client::Txn;
use parking_lot::Mutex;

use crate::etcd::rpc::CallError;

/// Lets single calls that change something go wrong, as if the process died or the network held
/// a request back.
#[derive(Default)]
pub struct EtcdFaults {
    calls: AtomicU64,
    /// The number of the first call that does not come back; 0 for none.
    last: AtomicU64,
    /// The number of the call that is held back; 0 for none.
    late: AtomicU64,
    held_back: Mutex<Option<Txn>>,
}

/// What happens to a call.
pub(crate) enum Fate {
    Normal,
    /// It is executed, and its answer lost.
    AnswerLost,
    /// It is held back until the test lets it go.
    Late,
}

impl EtcdFaults {
    /// Lets calls that change something fail from number `call` on (the first is 1, counted from
    /// now). That call is executed and its answer lost; later ones never reach etcd. 0 ends this.
    pub fn die_at(&self, call: u64) {
        self.calls.store(0, Ordering::SeqCst);
        self.last.store(call, Ordering::SeqCst);
    }

    /// Holds the call number `call` back, counted from now, and fails it.
    pub fn hold_back(&self, call: u64) {
        self.calls.store(0, Ordering::SeqCst);
        self.late.store(call, Ordering::SeqCst);
    }

    /// How many such calls were made since the count began.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    pub(crate) fn next(&self) -> Result<Fate, CallError> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst) + 1;
        if self.late.load(Ordering::SeqCst) == call {
            return Ok(Fate::Late);
        }
        match self.last.load(Ordering::SeqCst) {
            last if last != 0 && call > last => {
                Err(CallError::Lost("the process is dead on purpose".to_owned()))
            }
            last if last == call => Ok(Fate::AnswerLost),
            _ => Ok(Fate::Normal),
        }
    }

    pub(crate) fn keep(&self, txn: Txn) -> CallError {
        *self.held_back.lock() = Some(txn);
        CallError::Lost("the call was held back on purpose".to_owned())
    }

    pub(crate) fn take(&self) -> Option<Txn> {
        self.held_back.lock().take()
    }
}
