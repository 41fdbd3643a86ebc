"""MooseFS from Debian's packages, in a network namespace that ends with its last process."""

import os
import re
import signal
from pathlib import Path

import proc
from proc import Failed
from systems import System

ADDRESS = "10.78.0.1"
# Where the master listens for mounts.
PORT = 9421


class MooseFS(System):
    """A master, two chunkservers labelled A and B, a class with a copy on each, a mount for A."""

    name = "moosefs"
    title = "MooseFS"

    def __init__(self, directory):
        super().__init__(directory)
        self._holder = None
        self._servers = {}

    def _start(self):
        if os.geteuid() != 0:
            raise Failed("a network namespace needs root")
        self._make_namespace()
        self._write_configuration()
        self._servers["metadata"] = self._server("mfsmaster", self.directory / "master.cfg")
        proc.wait_until(self._master_listens, 30, "starting mfsmaster")
        for role, letter in (("near chunkserver", "a"), ("far chunkserver", "b")):
            configuration = self.directory / f"cs{letter}.cfg"
            self._servers[role] = self._server("mfschunkserver", configuration)
        self.mount()
        self._make_class()

    def _stop(self):
        # Chunkservers first, the master last: it writes its metadata file when it ends.
        for role in ("near chunkserver", "far chunkserver", "metadata"):
            proc.end(self._servers.get(role), seconds=60)
        proc.end(self._holder)

    def _make_namespace(self):
        # Chunkservers at a loopback address are refused, so the namespace's own loopback device
        # has another address as well.
        script = f"ip link set lo up && ip addr add {ADDRESS}/32 dev lo && exec sleep infinity"
        log = self.log / "namespace.log"
        self._holder = proc.start(["unshare", "--net", "sh", "-c", script], log)

        def has_address():
            if self._holder.poll() is not None:
                raise Failed(f"no network namespace: {proc.last_line(log)}")
            out = proc.run(["nsenter", "-t", self._holder.pid, "-n", "ip", "addr"], seconds=10)
            return ADDRESS in out

        proc.wait_until(has_address, 10, "making a network namespace")

    def _inside(self, *words):
        return ["nsenter", "-t", str(self._holder.pid), "-n", *words]

    def _write_configuration(self):
        at = self.directory
        meta = at / "meta"
        meta.mkdir()
        # A new installation's metadata file.
        (meta / "metadata.mfs").write_bytes(b"MFSM NEW")
        (at / "exports.cfg").write_text("* / rw,alldirs,admin,maproot=0:0\n")
        (at / "topology.cfg").write_text("")
        # Its processes would give themselves the highest priority, before those that make the
        # load and those of the other systems.
        common = "WORKING_USER = root\nWORKING_GROUP = root\nNICE_LEVEL = 0\n"
        (at / "master.cfg").write_text(
            f"{common}DATA_PATH = {meta}\n"
            f"EXPORTS_FILENAME = {at}/exports.cfg\nTOPOLOGY_FILENAME = {at}/topology.cfg\n"
            f"MATOML_LISTEN_HOST = {ADDRESS}\nMATOCS_LISTEN_HOST = {ADDRESS}\n"
            f"MATOCL_LISTEN_HOST = {ADDRESS}\n"
        )
        for letter, port in (("a", 9422), ("b", 9522)):
            (at / f"data{letter}").mkdir()
            (at / f"state{letter}").mkdir()
            (at / f"hdd{letter}.cfg").write_text(f"{at}/data{letter}\n")
            (at / f"cs{letter}.cfg").write_text(
                f"{common}DATA_PATH = {at}/state{letter}\nHDD_CONF_FILENAME = {at}/hdd{letter}.cfg\n"
                f"MASTER_HOST = {ADDRESS}\nCSSERV_LISTEN_HOST = {ADDRESS}\n"
                f"CSSERV_LISTEN_PORT = {port}\nLABELS = {letter.upper()}\n"
            )

    def _server(self, program, configuration):
        log = self.log / f"{configuration.stem}.log"
        return proc.start(self._inside(program, "-f", "-c", str(configuration), "start"), log)

    def _master_listens(self):
        master = self._servers["metadata"]
        if master.poll() is not None:
            raise Failed(f"mfsmaster did not start: {self.said('master')}")
        # State 0A is LISTEN; the table is that of the process's own namespace.
        sockets = Path(f"/proc/{master.pid}/net/tcp").read_text().splitlines()[1:]
        fields = [line.split() for line in sockets]
        return any(f[1].endswith(f":{PORT:04X}") and f[3] == "0A" for f in fields)

    def _mount_command(self):
        options = ["-o", "mfspreflabels=A,mfsnice=0"]
        return self._inside("mfsmount", str(self.root), "-f", "-H", ADDRESS, *options), None

    def _make_class(self):
        """Gives the root a class with a copy at A and one at B, and sees that it is kept."""
        make = self._inside("mfsscadmin", "create", "-K", "A,B", "twozones")
        proc.run(make, cwd=self.root, seconds=30)
        proc.run(self._inside("mfssetsclass", "twozones", str(self.root)), seconds=30)
        # A file that is removed is removed, as in the other systems.
        proc.run(self._inside("mfssettrashtime", "0", str(self.root)), seconds=30)
        self._wait_for_two_copies()

    def _wait_for_two_copies(self):
        """Waits until a new file gets a copy on each chunkserver."""
        proc.wait_until(self._gets_two_copies, 60, "getting two copies of a new file")

    def _gets_two_copies(self):
        probe = self.root / "probe"
        try:
            with open(probe, "wb", buffering=0) as file:
                file.write(b"x" * 4096)
                os.fsync(file.fileno())
            out = proc.run(self._inside("mfsfileinfo", str(probe)), seconds=30)
            return len(re.findall(rf"{re.escape(ADDRESS)}:9[45]22", out)) == 2
        except OSError:
            # No chunkserver has come yet.
            return False
        finally:
            probe.unlink(missing_ok=True)

    def roles(self):
        return {"mount": self.mount_pid(), **{r: p.pid for r, p in self._servers.items()}}

    def metadata_pid(self):
        return self._servers["metadata"].pid

    def store(self):
        return self.directory / "meta"

    def stop_and_dump(self):
        # The master writes its metadata file when it ends.
        self.stop()
        return (self.store() / "metadata.mfs").stat().st_size

    def data_directories(self):
        return [self.directory / "dataa", self.directory / "datab"]

    def cut_off(self):
        os.kill(self._servers["near chunkserver"].pid, signal.SIGSTOP)

    def restore(self):
        os.kill(self._servers["near chunkserver"].pid, signal.SIGCONT)
        self._wait_for_two_copies()
