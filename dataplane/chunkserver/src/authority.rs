//! What this server may answer, by the cluster map alone.

use hither_clustermap::ClusterView;
use hither_proto::chunk::Hop;
use hither_proto::ids::{ChunkserverId, DiskIndex, Epoch, GroupId};
use hither_proto::map::{Member, MemberState};

/// What a member must be for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// Has every acknowledged byte.
    InSync,
    /// Takes writes: in-sync or filling.
    Chain,
}

/// What the map makes this server in a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mandate {
    pub(crate) group: GroupId,
    pub(crate) epoch: Epoch,
    pub(crate) disk: DiskIndex,
    /// Filling, not in-sync.
    pub(crate) filling: bool,
}

/// Whether a request may be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Granted(Mandate),
    /// The sender's epoch is older than this one.
    Stale(Epoch),
    /// The sender's epoch is newer than the map at hand.
    Newer,
    /// No member of the group, or not one that may serve this.
    NotMine,
}

/// Judges a request for a group at the epoch its sender believes in.
pub(crate) fn judge(
    view: &ClusterView,
    me: ChunkserverId,
    group: GroupId,
    epoch: Epoch,
    need: Need,
) -> Verdict {
    let Some(found) = view.group(group) else {
        // A group that is made is not in an older map; epochs begin at 1.
        return if epoch.0 > 0 {
            Verdict::Newer
        } else {
            Verdict::NotMine
        };
    };
    let known = Epoch(found.epoch);
    if epoch < known {
        return Verdict::Stale(known);
    }
    if epoch > known {
        return Verdict::Newer;
    }
    let Some(member) = found.members.iter().find(|member| member.server == me.0) else {
        return Verdict::NotMine;
    };
    let filling = is(member, MemberState::Filling);
    let fits = match need {
        Need::InSync => is(member, MemberState::InSync),
        Need::Chain => filling || is(member, MemberState::InSync),
    };
    let Some(disk) = u16::try_from(member.disk).ok().filter(|_| fits) else {
        return Verdict::NotMine;
    };
    Verdict::Granted(Mandate {
        group,
        epoch,
        disk: DiskIndex(disk),
        filling,
    })
}

fn is(member: &Member, state: MemberState) -> bool {
    member.state == i32::from(state)
}

/// Why a chain may not be written along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BadChain {
    /// It does not name exactly the members of this epoch, those that fill last.
    Incomplete,
    /// There are fewer in-sync members than may acknowledge.
    TooFewCopies,
}

/// Checks the chain of a write at its head: this server and the rest are all in-sync members,
/// then all filling ones.
pub(crate) fn check_chain(
    view: &ClusterView,
    me: ChunkserverId,
    group: GroupId,
    rest: &[Hop],
) -> Result<(), BadChain> {
    let in_sync = view.in_sync(group).count();
    let min = view
        .group(group)
        .map_or(1, |group| group.min_write_copies.max(1));
    if u32::try_from(in_sync).unwrap_or(u32::MAX) < min {
        return Err(BadChain::TooFewCopies);
    }
    let filling = view.members_in(group, MemberState::Filling).count();
    let chain = || std::iter::once(me.0).chain(rest.iter().map(|hop| hop.server));
    if chain().count() != in_sync + filling {
        return Err(BadChain::Incomplete);
    }
    let named = |id: ChunkserverId, from: usize, count: usize| {
        chain().skip(from).take(count).any(|named| named == id.0)
    };
    let complete = view.in_sync(group).all(|id| named(id, 0, in_sync))
        && view
            .members_in(group, MemberState::Filling)
            .all(|id| named(id, in_sync, filling));
    if complete {
        Ok(())
    } else {
        Err(BadChain::Incomplete)
    }
}

/// Whether this server is the one of the in-sync members that passes changes on to the filling
/// ones, which their sender need not know of.
pub(crate) fn passes_on(view: &ClusterView, me: ChunkserverId, group: GroupId) -> bool {
    view.in_sync(group).next() == Some(me)
}

/// The filling members that have to follow a change this server has carried out at an epoch.
///
/// # Errors
/// The group has gone on to another epoch meanwhile. A member that filled then may be in-sync now,
/// and nobody has told it: the sender has to ask again, all members of the new epoch.
pub(crate) fn followers(
    view: &ClusterView,
    me: ChunkserverId,
    mandate: &Mandate,
) -> Result<Vec<ChunkserverId>, Epoch> {
    let known = view.epoch(mandate.group).unwrap_or_default();
    if known != mandate.epoch {
        return Err(known);
    }
    let filling = view.members_in(mandate.group, MemberState::Filling);
    Ok(filling.filter(|id| *id != me).collect())
}

#[cfg(test)]
mod tests {
    use hither_proto::map::{ClusterMap, Group};

    use super::*;

    const ME: ChunkserverId = ChunkserverId(1);
    const GROUP: GroupId = GroupId(7);

    fn view(members: &[(u64, MemberState)], min_write_copies: u32) -> ClusterView {
        let members = members.iter().map(|(server, state)| Member {
            server: *server,
            disk: 2,
            state: (*state).into(),
        });
        ClusterView::from_snapshot(&ClusterMap {
            version: 1,
            groups: vec![Group {
                id: 7,
                epoch: 5,
                members: members.collect(),
                definition: 1,
                min_write_copies,
            }],
            ..ClusterMap::default()
        })
    }

    fn hops(ids: &[u64]) -> Vec<Hop> {
        ids.iter()
            .map(|id| Hop {
                server: *id,
                address: String::new(),
            })
            .collect()
    }

    #[test]
    fn verdicts() {
        use MemberState::{Filling, InSync, Lagging};
        let at = |state, epoch, need| judge(&view(&[(1, state)], 1), ME, GROUP, Epoch(epoch), need);
        assert_eq!(at(InSync, 4, Need::InSync), Verdict::Stale(Epoch(5)));
        assert_eq!(at(InSync, 6, Need::InSync), Verdict::Newer);
        let granted = Mandate {
            group: GROUP,
            epoch: Epoch(5),
            disk: DiskIndex(2),
            filling: false,
        };
        assert_eq!(at(InSync, 5, Need::InSync), Verdict::Granted(granted));
        assert_eq!(at(Filling, 5, Need::InSync), Verdict::NotMine);
        let filling = Mandate {
            filling: true,
            ..granted
        };
        assert_eq!(at(Filling, 5, Need::Chain), Verdict::Granted(filling));
        assert_eq!(at(Lagging, 5, Need::Chain), Verdict::NotMine);
        let other = view(&[(2, InSync)], 1);
        assert_eq!(
            judge(&other, ME, GROUP, Epoch(5), Need::Chain),
            Verdict::NotMine
        );
        assert_eq!(
            judge(&other, ME, GroupId(8), Epoch(1), Need::Chain),
            Verdict::Newer
        );
    }

    #[test]
    fn chains_name_all_members_with_the_filling_ones_last() {
        use MemberState::{Filling, InSync, Lagging};
        let view = view(&[(1, InSync), (2, InSync), (3, Filling), (4, Lagging)], 2);
        assert_eq!(check_chain(&view, ME, GROUP, &hops(&[2, 3])), Ok(()));
        for wrong in [&[2][..], &[3, 2], &[2, 3, 4], &[2, 2], &[3], &[2, 1]] {
            let found = check_chain(&view, ME, GROUP, &hops(wrong));
            assert_eq!(found, Err(BadChain::Incomplete), "{wrong:?}");
        }
        assert!(passes_on(&view, ME, GROUP) && !passes_on(&view, ChunkserverId(2), GROUP));
    }

    #[test]
    fn a_change_is_void_where_a_member_may_have_become_in_sync_meanwhile() {
        use MemberState::{Filling, InSync};
        let mandate = |epoch| Mandate {
            group: GROUP,
            epoch: Epoch(epoch),
            disk: DiskIndex(2),
            filling: false,
        };
        let fills = view(&[(1, InSync), (3, Filling)], 1);
        assert_eq!(
            followers(&fills, ME, &mandate(5)),
            Ok(vec![ChunkserverId(3)])
        );
        // The change was begun at epoch 4, when 3 was still filling and could not be asked itself.
        let in_sync = view(&[(1, InSync), (3, InSync)], 1);
        assert_eq!(followers(&in_sync, ME, &mandate(4)), Err(Epoch(5)));
    }

    #[test]
    fn too_few_copies_take_no_writes() {
        let view = view(&[(1, MemberState::InSync)], 2);
        assert_eq!(
            check_chain(&view, ME, GROUP, &[]),
            Err(BadChain::TooFewCopies)
        );
    }
}
