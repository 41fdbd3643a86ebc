"""Brings image archives into the nodes' image stores."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import images, oci
from .layout import NODES, State
from .machine import RunningMachine
from .node import CTR, PAUSE_IMAGE
from .oci import described
from .say import say

# What every cluster starts with; the sidecars are loaded by the tests that use them.
AT_START = ("coredns", "snapshot-controller", "local-volumes")


def load(state: State, *archives: Path) -> None:
    """Loads archives into all nodes that run; an image that is there already is left alone."""
    hosts = [RunningMachine(state, node) for node in NODES]
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(load_into, host, archives) for host in hosts if host.pid]
        for job in jobs:
            job.result()


def load_into(host: RunningMachine, archives: tuple[Path, ...]) -> None:
    listing = host.run(*CTR, "images", "list")
    present = {tuple(line.split()[:3:2]) for line in listing.splitlines()}
    for archive in archives:
        name, digest = described(archive)
        if (name, digest) in present:
            continue
        say(f"{host.machine.name}: loading {name}")
        with open(archive, "rb") as content:
            host.run(*CTR, "images", "import", "-", stdin=content)


def archives_at_start(programs: Path) -> list[Path]:
    """Archives of the images every cluster needs; written beside the programs, once."""
    return [
        written(programs, "busybox", lambda: images.busybox()),
        written(programs, "pause", lambda: images.busybox(PAUSE_IMAGE, "/bin/sleep", "infinity")),
        *(archive_of(programs, name) for name in AT_START),
    ]


def archive_of(programs: Path, name: str) -> Path:
    """Archive of the image of one Kubernetes program."""
    return written(programs, name, lambda: images.pod_program(programs / "bin", name))


def written(programs: Path, name: str, make: Callable[[], oci.Image]) -> Path:
    """The archive, made when it is not there yet for what the code says is in it."""
    code = b"".join(Path(module.__file__).read_bytes() for module in (images, oci))
    path = programs / "images" / hashlib.sha256(code).hexdigest()[:8] / f"{name}.tar"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        make().write(path)
    return path
