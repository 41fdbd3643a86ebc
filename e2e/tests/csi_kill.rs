//! The driver is killed at each of its named places, and the request repeated or taken back: the
//! end state is right and nothing leaks.
#![cfg(feature = "live")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs;
use std::time::Duration;

use hither_csi::kill::PLACES;
use hither_csi::rpc::csi::volume_capability::access_mode::Mode;
use hither_e2e::csi::{Driver, Part, insist};
use hither_e2e::{Cluster, eventually, pattern, write_stable};
use tonic::{Code, Status};

const SIZE: i64 = 64 << 20;
const RWX: Mode = Mode::MultiNodeMultiWriter;
const POD: &str = "pod";

/// What a volume's owner does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Create,
    Expand,
    Modify,
    Stage,
    Publish,
    Unpublish,
    Unstage,
    Delete,
}

/// A life, with the words its places begin with.
const LIFE: [(Step, &str); 8] = [
    (Step::Create, "create."),
    (Step::Expand, "expand."),
    (Step::Modify, "modify."),
    (Step::Stage, "stage."),
    (Step::Publish, "publish."),
    (Step::Unpublish, "unpublish."),
    (Step::Unstage, "unstage."),
    (Step::Delete, "delete."),
];

impl Step {
    fn part(self) -> Part {
        match self {
            Self::Create | Self::Expand | Self::Modify | Self::Delete => Part::Controller,
            _ => Part::Node,
        }
    }

    fn ask(self, driver: &Driver, name: &str, handle: &mut String) -> Result<(), Status> {
        match self {
            Self::Create => {
                *handle = driver.create(name, SIZE)?.volume_id;
                Ok(())
            }
            Self::Expand => driver.expand(handle, 2 * SIZE).map(|_| ()),
            Self::Modify => driver.modify(handle, "preferredLabels", "zone={zone}"),
            Self::Stage => driver.stage(handle, RWX),
            Self::Publish => driver.publish(handle, POD, RWX, true).map(|_| ()),
            Self::Unpublish => driver.unpublish(handle, POD),
            Self::Unstage => driver.unstage(handle),
            Self::Delete => driver.delete(handle),
        }
    }
}

/// Goes through a life and kills at the place on the way. After the kill the request is repeated.
fn live(driver: &mut Driver, place: &str) {
    let name = format!("life-{place}");
    let mut handle = String::new();
    for (step, words) in LIFE {
        let killed = place.starts_with(words);
        if killed {
            driver.kill(step.part());
            driver.run(step.part(), Some(place));
        }
        if !killed {
            let answer = insist(|| step.ask(driver, &name, &mut handle));
            answer.unwrap_or_else(|error| panic!("{place}: {step:?}: {error}"));
            continue;
        }
        let answer = last(|| step.ask(driver, &name, &mut handle));
        // The trash is emptied after the answer.
        assert!(
            answer.is_err() || place == "delete.purged",
            "{place} was not passed"
        );
        driver.wait_ended(step.part());
        driver.run(step.part(), None);
        let again = insist(|| step.ask(driver, &name, &mut handle));
        again.unwrap_or_else(|error| panic!("{place}: repeated {step:?}: {error}"));
        if step == Step::Publish {
            let target = driver.target(POD);
            assert_eq!(driver.mounts().len(), 2, "{place}: {:?}", driver.mounts());
            assert!(
                fs::write(target.join("f"), "x").is_err(),
                "{place}: it is read-only"
            );
            assert_eq!(driver.stats(&handle, &target).unwrap().0, 2 * SIZE);
        }
    }
}

/// Kills a mounting request at the place and does not repeat it: the mount is taken back.
fn taken_back(driver: &mut Driver, place: &str) {
    let mut handle = driver.create(place, SIZE).unwrap().volume_id;
    let publishing = place.starts_with("publish.");
    if publishing {
        driver.stage(&handle, RWX).unwrap();
    }
    driver.kill(Part::Node);
    driver.run(Part::Node, Some(place));
    let step = if publishing {
        Step::Publish
    } else {
        Step::Stage
    };
    assert!(
        last(|| step.ask(driver, place, &mut handle)).is_err(),
        "{place} was not passed"
    );
    driver.wait_ended(Part::Node);
    driver.run(Part::Node, None);
    for step in [Step::Unpublish, Step::Unstage, Step::Delete] {
        let answer = insist(|| step.ask(driver, place, &mut handle));
        answer.unwrap_or_else(|error| panic!("{place}: {step:?}: {error}"));
    }
}

#[test]
fn every_request_can_be_repeated_from_every_place() {
    let mut cluster = cluster();
    let mut driver = Driver::start(&cluster, &[]);
    for place in PLACES {
        live(&mut driver, place);
        driver.assert_nothing_left();
    }
    assert_no_volumes(&mut cluster);
}

#[test]
fn every_mount_can_be_taken_back_from_every_place() {
    let mut cluster = cluster();
    let mut driver = Driver::start(&cluster, &[]);
    for place in PLACES {
        if place.starts_with("stage.") || place.starts_with("publish.") {
            taken_back(&mut driver, place);
            driver.assert_nothing_left();
        }
    }
    assert_no_volumes(&mut cluster);
}

/// A volume that was half made when its claim went is removed all the same.
#[test]
fn a_half_made_volume_is_removed() {
    let mut cluster = cluster();
    let mut driver = Driver::start(&cluster, &[]);
    let handle = driver.create("half", SIZE).unwrap().volume_id;
    driver.delete(&handle).unwrap();
    for place in PLACES.iter().filter(|place| place.starts_with("create.")) {
        driver.kill(Part::Controller);
        driver.run(Part::Controller, Some(place));
        assert!(last(|| driver.create("half", SIZE)).is_err());
        driver.wait_ended(Part::Controller);
        driver.run(Part::Controller, None);
        insist(|| driver.delete(&handle)).unwrap();
    }
    assert_no_volumes(&mut cluster);
}

/// A volume with data that is removed by a controller which dies meanwhile is gone in the end.
#[test]
fn a_large_volume_is_removed_by_and_by() {
    let mut cluster = cluster();
    let driver = Driver::start(&cluster, &[]);
    let handle = driver.create("large", SIZE).unwrap().volume_id;
    driver.stage(&handle, RWX).unwrap();
    let at = driver.publish(&handle, POD, RWX, false).unwrap();
    for dir in 0..5u64 {
        let deep = at.join(format!("d{dir}/e/f/g"));
        fs::create_dir_all(&deep).unwrap();
        for n in 0..20u64 {
            write_stable(&deep.join(n.to_string()), &pattern(n, 0, 1000));
        }
    }
    driver.unpublish(&handle, POD).unwrap();
    driver.unstage(&handle).unwrap();
    driver.delete(&handle).unwrap();
    driver.assert_nothing_left();
    assert_no_volumes(&mut cluster);
}

/// The answer of a request that is to be killed: repair may have the volume just then.
fn last<T>(mut ask: impl FnMut() -> Result<T, Status>) -> Result<T, Status> {
    loop {
        match ask() {
            Err(error) if error.code() == Code::Aborted => {}
            other => return other,
        }
    }
}

/// A cluster in which what a killed client holds is free again soon.
fn cluster() -> Cluster {
    let cluster = Cluster::up("a", 1, &["--class", "A"]);
    cluster.reconfigure("manager", "sessionLeaseMs: 2000\n");
    cluster.wait_whole();
    cluster
}

fn assert_no_volumes(cluster: &mut Cluster) {
    let root = cluster.mount("root", "");
    let names = |of: &str| {
        let entries = fs::read_dir(root.join(of)).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().into_string().unwrap());
        names
            .filter(|name| !name.starts_with('.'))
            .collect::<Vec<_>>()
    };
    eventually(
        Duration::from_secs(90),
        "nothing is left in the cluster",
        || {
            ["volumes", "volumes/.trash", "volumes/.unfinished"]
                .iter()
                .all(|of| names(of).is_empty())
        },
    );
    cluster.unmount(&root);
}
