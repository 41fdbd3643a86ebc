//! Broken links between members of a group.

use std::collections::BTreeSet;
use std::time::Duration;

use hither_proto::ids::{ChunkserverId, GroupId};
use hither_proto::manager::ReportUnreachable;
use hither_proto::map::{Group, MemberState};

use super::membership::{Liveness, is_in_sync};
use super::take_out;
use crate::state::State;

/// The client at the head of a chain, as a node.
const CLIENT: ChunkserverId = ChunkserverId(0);

/// A link that does not work: from, to.
type Link = (ChunkserverId, ChunkserverId);

/// Links between servers that were reported as broken of late, by group and epoch. What a client
/// itself does not reach is not remembered: every report says it, and another client may reach it.
#[derive(Debug, Default)]
pub struct Links(BTreeSet<(GroupId, u64, ChunkserverId, ChunkserverId)>);

impl Links {
    /// Takes a report in; all links that are broken as far as its sender can know.
    pub fn note(&mut self, report: &ReportUnreachable) -> BTreeSet<Link> {
        let (group, epoch) = (GroupId(report.group), report.epoch);
        self.0.retain(|(g, e, ..)| *g != group || *e == epoch);
        let more = report.links.iter().map(|link| (link.from, link.to));
        let reported = more.chain([(report.from, report.to)]);
        let (own, between): (BTreeSet<Link>, BTreeSet<Link>) = reported
            .map(|(from, to)| (ChunkserverId(from), ChunkserverId(to)))
            .partition(|(from, _)| *from == CLIENT);
        for (from, to) in between {
            if self.0.len() >= LINKS_MAX {
                self.0.pop_first();
            }
            self.0.insert((group, epoch, from, to));
        }
        let of_group = self.0.iter().filter(|(g, ..)| *g == group);
        let known = of_group.map(|(_, _, from, to)| (*from, *to));
        known.chain(own).collect()
    }
}

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
/// broken links. `None`: nothing to be done (void in another epoch, another order may work, or the
/// client reaches nobody and is cut off itself).
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
    if in_sync.iter().all(|id| broken.contains(&(CLIENT, *id))) {
        return None;
    }
    if chain_exists(&in_sync, &members_in(MemberState::Filling), broken) {
        return None;
    }
    let mut next = state.clone();
    let group = next.groups.get_mut(&group)?;
    take_out(group, last_to).then_some(next)
}

/// A metadata server could not reach a member for long: the member leaves the in-sync set of the
/// group, or with group 0 of all its groups, where enough others are left to be written to. It is
/// not let in again for a while. Also the groups that it left; `None`: nothing to be done (void in
/// another epoch, too few others, or a server of another zone was named just before: then it is the
/// metadata server that is cut off).
pub fn out_of_reach(
    state: &State,
    liveness: &mut Liveness,
    report: &ReportUnreachable,
    now: Duration,
) -> Option<(State, Vec<GroupId>)> {
    let to = ChunkserverId(report.to);
    // A server without a zone stands for itself.
    let zone = state.servers.get(&to).map(|server| &server.shown.zone);
    let place = match zone {
        Some(zone) if !zone.is_empty() => zone.clone(),
        _ => format!("server {to}"),
    };
    if report.group == 0 && !liveness.may_lose(&place, now) {
        return None;
    }
    let mut next = state.clone();
    let mut left = Vec::new();
    for (id, group) in &mut next.groups {
        let meant = report.group == 0 || (id.0 == report.group && group.epoch == report.epoch);
        if meant && leaves_enough(group, to) && take_out(group, to) {
            left.push(*id);
        }
    }
    if left.is_empty() {
        return None;
    }
    for group in &left {
        liveness.hold_out(*group, to, now);
    }
    if report.group == 0 {
        liveness.lose(place, now);
    }
    Some((next, left))
}

/// Whether a group can be written to without a member.
fn leaves_enough(group: &Group, server: ChunkserverId) -> bool {
    let in_sync = group.members.iter().filter(|m| is_in_sync(m.state));
    let others = in_sync.clone().filter(|m| m.server != server.0).count();
    // Who is not in-sync is not counted on.
    others == in_sync.count() || others >= group.min_write_copies as usize
}

/// Broken links remembered.
const LINKS_MAX: usize = 10_000;

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
        use hither_proto::map::Member;

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
        let out_of_reach = |state: &State, report: &ReportUnreachable| {
            out_of_reach(state, &mut Liveness::default(), report, Duration::ZERO)
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
        // With one copy fewer it could not be written to.
        let group = state.groups.get_mut(&GroupId(7)).unwrap();
        group.min_write_copies = 2;
        assert_eq!(out_of_reach(&state, &report(7, 3)), None);
        let (_, left) = out_of_reach(&state, &report(0, 0)).unwrap();
        assert_eq!(left, [GroupId(9)]);
    }

    /// A metadata server that was cut off itself named every server there is.
    #[test]
    fn servers_of_one_zone_at_a_time_are_out_of_reach() {
        use hither_proto::map::{Chunkserver, Member};

        use crate::state::ServerState;

        let mut state = State::default();
        for (id, zone) in [(1, "a"), (2, "a"), (3, "b"), (4, ""), (5, "")] {
            let shown = Chunkserver {
                id,
                zone: zone.into(),
                ..Chunkserver::default()
            };
            let server = ServerState {
                shown,
                ..ServerState::default()
            };
            state.servers.insert(ChunkserverId(id), server);
        }
        let members = (1..=5).map(|server| Member {
            server,
            disk: 0,
            state: MemberState::InSync.into(),
        });
        let group = Group {
            id: 7,
            members: members.collect(),
            ..Group::default()
        };
        state.groups.insert(GroupId(7), group);
        let mut liveness = Liveness::default();
        let mut left = |to, seconds| {
            let report = ReportUnreachable {
                to,
                needs_all: true,
                ..ReportUnreachable::default()
            };
            let now = Duration::from_secs(seconds);
            out_of_reach(&state, &mut liveness, &report, now).is_some()
        };
        assert!(left(1, 100));
        assert!(!left(3, 105), "another zone");
        assert!(left(2, 108), "the same zone");
        assert!(!left(3, 117) && !left(4, 117), "counted from the last one");
        assert!(left(4, 118));
        assert!(!left(5, 119), "without a zone each is its own");
        assert!(left(3, 200));
    }

    /// What one client does not reach was added up with what another does not.
    #[test]
    fn what_a_client_does_not_reach_counts_for_that_client_only() {
        let report = |from, to| ReportUnreachable {
            from,
            to,
            group: 7,
            epoch: 3,
            ..ReportUnreachable::default()
        };
        let at = |from, to| (ChunkserverId(from), ChunkserverId(to));
        let mut links = Links::default();
        assert_eq!(links.note(&report(0, 1)), BTreeSet::from([at(0, 1)]));
        assert_eq!(links.note(&report(0, 2)), BTreeSet::from([at(0, 2)]));
        assert_eq!(links.note(&report(2, 1)), BTreeSet::from([at(2, 1)]));
        let with = BTreeSet::from([at(0, 1), at(2, 1)]);
        assert_eq!(links.note(&report(0, 1)), with);
        let later = ReportUnreachable {
            epoch: 4,
            ..report(1, 2)
        };
        assert_eq!(links.note(&later), BTreeSet::from([at(1, 2)]));
    }

    /// A client that was cut off itself, or two clients with a broken link each, shrank a healthy
    /// group to one member.
    #[test]
    fn a_client_that_reaches_nobody_says_nothing_of_the_members() {
        use hither_proto::map::Member;

        let member = |server| Member {
            server,
            disk: 0,
            state: MemberState::InSync.into(),
        };
        let group = Group {
            id: 7,
            epoch: 3,
            members: vec![member(1), member(2), member(3)],
            ..Group::default()
        };
        let mut state = State::default();
        state.groups.insert(GroupId(7), group);
        let to = |n| (CLIENT, ChunkserverId(n));
        let one = ChunkserverId(1);
        let nobody = BTreeSet::from([to(1), to(2), to(3)]);
        assert_eq!(link_broken(&state, GroupId(7), 3, &nobody, one), None);
        // One that reaches a member, which reaches no other.
        let at = |from, to| (ChunkserverId(from), ChunkserverId(to));
        let alone = BTreeSet::from([to(1), to(2), at(3, 1), at(3, 2)]);
        assert!(link_broken(&state, GroupId(7), 3, &alone, one).is_some());
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
