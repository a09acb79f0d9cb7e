"""The papers' own figures, preset by preset, and how each kind of them is measured on records."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from statistics import fmean
from typing import Any

from fedcore.experiment.records import Record
from fedcore.reports.paired import Difference, difference
from fedcore.reports.summary import Statistic, accuracies, final, losses

HOLD = 5
"""Rounds over whose mean one curve must be above another to have crossed it; one round alone may be chance."""

ACCURACY, POINTS = ", accuracy %", ", points"
RECOVERY, CROSSING = ": rounds to recover", ": rounds until the loss is lower"
"""The kinds of figure, as they follow the label of what they are of."""


@dataclass(frozen=True)
class Figures:
    """The figures of a paper for one preset; see ``papers.toml``."""

    source: str
    rounds: int | None = None
    seeds: int | None = None
    shift: int = 0
    accuracy: Mapping[str, float] = field(default_factory=dict)
    gain: Mapping[str, float] = field(default_factory=dict)
    recovery: Mapping[str, int] = field(default_factory=dict)
    crossing: Mapping[str, int] = field(default_factory=dict)
    better: Sequence[str] = ()


@dataclass(frozen=True)
class Line:
    """One figure of a paper beside ours.

    Attributes:
        label: the algorithm, or the pair of them ("B - A").
        kind: of figure, ``ACCURACY`` and so on.
        paper: the paper's, as it is printed there; empty for a claim without one.
        here: the mean over our seeds, in the paper's unit; None where no seed has it.
        spread: how sure that is, in words.
        values: one a seed, None where it never comes to that.
    """

    label: str
    kind: str
    paper: str
    here: float | None
    spread: str
    values: tuple[float | None, ...]

    @property
    def what(self) -> str:
        """The figure's meaning, in words."""
        return self.label + self.kind

    @property
    def seeds(self) -> int:
        """The number of our seeds."""
        return len(self.values)


def figures(preset: str) -> Figures | None:
    """The figures of a paper for a preset, or None.

    >>> figures("mimic/table3-tau20").accuracy["MimiC"]
    75.89
    """
    found = _papers().get(preset)
    return None if found is None else Figures(**found)


def compare(records: Sequence[Record], paper: Figures, due: tuple[int, int] = (0, 0)) -> list[Line]:
    """Every figure of the paper that the records can be held to, beside the records' own.

    Args:
        records: of one experiment.
        paper: what the paper says of it.
        due: rounds and seeds that there should be, for what is said of a claim where there are fewer.
    """
    labels = {record.header.algorithm for record in records}
    lines = [_accuracy(records, label, value) for label, value in paper.accuracy.items() if label in labels]
    for pair, gain in paper.gain.items():
        found = difference(records, *_pair(pair))
        lines.append(_gain(found, f"{gain:+g}", interval(found)))
    for label, count in paper.recovery.items():
        own = [record for record in records if record.header.algorithm == label]
        took = [recovery(record, paper.shift) for record in own if paper.shift - 1 in accuracies(record)]
        lines.append(_counted(label, RECOVERY, count, took))
    for pair, count in paper.crossing.items():
        lines.append(_counted(pair, CROSSING, count, _crossings(records, pair, paper.shift)))
    for claim in paper.better:
        found = difference(records, *_pair(claim))
        if found.values:
            said = verdict(found, lacking(_paired(records, *_pair(claim)), due))
            lines.append(_gain(found, "> 0", f"{interval(found)}: {said}"))
    return lines


def percents(records: Sequence[Record], label: str) -> tuple[float, ...]:
    """An algorithm's results in percent, one a seed that has any evaluated round."""
    values = [final(record) for record in records if record.header.algorithm == label]
    return tuple(100 * value for value in values if value is not None)


def recovery(record: Record, shift: int) -> int | None:
    """Rounds from a shift on until the accuracy is again what it was in the round before it; None if it never is, or if
    that round was not evaluated.
    """
    curve = accuracies(record)
    before = curve.get(shift - 1)
    if before is None:
        return None
    return next((round - shift + 1 for round in sorted(curve) if round >= shift and curve[round] >= before), None)


def crossing(above: Mapping[int, float], below: Mapping[int, float], shift: int) -> int | None:
    """Rounds from a shift on until one curve is above the other over ``HOLD`` evaluated rounds; None if it never is."""
    shared = [round for round in sorted(above) if round in below and round >= shift]
    for place in range(len(shared) - HOLD + 1):
        if fmean(above[round] - below[round] for round in shared[place : place + HOLD]) > 0:
            return shared[place] - shift + 1
    return None


def interval(found: Difference) -> str:
    """``95 %: +1.0 .. +3.2``, in points.

    >>> interval(Difference("A", "B", (0.02, 0.02, 0.02)))
    '95 %: +2.0 .. +2.0'
    """
    ends = found.interval
    if ends is None:
        return "one seed" if found.values else "no seed"
    return f"95 %: {100 * ends[0]:+.1f} .. {100 * ends[1]:+.1f}"


def verdict(found: Difference, short: str = "") -> str:
    """Tell whether a difference that is claimed to be positive is, as far as the interval says, and in how short a run.

    >>> verdict(Difference("A", "B", (0.02, 0.021, 0.019)))
    'shown'
    >>> verdict(Difference("A", "B", (0.02, 0.021, 0.019)), "15 of 500 rounds")
    'shown in 15 of 500 rounds'
    """
    ends = found.interval
    if ends is None or ends[0] <= 0 <= ends[1]:
        return "open"
    return ("shown" if ends[0] > 0 else "contradicted") + (f" in {short}" if short else "")


def lacking(records: Sequence[Record], due: tuple[int, int]) -> str:
    """Of how many of the rounds and seeds that are due the records are, where there are fewer: ``10 of 200 rounds``."""
    rounds = min((len(record.rounds) for record in records if record.rounds), default=0)
    seeds = len({record.header.seed for record in records if record.rounds})
    words = [f"{rounds} of {due[0]} rounds"] if rounds < due[0] else []
    return ", ".join([*words, *([f"{seeds} of {due[1]} seeds"] if seeds < due[1] else [])])


def _paired(records: Sequence[Record], of: str, over: str) -> list[Record]:
    """The records of two algorithms, of the seeds that both have."""
    own = [record for record in records if record.rounds and record.header.algorithm in (of, over)]
    both = set.intersection(*({r.header.seed for r in own if r.header.algorithm == label} for label in (of, over)))
    return [record for record in own if record.header.seed in both]


def _accuracy(records: Sequence[Record], label: str, paper: float) -> Line:
    values = percents(records, label)
    ours = Statistic.of(values)
    spread = "" if ours.deviation is None else f"± {ours.deviation:.1f}"
    return Line(label, ACCURACY, f"{paper:.2f}", ours.mean, spread, values)


def _gain(found: Difference, paper: str, spread: str) -> Line:
    mean = None if found.mean is None else 100 * found.mean
    values = tuple(100 * value for value in found.values)
    return Line(f"{found.of} - {found.over}", POINTS, paper, mean, spread, values)


def _crossings(records: Sequence[Record], pair: str, shift: int) -> list[int | None]:
    lower, higher = ({r.header.seed: losses(r) for r in records if r.header.algorithm == x} for x in _pair(pair))
    return [crossing(higher[seed], lower[seed], shift) for seed in lower if seed in higher]


def _counted(label: str, kind: str, paper: int, counts: Sequence[int | None]) -> Line:
    came = [count for count in counts if count is not None]
    spread = f"seeds: {', '.join('never' if count is None else str(count) for count in counts)}" if counts else ""
    mean = fmean(came) if came and len(came) == len(counts) else None
    return Line(label, kind, str(paper), mean, spread, tuple(counts))


def _pair(text: str) -> tuple[str, str]:
    of, _, over = text.partition(" - ")
    return of, over


@cache
def _papers() -> dict[str, dict[str, Any]]:
    file = resources.files("fedcore.reports") / "papers.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))
