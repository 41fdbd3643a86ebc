"""What is in each image: Hither's own, the one for tests' pods, and one a Kubernetes program."""

import platform
import re
import subprocess
import tempfile
from pathlib import Path

from . import packages
from .layout import IMAGE_DOMAIN
from .oci import Image
from .packages import CERTIFICATES
from .say import Failure, run

HITHER_IMAGE = f"{IMAGE_DOMAIN}/hither:dev"
BUSYBOX_IMAGE = f"{IMAGE_DOMAIN}/busybox:1"
NOBODY, NONROOT = 65534, 65532
# Of the Kubernetes programs, those that run as pods. Hither's chart finds the sidecars under the
# names under which everybody knows them.
SIDECARS = "registry.k8s.io/sig-storage"
POD_PROGRAMS = {
    "coredns": f"{IMAGE_DOMAIN}/coredns:1",
    "snapshot-controller": f"{IMAGE_DOMAIN}/snapshot-controller:1",
    "local-volumes": f"{IMAGE_DOMAIN}/local-volumes:1",
    "csi-provisioner": f"{SIDECARS}/csi-provisioner:v6.4.0",
    "csi-resizer": f"{SIDECARS}/csi-resizer:v2.3.0",
    "csi-snapshotter": f"{SIDECARS}/csi-snapshotter:v8.7.0",
}


def reference(name: str, registry: str | None) -> str:
    """The name under which a cluster's nodes find an image, given the registry they pull from."""
    return name if registry is None else f"{registry.rstrip('/')}/{name.rsplit('/', 1)[1]}"


def architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def base(name: str, *entrypoint: str, user: int = 0) -> Image:
    """An image with the few files that every program expects."""
    image = Image(name, architecture(), list(entrypoint), f"{user}:{user}" if user else "")
    users = {"root": 0, "nobody": NOBODY, "nonroot": NONROOT}
    passwd = "".join(f"{name}:x:{id}:{id}:{name}:/:/sbin/nologin\n" for name, id in users.items())
    image.add("etc/passwd", passwd.encode())
    image.add("etc/group", "".join(f"{name}:x:{id}:\n" for name, id in users.items()).encode())
    image.add("etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
    for path in ("dev", "proc", "sys", "run", "root"):
        image.add_directory(path)
    image.add_directory("tmp", 0o1777)
    return image


def hither(directory: Path, required: list[str], optional: list[str], etcd: Path) -> Image:
    """Hither's image: its binaries from `directory`, etcd, fusermount3, what they are linked to."""
    packages.ensure({"fusermount3": "fuse3", "strip": "binutils", CERTIFICATES: "ca-certificates"})
    image = base(HITHER_IMAGE, "/usr/local/bin/hither", user=NONROOT)
    for name in required:
        if not (directory / name).is_file():
            raise Failure(f"there is no {name} in {directory}; build it first (make build)")
    for name in [*required, *optional]:
        if (directory / name).is_file():
            add_program(image, directory / name, f"usr/local/bin/{name}")
    add_program(image, etcd, "usr/local/bin/etcd")
    # Without its set-user-id bit: the one container that mounts runs as root.
    add_program(image, Path("/usr/bin/fusermount3"), "usr/bin/fusermount3")
    image.add(CERTIFICATES, Path(CERTIFICATES).read_bytes())
    return image


def busybox(name: str = BUSYBOX_IMAGE, *entrypoint: str) -> Image:
    """A shell and its small tools, for tests' pods; with an entry point also the pause image."""
    packages.ensure({"/bin/busybox": "busybox-static"})
    image = base(name, *entrypoint)
    add_program(image, Path("/bin/busybox"), "bin/busybox")
    for applet in run("/bin/busybox", "--list").split():
        if applet != "busybox":
            image.add_link(f"bin/{applet}", "busybox")
    return image


def pod_program(programs: Path, name: str) -> Image:
    image = base(POD_PROGRAMS[name], f"/{name}", user=NONROOT)
    image.add(name, (programs / name).read_bytes(), 0o755)
    return image


def add_program(image: Image, source: Path, path: str) -> None:
    """Adds a program without its symbols, and the shared libraries that it names."""
    image.add(path, stripped(source), 0o755)
    for library in libraries(source):
        image.add(library, Path(library).resolve().read_bytes(), 0o755)


def stripped(source: Path) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / source.name
        run("strip", "--strip-all", "-o", target, source)
        return target.read_bytes()


def libraries(source: Path) -> list[str]:
    """Paths of the shared libraries as the loader will look for them."""
    done = subprocess.run(["ldd", source], capture_output=True, text=True)
    if "not found" in done.stdout:
        raise Failure(f"{source} needs a library that is not here:\n{done.stdout.strip()}")
    return sorted(set(re.findall(r"(?:=> |^\s)(/\S+) \(0x", done.stdout, flags=re.MULTILINE)))
