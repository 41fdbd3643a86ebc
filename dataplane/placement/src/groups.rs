//! Placement groups: sets of (chunkserver, disk) members that satisfy one definition.

use std::collections::BTreeMap;

use hither_labels::{Mode, StorageDefinition};

use crate::candidate::{Candidate, DiskKey, GroupKey, ServerKey, mix};
use crate::matcher::{Existing, Matcher, Placement, TermOutcome};

/// Number of groups a server of average weight is a member of.
pub const GROUPS_PER_SERVER: u32 = 64;

/// One place in a placement group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    /// The chunkserver.
    pub server: ServerKey,
    /// The disk of that server.
    pub disk: DiskKey,
}

/// A placement group that exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Identity.
    pub key: GroupKey,
    /// The members. For parts the index is the part number, and a missing part is `None`; for
    /// copies the order has no meaning.
    pub members: Vec<Option<Member>>,
}

/// A disk of a chunkserver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Identity within the server.
    pub key: DiskKey,
    /// Size, the weight of the disk.
    pub total_bytes: u64,
    /// False once the disk is lost for good; a disk that is not listed is lost as well.
    pub usable: bool,
    /// The disk is to be emptied; what it holds can still be read.
    pub draining: bool,
}

/// A chunkserver and its disks. A server that is lost for good is not listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanServer {
    /// The server.
    pub candidate: Candidate,
    /// Its disks.
    pub disks: Vec<Disk>,
}

/// What the groups have to satisfy.
#[derive(Debug, Clone, Copy)]
pub struct GroupRules<'a> {
    /// The definition that the groups serve.
    pub definition: &'a StorageDefinition,
    /// The mode that holds for it.
    pub mode: Mode,
    /// Data parts of a form that does not name them.
    pub default_data_parts: u8,
}

/// A group as it is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedGroup {
    /// The group that exists, `None` for a new one.
    pub key: Option<GroupKey>,
    /// The members, one place for each term; `None` where no server can be had.
    pub members: Vec<Option<Member>>,
    /// What became of each term. A place may be held, until it can be filled, by a copy that does
    /// not satisfy its term: the outcome says so.
    pub outcomes: Vec<TermOutcome>,
    /// Members that are new.
    pub added: Vec<Member>,
    /// Members that leave, after the new ones hold everything.
    pub removed: Vec<Member>,
    /// Members that are lost for good.
    pub lost: Vec<Member>,
}

impl PlannedGroup {
    /// Whether the members change.
    #[must_use]
    pub fn is_changed(&self) -> bool {
        !(self.added.is_empty() && self.removed.is_empty() && self.lost.is_empty())
    }
}

/// All groups of a definition as they are to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupPlan {
    /// The groups that exist, in the order given, then the new ones.
    pub groups: Vec<PlannedGroup>,
    /// Why there are fewer groups than wanted: the outcomes of the first that could not be made.
    pub unmet: Option<Vec<TermOutcome>>,
}

/// Number of groups of a definition with so many terms that makes each of the servers a member of
/// about [`GROUPS_PER_SERVER`].
#[must_use]
pub fn wanted_groups(servers: u32, terms: u32) -> u32 {
    servers
        .saturating_mul(GROUPS_PER_SERVER)
        .div_ceil(terms.max(1))
}

/// Makes groups until there are as many as wanted, spread over servers and disks by weight.
///
/// Groups that exist keep every member that still serves; lost, leaving and wrong ones are
/// replaced where a server can be had. Existing groups are never given up, even if there are more
/// than wanted. That a server is busy does not count, because groups last.
#[must_use]
pub fn plan_groups(
    rules: GroupRules<'_>,
    servers: &[PlanServer],
    groups: &[Group],
    wanted: u32,
) -> GroupPlan {
    let candidates = calm_candidates(servers);
    let mut planner = Planner::new(rules, servers, &candidates, groups);
    let mut planned: Vec<PlannedGroup> = groups.iter().map(|group| planner.settle(group)).collect();
    let existing = u32::try_from(groups.len()).unwrap_or(u32::MAX);
    for salt in existing..wanted {
        let group = planner.settle_new(u64::from(salt));
        if !planner.is_worth_making(&group) {
            return GroupPlan {
                groups: planned,
                unmet: Some(group.outcomes),
            };
        }
        planner.count(&group);
        planned.push(group);
    }
    GroupPlan {
        groups: planned,
        unmet: None,
    }
}

/// The servers of a plan, none of them busy.
pub(crate) fn calm_candidates(servers: &[PlanServer]) -> Vec<Candidate> {
    let calm = |server: &PlanServer| Candidate {
        busy: false,
        ..server.candidate.clone()
    };
    servers.iter().map(calm).collect()
}

/// What can be said of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemberState {
    /// Serves.
    Live,
    /// Serves, but is to leave.
    Leaving,
    /// Not reachable now, but not given up.
    Away,
    /// Lost for good.
    Lost,
}

/// A member and its place in its group.
type Slotted = (usize, Member);

/// Servers, the matching, and how full of memberships everything is.
pub(crate) struct Planner<'a> {
    pub(crate) rules: GroupRules<'a>,
    pub(crate) servers: &'a [PlanServer],
    pub(crate) matcher: Matcher<'a>,
    pub(crate) terms: usize,
    /// Weight of each server, 1 to [`SHARES`]; 0 if it has no disk that takes anything.
    pub(crate) shares: Vec<u64>,
    /// Memberships of each server.
    counts: Vec<u64>,
    disk_counts: BTreeMap<Member, u64>,
}

impl<'a> Planner<'a> {
    pub(crate) fn new(
        rules: GroupRules<'a>,
        servers: &'a [PlanServer],
        candidates: &'a [Candidate],
        groups: &[Group],
    ) -> Self {
        let terms = rules.definition.terms(rules.default_data_parts);
        let matcher = Matcher::new(&terms, rules.definition.uniqueness(), candidates);
        let mut planner = Self {
            rules,
            servers,
            matcher,
            terms: terms.len(),
            shares: shares(servers),
            counts: vec![0; servers.len()],
            disk_counts: BTreeMap::new(),
        };
        for member in groups
            .iter()
            .flat_map(|group| group.members.iter().flatten())
        {
            planner.add(*member);
        }
        planner
    }

    /// The state of a member.
    pub(crate) fn state(&self, member: Member) -> MemberState {
        let Some(server) = self
            .matcher
            .index_of(member.server)
            .map(|index| &self.servers[index])
        else {
            return MemberState::Lost;
        };
        match server.disks.iter().find(|disk| disk.key == member.disk) {
            Some(disk) if disk.usable => {
                if !server.candidate.usable {
                    MemberState::Away
                } else if disk.draining || server.candidate.draining {
                    MemberState::Leaving
                } else {
                    MemberState::Live
                }
            }
            _ => MemberState::Lost,
        }
    }

    /// What is to become of a group that exists; counts its new members.
    pub(crate) fn settle(&mut self, group: &Group) -> PlannedGroup {
        if let Some(unchanged) = self.as_it_is(group) {
            return unchanged;
        }
        let planned = self.place(Some(group.key), &group.members, u64::from(group.key.0));
        for member in planned.removed.iter().chain(&planned.lost) {
            self.remove(*member);
        }
        self.count(&planned);
        planned
    }

    /// The group without change, if its members by themselves are what is wanted. Most groups are
    /// like that, and nothing has to be sorted to see it.
    fn as_it_is(&self, group: &Group) -> Option<PlannedGroup> {
        let members: Vec<Member> = group.members.iter().copied().collect::<Option<_>>()?;
        let stays =
            |member: &Member| matches!(self.state(*member), MemberState::Live | MemberState::Away);
        if members.len() != self.terms || !members.iter().all(stays) {
            return None;
        }
        self.place_members(&members)
            .is_satisfied()
            .then(|| PlannedGroup {
                key: Some(group.key),
                members: group.members.clone(),
                outcomes: vec![TermOutcome::Matched; self.terms],
                added: Vec::new(),
                removed: Vec::new(),
                lost: Vec::new(),
            })
    }

    fn settle_new(&self, salt: u64) -> PlannedGroup {
        self.place(None, &[], salt)
    }

    fn count(&mut self, planned: &PlannedGroup) {
        for member in &planned.added {
            self.add(*member);
        }
    }

    /// Copies are worth having in any number, unless the mode is strict; parts only all together.
    fn is_worth_making(&self, group: &PlannedGroup) -> bool {
        let placed = group.members.iter().flatten().count();
        let needs_all = self.rules.mode == Mode::Strict || self.rules.definition.is_ec();
        placed > 0 && (placed == self.terms || !needs_all)
    }

    fn place(&self, key: Option<GroupKey>, old: &[Option<Member>], salt: u64) -> PlannedGroup {
        let is_ec = self.rules.definition.is_ec();
        let (lost, staying): (Vec<Slotted>, Vec<Slotted>) = old
            .iter()
            .enumerate()
            .filter_map(|(slot, member)| member.map(|member| (slot, member)))
            .partition(|(_, member)| self.state(*member) == MemberState::Lost);
        let serving: Vec<Slotted> = staying
            .iter()
            .copied()
            .filter(|(_, member)| self.state(*member) != MemberState::Leaving)
            .collect();
        let existing: Vec<Existing> = serving
            .iter()
            .map(|(slot, member)| Existing {
                server: member.server,
                term: is_ec.then_some(*slot),
            })
            .collect();
        let placement = self
            .matcher
            .place(&self.order(salt), &existing, self.rules.mode);
        let mut added = Vec::new();
        let mut members: Vec<Option<Member>> = Vec::with_capacity(self.terms);
        for term in &placement.terms {
            let member = term.server.and_then(|server| {
                if term.is_existing {
                    let key = self.servers[server].candidate.key;
                    serving
                        .iter()
                        .map(|(_, member)| *member)
                        .find(|member| member.server == key)
                } else {
                    self.pick_disk(server).inspect(|member| added.push(*member))
                }
            });
            members.push(member);
        }
        self.keep_stand_ins(&mut members, &staying);
        let is_gone = |member: &Member| !members.contains(&Some(*member));
        let removed = staying
            .iter()
            .map(|(_, member)| *member)
            .filter(is_gone)
            .collect();
        PlannedGroup {
            key,
            outcomes: placement.terms.iter().map(|term| term.outcome).collect(),
            added,
            removed,
            lost: lost.into_iter().map(|(_, member)| member).collect(),
            members,
        }
    }

    /// No copy leaves before it has a replacement: what is there stays where nothing else can be.
    fn keep_stand_ins(&self, members: &mut [Option<Member>], staying: &[Slotted]) {
        for slot in 0..members.len() {
            if members[slot].is_some() {
                continue;
            }
            let stand_in = staying.iter().find(|(old_slot, member)| {
                let fits = !self.rules.definition.is_ec() || *old_slot == slot;
                fits && !members.contains(&Some(*member))
            });
            members[slot] = stand_in.map(|(_, member)| *member);
        }
    }

    /// Servers that take members, emptiest for their weight first; equally full ones in an order
    /// that depends on the group, so that groups mix all servers with each other.
    fn order(&self, salt: u64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.servers.len())
            .filter(|server| self.shares[*server] > 0)
            .collect();
        order.sort_by_cached_key(|server| {
            let key = self.servers[*server].candidate.key;
            (self.fill(*server, 1), mix(salt, key.0), key)
        });
        order
    }

    /// How full a server would be with so many more members.
    pub(crate) fn fill(&self, server: usize, more: u64) -> u64 {
        (self.counts[server] + more) * FILL_UNIT / self.shares[server].max(1)
    }

    /// How full a server would be with one member fewer.
    pub(crate) fn fill_without_one(&self, server: usize) -> u64 {
        self.counts[server].saturating_sub(1) * FILL_UNIT / self.shares[server].max(1)
    }

    /// Which terms the members satisfy by themselves.
    pub(crate) fn place_members(&self, members: &[Member]) -> Placement {
        let is_ec = self.rules.definition.is_ec();
        let existing: Vec<Existing> = members
            .iter()
            .enumerate()
            .map(|(slot, member)| Existing {
                server: member.server,
                term: is_ec.then_some(slot),
            })
            .collect();
        self.matcher.place(&[], &existing, Mode::Strict)
    }

    /// The emptiest disk of a server for its size.
    pub(crate) fn pick_disk(&self, server: usize) -> Option<Member> {
        let key = self.servers[server].candidate.key;
        let disks = self.servers[server]
            .disks
            .iter()
            .filter(|disk| takes_members(disk));
        disks
            .map(|disk| {
                let member = Member {
                    server: key,
                    disk: disk.key,
                };
                let count = self.disk_counts.get(&member).copied().unwrap_or(0) + 1;
                let fill = (u128::from(count) << 64) / u128::from(disk.total_bytes.max(1));
                (fill, member)
            })
            .min()
            .map(|(_, member)| member)
    }

    pub(crate) fn add(&mut self, member: Member) {
        if let Some(server) = self.matcher.index_of(member.server) {
            self.counts[server] += 1;
            *self.disk_counts.entry(member).or_default() += 1;
        }
    }

    pub(crate) fn remove(&mut self, member: Member) {
        if let Some(server) = self.matcher.index_of(member.server) {
            self.counts[server] = self.counts[server].saturating_sub(1);
            let count = self.disk_counts.entry(member).or_default();
            *count = count.saturating_sub(1);
        }
    }
}

fn takes_members(disk: &Disk) -> bool {
    disk.usable && !disk.draining
}

/// Weights in steps of the largest one's [`SHARES`]th part, so that servers of nearly the same size
/// count as equal.
fn shares(servers: &[PlanServer]) -> Vec<u64> {
    let bytes = |server: &PlanServer| -> u128 {
        let disks = server.disks.iter().filter(|disk| takes_members(disk));
        disks.map(|disk| u128::from(disk.total_bytes.max(1))).sum()
    };
    let largest = servers.iter().map(bytes).max().unwrap_or(0).max(1);
    servers
        .iter()
        .map(|server| {
            let share = (bytes(server) * u128::from(SHARES)).div_ceil(largest);
            u64::try_from(share).unwrap_or(SHARES)
        })
        .collect()
}

const SHARES: u64 = 64;
const FILL_UNIT: u64 = 1 << 20;

#[cfg(test)]
#[path = "test_support.rs"]
pub(crate) mod test_support;

#[cfg(test)]
#[path = "groups_tests.rs"]
mod tests;
