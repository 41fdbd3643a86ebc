"""A long-running program of a machine: started, looked at, ended."""

import subprocess
from pathlib import Path

from .machine import RunningMachine, open_log
from .say import say, wait_until


class Program:
    """One long-running program of a machine. Its pid is one of the machine's own namespace."""

    def __init__(self, host: RunningMachine, name: str):
        self.host = host
        self.name = name

    @property
    def log(self) -> Path:
        return self.host.state.log / self.host.machine.name / f"{self.name}.log"

    @property
    def pid(self) -> int | None:
        return self.look()[0]

    @property
    def condition(self) -> str:
        """One word for a person."""
        pid, state = self.look()
        return "DOWN" if pid is None else "stopped" if state == "T" else "up"

    def look(self) -> tuple[int | None, str]:
        """Process id and state letter; no id when the program does not run."""
        if self.host.pid is None:
            return None, ""
        root = self.host.root
        try:
            pid = int((root / f"run/kube/{self.name}.pid").read_text())
            state, comm = stat_of(root / f"proc/{pid}/stat")
        except (OSError, ValueError):
            return None, ""
        return (pid, state) if state not in "ZX" and comm == self.name[:15] else (None, "")

    def start(self, *arguments: object) -> None:
        say(f"{self.host.machine.name}: starting {self.name}")
        log = open_log(self.host.state, self.host.machine, self.name)
        note = f'echo $$ >/run/kube/{self.name}.pid; exec "$@"'
        words = self.host.enter("setsid", "--fork", "sh", "-c", note, "sh", self.name, *arguments)
        subprocess.run(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
        what = f"{self.name} runs on {self.host.machine.name}"
        wait_until(what, 10, lambda: self.pid is not None, str(self.log))

    def kill(self, name: str = "KILL") -> None:
        pid = self.pid
        if pid is not None:
            self.host.run("kill", f"-{name}", pid)

    def end(self) -> None:
        """Asks the program to end and waits for it."""
        self.kill("TERM")
        wait_until(f"{self.name} ended on {self.host.machine.name}", 20, lambda: self.pid is None)


def stat_of(path: Path) -> tuple[str, str]:
    """State and command name of a process by its stat file."""
    before, after = path.read_text().rsplit(")", 1)
    return after.split()[0], before.split("(", 1)[1]
