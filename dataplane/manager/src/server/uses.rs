//! What names a storage class: asked of the metadata store, which holds every inode.

use std::fmt::Write as _;

use bytes::Bytes;
use hither_metastore::{Error, KeyRange, MetaStore};
use hither_proto::ids::{ABOVE_ROOT, ClassId, InodeId, ROOT, STRAYS};
use hither_proto::stored::{BackPointer, Dentry, dentry::Target};
use prost::Message;

/// Files and directories that name a class.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Uses {
    directories: u64,
    /// Everything that is no directory.
    files: u64,
    /// Paths of the first few, directories before files.
    examples: Vec<String>,
}

impl Uses {
    /// Why the class cannot be removed, and what to do; `None` when nothing names it.
    pub(crate) fn refusal(&self, class: &str) -> Option<String> {
        if self.directories == 0 && self.files == 0 {
            return None;
        }
        let mut text = format!(
            "storage class {class:?} is in use by {} and {}",
            counted(self.directories, "directory", "directories"),
            counted(self.files, "file", "files"),
        );
        if !self.examples.is_empty() {
            let _ = write!(text, ", such as {}", self.examples.join(", "));
        }
        text.push_str(
            ": give them another with `hither sclass set -r OTHER PATH` first (data they have stays \
             with the copies it has)",
        );
        Some(text)
    }
}

fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// Looks at every inode in the store. Takes as long as reading it does.
pub(crate) async fn uses<S: MetaStore>(store: &S, class: ClassId) -> Result<Uses, Error> {
    let mut uses = Uses::default();
    let (mut directories, mut files) = (Vec::new(), Vec::new());
    let mut range = KeyRange::prefix(&b"d/"[..]);
    loop {
        let page = store.scan(&range, 0).await?;
        for entry in &page.entries {
            let Some((dir, name)) = place(&entry.key) else {
                continue;
            };
            let dentry = Dentry::decode(entry.versioned.value.clone());
            let Ok(Some(Target::Primary(inode))) = dentry.map(|dentry| dentry.target) else {
                continue;
            };
            // What is removed, and open still, is gone for everybody else.
            if inode.class != class.0 || (dir == STRAYS && inode.nlink == 0) {
                continue;
            }
            let (count, examples) = if inode.mode & TYPE_BITS == DIRECTORY {
                (&mut uses.directories, &mut directories)
            } else {
                (&mut uses.files, &mut files)
            };
            *count += 1;
            if examples.len() < EXAMPLES_MAX && dir != STRAYS {
                examples.push((dir, name));
            }
        }
        match page.resume {
            Some(start) => range = range.from_key(start),
            None => break,
        }
    }
    for (dir, name) in directories.into_iter().chain(files).take(EXAMPLES_MAX) {
        uses.examples.push(path(store, dir, &name).await?);
    }
    Ok(uses)
}

/// Directory and name of a `d/<dir>/<hash>/<name>` key.
fn place(key: &Bytes) -> Option<(InodeId, Bytes)> {
    let dir = key.get(2..10)?.try_into().ok().map(u64::from_be_bytes)?;
    (key.len() > NAME_AT).then(|| (InodeId(dir), key.slice(NAME_AT..)))
}

/// The path of an entry, as far up as it can be told.
async fn path<S: MetaStore>(store: &S, dir: InodeId, name: &Bytes) -> Result<String, Error> {
    if dir == ABOVE_ROOT {
        return Ok("/".into());
    }
    let mut names = vec![String::from_utf8_lossy(name).into_owned()];
    let mut at = dir;
    while at != ROOT && names.len() < DEPTH_MAX {
        let key = [&b"p/"[..], &at.0.to_be_bytes()].concat();
        let Some(found) = store.get(&key).await? else {
            break;
        };
        let Ok(up) = BackPointer::decode(found.value) else {
            break;
        };
        names.push(String::from_utf8_lossy(&up.name).into_owned());
        at = InodeId(up.parent);
    }
    let start = if at == ROOT { "/" } else { "…/" };
    names.reverse();
    Ok(format!("{start}{}", names.join("/")))
}

/// Paths that are named at most.
const EXAMPLES_MAX: usize = 3;
/// Directories of a path that are looked up at most.
const DEPTH_MAX: usize = 64;
/// Where the name stands in the key of a dentry.
const NAME_AT: usize = 18;
const TYPE_BITS: u32 = 0o170_000;
const DIRECTORY: u32 = 0o040_000;

#[cfg(test)]
mod tests {
    use hither_log::crash::CrashDisk;
    use hither_metastore::{Batch, EmbeddedOptions, EmbeddedStore};
    use hither_proto::stored::Inode;

    use super::*;

    fn put(batch: &mut Batch, dir: u64, name: &str, inode: Inode) {
        let key = [
            &b"d/"[..],
            &dir.to_be_bytes(),
            &7u64.to_be_bytes(),
            name.as_bytes(),
        ]
        .concat();
        if inode.mode & TYPE_BITS == DIRECTORY {
            let up = BackPointer {
                parent: dir,
                name: name.to_owned().into(),
            };
            let key = [&b"p/"[..], &inode.ino.to_be_bytes()].concat();
            batch.put(key, up.encode_to_vec());
        }
        let target = Some(Target::Primary(inode));
        batch.put(key, Dentry { target }.encode_to_vec());
    }

    fn inode(ino: u64, mode: u32, class: u32) -> Inode {
        Inode {
            ino,
            mode,
            class,
            nlink: 1,
            ..Inode::default()
        }
    }

    #[tokio::test]
    async fn what_names_a_class_is_counted_and_named() {
        let disk = CrashDisk::new();
        let store = EmbeddedStore::open(&disk.root(), EmbeddedOptions::default()).unwrap();
        let mut batch = Batch::new();
        put(&mut batch, 0, "/", inode(1, DIRECTORY | 0o755, 1));
        put(&mut batch, 1, "data", inode(16, DIRECTORY | 0o755, 1));
        put(&mut batch, 16, "cold", inode(17, DIRECTORY | 0o755, 2));
        put(&mut batch, 17, "a", inode(18, 0o100_644, 2));
        put(&mut batch, 17, "b", inode(19, 0o100_644, 2));
        // Removed, and open still.
        let removed = Inode {
            nlink: 0,
            ..inode(20, 0o100_644, 3)
        };
        put(&mut batch, STRAYS.0, "20", removed);
        store.commit(batch).await.unwrap();

        let found = uses(&store, ClassId(2)).await.unwrap();
        assert_eq!((found.directories, found.files), (1, 2));
        assert_eq!(
            found.examples,
            ["/data/cold", "/data/cold/a", "/data/cold/b"]
        );
        let text = found.refusal("cold").unwrap();
        assert!(text.contains("1 directory and 2 files"), "{text}");
        assert!(text.contains("sclass set -r"), "{text}");
        assert!(text.contains("stays with the copies it has"), "{text}");
        let root = uses(&store, ClassId(1)).await.unwrap();
        assert_eq!(root.examples, ["/", "/data"]);
        let unused = uses(&store, ClassId(3)).await.unwrap();
        assert_eq!(unused.refusal("unused"), None);
    }
}
