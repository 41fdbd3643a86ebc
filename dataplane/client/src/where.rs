//! Where a file is, in the order this mount would use, and why.

use std::collections::BTreeMap;

use hither_clustermap::ClusterView;
use hither_labels::{LabelSet, LocationView, PreferredLabels, Rank, effective_labels};
use hither_proto::ids::{CHUNK_SIZE, ClassId, GroupId, InodeId};
use hither_proto::map::{MemberState, ServerState};
use hither_proto::stored::ChunkRef;
use serde::Serialize;

use crate::client::Client;
use crate::detour::Detour;
use crate::error::FsError;

/// A server of a chunk as this mount sees it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServerPlace {
    /// Chunkserver id.
    pub server: u64,
    /// Its address.
    pub address: String,
    /// Its zone.
    pub zone: String,
    /// Its labels as they count for this mount.
    pub labels: String,
    /// Index of the first preferred expression it satisfies.
    pub rank: usize,
    /// Distance from this mount's zone.
    pub distance: u32,
    /// Operations of this mount on it just now.
    pub in_flight: u32,
    /// It failed and is asked last.
    pub suspect: bool,
    /// in-sync, filling or lagging.
    pub state: String,
    /// Why it stands where it stands.
    pub why: String,
}

/// A chunk of a file.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ChunkPlace {
    /// Which 64 MiB piece.
    pub index: u32,
    /// Chunk id; 0 for a hole.
    pub chunk: u64,
    /// Placement group.
    pub group: u32,
    /// The group's epoch.
    pub epoch: u64,
    /// Its group is one of those of the file's class as it is now; true for a hole.
    pub as_class_asks: bool,
    /// Servers in the order this mount would read from them; those it would not read from last.
    pub servers: Vec<ServerPlace>,
}

impl Client {
    /// Where a file's pieces from `first` on are, at most `limit` of them; none behind its end.
    ///
    /// # Errors
    /// What reading the references says.
    pub async fn places(
        &self,
        ino: InodeId,
        first: u32,
        limit: u32,
    ) -> Result<Vec<ChunkPlace>, FsError> {
        let inner = &self.inner;
        let class = ClassId(self.attributes(ino).await?.inode.class);
        let file = inner.file(ino);
        let _held = inner.hold(&file, false, inner.deadline()).await?;
        let (tenure, size) = {
            let data = file.data.lock();
            (data.tenure, data.size)
        };
        let pieces = u32::try_from(size.div_ceil(CHUNK_SIZE)).unwrap_or(u32::MAX);
        let end = first.saturating_add(limit).min(pieces);
        if first >= end {
            return Ok(Vec::new());
        }
        inner.need_refs(&file, tenure, first, end - 1).await?;
        let map = self.map();
        let refs: BTreeMap<u32, ChunkRef> = {
            let data = file.data.lock();
            let known = data.refs.range(first..end);
            known.map(|(index, chunk)| (*index, *chunk)).collect()
        };
        Ok((first..end)
            .map(|index| match refs.get(&index) {
                Some(chunk) => ChunkPlace {
                    index,
                    chunk: chunk.chunk,
                    group: chunk.group,
                    epoch: map.epoch(GroupId(chunk.group)).unwrap_or_default().0,
                    as_class_asks: as_class_asks(&map, GroupId(chunk.group), class),
                    servers: self.server_places(GroupId(chunk.group)),
                },
                None => ChunkPlace {
                    index,
                    chunk: 0,
                    group: 0,
                    epoch: 0,
                    as_class_asks: true,
                    servers: Vec::new(),
                },
            })
            .collect())
    }

    fn server_places(&self, group: GroupId) -> Vec<ServerPlace> {
        let map = self.map();
        let inner = &self.inner;
        let list = inner.servers.read_list(&map, group);
        let standpoint = self.standpoint();
        let read: Vec<_> = list
            .iter()
            .map(|candidate| (candidate.id, MemberState::InSync))
            .collect();
        let unread = [MemberState::Filling, MemberState::Lagging]
            .into_iter()
            .flat_map(|state| map.members_in(group, state).map(move |id| (id, state)));
        read.into_iter()
            .chain(unread)
            .map(|(id, state)| {
                let none = LabelSet::default();
                let known = map.server(id);
                let zone = known.map_or("", |s| s.chunkserver.zone.as_str());
                let own = zone == standpoint.zone;
                let view = if map.locations() && !own {
                    LocationView::Other
                } else {
                    LocationView::Own
                };
                let labels = known.map_or(&none, |s| effective_labels(&s.labels, view));
                let preferred = &standpoint.preferred;
                let rank = preferred.rank(labels);
                let suspect = inner.servers.is_suspect(id);
                let down = known.is_none_or(|s| s.chunkserver.state == ServerState::Down.into());
                let last = inner.servers.stands_last(&map, group, id);
                let why = why(state, last, down, preferred, rank);
                ServerPlace {
                    server: id.0,
                    address: map.address(id).unwrap_or_default().to_owned(),
                    zone: zone.to_owned(),
                    labels: labels.to_string(),
                    rank: rank.index(),
                    distance: map.distance(&standpoint.zone, zone),
                    in_flight: inner.servers.in_flight(id),
                    suspect,
                    state: match state {
                        MemberState::InSync => "in-sync",
                        MemberState::Filling => "filling",
                        MemberState::Lagging | MemberState::Unspecified => "lagging",
                    }
                    .to_owned(),
                    why,
                }
            })
            .collect()
    }
}

/// Whether a group is one of those a class asks for, to write to or to keep in. What nobody knows
/// of is not told.
fn as_class_asks(map: &ClusterView, group: GroupId, class: ClassId) -> bool {
    let (Some(group), Some(class)) = (map.group(group), map.class(class)) else {
        return true;
    };
    [class.keep_definition, class.create_definition].contains(&group.definition)
}

/// Why a server stands where it stands in the order of a mount.
fn why(
    state: MemberState,
    last: Option<Detour>,
    down: bool,
    preferred: &PreferredLabels,
    rank: Rank,
) -> String {
    match (state, last) {
        (MemberState::InSync, _) if down => {
            "is down, and no other holds everything: waited for".to_owned()
        }
        (_, _) if down => "is down: not read from".to_owned(),
        (MemberState::Filling, _) => "still fetching data: not read from".to_owned(),
        (MemberState::Lagging, _) => "missed writes: not read from".to_owned(),
        (_, Some(Detour::Suspect)) => {
            "failed lately: asked last until it answers a probe".to_owned()
        }
        (_, Some(Detour::Busy)) => "busy, starting or stopping: asked last for a second".to_owned(),
        (_, Some(Detour::Quiet)) => "silent for a moment: asked last until it answers".to_owned(),
        _ => match preferred.expressions().get(rank.index()) {
            Some(expression) => format!("matches {expression}"),
            None if preferred.is_empty() => "nothing is preferred".to_owned(),
            None => "matches no preferred expression".to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use hither_proto::map::{ClusterMap, Group, StorageClass};

    use super::*;

    #[test]
    fn a_server_that_is_down_is_told_from_one_that_missed_writes() {
        let preferred = PreferredLabels::parse("A").unwrap().value;
        let said = |state, last, down| {
            let rank = preferred.rank(&LabelSet::default());
            why(state, last, down, &preferred, rank)
        };
        assert_eq!(
            said(MemberState::Lagging, None, true),
            "is down: not read from"
        );
        assert!(said(MemberState::Lagging, None, false).contains("missed writes"));
        assert!(said(MemberState::InSync, None, true).contains("waited for"));
        assert!(said(MemberState::InSync, Some(Detour::Suspect), false).contains("failed lately"));
    }

    #[test]
    fn a_group_is_asked_for_by_either_definition_of_a_class() {
        let group = |id, definition| Group {
            id,
            definition,
            ..Group::default()
        };
        let map = ClusterView::from_snapshot(&ClusterMap {
            version: 1,
            groups: vec![group(1, 10), group(2, 20), group(3, 30)],
            classes: vec![StorageClass {
                id: 5,
                create_definition: 10,
                keep_definition: 20,
                ..StorageClass::default()
            }],
            ..ClusterMap::default()
        });
        let asked = |group, class| as_class_asks(&map, GroupId(group), ClassId(class));
        assert!(asked(1, 5) && asked(2, 5));
        assert!(!asked(3, 5));
        assert!(asked(9, 5) && asked(3, 6), "nobody knows");
    }
}
