"""How much is measured: sizes, repetitions and time."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Sizes of one run. Counts are per repetition and system."""

    mode: str
    repetitions: int
    # Files of the single thread, and of each of the eight.
    files_alone: int
    files_each: int
    # No phase of the metadata load goes on for longer, in seconds.
    phase_seconds: int
    stream_bytes: int
    random_seconds: int
    tree_files: int
    footprint_files: int
    # Longest wait for a read whose chunkserver is cut off, in seconds.
    cut_off_seconds: int
    # No measurement is begun after this many minutes.
    minutes: float
    large: bool
    # Sizes of one directory (large runs only).
    directory_sizes: tuple


def from_environment(with_peers):
    """The plan that the environment asks for."""
    quick = _is_set("BENCH_QUICK")
    large = _is_set("BENCH_LARGE")
    minutes = os.environ.get("BENCH_MINUTES")
    usual = 2 if quick else (25 if with_peers else 14)
    sizes = (10_000, 100_000, 500_000, 1_000_000, 2_000_000)
    return Plan(
        mode="quick" if quick else "full",
        repetitions=1 if quick else 3,
        files_alone=500 if quick else 2000,
        files_each=100 if quick else 750,
        phase_seconds=3 if quick else 8,
        stream_bytes=(128 if quick else 1024) << 20,
        random_seconds=1 if quick else 3,
        tree_files=1000 if quick else 10_000,
        footprint_files=5000 if quick else 50_000,
        cut_off_seconds=10 if quick else 60,
        minutes=float(minutes) if minutes else usual + (240 if large else 0),
        large=large,
        directory_sizes=(2000, 5000) if quick else sizes,
    )


def _is_set(name):
    return os.environ.get(name, "0") not in ("", "0")
