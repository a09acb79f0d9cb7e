"""Make the README's tables from the JSON of runs: ``python -m bench.table [--into README] FILES``."""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from bench.line import ALONE, OURS, Line, milliseconds, number
from bench.machine import head
from bench.markdown import put_into, table

LEVELS = ("baseline", "avx2", "avx512")
BEGIN = "<!-- made by python -m bench.table: begin -->"
COLUMNS = ("line", "ms", "GB/s", "against", "time / fedcore's", "quartiles", "alone", "after a pause", "target", "met")


class Entry(NamedTuple):
    """A line, with its file and machine."""

    bench: str
    machine: dict
    line: Line


def read(files):
    """Return the newest entry of each benchmark and level, sorted by the benchmarks' names."""
    newest = {}
    for file in files:
        run = json.loads(Path(file).read_text())
        for found in run["benchmarks"]:
            entry = Entry(found["fullname"], run["machine_info"], Line(**found["extra_info"]["line"]))
            key = entry.bench, entry.machine["isa"]
            if key not in newest or newest[key][0] < run["datetime"]:
                newest[key] = run["datetime"], entry
    return [newest[key][1] for key in sorted(newest)]


def markdown(entries):
    """Return the machines, the lines at their best measured level, and a comparison of levels, as Markdown.

    Lines in the short form are omitted, since they are for the gate.
    """
    entries = [entry for entry in entries if not entry.line.short]
    if not entries:
        raise SystemExit("expected at least one line of full size, got none")
    best = {}
    for entry in sorted(entries, key=lambda entry: LEVELS.index(entry.machine["isa"])):
        best[entry.bench] = entry
    machines = "\n\n".join(dict.fromkeys(head(best[bench].machine) for bench in sorted(best)))
    parts = [machines, lines_table([best[bench] for bench in sorted(best)])]
    if len({entry.machine["isa"] for entry in entries}) > 1:
        parts.append(levels_table(entries))
    if any(entry.line.is_disturbed for entry in entries):
        parts.append("(*) Other programs took a part of the cores meanwhile: no figure to quote.")
    return "\n\n".join(parts)


def lines_table(entries):
    """Return a table with a row per line and rival."""
    rows = []
    for _, _, line in entries:
        took = line.seconds.get(OURS)
        ours = [
            line.title + " (*)" * line.is_disturbed,
            "" if took is None else milliseconds(took),
            "" if took is None or line.bytes is None else f"{line.bytes / took / 1e9:.1f}",
        ]
        for name in [name for name in line.ratios if not name.endswith(ALONE)]:
            low, high = line.quartiles.get(name, (None, None))
            rows.append(
                [
                    *ours,
                    name,
                    number(line.ratios[name]),
                    "" if low is None else f"{number(low)}-{number(high)}",
                    number(line.ratios.get(name + ALONE)),
                    number(line.after_pause.get(name)),
                    number(line.targets.get(name)),
                    line.met(name, name + ALONE),
                ]
            )
            ours = ["", "", ""]
    return table(COLUMNS, rows)


def levels_table(entries):
    """Return the ratios of the lines that were measured at several levels, with a column per level."""
    levels = [level for level in LEVELS if any(entry.machine["isa"] == level for entry in entries)]
    at = {}
    for entry in entries:
        at.setdefault(entry.bench, {})[entry.machine["isa"]] = entry.line
    rows = []
    for _, lines in sorted(at.items()):
        if len(lines) < 2:
            continue
        shown = next(lines[level] for level in reversed(levels) if level in lines)
        title = shown.title + " (*)" * any(line.is_disturbed for line in lines.values())
        for name in [name for name in shown.ratios if not name.endswith(ALONE)]:
            ratios = [number(lines[level].ratios.get(name)) if level in lines else "" for level in levels]
            rows.append([title, name, *ratios])
            title = ""
    return table(("line", "against", *levels), rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, metavar="README", help="replace the tables there instead of printing")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILES", help="JSON of runs: build/bench/*.json")
    chosen = parser.parse_args()
    text = markdown(read(chosen.files))
    if chosen.into:
        put_into(chosen.into, text, BEGIN)
    else:
        print(text)


if __name__ == "__main__":
    main()
