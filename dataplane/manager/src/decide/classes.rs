//! Storage classes and the definitions behind them.

use hither_labels::{
    ChunkState, Mode, PreferenceTemplate, StorageClass as Class, StorageDefinition,
};
use hither_placement::{Cause, CopySet, Fulfilment, Layout, ServerKey, dry_run};
use hither_proto::ids::{ClassId, DefinitionId};
use hither_proto::manager::{ClassReply, ClassSet, ZoneMove};
use hither_proto::map::StorageClass;

use super::groups::{DEFAULT_DATA_PARTS, plan_servers};
use crate::state::{Definition, State, mode_of};

/// Outcome of a change of classes.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassOutcome {
    /// The state after it; `None` for a dry run.
    pub next: Option<State>,
    /// The answer.
    pub reply: ClassReply,
}

/// Makes or changes a class.
///
/// # Errors
/// What is wrong and what to do, in words.
pub fn class_set(state: &State, request: &ClassSet) -> Result<ClassOutcome, String> {
    let wanted = request.class.clone().ok_or("the request names no class")?;
    let class = parse(&wanted)?;
    class.validate().map_err(|e| e.to_string())?;
    let old = state
        .classes
        .values()
        .find(|known| known.name == wanted.name);
    if old.is_some() && !request.replace && !request.dry_run {
        return Err(format!(
            "storage class {:?} exists: change it with `hither sclass set` instead",
            wanted.name
        ));
    }
    if old.is_none() && request.replace {
        let names: Vec<&str> = state.classes.values().map(|c| c.name.as_str()).collect();
        return Err(format!(
            "there is no storage class {:?}; there are: {}. `hither sclass create` makes one",
            wanted.name,
            names.join(", ")
        ));
    }
    // What is written stays in its groups: a change of the class moves nothing by itself, and only
    // a dry run is asked what following it would take.
    let moved = old.filter(|_| request.dry_run);
    let mut reply = consequences(state, &class, moved);
    let strict = class.mode(ChunkState::Keep) == Mode::Strict;
    if strict && !reply.satisfiable && !request.force && !request.dry_run {
        return Err(format!(
            "no set of present chunkservers satisfies the strict class {:?}: {}. Use --force to \
             make it all the same",
            wanted.name,
            reply.notes.join("; ")
        ));
    }
    let mut next = state.clone();
    let id = old.map_or_else(
        || {
            let id = next.next_class.max(1);
            next.next_class = id + 1;
            id
        },
        |old| old.id,
    );
    let keep = definition(&mut next, &class, ChunkState::Keep);
    let create = definition(&mut next, &class, ChunkState::Create);
    let stored = StorageClass {
        id,
        keep: class.keep.to_string(),
        keep_definition: keep.0,
        create_definition: create.0,
        ..wanted
    };
    reply.class = Some(stored.clone());
    next.classes.insert(ClassId(id), stored);
    Ok(ClassOutcome {
        next: (!request.dry_run).then_some(next),
        reply,
    })
}

/// Removes a class.
///
/// # Errors
/// When there is none of that name, or it is the default class.
pub fn class_deleted(state: &State, name: &str) -> Result<State, String> {
    let (id, _) = state
        .classes
        .iter()
        .find(|(_, class)| class.name == name)
        .ok_or_else(|| format!("there is no storage class {name:?}"))?;
    if Some(id) == state.classes.keys().next() {
        return Err(format!(
            "{name:?} is the cluster's default class: change it instead"
        ));
    }
    let mut next = state.clone();
    let id = *id;
    next.classes.remove(&id);
    Ok(next)
}

/// A class is removed that nothing named when the store was searched.
///
/// # Errors
/// As [`class_deleted`], and when the name is another class's by now: that one was not searched for.
pub fn class_unused(state: &State, id: ClassId, name: &str) -> Result<State, String> {
    let class = state.classes.get(&id);
    if class.is_none_or(|class| class.name != name) {
        return Err(format!(
            "storage class {name:?} was changed while the store was searched: try again"
        ));
    }
    class_deleted(state, name)
}

fn parse(wanted: &StorageClass) -> Result<Class, String> {
    let definition = |name: &str, text: &str| -> Result<StorageDefinition, String> {
        text.parse().map_err(|e| format!("{name} definition:\n{e}"))
    };
    let optional = |name: &str, text: &str| -> Result<Option<StorageDefinition>, String> {
        if text.is_empty() {
            Ok(None)
        } else {
            definition(name, text).map(Some)
        }
    };
    let mut class = Class::new(wanted.name.clone(), definition("keep", &wanted.keep)?);
    class.description.clone_from(&wanted.description);
    class.create = optional("create", &wanted.create)?;
    class.archive = optional("archive", &wanted.archive)?;
    class.trash = optional("trash", &wanted.trash)?;
    class.mode = mode_of(&wanted.mode).ok_or_else(|| {
        format!(
            "mode {:?} is unknown: use strict, std or loose",
            wanted.mode
        )
    })?;
    if !wanted.preferred_labels.is_empty() {
        let template = PreferenceTemplate::parse(&wanted.preferred_labels);
        class.preferred_labels = Some(template.map_err(|e| format!("preferred labels:\n{e}"))?);
    }
    if wanted.min_write_copies != 0 {
        class.min_write_copies = u8::try_from(wanted.min_write_copies).ok();
    }
    class.priority = wanted.priority;
    class.admin_only = wanted.admin_only;
    class.volatile = wanted.volatile;
    Ok(class)
}

/// The definition of a state, shared with classes that say the same.
fn definition(state: &mut State, class: &Class, of: ChunkState) -> DefinitionId {
    let copies = class.min_write_copies(of);
    let wanted = Definition {
        definition: class.definition(of).sorted(),
        mode: class.mode(of),
        min_write_copies: u32::try_from(copies).unwrap_or(1).max(1),
    };
    if let Some((id, _)) = state
        .definitions
        .iter()
        .find(|(_, known)| **known == wanted)
    {
        return *id;
    }
    let id = DefinitionId(state.next_definition.max(1));
    state.next_definition = id.0 + 1;
    state.definitions.insert(id, wanted);
    id
}

fn consequences(state: &State, class: &Class, old: Option<&StorageClass>) -> ClassReply {
    let candidates: Vec<_> = plan_servers(state)
        .into_iter()
        .map(|s| s.candidate)
        .collect();
    let sets = old.map(|old| copy_sets(state, old)).unwrap_or_default();
    let run = dry_run(
        class.definition(ChunkState::Keep),
        class.mode(ChunkState::Keep),
        DEFAULT_DATA_PARTS,
        &sets,
        &candidates,
    );
    let mut notes = Vec::new();
    let mut satisfiable = match &run.fulfilment {
        Fulfilment::Yes => true,
        Fulfilment::Busy => {
            notes.push("some servers are too busy just now".into());
            true
        }
        Fulfilment::NoSpace => {
            notes.push("servers that match have no space or are not reachable".into());
            false
        }
        Fulfilment::No(missing) => {
            for (term, cause) in missing {
                let terms = class.definition(ChunkState::Keep).terms(8);
                let text = terms
                    .get(*term)
                    .map_or_else(String::new, ToString::to_string);
                notes.push(format!("copy {} ({text}): {}", term + 1, in_words(*cause)));
            }
            false
        }
    };
    for (zone, moves) in &run.zones {
        let of_zone = candidates.iter().filter(|server| server.zone == *zone);
        let free: u64 = of_zone.map(|server| server.free_bytes).sum();
        if moves.bytes_in > free {
            let zone = zone.as_deref().unwrap_or("without a name");
            notes.push(format!(
                "zone {zone} is to take {} bytes of copies, and its disks have {free} free",
                moves.bytes_in
            ));
            satisfiable = false;
        }
    }
    let moves = run
        .zones
        .iter()
        .filter(|(_, moves)| moves.copies_in > 0)
        .map(|(zone, moves)| ZoneMove {
            zone: zone.clone().unwrap_or_default(),
            copies: moves.copies_in,
            bytes: moves.bytes_in,
        })
        .collect();
    ClassReply {
        class: None,
        notes,
        moves,
        satisfiable,
    }
}

/// Why a copy finds no place.
fn in_words(cause: Cause) -> &'static str {
    match cause {
        Cause::NoServer => "no chunkserver has these labels (`hither cs ls` shows all)",
        Cause::Taken => "every chunkserver with these labels is to hold another of the copies",
        Cause::Busy => "the chunkservers with these labels are busy",
        Cause::Full => "the chunkservers with these labels are full",
        Cause::Away => {
            "the chunkservers with these labels are down, in maintenance or being drained"
        }
    }
}

/// The groups of a class as sets of copies, each with its share of what its disks hold.
fn copy_sets(state: &State, class: &StorageClass) -> Vec<CopySet> {
    let groups_on = |server: u64, disk: u32| {
        let member = |m: &hither_proto::map::Member| m.server == server && m.disk == disk;
        state
            .groups
            .values()
            .filter(|group| group.members.iter().any(member))
            .count()
            .max(1)
    };
    state
        .groups
        .values()
        .filter(|group| group.definition == class.keep_definition)
        .map(|group| {
            let first = group.members.first();
            let bytes = first.map_or(0, |member| {
                let server = state
                    .servers
                    .get(&hither_proto::ids::ChunkserverId(member.server));
                let disk =
                    server.and_then(|s| s.shown.disks.iter().find(|d| d.index == member.disk));
                // What else is on the disk is none of the groups'.
                let held = disk.map_or(0, |disk| disk.copy_bytes);
                held / groups_on(member.server, member.disk) as u64
            });
            CopySet {
                layout: Layout::Copies,
                servers: group
                    .members
                    .iter()
                    .map(|m| Some(ServerKey(m.server)))
                    .collect(),
                chunks: 1,
                bytes,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use hither_proto::ids::ChunkserverId;
    use hither_proto::map::{Chunkserver, Disk, ServerState as Shown};

    use super::*;
    use crate::decide::plan;
    use crate::state::ServerState;

    /// Zones a, b and c with a server each, and a class with copies in a and b. Of each disk
    /// 700 GB are used, and 8 GB of that by copies.
    fn three_zones(free_bytes: u64) -> State {
        let mut state = State::default();
        for (at, zone) in ["a", "b", "c"].iter().enumerate() {
            let id = at as u64 + 1;
            let shown = Chunkserver {
                id,
                zone: (*zone).to_owned(),
                labels: vec![format!("zone={zone}")],
                state: Shown::Up.into(),
                disks: vec![Disk {
                    total_bytes: 700 * GB + free_bytes,
                    free_bytes,
                    copy_bytes: 8 * GB,
                    ..Disk::default()
                }],
                ..Chunkserver::default()
            };
            let server = ServerState {
                shown,
                ..ServerState::default()
            };
            state.servers.insert(ChunkserverId(id), server);
        }
        let made = class_set(&state, &request("zone=a,zone=b", false, false)).unwrap();
        plan(&made.next.unwrap())
    }

    fn request(keep: &str, replace: bool, dry_run: bool) -> ClassSet {
        ClassSet {
            class: Some(StorageClass {
                name: "two".into(),
                keep: keep.into(),
                ..StorageClass::default()
            }),
            replace,
            dry_run,
            force: false,
        }
    }

    #[test]
    fn a_dry_run_estimates_what_copies_hold_not_what_else_is_on_the_disks() {
        let state = three_zones(300 * GB);
        let outcome = class_set(&state, &request("zone=a,zone=c", true, true)).unwrap();
        assert_eq!(outcome.next, None);
        let moves = &outcome.reply.moves;
        assert_eq!(moves.len(), 1);
        assert_eq!(moves[0].zone, "c");
        let groups = state.groups.len() as u64;
        assert!(
            moves[0].bytes <= 8 * GB && moves[0].bytes + groups >= 8 * GB,
            "{moves:?}"
        );
        assert!(outcome.reply.satisfiable, "{:?}", outcome.reply.notes);
    }

    #[test]
    fn a_dry_run_says_when_the_disks_have_no_room_for_it() {
        let state = three_zones(5 * GB);
        let outcome = class_set(&state, &request("zone=a,zone=c", true, true)).unwrap();
        assert!(!outcome.reply.satisfiable);
        let notes = outcome.reply.notes.join("; ");
        assert!(notes.contains("zone c"), "{notes}");
    }

    /// `sclass set` told of copies nobody makes, of classes no file has even.
    #[test]
    fn a_change_moves_nothing_and_says_nothing_of_moves() {
        let state = three_zones(5 * GB);
        let outcome = class_set(&state, &request("zone=a,zone=c", true, false)).unwrap();
        assert_eq!(outcome.reply.moves, vec![]);
        assert!(outcome.reply.satisfiable, "{:?}", outcome.reply.notes);
        let next = plan(&outcome.next.unwrap());
        for (id, group) in &state.groups {
            assert_eq!(next.groups.get(id), Some(group), "what is written stays");
        }
    }

    #[test]
    fn what_no_server_satisfies_is_told_in_words() {
        let state = three_zones(300 * GB);
        let notes = |keep: &str| {
            let mut wanted = request(keep, false, false);
            wanted.class.as_mut().unwrap().name = "new".into();
            let reply = class_set(&state, &wanted).unwrap().reply;
            assert!(!reply.satisfiable);
            reply.notes.join("; ")
        };
        let none = notes("zone=a,zone=x");
        assert!(
            none.contains("(zone=x): no chunkserver has these labels"),
            "{none}"
        );
        let taken = notes("2zone=a");
        assert!(
            taken.contains("is to hold another of the copies"),
            "{taken}"
        );
    }

    #[test]
    fn a_class_that_is_not_there_is_not_changed_nor_tried() {
        let state = three_zones(300 * GB);
        let mut unknown = request("zone=a", true, true);
        unknown.class.as_mut().unwrap().name = "tow".into();
        let refused = class_set(&state, &unknown).unwrap_err();
        assert!(refused.contains("there are: two"), "{refused}");
        unknown.dry_run = false;
        assert!(class_set(&state, &unknown).is_err());
    }

    /// The class was removed and made again while the store was searched for the first one.
    #[test]
    fn only_the_class_that_was_searched_for_is_removed() {
        let state = three_zones(300 * GB);
        let (first, last) = (ClassId(1), *state.classes.keys().next_back().unwrap());
        let mut more = state.clone();
        let two = more.classes[&last].clone();
        more.classes.insert(ClassId(last.0 + 1), two);
        more.classes.get_mut(&last).unwrap().name = "another".into();
        let name = state.classes[&last].name.clone();
        assert!(class_unused(&more, last, &name).is_err());
        let gone = class_unused(&more, ClassId(last.0 + 1), &name).unwrap();
        assert!(gone.classes.values().all(|class| class.name != name));
        let default = state.classes[&first].name.clone();
        assert!(class_unused(&state, first, &default).is_err());
    }

    const GB: u64 = 1_000_000_000;
}
