"""What a person reads while the cluster goes up and down, and how failures are told."""

import subprocess
import sys
import time

START = time.monotonic()


class Failure(Exception):
    """Something a person has to know about; the text says what to do."""


def say(text: str) -> None:
    # One write: several threads speak.
    sys.stderr.write(f"[{time.monotonic() - START:5.1f}s] {text}\n")


def run(*command: object, stdin: str | None = None, check: bool = True) -> str:
    """Runs a command and returns what it printed; a failure carries what it said."""
    words = [str(word) for word in command]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True)
    if check and done.returncode != 0:
        raise Failure(f"{' '.join(words)}\n{(done.stderr or done.stdout).strip()}")
    return done.stdout


def wait_until(what: str, seconds: float, condition, hint: str = "") -> None:
    """Looks until `condition` holds. The deadline is there to fail, not to wait for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Failure(f"not in {seconds:.0f} s: {what}" + (f"; see {hint}" if hint else ""))
        time.sleep(0.1)
