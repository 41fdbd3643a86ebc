"""Pods that write and read all the time, while something is done to the cluster."""

import threading
from typing import TYPE_CHECKING

from cluster.say import Failure, wait_until

if TYPE_CHECKING:
    from .scenario import Scenario

# Files a pod writes in turn.
FILES = 4


class Load:
    """In each pod: writes a file, makes it stable, reads it back by its checksum, and again. The
    first error ends a pod's load, and counts."""

    def __init__(self, scenario: "Scenario", pods: list[str]):
        self.scenario = scenario
        self.rounds = {pod: 0 for pod in pods}
        self.failures: list[str] = []
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.work, args=(pod,)) for pod in pods]

    def __enter__(self) -> "Load":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        if kind is None:
            self.without_error()

    def work(self, pod: str) -> None:
        while not self.stop.is_set():
            name = f"/data/{pod}-{self.rounds[pod] % FILES}"
            try:
                self.scenario.sh(
                    pod, f"dd if=/dev/urandom of={name}.new bs=256k count=8 2>/dev/null"
                         f" && sync {name}.new && sha256sum <{name}.new >{name}.sum.new"
                         f" && mv {name}.new {name} && mv {name}.sum.new {name}.sum"
                         f" && {same(name)}")
                self.rounds[pod] += 1
            except Failure as failure:
                self.failures.append(f"{pod}: {failure}")
                return

    def without_error(self) -> None:
        if self.failures:
            raise Failure(f"expected no error: {self.failures}")

    def until_more(self, more: int, seconds: float = 100) -> None:
        """Waits until each pod has done so many rounds more."""
        goal = {pod: count + more for pod, count in self.rounds.items()}
        wait_until(f"{more} more rounds of each pod", seconds,
                   lambda: self.failures or all(self.rounds[p] >= goal[p] for p in goal))
        self.without_error()

    def verify(self, pod: str) -> None:
        """Reads in `pod` what all have written; after the end of the load."""
        for writer, rounds in self.rounds.items():
            for number in range(min(FILES, rounds)):
                self.scenario.sh(pod, same(f"/data/{writer}-{number}"))


def same(name: str) -> str:
    """A shell command that fails when a file is not what its checksum says."""
    return f'test "$(sha256sum <{name})" = "$(cat {name}.sum)"'
