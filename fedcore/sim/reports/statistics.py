"""Statistics of records, per trial and over the seeds, their tables, and their comparison with the papers' results."""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import chain
from math import inf, sqrt
from statistics import fmean, median, stdev
from types import MappingProxyType
from typing import Any

from pandas import DataFrame
from scipy.special import stdtrit

from fedcore.sim.experiment.changes import Change, incomparable, text_of
from fedcore.sim.experiment.results import Record, RoundRecord
from fedcore.sim.experiment.schema import WINDOW

CONFIDENCE = 0.95
NONE = "–"
"""The text of a cell without a value."""
DIAGNOSTICS = ("diversity", "correction_norm", "staleness")
COST_NOTE = (
    "Means over trials: model vectors that one client sends in a round, MB up and down (float32, the active clients), "
    "and seconds by what they went to. Medians over rounds and trials: gradient diversity, the correction's length, "
    "and the rounds since the accepted clients were last accepted; – where a method has none."
)


@dataclass(frozen=True)
class Statistic:
    """The mean and sample standard deviation over seeds; None with too few values, or an infinite one."""

    mean: float | None = None
    deviation: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Statistic":
        """Return the statistic of one value per seed; None values are skipped.

        >>> Statistic.of([1.0, 3.0])
        Statistic(mean=2.0, deviation=1.4142135623730951)
        """
        known = [value for value in values if value is not None]
        return cls(fmean(known) if known else None, stdev(known) if len(known) > 1 and inf not in known else None)

    def text(self, scale: float = 1, mean: str = ".1f", deviation: str = ".1f") -> str:
        """Return a text such as ``71.3 ± 2.0``, with both numbers multiplied by ``scale``.

        >>> Statistic(0.713, 0.02).text(100, "+.1f")
        '+71.3 ± 2.0'
        """
        if self.mean is None:
            return NONE
        spread = "" if self.deviation is None else f" ± {scale * self.deviation:{deviation}}"
        return f"{scale * self.mean:{mean}}{spread}"


@dataclass(frozen=True)
class Row:
    """The statistics of one algorithm.

    Attributes:
        seeds: the seeds with at least one evaluated round.
        rounds: the rounds of the shortest of these trials.
        final: the mean accuracy over the window (``report.window``): its evaluated rounds are the trial's result.
        last_round: the accuracy of the last evaluated round.
        best: the highest accuracy of any round.
        oscillation: the standard deviation of the accuracy over the window.
        loss: the mean test loss (mean cross entropy) over the window.
        difference: the statistic of ``difference`` to the first algorithm; None for the first algorithm.
        seconds: the wall time of one trial.
    """

    algorithm: str
    seeds: tuple[int, ...]
    rounds: int
    final: Statistic
    last_round: Statistic
    best: Statistic
    oscillation: Statistic
    loss: Statistic
    difference: Statistic | None
    seconds: Statistic


@dataclass(frozen=True)
class Summary:
    """The statistics of a run's algorithms, in the order of the comparison.

    Attributes:
        notes: notes on incomplete trials, on windows with few evaluations, and on models that waited for clients.
        window: ``report.window``.
        changed: the experiment's changes to its preset as text; may be empty.
        inherited: what the experiment has from the preset that its file extends, as text; may be empty.
    """

    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    window: int = WINDOW
    changed: str = ""
    inherited: str = ""


@dataclass(frozen=True)
class Difference:
    """The difference in accuracy between two algorithms, paired by seed.

    Attributes:
        of, over: the labels; the difference is ``of`` minus ``over``.
        values: the difference of each seed as a fraction, over the window of the rounds that both trials evaluated.
        apart: the seeds that are excluded because the two trials had different active clients.
    """

    of: str
    over: str
    values: tuple[float, ...]
    apart: tuple[int, ...] = ()

    @property
    def mean(self) -> float | None:
        """The mean over the seeds; None without seeds."""
        return Statistic.of(self.values).mean

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean by Student's t; None with fewer than two seeds.

        >>> low, high = Difference("A", "B", (0.01, 0.03)).interval
        >>> round(low, 3), round(high, 3)
        (-0.107, 0.147)
        """
        return interval_of(self.values)

    def interval_text(self) -> str:
        """Return the interval as text, in percentage points.

        >>> Difference("A", "B", (0.02, 0.02, 0.02)).interval_text()
        '95 %: +2.0 .. +2.0'
        """
        ends = self.interval
        if ends is None:
            return "one seed" if self.values else "no seed"
        return f"95 %: {100 * ends[0]:+.1f} .. {100 * ends[1]:+.1f}"


def interval_of(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean by Student's t; None with fewer than two values."""
    if len(values) < 2:
        return None
    half = students_t(len(values)) * stdev(values) / sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def students_t(count: int) -> float:
    """Return the half width of the 95 % interval of a mean of ``count`` values, in standard errors."""
    return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))


def by_algorithm(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the records by algorithm label, in the order of the records."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.header.algorithm, []).append(record)
    return groups


def accuracies(record: Record) -> dict[int, float]:
    """Return the accuracy of each evaluated round."""
    return {line.round: line.accuracy for line in record.rounds if line.accuracy is not None}


def losses(record: Record) -> dict[int, float]:
    """Return the test loss of each evaluated round; it is infinite if it was infinite or NaN."""
    return {line.round: inf if line.loss is None else line.loss for line in record.rounds if line.accuracy is not None}


def waiting(record: Record) -> set[int]:
    """Return the rounds in which the model did not change because the method waited for clients' first updates."""
    return {line.round for line in record.rounds if line.pending}


def judged(record: Record, *others: Record) -> list[int]:
    """Return the rounds of a result: those that all these trials evaluated, among the last ``record.window``."""
    shared = set(accuracies(record)).intersection(*map(accuracies, others))
    return sorted(round for round in shared if round > max(shared) - record.window)


def final(record: Record, curve: Callable[[Record], dict[int, float]] = accuracies) -> float | None:
    """Return a trial's result: the mean accuracy or loss over the window, or None."""
    values = curve(record)
    known = [values[round] for round in judged(record)]
    return fmean(known) if known else None


def at_the_end(records: Iterable[Record]) -> list[Record]:
    """Return the records with a window of one round: the last evaluated one."""
    return [replace(record, window=1) for record in records]


def paired(record: Record, baseline: Record) -> float | None:
    """Return the mean difference of two trials' accuracies over the window of the rounds that both evaluated, or None.

    ``record`` has the window.
    """
    curve, other, rounds = accuracies(record), accuracies(baseline), judged(record, baseline)
    return fmean(curve[round] - other[round] for round in rounds) if rounds else None


def difference(records: Iterable[Record], of: str, over: str) -> Difference:
    """Return the difference between two algorithms, over the seeds of both whose active clients are equal.

    An asynchronous trial has other active clients than a synchronous one with the same seed; the two are compared.
    """
    groups = by_algorithm(records)
    one, other = ({record.header.seed: record for record in groups.get(label, ())} for label in (of, over))
    values, apart = [], []
    for seed in sorted(one.keys() & other.keys()):
        rounds = zip(one[seed].rounds, other[seed].rounds, strict=False)
        if any(a.active != b.active and a.ages is None and b.ages is None for a, b in rounds):
            apart.append(seed)
        elif (value := paired(one[seed], other[seed])) is not None:
            values.append(value)
    return Difference(of, over, tuple(values), tuple(apart))


def differences_to_first(records: Sequence[Record]) -> list[Difference]:
    """Return the difference between each further algorithm and the first algorithm."""
    first, *others = by_algorithm(records)
    return [difference(records, other, first) for other in others]


def summarise(records: Sequence[Record], changed: str = "", notes: Iterable[str] = (), inherited: str = "") -> Summary:
    """Return the statistics of one experiment's records, at least one; ``notes`` precede the notes on the records."""
    groups = by_algorithm(records)
    pairs = [None, *(Statistic.of(one.values) for one in differences_to_first(records))]
    rows = tuple(_row(label, group, pair) for (label, group), pair in zip(groups.items(), pairs, strict=True))
    own = [*notes, *chain.from_iterable(map(_notes, records)), *_window_notes(records)]
    for notes_on in (_length_notes, _rejection_notes, _waiting_notes):
        own += chain.from_iterable(notes_on(label, group) for label, group in groups.items())
    return Summary(records[0].header.title, rows, tuple(own), records[0].window, changed, inherited)


def legend(*summaries: Summary) -> str:
    """Return a text that explains the columns of these summaries."""
    windows = " or ".join(map(str, sorted({one.window for one in summaries})))
    return (
        "Accuracy, oscillation and test loss: mean, standard deviation and mean cross entropy over the evaluated "
        f"rounds among a trial's last {windows}; last round: the last evaluated one; mean ± sample standard deviation "
        "over seeds, in points; vs: paired by seed, same clients in each round, but for asynchronous methods."
    )


def frame(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> DataFrame:
    """Return a DataFrame whose cells keep their types."""
    return DataFrame(rows, columns=list(headings), dtype=object)


def summary_table(summary: Summary) -> DataFrame:
    """Return the summary as a table for readers, with rounded percentages."""
    headings = ("algorithm", "accuracy %", "last round %", f"vs {summary.rows[0].algorithm}", "oscillation")
    rows = []
    for row in summary.rows:
        accuracies = [row.algorithm, row.final.text(100), row.last_round.text(100)]
        accuracies.append("" if row.difference is None else row.difference.text(100, "+.1f"))
        accuracies += [row.oscillation.text(100), row.best.text(100)]
        loss = row.loss.text(1, ".3f" if (row.loss.mean or 0) < 1e4 else ".3g", ".3g")
        counts = str(len(row.seeds)), str(row.rounds), Statistic(row.seconds.mean).text()
        rows.append((*accuracies, loss, *counts))
    return frame((*headings, "best %", "test loss", "seeds", "rounds", "s / trial"), rows)


def summary_csv(summary: Summary) -> str:
    """Return the summary as CSV for programs: fractions in full precision, empty cells for missing values."""
    names = ("final", "last_round", "best", "oscillation", "loss", "difference", "seconds")
    rows = []
    for row in summary.rows:
        values = [getattr(row, name) or Statistic() for name in names]
        # The quote prevents a spreadsheet from evaluating a label as a formula.
        label = f"'{row.algorithm}" if row.algorithm.startswith(("=", "+", "-", "@", "\t", "\r")) else row.algorithm
        numbers = [number for value in values for number in (value.mean, value.deviation)]
        rows.append((label, len(row.seeds), row.rounds, *numbers))
    spread = [f"{name}_{part}" for name in names for part in ("mean", "std")]
    return csv_text(frame(("algorithm", "seeds", "rounds", *spread), rows))


def csv_text(table: DataFrame) -> str:
    """Return a table as CSV."""
    return str(table.to_csv(index=False, lineterminator="\n"))


def difference_table(records: Sequence[Record]) -> DataFrame:
    """Return a table of the differences to the first algorithm, with a row per further algorithm."""
    rows = []
    for pair in zip(differences_to_first(records), differences_to_first(at_the_end(records)), strict=True):
        one, apart = pair[0], f"; not the same clients: seeds {list(pair[0].apart)}" if pair[0].apart else ""
        cells = [NONE if each.mean is None else f"{100 * each.mean:+.1f} ({each.interval_text()})" for each in pair]
        rows.append((f"{one.of} - {one.over}", *cells, f"{len(one.values)}{apart}"))
    return frame(("paired by seed", "points", "last round", "seeds"), rows)


def cost_table(records: Sequence[Record]) -> DataFrame:
    """Return a table of traffic, seconds per phase and diagnostics, with a row per algorithm."""
    parts = list(dict.fromkeys(part for record in records for line in record.rounds for part in line.seconds))
    timed = any(line.clock is not None for record in records for line in record.rounds)
    headings = ("algorithm", "vectors up", "MB up", "MB down", *(f"{part} s" for part in parts))
    headings += (*(name.removesuffix("_norm") for name in DIAGNOSTICS), *("virtual s",) * timed)
    rows = []
    for label, group in by_algorithm(record for record in records if record.rounds).items():
        lines = [line for record in group for line in record.rounds]
        ends = [record.rounds[-1] for record in group]
        vectors = [end.uploadings / (end.round + 1) for end in ends if end.uploadings is not None]
        down = all(line.bytes_down is not None for line in lines)
        cells = [label, f"{fmean(vectors):g}" if vectors else NONE, _mean_sum(group, lambda line: line.bytes, 1e6)]
        cells.append(_mean_sum(group, lambda line: line.bytes_down or 0, 1e6) if down else NONE)
        cells += [_mean_sum(group, lambda line: line.seconds.get(part, 0.0)) for part in parts]  # noqa: B023
        for name in DIAGNOSTICS:
            known = [value for line in lines if (value := getattr(line, name)) is not None]
            cells.append(f"{median(known):.3g}" if known else NONE)
        if timed:
            cells.append(f"{fmean(end.clock or 0.0 for end in ends):.1f}")
        rows.append(cells)
    return frame(headings, rows)


def _mean_sum(group: Sequence[Record], of: Callable[[RoundRecord], float], unit: float = 1) -> str:
    """Return as text the mean over trials of a sum over rounds."""
    return f"{fmean(sum(map(of, record.rounds)) for record in group) / unit:.1f}"


def _row(label: str, group: Sequence[Record], difference: Statistic | None) -> Row:
    curves = {record.header.seed: curve for record in group if (curve := accuracies(record))}
    windows = [[accuracies(record)[round] for round in judged(record)] for record in group]
    return Row(
        algorithm=label,
        seeds=tuple(curves),
        rounds=min((len(record.rounds) for record in group if record.header.seed in curves), default=0),
        final=Statistic.of(map(final, group)),
        last_round=Statistic.of(map(final, at_the_end(group))),
        best=Statistic.of(max(curve.values()) for curve in curves.values()),
        oscillation=Statistic.of(stdev(values) for values in windows if len(values) > 1),
        loss=Statistic.of(final(record, losses) for record in group),
        difference=difference,
        seconds=Statistic.of(sum(sum(line.seconds.values()) for line in record.rounds) for record in group),
    )


def _notes(record: Record) -> Iterator[str]:
    header = record.header
    name = f"{header.algorithm}, seed {header.seed}"
    if not record.is_complete:
        yield f"{name}: stopped after {len(record.rounds)} of {header.rounds} rounds"
    elif len(record.rounds) < header.rounds:
        yield f"{name}: stopped early after {len(record.rounds)} of {header.rounds} rounds (evaluate.patience)"
    if record.torn:
        yield f"{name}: the last line of its record was cut off and is left out"


def _window_notes(records: Sequence[Record]) -> list[str]:
    """Return a note if a result is the mean of fewer rounds than its window has; advise only complete trials."""
    found = [(one, own, min(own[-1] + 1, one.window)) for one in records if (own := judged(one))]
    counts = [(len(one.rounds) < one.header.rounds, len(own), full) for one, own, full in found if len(own) < full]
    short, few, full = min(counts, default=(True, 0, 0))
    advice = "" if short else f"; set evaluate.last={records[0].window}"
    return [f"only {few} of the last {full} rounds were evaluated{advice}"] if few else []


def _length_notes(label: str, group: Sequence[Record]) -> list[str]:
    """Return a note if an algorithm's results are of trials with different numbers of rounds."""
    counts = [len(record.rounds) for record in group if accuracies(record)] or [0]
    return [f"{label}: its row is of trials with {min(counts)} to {max(counts)} rounds"] * (min(counts) < max(counts))


def _rejection_notes(label: str, group: Sequence[Record]) -> list[str]:
    """Return a note if the server rejected updates of an algorithm."""
    lines = [line for record in group for line in record.rounds]
    rejected, accepted = sum(line.rejected for line in lines), sum(line.accepted for line in lines)
    return [f"{label}: {rejected} of {rejected + accepted} updates were rejected"] if rejected else []


def _waiting_notes(label: str, group: Sequence[Record]) -> list[str]:
    """Return a note if an algorithm's model waited for clients, with the range over its seeds."""
    waited = [len(waiting(record)) for record in group]
    if not any(waited):
        return []
    few, most = min(waited), max(waited)
    rounds = max(len(record.rounds) for record in group)
    missing = max((record.rounds[-1].pending or 0 for record in group if record.rounds), default=0)
    still = f", and is still waiting for {missing}" if missing else ""
    return [
        f"{label}: the model stayed as it was in {few if few == most else f'{few} to {most}'} of {rounds} rounds, "
        f"waiting for clients without any update so far{still}; wait=false starts without them"
    ]


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
        return frame(("figure", "paper", here, "spread", "last round", "seeds"), rows)

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

    ``expected`` is the rounds and seeds of a full run. The verdict on a claim mentions a shorter run, and best values
    at an end of those tried.
    """
    groups, lines, ends = by_algorithm(records), [], at_the_end(records)
    for label, value in paper.accuracy.items():
        if label in groups:
            ours = Statistic.of(values := percents(groups[label]))
            spread = "" if ours.deviation is None else f"± {ours.deviation:.1f}"
            last = Statistic.of(percents(by_algorithm(ends)[label])).mean
            lines.append(Line(label, ACCURACY, value, ours.mean, spread, values, last))
    for pair, gain in paper.gain.items():
        found = difference(records, *pair.split(" - "))
        lines.append(_gain(found, difference(ends, *pair.split(" - ")), gain, found.interval_text()))
    for label, count in paper.recovery.items():
        own = [record for record in groups.get(label, ()) if paper.shift - 1 in accuracies(record)]
        lines.append(_counted(label, RECOVERY, count, [recovery(record, paper.shift) for record in own]))
    for pair, count in paper.crossing.items():
        lower, higher = ({r.header.seed: losses(r) for r in groups.get(label, ())} for label in pair.split(" - "))
        counts = [crossing(higher[seed], lower[seed], paper.shift) for seed in lower if seed in higher]
        lines.append(_counted(pair, CROSSING, count, counts))
    for claim in paper.better:
        found = difference(records, *claim.split(" - "))
        if found.values:
            of, over = ([r for r in groups[label] if r.rounds] for label in claim.split(" - "))
            both = {r.header.seed for r in of} & {r.header.seed for r in over}
            short = lacking([r for r in (*of, *over) if r.header.seed in both], expected)
            end = difference(ends, *claim.split(" - "))
            at_ends = {record.header.algorithm: record.ends for record in (*of, *over) if record.ends}
            lines.append(_gain(found, end, None, f"{found.interval_text()}: {verdict(found, short, at_ends)}"))
    return lines


def percents(records: Iterable[Record]) -> tuple[float, ...]:
    """Return the final accuracies of the evaluated trials in percent."""
    return tuple(100 * value for value in map(final, records) if value is not None)


def recovery(record: Record, shift: int) -> int | None:
    """Return the rounds from a shift until the accuracy of the round before the shift is reached again, or None."""
    curve = accuracies(record)
    before = curve.get(shift - 1, inf)
    return next((round - shift + 1 for round in sorted(curve) if round >= shift and curve[round] >= before), None)


def crossing(above: Mapping[int, float], below: Mapping[int, float], shift: int) -> int | None:
    """Return the rounds from a shift until the mean of ``above`` exceeds ``below`` over ``HOLD`` rounds, or None."""
    shared = [round for round in sorted(above) if round in below and round >= shift]
    spans = (shared[place : place + HOLD] for place in range(len(shared) - HOLD + 1))
    found = (span[0] for span in spans if fmean(above[one] for one in span) > fmean(below[one] for one in span))
    return next((round - shift + 1 for round in found), None)


def verdict(found: Difference, short: str = "", at_ends: Mapping[str, Iterable[str]] = MappingProxyType({})) -> str:
    """Return as text whether the interval shows a positive difference, with the size of a shorter run.

    ``at_ends`` has the settings of each algorithm whose best value is at an end of those tried: others may be better.

    >>> verdict(Difference("A", "B", (0.02, 0.021, 0.019)))
    'shown'
    >>> verdict(Difference("A", "B", (0.02, 0.021, 0.019)), "15 of 500 rounds")
    'shown in 15 of 500 rounds'
    >>> verdict(Difference("A", "B", (0.02, 0.021, 0.019)), at_ends={"A": ["rate.lr", "beta"]})
    'shown, but best at an end of the tried values: A (rate.lr, beta)'
    """
    ends = found.interval
    if ends is None or ends[0] <= 0 <= ends[1]:
        return "open"
    at = ", ".join(f"{label} ({', '.join(keys)})" for label, keys in at_ends.items())
    text = ("shown" if ends[0] > 0 else "contradicted") + (f" in {short}" if short else "")
    return text + (f", but best at an end of the tried values: {at}" if at else "")


def lacking(records: Sequence[Record], expected: tuple[int, int]) -> str:
    """Return the counts of rounds and seeds that are lower than expected, such as ``10 of 200 rounds``."""
    begun = [record for record in records if record.rounds]
    rounds, seeds = min((len(record.rounds) for record in begun), default=0), {record.header.seed for record in begun}
    pairs = zip({"rounds": rounds, "seeds": len(seeds)}.items(), expected, strict=True)
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
