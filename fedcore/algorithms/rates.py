"""Learning rates as functions of the round."""

from dataclasses import dataclass
from typing import Protocol, SupportsFloat

from fedcore.errors import RangeError


class Rate(Protocol):
    """A rate is whatever maps a round (counted from 0) to a positive number."""

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        ...


@dataclass(frozen=True)
class Constant:
    """``value`` in every round."""

    value: float

    def __post_init__(self) -> None:
        if not 0 < self.value < float("inf"):
            raise RangeError(f"rate: expected a finite number > 0, got {self.value!r}")

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        return self.value


@dataclass(frozen=True)
class Exponential:
    """``initial * decay**round``, the schedule of the MimiC paper's experiments.

    >>> Exponential(0.01, 0.5)(2)
    0.0025
    """

    initial: float
    decay: float

    def __post_init__(self) -> None:
        Constant(self.initial)
        if not 0 < self.decay <= 1:
            raise RangeError(f"decay: expected a number in (0, 1], got {self.decay!r}")

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        return self.initial * self.decay**round


def as_rate(rate: float | Rate) -> Rate:
    """A number as the constant rate; a rate as itself.

    Raises:
        RangeError: it is neither.
    """
    if callable(rate):
        return rate
    if isinstance(rate, bool) or not isinstance(rate, SupportsFloat):
        raise RangeError(f"rate: expected a finite number > 0 or a function of the round, got {rate!r}")
    return Constant(float(rate))


def rate_at(rate: Rate, round: int) -> float:
    """The rate of that round.

    Raises:
        RangeError: it is no finite number > 0, as at the end of a long decay.
    """
    value = float(rate(round))
    if not 0 < value < float("inf"):
        raise RangeError(f"rate: expected a finite number > 0 in round {round}, got {value!r}")
    return value
