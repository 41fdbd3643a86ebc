//! Decisions: a state and something that happened, in; the next state, out.

mod classes;
mod groups;
mod hearing;
mod labels;
mod links;
mod membership;

pub use classes::{ClassOutcome, class_deleted, class_set, class_unused};
pub use groups::{members_wanted, plan};
pub use hearing::Hearing;
pub use labels::labels_changed;
pub use links::{Links, chain_exists, link_broken, out_of_reach};
pub use membership::{
    Beat, Liveness, beat, draining_changed, gone_servers, lost_servers, maintenance_changed,
    server_forgotten, server_gone, server_lost,
};

use hither_proto::ids::{ChunkserverId, GroupId};
use hither_proto::manager::RankBeat;
use hither_proto::map::{Group, MemberState, Rank};

/// Whether a beat says something new of its rank. An older epoch is that of a process that has
/// lost the rank and does not know it yet.
#[must_use]
pub fn rank_is_news(known: Option<&Rank>, beat: &RankBeat) -> bool {
    known.is_none_or(|known| {
        beat.epoch > known.epoch || (beat.epoch == known.epoch && beat.address != known.address)
    })
}

/// Takes a member out of the in-sync set (or of filling). The last in-sync member is never taken
/// out: the group waits for it. True when anything changed; the epoch has then risen.
pub(crate) fn take_out(group: &mut Group, server: ChunkserverId) -> bool {
    let in_sync = i32::from(MemberState::InSync);
    let others = group
        .members
        .iter()
        .any(|m| m.server != server.0 && m.state == in_sync);
    let Some(member) = group.members.iter_mut().find(|m| m.server == server.0) else {
        return false;
    };
    let lagging = i32::from(MemberState::Lagging);
    if member.state == lagging || (member.state == in_sync && !others) {
        return false;
    }
    member.state = lagging;
    group.epoch += 1;
    true
}

/// Lets a lagging member catch up. True when anything changed; the epoch has then risen.
pub(crate) fn admit(group: &mut Group, server: ChunkserverId) -> bool {
    let Some(member) = group.members.iter_mut().find(|m| m.server == server.0) else {
        return false;
    };
    if member.state != i32::from(MemberState::Lagging) {
        return false;
    }
    member.state = i32::from(MemberState::Filling);
    group.epoch += 1;
    true
}

/// A filling member has everything of this epoch. True when it became in-sync.
pub(crate) fn caught_up(group: &mut Group, server: ChunkserverId, epoch: u64) -> bool {
    if group.epoch != epoch {
        return false;
    }
    let Some(member) = group.members.iter_mut().find(|m| m.server == server.0) else {
        return false;
    };
    if member.state != i32::from(MemberState::Filling) {
        return false;
    }
    member.state = i32::from(MemberState::InSync);
    group.epoch += 1;
    true
}

/// Groups a server is a member of.
pub(crate) fn groups_with(
    groups: &std::collections::BTreeMap<GroupId, Group>,
    server: ChunkserverId,
) -> Vec<GroupId> {
    groups
        .iter()
        .filter(|(_, group)| group.members.iter().any(|m| m.server == server.0))
        .map(|(id, _)| *id)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deposed_rank_is_not_listened_to() {
        let beat = |epoch: u64, address: &str| RankBeat {
            epoch,
            address: address.into(),
            ..RankBeat::default()
        };
        let known = Rank {
            rank: 0,
            address: "new".into(),
            epoch: 7,
        };
        assert!(rank_is_news(None, &beat(1, "any")));
        assert!(!rank_is_news(Some(&known), &beat(7, "new")));
        assert!(rank_is_news(Some(&known), &beat(7, "moved")));
        assert!(rank_is_news(Some(&known), &beat(8, "next")));
        assert!(!rank_is_news(Some(&known), &beat(6, "old")));
    }
}
