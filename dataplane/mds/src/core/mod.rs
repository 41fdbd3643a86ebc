//! The deterministic core of one metadata rank.
//!
//! [`Core::handle`] takes an [`Event`] and the monotonic time and returns the [`Effect`]s the shell
//! has to carry out. A request runs as a function over the cache; where it lacks something it stops
//! (`Stop`), is parked, and later runs again from its start: it holds nothing meanwhile.
//!
//! | file | concern |
//! | --- | --- |
//! | `cache` | inodes, directories, entries in memory; what to load; eviction |
//! | `batch` | the open batch, what depends on it, commits |
//! | `commit` | answers, and the batches they wait for |
//! | `lease` | who caches what |
//! | `loads` | what loads bring in |
//! | `recalls` | asking for leases back |
//! | `recovery` | sessions that come back after a takeover |
//! | `requests` | requests in and out, resent ones |
//! | `run` | tasks: attempts, waits, time |
//! | `session` | sessions, reply cache, eviction |
//! | `tasks` | tasks that begin, wait and are given up |
//! | `locks` | flock and byte-range locks |
//! | `ops/*` | the operations |

mod batch;
mod cache;
mod commit;
mod event;
mod held;
mod ids;
mod lease;
mod loads;
mod locks;
mod node;
mod ops;
mod recalls;
mod recovery;
mod requests;
mod run;
mod session;
mod tasks;
#[cfg(test)]
mod tests;
mod turns;

pub use batch::Commit;
pub use cache::{EntryKey, LoadKey, Loaded};
pub use event::{
    Answer, CommitOutcome, Counter, Effect, Event, GroupChoice, Refusal, SealChunk, Token,
};
pub use run::{Core, Restored};

/// What a core is made with.
#[derive(Debug, Clone)]
pub struct Options {
    /// Rank this core serves.
    pub rank: hither_proto::ids::RankId,
    /// Epoch of the rank's authority.
    pub epoch: hither_proto::ids::Epoch,
    /// Time after its last renewal at which a session ends.
    pub session_lease: std::time::Duration,
    /// Time after a takeover in which only sessions that come back are served.
    pub replay_grace: std::time::Duration,
    /// Answer changes before they are in the store.
    pub early_answers: bool,
    /// Time an open batch may wait for company while nobody waits for it.
    pub batch_delay: std::time::Duration,
    /// Inodes kept in memory; beyond, clean and unleased ones are dropped.
    pub cached_inodes_max: usize,
    /// Inodes one session may have leases on; beyond, the oldest are asked back.
    pub session_inodes_max: usize,
}
