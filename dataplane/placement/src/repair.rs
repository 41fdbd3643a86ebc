//! What to repair, in which order, and where the replacements go.

use std::collections::{BTreeMap, BTreeSet};

use hither_labels::Form;

use crate::balance::{Move, balance_some};
use crate::candidate::GroupKey;
use crate::groups::{
    Group, GroupRules, Member, MemberState, PlanServer, PlannedGroup, Planner, calm_candidates,
};
use crate::matcher::TermOutcome;

/// How pressing a repair is, most pressing first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Urgency {
    /// One copy left, or only as many parts as it takes to read: the next loss loses data.
    NoSpare,
    /// Fewer copies than the definition asks for.
    Undergoal,
    /// Parts are missing, but not to the last spare.
    LostParts,
    /// Everything is there, but not on the right servers.
    WrongPlace,
    /// Everything is right; members move only to spread them.
    Balance,
}

/// The repair of one group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepairStep {
    /// The group.
    pub group: GroupKey,
    /// How pressing it is.
    pub urgency: Urgency,
    /// Members that can be read now.
    pub live: usize,
    /// The members as they are to be, one place for each term.
    pub members: Vec<Option<Member>>,
    /// What became of each term.
    pub outcomes: Vec<TermOutcome>,
    /// Members to be filled.
    pub added: Vec<Member>,
    /// Members that leave, only after the added ones hold everything.
    pub removed: Vec<Member>,
    /// Members that are lost for good.
    pub lost: Vec<Member>,
}

/// All repairs of a definition's groups.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RepairPlan {
    /// What can be done, most pressing first, then by group.
    pub steps: Vec<RepairStep>,
    /// Groups that are not as they should be and for which nothing can be done now; the outcomes
    /// say why. In the same order.
    pub stuck: Vec<RepairStep>,
    /// Groups that cannot be read now. Nothing is planned for them: a member that comes back is
    /// their only source.
    pub unreadable: Vec<GroupKey>,
}

/// Plans the repair of all groups of a definition, and up to `max_balance_moves` moves that spread
/// members.
///
/// Members on servers that are away but not given up are not replaced. The more pressing groups
/// choose their servers first.
#[must_use]
pub fn plan_repair(
    rules: GroupRules<'_>,
    servers: &[PlanServer],
    groups: &[Group],
    max_balance_moves: usize,
) -> RepairPlan {
    let candidates = calm_candidates(servers);
    let mut planner = Planner::new(rules, servers, &candidates, groups);
    let mut plan = RepairPlan::default();
    let mut queue: Vec<(Urgency, usize, &Group)> = Vec::new();
    // All groups as they will be, and those that are right already.
    let mut settled: Vec<Group> = Vec::new();
    let mut sound = BTreeSet::new();
    for group in groups {
        let live = live_members(&planner, group);
        match urgency(&planner, live) {
            Some(urgency) => queue.push((urgency, live, group)),
            None => {
                plan.unreadable.push(group.key);
                settled.push(group.clone());
            }
        }
    }
    queue.sort_by_key(|(urgency, _, group)| (*urgency, group.key));
    for (urgency, live, group) in queue {
        let planned = planner.settle(group);
        settled.push(Group {
            key: group.key,
            members: planned.members.clone(),
        });
        let has_work = !(planned.added.is_empty() && planned.removed.is_empty());
        let is_right = planned
            .outcomes
            .iter()
            .all(|outcome| *outcome == TermOutcome::Matched);
        if has_work {
            plan.steps.push(step(group.key, urgency, live, planned));
        } else if !is_right || !planned.lost.is_empty() {
            plan.stuck.push(step(group.key, urgency, live, planned));
        } else {
            sound.insert(group.key);
        }
    }
    let may_move = |key| sound.contains(&key);
    let moves = balance_some(rules, servers, &settled, max_balance_moves, may_move);
    plan.steps.extend(balance_steps(&moves, &settled));
    plan.steps.sort_by_key(|step| (step.urgency, step.group));
    plan
}

fn balance_steps(moves: &[Move], groups: &[Group]) -> Vec<RepairStep> {
    let members_of: BTreeMap<GroupKey, &Vec<Option<Member>>> = groups
        .iter()
        .map(|group| (group.key, &group.members))
        .collect();
    moves
        .iter()
        .filter_map(|a_move| {
            members_of
                .get(&a_move.group)
                .map(|members| (a_move, *members))
        })
        .map(|(a_move, members)| {
            let mut members = members.clone();
            members[a_move.slot] = Some(a_move.to);
            RepairStep {
                group: a_move.group,
                urgency: Urgency::Balance,
                live: members.len(),
                outcomes: vec![TermOutcome::Matched; members.len()],
                members,
                added: vec![a_move.to],
                removed: vec![a_move.from],
                lost: Vec::new(),
            }
        })
        .collect()
}

fn step(group: GroupKey, urgency: Urgency, live: usize, planned: PlannedGroup) -> RepairStep {
    RepairStep {
        group,
        urgency,
        live,
        members: planned.members,
        outcomes: planned.outcomes,
        added: planned.added,
        removed: planned.removed,
        lost: planned.lost,
    }
}

fn live_members(planner: &Planner<'_>, group: &Group) -> usize {
    let is_live = |member: &&Member| {
        matches!(
            planner.state(**member),
            MemberState::Live | MemberState::Leaving
        )
    };
    group.members.iter().flatten().filter(is_live).count()
}

/// The urgency of a group with so many members that can be read; `None` if it cannot be read.
fn urgency(planner: &Planner<'_>, live: usize) -> Option<Urgency> {
    let (enough, short) = match planner.rules.definition.form() {
        Form::Copies(_) => (1, Urgency::Undergoal),
        Form::Parts(parts) => (
            planner.terms - usize::from(parts.parity_parts()),
            Urgency::LostParts,
        ),
    };
    if live < enough {
        None
    } else if live >= planner.terms {
        Some(Urgency::WrongPlace)
    } else if live == enough {
        Some(Urgency::NoSpare)
    } else {
        Some(short)
    }
}

#[cfg(test)]
mod tests {
    use hither_labels::{Mode, StorageDefinition};

    use super::*;
    use crate::candidate::ServerKey;
    use crate::groups::test_support::{existing, group, rules, server};
    use crate::groups::{plan_groups, wanted_groups};
    use crate::matcher::Cause;

    fn definition(text: &str) -> StorageDefinition {
        text.parse().unwrap()
    }

    fn urgencies(plan: &RepairPlan) -> Vec<(u32, Urgency)> {
        plan.steps
            .iter()
            .map(|step| (step.group.0, step.urgency))
            .collect()
    }

    fn servers(labels: &[&str]) -> Vec<PlanServer> {
        labels
            .iter()
            .zip(1..)
            .map(|(labels, key)| server(key, "", labels, 10))
            .collect()
    }

    #[test]
    fn one_copy_left_comes_first_and_balance_last() {
        let definition = definition("A,A,A");
        let servers = servers(&["A", "A", "A", "A", "B"]);
        let groups = [
            group(1, &[1, 2, 3]),
            group(2, &[1, 2, 5]),
            group(3, &[1, 2, 99]),
            group(4, &[98, 2, 99]),
            group(5, &[97, 98, 99]),
            group(6, &[1, 2, 3]),
        ];
        let plan = plan_repair(rules(&definition), &servers, &groups, 1);
        assert_eq!(
            urgencies(&plan),
            [
                (4, Urgency::NoSpare),
                (3, Urgency::Undergoal),
                (2, Urgency::WrongPlace),
                (1, Urgency::Balance),
            ]
        );
        assert_eq!(plan.unreadable, [GroupKey(5)]);
        assert_eq!(plan.steps[0].live, 1);
        assert_eq!(plan.steps[0].added.len(), 2);
        // The copy on the wrong server stays until the right one is there.
        let wrong = &plan.steps[2];
        assert_eq!(
            (wrong.added.len(), wrong.removed[0].server),
            (1, ServerKey(5))
        );
        assert_eq!(wrong.live, 3);
    }

    #[test]
    fn parts_are_replaced_in_their_places() {
        let definition = definition("@2+2");
        let servers = servers(&["", "", "", "", ""]);
        let groups = [
            group(1, &[1, 99, 3, 4]),
            group(2, &[98, 99, 3, 4]),
            group(3, &[97, 98, 99, 4]),
        ];
        let plan = plan_repair(rules(&definition), &servers, &groups, 0);
        assert_eq!(
            urgencies(&plan),
            [(2, Urgency::NoSpare), (1, Urgency::LostParts)]
        );
        assert_eq!(plan.unreadable, [GroupKey(3)]);
        let members = &plan.steps[1].members;
        let keys: Vec<u64> = members
            .iter()
            .flatten()
            .map(|member| member.server.0)
            .collect();
        assert_eq!((keys[0], keys[2], keys[3]), (1, 3, 4));
        assert!([2, 5].contains(&keys[1]));
    }

    #[test]
    fn balance_counts_what_repair_places() {
        let definition = definition("3*");
        let mut servers: Vec<PlanServer> = (1..=20).map(|key| server(key, "", "", 10)).collect();
        let wanted = wanted_groups(20, 3);
        let groups = existing(&plan_groups(rules(&definition), &servers, &[], wanted));
        servers.remove(0);
        let plan = plan_repair(rules(&definition), &servers, &groups, usize::MAX);
        // The repair alone spreads the lost members: there is next to nothing left to balance.
        let balance = plan
            .steps
            .iter()
            .filter(|step| step.urgency == Urgency::Balance)
            .count();
        assert!(balance < 4, "{balance} of {}", plan.steps.len());
        assert_eq!(plan.steps.len() - balance, 64);
    }

    #[test]
    fn what_is_only_away_is_not_replaced() {
        let definition = definition("2*");
        let mut servers = servers(&["", "", ""]);
        servers[1].candidate.usable = false;
        let plan = plan_repair(rules(&definition), &servers, &[group(1, &[1, 2])], 0);
        assert_eq!(
            (plan.steps, plan.stuck, plan.unreadable),
            (vec![], vec![], vec![])
        );
    }

    #[test]
    fn a_strict_group_without_servers_is_stuck_and_keeps_what_it_has() {
        let definition = definition("2Z");
        let servers = servers(&["A", "A", "A"]);
        let rules = GroupRules {
            mode: Mode::Strict,
            ..rules(&definition)
        };
        let plan = plan_repair(rules, &servers, &[group(1, &[1, 2]), group(2, &[1, 99])], 0);
        assert_eq!(plan.steps, []);
        assert_eq!(plan.stuck.len(), 2);
        assert_eq!(
            plan.stuck[0].outcomes,
            [TermOutcome::Unsatisfied(Cause::NoServer); 2]
        );
        assert!(plan.stuck.iter().all(|step| step.removed.is_empty()));
        let kept = plan.stuck[1].members.iter().flatten().count();
        assert_eq!(kept, 2, "both places of group 1 stay held");
    }

    #[test]
    fn a_draining_server_is_a_source_and_no_target() {
        let definition = definition("2*");
        let mut servers = servers(&["", "", ""]);
        servers[0].candidate.draining = true;
        let plan = plan_repair(rules(&definition), &servers, &[group(1, &[1, 2])], 0);
        assert_eq!(urgencies(&plan), [(1, Urgency::WrongPlace)]);
        assert_eq!(plan.steps[0].added[0].server, ServerKey(3));
        assert_eq!(plan.steps[0].removed[0].server, ServerKey(1));
        // Without another server the member stays.
        let plan = plan_repair(rules(&definition), &servers[..2], &[group(1, &[1, 2])], 0);
        assert_eq!(plan.steps, []);
        assert_eq!(plan.stuck[0].members.iter().flatten().count(), 2);
    }
}
