"""The summary of a run's records for each algorithm: per seed first, then over the seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fedcore.experiment.records import Record

LAST = 10
"""How many evaluated rounds at the end of a trial count as its result, where there are so many."""


@dataclass(frozen=True)
class Statistic:
    """Mean and sample standard deviation over seeds; None where there are too few values for one."""

    mean: float | None
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Statistic":
        """The statistic of one value a seed.

        >>> Statistic.of([1.0, 3.0])
        Statistic(mean=2.0, deviation=1.4142135623730951)
        """
        return cls(fmean(values) if values else None, stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class Row:
    """One algorithm.

    Attributes:
        algorithm: its label.
        seeds: the seeds that have at least one evaluated round.
        rounds: rounds done in the shortest of these trials.
        final: accuracy, the mean over the last 10 evaluated rounds.
        best: the highest accuracy in any round.
        oscillation: standard deviation of the accuracy over those last 10 rounds.
        loss: the test loss (mean cross entropy), the mean over the last 10 evaluated rounds that have one.
        difference: ``final`` minus that of the first algorithm with the same seed, over the rounds that both
            did; None for the first algorithm itself.
        seconds: wall time of one trial.
    """

    algorithm: str
    seeds: tuple[int, ...]
    rounds: int
    final: Statistic
    best: Statistic
    oscillation: Statistic
    loss: Statistic
    difference: Statistic | None
    seconds: Statistic


@dataclass(frozen=True)
class Summary:
    """The rows in the order of the comparison, and notes on trials that are not whole or whose model waited.

    Attributes:
        title: of the experiment.
        rows, notes: as said.
        last: over how many evaluated rounds the accuracy of each trial is a mean: from the fewest to the most.
        changed: what the experiment has otherwise than its title says; empty for nothing.
    """

    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    last: tuple[int, int] = (LAST, LAST)
    changed: str = ""


def summarise(records: Sequence[Record], changed: str = "") -> Summary:
    """The statistics of a run.

    Args:
        records: of one experiment, as ``read_folder`` returns them: at least one.
        changed: what the experiment has otherwise than its title says.
    """
    lasts = [min(len(curve), LAST) for curve in map(accuracies, records) if curve]
    by_algorithm: dict[str, list[Record]] = {}
    for record in records:
        by_algorithm.setdefault(record.header.algorithm, []).append(record)
    first = {record.header.seed: record for record in records if record.header.order == 0}
    return Summary(
        title=records[0].header.title,
        rows=tuple(_row(label, group, first) for label, group in by_algorithm.items()),
        notes=(
            *(note for record in records for note in _notes(record)),
            *(note for label, group in by_algorithm.items() for note in _waiting_notes(label, group)),
        ),
        last=(min(lasts), max(lasts)) if lasts else (LAST, LAST),
        changed=changed,
    )


def accuracies(record: Record) -> dict[int, float]:
    """Round to accuracy, for the rounds that were evaluated."""
    return {line.round: line.accuracy for line in record.rounds if line.accuracy is not None}


def losses(record: Record) -> dict[int, float]:
    """Round to test loss, for the rounds that were evaluated and whose loss is finite."""
    return {line.round: line.loss for line in record.rounds if line.loss is not None}


def waiting(record: Record) -> set[int]:
    """The rounds in which the model stayed as it was, since the method waits until each client has replied once."""
    return {line.round for line in record.rounds if line.awaited}


def final(record: Record) -> float | None:
    """A trial's result: its accuracy, the mean over the last 10 evaluated rounds; None without any."""
    last = list(accuracies(record).values())[-LAST:]
    return fmean(last) if last else None


def final_loss(record: Record) -> float | None:
    """A trial's test loss, the mean over the last 10 evaluated rounds; None without any."""
    last = list(losses(record).values())[-LAST:]
    return fmean(last) if last else None


def paired(record: Record, baseline: Record) -> float | None:
    """The difference of two trials' accuracies over the last rounds that both evaluated; None without any."""
    curve, other = accuracies(record), accuracies(baseline)
    shared = [round for round in curve if round in other][-LAST:]
    return fmean(curve[round] - other[round] for round in shared) if shared else None


def _row(label: str, group: Sequence[Record], first: dict[int, Record]) -> Row:
    curves = {record.header.seed: accuracies(record) for record in group}
    curves = {seed: curve for seed, curve in curves.items() if curve}
    lasts = [list(curve.values())[-LAST:] for curve in curves.values()]
    pairs = [paired(record, first[record.header.seed]) for record in group if record.header.seed in first]
    return Row(
        algorithm=label,
        seeds=tuple(curves),
        rounds=min((len(record.rounds) for record in group if record.header.seed in curves), default=0),
        final=Statistic.of([fmean(last) for last in lasts]),
        best=Statistic.of([max(curve.values()) for curve in curves.values()]),
        oscillation=Statistic.of([stdev(last) for last in lasts if len(last) > 1]),
        loss=Statistic.of([loss for record in group if (loss := final_loss(record)) is not None]),
        difference=None
        if group[0].header.order == 0
        else Statistic.of([difference for difference in pairs if difference is not None]),
        seconds=Statistic.of([sum(sum(line.seconds.values()) for line in record.rounds) for record in group]),
    )


def _notes(record: Record) -> list[str]:
    header, notes = record.header, []
    name = f"{header.algorithm}, seed {header.seed}"
    if len(record.rounds) < header.rounds:
        notes.append(f"{name}: stopped after {len(record.rounds)} of {header.rounds} rounds")
    if record.torn:
        notes.append(f"{name}: the last line of its record was cut off and is left out")
    return notes


def _waiting_notes(label: str, group: Sequence[Record]) -> list[str]:
    """The note on an algorithm whose model waited, the fewest and the most rounds of its seeds in it."""
    waited = [len(waiting(record)) for record in group]
    if not any(waited):
        return []
    few, most = min(waited), max(waited)
    rounds = max(len(record.rounds) for record in group)
    missing = max((record.rounds[-1].awaited or 0 for record in group if record.rounds), default=0)
    still = f", and is still waiting for {missing}" if missing else ""
    return [
        f"{label}: the model stayed as it was in {few if few == most else f'{few} to {most}'} of {rounds} rounds, "
        f"waiting for clients without any update so far{still}; wait=false starts without them"
    ]
