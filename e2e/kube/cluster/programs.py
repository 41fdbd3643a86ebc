"""The Kubernetes programs: built once by programs/build.sh, found again by their sources' hash."""

import subprocess
from pathlib import Path

from .say import Failure

BUILD = Path(__file__).parent.parent / "programs/build.sh"


def ensure() -> Path:
    """The directory with bin/ and crds/; builds what is missing and says so."""
    done = subprocess.run([BUILD], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise Failure("the Kubernetes programs were not built; what went wrong stands above")
    return Path(done.stdout.strip())
