"""Fail if a ratio is below its bound in bench/gate.toml: ``python -m bench.gate [--short]``.

The exit status is 0 if all ratios meet their bounds, and 1 if a ratio does not. It is 3 without a valid measurement,
because other programs or other virtual machines used more than a tenth of the cores.
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
    """Other programs used too much of the machine for a valid measurement."""


@dataclass(frozen=True)
class Bound:
    """The lower bound of a ratio.

    Attributes:
        bench: the benchmark's name in pytest.
        against: the rival or floor.
        least: the lower bound.
    """

    bench: str
    against: str
    least: float


def bounds(text, *, short):
    """Return the bounds of gate.toml; with ``short`` only the lines with a short bound."""
    entry = "short" if short else "least"
    return [Bound(line["bench"], line["against"], line[entry]) for line in tomllib.loads(text)["line"] if entry in line]


def measure(bounds, *, short):
    """Run the benchmarks of the bounds, and return the ratio of each (bench, rival) that passed."""
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
    """Measure all lines, and measure those below their bounds again; the second measurement counts.

    Args:
        allowed: the bounds.
        measure: a function from bounds to ratios by benchmark and rival.

    Returns:
        The one or two ratios of each bound (None without a result), and the bounds that were not met.
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
    """Return a table of all bounds and their ratios."""
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
    """Return the gate's exit status."""
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
