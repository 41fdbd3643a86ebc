"""What comes out: figures by row, ratios, the table for people and the JSON for programs."""

import json
from statistics import median

import rows


class Results:
    """Everything that was measured, by row and system."""

    def __init__(self, table, systems):
        self.rows = list(table)
        self.systems = systems
        self._values = {}
        self._reasons = {}
        self._failed = set()
        self.details = []

    def add(self, stage, repetition, system, figures):
        for key, value in figures.values.items():
            self._values.setdefault((key, system), {})[repetition] = value
        for key, reason in figures.reasons.items():
            self._reasons.setdefault((key, system), reason)
        if figures.details:
            at = {"stage": stage, "repetition": repetition, "system": system}
            self.details.append({**at, **figures.details})

    def explain(self, prefixes, system, reason, failed):
        """Says why the rows of a stage have no figure on a system."""
        for row in self.rows:
            if row.key.startswith(prefixes):
                self._reasons.setdefault((row.key, system), reason)
                if failed:
                    self._failed.add((row.key, system))

    def value(self, key, system):
        found = self._values.get((key, system))
        return median(found.values()) if found else None

    def reason(self, key, system):
        return self._reasons.get((key, system), "not measured in this run")

    def failures(self, system):
        return sorted(key for key, name in self._failed if name == system)

    def ratio(self, key, other):
        """Hither's figure over the other's: median of the repetitions both have."""
        ours = self._values.get((key, "hither"), {})
        theirs = self._values.get((key, other), {})
        pairs = [ours[n] / theirs[n] for n in ours if theirs.get(n)]
        return median(pairs) if pairs else None

    def is_known(self, row):
        """Whether any system has anything to say in a row."""
        return any(
            (row.key, system) in self._values or (row.key, system) in self._reasons
            for system in self.systems
        )

    def as_json(self):
        return [self._row_as_json(row) for row in self.rows if self.is_known(row)]

    def _row_as_json(self, row):
        values = {}
        for system in self.systems:
            found = self._values.get((row.key, system))
            if found:
                values[system] = {"median": median(found.values()), "all": list(found.values())}
            else:
                values[system] = {"reason": self.reason(row.key, system)}
        over = {o: self.ratio(row.key, o) for o in self.systems if o != "hither"}
        return {
            "key": row.key,
            "title": row.title,
            "unit": row.unit,
            "better": "more" if row.more else "less",
            "values": values,
            "hither_over": over,
        }


def better_by(row, ratio):
    """How many times as good as the other Hither is, from its figure over the other's."""
    if not ratio:
        return None
    return ratio if row.more else 1 / ratio


def as_text(results, markdown=False):
    """The table, and below it why cells are empty."""
    others = [name for name in results.systems if name != "hither"]
    with_ratio = others if "hither" in results.systems else []
    header = ["", "unit", *results.systems, *(f"x {name}" for name in with_ratio)]
    notes = _Notes()
    lines = [header]
    for row in results.rows:
        if results.is_known(row):
            lines.append(_line(results, row, with_ratio, notes))
    text = _markdown(lines) if markdown else _aligned(lines)
    explanation = "x NAME: how many times as good as NAME Hither is (for costs the inverse ratio)."
    return "\n".join([text, "", explanation if with_ratio else "", *notes.lines()])


def _line(results, row, others, notes):
    cells = [row.title, row.unit]
    for system in results.systems:
        value = results.value(row.key, system)
        if value is None:
            cells.append(notes.mark(results.reason(row.key, system)))
        else:
            cells.append(number(value))
    for other in others:
        by = better_by(row, results.ratio(row.key, other))
        cells.append("" if by is None else f"{by:.2f}")
    return cells


class _Notes:
    """Footnotes: each reason once."""

    def __init__(self):
        self._reasons = []

    def mark(self, reason):
        if reason not in self._reasons:
            self._reasons.append(reason)
        return f"({self._reasons.index(reason) + 1})"

    def lines(self):
        return [f"({n}) {reason}" for n, reason in enumerate(self._reasons, 1)]


def number(value):
    """Three digits that mean something."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}"


def _aligned(lines):
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    out = []
    for line in lines:
        left = [cell.ljust(widths[n]) for n, cell in enumerate(line[:2])]
        right = [cell.rjust(widths[n + 2]) for n, cell in enumerate(line[2:])]
        out.append("  ".join(left + right).rstrip())
    out.insert(1, "-" * max(len(line) for line in out))
    return "\n".join(out)


def _markdown(lines):
    out = ["| " + " | ".join(line) + " |" for line in lines]
    out.insert(1, "|" + "|".join([" --- "] * 2 + [" ---: "] * (len(lines[0]) - 2)) + "|")
    return "\n".join(out)


def from_json(report):
    """Results as they were when a report was written."""
    table = [
        rows.Row(r["key"], r["title"], r["unit"], r["better"] == "more") for r in report["rows"]
    ]
    results = Results(table, [system["name"] for system in report["systems"]])
    for row in report["rows"]:
        for system, value in row["values"].items():
            if "all" in value:
                results._values[(row["key"], system)] = dict(enumerate(value["all"]))
            else:
                results._reasons[(row["key"], system)] = value["reason"]
    return results


def write(path, report):
    """Writes the JSON so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".new")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.rename(path)
