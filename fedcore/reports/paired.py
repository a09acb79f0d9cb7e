"""Differences between two algorithms, seed by seed on the same active sets, with an interval for their mean."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from scipy.special import stdtrit

from fedcore.experiment.records import Record
from fedcore.reports.summary import paired

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """Accuracy of one algorithm minus that of another, one value a seed.

    Attributes:
        of, over: their labels.
        values: fractions, over the last rounds that both evaluated.
        apart: seeds that are left out because the two did not see the same clients.
    """

    of: str
    over: str
    values: tuple[float, ...]
    apart: tuple[int, ...] = ()

    @property
    def mean(self) -> float | None:
        """The mean over the seeds; None without any."""
        return fmean(self.values) if self.values else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean by Student's t; None with fewer than two seeds.

        >>> low, high = Difference("A", "B", (0.01, 0.03)).interval
        >>> round(low, 3), round(high, 3)
        (-0.107, 0.147)
        """
        return interval_of(self.values)


def interval_of(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of a mean by Student's t; None with fewer than two values."""
    if len(values) < 2:
        return None
    half = stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2) * stdev(values) / sqrt(len(values))
    return fmean(values) - float(half), fmean(values) + float(half)


def difference(records: Iterable[Record], of: str, over: str) -> Difference:
    """The difference of two algorithms of a comparison.

    Args:
        records: of one experiment.
        of, over: labels. Seeds that only one of them has are left out, and so are those whose active sets differ.
    """
    by_seed: dict[int, dict[str, Record]] = {}
    for record in records:
        by_seed.setdefault(record.header.seed, {})[record.header.algorithm] = record
    values, apart = [], []
    for seed, trials in sorted(by_seed.items()):
        if of in trials and over in trials:
            if not _same_clients(trials[of], trials[over]):
                apart.append(seed)
            elif (value := paired(trials[of], trials[over])) is not None:
                values.append(value)
    return Difference(of, over, tuple(values), tuple(apart))


def differences_to_first(records: Sequence[Record]) -> list[Difference]:
    """Every algorithm's difference to the first of the comparison."""
    first, *others = dict.fromkeys(record.header.algorithm for record in records)
    return [difference(records, other, first) for other in others]


def _same_clients(one: Record, other: Record) -> bool:
    return all(a.active == b.active for a, b in zip(one.rounds, other.rounds, strict=False))
