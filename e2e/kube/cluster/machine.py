"""A machine: a set of namespaces that lives and dies with one process, its init."""

import os
import signal
import subprocess
from pathlib import Path

from .layout import Machine, State
from .say import Failure, wait_until

INIT = Path(__file__).with_name("machine-init.sh")
PATH = "/opt/kube/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class RunningMachine:
    """Starts, ends and enters one machine. Safe to make for a machine that does not run."""

    def __init__(self, state: State, machine: Machine):
        self.state = state
        self.machine = machine
        self.home = state.machine(machine)
        self.record = self.home / "init"

    @property
    def pid(self) -> int | None:
        """The init's process id on the host, if that very process still runs."""
        try:
            pid, started = self.record.read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return int(pid) if start_time(int(pid)) == started else None

    @property
    def root(self) -> Path:
        """The machine's root directory, seen from the host."""
        return Path(f"/proc/{self.required_pid()}/root")

    def required_pid(self) -> int:
        pid = self.pid
        if pid is None:
            raise Failure(f"{self.machine.name} does not run; `make kube-up` starts it")
        return pid

    def start(self, programs: Path) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        log = open_log(self.state, self.machine, "machine")
        parent = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child",
             "--net", "--uts", "--ipc", "--", INIT, self.machine.name, self.home, programs],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
        )
        hint = log.name
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")

        def init_exists() -> bool:
            if parent.poll() is not None:
                raise Failure(f"{self.machine.name} did not start; see {hint}")
            return bool(children.read_text().strip())

        wait_until(f"{self.machine.name} has a first process", 10, init_exists, hint)
        pid = int(children.read_text().split()[0])
        self.record.write_text(f"{pid} {start_time(pid)}\n")

        def ready() -> bool:
            if parent.poll() is not None:
                raise Failure(f"{self.machine.name} ended at once; see {hint}")
            return Path(f"/proc/{pid}/root/run/kube/machine-ready").exists()

        wait_until(f"{self.machine.name} has its mounts", 20, ready, hint)

    def kill(self) -> None:
        """Like a power cut: every process, mount and interface of the machine ends."""
        pid = self.pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            wait_until(f"{self.machine.name} is gone", 30, lambda: self.pid is None)

    def enter(self, *command: object) -> list[str]:
        """The command line that runs `command` inside the machine."""
        namespaces = ("--mount", "--pid", "--net", "--uts", "--ipc")
        target = ["nsenter", f"--target={self.required_pid()}", *namespaces, "--"]
        return [*target, "env", f"PATH={PATH}", "HOME=/root", *(str(word) for word in command)]

    def run(self, *command: object, check: bool = True, stdin=None) -> str:
        done = subprocess.run(
            self.enter(*command), stdin=stdin or subprocess.DEVNULL, capture_output=True, text=True
        )
        if check and done.returncode != 0:
            text = (done.stderr or done.stdout).strip()
            raise Failure(f"on {self.machine.name}: {' '.join(map(str, command))}\n{text}")
        return done.stdout

    def succeeds(self, *command: object) -> bool:
        done = subprocess.run(self.enter(*command), stdin=subprocess.DEVNULL, capture_output=True)
        return done.returncode == 0

    def write(self, path: str, text: str) -> None:
        """Writes a file of the machine; the path is one on the machine.

        A file that is right is left alone: kube-proxy ends when its configuration is written.
        """
        target = self.root / path.lstrip("/")
        if target.exists() and target.read_text() == text:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def signal_all(self, name: str) -> None:
        """Sends a signal to all processes of the machine but its init."""
        self.run("sh", "-c", f"kill -{name} -1")


def open_log(state: State, machine: Machine, name: str):
    path = state.log / machine.name / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "ab", buffering=0)


def start_time(pid: int) -> str | None:
    """What tells a process from a later one of the same id; None when there is none."""
    try:
        after = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if after[0] in "ZX" else after[19]
