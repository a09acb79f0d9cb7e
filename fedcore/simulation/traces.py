"""Traces of the share of its work that a device does, and the files that hold them."""

import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from statistics import NormalDist
from typing import TypeAlias

import numpy as np

from fedcore.arguments import absolute, due_in, inside, real
from fedcore.arrays import F64, ieee
from fedcore.errors import MissingDataError, RangeError, UnknownNameError

PACKAGED = {"flexible": "flexible_traces.csv"}
"""The traces in the package, by name."""
MOMENTS = ["trace", "mean", "stdev", "least"]
"""The header of a file of generated traces."""


@dataclass(frozen=True)
class Generated:
    """A trace with a given mean and standard deviation: a normal number, clipped to [least, 1].

    ``mean`` and ``stdev`` are those of the shares, after clipping; those of the normal number follow from them. With
    positive probability a round is complete (share 1) and, if ``least`` is 0, without work.

    Args:
        name: the name in messages.
        mean: in [least, 1].
        stdev: in [0, sqrt((mean - least) (1 - mean))): no law on [least, 1] has a larger one.
        least: in [0, 1].

    Raises:
        RangeError: an argument is outside its range.
    """

    name: str
    mean: float
    stdev: float
    least: float = 0.0
    _normal: tuple[float, float] = field(init=False, repr=False)

    @ieee
    def __post_init__(self) -> None:
        least = real(f"trace {self.name!r}: least", self.least, "[0, 1]")
        real(f"trace {self.name!r}: mean", self.mean, f"[{least!r}, 1]")
        widest = math.sqrt((self.mean - least) * (1 - self.mean))
        if not (inside(self.stdev, "[0, 1]") and (self.stdev == 0 or self.stdev < widest)):
            raise RangeError(
                f"trace {self.name!r}: stdev: expected {due_in(f'[0, {widest:.4g})')}, for shares in "
                f"[{least:g}, 1] of mean {self.mean:g}, got {self.stdev!r}"
            )
        object.__setattr__(self, "_normal", _normal_behind(self.mean, self.stdev, least))

    @ieee
    def draw(self, random: np.random.Generator, count: int) -> F64:
        """Draw independent shares of ``count`` devices: float64[count] in [least, 1]."""
        center, width = self._normal
        return np.clip(center + width * random.standard_normal(count), self.least, 1)


@dataclass(frozen=True)
class Recorded:
    """A measured trace: one share for each row of its file.

    Args:
        name: the name in messages.
        shares: at least one, each in [0, 1].

    Raises:
        RangeError: there is no share, or one is outside its range.
    """

    name: str
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.shares:
            raise RangeError(f"trace {self.name!r}: expected at least one share, got none")
        for row, share in enumerate(self.shares):
            real(f"trace {self.name!r}: share {row}", share, "[0, 1]")

    def draw(self, random: np.random.Generator, count: int) -> F64:
        """Draw shares of ``count`` devices, each one of the rows with equal probability: float64[count]."""
        return np.array(self.shares, np.float64)[random.integers(0, len(self.shares), count)]


Law: TypeAlias = Generated | Recorded


@ieee
def read_traces(source: str | Path) -> tuple[Law, ...]:
    """Read the traces of a comma-separated file with a header; lines that begin with # are comments.

    With the header ``trace,mean,stdev,least`` each row is a generated trace. With any other header each column is a
    recorded trace of that name, and each row has one share of each.

    Args:
        source: a path that ends in ``.csv``, or ``"flexible"``, the eight traces of Ruan et al. (with stand-in means).

    Raises:
        UnknownNameError: it is neither.
        MissingDataError: the file cannot be read, or a row is malformed.

    >>> read_traces("flexible")[1]
    Generated(name='2', mean=0.85, stdev=0.148, least=0.05)
    """
    file: Traversable
    if isinstance(source, Path) or str(source).endswith(".csv"):
        file = absolute(source)
    elif source in PACKAGED:
        file = resources.files("fedcore.simulation") / PACKAGED[source]
    else:
        raise UnknownNameError.of("traces", source, [*PACKAGED, "PATH.csv"])
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MissingDataError(f"traces: cannot read {source}: {error}") from None
    rows = list(_rows(str(source), lines))
    if len(rows) < 2:
        raise MissingDataError(f"traces: {source}: expected a header and at least one row, got {len(rows)} lines")
    (_, header), *body = rows
    try:
        if header == MOMENTS:
            return tuple(Generated(cells[0], *map(float, cells[1:])) for number, cells in body)
        columns = zip(*((float(cell) for cell in cells) for number, cells in body), strict=True)
        return tuple(Recorded(name, column) for name, column in zip(header, columns, strict=True))
    except ValueError as error:  # float() on a word; a RangeError is one too
        raise MissingDataError(f"traces: {source}: {error}") from None


def _rows(source: str, lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    """The rows with their line numbers, each as wide as the header."""
    width = 0
    for number, line in enumerate(lines, start=1):
        if line.startswith("#") or not line.strip():
            continue
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        width = width or len(cells)
        if len(cells) != width:
            raise MissingDataError(f"traces: {source}: expected {width} cells in line {number}, got {len(cells)}")
        yield number, cells


@cache
def _normal_behind(mean: float, stdev: float, least: float) -> tuple[float, float]:
    """Center and width of the normal law that has this mean and deviation after clipping to [least, 1]."""
    if stdev == 0:
        return mean, 0.0

    def center_at(width: float) -> float:  # a wider normal needs a center further out for the same mean
        return _rising(lambda center: _moments(center, width, least)[0] - mean, -1 - 40 * width, 2 + 40 * width)

    width = math.exp(_rising(lambda log: _moments(center_at(math.exp(log)), math.exp(log), least)[1] - stdev, -12, 6))
    return center_at(width), width


def _rising(f: Callable[[float], float], low: float, high: float) -> float:
    """The zero of a rising function, by bisection."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if f(middle) > 0 else (middle, high)
    return (low + high) / 2


def _moments(center: float, width: float, least: float) -> tuple[float, float]:
    """Mean and standard deviation of a normal number that is clipped to [least, 1]."""
    standard = NormalDist()
    a, b = (least - center) / width, (1 - center) / width
    below, above = standard.cdf(a), standard.cdf(-b)
    inner = standard.cdf(b) - below
    pa, pb = standard.pdf(a), standard.pdf(b)
    mean = below * least + above + inner * center + width * (pa - pb)
    square = below * least**2 + above
    square += inner * (center**2 + width**2) + 2 * center * width * (pa - pb) + width**2 * (a * pa - b * pb)
    return mean, math.sqrt(max(square - mean**2, 0.0))
