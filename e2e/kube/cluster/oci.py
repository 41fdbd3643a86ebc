"""Container images without a container engine: one layer, written as an OCI image layout in a tar.

The same files give the same bytes: entries are sorted, owned by root and dated 1970.
"""

import hashlib
import io
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

LAYER = "application/vnd.oci.image.layer.v1.tar"
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass
class Entry:
    """One file of the image: a directory, a symbolic link or bytes."""

    mode: int = 0o644
    data: bytes = b""
    link: str = ""
    directory: bool = False


@dataclass
class Image:
    """What is in an image and how it is run."""

    name: str
    architecture: str
    entrypoint: list[str] = field(default_factory=list)
    user: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    files: dict[str, Entry] = field(default_factory=dict)

    def add(self, path: str, data: bytes, mode: int = 0o644) -> None:
        self.files[path.strip("/")] = Entry(mode, data)

    def add_directory(self, path: str, mode: int = 0o755) -> None:
        self.files[path.strip("/")] = Entry(mode, directory=True)

    def add_link(self, path: str, target: str) -> None:
        self.files[path.strip("/")] = Entry(0o777, link=target)

    def write(self, path: Path) -> str:
        """Writes the archive and returns the digest of the manifest."""
        layer = tar_of(complete(self.files))
        config = encode(self.config(digest(layer)))
        manifest = encode({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": descriptor(CONFIG, config),
            "layers": [descriptor(LAYER, layer)],
        })
        index = encode({
            "schemaVersion": 2,
            "mediaType": INDEX,
            "manifests": [descriptor(MANIFEST, manifest) | {
                "platform": {"architecture": self.architecture, "os": "linux"},
                "annotations": {
                    "io.containerd.image.name": self.name,
                    "org.opencontainers.image.ref.name": self.name.rsplit(":", 1)[1],
                },
            }],
        })
        blobs = {f"blobs/sha256/{digest(b)[7:]}": b for b in (layer, config, manifest)}
        layout = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": index}
        entries = {name: Entry(data=data) for name, data in (layout | blobs).items()}
        partial = path.with_suffix(".partial")
        partial.write_bytes(tar_of(entries))
        partial.rename(path)
        return digest(manifest)

    def unpack(self, root: Path) -> None:
        """Writes the files below a directory, for an engine that makes an image of it."""
        for path, entry in sorted(complete(self.files).items()):
            target = root / path
            if entry.link:
                target.symlink_to(entry.link)
                continue
            if entry.directory:
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.write_bytes(entry.data)
            target.chmod(entry.mode)

    def config(self, layer_digest: str) -> dict:
        run = {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]}
        if self.entrypoint:
            run["Entrypoint"] = self.entrypoint
        if self.user:
            run["User"] = self.user
        if self.labels:
            run["Labels"] = self.labels
        return {
            "architecture": self.architecture,
            "os": "linux",
            "config": run,
            "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
        }


def described(path: Path) -> tuple[str, str]:
    """Name and manifest digest of the image in an archive."""
    with tarfile.open(path) as archive:
        index = json.load(archive.extractfile("index.json"))
    manifest = index["manifests"][0]
    return manifest["annotations"]["io.containerd.image.name"], manifest["digest"]


def complete(files: dict[str, Entry]) -> dict[str, Entry]:
    """The files with every directory that leads to one."""
    found = dict(files)
    for path in files:
        for parent in Path(path).parents:
            if str(parent) != ".":
                found.setdefault(str(parent), Entry(0o755, directory=True))
    return found


def tar_of(files: dict[str, Entry]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(files):
            entry = files[path]
            info = tarfile.TarInfo(path)
            info.mode, info.uname, info.gname = entry.mode, "root", "root"
            if entry.directory:
                info.type = tarfile.DIRTYPE
            elif entry.link:
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
            else:
                info.size = len(entry.data)
            archive.addfile(info, io.BytesIO(entry.data))
    return target.getvalue()


def encode(value: dict) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def descriptor(media_type: str, data: bytes) -> dict:
    return {"mediaType": media_type, "digest": digest(data), "size": len(data)}
