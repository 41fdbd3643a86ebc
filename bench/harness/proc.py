"""Processes, mounts and directories: starting, watching and ending them."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """Something that should have worked did not. The text is one line for the report."""


class NotMeasurable(Exception):
    """A figure that this system or machine cannot give. The text says why."""


def run(command, seconds=60, cwd=None, env=None, on_stuck=None, stdin=None):
    """Runs a command to its end and returns its standard output.

    After `seconds` it is killed. A process that waits for a file system cannot be killed before
    that answers, so `on_stuck` is called first and has to end the file system.
    """
    started = subprocess.Popen(
        [str(word) for word in command],
        stdin=stdin or subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env=env,
        text=True,
        errors="replace",
    )
    try:
        out, err = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        started.kill()
        if on_stuck is not None:
            on_stuck()
        started.communicate()
        raise Failed(f"{Path(command[0]).name} did not end within {seconds:.0f} s") from None
    except BaseException:
        started.kill()
        raise
    if started.returncode != 0:
        said = (err.strip() or out.strip() or "no message").splitlines()[-1]
        raise Failed(f"{Path(command[0]).name} ended with {started.returncode}: {said}")
    return out


def start(command, log, env=None):
    """Starts a process that stays, in a session of its own: Ctrl-C does not reach it."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=True,
        )


def end(process, seconds=20):
    """Ends a process that `start` returned."""
    if process is None or process.poll() is not None:
        return
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=seconds)


def last_line(log):
    """The last line of a log, for an error message."""
    try:
        lines = Path(log).read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "its log is empty"


def wait_until(true, seconds, what):
    """Polls until `true()`; raises Failed after `seconds`."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise Failed(f"{what} took more than {seconds:.0f} s")
        time.sleep(0.02)


def stat_fields(pid):
    """Fields of /proc/PID/stat after the name, or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def start_time(pid):
    """Tells a process from a later one with the same id."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def cpu_seconds(pid):
    """User and system time of all threads of a process, in seconds."""
    fields = stat_fields(pid)
    if fields is None:
        raise Failed(f"process {pid} is gone")
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_bytes(pid):
    """Memory a process has in RAM."""
    fields = stat_fields(pid)
    if fields is None:
        raise Failed(f"process {pid} is gone")
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def kill_if_same(pid, started):
    """Kills a process unless its id now belongs to another."""
    if start_time(pid) == started:
        os.kill(pid, signal.SIGKILL)


def mounts_below(directory):
    """Mount points in or at a directory, innermost first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4].encode().decode("unicode_escape")
        if point == str(directory) or point.startswith(f"{directory}/"):
            found.append(point)
    return sorted(found, key=len, reverse=True)


def is_mounted(directory):
    return str(directory) in mounts_below(directory)


def unmount(directory, seconds=60):
    """Unmounts, at last lazily. Raises Failed when an orderly unmount was not possible."""
    if not is_mounted(directory):
        return
    umount = ["umount"] if os.geteuid() == 0 else ["fusermount3", "-u"]
    try:
        run([*umount, directory], seconds=seconds)
    except Failed:
        if not is_mounted(directory):
            # It went by itself at the same time.
            return
        lazy = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
        try:
            run([*lazy, directory], seconds=10)
        except Failed:
            pass
        raise


def allocated_bytes(directory):
    """Blocks on disk of all files below a directory."""
    total = 0
    for where, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_blocks * 512
            except FileNotFoundError:
                pass
    return total


def files_below(directory):
    """Bytes on disk of each file below a directory."""
    return {
        str(path.relative_to(directory)): path.lstat().st_blocks * 512
        for path in sorted(Path(directory).rglob("*"))
        if path.is_file()
    }


def settle(directory):
    """Writes out what the file system of a directory still holds in memory."""
    run(["sync", "-f", directory], seconds=120)


def drop_caches(directory, what=3):
    """Empties the kernel's caches: 1 pages, 2 names and inodes, 3 both."""
    if os.geteuid() != 0:
        raise NotMeasurable("emptying the kernel's caches needs root")
    settle(directory)
    try:
        Path("/proc/sys/vm/drop_caches").write_text(f"{what}\n")
    except OSError as error:
        raise NotMeasurable(f"the kernel's caches cannot be emptied here: {error}") from error


def remove_tree(directory):
    """Removes a directory, unless something is still mounted in it."""
    left = mounts_below(directory)
    if left:
        raise Failed(f"{left[0]} is still mounted: {directory} was not removed")
    shutil.rmtree(directory, ignore_errors=True)
