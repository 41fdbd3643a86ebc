//! What this node knows of a staged volume, on disk: a file for each under the plugin's directory,
//! described in `docs/formats/volumes.md`. Nothing else is remembered from one run to the next.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::Refusal;
use crate::ids::Handle;

/// A volume on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// Version of the record: [`FORMAT`].
    pub format: u32,
    /// Boot of the machine in which it was made; mounts do not outlive one.
    pub boot: String,
    /// The volume.
    pub handle: String,
    /// Where it is staged.
    pub staging: PathBuf,
    /// Staging was finished; until then the kubelet repeats it or takes it back.
    pub staged: bool,
    /// Access mode of the request, and options of the mount.
    pub mode: i32,
    /// See `mode`.
    pub options: Vec<String>,
    /// Addresses of managers.
    pub managers: Vec<String>,
    /// Directory inside the cluster.
    pub subdirectory: String,
    /// Template of preferred labels as last seen.
    pub template: String,
    /// Places where pods have it.
    #[serde(default)]
    pub targets: Vec<Target>,
    /// Pods that had it last, to be told what became of their data.
    #[serde(default)]
    pub pods: Vec<Pod>,
    /// How often the end of the mount was waited for in vain.
    #[serde(default)]
    pub waited: u32,
}

/// A place where a pod has a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Target {
    /// Where.
    pub path: PathBuf,
    /// Options of the bind mount.
    pub options: Vec<String>,
    /// Publishing was finished.
    pub published: bool,
    /// The pod, for events.
    #[serde(default)]
    pub pod: Option<Pod>,
}

/// A pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}

impl Record {
    /// Notes a pod that has the volume.
    pub fn note_pod(&mut self, pod: Option<&Pod>) {
        let Some(pod) = pod else { return };
        self.pods.retain(|known| known.uid != pod.uid);
        if self.pods.len() >= PODS_MAX {
            self.pods.remove(0);
        }
        self.pods.push(pod.clone());
    }
}

/// The records of this node.
#[derive(Debug, Clone)]
pub struct Records {
    directory: PathBuf,
    boot: String,
}

impl Records {
    /// Opens the records in a directory, made if it is not there.
    ///
    /// # Errors
    /// `Broken` when it cannot be used.
    pub fn open(directory: &Path) -> Result<Self, Refusal> {
        fs::create_dir_all(directory)
            .map_err(|error| Refusal::of_io("make the directory of records", &error))?;
        let boot = fs::read_to_string(BOOT_ID)
            .map_err(|error| Refusal::of_io("read the boot id", &error))?;
        Ok(Self {
            directory: directory.to_owned(),
            boot: boot.trim().to_owned(),
        })
    }

    /// Id of this boot.
    #[must_use]
    pub fn boot(&self) -> &str {
        &self.boot
    }

    /// The record of a volume; those of another boot and what cannot be read are none.
    ///
    /// # Errors
    /// `Broken` when the disk does not answer.
    pub fn load(&self, handle: &Handle) -> Result<Option<Record>, Refusal> {
        let bytes = match fs::read(self.path(handle)) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Refusal::of_io("read a record", &error)),
        };
        match serde_json::from_slice::<Record>(&bytes) {
            Ok(record) if record.format == FORMAT => {
                Ok(Some(record).filter(|record| record.boot == self.boot))
            }
            Ok(record) => Err(Refusal::Broken(format!(
                "the record of {handle} has format {}: this plugin knows {FORMAT}",
                record.format
            ))),
            Err(error) => {
                tracing::warn!(%handle, %error, "a record cannot be read and counts as none");
                Ok(None)
            }
        }
    }

    /// Writes a record: afterwards the old or the new one is there, whatever happens.
    ///
    /// # Errors
    /// `Broken` when it cannot be written.
    pub fn store(&self, handle: &Handle, record: &Record) -> Result<(), Refusal> {
        let bytes = serde_json::to_vec(record)
            .map_err(|error| Refusal::Broken(format!("write a record: {error}")))?;
        let path = self.path(handle);
        let new = path.with_extension("new");
        let write = || {
            let mut file = fs::File::create(&new)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            fs::File::open(&self.directory)?.sync_all()
        };
        write().map_err(|error| Refusal::of_io("write a record", &error))
    }

    /// Removes a record, if it is there.
    ///
    /// # Errors
    /// `Broken` when it cannot be removed.
    pub fn remove(&self, handle: &Handle) -> Result<(), Refusal> {
        match fs::remove_file(self.path(handle)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Refusal::of_io("remove a record", &error))
            }
            _ => Ok(()),
        }
    }

    /// Volumes with a record, of this boot or not.
    ///
    /// # Errors
    /// `Broken` when the disk does not answer.
    pub fn handles(&self) -> Result<Vec<Handle>, Refusal> {
        let entries = fs::read_dir(&self.directory)
            .map_err(|error| Refusal::of_io("list the records", &error))?;
        let mut handles: Vec<Handle> = entries
            .flatten()
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                Handle::parse(name.strip_suffix(".json")?)
            })
            .collect();
        handles.sort();
        Ok(handles)
    }

    fn path(&self, handle: &Handle) -> PathBuf {
        self.directory.join(format!("{handle}.json"))
    }
}

/// Version of a record.
pub const FORMAT: u32 = 1;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Pods of a volume that are remembered.
const PODS_MAX: usize = 8;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn record(handle: &Handle, boot: &str) -> Record {
        Record {
            format: FORMAT,
            boot: boot.into(),
            handle: handle.to_string(),
            staging: "/s".into(),
            staged: true,
            mode: 5,
            options: vec!["timeout=5s".into()],
            managers: vec!["m:1".into()],
            subdirectory: "/volumes/v1/data".into(),
            template: String::new(),
            targets: Vec::new(),
            pods: Vec::new(),
            waited: 0,
        }
    }

    #[test]
    fn the_last_pods_are_remembered() {
        let handle = Handle::parse("00ff.v1").unwrap();
        let mut record = record(&handle, "b");
        for n in [1, 2, 1, 3, 4, 5, 6, 7, 8, 9] {
            record.note_pod(Some(&Pod {
                namespace: "n".into(),
                name: format!("p{n}"),
                uid: n.to_string(),
            }));
        }
        record.note_pod(None);
        let uids: Vec<&str> = record.pods.iter().map(|pod| pod.uid.as_str()).collect();
        assert_eq!(uids, ["1", "3", "4", "5", "6", "7", "8", "9"]);
    }

    #[test]
    fn records_of_another_boot_and_torn_ones_are_none() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(&dir.path().join("volumes")).unwrap();
        let handle = Handle::parse("00ff.v1").unwrap();
        assert_eq!(records.load(&handle), Ok(None));
        let ours = record(&handle, records.boot());
        records.store(&handle, &ours).unwrap();
        assert_eq!(records.load(&handle), Ok(Some(ours)));
        records.store(&handle, &record(&handle, "another")).unwrap();
        assert_eq!(records.load(&handle), Ok(None));
        assert_eq!(records.handles(), Ok(vec![handle.clone()]));
        fs::write(dir.path().join("volumes/00ff.v1.json"), b"{\"form").unwrap();
        assert_eq!(records.load(&handle), Ok(None));
        records.remove(&handle).unwrap();
        records.remove(&handle).unwrap();
        assert_eq!(records.handles(), Ok(vec![]));
    }

    #[test]
    fn a_record_of_a_later_version_stops_its_volume() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path()).unwrap();
        let handle = Handle::parse("00ff.v1").unwrap();
        let mut newer = record(&handle, records.boot());
        newer.format = 9;
        records.store(&handle, &newer).unwrap();
        assert!(records.load(&handle).is_err());
    }
}
