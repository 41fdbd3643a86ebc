//! The order in which a mount contacts the servers of a chunk.
//!
//! Both orders are permutations of what was received: they never drop a server. With failure
//! memory off the caller passes no suspects, which leaves rank, load and received order only.

use crate::preferred::{PreferredLabels, Rank};
use crate::set::LabelSet;

/// What a client knows of one server of an answer, in the order received.
#[derive(Debug, Clone, Copy)]
pub struct ServerView<'a> {
    /// The labels that the answer gives; see [`effective_labels`](crate::effective_labels).
    pub labels: &'a LabelSet,
    /// Whether the failure memory of this mount holds something against the server.
    pub suspect: bool,
    /// Operations of this mount that run against the server now, reads and writes together.
    pub in_flight: u32,
}

/// What kind of answer the list of servers is. The storage class of the chunk does not matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Servers that hold whole copies.
    Copies,
    /// Servers that hold erasure-coded parts; the position is the part number.
    Parts,
}

/// The order for a read, as indices into `servers`: suspects last, then rank, then operations in
/// flight, then the order received. Parts keep their positions.
#[must_use]
pub fn read_order(
    preferred: &PreferredLabels,
    answer: Answer,
    servers: &[ServerView<'_>],
) -> Vec<usize> {
    sorted(answer, servers, |server| {
        (
            server.suspect,
            preferred.rank(server.labels),
            server.in_flight,
        )
    })
}

/// The order for a write, as indices into `servers`: suspects last, then rank, then the order
/// received. The result is the chain. Parts keep their positions.
#[must_use]
pub fn write_order(
    preferred: &PreferredLabels,
    answer: Answer,
    servers: &[ServerView<'_>],
) -> Vec<usize> {
    sorted(answer, servers, |server| {
        (server.suspect, preferred.rank(server.labels), 0)
    })
}

type SortKey = (bool, Rank, u32);

fn sorted(
    answer: Answer,
    servers: &[ServerView<'_>],
    key: impl Fn(&ServerView<'_>) -> SortKey,
) -> Vec<usize> {
    if answer == Answer::Parts {
        return (0..servers.len()).collect();
    }
    // Ranks are computed once each; the index keeps the sort stable.
    let mut keyed: Vec<(SortKey, usize)> = servers
        .iter()
        .enumerate()
        .map(|(index, server)| (key(server), index))
        .collect();
    keyed.sort_unstable();
    keyed.into_iter().map(|(_, index)| index).collect()
}

#[cfg(test)]
#[path = "order_tests.rs"]
mod tests;
