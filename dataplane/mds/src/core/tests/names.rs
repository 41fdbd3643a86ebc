//! Names: what one session does, another sees.

use std::collections::BTreeSet;

use bytes::Bytes;
use hither_proto::ids::{ROOT, SessionId};
use hither_proto::meta::{Link, Readdir, Rename, Setattr, request::Op};
use hither_proto::status::Errno;

use super::world::{World, create, getattr, lookup, unlink};
use crate::core::Answer;

const FILE: u32 = 0o100_644;
const DIR: u32 = 0o040_755;

fn rename(dir: u64, name: &str, new_dir: u64, new_name: &str, flags: u32) -> Op {
    Op::Rename(Rename {
        parent: dir,
        name: Bytes::copy_from_slice(name.as_bytes()),
        new_parent: new_dir,
        new_name: Bytes::copy_from_slice(new_name.as_bytes()),
        flags,
        ..Rename::default()
    })
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn names_are_created_found_listed_moved_and_removed() {
    let mut world = World::new();
    let s = world.session("a");
    let dir = world.create(s, ROOT.0, "dir", DIR);
    let sub = world.create(s, dir, "sub", DIR);
    for name in ["one", "two", "three", "four", "five"] {
        world.create(s, dir, name, FILE);
    }
    assert_eq!(
        world.names(s, dir),
        set(&["sub", "one", "two", "three", "four", "five"])
    );
    let attributes = world.ask(s, getattr(dir)).unwrap().inode.unwrap();
    assert_eq!((attributes.size, attributes.nlink), (6, 3));

    world.ask(s, rename(dir, "one", sub, "eins", 0)).unwrap();
    assert_eq!(world.lookup(s, dir, "one"), None);
    assert!(world.lookup(s, sub, "eins").is_some());
    let into_itself = world.ask(s, rename(ROOT.0, "dir", sub, "loop", 0));
    assert_eq!(into_itself, Err(Errno::EINVAL.into()));
    let taken = world.ask(s, rename(dir, "two", dir, "three", 1));
    assert_eq!(taken, Err(Errno::EEXIST.into()));
    world.ask(s, rename(dir, "two", dir, "three", 0)).unwrap();
    let (four, five) = (world.lookup(s, dir, "four"), world.lookup(s, dir, "five"));
    world.ask(s, rename(dir, "four", dir, "five", 2)).unwrap();
    assert_eq!(
        (world.lookup(s, dir, "five"), world.lookup(s, dir, "four")),
        (four, five)
    );

    assert_eq!(
        world.ask(s, unlink(dir, "sub", true)),
        Err(Errno::ENOTEMPTY.into())
    );
    assert_eq!(
        world.ask(s, unlink(dir, "sub", false)),
        Err(Errno::EISDIR.into())
    );
    assert_eq!(
        world.ask(s, unlink(dir, "five", true)),
        Err(Errno::ENOTDIR.into())
    );
    world.ask(s, unlink(sub, "eins", false)).unwrap();
    world.ask(s, unlink(dir, "sub", true)).unwrap();
    assert_eq!(world.names(s, dir), set(&["three", "four", "five"]));
}

#[test]
fn a_listing_of_names_has_types_and_gives_no_lease_on_inodes() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let dir = world.create(a, ROOT.0, "dir", DIR);
    world.create(a, dir, "sub", DIR);
    let file = world.create(a, dir, "file", FILE);
    world.settle();
    let op = |names_only| {
        Op::Readdir(Readdir {
            dir,
            start: true,
            limit: 10,
            names_only,
            ..Readdir::default()
        })
    };
    let names = world.ask(b, op(true)).unwrap();
    assert!(names.end && names.entries_leased);
    let types: BTreeSet<u32> = names.entries.iter().map(|entry| entry.r#type).collect();
    assert_eq!(types, BTreeSet::from([0o040_000, 0o100_000]));
    let bare = |entry: &hither_proto::meta::Entry| entry.inode.is_none();
    assert!(names.entries.iter().all(bare));
    assert!(!world.leases_attributes(b, file));
    let whole = world.ask(b, op(false)).unwrap();
    assert!(whole.entries.iter().all(|entry| entry.inode.is_some()));
    assert!(world.leases_attributes(b, file));
}

#[test]
fn a_change_of_entries_tells_the_directories_as_it_leaves_them() {
    let mut world = World::new();
    let s = world.session("a");
    let (one, two) = (
        world.create(s, ROOT.0, "one", DIR),
        world.create(s, ROOT.0, "two", DIR),
    );
    let ops = [
        create(one, "x", FILE),
        rename(one, "x", two, "y", 0),
        create(one, "x", FILE),
        rename(one, "x", two, "y", 2),
        rename(two, "y", two, "z", 0),
        unlink(two, "z", false),
    ];
    for (step, op) in ops.into_iter().enumerate() {
        let reply = world.ask(s, op).unwrap();
        assert!(reply.parents_leased, "step {step}");
        let told = [reply.parent, reply.new_parent].into_iter().flatten();
        for (n, told) in told.enumerate() {
            let now = world.ask(s, getattr(told.ino)).unwrap().inode.unwrap();
            assert_eq!(told, now, "step {step}, directory {n}");
        }
    }
    assert_eq!(world.names(s, one), set(&["x"]));
}

#[test]
fn the_store_alone_holds_everything_after_a_commit() {
    let mut world = World::new();
    let s = world.session("a");
    let dir = world.create(s, ROOT.0, "dir", DIR);
    for n in 0..10 {
        world.create(s, dir, &format!("f{n}"), FILE);
    }
    world.ask(s, unlink(dir, "f3", false)).unwrap();
    world.ask(s, rename(dir, "f4", ROOT.0, "moved", 0)).unwrap();
    let fresh = World::on(
        world.store.clone(),
        hither_proto::ids::RankId(0),
        Vec::new(),
    );
    let mut world = fresh;
    // The old session has to run out first: nobody knows what it holds.
    world.now += std::time::Duration::from_secs(16);
    world.event(crate::core::Event::Tick);
    let s = world.session("b");
    assert_eq!(world.names(s, ROOT.0), set(&["dir", "moved"]));
    let dir = world.lookup(s, ROOT.0, "dir").unwrap();
    assert_eq!(
        world.names(s, dir),
        set(&["f0", "f1", "f2", "f5", "f6", "f7", "f8", "f9"])
    );
    assert_eq!(world.lookup(s, dir, "f3"), None);
    let attributes = world.ask(s, getattr(dir)).unwrap().inode.unwrap();
    assert_eq!(attributes.size, 8);
}

#[test]
fn hard_links_share_an_inode_whichever_name_goes_first() {
    let mut world = World::new();
    let s = world.session("a");
    let ino = world.create(s, ROOT.0, "first", FILE);
    for name in ["second", "third"] {
        let link = Link {
            ino,
            hint: None,
            new_parent: ROOT.0,
            new_name: Bytes::copy_from_slice(name.as_bytes()),
        };
        world.ask(s, Op::Link(link)).unwrap();
    }
    let nlink = |world: &mut World| world.ask(s, getattr(ino)).unwrap().inode.unwrap().nlink;
    assert_eq!(nlink(&mut world), 3);
    // The primary entry goes; the others still lead to the inode.
    world.ask(s, unlink(ROOT.0, "first", false)).unwrap();
    assert_eq!(world.lookup(s, ROOT.0, "second"), Some(ino));
    assert_eq!(nlink(&mut world), 2);
    world
        .ask(s, rename(ROOT.0, "second", ROOT.0, "2", 0))
        .unwrap();
    world
        .ask(s, rename(ROOT.0, "2", ROOT.0, "third", 0))
        .unwrap();
    assert_eq!(
        world.names(s, ROOT.0),
        set(&["2", "third"]),
        "two names of one inode stay"
    );
    world.ask(s, unlink(ROOT.0, "2", false)).unwrap();
    world.ask(s, unlink(ROOT.0, "third", false)).unwrap();
    world
        .ask(s, Op::CloseInode(hither_proto::meta::CloseInode { ino }))
        .unwrap();
    assert_eq!(world.ask(s, getattr(ino)), Err(Errno::ESTALE.into()));
    assert!(
        world
            .store
            .keys()
            .all(|key| !key.starts_with(b"p/") || key[9] == 1),
        "no pointer left"
    );
}

#[test]
fn another_session_waits_for_the_commit_its_own_does_not() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    world.hold_commits = true;
    let made = world.send(a, create(ROOT.0, "new", FILE));
    assert!(
        matches!(world.take(made), Some(Answer::Reply(_))),
        "answered early"
    );
    let own = world.send(a, lookup(ROOT.0, "new"));
    assert!(matches!(world.take(own), Some(Answer::Reply(_))));
    let foreign = world.send(b, lookup(ROOT.0, "new"));
    let again = world.send(b, create(ROOT.0, "new", FILE));
    let barrier = world.send(a, Op::Barrier(hither_proto::meta::Barrier {}));
    world.settle();
    for token in [foreign, again, barrier] {
        assert_eq!(
            world.take(token),
            None,
            "nothing may be seen that could still vanish"
        );
    }
    world.hold_commits = false;
    while let Some(event) = world.commit_next() {
        world.event(event);
    }
    world.settle();
    assert!(world.result(foreign).unwrap().inode.is_some());
    assert_eq!(world.result(again), Err(Errno::EEXIST.into()));
    world.result(barrier).unwrap();
}

#[test]
fn a_cached_name_is_recalled_before_it_changes() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let leased = world.ask(b, lookup(ROOT.0, "x")).unwrap();
    assert!(
        leased.entries_leased && leased.inode.is_none(),
        "a negative entry may be cached"
    );
    world.recalls.clear();
    world.create(a, ROOT.0, "x", FILE);
    let (holder, recall) = world.recalls[0].clone();
    assert_eq!(
        (holder, recall.entries, &recall.name[..]),
        (b, true, &b"x"[..])
    );

    // An unreachable holder delays the change until its session has run out.
    assert!(world.lookup(b, ROOT.0, "y").is_none());
    world.on_recall = Box::new(|_, _| None);
    let change = world.send(a, create(ROOT.0, "y", FILE));
    world.settle();
    assert_eq!(world.take(change), None);
    for _ in 0..20 {
        world.now += std::time::Duration::from_secs(1);
        let renew = world.token();
        world.event(crate::core::Event::SessionRenew(renew, a, 0));
        world.event(crate::core::Event::Tick);
    }
    world.settle();
    assert!(world.result(change).is_ok());
    let gone = world.send(b, lookup(ROOT.0, "y"));
    assert_eq!(
        world.result(gone),
        Err(hither_proto::status::Status::NO_SESSION)
    );
}

#[test]
fn attributes_are_recalled_before_they_change() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let ino = world.create(a, ROOT.0, "f", FILE);
    assert!(world.ask(b, getattr(ino)).unwrap().attributes_leased);
    world.recalls.clear();
    let chmod = Setattr {
        ino,
        mode: Some(0o600),
        ..Setattr::default()
    };
    world.ask(a, Op::Setattr(chmod)).unwrap();
    assert_eq!(world.recalls.len(), 1);
    assert_eq!(world.recalls[0].0, b);
    assert_eq!(
        world.ask(b, getattr(ino)).unwrap().inode.unwrap().mode,
        0o100_600
    );
    world.recalls.clear();
    let chmod = Setattr {
        ino,
        mode: Some(0o640),
        ..Setattr::default()
    };
    world.ask(a, Op::Setattr(chmod)).unwrap();
    assert_eq!(
        world
            .recalls
            .iter()
            .map(|(s, _)| *s)
            .collect::<Vec<SessionId>>(),
        vec![b]
    );
}

#[test]
fn an_unlinked_file_stays_while_somebody_holds_it_open() {
    use hither_proto::meta::{CloseInode, RecallReply};
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    let ino = world.create(a, ROOT.0, "f", FILE);
    world.lookup(b, ROOT.0, "f");
    world.on_recall = Box::new(|_, recall| {
        Some(RecallReply {
            open: recall.unlinked,
            ..RecallReply::default()
        })
    });
    world.ask(a, unlink(ROOT.0, "f", false)).unwrap();
    // The caller did not say which inode it meant, so it counts as a holder too.
    world.ask(a, Op::CloseInode(CloseInode { ino })).unwrap();
    assert_eq!(world.ask(b, getattr(ino)).unwrap().inode.unwrap().nlink, 0);
    assert_eq!(world.lookup(b, ROOT.0, "f"), None);
    world.ask(b, Op::CloseInode(CloseInode { ino })).unwrap();
    assert_eq!(world.ask(b, getattr(ino)), Err(Errno::ESTALE.into()));
}

#[test]
fn quotas_hold_for_everything_below_and_move_with_it() {
    let mut world = World::new();
    let s = world.session("a");
    let dir = world.create(s, ROOT.0, "limited", DIR);
    let limit = Setattr {
        ino: dir,
        quota_inodes: Some(3),
        ..Setattr::default()
    };
    world.ask(s, Op::Setattr(limit)).unwrap();
    let sub = world.create(s, dir, "sub", DIR);
    world.create(s, sub, "a", FILE);
    world.create(s, sub, "b", FILE);
    assert_eq!(
        world.ask(s, create(sub, "c", FILE)),
        Err(Errno::EDQUOT.into())
    );
    let statfs = Op::Statfs(hither_proto::meta::Statfs {
        ino: dir,
        hint: None,
    });
    let space = world.ask(s, statfs).unwrap().space.unwrap();
    assert_eq!((space.used_inodes, space.free_inodes), (3, 0));
    world.create(s, ROOT.0, "c", FILE);
    assert_eq!(
        world.ask(s, rename(ROOT.0, "c", dir, "c", 0)),
        Err(Errno::EDQUOT.into())
    );
    world.ask(s, rename(dir, "sub", ROOT.0, "sub", 0)).unwrap();
    world.ask(s, rename(ROOT.0, "c", dir, "c", 0)).unwrap();
    world.create(s, dir, "d", FILE);
}

/// The holder keeps its lease on the directory when it gives one name back; the change asked for
/// the name again, sixteen times.
#[test]
fn one_change_of_a_name_asks_each_holder_once() {
    let mut world = World::new();
    let (a, b) = (world.session("a"), world.session("b"));
    world.create(a, ROOT.0, "f", FILE);
    world.lookup(b, ROOT.0, "f");
    world.lookup(b, ROOT.0, "g");
    world.recalls.clear();
    world.ask(a, rename(ROOT.0, "f", ROOT.0, "g", 0)).unwrap();
    let mut asked: Vec<_> = world
        .recalls
        .iter()
        .filter(|(s, recall)| *s == b && recall.entries)
        .map(|(_, recall)| recall.name.clone())
        .collect();
    asked.sort();
    assert_eq!(asked, vec!["f", "g"]);
    // A later change asks again.
    world.recalls.clear();
    world.ask(a, unlink(ROOT.0, "g", false)).unwrap();
    let entries = world.recalls.iter().filter(|(_, recall)| recall.entries);
    assert_eq!(entries.count(), 1);
}
