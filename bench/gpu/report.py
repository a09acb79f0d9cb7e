"""Make tables from the results of `make gpu-check`: ``python -m bench.gpu.report [--into README] gpu-check.json``."""

import argparse
import json
from pathlib import Path

from bench.gpu.lines import met
from bench.markdown import put_into, table

BEGIN = "<!-- made by python -m bench.gpu.report: begin -->"
COLUMNS = ("line", "ms", "GB/s", "of the floor", "due", "against", "time / fedcore's", "target", "met")


def markdown(results):
    """Return the machine, the outcome of the steps, and a row per line and rival, as Markdown."""
    parts = ["**A rehearsal without a GPU: no figure.**"] if results["rehearsal"] else []
    for step in ("machine", "devices"):
        parts.append("\n".join(["```", *results["steps"].get(step, {}).get("said", ["unknown"]), "```"]))
    rows = []
    for step in ("bandwidth", "rounds", "clients"):
        for line in results["steps"].get(step, {}).get("found", {}).get("lines", []):
            rows += rows_of(line)
    if rows:
        parts.append(table(COLUMNS, rows))
    parts.append(steps_table(results["steps"]))
    return "\n\n".join(parts)


def rows_of(line):
    """Return the rows of a line: the first row has its own figures, and each row has one rival's."""
    said = {None: "", True: "yes", False: "no"}[met(line)]
    first = [
        line["what"],
        _number(line["seconds"] and line["seconds"] * 1e3),
        _number(line.get("GB/s")),
        _number(line.get("of the floor")),
        _number(line["due of the floor"]),
    ]
    against = [[name, _number(times), _number(line["due"].get(name))] for name, times in line["rivals"].items()]
    rows = [[*first, *rest, said] for rest in against[:1] or [["", "", ""]]]
    return [*rows, *([""] * len(first) + [*rest, ""] for rest in against[1:])]


def steps_table(steps):
    """Return a table of the steps' outcomes, with the last output of each failed step."""
    rows = []
    for name, step in steps.items():
        if step["status"] == 0:
            found = step.get("found", {})
            result = ("same bits", "different results", "ways that are wrong")
            words = {key: found[key] for key in result if key in found}
            rows.append(
                [name, f"{step['seconds']:.0f}", "well", ", ".join(f"{key}: {value}" for key, value in words.items())]
            )
        else:
            last = (step.get("log") or step.get("said") or [""])[-1]
            rows.append([name, f"{step.get('seconds', 0):.0f}", f"status {step['status']}", last])
    return table(("step", "seconds", "went", "words"), rows)


def _number(value):
    return "" if value is None else f"{value:.3g}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, metavar="README", help="replace the tables there instead of printing")
    parser.add_argument("file", type=Path, metavar="FILE", help="gpu-check.json")
    chosen = parser.parse_args()
    text = markdown(json.loads(chosen.file.read_text()))
    if chosen.into:
        put_into(chosen.into, text, BEGIN)
    else:
        print(text)


if __name__ == "__main__":
    main()
