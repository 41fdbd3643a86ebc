//! `hither sclass`.

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
        ..
    } = &sclass
    {
        return super::paths::set_class(path, name, *recursive, output);
    }
    let link = cluster::link(cluster.as_deref())?;
    match sclass {
        Sclass::Create { name, fields } => {
            let class = apply(StorageClass { name, ..StorageClass::default() }, &fields);
            set(&link, class, &fields, false, false, output).await
        }
        Sclass::Set { name, fields, .. } => {
            let class = apply(find(&link, &name).await?, &fields);
            set(&link, class, &fields, true, false, output).await
        }
        Sclass::DryRun { name, fields } => {
            let known = find(&link, &name).await;
            let start =
                known.unwrap_or_else(|_| StorageClass { name, ..StorageClass::default() });
            set(&link, apply(start, &fields), &fields, true, true, output).await
        }
        Sclass::Ls => {
            let all: Vec<Shown> = map(&link).await?.classes.into_iter().map(shown).collect();
            output.print(&all, |all| {
                let rows = all
                    .iter()
                    .map(|c| [c.name.clone(), c.keep.clone(), c.mode.clone(), c.description.clone()])
                    .collect();
                table(["NAME", "KEEP", "MODE", "DESCRIPTION"], rows)
            })
        }
        Sclass::Show { name } => output.print(&shown(find(&link, &name).await?), |class| {
            format!(
                "{}\n  keep   {}\n  create {}\n  mode   {}\n  preferred labels {}\n  smallest set that acknowledges {}\n  {}",
                class.name,
                class.keep,
                class.create,
                class.mode,
                class.preferred_labels,
                class.min_write_copies,
                class.description
            )
        }),
        Sclass::Check { name, preferred } => check(&link, &name, &preferred, output).await,
        Sclass::Delete { name } => {
            cluster::ask(&link, Kind::CLASS_DELETE, &ClassName { name: name.clone() }).await?;
            output.done(&format!("storage class {name} removed"));
            Ok(())
        }
    }
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
    output.print(&result, |_| {
        let mut text = if dry_run {
            "dry run: nothing was changed".to_owned()
        } else {
            "done".into()
        };
        if !reply.satisfiable {
            text.push_str("\nnot satisfied by the servers that are present:");
        }
        for note in &reply.notes {
            text.push_str(&format!("\n  {note}"));
        }
        for moved in &reply.moves {
            text.push_str(&format!(
                "\n  zone {}: {} groups, about {} to copy in",
                moved.zone,
                moved.copies,
                bytes(moved.bytes)
            ));
        }
        text
    })
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
