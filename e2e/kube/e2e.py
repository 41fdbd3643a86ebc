#!/usr/bin/env python3
"""Installs Hither by its chart and plays every scenario; `kube up` and the images come before.

  e2e.py [NAME …]     only these scenarios (--list names them)
  e2e.py --keep       leave Hither installed

A scenario that fails leaves logs, events and objects in HITHER_E2E_ARTIFACTS
(default /var/tmp/hither-e2e/NAME).
"""

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from cluster import collect
from cluster.say import Failure, say
from scenarios import (
    classes, clusters, faults, metadata, nodes, reading, removal, serving, topology, upgrade, volumes,
)
from scenarios.installation import Installation
from scenarios.scenario import Scenario

SCENARIOS: list[type[Scenario]] = [
    reading.OwnZone,
    volumes.Expansion,
    volumes.FullVolume,
    volumes.OneWriter,
    volumes.Deletion,
    serving.PluginKilled,
    serving.MounterEnds,
    serving.ControllerRestarted,
    faults.KubeletRestarted,
    faults.PartOfVolume,
    faults.TaintedNode,
    faults.NodesForbidden,
    reading.ZoneLoss,
    nodes.ZoneRelabelled,
    classes.ClassChange,
    nodes.Drain,
    volumes.ManyClaims,
    topology.PinnedToZone,
    upgrade.RollingUpgrade,
    clusters.TwoClusters,
    clusters.EtcdStore,
    upgrade.EtcdUpgrade,
    metadata.MetadataMemberLost,
    removal.ClusterInUse,
    # Helm takes a release whose uninstall was refused for one that is going: nothing comes after it.
    removal.UninstallGuard,
]


class TooLong(Failure):
    """A scenario's time is over."""


def out_of_time(_signal: int, _frame: object) -> None:
    raise TooLong("the scenario's time is over")


def play(scenario: Scenario) -> bool:
    """Runs one and cleans up after it; whether both went well."""
    say(f"-- {scenario.title()}")
    begun = time.monotonic()
    ran = succeeds(scenario, lambda: timed(scenario))
    ended = time.monotonic()
    clean = succeeds(scenario, scenario.clean)
    if ran and clean:
        say(f"ok ({ended - begun:.0f} s, and {time.monotonic() - ended:.0f} s to clean up)")
    return ran and clean


def timed(scenario: Scenario) -> None:
    scenario.begin()
    signal.alarm(scenario.seconds)
    try:
        scenario.run()
    finally:
        signal.alarm(0)


def succeeds(scenario: Scenario, step: Callable[[], None]) -> bool:
    """Does a step; when it fails, says why and keeps the evidence."""
    try:
        step()
        return True
    except Exception as error:
        if not isinstance(error, Failure):
            traceback.print_exc()
        say(f"FAILED: {error}")
        keep_evidence(scenario)
        return False


def keep_evidence(scenario: Scenario) -> None:
    root = Path(os.environ.get("HITHER_E2E_ARTIFACTS", "/var/tmp/hither-e2e"))
    folder = root / type(scenario).__name__
    try:
        collect.collect(scenario.there.state, scenario.kubectl, folder)
        say(f"logs, events and objects: {folder}")
    except Exception as error:
        say(f"nothing was collected: {error}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    known = {scenario.__name__: scenario for scenario in SCENARIOS}
    if options.list:
        print("\n".join(f"{name}: {scenario.title()}" for name, scenario in known.items()))
        return 0
    unknown = [name for name in options.names if name not in known]
    if unknown:
        raise Failure(f"no scenario is named {', '.join(unknown)}; --list names them")
    chosen = [known[name] for name in options.names] or SCENARIOS
    signal.signal(signal.SIGALRM, out_of_time)
    there = Installation()
    there.install()
    failed, skipped = [], 0
    for scenario in chosen:
        if scenario.needs_own_cluster and not there.own:
            say(f"-- {scenario.title()}: left out, it takes links down")
            skipped += 1
        elif not play(scenario(there)):
            failed.append(scenario.__name__)
    if not options.keep:
        there.uninstall()
    if failed:
        say(f"failed: {', '.join(failed)}")
    print(f"{len(chosen) - len(failed) - skipped} passed, {len(failed)} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        sys.exit(f"e2e: {failure}\n0 passed, 1 failed")
    except KeyboardInterrupt:
        sys.exit(130)
