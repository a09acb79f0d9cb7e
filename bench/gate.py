"""Fail if a ratio has fallen below what bench/gate.toml allows: ``python -m bench.gate [--short]``.

The status is 0 if every bound is kept, 1 if one is not, and 3 if nothing can be said: other programs, or the
hypervisor's other guests, took more than a tenth of the cores.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.alone import ROOT
from bench.line import Line

ALLOWED = Path(__file__).with_name("gate.toml")


NOT_JUDGED = 3


class DisturbedError(Exception):
    """The machine was not quiet."""


@dataclass(frozen=True)
class Bound:
    """The least that one ratio may be.

    Attributes:
        bench: pytest's name of the benchmark.
        against: the rival or floor.
        least: the ratio.
    """

    bench: str
    against: str
    least: float


def bounds(text, *, short):
    """What gate.toml says; in the short form only the lines that have a bound for it."""
    entry = "short" if short else "least"
    return [Bound(line["bench"], line["against"], line[entry]) for line in tomllib.loads(text)["line"] if entry in line]


def measure(bounds, *, short):
    """Run the benchmarks that the bounds name; (bench, rival) -> ratio, without those that failed."""
    benches = dict.fromkeys(bound.bench for bound in bounds)
    rivals = dict.fromkeys(bound.against for bound in bounds)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ratios.json"
        options = ["--short" if short else "--in-turn-only", *(f"--against={rival}" for rival in rivals)]
        subprocess.run([sys.executable, "-m", "pytest", *benches, *options, f"--benchmark-json={file}"], cwd=ROOT)
        found = json.loads(file.read_text())["benchmarks"] if file.exists() else []
    lines = {bench["fullname"]: Line(**bench["extra_info"]["line"]) for bench in found}
    if disturbed := [line for line in lines.values() if line.is_disturbed]:
        raise DisturbedError(f"other programs took {disturbed[0].others:.0%} of the cores during {disturbed[0].title}")
    return {(name, against): ratio for name, line in lines.items() for against, ratio in line.ratios.items()}


def judge(allowed, measure):
    """Measure all lines, and those that fell short once more: the second figure counts.

    Args:
        allowed: the bounds.
        measure: bounds -> the ratios, by benchmark and rival, that it finds.

    Returns:
        For each bound its figures, one or two, None where a benchmark gave none; and the bounds that were not kept.
    """
    figures = {bound: [] for bound in allowed}
    wanting = list(allowed)
    for _ in range(2):
        if not wanting:
            break
        ratios = measure(wanting)
        for bound in wanting:
            figures[bound].append(ratios.get((bound.bench, bound.against)))
        wanting = [bound for bound in wanting if not _keeps(figures[bound][-1], bound)]
    return figures, wanting


def _keeps(ratio, bound):
    return ratio is not None and ratio >= bound.least


def report(figures, wanting):
    """All lines and their figures, in a table."""
    table = Table(title="the other's time / fedcore's: what it is, and the least that it may be")
    for column in ("line", "against", "least", "ratio", "again", ""):
        table.add_column(column, justify="right" if column in ("least", "ratio", "again") else "left")
    for bound, ratios in figures.items():
        shown = ["no figure" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        name = bound.bench.split("::")[1]
        verdict = "falls short" if bound in wanting else ""
        table.add_row(name, bound.against, f"{bound.least:.2f}", *shown, *[""] * (2 - len(shown)), verdict)
    Console(width=140, markup=False, highlight=False).print(table)


def run(text, measure, *, short):
    """The gate's exit status."""
    try:
        figures, wanting = judge(bounds(text, short=short), partial(measure, short=short))
    except DisturbedError as error:
        print(f"not judged: {error}")
        return NOT_JUDGED
    report(figures, wanting)
    return 1 if wanting else 0


def main():
    unknown = set(sys.argv[1:]) - {"--short"}
    if unknown:
        raise SystemExit(f"expected --short or nothing, got {' '.join(sorted(unknown))}")
    raise SystemExit(run(ALLOWED.read_text(), measure, short="--short" in sys.argv))


if __name__ == "__main__":
    main()
