//! Broken links between members of a group.

use std::collections::BTreeSet;

use hither_proto::ids::{ChunkserverId, GroupId};
use hither_proto::manager::ReportUnreachable;
use hither_proto::map::MemberState;

use super::take_out;
use crate::state::State;

/// The client at the head of a chain, as a node.
const CLIENT: ChunkserverId = ChunkserverId(0);

/// Whether some order of the members makes a chain from the client over sound links only. Members
/// that are being filled stand behind those that are in-sync.
///
/// Links are directed: (from, to) means that `from` cannot reach `to`. At most nine members.
#[must_use]
pub fn chain_exists(
    in_sync: &[ChunkserverId],
    filling: &[ChunkserverId],
    broken: &BTreeSet<(ChunkserverId, ChunkserverId)>,
) -> bool {
    fn extend(
        at: ChunkserverId,
        left: &mut Vec<ChunkserverId>,
        behind: &[ChunkserverId],
        broken: &BTreeSet<(ChunkserverId, ChunkserverId)>,
    ) -> bool {
        if left.is_empty() {
            return behind.is_empty() || extend(at, &mut behind.to_vec(), &[], broken);
        }
        for n in 0..left.len() {
            let next = left.swap_remove(n);
            let found = !broken.contains(&(at, next)) && extend(next, left, behind, broken);
            left.push(next);
            let last = left.len() - 1;
            left.swap(n, last);
            if found {
                return true;
            }
        }
        false
    }
    extend(CLIENT, &mut in_sync.to_vec(), filling, broken)
}

/// A client has tried and failed: a member leaves the in-sync set only if no chain avoids the
/// broken links. `None`: nothing to be done (void in another epoch, or another order may work).
#[must_use]
pub fn link_broken(
    state: &State,
    group: GroupId,
    epoch: u64,
    broken: &BTreeSet<(ChunkserverId, ChunkserverId)>,
    last_to: ChunkserverId,
) -> Option<State> {
    let known = state
        .groups
        .get(&group)
        .filter(|known| known.epoch == epoch)?;
    let members_in = |state: MemberState| -> Vec<ChunkserverId> {
        let of = known.members.iter();
        of.filter(|member| member.state == i32::from(state))
            .map(|member| ChunkserverId(member.server))
            .collect()
    };
    let in_sync = members_in(MemberState::InSync);
    if chain_exists(&in_sync, &members_in(MemberState::Filling), broken) {
        return None;
    }
    let mut next = state.clone();
    let group = next.groups.get_mut(&group)?;
    take_out(group, last_to).then_some(next)
}

/// A metadata server could not reach a member for long: the member leaves the in-sync set of the
/// group, or with group 0 of all its groups, as far as others are left there. Also the groups that
/// it left; `None`: nothing to be done (void in another epoch, or it is the last).
#[must_use]
pub fn out_of_reach(state: &State, report: &ReportUnreachable) -> Option<(State, Vec<GroupId>)> {
    let to = ChunkserverId(report.to);
    let mut next = state.clone();
    let mut left = Vec::new();
    for (id, group) in &mut next.groups {
        let meant = report.group == 0 || (id.0 == report.group && group.epoch == report.epoch);
        if meant && take_out(group, to) {
            left.push(*id);
        }
    }
    (!left.is_empty()).then_some((next, left))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(numbers: &[u64]) -> Vec<ChunkserverId> {
        numbers.iter().map(|n| ChunkserverId(*n)).collect()
    }

    #[test]
    fn another_order_avoids_one_broken_link() {
        let one = BTreeSet::from([(ChunkserverId(1), ChunkserverId(2))]);
        assert!(chain_exists(&ids(&[1, 2]), &[], &one));
        let both = BTreeSet::from([
            (ChunkserverId(1), ChunkserverId(2)),
            (ChunkserverId(2), ChunkserverId(1)),
        ]);
        assert!(!chain_exists(&ids(&[1, 2]), &[], &both));
        assert!(chain_exists(&ids(&[1, 2, 3]), &[], &both), "over the third");
        let unreachable = BTreeSet::from([(CLIENT, ChunkserverId(1))]);
        assert!(chain_exists(&ids(&[1, 2]), &[], &unreachable));
        assert!(!chain_exists(&ids(&[1]), &[], &unreachable));
        assert!(chain_exists(&[], &[], &both));
    }

    #[test]
    fn a_member_out_of_a_metadata_servers_reach_leaves_unless_it_is_the_last() {
        use hither_proto::map::{Group, Member};

        let member = |server, state: MemberState| Member {
            server,
            disk: 0,
            state: state.into(),
        };
        let (in_sync, lagging) = (MemberState::InSync, MemberState::Lagging);
        let mut state = State::default();
        for (id, members) in [
            (7, vec![member(1, in_sync), member(2, in_sync)]),
            (8, vec![member(1, in_sync), member(2, lagging)]),
            (9, vec![member(1, in_sync), member(2, in_sync)]),
        ] {
            let group = Group {
                id,
                epoch: 3,
                members,
                ..Group::default()
            };
            state.groups.insert(GroupId(id), group);
        }
        let report = |group, epoch| ReportUnreachable {
            to: 1,
            group,
            epoch,
            needs_all: true,
            ..ReportUnreachable::default()
        };
        let (next, left) = out_of_reach(&state, &report(7, 3)).unwrap();
        assert_eq!(left, [GroupId(7)]);
        assert_eq!(next.groups[&GroupId(7)].epoch, 4);
        assert_eq!(
            next.groups[&GroupId(7)].members[0].state,
            i32::from(lagging)
        );
        assert_eq!(out_of_reach(&state, &report(7, 2)), None, "void by now");
        assert_eq!(out_of_reach(&state, &report(8, 3)), None, "the last one");
        let (next, left) = out_of_reach(&state, &report(0, 0)).unwrap();
        assert_eq!(left, [GroupId(7), GroupId(9)]);
        assert_eq!(out_of_reach(&next, &report(0, 0)), None);
    }

    #[test]
    fn a_member_that_is_being_filled_never_stands_before_one_that_is_in_sync() {
        let one = BTreeSet::from([(ChunkserverId(1), ChunkserverId(2))]);
        assert!(!chain_exists(&ids(&[1]), &ids(&[2]), &one));
        assert!(chain_exists(&ids(&[2]), &ids(&[1]), &one));
        assert!(
            chain_exists(&ids(&[1, 3]), &ids(&[2]), &one),
            "3 stands between"
        );
        assert!(chain_exists(&ids(&[1]), &ids(&[2, 3]), &one));
    }
}
