"""The papers' results by preset, and their comparison with recorded results."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from statistics import fmean
from typing import Any

from pandas import DataFrame

from fedcore.sim.experiment.changes import Change, incomparable, text_of
from fedcore.sim.experiment.results import Record
from fedcore.sim.reports import statistics as stats
from fedcore.sim.reports.statistics import Difference, Statistic, difference

HOLD = 5
"""The number of evaluated rounds over which one curve's mean must exceed the other's to count as a crossing."""

ACCURACY, POINTS = ", accuracy %", ", points"
RECOVERY, CROSSING = ": rounds to recover", ": rounds until the loss is lower"
"""The kinds of figures, as suffixes of the label of an algorithm or of a pair of algorithms."""
FORMATS = {ACCURACY: ".2f", POINTS: "+g"}


@dataclass(frozen=True)
class Figures:
    """A paper's results for one preset; see ``papers.toml``."""

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
        """Return the source with the numbers of rounds and seeds in the paper.

        >>> Figures("A 2020, Table 1", rounds=200, seeds=3).sized_source()
        'A 2020, Table 1; 200 rounds, 3 seeds'
        """
        sizes = {"rounds": self.rounds, "seeds": self.seeds}
        size = ", ".join(f"{count} {name}" for name, count in sizes.items() if count)
        return f"{self.source}; {size}" if size else self.source

    def expected(self, records: Sequence[Record], changed: Iterable[Change]) -> tuple[int, int]:
        """Return the paper's rounds and seeds, or the preset's if the paper does not state them."""
        preset = {change.key: change.was for change in changed}
        longest = max((record.header.rounds for record in records), default=0)
        return self.rounds or preset.get("rounds", longest), self.seeds or len(preset.get("seeds", ()))


@dataclass(frozen=True)
class Line:
    """A figure of a paper, and the same figure from the records.

    Attributes:
        label: the algorithm, or a pair of algorithms ("B - A").
        kind: ``ACCURACY``, ``POINTS``, ``RECOVERY`` or ``CROSSING``.
        expected: the paper's figure; None for a claim that the difference is positive.
        ours: the mean over the recorded seeds, in the paper's unit; None if a seed has no value.
        last_round: the same at the last evaluated round; None for a count of rounds.
        spread: the deviation, the interval or the seeds' values, as text.
        values: the value of each seed; None for a seed that never reaches the event.
    """

    label: str
    kind: str
    expected: float | None
    ours: float | None
    spread: str
    values: tuple[float | None, ...]
    last_round: float | None = None

    @property
    def name(self) -> str:
        """The label and the kind."""
        return self.label + self.kind

    @property
    def paper(self) -> str:
        """The paper's figure as text."""
        return "> 0" if self.expected is None else f"{self.expected:{FORMATS.get(self.kind, 'g')}}"


@dataclass(frozen=True)
class Comparison:
    """The comparison of records with a paper.

    Attributes:
        source: the paper, with the rounds and seeds of its figures.
        lines: the compared figures; empty if the records are of a different experiment.
        accuracy: the paper's accuracies in percent, by algorithm; empty if the records are of a different experiment.
        short: the records' rounds and seeds if they are fewer than the paper's; empty otherwise.
        withdrawn: the reason why the comparison is missing; empty otherwise.
    """

    source: str
    lines: tuple[Line, ...] = ()
    accuracy: Mapping[str, float] = field(default_factory=dict)
    short: str = ""
    withdrawn: str = ""

    @property
    def has_accuracies(self) -> bool:
        """Whether the compared figures include accuracies."""
        return any(line.kind == ACCURACY for line in self.lines)

    @property
    def is_warning(self) -> bool:
        """Whether the remark is a warning."""
        return bool(self.short or self.withdrawn)

    def table(self) -> DataFrame:
        """Return a table with a row per figure."""
        rows = []
        for line in self.lines:
            ours, last = (Statistic(value).text() for value in (line.ours, line.last_round))
            rows.append((line.name, line.paper, ours, line.spread, last, str(len(line.values))))
        here = "here, CUT SHORT" if self.short else "here"
        return stats.frame(("figure", "paper", here, "spread", "last round", "seeds"), rows)

    def remark(self) -> str:
        """Return the text below the table, or instead of it."""
        return self.withdrawn or f"{self.source}." + (f" CUT SHORT here: {self.short}." if self.short else "")


def figures(preset: str) -> Figures | None:
    """Return a paper's results for a preset, or None.

    >>> figures("mimic/table3-tau20").accuracy["MimiC"]
    75.89
    """
    found = _papers().get(preset)
    return None if found is None else Figures(**found)


def comparison(records: Sequence[Record], changed: Iterable[Change]) -> Comparison | None:
    """Return the comparison of one experiment's records with a paper; None without results for the preset.

    ``records`` must not be empty. ``changed`` are the experiment's changes to its preset.
    """
    paper = figures(records[0].header.preset)
    if paper is None:
        return None
    source, changed = paper.sized_source(), tuple(changed)
    if others := incomparable(changed):
        why = f"No comparison with {source}: those figures are of another experiment (changed: {text_of(others)})."
        return Comparison(source, withdrawn=why)
    expected = paper.expected(records, changed)
    lines = tuple(compare(records, paper, expected))
    return Comparison(source, lines, paper.accuracy, lacking(records, expected)) if lines else None


def compare(records: Sequence[Record], paper: Figures, expected: tuple[int, int] = (0, 0)) -> list[Line]:
    """Return the figures of the paper that the records of one experiment also contain.

    ``expected`` is the rounds and seeds of a full run; the verdict on a claim mentions a shorter run.
    """
    groups, lines, ends = stats.by_algorithm(records), [], stats.at_the_end(records)
    for label, value in paper.accuracy.items():
        if label in groups:
            ours = Statistic.of(values := percents(groups[label]))
            spread = "" if ours.deviation is None else f"± {ours.deviation:.1f}"
            last = Statistic.of(percents(stats.by_algorithm(ends)[label])).mean
            lines.append(Line(label, ACCURACY, value, ours.mean, spread, values, last))
    for pair, gain in paper.gain.items():
        found = difference(records, *pair.split(" - "))
        lines.append(_gain(found, difference(ends, *pair.split(" - ")), gain, found.interval_text()))
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
            end = difference(ends, *claim.split(" - "))
            lines.append(_gain(found, end, None, f"{found.interval_text()}: {verdict(found, short)}"))
    return lines


def percents(records: Iterable[Record]) -> tuple[float, ...]:
    """Return the final accuracies of the evaluated trials in percent."""
    return tuple(100 * value for value in map(stats.final, records) if value is not None)


def recovery(record: Record, shift: int) -> int | None:
    """Return the rounds from a shift until the accuracy of the round before the shift is reached again, or None."""
    curve = stats.accuracies(record)
    before = curve.get(shift - 1)
    if before is None:
        return None
    return next((round - shift + 1 for round in sorted(curve) if round >= shift and curve[round] >= before), None)


def crossing(above: Mapping[int, float], below: Mapping[int, float], shift: int) -> int | None:
    """Return the rounds from a shift until the mean of ``above`` exceeds ``below`` over ``HOLD`` rounds, or None."""
    shared = [round for round in sorted(above) if round in below and round >= shift]
    for place in range(len(shared) - HOLD + 1):
        if fmean(above[round] - below[round] for round in shared[place : place + HOLD]) > 0:
            return shared[place] - shift + 1
    return None


def verdict(found: Difference, short: str = "") -> str:
    """Return as text whether the interval shows a positive difference, with the size of a shorter run.

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
    """Return the counts of rounds and seeds that are lower than expected, such as ``10 of 200 rounds``."""
    begun = [record for record in records if record.rounds]
    rounds = min((len(record.rounds) for record in begun), default=0)
    counts = {"rounds": rounds, "seeds": len({record.header.seed for record in begun})}
    pairs = zip(counts.items(), expected, strict=True)
    return ", ".join(f"{count} of {full} {name}" for (name, count), full in pairs if count < full)


def _gain(found: Difference, end: Difference, paper: float | None, spread: str) -> Line:
    values = tuple(100 * value for value in found.values)
    means = [None if one.mean is None else 100 * one.mean for one in (found, end)]
    return Line(f"{found.of} - {found.over}", POINTS, paper, means[0], spread, values, means[1])


def _counted(label: str, kind: str, paper: int, counts: Sequence[int | None]) -> Line:
    known = [count for count in counts if count is not None]
    spread = f"seeds: {', '.join('never' if count is None else str(count) for count in counts)}" if counts else ""
    mean = fmean(known) if known and len(known) == len(counts) else None
    return Line(label, kind, paper, mean, spread, tuple(counts))


@cache
def _papers() -> dict[str, dict[str, Any]]:
    file = resources.files("fedcore.sim.reports") / "papers.toml"
    tables = tomllib.loads(file.read_text(encoding="utf-8"))

    def resolved(table: dict[str, Any]) -> dict[str, Any]:
        own = {key: value for key, value in table.items() if key != "like"}
        return {**resolved(tables[table["like"]]), **own} if "like" in table else own

    return {name: resolved(table) for name, table in tables.items()}
