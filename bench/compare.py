#!/usr/bin/env python3
"""Shows what changed between two runs: bench/compare.py OLD.json NEW.json [--all] [--system NAME].

A row is shown when a system's figure changed by more than the repetitions of either run differ
among themselves, and by more than a tenth. Figures of two runs were made at two times, perhaps on
two machines; the ratio to bindfs, which was measured beside Hither in each run, is what to trust.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

from report import better_by, number  # noqa: E402
from rows import Row  # noqa: E402

THRESHOLD = 0.10


def main():
    args = _arguments()
    old, new = (json.loads(path.read_text()) for path in (args.old, args.new))
    for name, run in (("old", old), ("new", new)):
        mode = run["plan"]["mode"]
        print(f"{name}: {run['date']}, {run['commit']}, {mode}, {run['machine']['cores']} cores")
    if old["plan"] != new["plan"]:
        print("The two runs measured with different sizes: figures may differ for that alone.")
    shown = 0
    before = {row["key"]: row for row in old["rows"]}
    for row in new["rows"]:
        line = _compare(before.get(row["key"]), row, args)
        if line:
            if not shown:
                print(f"\n{'':50} {'old':>10} {'new':>10}  better by  (beside {args.beside})")
            print(line)
            shown += 1
    if not shown:
        print("\nNothing changed by more than the repetitions differ among themselves.")


def _compare(old, new, args):
    """The line of one row, or None when there is nothing to say."""
    then = _figures(old, args.system)
    now = _figures(new, args.system)
    if not then and not now:
        return None
    title = f"{new['title']} {new['unit']}".strip()[:50]
    if not then or not now:
        said = new["values"].get(args.system, {}).get("reason", "measured now, not before")
        return f"{title:50} {said}"
    row = Row(new["key"], new["title"], new["unit"], new["better"] == "more")
    by = better_by(row, now["median"] / then["median"]) if then["median"] else None
    if by is None or (not args.all and not _is_clear(then, now)):
        return None
    ratios = [_better_beside(r, row, args) for r in (old, new)]
    beside = f"{ratios[0]:.2f} -> {ratios[1]:.2f}" if all(ratios) else ""
    figures = f"{number(then['median']):>10} {number(now['median']):>10}"
    return f"{title:50} {figures}  {by:9.2f}  {beside}"


def _figures(row, system):
    value = (row or {}).get("values", {}).get(system, {})
    return value if "median" in value else None


def _is_clear(then, now):
    apart = max(min(now["all"]) - max(then["all"]), min(then["all"]) - max(now["all"]))
    return apart > 0 and abs(now["median"] / then["median"] - 1) > THRESHOLD


def _better_beside(data, row, args):
    """How many times as good as the other system it was within one run."""
    one, other = _figures(data, args.system), _figures(data, args.beside)
    if not one or not other or not other["median"]:
        return None
    return better_by(row, one["median"] / other["median"])


def _arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--all", action="store_true", help="show rows that did not change as well")
    parser.add_argument("--system", default="hither", help="whose figures (default: hither)")
    parser.add_argument("--beside", default="bindfs", help="what to set them against")
    return parser.parse_args()


if __name__ == "__main__":
    main()
