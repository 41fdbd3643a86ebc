"""The control groups under which the nodes put their pods."""

from functools import partial
from pathlib import Path

from .layout import CGROUP, Machine
from .say import wait_until


def hierarchies() -> list[tuple[Path, str]]:
    """Where control groups are mounted and of which kind: one place with version 2, many with 1."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [(Path(mount[1]), mount[2]) for mount in mounts if mount[2] in ("cgroup", "cgroup2")]


def name_of(machine: Machine) -> str:
    return f"/{CGROUP}/{machine.name}"


def ensure(machine: Machine) -> None:
    """Makes the node's group in every hierarchy that the kubelet looks at."""
    found = hierarchies()
    first = [path for path, kind in found if kind == "cgroup"]
    for hierarchy in first or [path for path, _ in found]:
        for path in (hierarchy / CGROUP, hierarchy / name_of(machine).lstrip("/")):
            path.mkdir(exist_ok=True)
            inherit_cpuset(path)


def inherit_cpuset(path: Path) -> None:
    """A new group of version 1's cpuset controller has no processor until it is given some."""
    for file in ("cpuset.cpus", "cpuset.mems"):
        own, above = path / file, path.parent / file
        if own.exists() and above.exists() and not own.read_text().strip():
            own.write_text(above.read_text())


def remove() -> None:
    """Removes the groups of a cluster whose processes are gone."""
    for hierarchy, _ in hierarchies():
        top = hierarchy / CGROUP
        if top.exists():
            wait_until(f"{top} is empty", 20, partial(remove_tree, top))


def remove_tree(top: Path) -> bool:
    below = sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True)
    try:
        for path in (*below, top):
            path.rmdir()
    except OSError:
        return False
    return True
