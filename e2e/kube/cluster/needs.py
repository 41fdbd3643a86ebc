"""What the cluster needs of the machine it stands on, each tried by doing it."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from . import cgroup, packages
from .layout import State
from .say import run

# What the state directory takes, with everything loaded and tested.
ROOM = 6 << 30


def missing(state: State) -> list[str]:
    """What this machine lacks and no package brings: a line each, none when all is there."""
    if os.geteuid() != 0:
        return ["root: a cluster makes namespaces, mounts and a bridge"]
    packages.ensure(packages.NEEDED)
    state_parent = next(path for path in (state.root, *state.root.parents) if path.exists())
    found = [
        without_fuse(),
        without("namespaces of its own", "true"),
        without("a bridge and links in a network namespace", LINKS),
        without("packet filters (nftables) in a network namespace", "nft add table ip one"),
        without_overlay(state_parent),
        without_cgroups(),
        # A cluster that is there has taken its room already.
        None if state.root.exists() else without_room(state_parent),
    ]
    return [one for one in found if one]


# The namespaces of a machine of the cluster (machine.py).
APART = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child",
         "--net", "--uts", "--ipc", "--", "sh", "-ec")
LINKS = ("ip link add one type bridge; ip link add two type veth peer name three;"
         " ip link set two master one up")


def without(what: str, script: str) -> str | None:
    """What is missing, with the reason, when a script fails in namespaces of its own."""
    done = subprocess.run([*APART, script], capture_output=True, text=True)
    if done.returncode == 0:
        return None
    reason = done.stderr.strip().splitlines()[-1:] or ["it fails"]
    return f"{what}: {reason[0]}"


def without_fuse() -> str | None:
    if not Path("/dev/fuse").exists():
        return "/dev/fuse: load the fuse module"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"the right to open /dev/fuse: {error.strerror}"
    return None


def without_overlay(place: Path) -> str | None:
    if run("stat", "--file-system", "--format=%T", place).strip() == "overlayfs":
        return (f"a disk below {place}: it is on an overlay, on which no other can stand;"
                " set HITHER_KUBE_STATE to a directory on a disk or a tmpfs")
    with tempfile.TemporaryDirectory(dir=place) as home:
        return without(f"overlays below {place}", (
            f"cd {home}; mkdir upper work root;"
            " mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work one root;"
            " mount -t proc proc root/proc; mount -t sysfs sysfs root/sys"))


def without_cgroups() -> str | None:
    hierarchies = cgroup.hierarchies()
    if not hierarchies:
        return "control groups: none are mounted"
    for path, _ in hierarchies:
        try:
            group = Path(tempfile.mkdtemp(dir=path, prefix="hither-kube-"))
            group.rmdir()
        except OSError as error:
            return f"the right to make control groups in {path}: {error.strerror}"
    return None


def without_room(place: Path) -> str | None:
    free = shutil.disk_usage(place).free
    if free < ROOM:
        return f"room below {place}: {free >> 30} GiB are free, {ROOM >> 30} are needed"
    return None

