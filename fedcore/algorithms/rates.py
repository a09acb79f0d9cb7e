"""Learning rates as functions of the round, including those of the papers' theorems.

Rounds count from 0. ``PerCohort`` also needs the number of clients; its method ``over`` returns a function of the
round. A rate that changes with each local step has a method ``of_step(round, step)`` (``InverseStep``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import isclass
from typing import Any, ClassVar, Protocol, Self, SupportsFloat

from fedcore.arrays import ieee
from fedcore.errors import RangeError
from fedcore.validation import Registry, check_integer, check_number, describe_interval, in_interval

POSITIVE = "(0, inf)"


class Rate(Protocol):
    """A function from a round, counted from 0, to a positive number.

    A rate that depends on the length of the run, such as ``Horizon``, sets ``of_whole_run = True``. A run with such a
    rate cannot be extended.
    """

    def __call__(self, round: int) -> float:
        """Return the rate of a round."""
        ...


@dataclass(frozen=True)
class Constant:
    """The rate ``value`` in every round.

    >>> Constant(0.1)(7)
    0.1
    """

    value: float

    def __post_init__(self) -> None:
        check_number("rate", self.value, POSITIVE)

    def __call__(self, round: int) -> float:
        """Return the rate of a round."""
        return self.value


@dataclass(frozen=True)
class Exponential:
    """The rate ``initial * decay**round``; the MimiC paper's experiments use 0.01 * 0.95^t.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates",
    2023, Sec. 7.

    >>> Exponential(0.01, 0.5)(2)
    0.0025
    """

    initial: float
    decay: float

    def __post_init__(self) -> None:
        check_number("initial", self.initial, POSITIVE)
        check_number("decay", self.decay, "(0, 1]")

    def __call__(self, round: int) -> float:
        """Return the rate of a round."""
        return self.initial * self.decay**round


@dataclass(frozen=True)
class Horizon:
    """The constant rate eta = (1 / L) sqrt(K / T) for a run of known length.

    Args:
        L: the smoothness of the clients' objectives.
        K: the number of clients drawn in each round; in a network, all p nodes (Theorem 3.4).
        T: the number of local steps in the whole run.

    For long runs this rate is below ``bench.papers.theory.local_sgd.largest_rate``, up to which the paper derives a
    bound.

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
        check_number("L", self.L, POSITIVE)
        check_integer("K", self.K, 1)
        check_integer("T", self.T, 1)

    def __call__(self, round: int) -> float:
        """Return the rate of a round."""
        return math.sqrt(self.K / self.T) / self.L


class _Restarting:
    """Base class of rates that restart in given rounds."""

    restarts: Sequence[int]

    def _check_restarts(self) -> None:
        rounds = [self.restarts] if isinstance(self.restarts, str) else self.restarts  # a string is not a list
        object.__setattr__(self, "restarts", tuple(sorted({check_integer("restarts", round, 0) for round in rounds})))

    def _rounds(self, round: int) -> int:
        """Return the number of rounds since the last restart."""
        return round - max((restart for restart in self.restarts if restart <= round), default=0)

    def restarted(self, round: int) -> Self:
        """Return the rate with one more restart."""
        return replace(self, restarts=(*self.restarts, round))  # type: ignore[type-var]


@dataclass(frozen=True)
class InverseRound(_Restarting):
    """The rate eta_t = 16 E / (mu w) / ((t - t0) E + gamma), where t0 is the round of the last restart.

    Args:
        mu: the strong convexity of the clients' objectives.
        E: the local steps of a complete round.
        work: w = E[sum_k p_t^k s_t^k], the expected sum of coefficients times steps. With scheme C, w = E if every
            client does some work. With scheme B, w = sum_k p^k E[s^k].
        gamma: > 0, the constant of the bound (M D + V) / (t E + gamma), which grows with E L / (mu w). With a larger
            gamma the rate decays later. The theorem's value is not available to us.
        restarts: the rounds in which the rate restarts (Corollary 3.2.1), as for ``Staircase``.

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
            check_number(name, getattr(self, name), POSITIVE)
        check_integer("E", self.E, 1)
        self._check_restarts()

    def __call__(self, round: int) -> float:
        """Return the rate of a round."""
        return 16 * self.E / (self.mu * self.work) / (self._rounds(round) * self.E + self.gamma)


@dataclass(frozen=True)
class InverseStep:
    """The rate eta_t = 4 / (mu (t + a)), a = alpha E + 4, where t counts local steps.

    The rate changes within a round (``of_step``). A call returns the rate of the round's first step, t = round * E.
    Adapters reject this rate, because their messages hold one rate for each round.

    Args:
        mu: the Polyak-Lojasiewicz constant.
        alpha: a number > 0; the theorem requires alpha < ``largest_alpha``.
        E: the local steps of a round. The theorem's minimum of E (eq. 21) is not available to us.

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
        check_number("mu", self.mu, POSITIVE)
        check_number("alpha", self.alpha, POSITIVE)
        check_integer("E", self.E, 1)

    def __call__(self, round: int) -> float:
        """Return the rate of a round's first step."""
        return self.of_step(round, 0)

    def of_step(self, round: int, step: int) -> float:
        """Return the rate of a step of a round; both count from 0."""
        return 4 / (self.mu * (round * self.E + step + self.alpha * self.E + 4))


@dataclass(frozen=True)
class PerCohort:
    """The server rate gamma_t = c |S_t| / (t + beta), a function of the round and the number of clients in the cohort.

    ``over`` returns a function of the round. With a participation pattern, which determines each cohort in advance, use
    ``Server(..., server_lr=rule.over(lambda t: len(pattern.active(t))))``. An empty cohort counts as one client, since
    rates must be positive.

    Args:
        c: the rate for each client. The maximum in the analysis (its eq. 54) is not available to us.
        beta: > 0. With a larger beta the rate decays later.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates",
    2023, the decaying server rate of its convergence analysis.

    >>> PerCohort(c=0.5, beta=5.0)(5, 4)
    0.2
    """

    c: float
    beta: float

    def __post_init__(self) -> None:
        check_number("c", self.c, POSITIVE)
        check_number("beta", self.beta, POSITIVE)

    def __call__(self, round: int, S: int) -> float:
        """Return the rate of a round with S clients."""
        return self.c * max(S, 1) / (round + self.beta)

    def over(self, sizes: Callable[[int], int]) -> Rate:
        """Return the rate whose number of clients in a round is ``sizes(round)``."""
        return lambda round: self(round, sizes(round))


@dataclass(frozen=True)
class Staircase(_Restarting):
    """The rate eta_0 / t, or eta_0 / (t - t0) after a shift of the objective at t0.

    The paper counts rounds from 1, so the rate of round 0 is eta_0 / 1. A shift at t0 affects the paper's round t0 + 1,
    which is round t0 here.

    Args:
        initial: eta_0.
        restarts: the rounds in which the rate is eta_0 again, for example those in which a ``Schedule`` adds clients.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021: the rate
    eta_0 / t of its experiments, and the restart of Sec. 4.2.

    >>> rate = Staircase(1.0, restarts=[3])
    >>> [round(rate(t), 2) for t in range(6)]
    [1.0, 0.5, 0.33, 1.0, 0.5, 0.33]
    """

    initial: float
    restarts: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_number("initial", self.initial, POSITIVE)
        self._check_restarts()

    def __call__(self, round: int) -> float:
        """Return the rate of a round."""
        return self.initial / (1 + self._rounds(round))


REGISTRY: Registry[type[Any]] = Registry(
    "rate",
    {rate.__name__: rate for rate in (Constant, Exponential, Horizon, InverseRound, InverseStep, PerCohort, Staircase)},
    expected="a class whose objects are called with a round",
    fits=lambda row: isclass(row) and any("__call__" in vars(kind) for kind in row.__mro__),
    group="fedcore.rates",
)
"""The rates by name."""


@ieee
def as_rate(rate: float | Rate) -> Rate:
    """Return a positive number as a constant rate, and a function of the round unchanged; else raise RangeError."""
    if isinstance(rate, PerCohort):
        raise RangeError(f"rate={rate!r}: needs the cohorts' sizes; call its method over()")
    if callable(rate):
        return rate
    if isinstance(rate, bool) or not isinstance(rate, SupportsFloat):
        raise RangeError(f"rate={rate!r}: must be {describe_interval(POSITIVE)} or a function of the round")
    return Constant(float(rate))


def rate_at(rate: Rate, round: int) -> float:
    """Return the rate of a round; raise RangeError if it is not finite and > 0, for example after too much decay."""
    return float(rate.value) if type(rate) is Constant else _checked_at(rate, round)  # a Constant checks its value


@ieee
def _checked_at(rate: Rate, round: int) -> float:
    return _check_positive(float(rate(round)), f"round {round}")


@dataclass(frozen=True)
class StepRates:
    """The rates of a round's steps, counted from 0. A call raises RangeError for a rate that is not finite and > 0."""

    rate: Any
    round: int

    @ieee
    def __call__(self, step: int) -> float:
        """Return the rate of a step."""
        return _check_positive(float(self.rate.of_step(self.round, step)), f"step {step} of round {self.round}")


def _check_positive(value: float, where: str) -> float:
    if not in_interval(value, POSITIVE):
        raise RangeError(f"rate={value!r}: must be {describe_interval(POSITIVE)} in {where}")
    return value


def rate_of_steps(rate: Rate, round: int) -> StepRates | None:
    """Return the rates of a round's steps if they differ, else None."""
    return StepRates(rate, round) if hasattr(rate, "of_step") else None
