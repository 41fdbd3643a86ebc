//! Chunkservers come, go, restart and change their labels.

use std::collections::BTreeMap;
use std::time::Duration;

use hither_proto::ids::{ChunkserverId, GroupId};
use hither_proto::manager::{Heartbeat, HeartbeatReply};
use hither_proto::map::{Chunkserver, MemberState, ServerState as Shown};

use super::labels::show_labels;
use super::{admit, caught_up, groups_with, take_out};
use crate::state::State;

/// When each server was last heard of; kept by the leader, not stored.
#[derive(Debug, Clone, Default)]
pub struct Liveness {
    last: BTreeMap<ChunkserverId, Duration>,
    /// Boot ids that were replaced by a newer process of the same id.
    replaced: BTreeMap<(ChunkserverId, u64), Duration>,
    /// Servers found unreachable although they beat, until this time.
    held_down: BTreeMap<ChunkserverId, Duration>,
    /// Members that could not be reached within their group, until this time.
    held_out: BTreeMap<(GroupId, ChunkserverId), Duration>,
    /// Zone whose servers a metadata server does not reach; no other is believed until this time.
    lost_zone: Option<(String, Duration)>,
}

/// Outcome of a heartbeat.
#[derive(Debug, Clone, PartialEq)]
pub struct Beat {
    /// The state after it; `None`: nothing changed.
    pub next: Option<State>,
    /// The answer.
    pub reply: HeartbeatReply,
}

/// Time within which a server is expected to beat.
const BEAT_INTERVAL: Duration = Duration::from_millis(500);
/// A longer time between two looks of the manager is a time in which it heard nobody.
const LOOK_AT_LEAST: Duration = Duration::from_millis(500);
/// Silence after which a server is taken as lost.
const LOST_AFTER: Duration = Duration::from_secs(2);
/// Processes of one id that are remembered.
const REPLACED_MAX: usize = 10_000;

impl Liveness {
    /// A new leader has heard of nobody: everyone gets the full time to beat.
    #[must_use]
    pub fn fresh(state: &State, now: Duration) -> Self {
        Self {
            last: state.servers.keys().map(|id| (*id, now)).collect(),
            ..Self::default()
        }
    }

    /// A server beats but cannot be reached: it stays down for a while.
    pub fn hold_down(&mut self, id: ChunkserverId, now: Duration) {
        self.held_down.insert(id, now + HOLD);
    }

    /// A member cannot be reached within its group: it is not let in again for a while.
    pub fn hold_out(&mut self, group: GroupId, id: ChunkserverId, now: Duration) {
        self.held_out.insert((group, id), now + HOLD);
    }

    /// Whether servers of the zone may be taken as out of a metadata server's reach.
    pub(super) fn may_lose(&self, zone: &str, now: Duration) -> bool {
        let lost = self.lost_zone.as_ref();
        lost.is_none_or(|(lost, until)| lost == zone || *until <= now)
    }

    /// A server of the zone was taken as out of a metadata server's reach.
    pub(super) fn lose(&mut self, zone: String, now: Duration) {
        self.lost_zone = Some((zone, now + HOLD));
    }

    fn is_held_down(&self, id: ChunkserverId, now: Duration) -> bool {
        self.held_down.get(&id).is_some_and(|until| *until > now)
    }

    fn is_held_out(&self, group: GroupId, id: ChunkserverId, now: Duration) -> bool {
        self.held_out
            .get(&(group, id))
            .is_some_and(|until| *until > now)
    }

    /// The manager itself has not looked for this long (it was stopped, or the store did not
    /// answer): signs of life have been waiting meanwhile, and silence does not count.
    pub fn excuse(&mut self, gap: Duration, now: Duration) {
        let Some(surplus) = gap.checked_sub(LOOK_AT_LEAST) else {
            return;
        };
        for last in self.last.values_mut() {
            *last = (*last + surplus).min(now);
        }
    }

    /// Forgets what no longer holds.
    pub fn tidy(&mut self, now: Duration) {
        self.held_down.retain(|_, until| *until > now);
        self.held_out.retain(|_, until| *until > now);
    }
}

/// A chunkserver shows a sign of life; registers it if it is new.
pub fn beat(state: &State, liveness: &mut Liveness, beat: &Heartbeat, now: Duration) -> Beat {
    let description = beat.description.clone().unwrap_or_default();
    let mut reply = HeartbeatReply {
        server: beat.server,
        map_version: state.version,
        interval_ms: u32::try_from(BEAT_INTERVAL.as_millis()).unwrap_or(u32::MAX),
        duplicate: false,
    };
    let id = ChunkserverId(beat.server);
    if liveness.replaced.contains_key(&(id, description.boot_id)) {
        reply.duplicate = true;
        return Beat { next: None, reply };
    }
    let mut next = state.clone();
    let id = if beat.server == 0 {
        // The answer that told it its id may have been lost: one process gets one id.
        registered_as(state, description.boot_id).unwrap_or_else(|| {
            let id = ChunkserverId(next.next_server.max(1));
            next.next_server = id.0 + 1;
            id
        })
    } else {
        // Its id came from this cluster even if a restored store does not know it any more.
        next.next_server = next.next_server.max(id.0 + 1);
        id
    };
    reply.server = id.0;
    liveness.last.insert(id, now);
    if state
        .boot_of(id)
        .is_some_and(|boot| boot.0 == description.boot_id)
        && liveness.is_held_down(id, now)
    {
        return Beat { next: None, reply };
    }
    let restarted = state
        .boot_of(id)
        .filter(|boot| boot.0 != 0 && boot.0 != description.boot_id);
    if let Some(old) = restarted {
        if liveness.replaced.len() >= REPLACED_MAX {
            liveness.replaced.pop_first();
        }
        liveness.replaced.insert((id, old.0), now);
        lag_everywhere(&mut next, id);
    }
    describe(&mut next, id, &description);
    for report in beat.reports.iter().filter(|report| report.caught_up) {
        if let Some(group) = next.groups.get_mut(&GroupId(report.group)) {
            caught_up(group, id, report.epoch);
        }
    }
    for key in groups_with(&next.groups, id) {
        if liveness.is_held_out(key, id, now) {
            continue;
        }
        if let Some(group) = next.groups.get_mut(&key) {
            admit(group, id);
        }
    }
    let changed = next != *state;
    Beat {
        next: changed.then_some(next),
        reply,
    }
}

fn registered_as(state: &State, boot_id: u64) -> Option<ChunkserverId> {
    let mut known = state.servers.iter();
    let (id, _) = known.find(|(_, server)| boot_id != 0 && server.shown.boot_id == boot_id)?;
    Some(*id)
}

/// Servers that have been silent for too long.
#[must_use]
pub fn lost_servers(state: &State, liveness: &Liveness, now: Duration) -> Vec<ChunkserverId> {
    state
        .servers
        .iter()
        .filter(|(_, server)| server.shown.state != i32::from(Shown::Down))
        .filter(|(id, _)| {
            liveness
                .last
                .get(id)
                .is_none_or(|last| *last + LOST_AFTER < now)
        })
        .map(|(id, _)| *id)
        .collect()
}

/// Servers that have been down for longer than `repair_after` and are not in maintenance.
#[must_use]
pub fn gone_servers(
    state: &State,
    liveness: &Liveness,
    repair_after: Duration,
    now: Duration,
) -> Vec<ChunkserverId> {
    let down = state.servers.iter().filter(|(_, server)| {
        let down = server.shown.state == i32::from(Shown::Down);
        down && !server.maintenance && !server.gone
    });
    let silent = |id: &ChunkserverId| {
        let last = liveness.last.get(id);
        last.is_none_or(|last| *last + repair_after < now)
    };
    down.map(|(id, _)| *id).filter(silent).collect()
}

/// The copies of a server are made elsewhere from now on.
#[must_use]
pub fn server_gone(state: &State, id: ChunkserverId) -> State {
    let mut next = state.clone();
    if let Some(server) = next.servers.get_mut(&id) {
        server.gone = true;
    }
    next
}

/// A server that will not come back is forgotten: its copies are made elsewhere at once.
///
/// # Errors
/// When there is no such server, or it is up.
pub fn server_forgotten(state: &State, id: ChunkserverId) -> Result<State, String> {
    let mut next = state.clone();
    let server = next
        .servers
        .remove(&id)
        .ok_or_else(|| format!("there is no chunkserver {id}"))?;
    if server.shown.state != i32::from(Shown::Down) {
        return Err(format!(
            "chunkserver {id} is up: stop it first, and forget it when it is down"
        ));
    }
    Ok(next)
}

/// A server is taken as lost: it leaves the in-sync set of all its groups.
#[must_use]
pub fn server_lost(state: &State, id: ChunkserverId) -> State {
    let mut next = state.clone();
    if let Some(server) = next.servers.get_mut(&id) {
        server.shown.state = Shown::Down.into();
    }
    lag_everywhere(&mut next, id);
    next
}

/// Maintenance on or off.
///
/// # Errors
/// When there is no such server.
pub fn maintenance_changed(state: &State, id: ChunkserverId, on: bool) -> Result<State, String> {
    let mut next = state.clone();
    let server = next
        .servers
        .get_mut(&id)
        .ok_or_else(|| format!("there is no chunkserver {id}"))?;
    server.maintenance = on;
    if server.shown.state != i32::from(Shown::Down) {
        server.shown.state = up(on).into();
    }
    Ok(next)
}

/// Draining on or off: a draining server takes no new copies, and members of groups on it leave
/// once others hold everything.
///
/// # Errors
/// When there is no such server.
pub fn draining_changed(state: &State, id: ChunkserverId, on: bool) -> Result<State, String> {
    let mut next = state.clone();
    let server = next
        .servers
        .get_mut(&id)
        .ok_or_else(|| format!("there is no chunkserver {id}"))?;
    server.shown.draining = on;
    Ok(next)
}

fn up(maintenance: bool) -> Shown {
    if maintenance {
        Shown::Maintenance
    } else {
        Shown::Up
    }
}

/// What a restarted or lost server missed has to be found out: it lags in all its groups.
fn lag_everywhere(state: &mut State, id: ChunkserverId) {
    for group in groups_with(&state.groups, id) {
        if let Some(group) = state.groups.get_mut(&group) {
            take_out(group, id);
        }
    }
}

fn describe(state: &mut State, id: ChunkserverId, said: &Chunkserver) {
    let server = state.servers.entry(id).or_default();
    let old_disks = std::mem::take(&mut server.shown.disks);
    let maintenance = server.maintenance;
    let mut shown = Chunkserver {
        id: id.0,
        state: up(maintenance).into(),
        draining: server.shown.draining,
        ..said.clone()
    };
    for disk in &mut shown.disks {
        // Free space moves all the time: the map shows it in steps.
        let old = old_disks.iter().find(|old| old.index == disk.index);
        if let Some(old) = old
            && old.total_bytes == disk.total_bytes
            && old.free_bytes.abs_diff(disk.free_bytes) < disk.total_bytes / FREE_STEPS
        {
            disk.free_bytes = old.free_bytes;
        }
        if let Some(old) = old
            && old.copy_bytes.abs_diff(disk.copy_bytes)
                <= (old.copy_bytes / COPY_STEPS).max(COPY_STEP_MIN)
        {
            disk.copy_bytes = old.copy_bytes;
        }
    }
    server.own_labels = std::mem::take(&mut shown.labels);
    server.gone = false;
    server.shown = shown;
    show_labels(server);
}

/// Whether a member may be read from.
pub(crate) fn is_in_sync(state: i32) -> bool {
    state == i32::from(MemberState::InSync)
}

/// Time for which what was found unreachable is left alone.
const HOLD: Duration = Duration::from_secs(10);
/// Steps in which the map shows free space.
const FREE_STEPS: u64 = 64;
/// What copies take is shown anew when it changed by more than this part of itself.
const COPY_STEPS: u64 = 8;
const COPY_STEP_MIN: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use hither_proto::manager::MemberReport;
    use hither_proto::map::{Group, Member};

    use super::*;

    fn heartbeat(server: u64, boot_id: u64) -> Heartbeat {
        Heartbeat {
            server,
            description: Some(Chunkserver {
                zone: "eu-1a".into(),
                labels: vec!["S".into()],
                boot_id,
                ..Chunkserver::default()
            }),
            ..Heartbeat::default()
        }
    }

    fn member(server: u64, state: MemberState) -> Member {
        Member {
            server,
            disk: 0,
            state: state.into(),
        }
    }

    fn states(state: &State, group: u32) -> Vec<i32> {
        state.groups[&GroupId(group)]
            .members
            .iter()
            .map(|m| m.state)
            .collect()
    }

    fn registered() -> (State, Liveness) {
        let mut liveness = Liveness::default();
        let mut state = State::default();
        for boot in [11, 12] {
            let beat = beat(&state, &mut liveness, &heartbeat(0, boot), Duration::ZERO);
            state = beat.next.unwrap();
        }
        let in_sync = MemberState::InSync;
        let group = Group {
            id: 1,
            epoch: 5,
            members: vec![member(1, in_sync), member(2, in_sync)],
            ..Group::default()
        };
        state.groups.insert(GroupId(1), group);
        (state, liveness)
    }

    #[test]
    fn a_draining_server_stays_one_when_it_comes_back() {
        let (state, mut liveness) = registered();
        let id = ChunkserverId(1);
        let state = draining_changed(&state, id, true).unwrap();
        let again = beat(
            &state,
            &mut liveness,
            &heartbeat(1, 13),
            Duration::from_secs(60),
        );
        assert!(again.next.unwrap().servers[&id].shown.draining);
        assert!(draining_changed(&state, ChunkserverId(9), true).is_err());
    }

    #[test]
    fn a_new_server_gets_an_id_and_shows_its_zone_as_a_label() {
        let (state, _) = registered();
        assert_eq!(
            state.servers.keys().map(|id| id.0).collect::<Vec<_>>(),
            vec![1, 2]
        );
        assert_eq!(
            state.servers[&ChunkserverId(1)].shown.labels,
            vec!["S", "zone=eu-1a"]
        );
    }

    /// A server that nobody is stood in groups, and they were never whole.
    #[test]
    fn a_registration_that_is_sent_again_gets_the_same_id() {
        let (state, mut liveness) = registered();
        let again = beat(&state, &mut liveness, &heartbeat(0, 12), Duration::ZERO);
        assert_eq!((again.reply.server, again.next), (2, None));
        let other = beat(&state, &mut liveness, &heartbeat(0, 13), Duration::ZERO);
        assert_eq!(other.reply.server, 3);
    }

    #[test]
    fn a_restarted_server_fills_and_becomes_in_sync_in_its_epoch_only() {
        let (state, mut liveness) = registered();
        let again = beat(&state, &mut liveness, &heartbeat(1, 99), Duration::ZERO);
        let state = again.next.unwrap();
        let filling = MemberState::Filling.into();
        assert_eq!(states(&state, 1), vec![filling, MemberState::InSync.into()]);
        let epoch = state.groups[&GroupId(1)].epoch;
        assert!(epoch > 5);
        let mut report = heartbeat(1, 99);
        report.reports = vec![MemberReport {
            group: 1,
            epoch: epoch - 1,
            caught_up: true,
            disk: 0,
        }];
        let stale = beat(&state, &mut liveness, &report, Duration::ZERO);
        assert_eq!(stale.next, None, "a report of another epoch is void");
        report.reports[0].epoch = epoch;
        let state = beat(&state, &mut liveness, &report, Duration::ZERO)
            .next
            .unwrap();
        assert_eq!(states(&state, 1), vec![MemberState::InSync.into(); 2]);
        // The process it replaced is told to stop.
        let ghost = beat(&state, &mut liveness, &heartbeat(1, 11), Duration::ZERO);
        assert!(ghost.reply.duplicate && ghost.next.is_none());
    }

    #[test]
    fn a_manager_that_was_stopped_hears_everybody_first() {
        let (state, mut liveness) = registered();
        let now = Duration::from_secs(60);
        liveness.excuse(now, now);
        assert_eq!(lost_servers(&state, &liveness, now), Vec::new());
        liveness.excuse(Duration::from_millis(100), now);
        let later = now + LOST_AFTER;
        assert_eq!(lost_servers(&state, &liveness, later).len(), 2);
    }

    #[test]
    fn the_last_in_sync_member_is_never_taken_out() {
        let (state, liveness) = registered();
        let late = Duration::from_secs(60);
        assert_eq!(lost_servers(&state, &liveness, late).len(), 2);
        let state = server_lost(&state, ChunkserverId(1));
        let state = server_lost(&state, ChunkserverId(2));
        let (lagging, in_sync) = (MemberState::Lagging.into(), MemberState::InSync.into());
        assert_eq!(states(&state, 1), vec![lagging, in_sync]);
        let mut liveness = liveness;
        let back = beat(&state, &mut liveness, &heartbeat(1, 11), late)
            .next
            .unwrap();
        assert_eq!(states(&back, 1), vec![MemberState::Filling.into(), in_sync]);
        assert_eq!(
            back.servers[&ChunkserverId(1)].shown.state,
            i32::from(Shown::Up)
        );
    }

    #[test]
    fn an_unreachable_process_is_held_down_a_new_one_is_not() {
        let (state, mut liveness) = registered();
        let id = ChunkserverId(1);
        liveness.hold_down(id, Duration::ZERO);
        let state = server_lost(&state, id);
        let second = Duration::from_secs(1);
        assert_eq!(
            beat(&state, &mut liveness, &heartbeat(1, 11), second).next,
            None
        );
        let again = beat(&state, &mut liveness, &heartbeat(1, 99), second)
            .next
            .unwrap();
        assert_eq!(again.servers[&id].shown.state, i32::from(Shown::Up));
    }

    #[test]
    fn free_space_changes_the_map_in_steps() {
        let (state, mut liveness) = registered();
        let mut said = heartbeat(1, 11);
        let disk = |free| hither_proto::map::Disk {
            total_bytes: 6400,
            free_bytes: free,
            ..Default::default()
        };
        said.description.as_mut().unwrap().disks = vec![disk(5000)];
        let state = beat(&state, &mut liveness, &said, Duration::ZERO)
            .next
            .unwrap();
        said.description.as_mut().unwrap().disks = vec![disk(4950)];
        assert_eq!(
            beat(&state, &mut liveness, &said, Duration::ZERO).next,
            None
        );
        said.description.as_mut().unwrap().disks = vec![disk(4800)];
        assert!(
            beat(&state, &mut liveness, &said, Duration::ZERO)
                .next
                .is_some()
        );
    }
}
