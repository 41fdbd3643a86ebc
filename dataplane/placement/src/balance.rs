//! Spreading the members of groups that exist over servers that came later.

use std::cmp::Reverse;

use crate::candidate::{Candidate, GroupKey};
use crate::groups::{Group, GroupRules, Member, MemberState, PlanServer, Planner, calm_candidates};

/// One member of a group that goes to another server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// The group.
    pub group: GroupKey,
    /// Index of the member in the group; for parts, the part number.
    pub slot: usize,
    /// The member that leaves, after the new one holds everything.
    pub from: Member,
    /// The member that comes.
    pub to: Member,
}

/// The moves, at most `max_moves`, that spread the members by weight.
///
/// Each move takes a member from a fuller server to an emptier one that stays no fuller than the
/// first, that satisfies the same term, and that keeps the uniqueness rule. So every move is a gain
/// and the list ends when none is left. Groups with lost, leaving or missing members are left to
/// repair, and no group has two moves.
#[must_use]
pub fn plan_balance(
    rules: GroupRules<'_>,
    servers: &[PlanServer],
    groups: &[Group],
    max_moves: usize,
) -> Vec<Move> {
    balance_some(rules, servers, groups, max_moves, |_| true)
}

/// As [`plan_balance`], but only groups that satisfy the condition give members; all count.
pub(crate) fn balance_some(
    rules: GroupRules<'_>,
    servers: &[PlanServer],
    groups: &[Group],
    max_moves: usize,
    may_move: impl Fn(GroupKey) -> bool,
) -> Vec<Move> {
    let candidates = calm_candidates(servers);
    let planner = Planner::new(rules, servers, &candidates, groups);
    let mut balance = Balance::new(planner, &candidates, groups, may_move);
    let mut moves = Vec::new();
    while moves.len() < max_moves {
        let Some(next) = balance.next_move() else {
            break;
        };
        moves.push(next);
    }
    moves
}

struct Balance<'a> {
    planner: Planner<'a>,
    groups: &'a [Group],
    /// For each server the groups it could leave: index and slot.
    movable: Vec<Vec<(usize, usize)>>,
    /// For each group the term that each slot stands for; `None` if the group is not to be touched.
    terms: Vec<Option<Vec<usize>>>,
    /// Servers that may take members.
    targets: Vec<usize>,
}

impl<'a> Balance<'a> {
    fn new(
        planner: Planner<'a>,
        candidates: &[Candidate],
        groups: &'a [Group],
        may_move: impl Fn(GroupKey) -> bool,
    ) -> Self {
        let takes = |server: &usize| {
            let candidate = &candidates[*server];
            let is_open = !(candidate.full || candidate.maintenance || candidate.draining);
            planner.shares[*server] > 0 && candidate.usable && is_open
        };
        let targets = (0..candidates.len()).filter(takes).collect();
        let terms: Vec<Option<Vec<usize>>> = groups
            .iter()
            .map(|group| {
                may_move(group.key)
                    .then(|| terms_of(&planner, group))
                    .flatten()
            })
            .collect();
        let mut movable = vec![Vec::new(); candidates.len()];
        for (index, group) in groups.iter().enumerate() {
            if terms[index].is_none() {
                continue;
            }
            for (slot, member) in group.members.iter().enumerate() {
                if let Some(server) = member.and_then(|m| planner.matcher.index_of(m.server)) {
                    movable[server].push((index, slot));
                }
            }
        }
        Self {
            planner,
            groups,
            movable,
            terms,
            targets,
        }
    }

    /// The move from the fullest server that can give to the emptiest that can take.
    fn next_move(&mut self) -> Option<Move> {
        let mut sources: Vec<usize> = (0..self.movable.len())
            .filter(|server| !self.movable[*server].is_empty())
            .collect();
        sources.sort_by_key(|server| (Reverse(self.planner.fill(*server, 0)), *server));
        self.targets
            .sort_by_key(|server| (self.planner.fill(*server, 1), *server));
        for source in sources {
            for place in 0..self.targets.len() {
                let target = self.targets[place];
                if self.planner.fill(target, 1) > self.planner.fill_without_one(source) {
                    break;
                }
                if let Some((group, slot)) = self.exchange(source, target) {
                    return self.make(group, slot, target);
                }
            }
        }
        None
    }

    /// A group in which the target can stand in for the source.
    fn exchange(&self, source: usize, target: usize) -> Option<(usize, usize)> {
        self.movable[source].iter().copied().find(|(group, slot)| {
            let Some(terms) = &self.terms[*group] else {
                return false;
            };
            self.planner.matcher.satisfies(target, terms[*slot])
                && self.groups[*group]
                    .members
                    .iter()
                    .enumerate()
                    .all(|(other, member)| {
                        let server = member.and_then(|m| self.planner.matcher.index_of(m.server));
                        server.is_none_or(|server| {
                            let collides = self.planner.matcher.collide(server, target);
                            server != target && (other == *slot || !collides)
                        })
                    })
        })
    }

    fn make(&mut self, group: usize, slot: usize, target: usize) -> Option<Move> {
        let from = self.groups[group].members[slot]?;
        let to = self.planner.pick_disk(target)?;
        self.planner.remove(from);
        self.planner.add(to);
        self.terms[group] = None;
        for movable in &mut self.movable {
            movable.retain(|(other, _)| *other != group);
        }
        Some(Move {
            group: self.groups[group].key,
            slot,
            from,
            to,
        })
    }
}

/// The term that each member stands for, if every member serves and together they satisfy the
/// definition.
fn terms_of(planner: &Planner<'_>, group: &Group) -> Option<Vec<usize>> {
    let members: Vec<Member> = group.members.iter().copied().collect::<Option<_>>()?;
    let is_live = |member: &Member| planner.state(*member) == MemberState::Live;
    if members.len() != planner.terms || !members.iter().all(is_live) {
        return None;
    }
    let placement = planner.place_members(&members);
    if !placement.is_satisfied() {
        return None;
    }
    members
        .iter()
        .map(|member| {
            let server = planner.matcher.index_of(member.server);
            placement
                .terms
                .iter()
                .position(|term| term.server == server)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::candidate::ServerKey;
    use crate::groups::test_support::{counts, existing, rules, server};
    use crate::groups::{plan_groups, wanted_groups};

    #[test]
    fn a_server_that_joins_gets_its_share_with_as_few_moves_as_that_takes() {
        let definition = "3*".parse().unwrap();
        let rules = rules(&definition);
        let mut servers: Vec<PlanServer> = (1..=6).map(|key| server(key, "", "", 10)).collect();
        let plan = plan_groups(rules, &servers, &[], wanted_groups(6, 3));
        let mut groups = existing(&plan);
        servers.push(server(7, "", "", 10));
        let moves = plan_balance(rules, &servers, &groups, usize::MAX);
        // 6 servers with 64 members each: a fair share of the seventh is 384 / 7 = 54.
        assert_eq!(moves.len(), 54);
        for a_move in &moves {
            assert_eq!(a_move.to.server, ServerKey(7));
            let group = groups
                .iter_mut()
                .find(|group| group.key == a_move.group)
                .unwrap();
            assert_eq!(group.members[a_move.slot], Some(a_move.from));
            group.members[a_move.slot] = Some(a_move.to);
        }
        let counts: BTreeMap<ServerKey, u64> = counts(&groups);
        assert!(
            counts.values().all(|count| (54..=56).contains(count)),
            "{counts:?}"
        );
        assert_eq!(plan_balance(rules, &servers, &groups, usize::MAX), []);
        assert_eq!(plan_balance(rules, &servers, &groups, 0), []);
    }

    #[test]
    fn moves_keep_the_labels_and_the_zones() {
        let definition = "S,H/[ZONE]".parse().unwrap();
        let rules = rules(&definition);
        let mut servers = vec![
            server(1, "a", "S", 10),
            server(2, "b", "S", 10),
            server(3, "a", "H", 10),
            server(4, "b", "H", 10),
        ];
        let mut groups = existing(&plan_groups(rules, &servers, &[], 64));
        servers.push(server(5, "a", "S", 10));
        let moves = plan_balance(rules, &servers, &groups, usize::MAX);
        assert!(!moves.is_empty());
        for a_move in moves {
            let group = groups
                .iter_mut()
                .find(|group| group.key == a_move.group)
                .unwrap();
            group.members[a_move.slot] = Some(a_move.to);
        }
        let again = plan_groups(rules, &servers, &groups, 64);
        assert!(again.groups.iter().all(|group| !group.is_changed()));
    }

    #[test]
    fn groups_that_need_repair_are_left_alone() {
        let definition = "2*".parse().unwrap();
        let rules = rules(&definition);
        let mut servers: Vec<PlanServer> = (1..=3).map(|key| server(key, "", "", 10)).collect();
        let groups = existing(&plan_groups(rules, &servers, &[], 30));
        servers[0].candidate.draining = true;
        servers.push(server(4, "", "", 10));
        let moves = plan_balance(rules, &servers, &groups, usize::MAX);
        assert!(!moves.is_empty());
        for a_move in moves {
            let group = groups
                .iter()
                .find(|group| group.key == a_move.group)
                .unwrap();
            let keys: Vec<u64> = group.members.iter().flatten().map(|m| m.server.0).collect();
            assert!(!keys.contains(&1), "{keys:?}");
        }
    }
}
