//! Files that two mounts have mapped: the kernel writes pages back when it is to forget them, and
//! keeps others locked while they are written.
#![cfg(feature = "live")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::process::Command;
use std::time::Duration;

use hither_e2e::Cluster;

fn run(part: &str, limit: Duration) {
    let mut cluster = Cluster::up("a,b", 1, &[]);
    let (a, b) = (cluster.mount("a", ""), cluster.mount("b", ""));
    let mut script = Command::new("timeout");
    script.arg(format!("{}", limit.as_secs()));
    script.args([
        "python3",
        concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mapped.py"),
    ]);
    let ended = script.arg(part).arg(&a).arg(&b).output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{part}: {} {said}", ended.status);
}

#[test]
fn what_another_mount_wrote_is_read_at_once() {
    run("fresh", Duration::from_secs(60));
}

#[test]
fn what_another_mount_wrote_is_read_while_pages_are_locked() {
    run("locked", Duration::from_secs(60));
}

#[test]
fn many_mapped_files_are_written_from_both_sides() {
    run("crowd", Duration::from_secs(60));
}

#[test]
fn both_sides_cut_a_file_with_dirty_pages() {
    run("cuts", Duration::from_secs(100));
}

#[test]
fn what_was_stored_before_another_wrote_does_not_lie_over_that() {
    run("order", Duration::from_secs(60));
}

#[test]
fn parts_of_one_page_are_written_from_both_sides() {
    run("parts", Duration::from_secs(30));
}
