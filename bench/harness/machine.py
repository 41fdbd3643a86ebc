"""What the run was made on."""

import os
import platform
from pathlib import Path

import proc
import systems


def facts(directory):
    """Cores, memory, kernel, disk and programs, as words for the report."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _field("/proc/cpuinfo", "model name"),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "disk": _disk(directory),
        "load_at_start": os.getloadavg()[0],
        "programs": {
            "bindfs": systems.version(["bindfs", "--version"]),
            "fio": systems.version(["fio", "--version"]),
        },
    }


class Clock:
    """Processor time of the whole machine since it was made."""

    def __init__(self):
        self._at_start = self._read()

    def shares(self):
        """Shares of the processors' time: busy, and taken away by the host."""
        spent = [now - then for now, then in zip(self._read(), self._at_start)]
        total = sum(spent) or 1
        idle, stolen = spent[3] + spent[4], spent[7]
        return {"busy": (total - idle - stolen) / total, "stolen": stolen / total}

    @staticmethod
    def _read():
        first = Path("/proc/stat").read_text().splitlines()[0]
        return [int(word) for word in first.split()[1:9]]


def _field(path, name):
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _disk(directory):
    """File system and device of a directory."""
    try:
        out = proc.run(["df", "--output=source,fstype,size", "-B1", directory], seconds=10)
        source, kind, size = out.splitlines()[-1].split()
    except (proc.Failed, ValueError):
        return {"device": "unknown"}
    spins = "unknown"
    queue = Path("/sys/class/block", Path(source).name).resolve()
    for at in (queue, queue.parent):
        if (at / "queue/rotational").exists():
            spins = (at / "queue/rotational").read_text().strip() == "1"
            break
    return {"device": source, "file_system": kind, "size_bytes": int(size), "rotates": spins}
