"""Learning rates as functions of the round, and the rates of the papers' theorems.

Rounds count from 0. Most rates are functions of the round. ``PerCohort`` also needs the number of clients, and
becomes a rate by ``over``. A rate with a method ``of_step(round, step)`` changes from step to step (``InverseStep``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import isclass
from typing import Any, ClassVar, Protocol, Self, SupportsFloat

from fedcore.arguments import due_in, inside, real, whole
from fedcore.arrays import ieee
from fedcore.errors import RangeError
from fedcore.registries import Registry

POSITIVE = "(0, inf)"


class Rate(Protocol):
    """A function from a round, counted from 0, to a positive number.

    A rate that depends on the length of the run, such as ``Horizon``, has ``of_whole_run = True``: a run with it is not
    made longer.
    """

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        ...


@dataclass(frozen=True)
class Constant:
    """``value`` in every round.

    >>> Constant(0.1)(7)
    0.1
    """

    value: float

    def __post_init__(self) -> None:
        real("rate", self.value, POSITIVE)

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        return self.value


@dataclass(frozen=True)
class Exponential:
    """``initial * decay**round``, the schedule of the MimiC paper's experiments (there 0.01 * 0.95^t).

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates",
    2023, Sec. 7.

    >>> Exponential(0.01, 0.5)(2)
    0.0025
    """

    initial: float
    decay: float

    def __post_init__(self) -> None:
        real("initial", self.initial, POSITIVE)
        real("decay", self.decay, "(0, 1]")

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        return self.initial * self.decay**round


@dataclass(frozen=True)
class Horizon:
    """eta = (1 / L) sqrt(K / T), the same in every round of a run of known length.

    Args:
        L: the smoothness of the clients' objectives.
        K: the clients drawn a round; all p nodes of a network (Theorem 3.4).
        T: the local steps of the whole run, all rounds together.

    The rate of a long run is below ``bench.papers.theory.local_sgd.largest_rate``, up to which a bound is derived.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Theorem 3.3 (local SGD, general nonconvex objectives).

    >>> Horizon(L=2.0, K=4, T=400)(0)
    0.05
    """

    of_whole_run: ClassVar[bool] = True

    L: float
    K: int
    T: int

    def __post_init__(self) -> None:
        real("L", self.L, POSITIVE)
        whole("K", self.K, 1)
        whole("T", self.T, 1)

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        return math.sqrt(self.K / self.T) / self.L


class _Restarting:
    """A rate that starts again in given rounds."""

    restarts: Sequence[int]

    def _check_restarts(self) -> None:
        given = [self.restarts] if isinstance(self.restarts, str) else self.restarts  # a string's letters are no rounds
        object.__setattr__(self, "restarts", tuple(sorted({whole("restarts", round, 0) for round in given})))

    def _rounds(self, round: int) -> int:
        """The number of rounds since the last restart."""
        return round - max((restart for restart in self.restarts if restart <= round), default=0)

    def restarted(self, round: int) -> Self:
        """Return the same rate, which also starts again in that round."""
        return replace(self, restarts=(*self.restarts, round))  # type: ignore[type-var]


@dataclass(frozen=True)
class InverseRound(_Restarting):
    """eta_t = 16 E / (mu w) / ((t - t0) E + gamma), t counted from the last shift of the objective.

    Args:
        mu: the strong convexity of the clients' objectives.
        E: the local steps of a complete round.
        work: w = E[sum_k p_t^k s_t^k], the mean of a round's coefficients times its steps: E for scheme C if no client
            is left without work, sum_k p^k E[s^k] for scheme B.
        gamma: > 0, the constant of the bound (M D + V) / (t E + gamma), which grows with E L / (mu w). The rate stays
            near its first value the longer, the larger gamma is. The theorem's value is not offered.
        restarts: the rounds in which it starts again (Corollary 3.2.1), as for ``Staircase``.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021, Theorem 3.1.

    >>> rate = InverseRound(mu=0.5, E=4, work=4.0, gamma=320.0, restarts=[2])
    >>> [round(rate(t), 4) for t in range(4)]
    [0.1, 0.0988, 0.1, 0.0988]
    """

    mu: float
    E: int
    work: float
    gamma: float
    restarts: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("mu", "work", "gamma"):
            real(name, getattr(self, name), POSITIVE)
        whole("E", self.E, 1)
        self._check_restarts()

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        return 16 * self.E / (self.mu * self.work) / (self._rounds(round) * self.E + self.gamma)


@dataclass(frozen=True)
class InverseStep:
    """eta_t = 4 / (mu (t + a)), a = alpha E + 4, where t counts local steps.

    It changes within a round (``of_step``). As a rate of the round it is that of the round's first step, t = round * E.
    Adapters refuse it, because their messages hold one rate for a round.

    Args:
        mu: the Polyak-Lojasiewicz constant.
        alpha: below ``largest_alpha``, by the theorem.
        E: the local steps of a round. The theorem's least E (eq. 21) is not offered.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Theorem 3.2 (local SGD under the Polyak-Lojasiewicz condition).

    >>> rate = InverseStep(mu=0.5, alpha=3.0, E=4)
    >>> rate(0), rate(1), rate.of_step(0, 4)
    (0.5, 0.4, 0.4)
    """

    mu: float
    alpha: float
    E: int

    def __post_init__(self) -> None:
        real("mu", self.mu, POSITIVE)
        real("alpha", self.alpha, POSITIVE)
        whole("E", self.E, 1)

    def __call__(self, round: int) -> float:
        """The rate of that round's first step."""
        return self.of_step(round, 0)

    def of_step(self, round: int, step: int) -> float:
        """The rate of a round's step, counted from 0."""
        return 4 / (self.mu * (round * self.E + step + self.alpha * self.E + 4))


@dataclass(frozen=True)
class PerCohort:
    """gamma_t = c |S_t| / (t + beta), a server rate that follows the number of clients in the cohort.

    It is a function of the round and the cohort's size; ``over`` makes a rate of it. A participation pattern knows each
    cohort in advance: ``Server(..., server_lr=rule.over(lambda t: len(pattern.active(t))))``. An empty cohort counts as
    one client, since a rate is positive; such a round does not change the model.

    Args:
        c: the rate for each client. The largest that the analysis allows (its eq. 54) is not offered.
        beta: > 0; the rate stays near its first value the longer, the larger beta is.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates",
    2023, the decaying server rate of its convergence analysis.

    >>> PerCohort(c=0.5, beta=5.0)(5, 4)
    0.2
    """

    c: float
    beta: float

    def __post_init__(self) -> None:
        real("c", self.c, POSITIVE)
        real("beta", self.beta, POSITIVE)

    def __call__(self, round: int, S: int) -> float:
        """The rate of a round with S clients."""
        return self.c * max(S, 1) / (round + self.beta)

    def over(self, sizes: Callable[[int], int]) -> Rate:
        """Return the rate whose number of clients in a round is ``sizes(round)``."""
        return lambda round: self(round, sizes(round))


@dataclass(frozen=True)
class Staircase(_Restarting):
    """eta_0 / t, restarted when the objective shifts: eta_0 / (t - t0) after a shift at t0.

    The paper counts rounds from 1, so round 0 has eta_0 / 1. A shift at its t0 has an effect in its round t0 + 1, which
    is round t0 here.

    Args:
        initial: eta_0.
        restarts: the rounds that have eta_0 / 1 again, such as those of a ``Schedule``'s arrivals.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021: the rate
    eta_0 / t of its experiments, and the restart of Sec. 4.2.

    >>> rate = Staircase(1.0, restarts=[3])
    >>> [round(rate(t), 2) for t in range(6)]
    [1.0, 0.5, 0.33, 1.0, 0.5, 0.33]
    """

    initial: float
    restarts: Sequence[int] = ()

    def __post_init__(self) -> None:
        real("initial", self.initial, POSITIVE)
        self._check_restarts()

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        return self.initial / (1 + self._rounds(round))


_RATES: list[type[Any]] = [Constant, Exponential, Horizon, InverseRound, InverseStep, PerCohort, Staircase]
REGISTRY: Registry[type[Any]] = Registry(
    "rate",
    {rate.__name__: rate for rate in _RATES},
    due="a class whose objects are called with a round",
    fits=lambda row: isclass(row) and any("__call__" in vars(kind) for kind in row.__mro__),
    group="fedcore.rates",
)
"""The rates by name, for configurations."""


@ieee
def as_rate(rate: float | Rate) -> Rate:
    """Return a number as the constant rate, a rate as itself.

    Raises:
        RangeError: it is neither.
    """
    if isinstance(rate, PerCohort):
        raise RangeError(f"rate: expected a function of the round, got {rate!r}: give it the cohorts' sizes by over()")
    if callable(rate):
        return rate
    if isinstance(rate, bool) or not isinstance(rate, SupportsFloat):
        raise RangeError(f"rate: expected {due_in(POSITIVE)} or a function of the round, got {rate!r}")
    return Constant(float(rate))


def rate_at(rate: Rate, round: int) -> float:
    """Return the rate of that round.

    Raises:
        RangeError: it is not a finite number > 0, as at the end of a long decay.
    """
    return float(rate.value) if type(rate) is Constant else _checked_at(rate, round)  # a Constant was checked before


@ieee
def _checked_at(rate: Rate, round: int) -> float:
    return _checked(float(rate(round)), f"round {round}")


@dataclass(frozen=True)
class StepRates:
    """The rates of a round's steps, counted from 0. A call raises RangeError if one is not a finite number > 0."""

    rate: Any
    round: int

    @ieee
    def __call__(self, step: int) -> float:
        """The rate of that step."""
        return _checked(float(self.rate.of_step(self.round, step)), f"step {step} of round {self.round}")


def _checked(value: float, where: str) -> float:
    if not inside(value, POSITIVE):
        raise RangeError(f"rate: expected {due_in(POSITIVE)} in {where}, got {value!r}")
    return value


def rate_of_steps(rate: Rate, round: int) -> StepRates | None:
    """Return the rates of a round's steps if they differ, else None."""
    return StepRates(rate, round) if hasattr(rate, "of_step") else None
