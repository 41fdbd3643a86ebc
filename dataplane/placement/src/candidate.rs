//! Servers as the planner sees them, and the order in which they are tried.

use std::cmp::Reverse;

use hither_labels::LabelSet;

/// Identity of a chunkserver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerKey(pub u64);

/// Identity of a disk within its chunkserver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskKey(pub u16);

/// Identity of a placement group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupKey(pub u32);

/// A chunkserver that may hold copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Identity.
    pub key: ServerKey,
    /// Zone, if known.
    pub zone: Option<String>,
    /// Region, if known.
    pub region: Option<String>,
    /// Address without port, for uniqueness by address; empty if unknown.
    pub host: String,
    /// Rack, if known.
    pub rack: Option<String>,
    /// Labels.
    pub labels: LabelSet,
    /// Space that new copies may take.
    pub free_bytes: u64,
    /// Space of all disks.
    pub total_bytes: u64,
    /// Writes and incoming copies in flight.
    pub load: u32,
    /// Connected and healthy. What an unusable server holds is not given up, but it takes nothing;
    /// a server that is lost for good is not on the list at all.
    pub usable: bool,
    /// Too busy for new copies now; this passes.
    pub busy: bool,
    /// Without space for new copies.
    pub full: bool,
    /// Down for work or about to be: holds what it has and takes nothing.
    pub maintenance: bool,
    /// Its copies are to leave; it serves reads until they have.
    pub draining: bool,
}

impl Candidate {
    /// A usable, idle and empty server without labels and places.
    #[must_use]
    pub fn new(key: ServerKey, total_bytes: u64) -> Self {
        Self {
            key,
            zone: None,
            region: None,
            host: String::new(),
            rack: None,
            labels: LabelSet::EMPTY,
            free_bytes: total_bytes,
            total_bytes,
            load: 0,
            usable: true,
            busy: false,
            full: false,
            maintenance: false,
            draining: false,
        }
    }
}

/// The order in which servers are to be tried for a new copy, as indices: most free space for each
/// operation in flight first, then by key.
#[must_use]
pub fn candidate_order(candidates: &[Candidate]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    order.sort_by_key(|index| {
        let candidate = &candidates[*index];
        (
            Reverse(space_score(candidate.free_bytes, candidate.load)),
            candidate.key,
        )
    });
    order
}

/// Free space for each operation in flight, counting the one to come.
pub(crate) fn space_score(free_bytes: u64, load: u32) -> u64 {
    free_bytes / (u64::from(load) + 1)
}

/// A number that looks random and depends on both arguments (the finisher of SplitMix64).
pub(crate) fn mix(seed: u64, value: u64) -> u64 {
    let mut z = seed
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(value)
        .wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_space_counts_for_and_load_against() {
        let server = |key, free_bytes, load| Candidate {
            free_bytes,
            load,
            ..Candidate::new(ServerKey(key), 1000)
        };
        let servers = [
            server(1, 100, 0),
            server(2, 900, 8),
            server(3, 400, 1),
            server(4, 100, 0),
        ];
        assert_eq!(candidate_order(&servers), [2, 0, 1, 3]);
    }
}
