//! Volumes in a cluster: directories under `/volumes`, as `docs/formats/volumes.md` describes.

use bytes::Bytes;
use hither_client::{Client, FsError, GoOn, SetAttributes};
use hither_proto::ids::{ClassId, InodeId, ROOT};
use hither_proto::meta::{Caller, Create};
use hither_proto::status::Errno;
use hither_proto::stored::Inode;

use crate::decide::parameters::Mutable;
use crate::decide::volume::{Volume, VolumeRecord};
use crate::error::Refusal;
use crate::ids::VolumeId;
use crate::kill::point;

/// The volumes of one cluster.
#[derive(Debug, Clone)]
pub struct Volumes {
    client: Client,
}

/// A volume and where it is.
#[derive(Debug, Clone)]
pub struct Located {
    /// Its id.
    pub id: VolumeId,
    /// The volume.
    pub volume: Volume,
    /// Its directory, which carries record and quota.
    pub holder: InodeId,
    /// Storage class of new files.
    pub class: ClassId,
    /// Files and directories it may hold; 0: no limit.
    pub inode_quota: u64,
    /// Group its root was given for a pod.
    pub group: Option<u32>,
}

impl Volumes {
    /// The volumes of the client's cluster.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    /// Finds a volume.
    ///
    /// # Errors
    /// `Broken` for a directory of that name which this driver has not made.
    pub async fn find(&self, id: &VolumeId) -> Result<Option<Located>, Refusal> {
        let Some(all) = self.child(ROOT, VOLUMES).await? else {
            return Ok(None);
        };
        match self.child(InodeId(all.ino), id.as_str()).await? {
            Some(inode) => located(id, &inode).map(Some),
            None => Ok(None),
        }
    }

    /// Makes a volume. What an attempt that was cut off has left is used again.
    ///
    /// # Errors
    /// `Invalid` when the cluster has no such class; what the cluster says.
    pub async fn make(
        &self,
        id: &VolumeId,
        record: &VolumeRecord,
        size: u64,
    ) -> Result<(), Refusal> {
        let class = self.class(&record.made.class)?;
        point("create.begun");
        let all = self.directory(ROOT, VOLUMES, 0o711).await?;
        let unfinished = self.directory(all, UNFINISHED, 0o700).await?;
        let holder = self.directory(unfinished, id.as_str(), 0o711).await?;
        point("create.holder");
        self.write_record(holder, record).await?;
        point("create.record");
        let inodes = record.made.inode_quota;
        let quota = SetAttributes {
            class,
            quota_bytes: Some(size),
            quota_inodes: Some(counted(inodes)),
            ..SetAttributes::default()
        };
        self.set(holder, quota).await?;
        point("create.quota");
        let (mode, uid, gid) = record.made.root;
        let data = self.directory(holder, DATA, mode).await?;
        let attributes = SetAttributes {
            class,
            mode: Some(mode),
            uid: Some(uid),
            gid: Some(gid),
            ..SetAttributes::default()
        };
        self.set(data, attributes).await?;
        point("create.data");
        let name = Bytes::copy_from_slice(id.as_str().as_bytes());
        let moved = self
            .client
            .rename((unfinished, &name), (all, &name), NO_REPLACE, SYSTEM)
            .await;
        moved.map_err(|error| Refusal::of_fs("put the new volume in its place", &error))?;
        point("create.moved");
        self.safe().await
    }

    /// Takes a volume away: at once out of sight, then by and by ([`purge`](Self::purge)).
    ///
    /// # Errors
    /// `Broken` for a directory this driver has not made, what the cluster says.
    pub async fn remove(&self, id: &VolumeId) -> Result<(), Refusal> {
        let Some(all) = self.child(ROOT, VOLUMES).await? else {
            return Ok(());
        };
        let all = InodeId(all.ino);
        if let Some(unfinished) = self.child(all, UNFINISHED).await? {
            self.discard(InodeId(unfinished.ino), all, id).await?;
        }
        if let Some(inode) = self.child(all, id.as_str()).await? {
            located(id, &inode)?;
            self.discard(all, all, id).await?;
        }
        point("delete.moved");
        self.safe().await
    }

    /// Moves an entry into the trash, under a name of its own.
    async fn discard(&self, from: InodeId, all: InodeId, id: &VolumeId) -> Result<(), Refusal> {
        let Some(inode) = self.child(from, id.as_str()).await? else {
            return Ok(());
        };
        let trash = self.directory(all, TRASH, 0o700).await?;
        let name = Bytes::copy_from_slice(id.as_str().as_bytes());
        let there = Bytes::from(format!("{id}.{}", inode.ino));
        let moved = self
            .client
            .rename((from, &name), (trash, &there), NO_REPLACE, SYSTEM)
            .await;
        match moved {
            // Another attempt has moved it.
            Err(error) if error.errno == Errno::ENOENT => Ok(()),
            other => other.map_err(|error| Refusal::of_fs("move the volume away", &error)),
        }
    }

    /// Removes what is in the trash. Ends early on an error; the next call goes on. The answer is
    /// whether there was anything.
    ///
    /// # Errors
    /// What the cluster says.
    pub async fn purge(&self) -> Result<bool, Refusal> {
        let purged = self.purge_trash().await;
        purged.map_err(|error| Refusal::of_fs("empty the trash", &error))
    }

    async fn purge_trash(&self) -> Result<bool, FsError> {
        let Some(all) = self.look(ROOT, VOLUMES).await? else {
            return Ok(false);
        };
        let Some(trash) = self.look(InodeId(all.ino), TRASH).await? else {
            return Ok(false);
        };
        let mut removed = false;
        // Directories on the way down: the parent and the name of each.
        let mut path: Vec<(InodeId, Bytes)> = Vec::new();
        let mut at = InodeId(trash.ino);
        loop {
            let page = self.client.list(at, None, PAGE, false).await?;
            let mut below = None;
            for entry in page.entries {
                if entry.kind & TYPE_MASK == DIRECTORY {
                    below.get_or_insert((entry.name, entry.ino));
                } else {
                    self.unlink(at, &entry.name, false).await?;
                }
            }
            if let Some((name, ino)) = below {
                path.push((at, name));
                at = ino;
            } else if page.next.is_none() {
                let Some((parent, name)) = path.pop() else {
                    return Ok(removed);
                };
                self.unlink(parent, &name, true).await?;
                removed = true;
                at = parent;
            }
        }
    }

    async fn unlink(&self, dir: InodeId, name: &Bytes, directory: bool) -> Result<(), FsError> {
        match self.client.unlink(dir, name, directory, SYSTEM).await {
            // Somebody else removes too, or something was written into it still.
            Err(error) if [Errno::ENOENT, Errno::ENOTEMPTY].contains(&error.errno) => Ok(()),
            other => other,
        }
    }

    /// All volumes by id.
    ///
    /// # Errors
    /// What the cluster says.
    pub async fn list(&self) -> Result<Vec<(VolumeId, Volume)>, Refusal> {
        let Some(all) = self.child(ROOT, VOLUMES).await? else {
            return Ok(Vec::new());
        };
        let mut volumes = Vec::new();
        let mut from: Option<GoOn> = None;
        loop {
            let listed = self
                .client
                .list(InodeId(all.ino), from.as_ref(), PAGE, true)
                .await;
            let page = listed.map_err(|error| Refusal::of_fs("list the volumes", &error))?;
            for entry in page.entries {
                let id = std::str::from_utf8(&entry.name)
                    .ok()
                    .and_then(VolumeId::parse);
                let Some((id, found)) = id.zip(entry.found) else {
                    continue;
                };
                // Directories others made here are not volumes.
                if let Ok(located) = located(&id, &found.attributes.inode) {
                    volumes.push((id, located.volume));
                }
            }
            from = page.next;
            if from.is_none() {
                volumes.sort_by(|a, b| a.0.cmp(&b.0));
                return Ok(volumes);
            }
        }
    }

    /// Gives a volume another size.
    ///
    /// # Errors
    /// What the cluster says.
    pub async fn resize(&self, located: &Located, size: u64) -> Result<(), Refusal> {
        let set = SetAttributes {
            quota_bytes: Some(size),
            ..SetAttributes::default()
        };
        self.set(located.holder, set).await?;
        point("expand.set");
        self.safe().await
    }

    /// Changes what a VolumeAttributesClass names, and nothing when any of it is wrong.
    ///
    /// # Errors
    /// `Invalid` when the cluster has no such class; what the cluster says.
    pub async fn modify(&self, located: &Located, change: &Mutable) -> Result<(), Refusal> {
        let class = self.class(change.class.as_deref().unwrap_or_default())?;
        if let Some(template) = &change.preferred_labels {
            let mut record = located.volume.record.clone();
            record.preferred_labels.clone_from(template);
            self.write_record(located.holder, &record).await?;
        }
        let set = SetAttributes {
            class,
            quota_inodes: change.inode_quota.map(counted),
            ..SetAttributes::default()
        };
        self.set(located.holder, set).await?;
        point("modify.set");
        if class.is_some() {
            let data = self.data(located).await?;
            let set = SetAttributes {
                class,
                ..SetAttributes::default()
            };
            self.set(InodeId(data.ino), set).await?;
        }
        self.safe().await
    }

    /// Gives the volume's root a group for pods, if it has none yet. Nothing below is touched.
    /// The answer is the group it has.
    ///
    /// # Errors
    /// What the cluster says; `Busy` when the volume goes away.
    pub async fn give_group(&self, located: &Located, group: u32) -> Result<u32, Refusal> {
        if let Some(has) = located.group {
            return Ok(has);
        }
        self.own(located, group).await?;
        let id = &located.id;
        // Of two nodes that ask at a time one comes first.
        let (name, value) = (Bytes::from_static(GROUP), Bytes::from(group.to_string()));
        let given = self
            .client
            .set_xattr(located.holder, &name, value, CREATE)
            .await;
        let has = match given {
            Ok(()) => group,
            Err(error) if error.errno == Errno::EEXIST => {
                let found = self.find(id).await?.and_then(|found| found.group);
                let has = found.ok_or_else(|| Refusal::Busy(format!("{id} changes: repeat")))?;
                self.own(located, has).await?;
                has
            }
            Err(error) => return Err(Refusal::of_fs("note the volume's group", &error)),
        };
        self.safe().await?;
        Ok(has)
    }

    /// Makes the volume's root a group's.
    async fn own(&self, located: &Located, group: u32) -> Result<(), Refusal> {
        let data = self.data(located).await?;
        let set = SetAttributes {
            gid: Some(group),
            mode: Some(data.mode & PERMISSIONS | GROUP_MAY_ALL),
            ..SetAttributes::default()
        };
        self.set(InodeId(data.ino), set).await
    }

    /// Template of preferred labels of a volume: its own, or else its class's.
    #[must_use]
    pub fn template(&self, located: &Located) -> String {
        let own = &located.volume.record.preferred_labels;
        if !own.is_empty() {
            return own.clone();
        }
        let map = self.client.map();
        let class = map.class(located.class);
        class.map_or_else(String::new, |class| class.preferred_labels.clone())
    }

    /// Bytes that can still be written to files of a class (empty: any).
    ///
    /// # Errors
    /// `Invalid` when there is no such class; what the cluster says.
    pub async fn capacity(&self, class: &str) -> Result<u64, Refusal> {
        let said = self.client.space(ROOT).await;
        let space = said.map_err(|error| Refusal::of_fs("ask for free space", &error))?;
        let Some(id) = self.class(class)? else {
            return Ok(space.free_bytes);
        };
        let map = self.client.map();
        let keep = map
            .class(ClassId(id))
            .map_or(0, |class| class.keep_definition);
        let groups = map.groups_of(hither_proto::ids::DefinitionId(keep));
        let copies = groups.map(|(_, group)| group.members.len()).max();
        let raw = map
            .servers()
            .flat_map(|(_, server)| &server.chunkserver.disks);
        let free: u64 = raw.map(|disk| disk.free_bytes).sum();
        Ok(copies.map_or(space.free_bytes, |copies| free / copies.max(1) as u64))
    }

    /// Id of a class by name; `None` for the empty name.
    ///
    /// # Errors
    /// `Invalid` when there is no such class.
    pub fn class(&self, name: &str) -> Result<Option<u32>, Refusal> {
        if name.is_empty() {
            return Ok(None);
        }
        let map = self.client.map();
        let (id, _) = map.class_named(name).ok_or_else(|| {
            let names: Vec<&str> = map.classes().map(|(_, c)| c.name.as_str()).collect();
            Refusal::Invalid(format!(
                "the cluster has no storage class {name:?}: there are {}",
                names.join(", ")
            ))
        })?;
        Ok(Some(id.0))
    }

    // ---- steps

    async fn data(&self, located: &Located) -> Result<Inode, Refusal> {
        let data = self.child(located.holder, DATA).await?;
        data.ok_or_else(|| Refusal::Broken("the volume has no root".into()))
    }

    async fn write_record(&self, holder: InodeId, record: &VolumeRecord) -> Result<(), Refusal> {
        let name = Bytes::from_static(RECORD);
        let value = record.to_bytes().into();
        let written = self.client.set_xattr(holder, &name, value, 0).await;
        written.map_err(|error| Refusal::of_fs("write the volume's record", &error))
    }

    async fn set(&self, ino: InodeId, set: SetAttributes) -> Result<(), Refusal> {
        let done = self.client.set_attributes(ino, set, SYSTEM).await;
        done.map(|_| ())
            .map_err(|error| Refusal::of_fs("set the volume's limits", &error))
    }

    /// Everything changed so far is on stable storage when this returns.
    async fn safe(&self) -> Result<(), Refusal> {
        let safe = self.client.sync_all().await;
        safe.map_err(|error| Refusal::of_fs("store the change", &error))
    }

    async fn look(&self, dir: InodeId, name: &str) -> Result<Option<Inode>, FsError> {
        let name = Bytes::copy_from_slice(name.as_bytes());
        match self.client.lookup(dir, &name).await {
            Ok(found) => Ok(Some(found.attributes.inode)),
            Err(error) if error.errno == Errno::ENOENT => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn child(&self, dir: InodeId, name: &str) -> Result<Option<Inode>, Refusal> {
        let found = self.look(dir, name).await;
        found.map_err(|error| Refusal::of_fs("look for the volume", &error))
    }

    /// The directory of this name, made if it is not there.
    async fn directory(&self, parent: InodeId, name: &str, mode: u32) -> Result<InodeId, Refusal> {
        if let Some(inode) = self.child(parent, name).await? {
            return Ok(InodeId(inode.ino));
        }
        let request = Create {
            parent: parent.0,
            name: Bytes::copy_from_slice(name.as_bytes()),
            mode: DIRECTORY | mode,
            exclusive: true,
            ..Create::default()
        };
        match self.client.create(request, SYSTEM).await {
            Ok(made) => Ok(InodeId(made.found.attributes.inode.ino)),
            Err(error) if error.errno == Errno::EEXIST => {
                let there = self.child(parent, name).await?;
                let there = there.map(|inode| InodeId(inode.ino));
                there.ok_or_else(|| Refusal::Busy(format!("{name} comes and goes: repeat")))
            }
            Err(error) => Err(Refusal::of_fs(&format!("make {name}"), &error)),
        }
    }
}

/// Path inside the cluster that is mounted for a volume.
#[must_use]
pub fn path_of(id: &VolumeId) -> String {
    format!("/{VOLUMES}/{id}/{DATA}")
}

fn located(id: &VolumeId, inode: &Inode) -> Result<Located, Refusal> {
    let record = inode.xattrs.iter().find(|xattr| xattr.name == RECORD);
    let record = record.ok_or_else(|| {
        Refusal::NotNow(format!(
            "/{VOLUMES}/{id} is no volume of this driver: it is left alone"
        ))
    })?;
    let group = inode.xattrs.iter().find(|xattr| xattr.name == GROUP);
    Ok(Located {
        id: id.clone(),
        group: group.and_then(|group| std::str::from_utf8(&group.value).ok()?.parse().ok()),
        volume: Volume {
            size: inode.quota_bytes,
            record: VolumeRecord::of_bytes(&record.value)?,
        },
        holder: InodeId(inode.ino),
        class: ClassId(inode.class),
        inode_quota: inode.quota_inodes.saturating_sub(1),
    })
}

/// The limit of the holder: the volume's root counts too.
fn counted(inodes: u64) -> u64 {
    if inodes == 0 {
        0
    } else {
        inodes.saturating_add(1)
    }
}

/// Directory of all volumes.
const VOLUMES: &str = "volumes";
/// In it: volumes that are being made, and those that were removed.
const UNFINISHED: &str = ".unfinished";
const TRASH: &str = ".trash";
/// In a volume's directory: what is mounted.
const DATA: &str = "data";
/// Attribute of a volume's directory.
const RECORD: &[u8] = b"trusted.hither.volume";
/// Another one: the group its root was given. Controller and nodes each write their own.
const GROUP: &[u8] = b"trusted.hither.volume.group";
/// Of an attribute that must not be there yet.
const CREATE: u32 = 1;
/// Who changes volumes.
const SYSTEM: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 0,
};
const NO_REPLACE: u32 = 1;
/// Entries listed in one request.
const PAGE: u32 = 1024;
const TYPE_MASK: u32 = 0o170_000;
const DIRECTORY: u32 = 0o040_000;
const PERMISSIONS: u32 = 0o7777;
/// Read, write and search for the group, and new entries get the group.
const GROUP_MAY_ALL: u32 = 0o2070;
