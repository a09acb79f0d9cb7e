"""The contract of a rate, and its value in a round."""

from dataclasses import dataclass
from typing import Any, Protocol

from fedcore.arguments import due_in, inside
from fedcore.errors import RangeError
from fedcore.float_mode import ieee
from fedcore.rates.constant import Constant

POSITIVE = "(0, inf)"


class Rate(Protocol):
    """A rate is whatever maps a round (counted from 0) to a positive number.

    One whose options say how long the run is, as ``Horizon``'s do, has ``of_whole_run = True``: a run that uses it is
    not made longer.
    """

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        ...


def rate_at(rate: Rate, round: int) -> float:
    """The rate of that round.

    Raises:
        RangeError: it is no finite number > 0, as at the end of a long decay.
    """
    return float(rate.value) if type(rate) is Constant else _checked_at(rate, round)  # which was checked when made


@ieee
def _checked_at(rate: Rate, round: int) -> float:
    value = float(rate(round))
    if not inside(value, POSITIVE):
        raise RangeError(f"rate: expected {due_in(POSITIVE)} in round {round}, got {value!r}")
    return value


@dataclass(frozen=True)
class StepRates:
    """The rates of a round's steps, counted from 0.

    Raises (when called):
        RangeError: the rate of the step is no finite number > 0.
    """

    rate: Any
    round: int

    @ieee
    def __call__(self, step: int) -> float:
        """The rate of that step."""
        value = float(self.rate.of_step(self.round, step))
        if not inside(value, POSITIVE):
            raise RangeError(f"rate: expected {due_in(POSITIVE)} in step {step} of round {self.round}, got {value!r}")
        return value


def rate_of_steps(rate: Rate, round: int) -> StepRates | None:
    """The rates of a round's steps where they differ; None where all have the round's."""
    return StepRates(rate, round) if hasattr(rate, "of_step") else None
