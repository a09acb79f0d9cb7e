"""Learning rates as functions of the round, and the rates that the papers' theorems ask for.

Rounds count from 0. Most rates are functions of the round alone; a rule that also needs to know how many clients were
heard (``PerCohort``) becomes one when it is told where to look that up. One with a method ``of_step(round, step)``
changes from step to step (``InverseStep``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, SupportsFloat

from fedcore.errors import RangeError
from fedcore.float_mode import ieee


class Rate(Protocol):
    """A rate is whatever maps a round (counted from 0) to a positive number."""

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
        _positive("rate", self.value)

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        return self.value


@dataclass(frozen=True)
class Exponential:
    """``initial * decay**round``, the schedule of the MimiC paper's experiments (there 0.01 * 0.95^t).

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates",
    2023, Sec. 6.

    >>> Exponential(0.01, 0.5)(2)
    0.0025
    """

    initial: float
    decay: float

    def __post_init__(self) -> None:
        _positive("initial", self.initial)
        if not _is_number(self.decay) or not 0 < self.decay <= 1:
            raise RangeError(f"decay: expected a number in (0, 1], got {self.decay!r}")

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        return self.initial * self.decay**round


@dataclass(frozen=True)
class Staircase:
    """eta_0 / t, which begins anew when the objective shifts: eta_0 / (t - t0) after a shift at t0.

    The paper counts rounds from 1, so round 0 has eta_0 / 1; and what shifts at its t0 shows first in its round
    t0 + 1, which is round t0 here.

    Args:
        initial: eta_0.
        restarts: the rounds that have eta_0 / 1 again, such as those in which a ``Schedule`` has somebody arrive.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021: the rate
    eta_0 / t of its experiments, and the restart of Sec. 4.2.

    >>> rate = Staircase(1.0, restarts=[3])
    >>> [round(rate(t), 2) for t in range(6)]
    [1.0, 0.5, 0.33, 1.0, 0.5, 0.33]
    """

    initial: float
    restarts: Sequence[int] = ()

    def __post_init__(self) -> None:
        _positive("initial", self.initial)
        if isinstance(self.restarts, str) or not all(_is_whole(round) and round >= 0 for round in self.restarts):
            raise RangeError(f"restarts: expected rounds, each an int >= 0, got {self.restarts!r}")
        object.__setattr__(self, "restarts", tuple(sorted(set(self.restarts))))

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        began = max((restart for restart in self.restarts if restart <= round), default=0)
        return self.initial / (round + 1 - began)

    def restarted(self, round: int) -> "Staircase":
        """The same, which also begins anew in that round."""
        return Staircase(self.initial, (*self.restarts, round))


@dataclass(frozen=True)
class Horizon:
    """eta = (1 / L) sqrt(K / T), the same in every round of a run whose length is known.

    Args:
        L: the smoothness of the clients' objectives.
        K: the clients drawn a round.
        T: the local steps of the whole run, all rounds together.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Theorem 3.3 (local SGD, general nonconvex objectives).

    >>> Horizon(L=2.0, K=4, T=400)(0)
    0.05
    """

    L: float
    K: int
    T: int

    def __post_init__(self) -> None:
        _positive("L", self.L)
        _count("K", self.K)
        _count("T", self.T)

    def __call__(self, round: int) -> float:
        """The rate of that round."""
        return math.sqrt(self.K / self.T) / self.L


@dataclass(frozen=True)
class InverseStep:
    """eta_t = 4 / (mu (t + a)), a = alpha E + 4, where t counts local steps.

    It changes within a round (``of_step``). As a rate of the round it is that of the round's first step, t = round * E;
    the adapters of other frameworks, whose messages tell clients one rate a round, refuse it.

    Args:
        mu: the Polyak-Lojasiewicz constant.
        alpha: below ``largest_alpha``, as the theorem asks.
        E: the local steps of a round.

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
        _positive("mu", self.mu)
        _positive("alpha", self.alpha)
        _count("E", self.E)

    def __call__(self, round: int) -> float:
        """The rate of that round's first step."""
        return self.of_step(round, 0)

    def of_step(self, round: int, step: int) -> float:
        """The rate of a round's step, counted from 0."""
        return 4 / (self.mu * (round * self.E + step + self.alpha * self.E + 4))


@dataclass(frozen=True)
class PerCohort:
    """gamma_t = c |S_t| / (t + beta), a server rate that follows the number of clients heard.

    It is a rule of the round and the cohort's size; ``over`` makes a rate of it. A participation pattern knows a
    round's cohort beforehand: ``Server(..., server_lr=rule.over(lambda t: len(pattern.active(t))))``. An empty cohort
    counts as one client, since a rate is positive; the models that such a round leaves alone do not see it.

    Args:
        c: the rate for each client.
        beta: > 0; it sets how long the rate stays near its first value.

    Reference: Sun, Mao, Zhang, "MimiC: Combating Client Dropouts in Federated Learning by Mimicking Central Updates",
    2023, the decaying server rate of its convergence analysis.

    >>> PerCohort(c=0.5, beta=5.0)(5, 4)
    0.2
    """

    c: float
    beta: float

    def __post_init__(self) -> None:
        _positive("c", self.c)
        _positive("beta", self.beta)

    def __call__(self, round: int, S: int) -> float:
        """The rate of a round with S clients."""
        return self.c * max(S, 1) / (round + self.beta)

    def over(self, sizes: Callable[[int], int]) -> Rate:
        """The rate that asks ``sizes`` for the number of clients of a round."""
        return lambda round: self(round, sizes(round))


REGISTRY: dict[str, type[Any]] = {
    "Constant": Constant,
    "Exponential": Exponential,
    "Horizon": Horizon,
    "InverseStep": InverseStep,
    "PerCohort": PerCohort,
    "Staircase": Staircase,
}


@ieee
def largest_alpha(kappa: float, diversity: float, K: int) -> float:
    """What the alpha of ``InverseStep`` must stay below: alpha exp(-2 / alpha) < kappa sqrt(192 lambda (K + 1) / K).

    Args:
        kappa: L / mu, >= 1.
        diversity: lambda, a bound on the weighted gradient diversity, >= 1.
        K: the clients drawn a round.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019,
    Theorem 3.2.

    >>> round(largest_alpha(kappa=1.0, diversity=1.0, K=1), 3)
    21.506
    """
    _at_least_one("kappa", kappa)
    _at_least_one("diversity", diversity)
    _count("K", K)
    bound = kappa * math.sqrt(192 * diversity * (K + 1) / K)
    return _largest(lambda alpha: alpha * math.exp(-2 / alpha) <= bound, bound + 2)  # exp(-x) >= 1 - x


@ieee
def largest_full_gradient_rate(L: float, mu: float, E: int, diversity: float) -> float:
    """The largest eta with eta (L + 4 kappa L E / (mu (1 - mu eta)^(E-1))) <= 1 / lambda.

    With it E full-gradient steps a round contract by exp(-mu eta) a step, as long as the gradient diversity stays
    below lambda (eq. 20).

    Args:
        L: the smoothness of the clients' objectives.
        mu: the Polyak-Lojasiewicz constant, in (0, L]; kappa = L / mu.
        E: the local steps of a round.
        diversity: lambda, a bound on the weighted gradient diversity, >= 1.

    Reference: Haddadpour, Mahdavi, "On the Convergence of Local Descent Methods in Federated Learning", 2019, eq. 19.

    >>> largest_full_gradient_rate(L=1.0, mu=1.0, E=1, diversity=2.0)
    0.1
    """
    _positive("L", L)
    _positive("mu", mu)
    if mu > L:
        raise RangeError(f"mu: expected a number in (0, L] = (0, {L:g}], got {mu!r}")
    _count("E", E)
    _at_least_one("diversity", diversity)

    def allowed(eta: float) -> bool:
        shrunk = (1 - mu * eta) ** (E - 1)  # multiplied by, not divided by: over many steps it underflows
        return eta * (L * shrunk + 4 * (L / mu) * L * E / mu) <= shrunk / diversity

    return _largest(allowed, 1 / (L * diversity))  # the first summand alone allows no more


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
        raise RangeError(f"rate: expected a finite number > 0 or a function of the round, got {rate!r}")
    return Constant(float(rate))


@ieee
def rate_at(rate: Rate, round: int) -> float:
    """The rate of that round.

    Raises:
        RangeError: it is no finite number > 0, as at the end of a long decay.
    """
    value = float(rate(round))
    if not 0 < value < float("inf"):
        raise RangeError(f"rate: expected a finite number > 0 in round {round}, got {value!r}")
    return value


def rate_of_steps(rate: Rate, round: int) -> Callable[[int], float] | None:
    """The rates of a round's steps, counted from 0, where they differ; None where all have the round's.

    What is returned raises RangeError for a step whose rate is no finite number > 0.
    """
    if not hasattr(rate, "of_step"):
        return None
    of_step = rate.of_step

    @ieee
    def checked(step: int) -> float:
        value = float(of_step(round, step))
        if not 0 < value < math.inf:
            raise RangeError(f"rate: expected a finite number > 0 in step {step} of round {round}, got {value!r}")
        return value

    return checked


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(name: str, value: float) -> None:
    if not _is_number(value) or not 0 < value < math.inf:
        raise RangeError(f"{name}: expected a finite number > 0, got {value!r}")


def _at_least_one(name: str, value: float) -> None:
    if not _is_number(value) or not 1 <= value < math.inf:
        raise RangeError(f"{name}: expected a finite number >= 1, got {value!r}")


def _count(name: str, value: int) -> None:
    if not _is_whole(value) or value < 1:
        raise RangeError(f"{name}: expected an int >= 1, got {value!r}")


def _largest(allowed: Callable[[float], bool], high: float) -> float:
    """The largest number in (0, high] that is allowed, where all smaller ones are too: by bisection."""
    low = 0.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low
