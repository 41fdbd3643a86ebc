"""The measurements. A stage is done on one system, then on the next: drift hits all alike."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import proc
import rows
from proc import Failed, NotMeasurable


@dataclass
class Bench:
    """What stages need to know."""

    plan: object
    fsload: Path
    # The tree to unpack: {"tar", "files", "bytes", "from", "env"}, or None and why.
    tree: dict
    no_tree: str = ""


@dataclass
class Figures:
    """What a stage found: values by row, and why rows have none."""

    values: dict = field(default_factory=dict)
    reasons: dict = field(default_factory=dict)
    # Things beside the table that belong into the JSON.
    details: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """A measurement that fills the rows whose key begins with one of `prefixes`."""

    name: str
    prefixes: tuple
    measure: Callable
    repetitions: Callable
    # Whether it makes a system of its own instead of using the running one.
    fresh: bool = False


# Metadata ------------------------------------------------------------------------------------


def metadata(threads):
    def measure(bench, system):
        plan = bench.plan
        files = plan.files_alone if threads == 1 else plan.files_each
        figures = Figures()
        load = system.root / "load"
        try:
            result = _load(bench, system, load, threads, files)
        finally:
            _remove(load, system)
        for phase, measured in result["phases"].items():
            key = f"{phase}.{threads}"
            figures.values[key] = measured["per_second"]
            figures.details[key] = measured
        if not system.has_mount:
            figures.values.pop(f"stat_new.{threads}", None)
            figures.reasons[f"stat_new.{threads}"] = "no mount of its own"
        return figures

    return measure


def _load(bench, system, directory, threads, files):
    """One round of all phases, with a new mount in the middle."""
    phases = ["create", "write", "stat", "readdir", "wait", "stat:stat_new", "rename", "unlink"]
    limit = bench.plan.phase_seconds
    words = ["--threads", threads, "--files", files, "--limit", limit]
    program = subprocess.Popen(
        [str(word) for word in (bench.fsload, directory, *words, *phases)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = _Watchdog(program, system, limit * 8 + 40)
    try:
        with watchdog:
            if program.stdout.readline().strip() == "ready":
                system.remount()
            out, err = program.communicate("on\n")
    except BaseException:
        program.kill()
        raise
    if watchdog.bit:
        raise Failed("the metadata load hung")
    if program.returncode != 0:
        raise Failed((err.strip() or "fsload said nothing").splitlines()[-1])
    return json.loads(out)


class _Watchdog:
    """Ends a program, and the mount it may wait for, when it takes too long."""

    def __init__(self, program, system, seconds):
        self.bit = False
        self._program, self._system = program, system
        self._timer = threading.Timer(seconds, self._bite)

    def __enter__(self):
        self._timer.start()
        return self

    def __exit__(self, *_):
        self._timer.cancel()

    def _bite(self):
        self.bit = True
        self._program.kill()
        self._system.kill_mount()


# Streams and random reads --------------------------------------------------------------------


def write_stream(bench, system):
    """One file, 1 MiB at a time, then fsync; what it costs every process."""
    directory = system.root / "io"
    directory.mkdir(exist_ok=True)
    (directory / "big").unlink(missing_ok=True)
    spent = _Processors(system)
    job = _fio(bench, system, "--rw=write", "--bs=1M", "--end_fsync=1")
    figures = Figures({"io.write": job["write"]["bw_bytes"] / 1e6})
    spent.per_gigabyte(figures, "cpu_write", bench.plan.stream_bytes)
    return figures


def read_stream_cold(bench, system):
    """The file again, when neither mount nor servers nor disk cache have any of it."""
    _needs_big(system)
    system.remount()
    proc.drop_caches(system.directory)
    spent = _Processors(system)
    job = _fio(bench, system, "--rw=read", "--bs=1M")
    figures = Figures({"io.read_cold": job["read"]["bw_bytes"] / 1e6})
    spent.per_gigabyte(figures, "cpu_read", bench.plan.stream_bytes)
    return figures


def read_stream_warm(bench, system):
    """The file again on a new mount; the servers have just read it."""
    if not system.has_mount:
        raise NotMeasurable("no mount of its own")
    _needs_big(system)
    system.remount()
    job = _fio(bench, system, "--rw=read", "--bs=1M")
    return Figures({"io.read_warm": job["read"]["bw_bytes"] / 1e6})


def random_reads(key, *options):
    def measure(bench, system):
        _needs_big(system)
        system.remount()
        seconds = bench.plan.random_seconds
        job = _fio(
            bench, system, "--rw=randread", "--bs=4k", f"--runtime={seconds}", "--time_based",
            *options,
        )
        figures = Figures({key: job["read"]["iops"]})
        quantiles = job["read"]["clat_ns"].get("percentile", {})
        figures.details[key] = {
            "mean_us": job["read"]["clat_ns"]["mean"] / 1000,
            "p99_us": quantiles.get("99.000000", 0) / 1000,
        }
        return figures

    return measure


def random_stage(name, key, *options):
    return Stage(name, (key,), random_reads(key, *options), _as_planned)


def _needs_big(system):
    if not (system.root / "io" / "big").exists():
        raise Failed("there is no file: writing it failed")


def _fio(bench, system, *options):
    engine = [] if any("ioengine" in option for option in options) else ["--ioengine=psync"]
    command = [
        "fio", "--name=big", f"--directory={system.root / 'io'}", "--filename=big",
        f"--size={bench.plan.stream_bytes}", "--output-format=json", "--group_reporting",
        *engine, *options,
    ]
    out = proc.run(command, seconds=180, on_stuck=system.kill_mount)
    job = json.loads(out[out.index("{"):])["jobs"][0]
    if job.get("error"):
        raise Failed(f"fio: error {job['error']}")
    return job


class _Processors:
    """Processor time of every role of a system."""

    def __init__(self, system):
        self._system = system
        self._before = self._now()

    def per_gigabyte(self, figures, prefix, size):
        gigabytes = size / 1e9
        after = self._now()
        spent = {role: (after[role] - self._before[role]) / gigabytes for role in after}
        for role in rows.ROLES[:-1]:
            if role in spent:
                figures.values[f"{prefix}.{role}"] = spent[role]
            else:
                figures.reasons[f"{prefix}.{role}"] = "no such process"
        if spent:
            figures.values[f"{prefix}.all"] = sum(spent.values())
        else:
            figures.reasons[f"{prefix}.all"] = "the kernel alone"

    def _now(self):
        return {role: proc.cpu_seconds(pid) for role, pid in self._system.roles().items()}


# A large tree --------------------------------------------------------------------------------


def tree(bench, system):
    """Unpacks a tree with its git repository and asks git about it."""
    if bench.tree is None:
        raise NotMeasurable(bench.no_tree)
    figures = Figures()
    at = system.root / "tree"
    at.mkdir()
    try:
        unpack = ["tar", "-x", "--no-same-owner", "-f", bench.tree["tar"], "-C", at]
        _timed(figures, "tree.untar", bench, system, unpack)
        status = ["git", "-C", at, "status", "--porcelain"]
        _timed(figures, "tree.status_first", bench, system, status)
        _timed(figures, "tree.status", bench, system, status)
        if system.has_mount:
            system.remount()
            _timed(figures, "tree.status_new", bench, system, status)
        else:
            figures.reasons["tree.status_new"] = "no mount of its own"
        _timed(figures, "tree.remove", bench, system, ["rm", "-r", at])
    except Failed as error:
        # What was measured before stays.
        for row in ("untar", "status_first", "status", "status_new", "remove"):
            if f"tree.{row}" not in figures.values:
                figures.reasons.setdefault(f"tree.{row}", str(error))
    finally:
        _remove(at, system)
    return figures


def _timed(figures, key, bench, system, command):
    started = time.monotonic()
    out = proc.run(command, seconds=120, env=bench.tree["env"], on_stuck=system.kill_mount)
    figures.values[key] = time.monotonic() - started
    if out.strip() and command[0] == "git":
        first = out.strip().splitlines()[0]
        raise Failed(f"git finds the tree changed: {first}")


# A chunkserver that does not answer ------------------------------------------------------------


def cut_off(bench, system):
    """How long a read waits for its first bytes when the preferred chunkserver is stopped."""
    figures = Figures()
    directory = system.root / "cold"
    directory.mkdir(exist_ok=True)
    files = [directory / f"f{i}" for i in range(5)]
    for i, path in enumerate(files):
        path.write_bytes(bytes([i + 1]) * (1 << 20))
    proc.run(["sync", *files], seconds=60, on_stuck=system.kill_mount)
    system.remount()
    # The first read makes the connections; the second is one on a mount at work.
    _first_byte(files[0], 30)
    figures.values["cut.undisturbed"] = _first_byte(files[1], 30)
    try:
        system.cut_off()
    except NotMeasurable as reason:
        figures.reasons.update(dict.fromkeys(_CUT_OFF, str(reason)))
        _remove(directory, system)
        return figures
    try:
        _cut_off_reads(bench, system, figures, files[2:])
    finally:
        system.restore()
        _remove(directory, system)
    return figures


_CUT_OFF = ("cut.first", "cut.second", "cut.later")


def _cut_off_reads(bench, system, figures, files):
    for key, path in zip(_CUT_OFF, files):
        if key == "cut.later":
            time.sleep(3)
        if not _cut_off_read(bench, system, figures, key, path):
            for later in _CUT_OFF:
                if later not in figures.values:
                    figures.reasons.setdefault(later, "the read before it did not end")
            return


def _cut_off_read(bench, system, figures, key, path):
    """Times one read; False when it did not come to an end before the server was let go on."""
    limit = bench.plan.cut_off_seconds
    try:
        figures.values[key] = _first_byte(path, limit, on_stuck=system.restore)
        return True
    except Failed as error:
        hung = "did not end" in str(error)
        figures.reasons[key] = f"no byte within {limit} s" if hung else str(error)
        return not hung


def _first_byte(path, seconds, on_stuck=None):
    """Milliseconds from open to the first 4 KiB, past the page cache."""
    program = Path(__file__).with_name("firstbyte.py")
    return float(proc.run([sys.executable, program, path], seconds=seconds, on_stuck=on_stuck))


# Memory and disk per file ----------------------------------------------------------------------


def footprint(bench, system):
    """Many files in one directory: memory and disk they take, on a system that has nothing else."""
    plan, figures = bench.plan, Figures()
    at = system.root / "many"
    memory = _metadata_memory(system)
    count = _fill(bench, system, at, figures)
    figures.details["footprint_files"] = count
    memory_after = _metadata_memory(system)
    if memory is None:
        figures.reasons["memory.metadata"] = "no metadata process"
    else:
        figures.values["memory.metadata"] = (memory_after - memory) / count
        figures.details["metadata_bytes"] = {"before": memory, "after": memory_after}
    if system.roles():
        figures.values["memory.mount"] = proc.resident_bytes(system.mount_pid()) / 1e6
    else:
        figures.reasons["memory.mount"] = "no mount of its own"
    if memory is None:
        for row in ("store.dump", "store.directory", "store.data"):
            figures.reasons[row] = "no store of its own"
        return figures
    figures.values["store.data"] = _stored(system)
    figures.values["store.dump"] = system.stop_and_dump() / count
    figures.details["store_files"] = proc.files_below(system.store())
    figures.values["store.directory"] = proc.allocated_bytes(system.store()) / count
    return figures


def _metadata_memory(system):
    """Bytes of the metadata process, or None when there is none."""
    try:
        return proc.resident_bytes(system.metadata_pid())
    except NotMeasurable:
        return None


def _fill(bench, system, at, figures):
    """Creates the files; in a large run in steps, looking at each size."""
    plan = bench.plan
    sizes = plan.directory_sizes if plan.large else (plan.footprint_files,)
    done = 0
    for size in sizes:
        words = ["--flat", "--threads", 1, "--first", done, "--files", size - done]
        seconds = 60 + (size - done) // 50
        out = proc.run([bench.fsload, at, *words, "create"], seconds, on_stuck=system.kill_mount)
        made = json.loads(out)["phases"]["create"]
        done = size
        if plan.large:
            figures.values[f"large.create.{size}"] = made["per_second"]
            words = ["--flat", "--threads", 1, "--files", 5000, "--of", size, "--limit", 20]
            out = proc.run([bench.fsload, at, *words, "sample"], 120, on_stuck=system.kill_mount)
            looked = json.loads(out)["phases"]["sample"]
            figures.values[f"large.stat.{size}"] = looked["per_second"]
    return done


def _stored(system):
    """Bytes the chunkservers' disks hold for each byte of a file."""
    size = 64 << 20
    before = sum(proc.allocated_bytes(d) for d in system.data_directories())
    block = bytes(range(256)) * 4096
    with open(system.root / "stored", "wb") as file:
        for _ in range(size // len(block)):
            file.write(block)
    proc.run(["sync", system.root / "stored"], seconds=60, on_stuck=system.kill_mount)
    proc.settle(system.directory)
    return (sum(proc.allocated_bytes(d) for d in system.data_directories()) - before) / size


def _remove(directory, system):
    """Removes what a stage made; what hangs is ended with its mount."""
    if not os.path.lexists(directory):
        return
    try:
        proc.run(["rm", "-rf", directory], seconds=120, on_stuck=system.kill_mount)
    except Failed as error:
        system.incidents.append(f"remove {directory.name}: {error}")


def clean(system):
    """Removes what is left of a failed stage, before the next begins."""
    for name in ("load", "tree", "cold"):
        _remove(system.root / name, system)


def _as_planned(plan):
    return plan.repetitions


def _once(_):
    return 1


def _keys(words, suffix):
    return tuple(f"{word}.{suffix}" for word in words.split())


_LOAD = "create write stat stat_new readdir rename unlink"
_DIRECT = "--direct=1"
_QUEUE = ("--iodepth=16", "--ioengine=libaio")

ALL = (
    Stage("footprint", ("memory.", "store.", "large."), footprint, _once, fresh=True),
    Stage("metadata-1", _keys(_LOAD, 1), metadata(1), _as_planned),
    Stage("metadata-8", _keys(_LOAD, 8), metadata(8), _as_planned),
    Stage("write", ("io.write", "cpu_write."), write_stream, _as_planned),
    Stage("read-cold", ("io.read_cold", "cpu_read."), read_stream_cold, _as_planned),
    Stage("read-warm", ("io.read_warm",), read_stream_warm, _as_planned),
    random_stage("random-buffered", "io.random_4", "--numjobs=4"),
    random_stage("random-qd1", "io.random_qd1", _DIRECT),
    random_stage("random-qd16", "io.random_qd16", _DIRECT, *_QUEUE),
    Stage("tree", ("tree.",), tree, _as_planned),
    Stage("cut-off", ("cut.",), cut_off, _as_planned),
)
