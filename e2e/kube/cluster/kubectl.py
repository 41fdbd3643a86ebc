"""kubectl against the cluster under test."""

import json
import os
from pathlib import Path

from .say import run


class Kubectl:
    """Runs kubectl with one kubeconfig. Waiting is done by `kubectl wait`, which watches."""

    def __init__(self, program: str | Path, kubeconfig: Path):
        self.program = program
        self.kubeconfig = kubeconfig

    def __call__(self, *arguments: object, stdin: str | None = None, check: bool = True) -> str:
        command = (self.program, f"--kubeconfig={self.kubeconfig}", *arguments)
        return run(*command, stdin=stdin, check=check)

    def json(self, *arguments: object) -> dict:
        return json.loads(self("get", "-o", "json", *arguments))

    def apply(self, manifests: str) -> None:
        """Server-side apply: the same a second time, and no annotation with a copy."""
        self("apply", "--server-side", "--force-conflicts", "--field-manager=hither-kube",
             "-f", "-", stdin=manifests)

    def wait(self, thing: str, condition: str, seconds: float, *more: object) -> None:
        self("wait", thing, f"--for={condition}", f"--timeout={seconds:.0f}s", *more)

    def is_ready(self) -> bool:
        return self("get", "--raw=/readyz", "--request-timeout=2s", check=False) == "ok"


def given_kubeconfig(own: Path) -> Path | None:
    """The cluster somebody brings along, unless it is the one started here."""
    given = os.environ.get("KUBECONFIG")
    return Path(given) if given and Path(given) != own else None
