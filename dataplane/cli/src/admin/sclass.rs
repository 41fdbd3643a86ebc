//! `hither sclass`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use hither_labels::{LabelSet, PreferredLabels, StorageClass as Class, check_preference};
use hither_managerlink::ManagerLink;
use hither_proto::common::Empty;
use hither_proto::kind::Kind;
use hither_proto::manager::{ClassName, ClassReply, ClassSet, ClusterStatus};
use hither_proto::map::{ClusterMap, StorageClass};
use serde::Serialize;

use crate::args::{ClassFields, Sclass};
use crate::cluster;
use crate::output::{Output, bytes, table};

/// A class as it is printed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    name: String,
    keep: String,
    create: String,
    mode: String,
    description: String,
    preferred_labels: String,
    min_write_copies: u32,
}

pub(crate) async fn run(
    sclass: Sclass,
    cluster: Option<String>,
    output: Output,
) -> anyhow::Result<()> {
    // Giving a path a class goes through its mount.
    if let Sclass::Set {
        name,
        path: Some(path),
        recursive,
        fields,
    } = &sclass
    {
        need_no_fields(fields, name, path)?;
        return super::paths::set_class(path, name, *recursive, output);
    }
    let link = cluster::link(cluster.as_deref()).await?;
    match sclass {
        Sclass::Create { name, fields } => {
            let class = apply(
                StorageClass {
                    name,
                    ..StorageClass::default()
                },
                &fields,
            );
            set(&link, class, &fields, false, false, output).await
        }
        Sclass::Set { name, fields, .. } => {
            let class = apply(find(&link, &name).await?, &fields);
            set(&link, class, &fields, true, false, output).await
        }
        Sclass::DryRun { name, fields } => {
            let class = apply(find(&link, &name).await?, &fields);
            set(&link, class, &fields, true, true, output).await
        }
        Sclass::Ls => {
            let all: Vec<Shown> = map(&link).await?.classes.into_iter().map(shown).collect();
            output.print(&all, |all| {
                let rows = all
                    .iter()
                    .map(|c| {
                        [
                            c.name.clone(),
                            c.keep.clone(),
                            c.mode.clone(),
                            c.description.clone(),
                        ]
                    })
                    .collect();
                table(["NAME", "KEEP", "MODE", "DESCRIPTION"], rows)
            })
        }
        Sclass::Show { name } => output.print(&shown(find(&link, &name).await?), as_text),
        Sclass::Check { name, preferred } => check(&link, &name, &preferred, output).await,
        Sclass::Delete { name } => {
            let class = ClassName { name: name.clone() };
            let what = "the manager, which looks for files and directories of the class";
            cluster::ask_long(&link, Kind::CLASS_DELETE, &class, what, SEARCH_IN).await?;
            output.done(&format!("storage class {name} removed"));
            Ok(())
        }
    }
}

/// With a path the class is given to it, and nothing about the class is changed.
fn need_no_fields(fields: &ClassFields, name: &str, path: &Path) -> anyhow::Result<()> {
    if *fields != ClassFields::default() {
        bail!(
            "`sclass set {name} {}` gives the path the class {name}, and options such as --keep \
             change the class itself: do one after the other, `hither sclass set {name} --keep …` \
             and `hither sclass set {name} {}`",
            path.display(),
            path.display(),
        );
    }
    Ok(())
}

/// A class line by line; what was not said is left out.
fn as_text(class: &Shown) -> String {
    let copies = match class.min_write_copies {
        0 => "all but one, at least one".to_owned(),
        copies => copies.to_string(),
    };
    let lines = [
        ("description", class.description.as_str()),
        ("keep", &class.keep),
        ("create", &class.create),
        ("mode", &class.mode),
        ("preferred labels", &class.preferred_labels),
        ("copies that acknowledge", &copies),
    ];
    let mut text = class.name.clone();
    for (name, value) in lines.into_iter().filter(|(_, value)| !value.is_empty()) {
        text.push_str(&format!("\n  {name:<23} {value}"));
    }
    text
}

async fn map(link: &ManagerLink) -> anyhow::Result<ClusterMap> {
    let reply = cluster::ask(link, Kind::CLUSTER_STATUS, &Empty {}).await?;
    let status: ClusterStatus = reply.decode()?;
    status.map.context("the manager sent no map")
}

async fn find(link: &ManagerLink, name: &str) -> anyhow::Result<StorageClass> {
    let classes = map(link).await?.classes;
    let names: Vec<String> = classes.iter().map(|class| class.name.clone()).collect();
    classes
        .into_iter()
        .find(|class| class.name == name)
        .with_context(|| {
            format!(
                "there is no storage class {name:?}; there are: {}",
                names.join(", ")
            )
        })
}

fn apply(mut class: StorageClass, fields: &ClassFields) -> StorageClass {
    let put = |target: &mut String, value: &Option<String>| {
        if let Some(value) = value {
            target.clone_from(value);
        }
    };
    put(&mut class.keep, &fields.keep);
    put(&mut class.create, &fields.create);
    put(&mut class.mode, &fields.mode);
    put(&mut class.description, &fields.description);
    put(&mut class.preferred_labels, &fields.preferred_labels);
    class.min_write_copies = fields.min_write_copies.unwrap_or(class.min_write_copies);
    class
}

async fn set(
    link: &ManagerLink,
    class: StorageClass,
    fields: &ClassFields,
    replace: bool,
    dry_run: bool,
    output: Output,
) -> anyhow::Result<()> {
    if class.keep.is_empty() {
        bail!("say where copies are kept: --keep zone=a,zone=b or --keep 2");
    }
    let request = ClassSet {
        class: Some(class),
        replace,
        force: fields.force,
        dry_run,
    };
    let reply: ClassReply = cluster::ask(link, Kind::CLASS_SET, &request)
        .await?
        .decode()?;
    let result = serde_json::json!({
        "satisfiable": reply.satisfiable,
        "notes": reply.notes,
        "moves": reply.moves.iter().map(|m| serde_json::json!({
            "zone": m.zone, "copies": m.copies, "bytes": m.bytes,
        })).collect::<Vec<_>>(),
    });
    output.print(&result, |_| outcome(&reply, replace, dry_run))
}

/// What became of a change of a class, or would become of it.
fn outcome(reply: &ClassReply, replace: bool, dry_run: bool) -> String {
    let mut text = match (dry_run, replace) {
        (true, _) => "dry run: nothing was changed",
        (false, true) => "done; data that is written already stays with the copies it has",
        (false, false) => "done",
    }
    .to_owned();
    if !reply.satisfiable {
        text.push_str("\nthe chunkservers that are present do not satisfy it:");
    }
    for note in &reply.notes {
        text.push_str(&format!("\n  {note}"));
    }
    if !reply.moves.is_empty() {
        text.push_str(
            "\ndata that is written already would stay with the copies it has; if it followed, by \
             what all copies on the disks take:",
        );
    }
    for moved in &reply.moves {
        text.push_str(&format!(
            "\n  zone {}: {} groups, at most about {} to copy in",
            moved.zone,
            moved.copies,
            bytes(moved.bytes)
        ));
    }
    text
}

async fn check(
    link: &ManagerLink,
    name: &str,
    preferred: &str,
    output: Output,
) -> anyhow::Result<()> {
    let map = map(link).await?;
    let stored = map
        .classes
        .iter()
        .find(|class| class.name == name)
        .with_context(|| format!("there is no storage class {name:?}"))?;
    let class = Class::new(stored.name.clone(), stored.keep.parse().map_err(text)?);
    let preferred = PreferredLabels::parse(preferred).map_err(text)?.value;
    let servers: Vec<LabelSet> = map
        .chunkservers
        .iter()
        .map(|server| server.labels.join(",").parse().unwrap_or_default())
        .collect();
    let warnings: Vec<String> = check_preference(&class, &preferred, &servers)
        .iter()
        .map(ToString::to_string)
        .collect();
    output.print(&warnings, |warnings| {
        if warnings.is_empty() {
            format!("every preferred expression can match a copy of {name}")
        } else {
            warnings.join("\n")
        }
    })
}

fn text(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow::anyhow!("{error}")
}

fn shown(class: StorageClass) -> Shown {
    Shown {
        name: class.name,
        create: if class.create.is_empty() {
            class.keep.clone()
        } else {
            class.create
        },
        keep: class.keep,
        mode: if class.mode.is_empty() {
            "std".into()
        } else {
            class.mode
        },
        description: class.description,
        preferred_labels: class.preferred_labels,
        min_write_copies: class.min_write_copies,
    }
}

/// Time to look through the whole metadata store.
const SEARCH_IN: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use super::*;

    /// `--keep` was ignored.
    #[test]
    fn a_class_is_given_or_changed_not_both() {
        let path = Path::new("/mnt/f");
        assert!(need_no_fields(&ClassFields::default(), "s1", path).is_ok());
        let fields = ClassFields {
            keep: Some("zone=c".into()),
            ..ClassFields::default()
        };
        let error = need_no_fields(&fields, "s1", path).unwrap_err().to_string();
        assert!(error.contains("one after the other"), "{error}");
    }

    #[test]
    fn what_is_not_satisfied_is_told_and_nothing_of_moves_that_are_none() {
        let mut reply = ClassReply {
            satisfiable: false,
            notes: vec!["copy 1 (zone=x): no chunkserver has these labels".into()],
            ..ClassReply::default()
        };
        let text = outcome(&reply, true, false);
        assert!(text.contains("stays with the copies it has"), "{text}");
        assert!(text.contains("do not satisfy it:\n  copy 1"), "{text}");
        assert!(!text.contains("to copy in"), "{text}");
        reply.moves.push(hither_proto::manager::ZoneMove {
            zone: "c".into(),
            copies: 4,
            bytes: 1024,
        });
        let text = outcome(&reply, true, true);
        assert!(text.contains("would stay with the copies it has"), "{text}");
        assert!(
            text.contains("zone c: 4 groups, at most about 1.0 KiB"),
            "{text}"
        );
    }

    #[test]
    fn a_class_is_shown_without_blank_fields() {
        let class = StorageClass {
            name: "cold".into(),
            keep: "zone=a,zone=b".into(),
            ..StorageClass::default()
        };
        let text = as_text(&shown(class));
        assert!(!text.contains("description"), "{text}");
        assert!(!text.contains("preferred"), "{text}");
        assert!(text.lines().all(|line| line == line.trim_end()), "{text:?}");
        assert!(text.contains("zone=a,zone=b"), "{text}");
    }
}
