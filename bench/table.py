#!/usr/bin/env python3
"""Prints a run as a table for a Markdown page: bench/table.py [RUN.json]."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

from report import number  # noqa: E402

LATEST = Path(__file__).resolve().parent / "results" / "latest.json"


def main():
    run = json.loads(Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else LATEST.read_text())
    systems = run["systems"]
    others = [system for system in systems if system["name"] != "hither"]
    head = ["work", *(system["title"] for system in systems)]
    head += [f"Hither / {system['title']}" for system in others]
    print(line(head))
    print(line(["---"] * len(head)))
    for row in run["rows"]:
        cells = [f"{row['title']} ({row['unit']})" if row["unit"] else row["title"]]
        cells += [figure(row["values"][system["name"]]) for system in systems]
        cells += [ratio(row["hither_over"].get(system["name"])) for system in others]
        print(line(cells))


def line(cells):
    return "| " + " | ".join(cells) + " |"


def figure(value):
    return number(value["median"]) if "median" in value else "-"


def ratio(value):
    return f"{value:.2f}" if value is not None else "-"


if __name__ == "__main__":
    main()
