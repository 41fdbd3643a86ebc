"""Runs the benchmarks: python3 bench/harness --fsload PROGRAM PATH_TO_HITHER."""

import argparse
import datetime
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import machine
import plan as plans
import proc
import report
import rows
import stages
import systems
import tree
from moosefs import MooseFS
from proc import Failed, NotMeasurable

HERE = Path(__file__).resolve().parent
LATEST = HERE.parent / "results" / "latest.json"


def main():
    args = _arguments()
    if args.list:
        print("\n".join(stage.name for stage in stages.ALL))
        return 0
    systems.Hither.program = Path(args.hither).resolve()
    with_peers = os.environ.get("PEERS", "0") == "1"
    chosen = _chosen_systems(with_peers)
    plan = plans.from_environment(with_peers)
    for name in ("SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), _interrupt)
    with ExitStack() as cleanup:
        base = _make_base(cleanup)
        run = Run(base, plan, chosen, Path(args.fsload).resolve())
        cleanup.callback(run.end)
        finished = run.measure()
        cleanup.callback(_ignore_interrupts)
        written = run.report(finished)
        report.write(LATEST, written)
        print(_headline(written))
        print(report.as_text(run.results), flush=True)
        run.say("ending everything and removing its files")
    # What went wrong while everything ended belongs to it as well.
    report.write(LATEST, {**written, "incidents": run.incidents})
    for incident in run.incidents:
        print(f"incident: {incident}")
    print(f"\n{LATEST}: figures and ratios; bench/compare.py shows what changed between two")
    return 1 if run.results.failures("hither") or not finished else 0


class Run:
    """One run over all stages and systems."""

    def __init__(self, base, plan, chosen, fsload):
        self.base, self.plan, self.fsload = base, plan, fsload
        self.started = time.monotonic()
        self.date = datetime.datetime.now(datetime.timezone.utc)
        self.facts = machine.facts(base)
        self.clock = machine.Clock()
        self.chosen = chosen
        self.running = {}
        # Systems made for a single stage, until they have ended.
        self.fresh = []
        self.incidents = []
        self.tree = None
        self.results = report.Results([], [kind.name for kind in chosen])

    def measure(self):
        """Measures everything. Whether it came to the end of the plan."""
        only = _names("BENCH_ONLY")
        wanted = [s for s in stages.ALL if not only or s.name in only]
        tree_made, no_tree = None, "not in this run"
        if any(stage.name == "tree" for stage in wanted):
            self.say("preparing the tree")
            tree_made, no_tree = tree.prepare(self.base, self.plan.tree_files)
        self.tree = tree_made
        self.results.rows = list(rows.table(self.plan, tree_made))
        bench = stages.Bench(self.plan, self.fsload, tree_made, no_tree)
        for stage in (s for s in wanted if s.fresh):
            self._stage(bench, stage)
        self._start_all([s for s in wanted if not s.fresh])
        finished = True
        for stage in (s for s in wanted if not s.fresh):
            finished = self._stage(bench, stage) and finished
        return finished

    def end(self):
        """Ends every system; nothing of them is left."""
        for system in [*self.fresh, *self.running.values()]:
            self._end(system)
        self.fresh, self.running = [], {}

    def report(self, finished):
        """Everything of this run, for the JSON."""
        described = dict(self.tree) if self.tree else None
        if described:
            described = {key: described[key] for key in ("files", "bytes", "from")}
        return {
            "format": 1,
            "date": self.date.isoformat(timespec="seconds"),
            "minutes": (time.monotonic() - self.started) / 60,
            "finished": finished,
            "machine": {**self.facts, "processors": self.clock.shares()},
            "plan": asdict(self.plan),
            "tree": described,
            "systems": [{"name": k.name, "title": k.title} for k in self.chosen],
            "hither": systems.version([systems.Hither.program, "--version"]),
            "commit": _commit(),
            "rows": self.results.as_json(),
            "details": self.results.details,
            "incidents": self.incidents,
        }

    def _start_all(self, wanted):
        if not wanted:
            return
        for kind in self.chosen:
            system = kind(self.base / kind.name)
            self.running[kind.name] = system
            self.say(f"starting {kind.name}")
            try:
                system.start()
            except (Failed, OSError, ValueError, KeyError) as error:
                reason = f"{kind.name} did not start: {error}"
                self.say(reason)
                for stage in wanted:
                    self.results.explain(stage.prefixes, kind.name, reason, failed=True)
                self._end(system)
                del self.running[kind.name]

    def _stage(self, bench, stage):
        repetitions = stage.repetitions(self.plan)
        for repetition in range(repetitions):
            # Another system is first in each repetition.
            shift = repetition % len(self.chosen)
            for kind in self.chosen[shift:] + self.chosen[:shift]:
                if self._minutes() > self.plan.minutes:
                    reason = f"out of time after {self.plan.minutes:.0f} minutes"
                    self.results.explain(stage.prefixes, kind.name, reason, failed=False)
                    continue
                if stage.fresh:
                    self._on_fresh(bench, stage, kind)
                elif kind.name in self.running:
                    system = self.running[kind.name]
                    self._on(bench, stage, repetition, system)
        return self._minutes() <= self.plan.minutes

    def _on_fresh(self, bench, stage, kind):
        system = kind(self.base / f"{kind.name}-{stage.name}")
        self.fresh.append(system)
        try:
            system.start()
            self._on(bench, stage, 0, system)
        except (Failed, OSError, ValueError, KeyError) as error:
            self.results.explain(stage.prefixes, kind.name, f"failed: {error}", failed=True)
        finally:
            self._end(system)
            self.fresh.remove(system)

    def _on(self, bench, stage, repetition, system):
        began = time.monotonic()
        outcome = "done"
        try:
            system.ready()
            proc.settle(self.base)
            figures = stage.measure(bench, system)
            self.results.add(stage.name, repetition, system.name, figures)
        except NotMeasurable as reason:
            outcome = str(reason)
            self.results.explain(stage.prefixes, system.name, outcome, failed=False)
        except (Failed, OSError, ValueError, KeyError) as error:
            outcome = f"failed: {error}"
            self.incidents.append(f"{system.name}, {stage.name}: {error}")
            self.results.explain(stage.prefixes, system.name, outcome, failed=True)
            self._mend(system)
        took = time.monotonic() - began
        self.say(f"{stage.name} {repetition + 1} {system.name}: {outcome} in {took:.1f} s")

    def _mend(self, system):
        """Gets a system going again after a failure, or gives it up."""
        try:
            if system.has_mount and system.name in self.running:
                system.kill_mount()
                system.remount()
            stages.clean(system)
        except (Failed, OSError) as error:
            self.incidents.append(f"{system.name} does not work any more: {error}")

    def _end(self, system):
        try:
            system.stop()
        except (Failed, OSError) as error:
            self.incidents.append(f"ending {system.name}: {error}")
        self.incidents += [f"{system.name}: {text}" for text in system.incidents]
        system.incidents = []
        if os.environ.get("BENCH_KEEP_LOGS") and system.log.is_dir():
            _keep_logs(system)
        try:
            proc.remove_tree(system.directory)
        except Failed as error:
            self.incidents.append(str(error))

    def _minutes(self):
        return (time.monotonic() - self.started) / 60

    def say(self, text):
        seconds = int(time.monotonic() - self.started)
        print(f"[{seconds // 60:2}:{seconds % 60:02}] {text}", file=sys.stderr, flush=True)


def _arguments():
    parser = argparse.ArgumentParser(prog="bench/run.sh", description="see bench/run.sh")
    parser.add_argument("--fsload", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="name the stages")
    parser.add_argument("hither", nargs="?", default="hither", help="the program to measure")
    return parser.parse_args()


def _chosen_systems(with_peers):
    kinds = [systems.Disk, systems.Bindfs, systems.Hither]
    if with_peers:
        kinds.append(MooseFS)
    wanted = _names("BENCH_SYSTEMS")
    unknown = wanted - {kind.name for kind in kinds}
    if unknown:
        sys.exit(f"BENCH_SYSTEMS: there is no {', '.join(sorted(unknown))} in this run")
    return [kind for kind in kinds if not wanted or kind.name in wanted]


def _names(variable):
    return {word for word in os.environ.get(variable, "").split(",") if word}


def _make_base(cleanup):
    """A directory of our own on the disk that is measured, removed at the end."""
    parent = os.environ.get("BENCH_DIR", "/var/tmp")
    base = Path(tempfile.mkdtemp(prefix="hither-bench.", dir=parent)).resolve()

    def remove():
        try:
            proc.remove_tree(base)
        except Failed as error:
            print(f"bench: {error}", file=sys.stderr)

    cleanup.callback(remove)
    return base


def _commit():
    try:
        at = ["git", "-C", HERE]
        commit = proc.run([*at, "rev-parse", "--short=12", "HEAD"], seconds=10).strip()
        changed = proc.run([*at, "status", "--porcelain", "-uno"], seconds=20).strip()
    except (Failed, OSError):
        return "unknown"
    return f"{commit}{' with changes' if changed else ''}"


def _keep_logs(system):
    """Copies the logs of a system beside the results."""
    target = LATEST.parent / "logs" / system.directory.name
    target.mkdir(parents=True, exist_ok=True)
    for log in [*system.log.glob("*.log"), *system.directory.glob("playground/log/*.log")]:
        (target / log.name).write_bytes(log.read_bytes())


def _headline(written):
    at = written["machine"]
    disk, share = at["disk"], at["processors"]
    kinds = {True: "says it rotates", False: "says it does not rotate"}
    kind = kinds.get(disk.get("rotates"), "unknown kind")
    return (
        f"\n{written['date']}, {written['hither']} ({written['commit']}), "
        f"{written['plan']['mode']} run of {written['minutes']:.1f} minutes\n"
        f"{at['cores']} cores ({at['cpu']}), {at['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {at['kernel']}, {disk['device']} {disk.get('file_system', '')} ({kind}); "
        f"load at start {at['load_at_start']:.1f}, stolen by the host "
        f"{share['stolen'] * 100:.1f} %\n"
    )


def _interrupt(number, _):
    raise KeyboardInterrupt(signal.Signals(number).name)


def _ignore_interrupts():
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt as interrupt:
        by = str(interrupt) or "SIGINT"
        print(f"bench: ended by {by}; everything it started has ended", file=sys.stderr)
        sys.exit(130)
