//! What is done next with the members of a managed etcd: one step, or none. Pure.

use std::collections::BTreeMap;

/// A member in etcd's own list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Member {
    /// Its id.
    pub id: u64,
    /// Its name; a member that was added has none until it starts.
    pub name: String,
    /// Whether it has ever started: then it has told where it takes clients.
    pub started: bool,
    /// Its address for other members.
    pub peer: String,
    /// Whether it only learns, without a vote.
    pub learner: bool,
}

/// What the etcd of a pod says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Said {
    /// Its member's id.
    pub id: u64,
    /// The member that leads, as it knows; 0 is none.
    pub leader: u64,
    /// Bytes of its file.
    pub file_bytes: i64,
    /// Bytes of it that hold something.
    pub used_bytes: i64,
    /// Bytes at which it takes no more changes.
    pub quota_bytes: i64,
}

/// A pod a member is to run in.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// Name of the pod.
    pub pod: String,
    /// Address of its member for other members.
    pub peer: String,
    /// Whether it has no data and waits to be let in.
    pub waits: bool,
    /// The member whose data it said it should have and has not.
    pub lost: Option<u64>,
    /// How its etcd was let start, if it was.
    pub let_in: Option<LetIn>,
    /// Seconds since a pod that neither waits nor was let in is being started or ended.
    pub away_seconds: Option<u64>,
    /// What its etcd says; `None` when it does not answer.
    pub said: Option<Said>,
}

/// How a pod's etcd was let start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LetIn {
    /// As which member, as far as that is known.
    pub member: Option<u64>,
    /// Seconds since then.
    pub seconds: u64,
}

/// What was seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct World {
    /// Whether the members once had a quorum: then none may begin anew.
    pub established: bool,
    /// The pods, in order.
    pub places: Vec<Place>,
    /// etcd's own list, read from a member that had a quorum behind it a moment ago.
    pub members: Option<Vec<Member>>,
    /// Whether etcd takes no changes because a member was full.
    pub full: bool,
    /// The member that somebody asked to go on from without the others.
    pub restart: Option<String>,
    /// The member that was told to, and may not have done so yet.
    pub alone: Option<String>,
    /// Seconds since members' files were last made smaller, by pod.
    pub defragmented: BTreeMap<String, u64>,
}

/// The one thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Record that there was a quorum.
    Establish,
    /// Let the member of this pod go on without the others, whose data counts no more.
    Restart(String),
    /// Start the pod that went on without the others once more: it does so once only.
    Settle(String),
    /// Start this pod once more: its etcd runs as a member that is not the one listed there, or does
    /// not join. What it has is compared with the list then, and set aside if it counts no more.
    Again(String),
    /// Take a member off the list.
    Remove(u64),
    /// Put the member of this address on the list, without a vote.
    AddLearner(String),
    /// Give a member its vote.
    Promote(u64),
    /// Make the file of this pod's member smaller.
    Defragment(String),
    /// Let etcd take changes again.
    Disarm,
}

/// What is decided.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// What to do now.
    pub step: Option<Step>,
    /// What is not as it should be with the members, or what is waited for.
    pub waiting: Option<String>,
    /// Why nothing may be done at all: there was a quorum, and there is none.
    pub lost: Option<String>,
}

impl Plan {
    fn step(step: Step, why: impl Into<String>) -> Self {
        Self {
            step: Some(step),
            waiting: Some(why.into()),
            lost: None,
        }
    }

    fn lost(why: String) -> Self {
        Self {
            lost: Some(why),
            ..Self::default()
        }
    }

    fn wait(why: impl Into<String>) -> Self {
        Self {
            waiting: Some(why.into()),
            ..Self::default()
        }
    }
}

/// Decides it.
#[must_use]
pub fn plan(world: &World) -> Plan {
    let Some(members) = &world.members else {
        return without_quorum(world);
    };
    if !world.established {
        return Plan::step(Step::Establish, "the members have begun");
    }
    if let Some(alone) = &world.alone {
        let why = format!("{alone} went on without the others, which now begin again");
        return Plan::step(Step::Settle(alone.clone()), why);
    }
    if let Some((place, member)) = runs_as_another(world, members) {
        let why = format!(
            "{} runs as a member that was taken off the list, and joins again as {:x}",
            place.pod, member.id
        );
        return Plan::step(Step::Again(place.pod.clone()), why);
    }
    // Whoever learns has no vote: taking it off, or giving it a vote, comes before any other change.
    if let Some(learner) = members.iter().find(|member| member.learner) {
        return with_learner(world, members, learner);
    }
    let place_of = |member: &Member| world.places.iter().find(|p| p.peer == member.peer);
    for member in members {
        match place_of(member) {
            Some(place) if member.started && place.lost == Some(member.id) => {
                let why = format!("{} has lost its data", place.pod);
                return remove(world, members, member, &why);
            }
            Some(_) => {}
            None => {
                let why = format!("{} is no member's address", member.peer);
                return remove(world, members, member, &why);
            }
        }
    }
    // Who waits can join; a pod that is away keeps the others from it meanwhile.
    if let Some(place) = missing(world, members).min_by_key(|place| !place.waits) {
        if place.let_in.is_some() {
            let why = format!("{} runs as a member that is listed no more", place.pod);
            return Plan::step(Step::Again(place.pod.clone()), why);
        }
        let why = format!("{} joins, without a vote at first", place.pod);
        return Plan::step(Step::AddLearner(place.peer.clone()), why);
    }
    let silent: Vec<&str> = silent(world).collect();
    if !silent.is_empty() {
        return Plan::wait(format!("no answer from {}", silent.join(", ")));
    }
    space(world)
}

fn without_quorum(world: &World) -> Plan {
    let answer = world.places.iter().filter(|place| place.said.is_some());
    let text = format!(
        "{} of {} members answer",
        answer.count(),
        world.places.len()
    );
    if !world.established {
        return Plan::wait(format!("the members begin: {text}"));
    }
    let without_data: Vec<&str> = world
        .places
        .iter()
        .filter(|place| place.waits)
        .map(|place| place.pod.as_str())
        .collect();
    let text = match &without_data[..] {
        [] => format!("{text}, not enough to agree"),
        pods => format!(
            "{text}, not enough to agree; without data: {}",
            pods.join(", ")
        ),
    };
    let Some(pod) = &world.restart else {
        return Plan::lost(match &world.alone {
            Some(alone) => format!("{text}; {alone} goes on without the others"),
            None => text,
        });
    };
    match world.places.iter().find(|place| place.pod == *pod) {
        None => Plan::lost(format!("{text}; there is no member {pod} to go on from")),
        Some(place) if place.waits => {
            Plan::lost(format!("{text}; {pod} has no data to go on from"))
        }
        Some(_) => Plan {
            step: Some(Step::Restart(pod.clone())),
            waiting: None,
            lost: Some(format!("{text}; {pod} is to go on without the others")),
        },
    }
}

/// Pods whose members are not listed.
fn missing<'a>(world: &'a World, members: &'a [Member]) -> impl Iterator<Item = &'a Place> {
    let listed = |place: &Place| members.iter().any(|member| member.peer == place.peer);
    world.places.iter().filter(move |place| !listed(place))
}

fn with_learner(world: &World, members: &[Member], learner: &Member) -> Plan {
    let Some(place) = world.places.iter().find(|place| place.peer == learner.peer) else {
        let why = format!("{} is no member's address", learner.peer);
        return Plan::step(Step::Remove(learner.id), why);
    };
    let pod = &place.pod;
    let began = learner.started;
    if began && place.lost == Some(learner.id) {
        let why = format!("{pod} has lost its data before it had a vote");
        return Plan::step(Step::Remove(learner.id), why);
    }
    let answers = place
        .said
        .as_ref()
        .is_some_and(|said| said.id == learner.id);
    if began && answers {
        let why = format!("{pod} gets its vote when it has what the others have");
        return Plan::step(Step::Promote(learner.id), why);
    }
    if began {
        return Plan::wait(format!("{pod} joins and does not answer yet"));
    }
    if place.let_in.is_some_and(|it| it.seconds >= JOIN_SECONDS) {
        let why = format!("{pod} may join and does not: it is started again");
        return Plan::step(Step::Again(pod.clone()), why);
    }
    // A zone may be gone for good: the pod of another then joins before it.
    if place.away_seconds.is_some_and(|it| it >= JOIN_SECONDS)
        && let Some(other) = missing(world, members).find(|place| place.waits)
    {
        let why = format!("{pod} may join and is not there: {} joins first", other.pod);
        return Plan::step(Step::Remove(learner.id), why);
    }
    Plan::wait(format!("{pod} may join and has not started yet"))
}

/// A pod whose etcd was let start as another member than the one that is listed there now.
fn runs_as_another<'a>(world: &'a World, members: &'a [Member]) -> Option<(&'a Place, &'a Member)> {
    world.places.iter().find_map(|place| {
        let runs_as = place.let_in?.member?;
        let member = members.iter().find(|member| member.peer == place.peer)?;
        (runs_as != member.id).then_some((place, member))
    })
}

/// Takes a member with a vote off the list, if all the others answer: they alone decide then.
fn remove(world: &World, members: &[Member], member: &Member, why: &str) -> Plan {
    let answers = |other: &&Member| {
        world
            .places
            .iter()
            .any(|place| place.said.as_ref().is_some_and(|said| said.id == other.id))
    };
    let others = members
        .iter()
        .filter(|other| other.id != member.id && !other.learner);
    if let Some(silent) = others.clone().find(|other| !answers(other)) {
        let name = if silent.name.is_empty() {
            &silent.peer
        } else {
            &silent.name
        };
        return Plan::wait(format!("{why}; it is replaced once {name} answers"));
    }
    if others.count() == 0 {
        return Plan::wait(format!("{why}; it is the only member"));
    }
    Plan::step(Step::Remove(member.id), format!("{why}: it is replaced"))
}

/// With all members there: files are made smaller one at a time, the leader's last.
fn space(world: &World) -> Plan {
    let leader = leader(world);
    let wasted = |place: &&Place| {
        let Some(said) = &place.said else {
            return false;
        };
        let waste = said.file_bytes - said.used_bytes;
        let rested = world
            .defragmented
            .get(&place.pod)
            .is_none_or(|seconds| *seconds >= DEFRAGMENT_PAUSE);
        let much = waste > WASTE_MIN && waste > said.file_bytes / 2;
        rested && (much || world.full && waste > said.file_bytes / 10)
    };
    let mut places: Vec<&Place> = world.places.iter().filter(wasted).collect();
    places.sort_by_key(|place| Some(&place.pod) == leader.as_ref());
    if let Some(place) = places.first() {
        return Plan {
            step: Some(Step::Defragment(place.pod.clone())),
            ..Plan::default()
        };
    }
    if world.full && world.places.iter().all(has_room) {
        return Plan {
            step: Some(Step::Disarm),
            ..Plan::default()
        };
    }
    Plan::default()
}

fn has_room(place: &Place) -> bool {
    let said = place.said.as_ref();
    said.is_some_and(|said| said.file_bytes < share(said.quota_bytes, ROOM_PERCENT))
}

/// Pods whose etcd does not answer.
fn silent(world: &World) -> impl Iterator<Item = &str> {
    let silent = world.places.iter().filter(|place| place.said.is_none());
    silent.map(|place| place.pod.as_str())
}

/// The pod of the member that leads.
#[must_use]
pub fn leader(world: &World) -> Option<String> {
    let leads = |place: &&Place| {
        let said = place.said.as_ref();
        said.is_some_and(|said| said.leader == said.id && said.id != 0)
    };
    world
        .places
        .iter()
        .find(leads)
        .map(|place| place.pod.clone())
}

/// Members that vote and answer.
#[must_use]
pub fn voters(world: &World) -> usize {
    let members = world.members.as_deref().unwrap_or_default();
    let votes = |id: u64| members.iter().any(|m| m.id == id && !m.learner);
    let places = world.places.iter();
    places
        .filter(|place| place.said.as_ref().is_some_and(|said| votes(said.id)))
        .count()
}

/// Whether every member votes and answers: only then one may be ended.
#[must_use]
pub fn is_whole(world: &World) -> bool {
    !world.places.is_empty() && voters(world) == world.places.len()
}

/// The member with the largest file.
#[must_use]
pub fn fullest(world: &World) -> Option<&Said> {
    let said = world.places.iter().filter_map(|place| place.said.as_ref());
    said.max_by_key(|said| said.file_bytes)
}

/// Whether a member has little room left, or none.
#[must_use]
pub fn space_is_low(world: &World) -> bool {
    world.full
        || fullest(world).is_some_and(|said| {
            said.quota_bytes > 0 && said.file_bytes >= share(said.quota_bytes, LOW_PERCENT)
        })
}

fn share(bytes: i64, percent: i64) -> i64 {
    bytes / 100 * percent
}

/// Seconds in which a pod starts and its etcd tells the others that it has joined, by far.
const JOIN_SECONDS: u64 = 600;
/// A file is made smaller when it could be half as large, and by this much.
const WASTE_MIN: i64 = 64 << 20;
/// Seconds until the same file is made smaller again.
const DEFRAGMENT_PAUSE: u64 = 3600;
/// Share of the quota from which on space is low.
const LOW_PERCENT: i64 = 80;
/// Share of the quota below which a full etcd takes changes again.
const ROOM_PERCENT: i64 = 95;

#[cfg(test)]
mod tests {
    use super::*;

    /// Three members that have all there is.
    fn world() -> World {
        let places = (0..3).map(|at| Place {
            pod: format!("e-{at}"),
            peer: peer(at),
            waits: false,
            lost: None,
            let_in: Some(LetIn {
                member: Some(at + 1),
                seconds: 3600,
            }),
            away_seconds: None,
            said: Some(Said {
                id: at + 1,
                leader: 1,
                file_bytes: 10 << 20,
                used_bytes: 10 << 20,
                quota_bytes: 8 << 30,
            }),
        });
        let members = (0..3).map(|at| Member {
            id: at + 1,
            name: format!("e-{at}"),
            started: true,
            peer: peer(at),
            learner: false,
        });
        World {
            established: true,
            places: places.collect(),
            members: Some(members.collect()),
            ..World::default()
        }
    }

    fn peer(at: u64) -> String {
        format!("https://e-{at}:2380")
    }

    /// A pod that was replaced together with its volume.
    fn lose(world: &mut World, at: usize) {
        let place = &mut world.places[at];
        (place.waits, place.said, place.let_in) = (true, None, None);
        place.lost = Some(at as u64 + 1);
    }

    fn members(world: &mut World) -> &mut Vec<Member> {
        world.members.as_mut().unwrap()
    }

    fn step(world: &World) -> Option<Step> {
        plan(world).step
    }

    #[test]
    fn with_three_members_nothing_is_done() {
        assert_eq!(plan(&world()), Plan::default());
        assert!(is_whole(&world()));
    }

    #[test]
    fn before_the_first_quorum_it_is_waited_for() {
        let mut world = world();
        (world.established, world.members) = (false, None);
        world.places[2].said = None;
        let plan = plan(&world);
        assert_eq!((plan.step, plan.lost), (None, None));
        assert!(plan.waiting.unwrap().contains("2 of 3 members answer"));
    }

    #[test]
    fn the_first_quorum_is_recorded_before_anything_else() {
        let mut world = world();
        world.established = false;
        // The third has not started yet.
        lose(&mut world, 2);
        members(&mut world)[2].started = false;
        assert_eq!(step(&world), Some(Step::Establish));
    }

    #[test]
    fn a_member_that_never_started_is_let_start() {
        let mut world = world();
        lose(&mut world, 2);
        members(&mut world)[2].started = false;
        let plan = plan(&world);
        assert_eq!(plan.step, None);
        assert!(plan.waiting.unwrap().contains("e-2"));
    }

    #[test]
    fn without_quorum_nothing_is_touched() {
        let mut world = world();
        lose(&mut world, 0);
        lose(&mut world, 1);
        world.members = None;
        world.full = true;
        let plan = plan(&world);
        assert_eq!(plan.step, None);
        let lost = plan.lost.unwrap();
        assert!(
            lost.contains("1 of 3") && lost.contains("e-0, e-1"),
            "{lost}"
        );
    }

    #[test]
    fn without_quorum_a_member_with_data_goes_on_alone_only_when_asked_to() {
        let mut world = world();
        lose(&mut world, 0);
        lose(&mut world, 1);
        world.members = None;
        for (asked, says) in [("e-0", "has no data"), ("other", "no member other")] {
            world.restart = Some(asked.into());
            let plan = plan(&world);
            assert_eq!(plan.step, None);
            assert!(plan.lost.unwrap().contains(says));
        }
        world.restart = Some("e-2".into());
        assert_eq!(step(&world), Some(Step::Restart("e-2".into())));
        (world.restart, world.alone) = (None, Some("e-2".into()));
        assert_eq!(step(&world), None, "it does not answer yet");
    }

    #[test]
    fn who_went_on_alone_starts_again_before_others_join() {
        let mut world = world();
        lose(&mut world, 0);
        lose(&mut world, 1);
        members(&mut world).drain(..2);
        world.alone = Some("e-2".into());
        assert_eq!(step(&world), Some(Step::Settle("e-2".into())));
        world.alone = None;
        assert_eq!(step(&world), Some(Step::AddLearner(peer(0))));
    }

    #[test]
    fn with_a_quorum_nobody_goes_on_alone() {
        let mut world = world();
        world.restart = Some("e-0".into());
        assert_eq!(plan(&world), Plan::default());
        world.established = false;
        world.members = None;
        assert_eq!(step(&world), None);
    }

    #[test]
    fn what_lost_its_data_is_removed_then_learns_then_votes() {
        let mut world = world();
        lose(&mut world, 1);
        assert_eq!(step(&world), Some(Step::Remove(2)));
        members(&mut world).remove(1);
        assert_eq!(step(&world), Some(Step::AddLearner(peer(1))));
        members(&mut world).push(Member {
            id: 9,
            name: String::new(),
            started: false,
            peer: peer(1),
            learner: true,
        });
        assert_eq!(step(&world), None, "it has not started yet");
        assert!(!is_whole(&world));
        // The pod is still seen as it was before it was let in: that was about another member.
        members(&mut world)[2].started = true;
        assert_eq!(step(&world), None, "it may have begun since");
        (world.places[1].waits, world.places[1].lost) = (false, None);
        assert_eq!(step(&world), None, "it does not answer yet");
        world.places[1].said = Some(Said {
            id: 9,
            ..Said::default()
        });
        assert_eq!(step(&world), Some(Step::Promote(9)));
        assert_eq!(voters(&world), 2);
        members(&mut world)[2].learner = false;
        assert!(is_whole(&world));
    }

    #[test]
    fn a_learner_that_lost_its_data_begins_again() {
        let mut world = world();
        lose(&mut world, 1);
        members(&mut world)[1].learner = true;
        assert_eq!(step(&world), Some(Step::Remove(2)));
    }

    /// Two members, and the third that was put on the list again and has not joined yet.
    fn with_learner() -> World {
        let mut world = world();
        world.places[1].said = None;
        world.places[1].let_in = None;
        let member = &mut members(&mut world)[1];
        *member = Member {
            id: 9,
            name: String::new(),
            started: false,
            peer: peer(1),
            learner: true,
        };
        world
    }

    #[test]
    fn a_learner_is_given_time_to_join() {
        let mut world = with_learner();
        // Its pod waited without data before, said whose or not, or was replaced since.
        for (waits, lost, away) in [
            (true, None, None),
            (true, Some(2), None),
            (false, None, None),
            (false, None, Some(JOIN_SECONDS * 9)),
        ] {
            let place = &mut world.places[1];
            (place.waits, place.lost, place.away_seconds) = (waits, lost, away);
            for started in [false, true] {
                members(&mut world)[1].started = started;
                assert_eq!(step(&world), None, "{waits} {lost:?} {away:?} {started}");
            }
        }
        world.places[1].lost = Some(9);
        assert_eq!(step(&world), Some(Step::Remove(9)));
    }

    #[test]
    fn who_runs_as_another_member_starts_again() {
        let mut world = with_learner();
        let let_in = |member, seconds| Some(LetIn { member, seconds });
        world.places[1].let_in = let_in(Some(2), 1);
        assert_eq!(step(&world), Some(Step::Again("e-1".into())));
        members(&mut world)[1].learner = false;
        assert_eq!(step(&world), Some(Step::Again("e-1".into())));
        members(&mut world).remove(1);
        // Those of the beginning were let in before they knew as whom.
        for member in [None, Some(2)] {
            world.places[1].let_in = let_in(member, 1);
            assert_eq!(step(&world), Some(Step::Again("e-1".into())));
        }
        (world.places[1].let_in, world.places[1].waits) = (None, true);
        assert_eq!(step(&world), Some(Step::AddLearner(peer(1))));
        let mut world = with_learner();
        world.places[1].let_in = let_in(Some(9), 1);
        assert_eq!(step(&world), None);
    }

    #[test]
    fn a_learner_that_does_not_join_for_long_starts_again() {
        let mut world = with_learner();
        for (seconds, expected) in [
            (JOIN_SECONDS - 1, None),
            (JOIN_SECONDS, Some(Step::Again("e-1".into()))),
        ] {
            world.places[1].let_in = Some(LetIn {
                member: None,
                seconds,
            });
            assert_eq!(step(&world), expected);
        }
        members(&mut world)[1].started = true;
        assert_eq!(step(&world), None, "it has joined");
    }

    #[test]
    fn a_learner_without_a_pod_does_not_keep_another_from_joining() {
        let mut world = with_learner();
        lose(&mut world, 2);
        members(&mut world).pop();
        world.places[1].away_seconds = Some(JOIN_SECONDS - 1);
        assert_eq!(step(&world), None);
        world.places[1].away_seconds = Some(JOIN_SECONDS);
        assert_eq!(step(&world), Some(Step::Remove(9)));
        members(&mut world).pop();
        assert_eq!(step(&world), Some(Step::AddLearner(peer(2))));
    }

    #[test]
    fn while_one_learns_no_other_member_changes() {
        let mut world = world();
        lose(&mut world, 0);
        lose(&mut world, 1);
        members(&mut world)[1].learner = true;
        members(&mut world)[1].started = false;
        assert_eq!(step(&world), None);
    }

    #[test]
    fn nothing_is_removed_while_another_member_is_silent() {
        let mut world = world();
        lose(&mut world, 1);
        world.places[2].said = None;
        let plan = plan(&world);
        assert_eq!(plan.step, None);
        assert!(plan.waiting.unwrap().contains("once e-2 answers"));
    }

    #[test]
    fn a_pod_that_is_away_is_waited_for() {
        let mut world = world();
        world.places[1].said = None;
        let plan = plan(&world);
        assert_eq!(plan.step, None);
        assert!(plan.waiting.unwrap().contains("e-1"));
    }

    #[test]
    fn a_strange_member_is_removed() {
        let mut world = world();
        members(&mut world)[0].peer = "https://elsewhere:2380".into();
        world.places[0].said = None;
        assert_eq!(step(&world), Some(Step::Remove(1)));
    }

    #[test]
    fn files_are_made_smaller_one_at_a_time_and_the_leaders_last() {
        let mut world = world();
        for place in &mut world.places {
            place.said.as_mut().unwrap().file_bytes = 200 << 20;
        }
        for pod in ["e-1", "e-2", "e-0"] {
            assert_eq!(step(&world), Some(Step::Defragment(pod.into())));
            world.defragmented.insert(pod.into(), 5);
        }
        assert_eq!(step(&world), None, "just done");
        world.defragmented.insert("e-0".into(), DEFRAGMENT_PAUSE);
        assert_eq!(step(&world), Some(Step::Defragment("e-0".into())));
        world.places[2].said = None;
        assert_eq!(step(&world), None, "a member is away");
    }

    #[test]
    fn little_waste_is_left_alone() {
        let mut world = world();
        let said = world.places[1].said.as_mut().unwrap();
        (said.file_bytes, said.used_bytes) = (60 << 20, 1 << 20);
        assert_eq!(step(&world), None);
        let said = world.places[1].said.as_mut().unwrap();
        (said.file_bytes, said.used_bytes) = (400 << 20, 300 << 20);
        assert_eq!(step(&world), None);
    }

    #[test]
    fn a_full_etcd_takes_changes_again_once_there_is_room() {
        let mut world = world();
        world.full = true;
        assert!(space_is_low(&world));
        for place in &mut world.places {
            place.said.as_mut().unwrap().file_bytes = 8 << 30;
        }
        assert_eq!(step(&world), Some(Step::Defragment("e-1".into())));
        for place in &mut world.places {
            place.said.as_mut().unwrap().used_bytes = 8 << 30;
        }
        assert_eq!(step(&world), None, "there is nothing to be had");
        for place in &mut world.places {
            place.said.as_mut().unwrap().file_bytes = 7 << 30;
            place.said.as_mut().unwrap().used_bytes = 7 << 30;
        }
        assert_eq!(step(&world), Some(Step::Disarm));
    }

    #[test]
    fn space_is_low_from_four_fifths_on() {
        let mut world = world();
        world.places[2].said.as_mut().unwrap().file_bytes = 6 << 30;
        assert!(!space_is_low(&world));
        world.places[2].said.as_mut().unwrap().file_bytes = 7 << 30;
        assert!(space_is_low(&world));
    }
}
