"""Learning rates as functions of the round, and the rates that the papers' theorems ask for.

Rounds count from 0. Most rates are functions of the round alone; a rule that also needs to know how many clients were
heard (``PerCohort``) becomes one when it is told where to look that up. One with a method ``of_step(round, step)``
changes from step to step (``InverseStep``).
"""

from inspect import isclass
from typing import Any, SupportsFloat

from fedcore.arguments import due_in
from fedcore.errors import RangeError
from fedcore.float_mode import ieee
from fedcore.rates.constant import Constant
from fedcore.rates.exponential import Exponential
from fedcore.rates.horizon import Horizon
from fedcore.rates.inverse_round import InverseRound
from fedcore.rates.inverse_step import InverseStep
from fedcore.rates.per_cohort import PerCohort
from fedcore.rates.rate import Rate, rate_at, rate_of_steps
from fedcore.rates.staircase import Staircase
from fedcore.registries import Registry

_ROWS: dict[str, type[Any]] = {
    "Constant": Constant,
    "Exponential": Exponential,
    "Horizon": Horizon,
    "InverseRound": InverseRound,
    "InverseStep": InverseStep,
    "PerCohort": PerCohort,
    "Staircase": Staircase,
}
REGISTRY: Registry[type[Any]] = Registry(
    "rate",
    _ROWS,
    due="a class whose objects are called with a round",
    fits=lambda row: isclass(row) and any("__call__" in vars(kind) for kind in row.__mro__),
    group="fedcore.rates",
)
"""The rates by name, for configurations."""


@ieee
def as_rate(rate: float | Rate) -> Rate:
    """A number as the constant rate; a rate as itself.

    Raises:
        RangeError: it is neither.
    """
    if isinstance(rate, PerCohort):
        raise RangeError(f"rate: expected a function of the round alone, got {rate!r}: say over which cohorts (over)")
    if callable(rate):
        return rate
    if isinstance(rate, bool) or not isinstance(rate, SupportsFloat):
        raise RangeError(f"rate: expected {due_in('(0, inf)')} or a function of the round, got {rate!r}")
    return Constant(float(rate))


__all__ = [
    "REGISTRY",
    "Constant",
    "Exponential",
    "Horizon",
    "InverseRound",
    "InverseStep",
    "PerCohort",
    "Rate",
    "Staircase",
    "as_rate",
    "rate_at",
    "rate_of_steps",
]
