//! What a change of class would move, before anything moves.

use std::collections::BTreeMap;

use hither_labels::{Form, Mode, StorageDefinition};

use crate::candidate::{Candidate, ServerKey, candidate_order, space_score};
use crate::matcher::{Cause, Existing, Matcher, TermOutcome};

/// Whether the servers that are present can satisfy a definition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fulfilment {
    /// Now.
    Yes,
    /// Once servers are less busy.
    Busy,
    /// Not before servers have space, or come back from maintenance.
    NoSpace,
    /// Not with these servers; the terms (counted from 0) that have none, and why.
    No(Vec<(usize, Cause)>),
}

/// How the data of a set is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Layout {
    /// Whole copies.
    Copies,
    /// Erasure-coded with so many data parts and parity parts.
    Parts {
        /// Number of data parts.
        data: u8,
        /// Number of parity parts.
        parity: u8,
    },
}

/// Chunks that stand on the same servers: a placement group, or part of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopySet {
    /// How the data is laid out now.
    pub layout: Layout,
    /// The holders; for parts, in the order of part numbers, `None` for a part that is missing.
    pub servers: Vec<Option<ServerKey>>,
    /// Number of chunks.
    pub chunks: u64,
    /// Length of the data, counted once.
    pub bytes: u64,
}

/// What moves into and out of one zone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ZoneMoves {
    /// Copies or parts to be made here.
    pub copies_in: u64,
    /// Bytes to be written here.
    pub bytes_in: u64,
    /// Copies or parts to be deleted here, after their replacements are durable.
    pub copies_out: u64,
    /// Bytes that this frees.
    pub bytes_out: u64,
}

/// What a change of class would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DryRun {
    /// Whether the present servers can satisfy the definition.
    pub fulfilment: Fulfilment,
    /// Whether the change is to be refused unless forced: strict, and not satisfiable.
    pub is_refused: bool,
    /// Moves by zone; servers without a zone, or no longer known, under `None`.
    pub zones: BTreeMap<Option<String>, ZoneMoves>,
    /// Number of sets whose holders change.
    pub sets_changed: usize,
    /// Chunks in sets of which a copy would stand on a server that does not match.
    pub chunks_spilled: u64,
    /// Chunks in sets of which a copy would be missing, for now or for good.
    pub chunks_short: u64,
}

/// Whether the servers that are present can satisfy the definition, all terms together.
#[must_use]
pub fn fulfilment(
    definition: &StorageDefinition,
    default_data_parts: u8,
    candidates: &[Candidate],
) -> Fulfilment {
    let terms = definition.terms(default_data_parts);
    let matcher = Matcher::new(&terms, definition.uniqueness(), candidates);
    let placement = matcher.place(&candidate_order(candidates), &[], Mode::Strict);
    let mut missing = Vec::new();
    let mut best = Fulfilment::Yes;
    for (index, term) in placement.terms.iter().enumerate() {
        match term.outcome {
            TermOutcome::Matched | TermOutcome::Spilled(_) => {}
            TermOutcome::Waits(_) if best == Fulfilment::Yes => best = Fulfilment::Busy,
            TermOutcome::Waits(_) => {}
            TermOutcome::Unsatisfied(Cause::Full | Cause::Away) => best = Fulfilment::NoSpace,
            TermOutcome::Unsatisfied(cause) => missing.push((index, cause)),
        }
    }
    if missing.is_empty() {
        best
    } else {
        Fulfilment::No(missing)
    }
}

/// What would move if the chunks of the sets came under the definition with this mode.
///
/// Copies that already stand well stay. Space taken by the moves counts when later sets are
/// placed. Servers that are busy now count as able, because the moves take time.
#[must_use]
pub fn dry_run(
    definition: &StorageDefinition,
    mode: Mode,
    default_data_parts: u8,
    sets: &[CopySet],
    candidates: &[Candidate],
) -> DryRun {
    let fulfilment = fulfilment(definition, default_data_parts, candidates);
    let is_refused = mode == Mode::Strict && matches!(fulfilment, Fulfilment::No(_));
    let result = DryRun {
        fulfilment,
        is_refused,
        zones: BTreeMap::new(),
        sets_changed: 0,
        chunks_spilled: 0,
        chunks_short: 0,
    };
    let calm: Vec<Candidate> = candidates
        .iter()
        .map(|server| Candidate {
            busy: false,
            ..server.clone()
        })
        .collect();
    let terms = definition.terms(default_data_parts);
    let mut run = Run {
        matcher: Matcher::new(&terms, definition.uniqueness(), &calm),
        candidates: &calm,
        layout: layout_of(definition, default_data_parts),
        mode,
        free_bytes: calm.iter().map(|server| server.free_bytes).collect(),
        result,
    };
    for set in sets {
        run.add(set);
    }
    run.result
}

struct Run<'a> {
    matcher: Matcher<'a>,
    candidates: &'a [Candidate],
    layout: Layout,
    mode: Mode,
    free_bytes: Vec<u64>,
    result: DryRun,
}

impl Run<'_> {
    fn add(&mut self, set: &CopySet) {
        // Another layout makes everything anew; what is there serves as the source.
        let is_kept = set.layout == self.layout;
        let existing: Vec<Existing> = set
            .servers
            .iter()
            .enumerate()
            .filter_map(|(part, server)| {
                let term = matches!(set.layout, Layout::Parts { .. }).then_some(part);
                server
                    .filter(|_| is_kept)
                    .map(|server| Existing { server, term })
            })
            .collect();
        let placement = self.matcher.place(&self.order(), &existing, self.mode);
        let new_bytes = piece_bytes(self.layout, set.bytes);
        let mut is_changed = false;
        let mut short = 0;
        let mut spilled = false;
        for term in &placement.terms {
            spilled |= matches!(term.outcome, TermOutcome::Spilled(_));
            match term.server {
                None => short += 1,
                Some(_) if term.is_existing => {}
                Some(server) => {
                    is_changed = true;
                    self.free_bytes[server] = self.free_bytes[server].saturating_sub(new_bytes);
                    let zone = self.zone_of(server);
                    zone.copies_in += set.chunks;
                    zone.bytes_in += new_bytes;
                }
            }
        }
        let leaving: Vec<ServerKey> = if is_kept {
            // A copy stays as long as a term is short of one.
            let surplus = placement
                .surplus
                .iter()
                .map(|index| existing[*index].server);
            surplus.skip(short).collect()
        } else if short == 0 {
            set.servers.iter().flatten().copied().collect()
        } else {
            Vec::new()
        };
        let old_bytes = piece_bytes(set.layout, set.bytes);
        for server in leaving {
            is_changed = true;
            let Some(server) = self.matcher.index_of(server) else {
                continue;
            };
            let zone = self.zone_of(server);
            zone.copies_out += set.chunks;
            zone.bytes_out += old_bytes;
        }
        self.result.sets_changed += usize::from(is_changed);
        self.result.chunks_spilled += if spilled { set.chunks } else { 0 };
        self.result.chunks_short += if short > 0 { set.chunks } else { 0 };
    }

    fn zone_of(&mut self, server: usize) -> &mut ZoneMoves {
        self.result
            .zones
            .entry(self.candidates[server].zone.clone())
            .or_default()
    }

    /// As [`candidate_order`], with the space that the moves so far leave.
    fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.candidates.len()).collect();
        order.sort_by_cached_key(|index| {
            let server = &self.candidates[*index];
            let score = space_score(self.free_bytes[*index], server.load);
            (std::cmp::Reverse(score), server.key)
        });
        order
    }
}

fn layout_of(definition: &StorageDefinition, default_data_parts: u8) -> Layout {
    match definition.form() {
        Form::Copies(_) => Layout::Copies,
        Form::Parts(parts) => Layout::Parts {
            data: parts.data_parts().unwrap_or(default_data_parts),
            parity: parts.parity_parts(),
        },
    }
}

/// Length of one copy or part.
fn piece_bytes(layout: Layout, bytes: u64) -> u64 {
    match layout {
        Layout::Copies => bytes,
        Layout::Parts { data, .. } => bytes.div_ceil(u64::from(data.max(1))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(key: u64, zone: &str, labels: &str) -> Candidate {
        Candidate {
            zone: Some(zone.to_owned()),
            labels: labels.parse().unwrap(),
            ..Candidate::new(ServerKey(key), 1 << 40)
        }
    }

    fn set(servers: &[u64], chunks: u64) -> CopySet {
        CopySet {
            layout: Layout::Copies,
            servers: servers.iter().map(|key| Some(ServerKey(*key))).collect(),
            chunks,
            bytes: chunks * 100,
        }
    }

    fn definition(text: &str) -> StorageDefinition {
        text.parse().unwrap()
    }

    fn zone<'a>(run: &'a DryRun, name: &str) -> &'a ZoneMoves {
        &run.zones[&Some(name.to_owned())]
    }

    #[test]
    fn only_copies_that_stand_wrong_move() {
        let servers = [
            server(1, "a", "A"),
            server(2, "b", "B"),
            server(3, "a", "A"),
        ];
        let sets = [set(&[1, 2], 10), set(&[1, 3], 5)];
        let run = dry_run(&definition("A,B"), Mode::Std, 8, &sets, &servers);
        assert_eq!(run.fulfilment, Fulfilment::Yes);
        assert_eq!(run.sets_changed, 1);
        assert_eq!(
            zone(&run, "b"),
            &ZoneMoves {
                copies_in: 5,
                bytes_in: 500,
                ..ZoneMoves::default()
            }
        );
        assert_eq!(
            zone(&run, "a"),
            &ZoneMoves {
                copies_out: 5,
                bytes_out: 500,
                ..ZoneMoves::default()
            }
        );
        assert_eq!(
            (run.chunks_short, run.chunks_spilled, run.is_refused),
            (0, 0, false)
        );
    }

    #[test]
    fn a_strict_class_that_no_server_satisfies_is_refused_and_deletes_nothing() {
        let servers = [server(1, "a", "A"), server(2, "b", "B")];
        let run = dry_run(
            &definition("2Z"),
            Mode::Strict,
            8,
            &[set(&[1, 2], 7)],
            &servers,
        );
        assert!(run.is_refused);
        assert_eq!(
            run.fulfilment,
            Fulfilment::No(vec![(0, Cause::NoServer), (1, Cause::NoServer)])
        );
        assert!(run.zones.is_empty());
        assert_eq!(run.chunks_short, 7);
        let loose = dry_run(
            &definition("2Z"),
            Mode::Loose,
            8,
            &[set(&[1, 2], 7)],
            &servers,
        );
        assert_eq!(
            (loose.is_refused, loose.chunks_spilled, loose.sets_changed),
            (false, 7, 0)
        );
    }

    #[test]
    fn fulfilment_tells_busy_full_and_taken_apart() {
        let mut servers = [server(1, "a", "A"), server(2, "a", "A")];
        let of = |text: &str, servers: &[Candidate]| fulfilment(&definition(text), 8, servers);
        assert_eq!(of("2A", &servers), Fulfilment::Yes);
        assert_eq!(
            of("2A/[ZONE]", &servers),
            Fulfilment::No(vec![(1, Cause::Taken)])
        );
        servers[0].busy = true;
        assert_eq!(of("2A", &servers), Fulfilment::Busy);
        servers[1].full = true;
        assert_eq!(of("2A", &servers), Fulfilment::NoSpace);
        assert_eq!(
            of("2A,B", &servers),
            Fulfilment::No(vec![(2, Cause::NoServer)])
        );
    }

    #[test]
    fn erasure_coding_makes_every_part_anew() {
        let servers: Vec<Candidate> = (1..=4).map(|key| server(key, "a", "")).collect();
        let run = dry_run(
            &definition("@2+1"),
            Mode::Std,
            8,
            &[set(&[1, 2], 10)],
            &servers,
        );
        assert_eq!(
            zone(&run, "a"),
            &ZoneMoves {
                copies_in: 30,
                bytes_in: 1500,
                copies_out: 20,
                bytes_out: 2000
            }
        );
        // With too few servers for the parts the copies stay.
        let run = dry_run(
            &definition("@4+1"),
            Mode::Std,
            8,
            &[set(&[1, 2], 10)],
            &servers,
        );
        assert_eq!(zone(&run, "a").copies_out, 0);
        assert_eq!(run.chunks_short, 10);
    }

    #[test]
    fn space_that_moves_take_counts_for_the_next_set() {
        let servers: Vec<Candidate> = [1, 2]
            .iter()
            .map(|key| Candidate {
                free_bytes: 1000,
                ..server(*key, &key.to_string(), "A")
            })
            .chain([server(3, "old", "B")])
            .collect();
        let sets = [set(&[3], 5), set(&[3], 5)];
        let run = dry_run(&definition("A"), Mode::Std, 8, &sets, &servers);
        assert_eq!(
            (zone(&run, "1").copies_in, zone(&run, "2").copies_in),
            (5, 5)
        );
        assert_eq!(zone(&run, "old").copies_out, 10);
    }
}
