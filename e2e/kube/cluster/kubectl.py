"""kubectl against the cluster under test."""

import json
import os
from pathlib import Path

from .say import run


class Kubectl:
    """Runs kubectl with one kubeconfig; without one, with what the environment says.

    Waiting is done by `kubectl wait`, which watches.
    """

    def __init__(self, program: Path, kubeconfig: Path | None):
        self.command = [program, *([f"--kubeconfig={kubeconfig}"] if kubeconfig else [])]

    def __call__(self, *arguments: object, stdin: str | None = None, check: bool = True) -> str:
        return run(*self.command, *arguments, stdin=stdin, check=check)

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


def given_kubeconfig(own: Path) -> str | None:
    """KUBECONFIG when it names a cluster that somebody brought along, not the one made here."""
    given = os.environ.get("KUBECONFIG")
    return given if given and given != str(own) else None
