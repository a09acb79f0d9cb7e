"""Traces: laws of the share of its local steps that a device does, and the files of traces and of durations."""

import csv
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from multiprocessing import parent_process
from pathlib import Path
from statistics import NormalDist
from typing import TypeAlias

import numpy as np

from fedcore.arrays import F64, ieee
from fedcore.errors import MissingDataError, RangeError, UnknownNameError
from fedcore.validation import absolute, check_number, describe_interval, in_interval

PACKAGED = {"flexible": "flexible_traces.csv"}
"""The trace files in the package, keyed by name."""
MOMENTS = ["trace", "mean", "stdev", "least"]
"""The header of a file of generated traces."""
LOGS = ["round", "client"], ["round", "client", "share"]
"""The headers of a log."""
MOST_ROUNDS = 10**6
"""The maximum number of rounds of a log, which takes 8 bytes for each round of each client."""
_warn_once = cache(logging.getLogger("fedcore.sim").warning)


@dataclass(frozen=True)
class Generated:
    """A trace with a given mean and standard deviation: a normal number, clipped to [least, 1].

    ``mean`` and ``stdev`` refer to the clipped shares; the parameters of the normal number follow from them. A round
    has a positive probability of share 1 (complete work) and, if ``least`` is 0, of share 0 (no work).

    Requires 0 <= least <= mean <= 1, and stdev in [0, sqrt((mean - least) (1 - mean))): no law on [least, 1] has a
    larger one.
    """

    name: str
    mean: float
    stdev: float
    least: float = 0.0
    _normal: tuple[float, float] = field(init=False, repr=False)

    @ieee
    def __post_init__(self) -> None:
        least = check_number(f"trace {self.name!r}: least", self.least, "[0, 1]")
        check_number(f"trace {self.name!r}: mean", self.mean, f"[{least!r}, 1]")
        widest = math.sqrt((self.mean - least) * (1 - self.mean))
        if not (in_interval(self.stdev, "[0, 1]") and (self.stdev == 0 or self.stdev < widest)):
            raise RangeError(
                f"trace {self.name!r}: stdev={self.stdev!r}: must be {describe_interval(f'[0, {widest:.4g})')} "
                f"for shares in [{least:g}, 1] of mean {self.mean:g}"
            )
        object.__setattr__(self, "_normal", _normal_behind(self.mean, self.stdev, least))

    @ieee
    def draw(self, random: np.random.Generator, count: int) -> F64:
        """Draw independent shares of ``count`` devices: float64[count] in [least, 1]."""
        center, width = self._normal
        return np.clip(center + width * random.standard_normal(count), self.least, 1)


@dataclass(frozen=True)
class Recorded:
    """A measured trace: a share in [0, 1] from each row of its file."""

    name: str
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.shares:
            raise RangeError(f"trace {self.name!r}: needs at least one share")
        for row, share in enumerate(self.shares):
            check_number(f"trace {self.name!r}: share {row}", share, "[0, 1]")

    def draw(self, random: np.random.Generator, count: int) -> F64:
        """Draw the shares of ``count`` devices uniformly from the rows: float64[count]."""
        return np.array(self.shares, np.float64)[random.integers(0, len(self.shares), count)]


@dataclass(frozen=True)
class Logged(Recorded):
    """The share of one client in each round of a log; 0 in rounds without the client.

    ``name`` is the client's name in the log.
    """


Law: TypeAlias = Generated | Recorded


@ieee
def read_traces(source: str | Path, clients: int | None = None) -> tuple[Law, ...]:
    """Read the traces in a comma-separated file with a header; lines that begin with # are comments.

    - ``trace,mean,stdev,least``: each row defines a generated trace.
    - ``round,client`` or ``round,client,share``: a log. A row states that the client took part in the round (0 to
      999,999) with this share of its local steps (default: 1). There is one trace per client, in the order of the
      client numbers. A log that names all clients numbers them in ascending order, as ``data.from_arrays`` does. In
      any other log, clients are numbers from 0. A log that starts in round 1 logs a warning: its round 0 is empty.
    - Any other header: each column is a recorded trace with the column's name.

    Args:
        source: a path that ends in ``.csv``, or ``"flexible"`` for the eight traces of Ruan et al. (with stand-in
            means).
        clients: the number of clients of a log. Default: as many as the log names.

    Raises:
        UnknownNameError, MissingDataError: the source is neither of these, cannot be read, has a malformed row, or does
            not fit the number of clients.

    >>> read_traces("flexible")[1]
    Generated(name='2', mean=0.85, stdev=0.148, least=0.05)
    """
    file: Traversable
    if isinstance(source, Path) or str(source).endswith(".csv"):
        file = absolute(source, "source")
    elif source in PACKAGED:
        file = resources.files("fedcore.sim") / PACKAGED[source]
    else:
        raise UnknownNameError.of("traces", source, [*PACKAGED, "PATH.csv"])
    rows = list(_rows("traces", source, file))
    if len(rows) < 2:
        raise MissingDataError(f"traces: {source}: expected a header and at least one row, got {len(rows)} lines")
    (_, header), *body = rows
    try:
        if header == MOMENTS:
            return tuple(Generated(cells[0], *map(float, cells[1:])) for _, cells in body)
        if header in LOGS:
            return _of_log(str(source), body, clients)
        if "round" in map(str.lower, header):
            raise ValueError(f"unknown header {','.join(header)}; a log has {' or '.join(map(','.join, LOGS))}")
        columns = zip(*(map(float, cells) for _, cells in body), strict=True)
        return tuple(map(Recorded, header, columns))
    except ValueError as error:  # A RangeError is a ValueError too.
        raise MissingDataError(f"traces: {source}: {error}") from None


def read_durations(source: str | Path, clients: int) -> tuple[F64, ...]:
    """Read how long clients work from a comma-separated file with the header ``client,seconds``.

    Clients are numbers from 0, and each has at least one row. Lines that begin with # are comments.

    Returns:
        The seconds of each client in the order of its rows, float64.

    Raises:
        MissingDataError: the file cannot be read, is malformed, or lacks a client.
    """
    rows = list(_rows("trace", source, absolute(source, "source")))
    if not rows or rows[0][1] != ["client", "seconds"]:
        raise MissingDataError(f"trace: {source}: expected the header client,seconds")
    found: list[list[float]] = [[] for _ in range(clients)]
    for line, (name, seconds) in rows[1:]:
        at = f"trace: {source}: line {line}"
        if not name.isdecimal() or len(name) > len(str(clients)) or int(name) >= clients:
            raise MissingDataError(f"{at}: expected a client in 0 .. {clients - 1}, got {name[:100]!r}")
        try:
            found[int(name)].append(check_number("seconds", float(seconds), "(0, inf)"))
        except ValueError as error:  # A RangeError is a ValueError too.
            raise MissingDataError(f"{at}: {error}") from None
    if missing := [client for client, own in enumerate(found) if not own]:
        raise MissingDataError(f"trace: {source}: client {missing[0]} has no row; each client needs one")
    return tuple(np.array(own) for own in found)


def _of_log(source: str, body: list[tuple[int, list[str]]], clients: int | None) -> tuple[Logged, ...]:
    """Return a trace per client, from the rows of a log with their line numbers."""
    names = {cells[1] for _, cells in body}
    count = len(names) if clients is None else clients
    are_numbers = all(name.isdecimal() for name in names)
    ordered = sorted(names, key=int if are_numbers else None)
    if len(names) == count:
        numbers = {name: number for number, name in enumerate(ordered)}
    elif are_numbers and int(ordered[-1]) < count:
        numbers = {name: int(name) for name in names}
    else:
        raise ValueError(
            f"the log must name all {count} clients, or number them from 0; it names {len(names)}; add a row with "
            f"share 0 for each missing client, under the header {','.join(LOGS[1])}"
        )
    found: dict[tuple[int, int], float] = {}
    for line, (round, name, *share) in body:
        if not round.isdecimal() or len(round) > len(str(MOST_ROUNDS - 1)):
            raise ValueError(f"line {line}: the round must be an integer in 0..{MOST_ROUNDS - 1}, got {round[:100]!r}")
        if (key := (int(round), numbers[name])) in found:
            raise ValueError(f"line {line}: names client {name} in round {round} a second time")
        found[key] = float(share[0]) if share else 1.0
    if min(at for at, _ in found) == 1 and parent_process() is None:  # once, and not again by each worker
        _warn_once(f"traces: {source}: the log starts in round 1, so round 0 is empty; subtract 1 from its rounds")
    shares = np.zeros((count, 1 + max(at for at, _ in found)))
    for (at, client), value in found.items():
        shares[client, at] = value
    named = {number: name for name, number in numbers.items()}
    return tuple(Logged(named.get(client, str(client)), tuple(own.tolist())) for client, own in enumerate(shares))


def _rows(name: str, source: str | Path, file: Traversable) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a file with their line numbers; all must be as wide as the header."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()  # Excel writes a mark
    except (OSError, UnicodeDecodeError) as error:
        raise MissingDataError(f"{name}: cannot read {source}: {error}") from None
    width = 0
    for number, line in enumerate(lines, start=1):
        if line.startswith("#") or not line.strip():
            continue
        try:
            cells = [cell.strip() for cell in next(csv.reader([line]))]
        except csv.Error as error:
            raise MissingDataError(f"{name}: {source}: line {number}: {error}") from None
        width = width or len(cells)
        if len(cells) != width:
            raise MissingDataError(f"{name}: {source}: expected {width} cells in line {number}, got {len(cells)}")
        yield number, cells


@cache
def _normal_behind(mean: float, stdev: float, least: float) -> tuple[float, float]:
    """Return center and width of the normal law that has this mean and deviation after clipping to [least, 1]."""
    if stdev == 0:
        return mean, 0.0

    def center_at(width: float) -> float:  # A wider law needs a center further outside for the same mean.
        return _rising(lambda center: _moments(center, width, least)[0] - mean, -1 - 40 * width, 2 + 40 * width)

    width = math.exp(_rising(lambda log: _moments(center_at(math.exp(log)), math.exp(log), least)[1] - stdev, -12, 6))
    return center_at(width), width


def _rising(f: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of a rising function, by bisection."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if f(middle) > 0 else (middle, high)
    return (low + high) / 2


def _moments(center: float, width: float, least: float) -> tuple[float, float]:
    """Return mean and standard deviation of a normal number that is clipped to [least, 1]."""
    standard = NormalDist()
    a, b = (least - center) / width, (1 - center) / width
    below, above = standard.cdf(a), standard.cdf(-b)
    inner = standard.cdf(b) - below
    pa, pb = standard.pdf(a), standard.pdf(b)
    mean = below * least + above + inner * center + width * (pa - pb)
    square = below * least**2 + above
    square += inner * (center**2 + width**2) + 2 * center * width * (pa - pb) + width**2 * (a * pa - b * pb)
    return mean, math.sqrt(max(square - mean**2, 0.0))
