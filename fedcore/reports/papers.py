"""The papers' figures, preset by preset, and the same figures measured on records beside them."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from statistics import fmean
from typing import Any

from pandas import DataFrame

from fedcore.experiment.changes import Change, other_figures, said
from fedcore.experiment.results import Record
from fedcore.reports import statistics as stats
from fedcore.reports.statistics import Difference, Statistic, difference

HOLD = 5
"""The rounds over which one mean curve must be above another to have crossed it; one round may be chance."""

ACCURACY, POINTS = ", accuracy %", ", points"
RECOVERY, CROSSING = ": rounds to recover", ": rounds until the loss is lower"
"""The kinds of figure, as they follow the label of an algorithm or a pair."""
FORMATS = {ACCURACY: ".2f", POINTS: "+g"}


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

    def sized_source(self) -> str:
        """Return the source with its numbers of rounds and seeds.

        >>> Figures("A 2020, Table 1", rounds=200, seeds=3).sized_source()
        'A 2020, Table 1; 200 rounds, 3 seeds'
        """
        sizes = {"rounds": self.rounds, "seeds": self.seeds}
        size = ", ".join(f"{count} {name}" for name, count in sizes.items() if count)
        return f"{self.source}; {size}" if size else self.source

    def expected(self, records: Sequence[Record], changed: Iterable[Change]) -> tuple[int, int]:
        """Return the paper's rounds and seeds; where it does not print them, those of the preset."""
        preset = {change.key: change.was for change in changed}
        asked = max((record.header.rounds for record in records), default=0)
        return self.rounds or preset.get("rounds", asked), self.seeds or len(preset.get("seeds", ()))


@dataclass(frozen=True)
class Line:
    """One figure of a paper beside ours.

    Attributes:
        label: the algorithm, or the pair of them ("B - A").
        kind: of figure, ``ACCURACY`` and so on.
        expected: the paper's; None for a claim that the difference is positive.
        here: the mean over our seeds, in the paper's unit; None where a seed has no value.
        spread: the deviation, the interval or the single seeds.
        values: one for each seed; None where the seed never gets there.
    """

    label: str
    kind: str
    expected: float | None
    here: float | None
    spread: str
    values: tuple[float | None, ...]

    @property
    def name(self) -> str:
        """The label and the kind."""
        return self.label + self.kind

    @property
    def paper(self) -> str:
        """The paper's figure as it is printed there."""
        return "> 0" if self.expected is None else f"{self.expected:{FORMATS.get(self.kind, 'g')}}"


@dataclass(frozen=True)
class Comparison:
    """The part of a report on a paper.

    Attributes:
        source: the paper, and the numbers of rounds and seeds of its figures.
        lines: its figures beside ours; empty where ours are of another experiment.
        accuracy: its accuracies in percent, by algorithm; empty where ours are of another experiment.
        short: the part of the paper's rounds and seeds that ours have, if it is less; else empty.
        withdrawn: the reason why there is no comparison; else empty.
    """

    source: str
    lines: tuple[Line, ...] = ()
    accuracy: Mapping[str, float] = field(default_factory=dict)
    short: str = ""
    withdrawn: str = ""

    @property
    def has_accuracies(self) -> bool:
        """Return whether the paper's figures are accuracies, so that ours are in this table."""
        return any(line.kind == ACCURACY for line in self.lines)

    @property
    def is_warning(self) -> bool:
        """Return whether its remark must not be overlooked."""
        return bool(self.short or self.withdrawn)

    def table(self) -> DataFrame:
        """Return a table with a row for each figure."""
        rows = [
            (line.name, line.paper, Statistic(line.here).text(), line.spread, str(len(line.values)))
            for line in self.lines
        ]
        here = "here, CUT SHORT" if self.short else "here"
        return stats.frame(("figure", "paper", here, "spread", "seeds"), rows)

    def remark(self) -> str:
        """Return the sentences below the table, or in its place."""
        return self.withdrawn or f"{self.source}." + (f" CUT SHORT here: {self.short}." if self.short else "")


def figures(preset: str) -> Figures | None:
    """Return the figures of a paper for a preset, or None.

    >>> figures("mimic/table3-tau20").accuracy["MimiC"]
    75.89
    """
    found = _papers().get(preset)
    return None if found is None else Figures(**found)


def comparison(records: Sequence[Record], changed: Iterable[Change]) -> Comparison | None:
    """Return the figures of a paper beside those of an experiment's records; None if no paper has figures of it.

    Args:
        records: of one experiment, as ``read_folder`` returns them: at least one.
        changed: the changes of the experiment from the preset of its name.
    """
    paper = figures(records[0].header.preset)
    if paper is None:
        return None
    source, changed = paper.sized_source(), tuple(changed)
    if others := other_figures(changed):
        why = f"No comparison with {source}: those figures are of another experiment (changed: {said(others)})."
        return Comparison(source, withdrawn=why)
    expected = paper.expected(records, changed)
    lines = tuple(compare(records, paper, expected))
    return Comparison(source, lines, paper.accuracy, lacking(records, expected)) if lines else None


def compare(records: Sequence[Record], paper: Figures, expected: tuple[int, int] = (0, 0)) -> list[Line]:
    """Return each figure of the paper that the records have too.

    Args:
        records: of one experiment.
        paper: its figures.
        expected: rounds and seeds of a full run; the verdict on a claim names a shorter one.
    """
    groups, lines = stats.by_algorithm(records), []
    for label, value in paper.accuracy.items():
        if label in groups:
            ours = Statistic.of(values := percents(groups[label]))
            spread = "" if ours.deviation is None else f"± {ours.deviation:.1f}"
            lines.append(Line(label, ACCURACY, value, ours.mean, spread, values))
    for pair, gain in paper.gain.items():
        found = difference(records, *pair.split(" - "))
        lines.append(_gain(found, gain, found.interval_text()))
    for label, count in paper.recovery.items():
        own = [record for record in groups.get(label, ()) if paper.shift - 1 in stats.accuracies(record)]
        lines.append(_counted(label, RECOVERY, count, [recovery(record, paper.shift) for record in own]))
    for pair, count in paper.crossing.items():
        lower, higher = ({r.header.seed: stats.losses(r) for r in groups.get(label, ())} for label in pair.split(" - "))
        counts = [crossing(higher[seed], lower[seed], paper.shift) for seed in lower if seed in higher]
        lines.append(_counted(pair, CROSSING, count, counts))
    for claim in paper.better:
        found = difference(records, *claim.split(" - "))
        if found.values:
            of, over = ([r for r in groups[label] if r.rounds] for label in claim.split(" - "))
            both = {r.header.seed for r in of} & {r.header.seed for r in over}
            short = lacking([r for r in (*of, *over) if r.header.seed in both], expected)
            lines.append(_gain(found, None, f"{found.interval_text()}: {verdict(found, short)}"))
    return lines


def percents(records: Iterable[Record]) -> tuple[float, ...]:
    """Return the results of trials in percent, without trials that were not evaluated."""
    return tuple(100 * value for value in map(stats.final, records) if value is not None)


def recovery(record: Record, shift: int) -> int | None:
    """Return the rounds from a shift until the accuracy is that of the round before it; None if it never is, or if
    that round was not evaluated.
    """
    curve = stats.accuracies(record)
    before = curve.get(shift - 1)
    if before is None:
        return None
    return next((round - shift + 1 for round in sorted(curve) if round >= shift and curve[round] >= before), None)


def crossing(above: Mapping[int, float], below: Mapping[int, float], shift: int) -> int | None:
    """Return the rounds from a shift until one curve is above the other over ``HOLD`` evaluated rounds, or None."""
    shared = [round for round in sorted(above) if round in below and round >= shift]
    for place in range(len(shared) - HOLD + 1):
        if fmean(above[round] - below[round] for round in shared[place : place + HOLD]) > 0:
            return shared[place] - shift + 1
    return None


def verdict(found: Difference, short: str = "") -> str:
    """Return whether the interval shows a claim that a difference is positive, and in how short a run.

    >>> verdict(Difference("A", "B", (0.02, 0.021, 0.019)))
    'shown'
    >>> verdict(Difference("A", "B", (0.02, 0.021, 0.019)), "15 of 500 rounds")
    'shown in 15 of 500 rounds'
    """
    ends = found.interval
    if ends is None or ends[0] <= 0 <= ends[1]:
        return "open"
    return ("shown" if ends[0] > 0 else "contradicted") + (f" in {short}" if short else "")


def lacking(records: Sequence[Record], expected: tuple[int, int]) -> str:
    """Return the rounds and seeds of the records that are fewer than expected: ``10 of 200 rounds``."""
    begun = [record for record in records if record.rounds]
    rounds = min((len(record.rounds) for record in begun), default=0)
    counts = {"rounds": rounds, "seeds": len({record.header.seed for record in begun})}
    here = zip(counts.items(), expected, strict=True)
    return ", ".join(f"{count} of {due} {name}" for (name, count), due in here if count < due)


def _gain(found: Difference, paper: float | None, spread: str) -> Line:
    values = tuple(100 * value for value in found.values)
    mean = None if found.mean is None else 100 * found.mean
    return Line(f"{found.of} - {found.over}", POINTS, paper, mean, spread, values)


def _counted(label: str, kind: str, paper: int, counts: Sequence[int | None]) -> Line:
    known = [count for count in counts if count is not None]
    spread = f"seeds: {', '.join('never' if count is None else str(count) for count in counts)}" if counts else ""
    mean = fmean(known) if known and len(known) == len(counts) else None
    return Line(label, kind, paper, mean, spread, tuple(counts))


@cache
def _papers() -> dict[str, dict[str, Any]]:
    file = resources.files("fedcore.reports") / "papers.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))
