//! Joint matching of the terms of a definition to servers.
//!
//! Each term (copy or part) gets a server that satisfies its expression, and each uniqueness group
//! of servers is used at most once. Terms and groups form a bipartite graph; the cheapest maximum
//! matching in it is found by augmenting paths, never term by term. In order of importance it
//!
//! 1. satisfies as many terms as possible by copies that exist or servers that can take one now,
//! 2. for the rest names a server that is only busy rather than one that is full or in maintenance,
//! 3. keeps as many existing copies as possible,
//! 4. takes servers early in the caller's order.
//!
//! What becomes of a term without a server that can take its copy now is up to the mode.

use std::collections::BTreeMap;

use hither_labels::{LabelExpr, LetterMask, Mode, Uniqueness};

use crate::assign::{FORBIDDEN, cheapest_assignment};
use crate::candidate::{Candidate, ServerKey};

/// Largest number of servers in one matching.
pub const MAX_CANDIDATES: usize = 1 << 20;

/// Why no server could take the copy of a term in the wanted place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// The matching servers are busy.
    Busy,
    /// The matching servers are full.
    Full,
    /// The matching servers are in maintenance, draining or not reachable.
    Away,
    /// Matching servers exist, but other terms or the uniqueness rule use them up.
    Taken,
    /// No server satisfies the expression.
    NoServer,
}

/// What becomes of one term.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TermOutcome {
    /// A server satisfies the term.
    Matched,
    /// A server that does not satisfy the term takes the copy for now.
    Spilled(Cause),
    /// The copy is made later, when a server is less busy.
    Waits(Cause),
    /// There is no place: no space when a chunk is created, no copy in repair.
    Unsatisfied(Cause),
}

/// The place of one term.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TermPlacement {
    /// Index of the server among the candidates; present if matched or spilled.
    pub server: Option<usize>,
    /// Whether the copy is there already.
    pub is_existing: bool,
    /// What became of the term.
    pub outcome: TermOutcome,
}

/// The places of all terms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// One entry for each term, in the order of the terms.
    pub terms: Vec<TermPlacement>,
    /// Existing copies, as indices into what the caller gave, that no term needs.
    pub surplus: Vec<usize>,
}

impl Placement {
    /// Whether every term has a server that satisfies it.
    #[must_use]
    pub fn is_satisfied(&self) -> bool {
        self.terms
            .iter()
            .all(|term| term.outcome == TermOutcome::Matched)
    }

    /// Whether a term has to wait.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.terms
            .iter()
            .any(|term| matches!(term.outcome, TermOutcome::Waits(_)))
    }

    /// Number of terms with a server.
    #[must_use]
    pub fn placed(&self) -> usize {
        self.terms
            .iter()
            .filter(|term| term.server.is_some())
            .count()
    }
}

/// A copy or part that is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Existing {
    /// The server that holds it.
    pub server: ServerKey,
    /// The term it stands for: the number of a part. `None` for a whole copy, which may stand for
    /// any term.
    pub term: Option<usize>,
}

/// The terms and servers of a matching, prepared for any number of placements.
#[derive(Debug)]
pub struct Matcher<'a> {
    candidates: &'a [Candidate],
    /// For each term the index of its expression among the distinct ones.
    expr_of: Vec<usize>,
    /// For each distinct expression, whether each candidate satisfies it.
    matches: Vec<Vec<bool>>,
    /// For each candidate the number of its uniqueness group.
    group_of: Vec<usize>,
    index_of: BTreeMap<ServerKey, usize>,
}

/// An existing copy that counts.
#[derive(Clone, Copy)]
struct Holder {
    /// Index of the server among the candidates.
    server: usize,
    /// The only term the copy can stand for, if it is a part.
    fixed: Option<usize>,
    /// Index of the copy in what the caller gave.
    copy: usize,
}

impl Holder {
    fn may_serve(&self, term: usize) -> bool {
        self.fixed.is_none_or(|fixed| fixed == term)
    }
}

/// A possible pair of a term and a uniqueness group.
#[derive(Clone, Copy)]
struct Edge {
    server: usize,
    tier: Tier,
    cost: i64,
}

/// How well a server can provide for a term, best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Tier {
    Existing,
    Free,
    Busy,
    Full,
    Away,
}

impl<'a> Matcher<'a> {
    /// Prepares a matching for at most 64 terms (with more, the order of importance is no longer
    /// kept between the terms). Only the first [`MAX_CANDIDATES`] candidates count; of several with one
    /// key the first.
    #[must_use]
    pub fn new(terms: &[&LabelExpr], uniqueness: Uniqueness, candidates: &'a [Candidate]) -> Self {
        let candidates = &candidates[..candidates.len().min(MAX_CANDIDATES)];
        let mut distinct: Vec<&LabelExpr> = Vec::new();
        let mut expr_of = Vec::with_capacity(terms.len());
        for term in terms {
            let known = distinct.iter().position(|other| other == term);
            expr_of.push(known.unwrap_or(distinct.len()));
            if known.is_none() {
                distinct.push(term);
            }
        }
        let matches = distinct
            .iter()
            .map(|expr| {
                candidates
                    .iter()
                    .map(|server| expr.matches(&server.labels))
                    .collect()
            })
            .collect();
        let mut index_of = BTreeMap::new();
        for (index, candidate) in candidates.iter().enumerate() {
            index_of.entry(candidate.key).or_insert(index);
        }
        let group_of = uniqueness_groups(uniqueness, candidates, &index_of);
        Self {
            candidates,
            expr_of,
            matches,
            group_of,
            index_of,
        }
    }

    /// Index of a server among the candidates.
    #[must_use]
    pub fn index_of(&self, server: ServerKey) -> Option<usize> {
        self.index_of.get(&server).copied()
    }

    /// Whether two candidates may not both hold a copy of one chunk.
    #[must_use]
    pub fn collide(&self, one: usize, other: usize) -> bool {
        self.group_of[one] == self.group_of[other]
    }

    /// Whether the candidate satisfies the expression of the term.
    #[must_use]
    pub fn satisfies(&self, candidate: usize, term: usize) -> bool {
        self.matches[self.expr_of[term]][candidate]
    }

    /// Chooses a server for each term.
    ///
    /// `order` lists candidates in the order they are to be tried for new copies; those it leaves
    /// out take none. `existing` are the copies that are there; those on servers that are not
    /// among the candidates, or that are draining, count as gone.
    #[must_use]
    pub fn place(&self, order: &[usize], existing: &[Existing], mode: Mode) -> Placement {
        let holders = self.holders(existing);
        let mut tiers = self.tiers(order);
        // A server takes one copy: what holds one is no candidate for another.
        for tier in &mut tiers {
            tier.retain(|(server, _)| holders.iter().all(|holder| holder.server != *server));
        }
        let edges: Vec<Vec<Edge>> = (0..self.expr_of.len())
            .map(|term| self.edges(term, &holders, &tiers))
            .collect();
        let chosen = choose(&edges, &self.group_of);
        let mut terms: Vec<TermPlacement> = chosen
            .iter()
            .enumerate()
            .map(|(term, edge)| self.first_outcome(term, *edge))
            .collect();
        self.spill(&mut terms, &holders, &tiers, mode);
        let is_used = |server: usize| {
            terms
                .iter()
                .any(|term| term.is_existing && term.server == Some(server))
        };
        let used: Vec<usize> = holders
            .iter()
            .filter(|holder| is_used(holder.server))
            .map(|holder| holder.copy)
            .collect();
        let surplus = (0..existing.len())
            .filter(|index| !used.contains(index))
            .collect();
        Placement { terms, surplus }
    }

    /// The existing copies that count, one for each server.
    fn holders(&self, existing: &[Existing]) -> Vec<Holder> {
        let mut holders: Vec<Holder> = Vec::new();
        for (copy, Existing { server, term }) in existing.iter().enumerate() {
            let Some(server) = self.index_of(*server) else {
                continue;
            };
            let is_known = holders.iter().any(|holder| holder.server == server);
            if !self.candidates[server].draining && !is_known {
                holders.push(Holder {
                    server,
                    fixed: *term,
                    copy,
                });
            }
        }
        holders
    }

    /// The servers of the order by how well they can take a new copy, with their place.
    fn tiers(&self, order: &[usize]) -> [Vec<(usize, i64)>; 4] {
        let mut tiers: [Vec<(usize, i64)>; 4] = Default::default();
        for (server, place) in order.iter().zip(0_i64..) {
            let Some(candidate) = self.candidates.get(*server) else {
                continue;
            };
            let tier = if !candidate.usable || candidate.maintenance || candidate.draining {
                3
            } else if candidate.full {
                2
            } else {
                usize::from(candidate.busy)
            };
            tiers[tier].push((*server, place));
        }
        tiers
    }

    /// The cheapest pairs of a term, at most one for each uniqueness group, and no more than there
    /// are terms: the other terms can take all but one of them away.
    fn edges(&self, term: usize, holders: &[Holder], tiers: &[Vec<(usize, i64)>; 4]) -> Vec<Edge> {
        let held = holders
            .iter()
            .filter(|holder| holder.may_serve(term))
            .zip(0_i64..)
            .map(|(holder, place)| (holder.server, Tier::Existing, place));
        let kinds = [Tier::Free, Tier::Busy, Tier::Full, Tier::Away];
        let new = kinds.into_iter().zip(tiers).flat_map(|(tier, servers)| {
            servers
                .iter()
                .map(move |(server, place)| (*server, tier, *place))
        });
        let mut edges: Vec<Edge> = Vec::new();
        for (server, tier, place) in held.chain(new) {
            if edges.len() == self.expr_of.len() {
                break;
            }
            let is_group_known = edges
                .iter()
                .any(|edge| self.group_of[edge.server] == self.group_of[server]);
            if self.satisfies(server, term) && !is_group_known {
                edges.push(Edge {
                    server,
                    tier,
                    cost: tier_cost(tier) + place,
                });
            }
        }
        edges
    }

    /// The outcome of a term before the mode has its say: matched, or unsatisfied with the cause.
    fn first_outcome(&self, term: usize, edge: Option<Edge>) -> TermPlacement {
        let cause = match edge {
            Some(Edge {
                server,
                tier: tier @ (Tier::Existing | Tier::Free),
                ..
            }) => {
                return TermPlacement {
                    server: Some(server),
                    is_existing: tier == Tier::Existing,
                    outcome: TermOutcome::Matched,
                };
            }
            Some(Edge {
                tier: Tier::Busy, ..
            }) => Cause::Busy,
            Some(Edge {
                tier: Tier::Full, ..
            }) => Cause::Full,
            Some(_) => Cause::Away,
            None if self.matches[self.expr_of[term]].contains(&true) => Cause::Taken,
            None => Cause::NoServer,
        };
        TermPlacement {
            server: None,
            is_existing: false,
            outcome: TermOutcome::Unsatisfied(cause),
        }
    }

    /// Lets the mode decide about the terms that are not matched.
    fn spill(
        &self,
        terms: &mut [TermPlacement],
        holders: &[Holder],
        tiers: &[Vec<(usize, i64)>; 4],
        mode: Mode,
    ) {
        let mut used: Vec<usize> = terms
            .iter()
            .filter_map(|term| term.server)
            .map(|s| self.group_of[s])
            .collect();
        for (index, term) in terms.iter_mut().enumerate() {
            let TermOutcome::Unsatisfied(cause) = term.outcome else {
                continue;
            };
            let may_spill = match mode {
                Mode::Strict => false,
                Mode::Std => cause != Cause::Busy,
                Mode::Loose => true,
            };
            if !may_spill {
                if cause == Cause::Busy {
                    term.outcome = TermOutcome::Waits(cause);
                }
                continue;
            }
            let is_unused = |server: &usize| !used.contains(&self.group_of[*server]);
            let held = holders
                .iter()
                .filter(|holder| holder.may_serve(index))
                .map(|holder| holder.server)
                .find(is_unused);
            let free = || tiers[0].iter().map(|(server, _)| *server).find(is_unused);
            if let Some(server) = held.or_else(free) {
                used.push(self.group_of[server]);
                *term = TermPlacement {
                    server: Some(server),
                    is_existing: held.is_some(),
                    outcome: TermOutcome::Spilled(cause),
                };
            } else if tiers[1].iter().any(|(server, _)| is_unused(server)) {
                term.outcome = TermOutcome::Waits(cause);
            }
        }
    }
}

/// The edge of each term in the cheapest matching.
fn choose(edges: &[Vec<Edge>], group_of: &[usize]) -> Vec<Option<Edge>> {
    let mut columns = BTreeMap::new();
    for edge in edges.iter().flatten() {
        let next = columns.len();
        columns.entry(group_of[edge.server]).or_insert(next);
    }
    // One more column for each term: to stay without a server.
    let width = columns.len() + edges.len();
    let mut costs = vec![vec![FORBIDDEN; width]; edges.len()];
    for (row, edges) in costs.iter_mut().zip(edges) {
        row[columns.len()..].fill(COST_UNMATCHED);
        for edge in edges {
            row[columns[&group_of[edge.server]]] = edge.cost;
        }
    }
    let assigned = cheapest_assignment(&costs);
    edges
        .iter()
        .zip(assigned)
        .map(|(edges, column)| {
            edges
                .iter()
                .copied()
                .find(|edge| columns[&group_of[edge.server]] == column)
        })
        .collect()
}

/// The number of each candidate's uniqueness group. A server whose value is unknown or empty is a
/// group of its own.
fn uniqueness_groups(
    uniqueness: Uniqueness,
    candidates: &[Candidate],
    index_of: &BTreeMap<ServerKey, usize>,
) -> Vec<usize> {
    #[derive(PartialEq, Eq, PartialOrd, Ord)]
    enum Value<'a> {
        Server(ServerKey),
        Text(&'a str),
        Letters(LetterMask),
    }
    let mut first_of: BTreeMap<Value<'_>, usize> = BTreeMap::new();
    let mut group_of = Vec::with_capacity(candidates.len());
    for candidate in candidates {
        let text = match uniqueness {
            Uniqueness::Server | Uniqueness::Letters(_) => None,
            Uniqueness::Ip => Some(candidate.host.as_str()),
            Uniqueness::Rack => candidate.rack.as_deref(),
            Uniqueness::Zone => candidate.zone.as_deref(),
        };
        let value = match (uniqueness, text) {
            (_, Some(text)) if !text.is_empty() => Value::Text(text),
            (Uniqueness::Letters(mask), _) => match candidate.labels.letters().intersection(mask) {
                LetterMask::EMPTY => Value::Server(candidate.key),
                letters => Value::Letters(letters),
            },
            _ => Value::Server(candidate.key),
        };
        let own = index_of.get(&candidate.key).copied().unwrap_or(0);
        group_of.push(*first_of.entry(value).or_insert(own));
    }
    group_of
}

fn tier_cost(tier: Tier) -> i64 {
    match tier {
        Tier::Existing => 0,
        Tier::Free => COST_NEW,
        Tier::Busy => COST_NOT_NOW,
        Tier::Full => COST_NOT_NOW + COST_WORSE,
        Tier::Away => COST_NOT_NOW + 2 * COST_WORSE,
    }
}

// Each step outweighs the sum of the smaller ones over 64 terms (a definition has at most 40), so
// the order of importance holds: places (below 2^20) < new < worse < not now.
const COST_NEW: i64 = 1 << 26;
const COST_WORSE: i64 = 1 << 33;
const COST_NOT_NOW: i64 = 1 << 41;
const COST_UNMATCHED: i64 = COST_NOT_NOW + 3 * COST_WORSE;

#[cfg(test)]
#[path = "matcher_tests.rs"]
mod tests;
