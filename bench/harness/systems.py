"""The systems under test: how each is started, mounted anew, cut off and ended."""

import json
import os
from pathlib import Path

import proc
from proc import Failed, NotMeasurable


class System:
    """A file system under test. `root` is where the load works.

    Whoever makes one calls `start`, and `stop` in every case, whatever `start` did.
    """

    name = ""
    title = ""
    # Whether pages can be dropped above the servers while the servers keep theirs.
    has_mount = True

    def __init__(self, directory):
        self.directory = Path(directory)
        self.root = self.directory / "mnt"
        self.log = self.directory / "log"
        # What went wrong beside the measurements, for the report.
        self.incidents = []
        self._mount = None

    def start(self):
        self.root.mkdir(parents=True)
        self.log.mkdir()
        self._start()

    def stop(self):
        """Ends everything in an orderly way; the directory stays."""
        try:
            self.unmount()
        finally:
            self._stop()

    def remount(self):
        """A new mount: nothing that the old one knew is left."""
        self.unmount()
        self.mount()

    def ready(self):
        """Mounts again if the mount has ended by itself."""
        if self._mount is not None and self._mount.poll() is not None:
            how = self._mount.returncode
            self.incidents.append(f"the mount ended by itself ({how}): {self.said('mount')}")
            self.remount()

    def kill_mount(self):
        """Ends the mount when something hangs in it: waiting calls get an error."""
        if self._mount is not None and self._mount.poll() is None:
            self.incidents.append("the mount hung and was killed")
            self._mount.kill()
            self._mount.wait(timeout=20)
        proc.unmount(self.root, seconds=10)

    def mount(self):
        command, env = self._mount_command()
        self._mount = proc.start(command, self.log / "mount.log", env=env)
        proc.wait_until(self._mount_stands, 30, f"mounting {self.name}")

    def unmount(self):
        mount, self._mount = self._mount, None
        if mount is None:
            return
        try:
            proc.unmount(self.root)
            mount.wait(timeout=60)
        except Exception as error:
            self.incidents.append(f"unmount: {error}")
        finally:
            proc.end(mount)

    def said(self, log):
        return proc.last_line(self.log / f"{log}.log")

    def mount_pid(self):
        return self._mount.pid

    def roles(self):
        """Process ids by role."""
        return {"mount": self.mount_pid()}

    def metadata_pid(self):
        raise NotMeasurable("no metadata process")

    def store(self):
        """The directory the metadata is in."""
        raise NotMeasurable("no store of its own")

    def stop_and_dump(self):
        """Stops, and says how many bytes all metadata has when it is written out."""
        raise NotMeasurable("no store of its own")

    def data_directories(self):
        """Where the servers keep the bytes of files."""
        return []

    def cut_off(self):
        """Stops the chunkserver the mount prefers."""
        raise NotMeasurable("no chunkservers")

    def restore(self):
        """Undoes `cut_off` and waits until the server serves again."""

    def _mount_stands(self):
        if self._mount.poll() is not None:
            raise Failed(f"the mount did not start: {self.said('mount')}")
        return proc.is_mounted(self.root)

    def _mount_command(self):
        raise NotImplementedError

    def _start(self):
        raise NotImplementedError

    def _stop(self):
        pass


class Disk(System):
    """The file system of the disk itself."""

    name = "disk"
    title = "the disk's own file system"
    has_mount = False

    def _start(self):
        pass

    def remount(self):
        pass

    def unmount(self):
        pass

    def roles(self):
        return {}


class Bindfs(System):
    """Bare FUSE: a directory of the same disk, shown again by a process."""

    name = "bindfs"
    title = "bare FUSE (bindfs)"

    def _start(self):
        (self.directory / "backing").mkdir()
        self.mount()

    def _mount_command(self):
        backing = self.directory / "backing"
        return ["bindfs", "-f", "--multithreaded", backing, self.root], None


class Hither(System):
    """Two zones, one chunkserver in each, a copy of every chunk on both."""

    name = "hither"
    title = "Hither"
    program = None

    def __init__(self, directory):
        super().__init__(directory)
        self.playground = self.directory / "playground"
        self._cluster = None
        self._processes = []

    def _start(self):
        out = self._hither(
            "playground", "up", "--json", "--zones", "a,b", "--chunkservers-per-zone", "1",
            "--class", "zone=a,zone=b", "--dir", self.playground, seconds=90,
        )
        state = json.loads(out[out.index("{"):])
        self._cluster = state["cluster"]
        self._processes = state["processes"]
        self.mount()

    def _stop(self):
        if not self.playground.exists():
            return
        if not self._processes:
            # `up` failed half way: what it started stands in its own list.
            listed = self.playground / "playground.json"
            if listed.exists():
                self._processes = json.loads(listed.read_text())["processes"]
        try:
            self._hither("playground", "down", "--dir", self.playground, seconds=90)
        except Failed as error:
            self.incidents.append(f"playground down: {error}")
        for process in self._processes:
            if process["pid"] and proc.start_time(process["pid"]) == process["started"]:
                self.incidents.append(f"{process['name']} did not end and was killed")
                proc.kill_if_same(process["pid"], process["started"])

    def _mount_command(self):
        mount = ["mount", "--foreground", self._cluster, self.root, "-o", "preflabels=zone=a"]
        return [self.program, *mount], None

    def _hither(self, *words, seconds=30):
        return proc.run([self.program, *words], seconds=seconds)

    def _pid(self, name):
        for process in self._processes:
            if process["name"] == name:
                return process["pid"]
        raise Failed(f"the playground has no {name}")

    def roles(self):
        return {
            "mount": self.mount_pid(),
            "metadata": self._pid("manager"),
            "near chunkserver": self._pid("cs-a1"),
            "far chunkserver": self._pid("cs-b1"),
        }

    def metadata_pid(self):
        return self._pid("manager")

    def store(self):
        return self.playground / "meta"

    def stop_and_dump(self):
        dump = self.directory / "dump"
        self._hither("--cluster", self._cluster, "meta", "dump", dump, seconds=120)
        self.stop()
        return dump.stat().st_size

    def data_directories(self):
        return [self.playground / "cs-a1", self.playground / "cs-b1"]

    def cut_off(self):
        self._hither("playground", "pause", "cs-a1", "--dir", self.playground)

    def restore(self):
        self._hither("playground", "resume", "cs-a1", "--dir", self.playground)
        proc.wait_until(self._all_up, 60, "the paused chunkserver's return")

    def _all_up(self):
        out = self._hither("--cluster", self._cluster, "--json", "cs", "ls")
        servers = json.loads(out[out.index("["):])
        return len(servers) == 2 and all(server["state"] == "up" for server in servers)


def version(command):
    """The first line a program says about its version, or why there is none."""
    try:
        out = proc.run(command, seconds=10, env={**os.environ, "LC_ALL": "C"})
    except (Failed, OSError) as error:
        return f"unknown ({error})"
    return (out.strip().splitlines() or ["unknown"])[0]
