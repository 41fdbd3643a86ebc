"""Brings image archives to a registry, for a cluster that somebody brought along."""

import os
import subprocess
from pathlib import Path

from . import images, packages
from .oci import described
from .say import Failure, say

VARIABLE = "HITHER_REGISTRY"


def registry() -> str:
    """The registry, with a path if there is one, from which the given cluster's nodes pull."""
    given = os.environ.get(VARIABLE)
    if not given:
        raise Failure(f"KUBECONFIG is set: set {VARIABLE} to a registry its nodes can pull from")
    return given


def push(archive: Path) -> str:
    """Pushes by skopeo, which knows the logins of the container engines; returns the name."""
    packages.ensure({"skopeo": "skopeo"})
    name = images.reference(described(archive)[0], registry())
    say(f"pushing {name}")
    command = ["skopeo", "copy", "--quiet", f"oci-archive:{archive}", f"docker://{name}"]
    if os.environ.get("HITHER_REGISTRY_PLAIN"):
        command.append("--dest-tls-verify=false")
    if subprocess.run(command).returncode != 0:
        raise Failure(f"could not push {name}; a login may be missing (skopeo login)")
    return name
